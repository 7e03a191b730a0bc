"""The menu of one kind of region: recipes solved from its graph, every entry run for real."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from remat import ranks
from remat._torch_private import storage_ref
from remat.check.bench import Bench, bench, issuing_seconds, timing
from remat.chunking import ForwardExtra, Hosted, Trial, chunk_entries
from remat.errors import CaptureError, RecomputeError
from remat.hosting import Hosting, Settling, link_amounts
from remat.planner.menu import most_useful, recipes
from remat.planner.pacing import Pace, pace_of, paced_by_host
from remat.records import Entry, Kind, Mode, Recipe, RegionGraph, Role
from remat.run.checkpoint import Options, run_checkpointed
from remat.run.fused import can_fuse, is_exact, is_fusible
from remat.run.host import can_host
from remat.run.install import installed_region
from remat.run.recipe import compile_recipe
from remat.run.region import PlannedRegion, Variant
from remat.trace.price import fused_prices, launch_seconds
from remat.trace.survey import Sighting, Species
from remat.trees import tensors
from remat.units import format_bytes

__all__ = ["Inputs", "measured_kind", "menu_entry", "sorted_menu"]

Progress = Callable[[str], None]

_LEVELS = 16  # shares of a region's saved bytes that a recipe is sought for
_MOVING = 12  # at most so many that offload are measured
_LOG = logging.getLogger(__name__)
_COMPILING_THREADS = 2
_IDLE_SHARE = 0.5  # of a region's time that the host works at most, for kernels to be compiled meanwhile
_SMALL_INPUT = 16  # times smaller than the largest: a copy of its own costs more than it is worth
_LEAST_SHARE = 0.8  # of the priced replay seconds that a measured entry is believed to cost at the least

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def measured_kind(
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
    forward_seconds = _forward_seconds(graph, keep)
    backward_seconds = max(keep.seconds - forward_seconds, forward_seconds)
    pace = _pace(example.forward, inputs, device, keep, forward_seconds)
    links: tuple[int, ...] = ()
    if host is not None and graph is not None:
        links = ranks.agree(link_amounts(host.rates, forward_seconds, backward_seconds, graph))
    in_forward = partial(_forward_extra, inputs, device, pace)
    whole = _full_extra(again, keep, forward_seconds, pace)
    entries = [
        menu_entry(Mode.KEEP, keep, 0.0, graph, len(example.inputs)),
        menu_entry(Mode.FULL, again, whole + in_forward(full), None, len(example.inputs)),
    ]
    hosted: Hosted | None = None
    if host is not None and like is None:
        hosted = partial(_hosted, species, inputs, device, host, in_forward)
        sent = hosted(entries[1], whole)
        if ranks.all_of(sent is not None) and sent is not None:
            entries.append(sent)
        else:
            hosted = None
    note = species.note
    fuse = ranks.all_of(can_fuse(device))
    menu = _recipes(graph, pace, links, fuse) if like is None else _recipes_of(like, graph)
    replays = _Replays()
    menu = tuple(sorted(menu, key=lambda recipe: recipe.host_bytes > 0))  # those that stay are timed
    ahead = keep.host_seconds < _IDLE_SHARE * keep.seconds
    for recipe in _compiling(graph, menu, device, ahead) if fuse and graph is not None else menu:
        problem = ""
        try:
            recipe, measured = _bench_fused(species, recipe, inputs, device, host, fuse, pace)
        except CaptureError as error:
            problem = str(error)
        except torch.OutOfMemoryError:  # its comparison with the real tensors takes more than a step
            problem = "there is no memory to measure some recipes in"
        if not ranks.all_of(not problem):
            note = note or problem or "on another rank its replay differs"
            continue
        assert graph is not None
        extra = _recipe_extra(recipe, measured, keep, graph, pace, replays)
        entries.append(menu_entry(Mode.RECIPE, measured, extra, graph, len(example.inputs), recipe))
    if parts:
        trial = Trial(species, inputs, device, keep, forward_seconds, menu_entry, in_forward, hosted)
        entries += chunk_entries(trial)
    return Kind(
        signature=species.signature,
        menu=sorted_menu(entries),
        saved_bytes=entries[0].resident_bytes,
        forward_seconds=forward_seconds,
        graph=graph,
        note=note,
        backward_seconds=backward_seconds,
        device_seconds=pace.plain.device_seconds if pace else 0.0,
    )


def _pace(
    forward: Callable[..., Any], inputs: Inputs, device: torch.device, keep: Bench, forward_seconds: float
) -> Pace | None:
    """None: on the host itself there is but one to set it."""
    if device.type != "cuda":
        return None
    launch = ranks.agree(launch_seconds(device))
    host_forward = ranks.agree(issuing_seconds(forward, inputs, device))
    return pace_of(keep.seconds, keep.host_seconds, forward_seconds, launch, host_forward)


def _recipes(
    graph: RegionGraph | None, pace: Pace | None, links: tuple[int, ...], fuse: bool
) -> tuple[Recipe, ...]:
    """Where the device waits for the host, dropping and sending costs its work, whatever the size."""
    if graph is None:
        return ()
    levels = [level / _LEVELS for level in range(_LEVELS, 0, -1)]
    if fuse and not (pace and pace.device_waits):
        graph = fused_prices(graph)
    per_slot, per_moved = (pace.slot_seconds, pace.moved_seconds) if pace else (0.0, 0.0)
    found = recipes(graph, levels=levels, link_bytes=links, slot_seconds=per_slot, moved_seconds=per_moved)
    staying = [recipe for recipe in found if not recipe.host_bytes]
    return (*staying, *most_useful(graph, found, _MOVING))


def _recipes_of(like: Sequence[Kind], graph: RegionGraph | None) -> tuple[Recipe, ...]:
    """The recipes of the same region at another size; none if it does not run the same operations there."""
    if graph is None:
        return ()
    found = [entry.recipe for kind in like for entry in kind.menu if entry.recipe is not None]
    for kind in like:
        if kind.graph is None or [op.name for op in kind.graph.ops] != [op.name for op in graph.ops]:
            return ()
    return tuple(
        replace(
            recipe,
            replay_seconds=sum(graph.ops[op].seconds for op in recipe.replayed),
            host_bytes=sum(graph.storages[s].nbytes for s in recipe.offloaded),
        )
        for recipe in found
        if max(recipe.offloaded, default=0) < len(graph.storages)
    )


def _forward_seconds(graph: RegionGraph | None, keep: Bench) -> float:
    """The less of two: operations timed one by one take longer than in a row, and in a row the device may
    wait for the host."""
    apart = graph.forward_seconds if graph is not None else keep.seconds / 3
    return min(apart, keep.forward_seconds) if keep.forward_seconds else apart


def _extra(measured: Bench, keep: Bench, replay_seconds: float) -> float:
    """What an entry costs on top of keeping everything, where the accelerator sets the pace: as measured, but
    not less than most of what its operations take alone, because a difference of two timings is noisy."""
    return max(measured.seconds - keep.seconds, _LEAST_SHARE * replay_seconds)


def _forward_extra(
    inputs: Inputs, device: torch.device, pace: Pace | None, call: Callable[..., Any]
) -> float:
    """How much longer the forward of an entry takes because the host has more to do in it."""
    if pace is None or not pace.shows_in_forward:
        return 0.0
    return pace.forward_extra(issuing_seconds(call, inputs, device))


def _full_extra(again: Bench, keep: Bench, forward_seconds: float, pace: Pace | None) -> float:
    """Without an accelerator the operations' own least times are summed: a host that also does other things
    is noisier still."""
    if pace is None:
        return forward_seconds
    if _paced_by_host(again):
        counted = pace.again_seconds(again.host_seconds, forward_seconds)
        return max(counted, _LEAST_SHARE * forward_seconds)
    return _extra(again, keep, forward_seconds)


@dataclass
class _Replays:
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
    recipe: Recipe, measured: Bench, keep: Bench, graph: RegionGraph, pace: Pace | None, replays: _Replays
) -> float:
    """Where the host sets the pace, counted: its timings differ by more than recipes do. What offloads is not
    timed: it replays operations as the others do. On top, where the host hardly keeps up with forward: what
    it does more there."""
    if pace is None:
        return recipe.replay_seconds
    in_forward = pace.forward_extra(measured.host_forward_seconds)
    if recipe.offloaded or _paced_by_host(keep) or _paced_by_host(measured):
        return in_forward + pace.recipe_seconds(recipe, graph, replays.seconds(recipe.replay_seconds))
    return in_forward + replays.note(_extra(measured, keep, recipe.replay_seconds), recipe.replay_seconds)


def _paced_by_host(measured: Bench) -> bool:
    return paced_by_host(measured.seconds, measured.host_seconds)


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
    species: Species,
    recipe: Recipe,
    inputs: Inputs,
    device: torch.device,
    host: Hosting | None,
    fuse: bool,
    pace: Pace | None,
) -> tuple[Recipe, Bench]:
    """With elementwise operations fused, if that works and gives the same bits."""
    if fuse:
        fused = replace(recipe, fused=True)
        try:
            return fused, _bench_recipe(species, fused, inputs, device, host, pace)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Triton's own too
            _LOG.info("%s: a recipe runs operation by operation: %s", species.example.name, error)
    plain = replace(recipe, fused=False)
    return plain, _bench_recipe(species, plain, inputs, device, host, pace)


@contextmanager
def _checks_are_guards() -> Iterator[None]:
    """A recipe that the spot check refuses while it is measured is not on the menu."""
    try:
        yield
    except RecomputeError as error:
        raise CaptureError(str(error)) from error


def _bench_recipe(
    species: Species,
    recipe: Recipe,
    inputs: Inputs,
    device: torch.device,
    host: Hosting | None,
    pace: Pace | None,
) -> Bench:
    """Run a recipe: first with every rebuilt tensor compared bit for bit, then as in training.

    What it offloads has left the device when its forward has returned, and is all fetched again in backward.
    Alone, a region has nothing to hide copies behind, so only what its forward takes the host is timed; the
    simulator adds what compute has to wait.
    """
    example = species.example
    assert species.graph is not None
    variant = Variant(Mode.RECIPE, compile_recipe(species.graph, recipe, device))
    planned = PlannedRegion(example.name, example.tower, {species.signature: variant}, shadow=True)
    modules = (example.module,)
    with installed_region(example.module, example.forward, planned) as call, _checks_are_guards():
        region, fetch = call, _nothing
        if recipe.offloaded:
            assert host is not None
            settling = Settling(call, host.engine)
            planned.engine, region, fetch = host.engine, settling, settling.fetch
            stayed = host.engine.counts.kept_bytes
        bench(region, inputs, modules, device, timed=False)
        planned.shadow, planned.turns = False, 1
        # With all that the spot check takes.
        levels = bench(region, inputs, modules, device, timed=False, at_backward=fetch)
        issued = issuing_seconds(call, inputs, device) if pace is not None and pace.shows_in_forward else 0.0
        if recipe.offloaded and host is not None:
            host.engine.settle()  # as in _hosted
            if host.engine.counts.kept_bytes > stayed:
                raise CaptureError(f"the host has no {format_bytes(recipe.host_bytes)} for offload")
        else:
            planned.check = False  # it waits for the device, once per step and not once per region
            levels = timing(levels, call, inputs, modules, device)
    if planned.counts.fallbacks:
        raise CaptureError(planned.counts.why)
    return replace(levels, host_forward_seconds=issued)  # with the spot check, as in training


def _nothing() -> None:
    pass


def _hosted(
    species: Species,
    inputs: Inputs,
    device: torch.device,
    host: Hosting,
    in_forward: ForwardExtra,
    of: Entry,
    backward_extra: float,
) -> Entry | None:
    """This entry, which runs the whole region again, with the inputs on the host that nobody else has; None:
    there are none, the host has no memory, or the region cannot run again so. `backward_extra`: seconds that
    are added but for what forward takes the host."""
    example = species.example
    given = tensors(inputs)
    places = _own_inputs(example, given, device)
    if not places:
        return None
    variant = Variant(Mode.HOSTED, sends=places, cut=of.cut)
    planned = PlannedRegion(example.name, example.tower, {species.signature: variant})
    planned.engine = host.engine
    sizes = {storage_ref(given[place]): given[place].untyped_storage().nbytes() for place in places}
    before = host.engine.counts.sent_bytes
    with installed_region(example.module, example.forward, planned) as call:
        settling = Settling(call, host.engine)
        try:
            measured = bench(
                settling, inputs, (example.module,), device, timed=False, at_backward=settling.fetch
            )
        except RecomputeError:  # a function that writes to its inputs
            return None
        if host.engine.counts.sent_bytes - before != sum(sizes.values()):
            return None  # the host has no memory, or the region writes to an input, of which it holds a copy
        extra = backward_extra + in_forward(call)
        host.engine.settle()  # what those forwards sent is not let go of in somebody else's measurement
    return replace(
        of,
        mode=Mode.HOSTED,
        resident_bytes=max(measured.resident_bytes, 0),
        forward_peak_bytes=measured.forward_peak_bytes,
        backward_peak_bytes=measured.backward_peak_bytes,
        holds_inputs=tuple(place for place in range(len(example.inputs)) if place not in places),
        host_bytes=sum(sizes.values()),
        fetches_inputs=places,
        extra_seconds=extra,
    )


def _own_inputs(example: Sighting, given: Sequence[torch.Tensor], device: torch.device) -> tuple[int, ...]:
    """Places of the inputs that go to the host: those that no other region reads, that are not handed on as
    outputs, and that the model does not write to later."""
    stay = example.shared | example.written_later
    stay |= {place for place, boundary in enumerate(example.inputs) if boundary in example.outputs}
    free = [
        place
        for place, tensor in enumerate(given)
        if place not in stay
        and tensor.device.type == device.type
        and can_host(tensor)
        and tensor.untyped_storage().nbytes() <= tensor.nbytes  # or somebody else has the rest of it
    ]
    largest = max((given[place].nbytes for place in free), default=0)
    return tuple(place for place in free if given[place].nbytes * _SMALL_INPUT >= largest)


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
        saved = graph.saved_storages
        kept = set(saved)
        if recipe is not None:
            kept = set(recipe.kept) - set(recipe.offloaded) | {s for s in saved if _stays(graph, s)}
        holds_inputs = tuple(i for i, v in enumerate(graph.inputs) if graph.values[v].storage in kept)
        for position, value in enumerate(graph.outputs):
            storage = graph.values[value].storage
            if storage in saved & kept and graph.storages[storage].role is Role.OUTPUT:
                held_outputs.setdefault(storage, position)
    read = _read_by_replays(graph, recipe)
    outputs_bytes = sum(graph.storages[s].nbytes for s in held_outputs) if graph is not None else 0
    return Entry(
        mode=mode,
        resident_bytes=max(measured.resident_bytes - outputs_bytes, 0),
        forward_peak_bytes=measured.forward_peak_bytes,
        backward_peak_bytes=measured.backward_peak_bytes,
        extra_seconds=extra,
        holds_inputs=holds_inputs,
        holds_outputs=tuple(held_outputs.values()),
        lends_outputs=tuple(p for s, p in held_outputs.items() if recipe is not None and s not in read),
        host_bytes=0 if recipe is None else recipe.host_bytes,
        fetches_inputs=_fetched(graph, recipe),
        recipe=recipe,
        measured=True,
    )


def _read_by_replays(graph: RegionGraph | None, recipe: Recipe | None) -> set[int]:
    """Storages."""
    if graph is None or recipe is None:
        return set()
    return {graph.values[value].storage for op in recipe.replayed for value in graph.ops[op].inputs}


def _fetched(graph: RegionGraph | None, recipe: Recipe | None) -> tuple[int, ...]:
    """Positions of the inputs that wait on the host."""
    if graph is None or recipe is None:
        return ()
    return tuple(i for i, v in enumerate(graph.inputs) if graph.values[v].storage in recipe.offloaded)


def _stays(graph: RegionGraph, storage: int) -> bool:
    return graph.storages[storage].role in (Role.FOREIGN, Role.PARAMETER)


def sorted_menu(entries: list[Entry]) -> tuple[Entry, ...]:
    """Keep first, then from most to least resident. Nothing is left out: a larger entry may still be the one
    with the smaller peak."""
    return (entries[0], *sorted(entries[1:], key=lambda entry: -entry.resident_bytes))
