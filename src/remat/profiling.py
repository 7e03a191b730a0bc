"""model, batch -> Profile: survey the regions, solve a menu for each distinct one, run every entry for real.

Nothing here needs the plain step's memory: regions are captured and run one at a time, and whole steps run
with every region checkpointed.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from remat import ranks
from remat.check.bench import Bench, bench, timing
from remat.check.live import Meter, local_bytes, storages_of
from remat.check.optimizer import optimizer_bytes
from remat.check.peak import release_cached
from remat.check.step import fingerprint
from remat.check.untouched import backward, clear_gradients, untouched
from remat.chunking import chunk_entries
from remat.compiling import compile_hint, compiled_kind
from remat.errors import CaptureError, HostMemoryError, InputError, RecomputeError
from remat.hosting import Hosting, hosting, link_amounts, settling
from remat.planner.menu import recipes
from remat.records import (
    Entry,
    Environment,
    HeadChunks,
    Kind,
    Mode,
    Profile,
    Recipe,
    RegionCall,
    RegionGraph,
    Role,
    Segment,
    StepBytes,
)
from remat.run.checkpoint import Options, run_checkpointed
from remat.run.chunk import chunk_head, find_head
from remat.run.compiled import CompiledBlock, block_for, decompiled
from remat.run.fused import can_fuse, is_exact, is_fusible
from remat.run.install import installed_region
from remat.run.quiet import quiet
from remat.run.recipe import compile_recipe
from remat.run.region import PlannedRegion, Variant
from remat.trace.discover import Block, find_blocks
from remat.trace.price import fused_prices
from remat.trace.survey import Sighting, Species, Survey, frugally, survey, timeline, visiting
from remat.units import format_bytes

__all__ = [
    "Request",
    "build_profile",
    "device_of",
    "menu_entry",
    "region_call",
    "sorted_menu",
    "storage_bytes",
    "survey_notes",
]

Progress = Callable[[str], None]

_LEVELS = 16  # shares of a region's saved bytes that a recipe is sought for
_MOVING = 12  # at most so many that offload are measured
_LOG = logging.getLogger(__name__)
# What the host does for a recipe, in operations of an untouched step (measured where the host sets the pace):
_OPS_PER_SLOT = 1.5  # dropping and unpacking one tensor
_OPS_PER_MOVED = 8.0  # sending one storage to the host and having it back
_OPS_PER_REGION = 20.0  # looking through the graph of a region that drops anything
_LONG_SECONDS = 0.3  # an accelerator's step that takes so long is timed while its bytes are read
_STEPS_COMPILED = 3  # timed, after a first one
_COMPILING_THREADS = 2
_IDLE_SHARE = 0.5  # of a region's time that the host works at most, for kernels to be compiled meanwhile
_KINDS_IN_FULL = 4  # kinds of blocks that are compiled with as many saved sets as pay; more get two each
_LEAST_SHARE = 0.8  # of the priced replay seconds that a measured entry is believed to cost at the least


@dataclass(frozen=True)
class Request:
    """What to profile: `run` does forward and gives the loss; `signature` describes its input."""

    model: nn.Module
    run: Callable[[], torch.Tensor]
    signature: str
    batch_bytes: int
    optimizer: torch.optim.Optimizer | None = None
    accumulate: bool = False
    chunk: bool = False  # measure the step with head and loss in chunks, too
    compiler: str = ""  # compile blocks with this backend; "": not at all
    like: Profile | None = None  # the same step at another size: measure the recipes that it has, seek none
    offload: bool = False  # measure the link to the host, and entries that use it
    parts: bool = False  # measure entries that run a part of a region in chunks


def device_of(model: nn.Module) -> torch.device:
    """Where the model lives: the device of most of its parameters."""
    sizes: dict[torch.device, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        sizes[tensor.device] = sizes.get(tensor.device, 0) + tensor.numel()
    if not sizes:
        raise InputError(f"{type(model).__name__} has no parameters; there is nothing to train")
    return max(sizes, key=lambda device: sizes[device])


def _refuse_several(model: nn.Module) -> None:
    found = {tensor.device for tensor in model.parameters() if tensor.device.type == "cuda"}
    if len(found) > 1:
        names = ", ".join(sorted(map(str, found)))
        raise InputError(
            f"{type(model).__name__} is spread over {names}; a budget is for one device. Put it on one of "
            "them, or shard it with FSDP2 (fully_shard), one process per device"
        )


def build_profile(request: Request, progress: Progress) -> Profile:
    model, device = request.model, device_of(request.model)
    _refuse_several(model)
    ranks.refuse_strangers(fingerprint(model))
    blocks = find_blocks(model)
    step = _step_bytes(request, device)
    notes: list[str] = []
    with (
        untouched(model, request.optimizer),
        quiet(model),
        decompiled(block.module for block in blocks),
        torch.cuda.device(device) if device.type == "cuda" else nullcontext(),  # events go to the current one
        ExitStack() as stack,
    ):
        host = _hosting(request, device, stack, notes, progress)
        kernels = threading.Thread(target=_try_kernels, args=(device,), daemon=True)
        kernels.start()
        progress("surveying regions")
        kinds: list[Kind] = []

        def measure(species: Species, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            kernels.join()  # it takes memory, which must not fall into a measurement
            kinds.append(_kind_for(request, len(kinds), species, (args, kwargs), device, progress, host))

        like = () if request.like is None else [kind.graph for kind in request.like.kinds]
        found = survey(model, blocks, request.run, progress, measure, like)
        if not found.sightings:
            raise InputError(
                f"{type(model).__name__} has no repeated blocks that this step calls; mark what should be "
                'planned with remat.region("name", fn)'
            )
        release_cached(device)
        progress("measuring a step")
        segments, seconds, eager = _fastest_step(request, blocks, found, kinds, device)
        chunks = _chunked_step(request, blocks, found, kinds, device, progress) if request.chunk else None
    calls = tuple(region_call(sighting) for sighting in found.sightings)
    if device.type == "cuda":  # a host's timings are too noisy for that
        kinds = _as_in_steps(kinds, calls, eager - seconds)
    return Profile(
        model=type(model).__name__,
        fingerprint=fingerprint(model),
        signature=request.signature,
        environment=_environment(device),
        step=step,
        kinds=tuple(kinds),
        calls=calls,
        boundary_bytes=tuple(found.boundary_bytes),
        passing=tuple(sorted(found.passing)),
        segments=segments,
        step_seconds=seconds,
        accumulate=request.accumulate,
        notes=(
            *survey_notes(found),
            *_compiler_notes(request, calls, kinds, seconds),
            *notes,
        ),
        head=chunks,
        link=None if host is None else host.rates,
        host_limit_bytes=None if host is None else host.host_limit_bytes,
    )


def _try_kernels(device: torch.device) -> None:
    """Beside the survey: the first kernel takes a second."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        can_fuse(device)


