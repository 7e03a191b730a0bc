"""A plan for a budget, run and corrected until its measured peak is within it, and verified."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from remat import ranks
from remat.check import verify as check_verify
from remat.check.peak import StepPeak, release_cached, step_peak
from remat.check.regions import verify_regions
from remat.check.untouched import untouched
from remat.check.verify import Verification
from remat.errors import BudgetError, RematError, VerificationError
from remat.handle import Handle, apply, chunked_head
from remat.planner.schedule import keep_everything, refusal, schedule, with_chunks
from remat.planner.simulate import simulate
from remat.records import Action, Mode, Phase, Plan, Profile, Segment
from remat.request import Request, device_of
from remat.run.chunk_loss import no_row_ignored
from remat.trace.joint import is_random
from remat.units import format_bytes

__all__ = ["MARGIN", "fitted", "plan_below", "rounding"]

MARGIN = 0.005  # added to the least budget: what a plan peaks above its prediction
_PIECES = 0.001  # of the budget, left to the allocator's pieces
_PIECES_UNSEEN = 0.01  # the same where tensors come later that the confirming run does not have
_LACKING = 0.05  # of the budget, taken off when the device runs out of memory within it
_SLACK = 0.03  # of the budget left unused, from which on a looser plan is tried
_TRIES = 4  # plans that are measured before fit gives up on meeting a budget
_FUSING = 0.1  # of the step: more than that is not gained by fusing the head with its loss in one graph
# Relative to a tensor's largest magnitude: with another saved set the compiler may fuse and round otherwise,
# and chunks are added up in another order.
_ROUNDING = 1e-4
_ROUNDING_LOW = 0.05  # in half precision


@dataclass(frozen=True)
class _Confirmed:
    """A plan that was run and found to be within the budget; its predicted peak is the measured one."""

    plan: Plan
    measured: StepPeak | None
    outside: Any


def fitted(
    request: Request,
    found: Profile,
    budget_bytes: int,
    allowed: tuple[Action, ...],
    check: bool,
    progress: Callable[[str], None],
) -> Handle:
    """The fastest plan that was measured to be within the budget, applied and verified."""

    def search(profile: Profile, allowed: tuple[Action, ...]) -> _Confirmed | str:
        return _searched(request, profile, budget_bytes, allowed, check, progress)

    good = _searched_in_one_graph(found, allowed, search) if found.one_graph else search(found, allowed)
    if isinstance(good, str):
        if not found.one_graph:
            raise RematError(good)
        return fitted(request, _one_by_one(found, good), budget_bytes, allowed, check, progress)
    handle = _applied(request, good.plan, check)
    handle.measured, handle.outside = good.measured, good.outside
    try:
        progress("verifying region by region")
        handle.verification = _verified(request, handle)
    except BaseException:
        handle.remove()
        raise
    if ranks.all_of(handle.verification.ok):
        return handle
    handle.remove()
    return fitted(request, _without_recipes(found, handle), budget_bytes, allowed, check, progress)


def _searched(
    request: Request,
    found: Profile,
    budget_bytes: int,
    allowed: tuple[Action, ...],
    check: bool,
    progress: Callable[[str], None],
) -> _Confirmed | str:
    """Plan, run the plan, and plan again by what it showed: tighter until its measured peak is within the
    budget, and leaves to the allocator's pieces what it should if such a plan is found; or once looser where
    the prediction was too high. Otherwise why there is none."""
    over, good, tight = 0, None, None
    limit_bytes = budget_bytes - _pieces_bytes(found, budget_bytes)
    profile = _with_compiled_head(found)
    for _ in range(_TRIES):
        try:
            made = plan_below(profile, budget_bytes, over, allowed)
        except BudgetError:
            if good is None and tight is None:
                raise
            break
        progress("running the plan once")
        with _applied(request, made, check) as handle:
            excess = ranks.most(_measured_excess(request, handle, over))
            measured, outside = handle.measured, handle.outside
            lost = _lost(handle)
            if Action.OFFLOAD not in handle.plan.allow:  # the host refused: it need not be asked again
                made, allowed = replace(handle.plan, budget_bytes=budget_bytes), handle.plan.allow
        if lost:
            return lost
        peak = made.predicted_peak_bytes + excess
        if peak > budget_bytes:
            if good is not None:
                break
            if profile is found:
                over = excess
            else:  # what the head does not account for, the blocks have taken
                profile = _with_compiled_head(found, made, peak)
                over = max(peak - simulate(profile, made.choices).peak_bytes, 0)
            continue
        looser = (
            good is None
            and excess < 0
            and peak < (1 - _SLACK - _pieces_share(found)) * budget_bytes
            and any(made.choices)
        )
        if profile is not found:  # as much as the head can have taken: who plans with it later is safe
            made = replace(made, profile=_with_compiled_head(found, made, peak))
        confirmed = _Confirmed(replace(made, predicted_peak_bytes=peak), measured, outside)
        if peak > limit_bytes:  # nothing is left to the allocator's pieces
            if good is not None:
                break
            tight, over = confirmed, excess
            continue
        good = confirmed
        if not looser:
            break
        over = excess
    why = (
        f"no plan was found whose measured peak is within {format_bytes(budget_bytes)} after {_TRIES} "
        f"tries; the last one peaked {format_bytes(excess)} above its prediction: "
        "raise the budget by that much"
    )
    return good or tight or why


def _verified(request: Request, handle: Handle) -> Verification:
    plan = handle.plan
    kinds = [kind.graph for kind in plan.profile.kinds if kind.compiler and kind.graph is not None]
    random = any(map(is_random, kinds))
    if not plan.profile.one_graph or random:
        names = _with_room_to_compare(plan)
        found = verify_regions(request.model, request.run, handle.regions, names, chunked_head(plan))
        if not plan.profile.one_graph:
            return found
        how = "each saved set was compared with its block alone; the one graph draws other random numbers"
        return replace(found, bitwise=False, within="rounding", how=f"{how}, and was not compared")
    alone = replace(plan, profile=replace(plan.profile, one_graph=False))
    with handle.paused():
        found = check_verify.compare(
            lambda: apply(request.model, alone),
            lambda: apply(request.model, plan),
            request.model,
            None,
            run=lambda model, batch: request.run(),
            tolerance=rounding(request.model),
            how="whole step, against the same plan with blocks compiled one by one",
        )
    head = chunked_head(plan)
    if head is None:
        return found
    how = f"{found.how}, {head} and the loss in chunks in both (equal to the untouched ones within rounding)"
    return replace(found, bitwise=False, within="rounding", how=how)


# ------------------------------------------------------------------------------------------ in one graph


def _searched_in_one_graph(
    found: Profile,
    allowed: tuple[Action, ...],
    search: Callable[[Profile, tuple[Action, ...]], _Confirmed | str],
) -> _Confirmed | str:
    """With the head in the graph, where the compiler fuses it with the loss and the host has least to do. If
    that is out of reach, of the trunk, with head and loss in chunks behind it; if that is, too, why. The
    other way round where chunks save more than that could: of logits that are slow to multiply."""
    chunks = with_chunks(found) if Action.CHUNK in allowed else None
    without = tuple(action for action in allowed if action is not Action.CHUNK)
    first = chunks is not None and chunks.step_seconds < (1 - _FUSING) * found.step_seconds
    why = ""
    for profile in filter(None, (chunks, found) if first else (found, chunks)):
        try:
            good = search(profile, without)
        except BudgetError as error:
            good = f"that needs {format_bytes(error.needed)}"
        if not isinstance(good, str):
            plain = simulate(found, keep_everything(found))  # the head neither compiled nor in chunks
            plan = replace(good.plan, plain_peak_bytes=plain.peak_bytes, plain_seconds=plain.seconds)
            return replace(good, plan=replace(plan, allow=allowed))
        why = good
    if Action.CHUNK in allowed and found.head is not None and not found.head.trunks:
        why += "; no module that the step calls holds the blocks without the head, which is in chunks"
    return why


def _with_compiled_head(found: Profile, tried: Plan | None = None, peak_bytes: int = 0) -> Profile:
    """What lies outside of blocks (the head, the loss) was measured as it runs eagerly; in one graph with the
    blocks it needs less, by how much is seen when it runs. So nothing is assumed to be needed at first but
    what stays; then as much as it took for the plan that was `tried` to peak where it did."""
    if not found.one_graph or found.chunked or not _sees_compiled(found):
        return found
    working = 0
    if tried is not None:
        points = simulate(tried.profile, tried.choices).points
        outside = (p for p in points if p.call < 0 and p.phase is not Phase.OPTIMIZER)
        seen = max((point.peak_bytes for point in outside), default=peak_bytes)
        working = _working_outside(tried.profile) + max(peak_bytes - seen, 0)
    return replace(
        found,
        segments=tuple(
            segment
            if segment.call >= 0
            else replace(segment, peak_bytes=min(segment.peak_bytes, _stays(segment) + working))
            for segment in found.segments
        ),
    )


def _sees_compiled(found: Profile) -> bool:
    """Whether a measured step has what compiled code allocates in it: the allocator of a device does."""
    return found.environment.device.startswith("cuda")


def _working_outside(profile: Profile) -> int:
    outside = (segment for segment in profile.segments if segment.call < 0)
    return max((segment.peak_bytes - _stays(segment) for segment in outside), default=0)


def _stays(segment: Segment) -> int:
    return max(segment.start_bytes, segment.end_bytes)


def _lost(handle: Handle) -> str:
    """Why the model does not run as one graph, if it was planned so, on whichever rank."""
    if not handle.plan.profile.one_graph:
        return ""
    why = "; ".join(region.counts.why for region in handle.regions if region.counts.fallbacks)
    if not all(region.counts.calls for region in handle.regions):
        trunk = ", ".join(filter(None, handle.plan.profile.graph_roots))
        why = f"the step does not call {trunk or 'the model itself, but parts of it'}"
    return next(filter(None, ranks.gathered(why)), "")


def _one_by_one(found: Profile, why: str) -> Profile:
    note = f"blocks are compiled one by one and not in one graph: {why}"
    return replace(found, one_graph=False, notes=(*found.notes, note))


def _applied(request: Request, plan: Plan, check: bool) -> Handle:
    """The plan at work. Where the host of one rank refuses, all ranks run what that one makes do with: they
    measure and plan on together."""
    handle = apply(request.model, plan, check=check)
    if Action.OFFLOAD not in plan.allow:
        return handle
    refused = Action.OFFLOAD not in handle.plan.allow
    for other in ranks.gathered(handle.plan if refused else None):
        if other is not None and not refused:
            handle.remove()
            return apply(request.model, other, check=check)
    return handle


def plan_below(found: Profile, budget_bytes: int, over: int, allowed: tuple[Action, ...]) -> Plan:
    """The fastest plan whose prediction leaves room for what the last one peaked above its own, and for what
    the allocator's pieces may take."""
    try:
        made = schedule(found, budget_bytes - _pieces_bytes(found, budget_bytes) - over, allow=allowed)
    except BudgetError as error:
        needed = math.ceil((error.needed + over) * (1 + MARGIN) / (1 - _pieces_share(found)))
        raise refusal(budget_bytes, needed, error.hints, error.where) from None
    return replace(made, budget_bytes=budget_bytes)


