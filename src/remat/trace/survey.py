"""The regions of one training step: which calls there are, which of them are alike, and how the step's memory
moves while every region recomputes as a whole.

Nothing here needs the plain step's memory. `survey` runs forward twice with every region checkpointed: once
to see which tensors pass between regions, once to capture each region where it stands (and to measure it
there, so that no region's inputs need to be kept for later). `timeline` runs one whole step in that
frugal way and reads the meter at every region's entry and exit, forward and backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from remat import ranks
from remat._torch_private import below_torch_function
from remat.check.chance import SeededRun
from remat.check.live import Meter, storages_of
from remat.check.untouched import backward
from remat.errors import CaptureError, InputError
from remat.records import Phase, RegionGraph, Role, Segment
from remat.run.checkpoint import Options, run_checkpointed
from remat.run.functions import every_function
from remat.run.wrap import RegionStatus, unwrap, wrap
from remat.trace.capture import Capture, capture
from remat.trace.discover import Block
from remat.trace.fold import folded
from remat.trace.graphwalk import saved_tensors, walk
from remat.trace.price import price
from remat.trace.record import has_storage
from remat.trace.selfcheck import checked
from remat.trees import signature, tensors

__all__ = ["Sighting", "Species", "Survey", "survey", "timeline", "with_shared"]

Progress = Callable[[str], None]

_SEEDS = 16  # tried for a run that calls every block
_SEEDS_WITHOUT_CHANCE = 3  # runs that all leave out the same blocks: it is no chance

_NO_ROOM = "there is no memory to capture it in"


@dataclass
class Species:
    """Region calls with the same input signature, operations and constants."""

    signature: str
    example: Sighting
    plain: RegionGraph | None = None  # as captured: what other calls are compared with
    graph: RegionGraph | None = None  # self-checked and priced
    note: str = ""


@dataclass(frozen=True)
class Sighting:
    """One call of a region in the step."""

    name: str
    call: int
    tower: str
    module: nn.Module  # owns the parameters: the block itself, or the whole model for a function
    forward: Callable[..., Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    written_later: frozenset[int] = (
        frozenset()
    )  # inputs that the model writes to after the region has returned
    shared: frozenset[int] = frozenset()  # inputs that other regions read too
    species: int = -1


@dataclass
class Survey:
    sightings: list[Sighting] = field(default_factory=list)
    species: list[Species] = field(default_factory=list)
    boundary_bytes: list[int] = field(default_factory=list)
    passing: set[int] = field(default_factory=set)  # boundaries made between regions that nobody holds there
    elsewhere: set[int] = field(default_factory=set)  # boundaries that are held by more than regions


# ------------------------------------------------------------------------------------ regions as they run


@dataclass
class _Visitor:
    """Stands around every region while the step runs, and hands each call to `visit` (an `Around`)."""

    name: str
    tower: str
    visit: Callable[..., Any]
    owner: str = "remat.profile"

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return self.visit(self.name, self.tower, module, forward, args, kwargs)

    def status(self) -> RegionStatus:
        return RegionStatus(self.name, self.tower, "profile", active=True)


@contextmanager
def visiting(model: nn.Module, blocks: Sequence[Block], visit: Callable[..., Any]) -> Iterator[None]:
    """Every call of a block, and of a function marked with remat.region, goes through `visit`."""
    done: list[nn.Module] = []
    try:
        for block in blocks:
            wrap(block.module, _Visitor(block.name, block.tower, visit))
            done.append(block.module)
        with every_function(model, lambda name: _Visitor(name, "functions", visit)):
            yield
    finally:
        for module in done:
            unwrap(module)


def frugally(name: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return run_checkpointed(forward, args, kwargs, Options(name=name), (module,))


# -------------------------------------------------------------------------------------------- the survey


Measure = Callable[[Species, tuple[Any, ...], dict[str, Any]], None]


def survey(
    model: nn.Module,
    blocks: Sequence[Block],
    run: Callable[[], torch.Tensor],
    progress: Progress,
    measure: Measure | None = None,
    like: Sequence[RegionGraph | None] = (),
    between: Callable[[], None] = lambda: None,
) -> Survey:
    """Run forward twice, every region checkpointed. `measure(species, args, kwargs)` is called for each
    distinct region, in the middle of forward, with the arguments that it is about to be called with, and
    `between` before the second run, which times operations. `like` has the graphs of the distinct regions at
    another size."""
    found = _all_sights(model, blocks, run)
    between()
    _Captures(model, found, progress, measure, like).run(blocks, run)
    return found


def _all_sights(model: nn.Module, blocks: Sequence[Block], run: Callable[[], torch.Tensor]) -> Survey:
    """The first run. Where it leaves blocks out, perhaps by chance (LayerDrop), other seeds are tried, and
    `run` is left at the one that calls most."""
    found = _Sights(model).run(blocks, run)
    if not isinstance(run, SeededRun) or {b.name for b in blocks} <= {s.name for s in found.sightings}:
        return found
    best, first = run.seed, [s.name for s in found.sightings]
    for seed in range(best + 1, best + _SEEDS):
        run.seed = seed
        other = _Sights(model).run(blocks, run)
        if len(other.sightings) > len(found.sightings):
            best, found = seed, other
        chance = len(found.sightings) > len(first) or [s.name for s in other.sightings] != first
        if not chance and seed - best >= _SEEDS_WITHOUT_CHANCE:  # these blocks are simply not used
            break
    run.seed = best
    return found


class _Sights:
    """First run: which calls there are and which tensors pass between them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._result = Survey()
        self._calls: dict[str, int] = {}
        self._boundary: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._versions: list[list[tuple[int, torch.Tensor, int]]] = []  # per call: (place, tensor, version)
        self._passed: list[tuple[list[torch.Tensor], list[Any]]] = []  # per call: inputs, makers of outputs
        self._given_out: set[int] = set()  # boundaries that the model returns

    def run(self, blocks: Sequence[Block], run: Callable[[], torch.Tensor]) -> Survey:
        hook = self._model.register_forward_hook(self._note_output)
        try:
            with visiting(self._model, blocks, self._visit):
                loss = run()
        finally:
            hook.remove()
        self._note_fates()
        held = self._given_out | self._held_between(loss)
        del loss
        self._versions.clear()
        self._passed.clear()
        self._result.elsewhere = held | self._alive()
        self._result.passing -= self._result.elsewhere
        return self._result

    def _note_output(self, module: nn.Module, args: Any, output: Any) -> None:
        self._given_out |= self._known(tensors(output))

    def _held_between(self, loss: torch.Tensor) -> set[int]:
        """Boundaries that operations outside of regions hold for backward; all, if that cannot be told."""
        inside = {
            node
            for inputs, makers in self._passed
            for node in makers
            if node is not None and not any(node is given.grad_fn for given in inputs)
        }
        starts = [loss, *(tensor for inputs, _ in self._passed for tensor in inputs)]
        try:
            nodes = walk(starts, inside)
            return self._known([saved.tensor for saved in saved_tensors(nodes)])
        except Exception:  # a node that does not show what it holds
            return set(range(len(self._result.boundary_bytes)))

    def _known(self, found: list[torch.Tensor]) -> set[int]:
        with below_torch_function():  # logits that do not exist yet are not made for a look at their memory
            storages = [tensor.untyped_storage() for tensor in found if has_storage(tensor)]
        known = ((storage, self._boundary.get(storage._cdata)) for storage in storages)
        return {seen[1] for storage, seen in known if seen is not None and seen[0]() is storage}

    def _alive(self) -> set[int]:
        """When the graph has gone: those that somebody else has, an attribute or a closure."""
        return {number for storage, number in self._boundary.values() if storage() is not None}

    def _visit(
        self, name: str, tower: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        _refuse_cache(name, (*args, *kwargs.values()))
        number = self._calls.get(name, 0)
        self._calls[name] = number + 1
        index = len(self._result.sightings)
        inputs = tensors((args, kwargs))
        sighting = Sighting(name, number, tower, module, forward, self._boundaries(inputs), ())
        self._result.passing |= {
            boundary
            for tensor, boundary in zip(inputs, sighting.inputs, strict=True)
            if tensor.grad_fn is not None and not any(boundary in s.outputs for s in self._result.sightings)
        }
        self._result.sightings.append(sighting)
        self._versions.append([])
        before = [_version(tensor) for tensor in inputs]
        output = frugally(name, module, forward, args, kwargs)
        self._versions[index] = [
            (place, tensor, version)
            for place, (tensor, version) in enumerate(zip(inputs, before, strict=True))
            if _version(tensor) == version  # a write by the region itself is part of its capture
        ]
        self._result.sightings[index] = replace(sighting, outputs=self._boundaries(tensors(output)))
        self._passed.append((inputs, [tensor.grad_fn for tensor in tensors(output)]))
        return output

    def _boundaries(self, found: list[torch.Tensor]) -> tuple[int, ...]:
        """A number per storage that passes between regions."""
        numbers = []
        for tensor in found:
            if not has_storage(tensor):  # sparse: nothing of its memory is planned
                numbers.append(len(self._result.boundary_bytes))
                self._result.boundary_bytes.append(0)
                continue
            storage = tensor.untyped_storage()
            known = self._boundary.get(storage._cdata)
            if known is None or known[0]() is not storage:
                known = (weakref.ref(storage), len(self._result.boundary_bytes))
                self._boundary[storage._cdata] = known
                self._result.boundary_bytes.append(storage.nbytes())
            numbers.append(known[1])
        return tuple(numbers)

    def _note_fates(self) -> None:
        readers: dict[int, set[int]] = {}
        for index, sighting in enumerate(self._result.sightings):
            for boundary in sighting.inputs:
                readers.setdefault(boundary, set()).add(index)
        for index, sighting in enumerate(self._result.sightings):
            written = frozenset(
                p for p, tensor, version in self._versions[index] if _version(tensor) != version
            )
            shared = frozenset(p for p, b in enumerate(sighting.inputs) if len(readers[b]) > 1)
            self._result.sightings[index] = replace(sighting, written_later=written, shared=shared)


def _refuse_cache(name: str, given: Iterable[Any]) -> None:
    for value in given:
        if callable(getattr(type(value), "get_seq_length", None)):  # as transformers' caches have it
            raise InputError(
                f"{name} is given a KV cache ({type(value).__name__}), which grows with every call: a "
                "recomputation would fill it again. Training needs none: leave out use_cache=True and "
                "past_key_values"
            )


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # those cannot be written


class _Captures:
    """Second run: each distinct region is captured at its first call, and compared at the next ones."""

    def __init__(
        self,
        model: nn.Module,
        found: Survey,
        progress: Progress,
        measure: Measure | None,
        like: Sequence[RegionGraph | None],
    ) -> None:
        self._model = model
        self._like = like
        self._found = found
        self._progress = progress
        self._measure = measure
        self._calls = 0

    def run(self, blocks: Sequence[Block], run: Callable[[], torch.Tensor]) -> None:
        with visiting(self._model, blocks, self._visit):
            run()

    def _visit(
        self, name: str, tower: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        index = self._calls
        self._calls += 1
        if index >= len(self._found.sightings) or self._found.sightings[index].name != name:
            raise CaptureError(
                f"the step called {name} where it had called another region before; its control flow depends "
                "on chance, so its regions cannot be told apart: fix the random choice while fitting"
            )
        sighting = self._found.sightings[index]
        species = self._species(sighting, args, kwargs)
        self._found.sightings[index] = replace(sighting, species=species)
        return frugally(name, module, forward, args, kwargs)

    def _species(self, sighting: Sighting, args: Any, kwargs: Any) -> int:
        text = repr(signature(args, kwargs, sighting.module.training))
        alike = [i for i, s in enumerate(self._found.species) if self._may_share(s, sighting, text)]
        if alike:
            seen = _graph_of(sighting, args, kwargs, hold=False)
            same = (i for i in alike if _is_same(seen, self._found.species[i]))
            index = ranks.agree(next(same, None))
            if index is not None:
                return index
        self._progress(f"capturing {sighting.name}")
        number = len(self._found.species)
        like = self._like[number] if number < len(self._like) else None
        species = _agreed(_describe(sighting, text, args, kwargs, like))
        self._found.species.append(species)
        if self._measure is not None:
            self._measure(species, args, kwargs)
        return len(self._found.species) - 1

    def _may_share(self, species: Species, sighting: Sighting, text: str) -> bool:
        other = species.example
        return (
            species.signature == text
            and type(other.module) is type(sighting.module)
            and (other.written_later, other.shared) == (sighting.written_later, sighting.shared)
        )


def _is_same(seen: Capture | str, species: Species) -> bool:
    """Whether a call is of a species with the same signature. One that cannot be captured is; one for which
    there was no memory only of a species that has no recipes either."""
    if isinstance(seen, str):
        return species.graph is None or not seen.startswith(_NO_ROOM)
    return species.plain is not None and _begun_at_0(seen.graph) == _begun_at_0(species.plain)


def _begun_at_0(graph: RegionGraph) -> RegionGraph:
    """The graph as if its inputs were not slices of something: where they begin in their storage, recipes do
    not care."""
    begins: dict[int, int] = {}
    for value in graph.values:
        if graph.storages[value.storage].role is Role.INPUT:
            begins[value.storage] = min(value.offset, begins.get(value.storage, value.offset))
    if not any(begins.values()):
        return graph
    values = (replace(v, offset=v.offset - begins.get(v.storage, 0)) for v in graph.values)
    return replace(graph, values=tuple(values))


def _graph_of(sighting: Sighting, args: Any, kwargs: Any, **options: Any) -> Capture | str:
    """The capture, or why there is none."""
    try:
        return capture(sighting.forward, args, kwargs, sighting.module, **options)
    except CaptureError as error:
        return str(error)
    except torch.OutOfMemoryError as error:
        return f"{_NO_ROOM} ({str(error)[:100]})"
    except Exception as error:  # a region that cannot run under the recorder still runs
        return f"it cannot be captured ({type(error).__name__}: {str(error)[:200]})"


def _describe(
    sighting: Sighting, text: str, args: Any, kwargs: Any, like: RegionGraph | None = None
) -> Species:
    """Capture twice on different data, check every operation by replaying it, time it. All of that holds more
    than the region's own step does: without room for it there are no recipes."""
    try:
        return _captured(Species(text, sighting), args, kwargs, like)
    except torch.OutOfMemoryError as error:
        return Species(text, sighting, note=f"{_NO_ROOM} ({str(error)[:100]})")


def _captured(species: Species, args: Any, kwargs: Any, like: RegionGraph | None) -> Species:
    sighting = species.example
    first = _graph_of(sighting, args, kwargs)
    if isinstance(first, str):
        species.note = first
        return species
    species.plain = first.graph
    second = _graph_of(sighting, args, kwargs, hold=False, reseed=1)
    if isinstance(second, str):
        species.note = f"on other data {second}"
    elif second.graph != first.graph:
        species.note = f"its operations depend on data or chance: {difference(first.graph, second.graph)}"
    else:
        graph = folded(price(checked(first)), like).graph
        for place in sighting.written_later:
            graph = _without_input(graph, place)
        species.graph = with_shared(graph, sighting.shared)
    return species


def _agreed(species: Species) -> Species:
    """The same on all ranks: one rank's seconds, and no recipes where a region is not everywhere the same."""
    if not ranks.all_of(species.graph is not None):
        species.note = species.note or "on another rank it cannot be captured, or depends on data"
        species.graph = None
    elif not ranks.all_equal(species.plain):
        species.note, species.graph = "its operations differ from rank to rank: they depend on data", None
    else:
        species.graph = ranks.agree(species.graph)
    return species


def difference(a: RegionGraph, b: RegionGraph) -> str:
    """The first thing in which two captures differ."""
    for ours, theirs in zip(a.ops, b.ops, strict=False):
        if ours.name != theirs.name:
            return f"{ours.name} or {theirs.name} at {ours.source or theirs.source}"
        if (ours.args, ours.kwargs) != (theirs.args, theirs.kwargs):
            return f"the arguments of {ours.name} at {ours.source} change"
    if len(a.ops) != len(b.ops):
        return f"{len(a.ops)} or {len(b.ops)} operations"
    return "the autograd graph changes"


def _without_input(graph: RegionGraph, place: int) -> RegionGraph:
    storage = graph.values[graph.inputs[place]].storage
    values = tuple(replace(v, held=False) if v.storage == storage else v for v in graph.values)
    sources = tuple(s for s in graph.sources if graph.values[s.value].storage != storage)
    return replace(graph, values=values, sources=sources)


def with_shared(graph: RegionGraph, places: frozenset[int]) -> RegionGraph:
    shared = {graph.values[graph.inputs[place]].storage for place in places}
    storages = tuple(
        replace(s, shared=True) if i in shared and s.role is Role.INPUT else s
        for i, s in enumerate(graph.storages)
    )
    return replace(graph, storages=storages)


# ---------------------------------------------------------------------------------------- the timeline


@dataclass(frozen=True)
class _Mark:
    phase: Phase
    call: int
    begins: bool
    current_bytes: int
    peak_bytes: int  # since the mark before
    gradient_bytes: int


def timeline(
    model: nn.Module,
    blocks: Sequence[Block],
    run: Callable[[], torch.Tensor],
    meter: Meter,
    sightings: Sequence[Sighting] = (),
) -> tuple[Segment, ...]:
    """One step, forward and backward, every region checkpointed: the level at every border of a region.

    `sightings` are those of the survey, in the same order: a region's backward ends when the gradients of its
    own inputs are there; an input that others read as well gets its gradient when the last of them is done.
    At the latest it ends when backward comes to something that ran before the region: autograd runs what is
    ready in the reverse order of its making. A region whose outputs get no gradient has no backward.
    """
    return _Clock(model, meter, [_not_its_own(sighting) for sighting in sightings]).run(blocks, run)


def _not_its_own(sighting: Sighting) -> frozenset[int]:
    """Inputs that other regions read too, or that it only hands on: gradients come to them from elsewhere."""
    handed_on = {place for place, boundary in enumerate(sighting.inputs) if boundary in sighting.outputs}
    return sighting.shared | handed_on


class _Clock:
    def __init__(self, model: nn.Module, meter: Meter, elsewhere: Sequence[frozenset[int]]) -> None:
        self._model = model
        self._elsewhere = elsewhere
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._meter = meter
        self._marks: list[_Mark] = []
        self._calls = 0
        self._running: dict[int, Callable[[], None]] = {}  # in backward: marks the end, if it must have come

    def run(self, blocks: Sequence[Block], run: Callable[[], torch.Tensor]) -> tuple[Segment, ...]:
        start = self._meter.current_bytes()
        self._meter.reset_peak()
        with visiting(self._model, blocks, self._visit):
            loss = run()
            self._mark(Phase.FORWARD, -1, begins=False)
            backward(loss)
            self._meter.synchronize()
        self._mark(Phase.BACKWARD, -1, begins=False)
        return self._segments(start)

    def _mark(self, phase: Phase, call: int, *, begins: bool) -> None:
        present = (p.grad for p in self._parameters if p.grad is not None)
        gradients = sum(s.nbytes() for gradient in present for s, _ in storages_of(gradient))
        self._marks.append(
            _Mark(phase, call, begins, self._meter.current_bytes(), self._meter.peak_bytes(), gradients)
        )
        self._meter.reset_peak()

    def _visit(
        self, name: str, tower: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        call = self._calls
        self._calls += 1
        self._mark(Phase.FORWARD, call, begins=True)
        output = frugally(name, module, forward, args, kwargs)
        self._mark(Phase.FORWARD, call, begins=False)
        self._watch_backward(call, tensors(output), tensors((args, kwargs)))
        return output

    def _watch_backward(self, call: int, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        elsewhere = self._elsewhere[call] if call < len(self._elsewhere) else frozenset()
        wanted = {place for place, tensor in enumerate(inputs) if tensor.requires_grad}
        leaves = {place for place in wanted if inputs[place].grad_fn is None}  # served as soon as they can be
        waiting = wanted - elsewhere - leaves or wanted - leaves or wanted
        nodes = list(dict.fromkeys(tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None))
        count = len(nodes)  # hooks that know the nodes themselves would keep them
        begun: set[int] = set()

        def begin(number: int) -> Callable[[Any], None]:
            def hook(_: Any) -> None:
                if not begun:
                    self._end_those_after(call)
                    self._mark(Phase.BACKWARD, call, begins=True)
                    if waiting:
                        self._running[call] = end_if_all_ran
                begun.add(number)

            return hook

        def end() -> None:
            self._running.pop(call, None)
            waiting.clear()
            self._mark(Phase.BACKWARD, call, begins=False)

        def end_if_all_ran() -> None:
            if len(begun) == count:  # or the gradient of another output is still to come
                end()

        def arrived(place: int, made_before: bool) -> Callable[[torch.Tensor], None]:
            def hook(_: torch.Tensor) -> None:
                if not waiting:  # the end has been marked
                    return
                waiting.discard(place)
                # An input may have other readers: its gradient does not mean that the region had a backward.
                if not waiting and (begun or not count):
                    end()
                elif made_before and call in self._running:
                    end_if_all_ran()

            return hook

        for number, node in enumerate(nodes):
            node.register_prehook(begin(number))
        for place in sorted(wanted):
            before = place not in leaves and inputs[place].grad_fn not in nodes
            inputs[place].register_hook(arrived(place, before))  # type: ignore[no-untyped-call]

    def _end_those_after(self, call: int) -> None:
        for later in sorted((one for one in self._running if one > call), reverse=True):
            self._running[later]()

    def _segments(self, start: int) -> tuple[Segment, ...]:
        segments: list[Segment] = []
        level, inside = start, -1
        for mark in self._marks:
            call = inside
            if not mark.begins and mark.call >= 0:
                call = mark.call  # also where its beginning was not seen
            segments.append(
                Segment(
                    phase=mark.phase,
                    call=call,
                    start_bytes=level - start,
                    peak_bytes=max(mark.peak_bytes, level, mark.current_bytes) - start,
                    end_bytes=mark.current_bytes - start,
                    gradient_bytes=mark.gradient_bytes,
                    label="" if call >= 0 else _glue_label(segments, mark),
                )
            )
            level = mark.current_bytes
            inside = mark.call if mark.begins else -1
        return tuple(segments)


def _glue_label(before: list[Segment], mark: _Mark) -> str:
    if mark.phase is Phase.FORWARD:
        if not before:
            return "before the first region (embedding)"
        return "after the last region (head, loss)" if mark.call < 0 else "between regions, forward"
    seen_backward = any(segment.phase is Phase.BACKWARD and segment.call >= 0 for segment in before)
    if not seen_backward:
        return "backward of head and loss"
    return "backward of what comes first (embedding)" if mark.call < 0 else "between regions, backward"