def _hosting(
    request: Request, device: torch.device, stack: ExitStack, notes: list[str], progress: Progress
) -> Hosting | None:
    if not request.offload:
        return None
    progress("measuring the link to the host")
    found, problem = None, ""
    try:
        found = stack.enter_context(hosting(device))
    except HostMemoryError as error:
        problem = str(error)
    if ranks.all_of(found is not None):
        return found
    notes.append(f"nothing is offloaded: {problem or 'the host of another rank refuses'}")
    return None


def _without(extra: float, seconds: float, most: float = 0.5) -> float:
    """The fastest step's seconds from the frugal one's. Recomputing all takes a third, running eagerly what
    can be compiled may take most; timings are noisy."""
    return seconds - min(extra, most * seconds)


def _fastest_step(
    request: Request, blocks: Sequence[Block], found: Survey, kinds: Sequence[Kind], device: torch.device
) -> tuple[tuple[Segment, ...], float, float]:
    """Timeline of the step with every region recomputed as a whole, and seconds of the step with every region
    in its fastest entry: those of a frugal step, less what its regions take longer. Last, the same seconds as
    a step with eager regions has them."""
    segments, seconds = _whole_step(request, blocks, found, device)
    references = [kind.menu[kind.reference] for kind in kinds]
    eager = _without(_extra_of(references, found), seconds, 0.9 if request.compiler else 0.5)
    if any(kind.compiler for kind in kinds):  # the eager step says little of one that is compiled
        sets = [kind.menu[_timed_entry(kind)] for kind in kinds]
        paced = _compiled_seconds(request, blocks, found, kinds, sets)
        if ranks.all_of(paced is not None) and paced is not None:
            compiled = _without(_extra_of(sets, found), ranks.agree(paced))
            return segments, compiled, eager
    return segments, eager, eager