def _pieces_bytes(found: Profile, budget_bytes: int) -> int:
    return math.ceil(budget_bytes * _pieces_share(found))


def _pieces_share(found: Profile) -> float:
    """CUDA's allocator leaves up to 1 MiB unused in each large piece, and counts it. What the confirming run
    does not have yet (optimizer state, gradients that stay) may lie less well than it did."""
    if not found.environment.device.startswith("cuda"):
        return 0.0
    return _PIECES_UNSEEN if found.accumulate or found.step.optimizer_state else _PIECES


def _measured_excess(request: Request, handle: Handle, before: int) -> int:
    """By how many bytes the real step peaks above what was predicted for it (below 0: it peaks lower).

    If it runs out of memory although its prediction fits, the device has less than the budget left, or its
    allocator has it in pieces: the next plan has to do with so much less.
    """
    profile, device = handle.plan.profile, device_of(request.model)
    first = replace(profile.step, optimizer_state=0, optimizer_temporary=0, outputs=0)
    alone = replace(profile, accumulate=False, step=first)
    predicted = simulate(alone, handle.plan.choices)
    release_cached(device)
    # Other batches ignore other labels.
    metering = None if chunked_head(handle.plan) is None else no_row_ignored
    with untouched(request.model, request.optimizer) as handle.outside:
        try:
            handle.measured = step_peak(request.model, request.run, device, request.holding, metering)
        except torch.OutOfMemoryError:
            lacking = max(before, 0) + math.ceil(handle.plan.budget_bytes * _LACKING)
            return max(lacking, handle.plan.budget_bytes - handle.plan.predicted_peak_bytes + lacking)
    release_cached(device)
    seen = alone.step.resident + handle.measured.above_bytes
    if seen >= predicted.peak_bytes:
        return seen - predicted.peak_bytes
    # Each point of this step was below what was seen, and has so much more in later ones as is predicted.
    later = simulate(profile, handle.plan.choices)
    most = max(
        point.peak_bytes - (0 if first is None else max(first.peak_bytes - seen, 0))
        for point, first in zip_longest(later.points, predicted.points)
    )
    return most - later.peak_bytes


