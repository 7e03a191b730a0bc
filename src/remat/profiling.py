"""model, batch -> Profile: survey the regions, solve a menu for each distinct one, run every entry for real.

Nothing here needs the plain step's memory: regions are captured and run one at a time, and so frugal are the
whole steps that are measured then (`wholestep.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch

from remat import ranks
from remat.check.live import local_bytes, storages_of
from remat.check.optimizer import optimizer_bytes
from remat.check.peak import release_cached
from remat.check.step import fingerprint
from remat.check.untouched import untouched
from remat.compiling import compile_hint, compiled_kind
from remat.errors import CaptureError, HostMemoryError, InputError, RecomputeError
from remat.hosting import Hosting, hosting
from remat.menus import Inputs, measured_kind, menu_entry
from remat.records import (
    Environment,
    HeadChunks,
    Kind,
    Profile,
    RegionCall,
    StepBytes,
)
from remat.request import Request, device_of, refuse_several
from remat.run.chunk import HeadHandle, chunk_head, find_head
from remat.run.chunk_loss import no_row_ignored
from remat.run.compiled import decompiled
from remat.run.fused import can_fuse
from remat.run.quiet import quiet
from remat.stems import measured_stem
from remat.trace.discover import Block, find_blocks
from remat.trace.loops import with_loops
from remat.trace.survey import Sighting, Species, Survey, survey
from remat.wholestep import WholeStep, as_in_steps, chunked_step, fastest_step, with_finer

__all__ = ["build_profile", "region_call", "storage_bytes", "survey_notes"]

Progress = Callable[[str], None]
_KINDS_IN_FULL = 4  # kinds of blocks that are compiled with as many saved sets as pay; more get two each


def build_profile(request: Request, progress: Progress) -> Profile:
    """Blocks that compute something else when they are run again are no regions: they stay as they are. Where
    the step with the head as it is does not fit, it is only measured with the head in chunks."""
    refuse_several(request.model)
    ranks.refuse_strangers(fingerprint(request.model))
    blocks = find_blocks(request.model)
    notes: list[str] = []
    cut = ""
    while True:
        try:
            return _profile(request, blocks, notes, progress, cut)
        except torch.OutOfMemoryError:
            cut = _head_to_cut(request) if not cut else ""
            if not cut:
                raise
            progress(f"memory ran out: once more with {cut} in chunks")
        except RecomputeError as error:
            left = _without(blocks, error.region)
            if ranks.several() or len(left) == len(blocks) or not left:
                raise
            names = [block.name for block in blocks if block not in left]
            notes.append(f"{_first_of(names)} stay as they are: {str(error).splitlines()[0]}")
            progress(f"planning without {_first_of(names)}")
            blocks = left
        release_cached(device_of(request.model))  # now: the error held what the step had


def _head_to_cut(request: Request) -> str:
    """The head whose logits may be what does not fit; "" if it must run as it is, or nobody knows it."""
    head = find_head(request.model)
    if head is None or not request.chunk or request.one_graph or request.like is not None or ranks.several():
        return ""
    return head[0]


def _without(blocks: Sequence[Block], region: str) -> tuple[Block, ...]:
    """Without the block of this name and those of its class."""
    classes = {type(block.module) for block in blocks if block.name == region}
    return tuple(block for block in blocks if type(block.module) not in classes)


def _profile(
    request: Request, blocks: Sequence[Block], more_notes: Sequence[str], progress: Progress, cut: str = ""
) -> Profile:
    """`cut`: the head that runs in chunks throughout."""
    model, device = request.model, device_of(request.model)
    step = _step_bytes(request, device)
    notes = list(more_notes)
    with (
        untouched(model, request.optimizer),
        quiet(model),
        decompiled(block.module for block in blocks),
        torch.cuda.device(device) if device.type == "cuda" else nullcontext(),  # events go to the current one
        ExitStack() as stack,
    ):
        looped = with_loops(model, tuple(blocks), request.run)
        stack.enter_context(decompiled(block.module for block in looped if block not in blocks))
        blocks = looped
        in_chunks = stack.enter_context(chunk_head(model, head=cut)) if cut else None
        if in_chunks is not None:
            stack.enter_context(no_row_ignored())  # other batches ignore other labels
        host = _hosting(request, device, stack, notes, progress)
        kernels = threading.Thread(target=_try_kernels, args=(device,), daemon=True)
        kernels.start()
        progress("surveying regions")
        kinds: list[Kind] = []

        def measure(species: Species, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            kinds.append(_kind_for(request, len(kinds), species, (args, kwargs), device, progress, host))

        like = () if request.like is None else [kind.graph for kind in request.like.kinds]
        found = survey(model, blocks, request.run, progress, measure, like, between=kernels.join)
        if not found.sightings:
            raise InputError(
                f"{type(model).__name__} has no repeated blocks that this step calls; mark what should be "
                'planned with remat.region("name", fn)'
            )
        release_cached(device)
        progress("measuring a step")
        try:
            whole, seconds, longer = fastest_step(request, blocks, found, kinds, device)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f"{type(model).__name__}'s step does not fit beside what is in memory, though every region "
                f"was recomputed as a whole: free memory, or give a smaller batch ({error})"
            ) from error
        stem = measured_stem(request, blocks, found, whole.segments, host, device)
        chunks: HeadChunks | str | None = None
        if in_chunks is not None:
            chunks = _chunks_alone(in_chunks, whole, seconds, cut)
            in_chunks.remove()
            progress("measuring a step with the head in slices of classes")
            with suppress(torch.OutOfMemoryError):  # what was measured is good for plans without
                chunks = with_finer(request, blocks, found, kinds, seconds, device, chunks, alone=True)
            notes.append(
                f"with {cut} as it is the step does not fit: it was measured in chunks alone, and so is the "
                "untouched step that figures are compared with"
            )
        elif request.chunk:
            chunks = chunked_step(request, blocks, found, kinds, seconds, device, progress)
            notes += [chunks] if isinstance(chunks, str) else []
    step = replace(step, outputs=whole.output_bytes)
    calls = tuple(region_call(sighting) for sighting in found.sightings)
    kinds = as_in_steps(kinds, longer)
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
        elsewhere=tuple(sorted(found.elsewhere)),
        segments=whole.segments,
        step_seconds=seconds,
        accumulate=request.accumulate,
        notes=(
            *survey_notes(found),
            *_compiler_notes(request, calls, kinds, seconds),
            *notes,
        ),
        head=None if isinstance(chunks, str) else chunks,
        chunked=in_chunks is not None,
        names_head=find_head(model) is not None,
        one_graph=request.one_graph and any(kind.compiler for kind in kinds),
        link=None if host is None else host.rates,
        host_limit_bytes=None if host is None else host.host_limit_bytes,
        stem=stem,
    )


def _chunks_alone(found: HeadHandle, whole: WholeStep, seconds: float, head: str) -> HeadChunks:
    """The step with the head in chunks, where there is no other to compare with."""
    if not found.counts.losses or found.counts.materialised:
        why = found.counts.reason or "no F.cross_entropy is computed from its logits"
        raise torch.OutOfMemoryError(
            f"the step does not fit beside what is in memory, though every region was recomputed as a whole, "
            f"and {head} does not run in chunks: {why}. Free memory, or give a smaller batch"
        )
    return HeadChunks(head, whole.segments, seconds, output_bytes=whole.output_bytes)


def _try_kernels(device: torch.device) -> None:
    """Beside the first run of the survey, which measures nothing: the first kernel takes a second."""
    here = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with here, suppress(torch.OutOfMemoryError):
        can_fuse(device)


def _hosting(
    request: Request, device: torch.device, stack: ExitStack, notes: list[str], progress: Progress
) -> Hosting | None:
    like = request.like
    if not request.offload or (like is not None and like.link is None):
        return None
    if like is None:
        progress("measuring the link to the host")
    found, problem = None, ""
    try:
        found = stack.enter_context(hosting(device, like))
    except HostMemoryError as error:
        problem = str(error)
    if ranks.all_of(found is not None):
        return found
    notes.append(f"nothing is offloaded: {problem or 'the host of another rank refuses'}")
    return None


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
        return measured_kind(species, inputs, device, progress, host, like, request.parts)
    compiled, problem = None, ""
    try:
        most = None if number < _KINDS_IN_FULL else 2
        compiled = compiled_kind(species, inputs, device, request.compiler, progress, menu_entry, most, host)
    except CaptureError as error:
        problem = str(error)
    if ranks.all_of(compiled is not None) and compiled is not None:
        return compiled
    kind = measured_kind(species, inputs, device, progress, host, like, request.parts)
    problem = problem or "on another rank it cannot be"
    return replace(kind, note="; ".join(filter(None, (f"not compiled, {problem}", kind.note))))