def _extra_of(entries: Sequence[Entry], found: Survey) -> float:
    return sum(entries[sighting.species].extra_seconds for sighting in found.sightings)


def _as_in_steps(kinds: Sequence[Kind], calls: Sequence[RegionCall], gap_seconds: float) -> list[Kind]:
    """Compiled kinds with eager entries that are dearer by the gap, shared out over their calls: by how much
    steps with eager and with compiled blocks disagree about the seconds of the fastest step. Blocks alone do
    not tell: compiled ones take longer in a step than by themselves, eager ones hardly."""
    share = gap_seconds / max(sum(bool(kinds[call.kind].compiler) for call in calls), 1)

    def shifted(entry: Entry) -> Entry:
        if entry.mode is Mode.COMPILED:
            return entry
        return replace(entry, extra_seconds=max(entry.extra_seconds + share, 0.0))

    return [replace(kind, menu=tuple(map(shifted, kind.menu))) if kind.compiler else kind for kind in kinds]


def _compiled_seconds(
    request: Request, blocks: Sequence[Block], found: Survey, kinds: Sequence[Kind], sets: Sequence[Entry]
) -> float | None:
    """Seconds of a step with these saved sets; None if it takes more memory than there is."""
    made = [
        block_for(kind.signature, kind.graph, entry.recipe, kind.compiler)
        if entry.recipe is not None and kind.graph is not None
        else None
        for kind, entry in zip(kinds, sets, strict=True)
    ]
    compiled = {(s.name, s.call): block for s in found.sightings if (block := made[s.species]) is not None}
    try:
        _frugal_step(request.model, blocks, request.run, compiled)
        steps = [_frugal_step(request.model, blocks, request.run, compiled) for _ in range(_STEPS_COMPILED)]
    except torch.OutOfMemoryError:
        return None
    return statistics.median(steps)


def _timed_entry(kind: Kind) -> int:
    """The entry that steps are timed with: of a compiled kind its smallest saved set, else the reference."""
    sets = [i for i, e in enumerate(kind.menu) if e.mode is Mode.COMPILED and not e.host_bytes]
    return min(sets, key=lambda i: kind.menu[i].resident_bytes, default=kind.reference)


def _whole_step(
    request: Request, blocks: Sequence[Block], found: Survey, device: torch.device
) -> tuple[tuple[Segment, ...], float]:
    """Timeline and seconds of the step with every region recomputed as a whole."""
    model, run = request.model, request.run
    first = ranks.agree(_frugal_step(model, blocks, run))  # all run as many steps
    long = first > _LONG_SECONDS and device.type != "cpu"
    seconds = [_frugal_step(model, blocks, run) for _ in range(0 if long else 2)]
    clear_gradients(model)
    with Meter(device) as meter:
        meter.synchronize()
        begin = time.perf_counter()
        segments = timeline(model, blocks, run, meter, found.sightings)
        metered = time.perf_counter() - begin
    return segments, min(seconds, default=metered)


def _chunked_step(
    request: Request,
    blocks: Sequence[Block],
    found: Survey,
    kinds: Sequence[Kind],
    device: torch.device,
    progress: Progress,
) -> HeadChunks | None:
    """The same with the head in chunks; None if there is no head, or it did not come to that."""
    head = find_head(request.model)
    if head is None:
        return None
    progress("measuring a step with head and loss in chunks")
    with chunk_head(request.model, head=head[0]) as handle:
        segments, seconds, _ = _fastest_step(request, blocks, found, kinds, device)
        if not handle.counts.losses or handle.counts.materialised:
            return None
    return HeadChunks(head[0], segments, seconds)


