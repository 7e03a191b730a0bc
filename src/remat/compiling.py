"""The menu of a block that the compiler runs: a few saved sets, sought by the planner on its joint graph,
each compiled, compared with the block as it is, and measured.

A saved set costs a compilation, so that there are at most four per kind of block: those from which a mixture
over the layers comes closest to every size between them. Where tensors may wait on the host, what the link
carries behind compute does not count, and each saved set is also measured with some or all of it sent away:
that needs no other compiled code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from remat._torch_private import compiler_errors, has_compiler
from remat.check.bench import Bench, bench
from remat.check.regions import GradientGap, gradient_gap, gradients_of, precise_gradients
from remat.errors import CaptureError
from remat.hosting import Hosting, Settling
from remat.planner.menu import SMALLEST_SENT, finish, recipes
from remat.records import Entry, Kind, Mode, Recipe, RegionCall, RegionGraph, Role
from remat.run.checkpoint import Options, run_checkpointed
from remat.run.compiled import PUBLIC, CompiledBlock, block_for, probe, saved_bytes
from remat.run.install import installed_region
from remat.run.outgoing import outgoing
from remat.run.region import PlannedRegion, Variant
from remat.trace.capture import entry_copies
from remat.trace.fusion import compiled_share
from remat.trace.joint import Joint, price_joint
from remat.trace.survey import Species, with_shared
from remat.units import format_bytes, format_seconds

__all__ = ["compile_hint", "compiled_kind"]

Progress = Callable[[str], None]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]
MakeEntry = Callable[..., Entry]

_WORTH_A_HINT = 0.05  # of the step's seconds, that compiling is predicted to save
_FORWARDS = 3  # that forward and backward of a region take together
_PADDING, _PADDING_BYTES = 0.05, 4096  # by which compiled code may hold more, or less, than it was told to
_VARIANTS = 4  # saved sets that are compiled for one kind of block
_MADE_INSIDE = (Role.INTERNAL, Role.OUTPUT)
_LEVELS = 12  # shares of the joint graph's saved bytes that a saved set is sought for
_WINDOWS = (0.5, 1.0, 1.5, 2.0, 3.0)  # of what the link carries behind one block, sent away by one
_ON_ITS_WAY = 0.1  # of the bytes on the host, as they weigh on the device on average
_NOTHING_GAINED = 0.02  # of the largest saved set's weight: a slower set must be lighter by more
_SMALL = 0.05  # of the bytes that one block sends


def compiled_kind(
    species: Species,
    inputs: Inputs,
    device: torch.device,
    backend: str,
    progress: Progress,
    make_entry: MakeEntry,
    most: int | None = None,
    host: Hosting | None = None,
) -> Kind:
    """The kind with its compiled entries, `most` saved sets, measured. CaptureError says why it has none."""
    example, hidden = species.example, 0
    progress(f"tracing {example.name} for the compiler")
    if backend.startswith(PUBLIC):
        joint = _captured(species)
        candidates = public_sets(joint.graph)
    else:
        joint = _joint(species, inputs, device, backend)
        hidden = behind_compute(joint.graph, host)
        candidates = chosen_sets(joint, most, hidden)
    plain = _Plain.measure(species, inputs, device)
    found: list[_Measured] = []
    problems: list[str] = []
    for number, recipe in enumerate(candidates, start=1):
        size = format_bytes(recipe.resident_bytes)
        progress(f"compiling {example.name}, saved set {number} of {len(candidates)} ({size})")
        block = block_for(species.signature, joint.graph, recipe, backend)
        try:
            found.append(_measure(species, inputs, device, joint, recipe, block, plain, found))
        except CaptureError as error:
            problems.append(str(error))
    if not found:
        raise CaptureError(problems[0])
    kind = _kind(species, joint, backend, found, plain, device, problems, make_entry)
    if host is None or not hidden:
        return kind
    progress(f"measuring {example.name} with saved tensors on the host")
    return _with_offload(kind, species, inputs, device, host, hidden, found, make_entry)


def _captured(species: Species) -> Joint:
    """The eager graph in the place of the joint one, which only a partitioner of our own can see."""
    if species.graph is None:
        raise CaptureError(species.note or "it cannot be captured")
    return Joint(species.graph, (), (), (0.0,) * len(species.graph.storages))


def public_sets(graph: RegionGraph) -> tuple[Recipe, ...]:
    """What selective checkpointing can be told: products and attention, attention alone, nothing."""
    products = {op.name for op in graph.ops if op.flops}
    attention = {name for name in products if "attention" in name}
    sets = dict.fromkeys((frozenset(products), frozenset(attention), frozenset[str]()))
    return tuple(_public_set(graph, names) for names in sets)


def _public_set(graph: RegionGraph, names: frozenset[str]) -> Recipe:
    kept = {
        graph.values[value].storage
        for op in graph.ops
        if op.name in names
        for value in op.outputs
        if value >= 0 and graph.storages[graph.values[value].storage].role in _MADE_INSIDE
    }
    kept |= {i for i, storage in enumerate(graph.storages) if storage.role is Role.INPUT}
    again = tuple(i for i, op in enumerate(graph.ops) if op.name not in names)
    return Recipe(
        kept=tuple(sorted(kept)),
        dropped=(),
        replayed=again,
        resident_bytes=sum(graph.storages[storage].charge_bytes for storage in kept),
        replay_seconds=sum(graph.ops[i].seconds for i in again),
    )


def _joint(species: Species, inputs: Inputs, device: torch.device, backend: str) -> Joint:
    example = species.example
    args, kwargs = entry_copies(*inputs)
    joint = probe(example.module, example.forward, args, kwargs, backend)
    if len(joint.graph.outputs) != len(example.outputs):  # which is which is not known: each is counted
        joint = replace(joint, graph=replace(joint.graph, outputs=()))
    joint = replace(joint, graph=with_shared(joint.graph, example.shared))
    return price_joint(joint, device)


# ------------------------------------------------------------------------------------------- which sets


def chosen_sets(joint: Joint, most: int | None = None, hidden_bytes: int = 0) -> tuple[Recipe, ...]:
    """The saved sets to compile, from most to least bytes: corners of the lower hull of bytes and seconds.

    Layers may differ in their saved set, so that every point on a line between two sets can be had: what lies
    above such a line is of no use. `hidden_bytes` of each can wait on the host for nothing.
    """
    levels = [level / _LEVELS for level in range(_LEVELS, -1, -1)]
    sought = recipes(joint.graph, levels=levels, keep_seconds=joint.keep_seconds)
    found = tuple(dict.fromkeys(_whole(joint.graph, recipe) for recipe in sought))
    if not found:  # nothing can be computed again, or nothing needs to be
        return (
            finish(joint.graph, {joint.graph.values[saved.value].storage for saved in joint.graph.saved}),
        )
    points = sorted(
        (_weight(recipe.resident_bytes, hidden_bytes), set_seconds(joint, recipe), i)
        for i, recipe in enumerate(found)
    )
    hull: list[tuple[int, float, int]] = []
    for point in points:
        while len(hull) >= 2 and _above(hull[-2], hull[-1], point):
            hull.pop()
        if not hull or point[1] < hull[-1][1]:
            hull.append(point)
    while hidden_bytes and len(hull) > 2 and hull[1][0] - hull[0][0] < _NOTHING_GAINED * hull[-1][0]:
        hull.pop(0)
    while len(hull) > (most or _VARIANTS):
        hull.pop(min(range(1, len(hull) - 1), key=lambda i: _lost(hull[i - 1], hull[i], hull[i + 1])))
    return tuple(found[point[2]] for point in reversed(hull))


def _weight(resident_bytes: int, hidden_bytes: int) -> int:
    """What a saved set weighs where so much of it can be on the host: that is on the device only for the two
    blocks that are at work."""
    moved = min(resident_bytes, hidden_bytes)
    return resident_bytes - moved + int(_ON_ITS_WAY * moved)


def _whole(graph: RegionGraph, recipe: Recipe) -> Recipe:
    """An operation is saved or computed again as a whole: with one of its results all that
    anything wants are kept."""
    kept = set(recipe.kept)
    makers = {v.producer for v in graph.values if v.storage in kept and v.producer is not None}
    makers = {maker for maker in makers if not graph.ops[maker].view}
    return finish(
        graph, kept | {graph.values[v].storage for maker in makers for v in graph.ops[maker].outputs}
    )


def set_seconds(joint: Joint, recipe: Recipe) -> float:
    """What a saved set is estimated to cost: its replays, and what keeping costs beside the bytes."""
    return recipe.replay_seconds + sum(joint.keep_seconds[storage] for storage in recipe.kept)


def _above(a: tuple[int, float, int], b: tuple[int, float, int], c: tuple[int, float, int]) -> bool:
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


def _lost(a: tuple[int, float, int], b: tuple[int, float, int], c: tuple[int, float, int]) -> float:
    """Twice the area between the hull with b and without it."""
    return abs((b[0] - a[0]) * (c[1] - a[1]) - (c[0] - a[0]) * (b[1] - a[1]))


# ------------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class _Plain:
    """The block as it is: kept, recomputed as a whole, and what it computes."""

    keep: Bench
    full: Bench
    gradients: list[torch.Tensor]

    @classmethod
    def measure(cls, species: Species, inputs: Inputs, device: torch.device) -> _Plain:
        example = species.example
        modules = (example.module,)

        def full(*args: Any, **kwargs: Any) -> Any:
            return run_checkpointed(example.forward, args, kwargs, Options(name=example.name), modules)

        bench(example.forward, inputs, modules, device)  # warm: kernels are loaded, workspaces made
        return cls(
            keep=bench(example.forward, inputs, modules, device),
            full=bench(full, inputs, modules, device),
            gradients=gradients_of(example.forward, inputs, modules),
        )


@dataclass(frozen=True)
class _Measured:
    recipe: Recipe
    bench: Bench
    compile_seconds: float
    gap: GradientGap  # to the first set's gradients where the block is random, else to the plain block's
    gradients: list[torch.Tensor]
    held_bytes: int


def _measure(
    species: Species,
    inputs: Inputs,
    device: torch.device,
    joint: Joint,
    recipe: Recipe,
    block: CompiledBlock,
    plain: _Plain,
    before: Sequence[_Measured],
) -> _Measured:
    example = species.example
    modules = (example.module,)

    def call(*args: Any, **kwargs: Any) -> Any:
        return block(example.module, example.forward, args, kwargs)

    start = time.perf_counter()
    with _compiling():
        gradients = gradients_of(call, inputs, modules)
    seconds = time.perf_counter() - start
    if before:
        reference = before[0].gradients
    else:
        reference = gradients if joint.random else plain.gradients

    def precise() -> list[torch.Tensor] | None:
        return precise_gradients(example.module, example.forward, inputs, reference)

    gap = gradient_gap(gradients, reference, None if joint.random else precise)
    if not gap.ok:
        raise CaptureError(f"its compiled gradients are wrong: {gap}")
    held = _held(call, inputs, example.module)
    measured = bench(call, inputs, modules, device)
    return _Measured(recipe, measured, seconds, gap, [] if before else gradients, held)


@contextmanager
def _compiling() -> Any:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if not isinstance(error, compiler_errors()):
            raise
        raise CaptureError(f"the compiler fails: {str(error).splitlines()[0][:200]}") from error


def _held(call: Callable[..., Any], inputs: Inputs, module: torch.nn.Module) -> int:
    """Bytes that the compiled graph really holds."""
    args, kwargs = entry_copies(*inputs)
    with torch.enable_grad():
        output = call(*args, **kwargs)
    held = saved_bytes(module, (args, kwargs), output)
    if held is None:
        raise CaptureError("the compiled code did not run")
    return held


def internal_bytes(graph: RegionGraph, recipe: Recipe) -> int:
    """What a saved set holds beside inputs and parameters. An output counts if backward reads it."""
    return sum(graph.storages[s].nbytes for s in recipe.kept if graph.storages[s].role in _MADE_INSIDE)


# --------------------------------------------------------------------------------------------- the kind


def _kind(
    species: Species,
    joint: Joint,
    backend: str,
    found: list[_Measured],
    plain: _Plain,
    device: torch.device,
    problems: list[str],
    make_entry: MakeEntry,
) -> Kind:
    graph, places = joint.graph, len(species.example.inputs)
    seconds = _seconds(joint, found, plain, device)
    fastest = min(bench.seconds for bench in (plain.keep, *(one.bench for one in found)))
    forward = min(graph.forward_seconds, fastest / 2)
    entries = [
        make_entry(Mode.KEEP, plain.keep, seconds[0], species.graph, places),
        make_entry(Mode.FULL, plain.full, seconds[1], None, places),
    ]
    for one, extra in zip(found, seconds[2:], strict=True):
        entry = make_entry(Mode.COMPILED, one.bench, extra, graph, places, one.recipe)
        entries.append(replace(entry, gradient_gap=one.gap.worst))
    return Kind(
        signature=species.signature,
        menu=_sorted(entries),
        saved_bytes=entries[0].resident_bytes,
        forward_seconds=forward,
        backward_seconds=fastest - forward,
        graph=graph,
        note=_note(graph, found, plain.keep, problems, device),
        compiler=backend,
    )


# ------------------------------------------------------------------------------------------- on the host


def behind_compute(graph: RegionGraph, host: Hosting | None) -> int:
    """What one block sends while the next one computes forward; it comes back behind backward, which takes
    longer."""
    if host is None:
        return 0
    forward_seconds = graph.forward_seconds
    return int(forward_seconds * host.rates.d2h_bytes_per_second)


def moving(graph: RegionGraph, recipe: Recipe, hidden_bytes: int) -> tuple[Recipe, ...]:
    """The same saved set with about so much of it on the host, half as much, up to three times as much; and
    of a small one everything. What is too much for every block is not for a few among many."""
    sizes = {s: graph.storages[s].charge_bytes for s in recipe.kept}
    worth = [s for s in recipe.kept if sizes[s] > SMALLEST_SENT * sum(sizes.values())]
    worth.sort(key=lambda s: -sizes[s])
    found: dict[Recipe, None] = {}
    for window in _WINDOWS:
        room, sent = int(window * hidden_bytes), []
        for storage in worth:
            if sizes[storage] <= room:
                sent.append(storage)
                room -= sizes[storage]
        found[finish(graph, recipe.kept, sent)] = None
    return tuple(one for one in found if one.offloaded)


def _with_offload(
    kind: Kind,
    species: Species,
    inputs: Inputs,
    device: torch.device,
    host: Hosting,
    hidden: int,
    found: Sequence[_Measured],
    make_entry: MakeEntry,
) -> Kind:
    """The kind with each of its saved sets on the host in part. Sending tensors and having them back is work
    for the host, too, which takes time where the device is done before it."""
    assert kind.graph is not None
    places, entries, problem = len(species.example.inputs), list(kind.menu), ""
    staying = {one.recipe: one.bench for one in found}
    for entry in kind.menu:
        if entry.mode is not Mode.COMPILED or entry.recipe is None:
            continue
        stays, timed = staying[entry.recipe], device.type == "cuda"
        for wanted in moving(kind.graph, entry.recipe, hidden):
            for recipe in _attempts(kind.graph, wanted):
                try:
                    measured = _bench_moving(kind, species, inputs, device, host, recipe, timed=timed)
                except CaptureError as error:
                    problem = problem or str(error)
                    continue
                extra = entry.extra_seconds
                if timed:
                    extra += max(measured.host_seconds - stays.seconds, 0.0)
                made = make_entry(Mode.COMPILED, measured, extra, kind.graph, places, recipe)
                entries.append(replace(made, gradient_gap=entry.gradient_gap))
                break
    note = f"{kind.note}; not all of it can wait on the host: {problem}" if problem else kind.note
    return replace(kind, menu=_sorted(entries), note=note)


def _attempts(graph: RegionGraph, recipe: Recipe) -> Iterator[Recipe]:
    """The recipe; if the graph holds other bytes than it says, the same without its small tensors, such as
    attention's statistics, whose layout is the kernel's own."""
    yield recipe
    large = [s for s in recipe.offloaded if graph.storages[s].nbytes > _SMALL * recipe.host_bytes]
    if 0 < len(large) < len(recipe.offloaded):
        yield finish(graph, recipe.kept, large)


def _bench_moving(
    kind: Kind,
    species: Species,
    inputs: Inputs,
    device: torch.device,
    host: Hosting,
    recipe: Recipe,
    *,
    timed: bool,
) -> Bench:
    """Bytes of a block whose sent tensors have left the device when its forward has returned. If `timed`, the
    host's seconds count; the device's do not: alone, a block has nothing to hide copies behind.
    CaptureError: it is not as planned."""
    assert kind.graph is not None
    example = species.example
    variant = Variant(
        Mode.COMPILED,
        compiled=block_for(species.signature, kind.graph, recipe, kind.compiler),
        outgoing=outgoing(kind.graph, recipe),
    )
    planned = PlannedRegion(example.name, example.tower, {species.signature: variant}, engine=host.engine)
    stayed = host.engine.counts.kept_bytes
    with installed_region(example.module, example.forward, planned) as call:
        sends = Settling(call, host.engine)
        modules = (example.module,)
        measured = bench(sends, inputs, modules, device, timed=timed, at_backward=sends.fetch)
    if planned.counts.fallbacks:
        raise CaptureError(planned.counts.why)
    if host.engine.counts.kept_bytes > stayed:
        raise CaptureError(f"the host has no {format_bytes(recipe.host_bytes)} for offload")
    return measured


# --------------------------------------------------------------------------------------------- what is said


def _note(
    graph: RegionGraph,
    found: Sequence[_Measured],
    keep: Bench,
    problems: Sequence[str],
    device: torch.device,
) -> str:
    """Where the device waits for the host even in the block as it is (`keep`), so does every way to run it
    block by block. Where it waits only in compiled blocks, one graph gains little, and may lose more."""
    times = ", ".join(f"{one.compile_seconds:.1f}" for one in found)
    gaps = "to the bit" if all(one.gap.exact for one in found) else f"within {_worst(found):.1g}"
    note = f"compiled with {len(found)} saved sets in {times} s; gradients equal {gaps}"
    refused = [f"one more was refused: {problem}" for problem in problems]
    waits = device.type == "cuda" and keep.launch_bound and found[0].bench.launch_bound
    hint = ['the device waits for the host, so compile="whole" may be faster'] if waits else []
    return "; ".join([note, *_weights(graph, found), *refused, *hint])


def _sorted(entries: list[Entry]) -> tuple[Entry, ...]:
    """Keep first, then from most to least resident."""
    return (entries[0], *sorted(entries[1:], key=lambda entry: -entry.resident_bytes))


def _weights(graph: RegionGraph, found: Sequence[_Measured]) -> list[str]:
    """Where a compiled graph holds other bytes than it was told to: padded strides, or not our partition.
    Plans go by what was measured."""
    told = [internal_bytes(graph, one.recipe) for one in found]
    pairs = [
        f"{format_bytes(one.held_bytes)} instead of {format_bytes(nbytes)}"
        for one, nbytes in zip(found, told, strict=True)
        if abs(one.held_bytes - nbytes) > _PADDING * nbytes + _PADDING_BYTES
    ]
    return [f"held for backward: {', '.join(pairs)}"] if pairs else []


def _worst(found: Sequence[_Measured]) -> float:
    return max(one.gap.worst for one in found)


def _seconds(joint: Joint, found: list[_Measured], plain: _Plain, device: torch.device) -> list[float]:
    """Of keep, full and each saved set, above the fastest. On a host, where single timings are noise, by the
    estimates that the sets were chosen by; eager code moves every value that compiled code fuses away. Where
    a device waits for its host, timings of saved sets are noise, too: the host does the same for all."""
    sets = [set_seconds(joint, one.recipe) for one in found]
    if device.type == "cuda":
        timed = [one.bench.seconds for one in found]
        if any(one.bench.launch_bound for one in found):
            timed = [min(timed) + estimate - min(sets) for estimate in sets]
        seconds = [plain.keep.seconds, plain.full.seconds, *timed]
    else:
        eager = min(sets) + _fused_seconds(joint.graph)
        seconds = [eager, eager + sum(op.seconds for op in joint.graph.ops), *sets]
    fastest = min(seconds)
    return [one - fastest for one in seconds]


def _fused_seconds(graph: RegionGraph) -> float:
    return 4 * sum(op.seconds for op in graph.ops if not op.flops)


# --------------------------------------------------------------------------------------------- the hint


def compile_hint(
    calls: Sequence[RegionCall],
    kinds: Sequence[Kind],
    step_seconds: float,
    device: torch.device,
    *,
    worth: float = _WORTH_A_HINT,
) -> tuple[str, ...]:
    """A sentence where compile=True is predicted to save more than this share of the step's seconds, and a
    compiler is there to try it with."""
    if not has_compiler(device.type):
        return ()
    regions = [_FORWARDS * kinds[call.kind].forward_seconds for call in calls]
    shares = [1.0 if kind.graph is None else compiled_share(kind.graph) for kind in kinds]
    gain = sum(seconds * (1 - shares[call.kind]) for call, seconds in zip(calls, regions, strict=True))
    # Estimated prices say how much of a region's time is saved, and not how long it takes.
    whole = max(sum(regions), step_seconds) if device.type == "cuda" else sum(regions)
    compiled = step_seconds * (1 - gain / whole) if whole else step_seconds
    if compiled >= (1 - worth) * step_seconds:
        return ()
    return (
        f"compile=True is predicted to take {format_seconds(compiled)} per step, before anything is computed "
        f"again, instead of {format_seconds(step_seconds)}: fused operations move fewer bytes",
    )