def _with_room_to_compare(plan: Plan) -> set[str]:
    """Regions that can hold what they drop and its replay side by side, when their forward returns."""
    names = set()
    for point in simulate(plan.profile, plan.choices).points:
        if point.call >= 0 and point.phase is Phase.FORWARD:
            entry = plan.entry(point.call)
            if point.start_bytes + entry.forward_peak_bytes + entry.backward_peak_bytes <= plan.budget_bytes:
                names.add(plan.profile.calls[point.call].name)
    return names


def _without_recipes(found: Profile, handle: Handle) -> Profile:
    """The same profile without the recipes of the regions whose replay was wrong, on whichever rank.
    VerificationError if they have none: planning again would come to the same."""
    assert handle.verification is not None
    failed = {region.name for region in handle.regions if region.counts.fallbacks}
    wrong = set[str]().union(*ranks.gathered(failed))
    kinds = {call.kind for call in found.calls if call.name in wrong}
    if not any(entry.mode is Mode.RECIPE for number in kinds for entry in found.kinds[number].menu):
        seen = ranks.gathered("" if handle.verification.ok else handle.verification.worst)
        raise VerificationError(
            f"the planned step differs from the untouched one ({next(filter(None, seen), 'unknown')}), and "
            "no other plan is left to try. A step has to run the same way every time: check that this region "
            "does not depend on what earlier calls left behind, leave out compile= and allow= if you gave "
            'them, or mark what can be planned with remat.region("name", fn)'
        )
    return replace(
        found,
        kinds=tuple(
            replace(kind, menu=tuple(e for e in kind.menu if e.mode is not Mode.RECIPE))
            if i in kinds
            else kind
            for i, kind in enumerate(found.kinds)
        ),
        notes=(*found.notes, *(f"{name}: its recipes failed verification" for name in sorted(wrong))),
    )


def rounding(model: nn.Module) -> float:
    low = any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())
    return _ROUNDING_LOW if low else _ROUNDING
