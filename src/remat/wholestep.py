"""Whole steps of a model, run and measured: their memory along the way, and what they take at their fastest.

Every region is recomputed as a whole in them, or most run compiled with their smallest saved set: nothing
here needs the plain step's memory.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from remat import ranks
from remat.check.live import Meter
from remat.check.peak import release_cached
from remat.check.untouched import backward, clear_gradients
from remat.records import Entry, HeadChunks, Kind, Mode, Phase, Segment
from remat.request import Request, device_of
from remat.run.chunk import chunk_head, find_head
from remat.run.chunk_loss import no_row_ignored
from remat.run.compiled import block_for
from remat.run.monitor import allowed_bytes
from remat.run.onegraph import calls_of, trunks_of
from remat.trace.discover import Block
from remat.trace.survey import Sighting, Survey, frugally, timeline, visiting

__all__ = ["WholeStep", "as_in_steps", "chunked_step", "fastest_step", "with_finer"]

Progress = Callable[[str], None]
_Place = tuple[str, int]  # a call of a region: its name and number
_Way = Callable[[nn.Module, Callable[..., Any], Any, Any], Any]  # how it runs: module, forward, args, kwargs

_LONG_SECONDS = 0.3  # an accelerator's step that takes so long is timed fewer times
_STEPS_COMPILED = 3  # timed, after a first one
_PAIRS, _PAIRS_LONG = 4, 2  # steps that are timed one way and the other; of long ones
_ONE_KEPT_OF = 4  # compiled calls, in the step that is timed to see what keeping takes
_ROOM = 0.9  # of the free bytes, that this step may be predicted to take
_ROOM_TO_SPARE = 0.5  # the same for the untouched step, which is timed only if it disturbs nobody
_STEPS_PLAIN = 3  # of it, the first included: the fastest counts


def _without(extra: float, seconds: float, most: float = 0.5) -> float:
    """The fastest step's seconds from the frugal one's. Recomputing all takes a third, running eagerly what
    can be compiled may take most; timings are noisy."""
    return seconds - min(extra, most * seconds)


def fastest_step(
    request: Request, blocks: Sequence[Block], found: Survey, kinds: Sequence[Kind], device: torch.device
) -> tuple[WholeStep, float, dict[Mode, float]]:
    """Timeline of the step with every region recomputed as a whole, and seconds of the step with every region
    in its fastest entry: on an accelerator with room to spare, those of the untouched step; else those of a
    frugal step, less what its regions take longer, but not less than its regions take the accelerator. Last,
    where an accelerator runs compiled blocks: how much longer than its
    menu says a call takes in a step, recomputed or kept, as a share of what it takes at its fastest. A host's
    timings are too noisy for that."""
    whole = _whole_step(request, blocks, found, device)
    references = [kind.menu[kind.reference] for kind in kinds]
    ran = {segment.call for segment in whole.segments if segment.phase is Phase.BACKWARD}
    plain = None
    if device.type == "cuda" and not request.compiler and request.like is None:
        plain = _plain_seconds(request, blocks, found, kinds, whole, device)
    if plain is not None:
        return whole, plain, {}
    eager = _without(_extra_of(references, found, ran), whole.seconds, 0.9 if request.compiler else 0.5)
    eager = max(eager, sum(kinds[sighting.species].device_seconds for sighting in found.sightings))
    if any(kind.compiler for kind in kinds):  # the eager step says little of one that is compiled
        sets = [kind.menu[_timed_entry(kind)] for kind in kinds]
        paced = _compiled_seconds(request, blocks, found, kinds, sets)
        if ranks.all_of(paced is not None) and paced is not None:
            compiled = _without(_extra_of(sets, found, ran), ranks.agree(paced))
            calls = [s for i, s in enumerate(found.sightings) if i in ran and kinds[s.species].compiler]
            if device.type != "cuda" or not calls:
                return whole, compiled, {}
            recomputed = (eager - compiled) / _fastest_seconds(kinds, calls)
            kept = _kept_longer(request, blocks, found, kinds, sets, calls, whole, device)
            return whole, compiled, {Mode.FULL: recomputed, Mode.KEEP: recomputed if kept is None else kept}
    return whole, eager, {}


def _fastest_seconds(kinds: Sequence[Kind], calls: Sequence[Sighting]) -> float:
    """Of these calls, each in its fastest entry."""
    return sum(kinds[s.species].forward_seconds + kinds[s.species].backward_seconds for s in calls)


def _extra_of(entries: Sequence[Entry], found: Survey, ran: set[int]) -> float:
    """What these entries take longer, of the calls that ran in backward."""
    return sum(entries[s.species].extra_seconds for call, s in enumerate(found.sightings) if call in ran)


def as_in_steps(kinds: Sequence[Kind], longer: Mapping[Mode, float]) -> list[Kind]:
    """Compiled kinds with eager entries that take longer, by their mode: by so much of the kind's seconds.
    Blocks alone do not tell: compiled ones take longer in a step than by themselves; and where the host sets
    the pace of a block alone, computing it again takes longer there than in a step."""

    def shifted(kind: Kind, entry: Entry) -> Entry:
        shift = longer.get(entry.mode, 0.0) * (kind.forward_seconds + kind.backward_seconds)
        return replace(entry, extra_seconds=max(entry.extra_seconds + shift, 0.0))

    return [
        replace(kind, menu=tuple(shifted(kind, entry) for entry in kind.menu)) if kind.compiler else kind
        for kind in kinds
    ]


def _plain_seconds(
    request: Request,
    blocks: Sequence[Block],
    found: Survey,
    kinds: Sequence[Kind],
    whole: WholeStep,
    device: torch.device,
) -> float | None:
    """Seconds of a step that keeps everything; None if that would take much of the memory that is free."""
    clear_gradients(request.model)
    free_bytes = _ROOM_TO_SPARE * _free_bytes(device) - max(segment.peak_bytes for segment in whole.segments)
    kept_bytes = sum(kinds[sighting.species].menu[0].resident_bytes for sighting in found.sightings)
    if not ranks.all_of(kept_bytes <= free_bytes):
        return None
    everything = {(sighting.name, sighting.call): _as_it_is for sighting in found.sightings}
    try:
        steps = [_frugal_step(request.model, blocks, request.run, everything) for _ in range(_STEPS_PLAIN)]
        seconds: float | None = min(steps)
    except torch.OutOfMemoryError:
        seconds = None
    release_cached(device)
    if not ranks.all_of(seconds is not None) or seconds is None:
        return None
    return ranks.agree(seconds)


def _compiled_seconds(
    request: Request, blocks: Sequence[Block], found: Survey, kinds: Sequence[Kind], sets: Sequence[Entry]
) -> float | None:
    """Seconds of a step with these saved sets; None if it takes more memory than there is."""
    compiled = _compiled_calls(found, kinds, sets)
    try:
        _frugal_step(request.model, blocks, request.run, compiled)
        steps = [_frugal_step(request.model, blocks, request.run, compiled) for _ in range(_STEPS_COMPILED)]
    except torch.OutOfMemoryError:
        return None
    return statistics.median(steps)


def _kept_longer(
    request: Request,
    blocks: Sequence[Block],
    found: Survey,
    kinds: Sequence[Kind],
    sets: Sequence[Entry],
    calls: Sequence[Sighting],
    whole: WholeStep,
    device: torch.device,
) -> float | None:
    """How much longer than their menu says compiled calls take in a step if they run eagerly and keep what
    they save, as a share of what they take at their fastest. Every fourth of each kind does, and of few one,
    beside others with these saved sets; without room for that, every fourth of all; None: nor for that."""
    clear_gradients(request.model)
    free_bytes = _ROOM * _free_bytes(device) - max(segment.peak_bytes for segment in whole.segments)
    for kept in _samples(calls):
        keeps = [kinds[sighting.species].menu[0] for sighting in kept]
        others = (sets[sighting.species] for sighting in calls if sighting not in kept)
        if ranks.all_of(bool(kept) and sum(e.resident_bytes for e in (*keeps, *others)) <= free_bytes):
            break
    else:
        return None
    compiled = _compiled_calls(found, kinds, sets)
    keeping = compiled | {(sighting.name, sighting.call): _as_it_is for sighting in kept}
    pairs = _pairs(whole.seconds)

    def step(keep: bool) -> float:
        return _frugal_step(request.model, blocks, request.run, keeping if keep else compiled)

    try:
        seconds: float | None = _difference(step, pairs)
    except torch.OutOfMemoryError:
        seconds = None
    if not ranks.all_of(seconds is not None) or seconds is None:
        return None
    said = sum(
        keep.extra_seconds - sets[s.species].extra_seconds for keep, s in zip(keeps, kept, strict=True)
    )
    return (ranks.agree(seconds) - said) / _fastest_seconds(kinds, kept)


def _samples(calls: Sequence[Sighting]) -> tuple[list[Sighting], list[Sighting]]:
    """Every fourth of each kind and at least one of each; and every fourth, whatever it is."""
    of_kind: dict[int, list[Sighting]] = {}
    for sighting in calls:
        of_kind.setdefault(sighting.species, []).append(sighting)
    each = [s for group in of_kind.values() for s in group[_ONE_KEPT_OF - 1 :: _ONE_KEPT_OF] or group[-1:]]
    return each, [s for group in of_kind.values() for s in group][_ONE_KEPT_OF - 1 :: _ONE_KEPT_OF]


def _free_bytes(device: torch.device) -> int:
    """What this process can still allocate."""
    reserved = torch.cuda.memory_reserved(device)
    more = min(torch.cuda.mem_get_info(device)[0], allowed_bytes(device) - reserved)
    return max(more, 0) + reserved - torch.cuda.memory_allocated(device)


def _as_it_is(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _pairs(seconds: float) -> int:
    """How many pairs of steps are timed that take about so long; as many on every rank."""
    return _PAIRS_LONG if ranks.agree(seconds) > _LONG_SECONDS else _PAIRS


def _difference(step: Callable[[bool], float], pairs: int) -> float:
    """Seconds that a step takes longer one way than the other. Both run in pairs, each the other way round: a
    clock that slows down in between would show as a difference that is none."""
    step(True)  # kernels are made in the first
    found = []
    for pair in range(pairs):
        timed = {way: step(way) for way in ((False, True) if pair % 2 else (True, False))}
        found.append(timed[True] - timed[False])
    return statistics.median(found)


def _compiled_calls(found: Survey, kinds: Sequence[Kind], sets: Sequence[Entry]) -> dict[_Place, _Way]:
    """The calls that run compiled with these saved sets, by name and number."""
    made = [
        block_for(kind.signature, kind.graph, entry.recipe, kind.compiler)
        if entry.mode is Mode.COMPILED and entry.recipe is not None and kind.graph is not None
        else None
        for kind, entry in zip(kinds, sets, strict=True)
    ]
    return {(s.name, s.call): block for s in found.sightings if (block := made[s.species]) is not None}


def _timed_entry(kind: Kind) -> int:
    """The entry that steps are timed with: of a compiled kind its smallest saved set, else the reference."""
    sets = [i for i, e in enumerate(kind.menu) if e.mode is Mode.COMPILED and not e.host_bytes]
    return min(sets, key=lambda i: kind.menu[i].resident_bytes, default=kind.reference)


@dataclass(frozen=True)
class WholeStep:
    """The step with every region recomputed as a whole. `output_bytes`: what lives on because the model's
    output is held, if it is."""

    segments: tuple[Segment, ...]
    output_bytes: int
    seconds: float


def _whole_step(request: Request, blocks: Sequence[Block], found: Survey, device: torch.device) -> WholeStep:
    model, run = request.model, request.run
    first = ranks.agree(_frugal_step(model, blocks, run))  # all run as many steps
    long = first > _LONG_SECONDS and device.type != "cpu"
    # Not while bytes are read: that waits for the device at every region.
    seconds = [_frugal_step(model, blocks, run) for _ in range(1 if long else 2)]
    clear_gradients(model)
    with Meter(device) as meter:
        meter.synchronize()
        with request.holding():
            segments = timeline(model, blocks, run, meter, found.sightings)
            level = meter.current_bytes()
        output_bytes = level - meter.current_bytes()
    return WholeStep(segments, output_bytes, min(seconds))


def chunked_step(
    request: Request,
    blocks: Sequence[Block],
    found: Survey,
    kinds: Sequence[Kind],
    seconds: float,
    device: torch.device,
    progress: Progress,
) -> HeadChunks | str:
    """The same with the head in chunks; why not, if there is no head, or it did not come to that. `seconds`:
    of the fastest step with the head as it is."""
    head = find_head(request.model)
    if head is None:
        return (
            f"head and loss do not run in chunks: {type(request.model).__name__} does not name its head; "
            "give it a method get_output_embeddings() that returns the module that makes the logits"
        )
    progress("measuring a step with head and loss in chunks")
    chunks = _in_chunks(request, blocks, found, kinds, seconds, device, head[0], columns=False)
    if isinstance(chunks, str):
        return chunks
    return with_finer(request, blocks, found, kinds, seconds, device, chunks)


def with_finer(
    request: Request,
    blocks: Sequence[Block],
    found: Survey,
    kinds: Sequence[Kind],
    seconds: float,
    device: torch.device,
    chunks: HeadChunks,
    *,
    alone: bool = False,
) -> HeadChunks:
    """The same, and measured with the head cut by classes, too, where that takes less. `alone`: `seconds` are
    of the step in these chunks, since with the head as it is it does not fit."""
    head = chunks.head
    if not request.parts or not _sums_gradients(request.model.get_submodule(head)):
        return chunks
    finer = _in_chunks(request, blocks, found, kinds, seconds, device, head, columns=True, alone=alone)
    return chunks if isinstance(finer, str) else replace(chunks, finer=finer)


def _sums_gradients(head: nn.Module) -> bool:
    """Whether chunks of rows add up a gradient of the weight: by columns there is nothing to add."""
    return type(head) is nn.Linear and head.weight.requires_grad


def _in_chunks(
    request: Request,
    blocks: Sequence[Block],
    found: Survey,
    kinds: Sequence[Kind],
    seconds: float,
    device: torch.device,
    head: str,
    *,
    columns: bool,
    alone: bool = False,
) -> HeadChunks | str:
    compiled = [s.name for s in found.sightings if kinds[s.species].compiler]
    chunks = chunk_head(request.model, head=head, columns=columns)
    with chunks as handle, calls_of(request.model, compiled) as called:
        with no_row_ignored():  # other batches ignore other labels
            whole = _whole_step(request, blocks, found, device)
        counts = handle.counts
        if not counts.losses or counts.materialised:
            why = counts.reason or "no F.cross_entropy is computed from its logits"
            return f"head and loss do not run in chunks: {head}: {why}"
    sets = [kind.menu[_timed_entry(kind)] for kind in kinds]
    pairs, raced = _pairs(seconds), _compiled_calls(found, kinds, sets)
    try:
        gain = _gained(request, blocks, head, columns, raced, pairs, alone=alone)
    except torch.OutOfMemoryError:
        gain = _gained(request, blocks, head, columns, {}, pairs, alone=alone)
    trunks = trunks_of(compiled, head, called)
    chunked_seconds = _without(ranks.agree(gain), seconds)
    return HeadChunks(head, whole.segments, chunked_seconds, trunks, whole.output_bytes, columns)


def _gained(
    request: Request,
    blocks: Sequence[Block],
    head: str,
    columns: bool,
    compiled: Mapping[_Place, _Way],
    pairs: int,
    *,
    alone: bool = False,
) -> float:
    """Seconds that chunks save (or, below zero, cost). `alone`: of those that chunks of rows take."""

    def way(chunks: bool) -> AbstractContextManager[Any]:
        if not chunks and not alone:
            return nullcontext()
        return chunk_head(request.model, head=head, columns=columns and chunks)

    def step(chunks: bool) -> float:
        with way(chunks):
            return _frugal_step(request.model, blocks, request.run, compiled)

    return -_difference(step, pairs)


def _frugal_step(
    model: nn.Module,
    blocks: Sequence[Block],
    run: Callable[[], torch.Tensor],
    ways: Mapping[_Place, _Way] | None = None,
) -> float:
    """Seconds of a step; `ways`: the calls that are not recomputed as a whole, and how they run instead."""
    calls: Counter[str] = Counter()

    def visit(name: str, tower: str, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        way = ways.get((name, calls[name])) if ways else None
        calls[name] += 1
        if way is not None:
            return way(module, forward, args, kwargs)
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
