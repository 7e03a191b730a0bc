"""What runs before the first region, measured: what of it can wait on the host, and what that frees."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from remat import ranks
from remat.check.live import Meter
from remat.check.untouched import clear_gradients
from remat.hosting import Hosting
from remat.planner.stem import places_away
from remat.records import Segment, Stem
from remat.request import Request
from remat.run.stem import Candidate, StemSender, candidates, graph_behind, send, sending
from remat.trace.discover import Block
from remat.trace.survey import Sighting, Survey, frugally, timeline, visiting

__all__ = ["measured_stem"]

_LOG = logging.getLogger(__name__)
_LEAST_SHARE = 0.02  # of the peak with every region recomputed: less is not worth a step to measure it


def measured_stem(
    request: Request,
    blocks: Sequence[Block],
    found: Survey,
    segments: Sequence[Segment],
    host: Hosting | None,
    device: torch.device,
) -> Stem | None:
    """None: it holds little, or nothing that the host could hold instead. `segments`: of the step with every
    region recomputed as a whole."""
    if host is None or request.like is not None or ranks.several():
        return None
    try:
        return _measured(request, blocks, found, segments, host, device)
    except Exception as error:  # hooks of the user's own, a graph that does not show what it holds
        _LOG.info("what runs before the first region stays on the device: %s", error)
        return None


def _measured(
    request: Request,
    blocks: Sequence[Block],
    found: Survey,
    segments: Sequence[Segment],
    host: Hosting,
    device: torch.device,
) -> Stem | None:
    first = _first(found, segments)
    least_bytes = int(_LEAST_SHARE * max(segment.peak_bytes for segment in segments))
    if first is None or _held_bytes(found, segments, first) < least_bytes:
        return None
    names, gone = _tried(request, blocks, first, host, device)
    sizes = {candidate.storage: candidate.nbytes for candidate in gone}
    if sum(sizes.values()) < least_bytes:
        return None
    stem = Stem(first.name, names, tuple(one.place for one in gone), tuple(sizes.values()), 0)
    nbytes = _freed_bytes(request, blocks, found, segments, stem, first.module, host, device)
    return None if nbytes < least_bytes else Stem(stem.region, names, stem.saved, stem.sizes, nbytes)


def _first(found: Survey, segments: Sequence[Segment]) -> Sighting | None:
    """The region that runs first, if it is a module that the step calls once."""
    call = next((segment.call for segment in segments if segment.call >= 0), None)
    if call is None or segments[0].call >= 0:
        return None
    first = found.sightings[call]
    times = Counter(sighting.name for sighting in found.sightings)
    return first if first.tower != "functions" and times[first.name] == 1 else None


def _held_bytes(found: Survey, segments: Sequence[Segment], first: Sighting) -> int:
    """What is there when the first region begins, but for what that is given."""
    return segments[0].end_bytes - sum(found.boundary_bytes[boundary] for boundary in set(first.inputs))


def _visit(name: str, tower: str, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
    return frugally(name, module, forward, args, kwargs)


def _tried(
    request: Request, blocks: Sequence[Block], first: Sighting, host: Hosting, device: torch.device
) -> tuple[tuple[str, ...], list[Candidate]]:
    """One forward that sends whatever could be sent: the graph, and what was gone at its end. What somebody
    else holds as well (the batch, features for a decoder) stays, whatever is sent."""
    engine = host.engine
    names: list[str] = []
    tried: list[Candidate] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nodes = graph_behind(args, kwargs)
        names[:] = [node.name for node in nodes]
        tried[:] = candidates(nodes, device)
        if send(first.name, nodes, [one.place for one in tried], engine):
            tried.clear()

    def after(*_: Any) -> None:
        engine.settle()

    with sending(first.module, before, after), visiting(request.model, blocks, _visit):
        loss = request.run()
    gone = [one for one in tried if one.is_gone()]
    del loss
    return tuple(names), gone


def _freed_bytes(
    request: Request,
    blocks: Sequence[Block],
    found: Survey,
    segments: Sequence[Segment],
    stem: Stem,
    module: nn.Module,
    host: Hosting,
    device: torch.device,
) -> int:
    """What a step that sends it holds less, wherever it is away."""
    sender = StemSender(stem, host.engine)
    clear_gradients(request.model)
    with sending(module, sender.before, sender.after), Meter(device) as meter:
        meter.synchronize()
        with request.holding():
            sent = timeline(request.model, blocks, request.run, meter, found.sightings)
    if not sender.sent or sender.skipped or len(sent) != len(segments):
        return 0
    away = places_away(segments) or range(0)
    return min((segments[place].start_bytes - sent[place].start_bytes for place in away), default=0)