def _frugal_step(
    model: nn.Module,
    blocks: Sequence[Block],
    run: Callable[[], torch.Tensor],
    compiled: Mapping[tuple[str, int], CompiledBlock] | None = None,
) -> float:
    """Seconds of a step; `compiled`: the calls that run so, by name and number."""
    calls: Counter[str] = Counter()

    def visit(name: str, tower: str, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        block = compiled.get((name, calls[name])) if compiled else None
        calls[name] += 1
        if block is not None:
            return block(module, forward, args, kwargs)
        return frugally(name, module, forward, args, kwargs)

    device = device_of(model)
    clear_gradients(model)
    _wait(device)
    start = time.perf_counter()
    with visiting(model, blocks, visit):
        backward(run())
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _step_bytes(request: Request, device: torch.device) -> StepBytes:
    model = request.model
    parameters = storage_bytes(model.parameters(), device)
    buffers = storage_bytes(model.buffers(), device)
    present = storage_bytes((p.grad for p in model.parameters() if p.grad is not None), device)
    gradients = sum(local_bytes(p) for p in model.parameters() if p.requires_grad)
    held = optimizer_bytes(request.optimizer, device) if request.optimizer is not None else None
    if device.type == "cuda":
        allocated = torch.cuda.memory_allocated(device)
        other = allocated - parameters - buffers - present - (held.present if held else 0)
    else:
        other = request.batch_bytes
    return StepBytes(
        parameters=parameters,
        buffers=buffers,
        gradients=gradients,
        optimizer_state=held.state if held else 0,
        optimizer_temporary=held.temporary if held else 0,
        other=max(other, 0),
    )


def storage_bytes(found: Any, device: torch.device) -> int:
    pairs = (pair for tensor in found for pair in storages_of(tensor))
    storages = {storage._cdata: storage for storage, place in pairs if place.type == device.type}
    return sum(storage.nbytes() for storage in storages.values())


def _environment(device: torch.device) -> Environment:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return Environment(str(device), properties.name, torch.__version__, properties.total_memory)
    return Environment(str(device), device.type, torch.__version__)


def region_call(sighting: Sighting) -> RegionCall:
    gradients = sum(local_bytes(p) for p in sighting.module.parameters() if p.requires_grad)
    return RegionCall(
        name=sighting.name,
        call=sighting.call,
        kind=sighting.species,
        tower=sighting.tower,
        inputs=sighting.inputs,
        outputs=sighting.outputs,
        gradient_bytes=gradients,
    )


def survey_notes(found: Survey) -> tuple[str, ...]:
    """Which regions have no recipes, and why."""
    notes = []
    for number, species in enumerate(found.species):
        if species.note:
            names = [s.name for s in found.sightings if s.species == number]
            notes.append(f"{_first_of(names)}: no recipes, {species.note}")
    return tuple(notes)


def _compiler_notes(
    request: Request, calls: Sequence[RegionCall], kinds: Sequence[Kind], step_seconds: float
) -> tuple[str, ...]:
    """What became of each kind of block at the compiler; or that it is worth a try."""
    if not request.compiler:
        return compile_hint(calls, kinds, step_seconds, device_of(request.model))
    named = ([call.name for call in calls if call.kind == number] for number in range(len(kinds)))
    return tuple(
        f"{_first_of(names)}: {kind.note}" for names, kind in zip(named, kinds, strict=True) if kind.note
    )


def _first_of(names: Sequence[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


# ------------------------------------------------------------------------------------------------- menus


Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def _kind_for(
    request: Request,
    number: int,
    species: Species,
    inputs: Inputs,
    device: torch.device,
    progress: Progress,
    host: Hosting | None,
) -> Kind:
    """The kind as the compiler runs it, if that is wanted and possible."""
    like = request.like.kinds[number:][:1] if request.like is not None else None
    if not request.compiler:
        return _kind(species, inputs, device, progress, host, like, request.parts)
    compiled, problem = None, ""
    try:
        most = None if number < _KINDS_IN_FULL else 2
        compiled = compiled_kind(species, inputs, device, request.compiler, progress, menu_entry, most, host)
    except CaptureError as error:
        problem = str(error)
    if ranks.all_of(compiled is not None) and compiled is not None:
        return compiled
    kind = _kind(species, inputs, device, progress, host, like, request.parts)
    problem = problem or "on another rank it cannot be"
    return replace(kind, note="; ".join(filter(None, (f"not compiled, {problem}", kind.note))))


def _kind(
    species: Species,
    inputs: Inputs,
    device: torch.device,
    progress: Progress,
    host: Hosting | None,
    like: Sequence[Kind] | None = None,
    parts: bool = False,
) -> Kind:
    """Every entry of this region's menu, measured. `like`: the same kind at another size, if there is one."""
    example, graph = species.example, species.graph
    progress(f"solving and measuring the menu of {example.name}")
    modules = (example.module,)

    def full(*args: Any, **kwargs: Any) -> Any:
        return run_checkpointed(example.forward, args, kwargs, Options(name=example.name), modules)

    bench(example.forward, inputs, modules, device)  # warm: kernels are loaded, workspaces made
    keep = ranks.agree(bench(example.forward, inputs, modules, device))
    again = bench(full, inputs, modules, device)
    forward_seconds = sum(op.seconds for op in graph.ops) if graph is not None else keep.seconds / 3
    backward_seconds = max(keep.seconds - forward_seconds, forward_seconds)
    links: tuple[int, ...] = ()
    if host is not None and graph is not None:
        links = ranks.agree(link_amounts(host.rates, forward_seconds, backward_seconds, graph.saved_bytes))
    entries = [
        menu_entry(Mode.KEEP, keep, 0.0, graph, len(example.inputs)),
        menu_entry(Mode.FULL, again, _extra(again, keep, forward_seconds, device), None, len(example.inputs)),
    ]
    note = species.note
    fuse = ranks.all_of(can_fuse(device))
    menu = _recipes(graph, keep, device, links, fuse) if like is None else _recipes_of(like, graph)
    pace = _Pace()
    menu = tuple(sorted(menu, key=lambda recipe: recipe.host_bytes > 0))  # those that stay set the pace
    ahead = keep.host_seconds < _IDLE_SHARE * keep.seconds
    for recipe in _compiling(graph, menu, device, ahead) if fuse and graph is not None else menu:
        problem = ""
        try:
            recipe, measured = _bench_fused(species, recipe, inputs, device, host, fuse)
        except CaptureError as error:
            problem = str(error)
        if not ranks.all_of(not problem):
            note = note or problem or "on another rank its replay differs"
            continue
        assert graph is not None
        extra = _recipe_extra(recipe, measured, keep, graph, device, pace)
        entries.append(menu_entry(Mode.RECIPE, measured, extra, graph, len(example.inputs), recipe))
    if parts:
        entries += chunk_entries(species, inputs, device, keep, forward_seconds, menu_entry)
    return Kind(
        signature=species.signature,
        menu=sorted_menu(entries),
        saved_bytes=entries[0].resident_bytes,
        forward_seconds=forward_seconds,
        graph=graph,
        note=note,
        backward_seconds=backward_seconds,
    )


def _recipes(
    graph: RegionGraph | None, keep: Bench, device: torch.device, links: tuple[int, ...], fuse: bool
) -> tuple[Recipe, ...]:
    """Where the device waits for the host, a dropped tensor costs the host's work, whatever its size."""
    if graph is None:
        return ()
    levels = [level / _LEVELS for level in range(_LEVELS, 0, -1)]
    per_op = _op_seconds(graph, keep, device)
    if fuse and not keep.launch_bound:
        graph = fused_prices(graph)
    found = recipes(graph, levels=levels, link_bytes=links, slot_seconds=_OPS_PER_SLOT * per_op)
    staying = [recipe for recipe in found if not recipe.host_bytes]
    moving = [recipe for recipe in found if recipe.host_bytes]
    return (*staying, *moving[:: max(-(-len(moving) // _MOVING), 1)])


def _op_seconds(graph: RegionGraph, keep: Bench, device: torch.device) -> float:
    """The host's time for one operation, where the device waits for the host; 0 elsewhere. Backward runs two
    for each of forward's."""
    return keep.host_seconds / (3 * len(graph.ops)) if device.type == "cuda" and keep.launch_bound else 0.0


def _recipes_of(like: Sequence[Kind], graph: RegionGraph | None) -> tuple[Recipe, ...]:
    """The recipes of the same region at another size; none if it does not run the same operations there."""
    if graph is None:
        return ()
    found = [entry.recipe for kind in like for entry in kind.menu if entry.recipe is not None]
    for kind in like:
        if kind.graph is None or [op.name for op in kind.graph.ops] != [op.name for op in graph.ops]:
            return ()
    return tuple(
        replace(recipe, replay_seconds=sum(graph.ops[op].seconds for op in recipe.replayed))
        for recipe in found
    )


def _extra(measured: Bench, keep: Bench, replay_seconds: float, device: torch.device) -> float:
    """What an entry costs on top of keeping everything. On an accelerator as measured, but not less than most
    of what its operations take alone: a difference of two timings is noisy. A host that also does other
    things is noisier still: there the operations' own least times are summed."""
    if device.type == "cpu":
        return replay_seconds
    return max(measured.seconds - keep.seconds, _LEAST_SHARE * replay_seconds)


@dataclass
class _Pace:
    """Seconds that recipes were measured to take, over what their operations take alone."""

    measured_seconds: float = 0.0
    priced_seconds: float = 0.0

    def note(self, extra: float, priced: float) -> float:
        self.measured_seconds += extra
        self.priced_seconds += priced
        return extra

    def seconds(self, priced: float) -> float:
        return priced * (self.measured_seconds / self.priced_seconds if self.priced_seconds else 1.0)


def _recipe_extra(
    recipe: Recipe, measured: Bench, keep: Bench, graph: RegionGraph, device: torch.device, pace: _Pace
) -> float:
    """Where the host sets the pace, counted: its timings differ by more than recipes do. What offloads is not
    timed: it replays operations as the others do."""
    per_op = _op_seconds(graph, keep, device)
    if not per_op:
        if recipe.offloaded:
            return pace.seconds(recipe.replay_seconds)
        return pace.note(_extra(measured, keep, recipe.replay_seconds, device), recipe.replay_seconds)
    host_ops = _OPS_PER_REGION + _OPS_PER_SLOT * len(recipe.dropped) + _OPS_PER_MOVED * len(recipe.offloaded)
    return per_op * host_ops + recipe.replay_seconds


def _compiling(
    graph: RegionGraph, menu: Sequence[Recipe], device: torch.device, ahead: bool
) -> Iterator[Recipe]:
    """The recipes, with their kernels compiled. `ahead`: those of the next ones while one is measured, where
    the device leaves the host idle; otherwise all before the first, because timings would suffer."""
    for op in graph.ops:  # tried here: that takes memory, which must not fall into a measurement
        if is_fusible(graph, op):
            for value in op.inputs:
                is_exact(op, graph.values[value].dtype, device)

    def compile_one(recipe: Recipe) -> None:
        with suppress(Exception), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            compile_recipe(
                graph, replace(recipe, fused=True), device
            )  # what goes wrong is said where it is measured

    pool = ThreadPoolExecutor(_COMPILING_THREADS)
    try:
        compiled = [pool.submit(compile_one, recipe) for recipe in menu]
        if not ahead:
            wait(compiled)
        for recipe, ready in zip(menu, compiled, strict=True):
            ready.result()
            yield recipe
    finally:
        pool.shutdown(cancel_futures=True)


def _bench_fused(
    species: Species, recipe: Recipe, inputs: Inputs, device: torch.device, host: Hosting | None, fuse: bool
) -> tuple[Recipe, Bench]:
    """With elementwise operations fused, if that works and gives the same bits."""
    if fuse:
        fused = replace(recipe, fused=True)
        try:
            return fused, _bench_recipe(species, fused, inputs, device, host)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Triton's own too
            _LOG.info("%s: a recipe runs operation by operation: %s", species.example.name, error)
    plain = replace(recipe, fused=False)
    return plain, _bench_recipe(species, plain, inputs, device, host)


@contextmanager
def _checks_are_guards() -> Iterator[None]:
    """A recipe that the spot check refuses while it is measured is not on the menu."""
    try:
        yield
    except RecomputeError as error:
        raise CaptureError(str(error)) from error


def _bench_recipe(
    species: Species, recipe: Recipe, inputs: Inputs, device: torch.device, host: Hosting | None
) -> Bench:
    """Run a recipe: first with every rebuilt tensor compared bit for bit, then as in training.

    What it offloads has left the device when its forward has returned, and is all fetched again in backward.
    Alone, a region has nothing to hide copies behind, so it is not timed; the simulator adds what compute
    has to wait.
    """
    example = species.example
    assert species.graph is not None
    variant = Variant(Mode.RECIPE, compile_recipe(species.graph, recipe, device))
    planned = PlannedRegion(example.name, example.tower, {species.signature: variant}, shadow=True)
    modules = (example.module,)
    with installed_region(example.module, example.forward, planned) as call, _checks_are_guards():
        region = call
        if recipe.offloaded:
            assert host is not None
            planned.engine, region = host.engine, settling(call, host.engine)
            stayed = host.engine.counts.kept_bytes
        bench(region, inputs, modules, device, timed=False)
        planned.shadow, planned.turns = False, 1
        levels = bench(region, inputs, modules, device, timed=False)  # with all that the spot check takes
        if recipe.offloaded and host is not None:
            if host.engine.counts.kept_bytes > stayed:
                raise CaptureError(f"the host has no {format_bytes(recipe.host_bytes)} for offload")
        else:
            planned.check = False  # it waits for the device, once per step and not once per region
            levels = timing(levels, call, inputs, modules, device)
    if planned.counts.fallbacks:
        raise CaptureError(planned.counts.why)
    return levels


def menu_entry(
    mode: Mode,
    measured: Bench,
    extra: float,
    graph: RegionGraph | None,
    inputs: int,
    recipe: Recipe | None = None,
) -> Entry:
    held_outputs: dict[int, int] = {}  # storage -> position, of outputs that autograd holds by itself
    holds_inputs = tuple(range(inputs))
    if graph is not None:
        saved = {graph.values[slot.value].storage for slot in graph.saved}
        kept = saved
        if recipe is not None:
            kept = set(recipe.kept) - set(recipe.offloaded) | {s for s in saved if _stays(graph, s)}
        holds_inputs = tuple(i for i, v in enumerate(graph.inputs) if graph.values[v].storage in kept)
        for position, value in enumerate(graph.outputs):
            storage = graph.values[value].storage
            if storage in saved and graph.storages[storage].role is Role.OUTPUT:
                held_outputs.setdefault(storage, position)
    outputs_bytes = sum(graph.storages[s].nbytes for s in held_outputs) if graph is not None else 0
    return Entry(
        mode=mode,
        resident_bytes=max(measured.resident_bytes - outputs_bytes, 0),
        forward_peak_bytes=measured.forward_peak_bytes,
        backward_peak_bytes=measured.backward_peak_bytes,
        extra_seconds=extra,
        holds_inputs=holds_inputs,
        holds_outputs=tuple(held_outputs.values()),
        host_bytes=0 if recipe is None else recipe.host_bytes,
        fetches_inputs=_fetched(graph, recipe),
        recipe=recipe,
        measured=True,
    )


def _fetched(graph: RegionGraph | None, recipe: Recipe | None) -> tuple[int, ...]:
    """Positions of the inputs that wait on the host."""
    if graph is None or recipe is None:
        return ()
    return tuple(i for i, v in enumerate(graph.inputs) if graph.values[v].storage in recipe.offloaded)


def _stays(graph: RegionGraph, storage: int) -> bool:
    return graph.storages[storage].role in (Role.OUTPUT, Role.FOREIGN, Role.PARAMETER)


def sorted_menu(entries: list[Entry]) -> tuple[Entry, ...]:
    """Keep first, then from most to least resident. Nothing is left out: a larger entry may still be the one
    with the smaller peak."""
    return (entries[0], *sorted(entries[1:], key=lambda entry: -entry.resident_bytes))
