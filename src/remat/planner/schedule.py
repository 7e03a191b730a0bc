"""One menu entry per region call: the least seconds with the peak within the budget at every point.

The solver proposes, the simulator disposes: what is found is replayed by `simulate` before it is returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from remat.errors import BudgetError, RematError
from remat.planner.bounds import DEFAULT_ALLOW, entries, least_budget, least_choices, time_lower_bound
from remat.planner.chain import chain, fastest
from remat.planner.program import Program, memory_prices, programs, solve_milp
from remat.planner.proposals import exchanged, polished, proposals, rank
from remat.planner.simulate import Timeline, simulate
from remat.planner.stem import with_stem_sent, without_stem_sent
from remat.planner.tied import fastest_tied
from remat.records import Action, Mode, Phase, Plan, Profile
from remat.units import format_bytes, format_seconds

__all__ = ["keep_everything", "least_of_all", "make_plan", "refusal", "schedule", "with_chunks"]

_PROVEN_SHARE = 1e-3  # of a step: a plan this close to the bound needs no note


def schedule(
    profile: Profile,
    budget_bytes: int,
    *,
    allow: Sequence[Action] = DEFAULT_ALLOW,
    max_seconds: float | None = None,
    polish: bool = True,
) -> Plan:
    """The fastest plan whose simulated peak is within the budget.

    With Action.CHUNK, and a profile that measured it, head and loss run in chunks where that is faster. A
    budget that holds the untouched step gives exactly that. Raises BudgetError, with the least budget that
    works in `.needed`, if there is no plan, or none that takes at most `max_seconds`. Without `polish` a plan
    that uses the link to the host is taken as it was proposed: many plans in a hurry.
    """
    allowed = tuple(dict.fromkeys(allow))
    profile = without_stem_sent(profile)  # of a plan that sends it: that is decided anew
    plan = _best_head(profile, budget_bytes, allowed, polish)
    if polish and Action.OFFLOAD in allowed and _may_send(plan.profile):
        plan = _sharing_link(plan)
    if max_seconds is not None and plan.predicted_seconds > max_seconds:
        raise _too_slow(profile, plan, max_seconds)
    return plan


def with_chunks(profile: Profile, *, finer: bool = False) -> Profile | None:
    """The profile of the step with head and loss in chunks, if that was measured, and if there is something
    to compile as one graph without the head. `finer`: in those that take the least memory, also of a step
    that has them in coarser ones."""
    head = profile.head if not finer or profile.head is None else profile.head.finer
    if head is None or (profile.chunked and not finer) or (profile.one_graph and not head.trunks):
        return None
    return replace(
        profile,
        segments=head.segments,
        step_seconds=head.step_seconds,
        step=replace(profile.step, outputs=head.output_bytes),
        head=head,
        chunked=True,
    )


def least_of_all(profile: Profile, allow: Sequence[Action]) -> int:
    """The least budget that `schedule` has a plan for: of the step in whichever way takes the least."""
    tiers = _tiers(without_stem_sent(profile), tuple(allow))
    return min(least_budget(way, allow) for tier in tiers for way in tier)


def _best_head(profile: Profile, budget_bytes: int, allow: tuple[Action, ...], polish: bool) -> Plan:
    """Plan with the head as it is and in chunks; the faster one, or whichever fits. In finer chunks only if
    neither does, and with the stem on the host only if nothing else does."""
    plain = simulate(profile, keep_everything(profile))
    plans: list[Plan] = []
    errors: list[BudgetError] = []
    for candidates in _tiers(profile, allow):
        for candidate in () if plans else candidates:
            try:
                plans.append(_fastest(candidate, budget_bytes, allow, polish))
            except BudgetError as error:
                errors.append(error)
    if not plans:
        raise min(errors, key=lambda error: error.needed)
    best = min(plans, key=lambda plan: plan.predicted_seconds)
    return replace(best, plain_peak_bytes=plain.peak_bytes, plain_seconds=plain.seconds)


def _tiers(profile: Profile, allow: tuple[Action, ...]) -> list[list[Profile]]:
    """The step in other ways: those of a tier are tried if none of the ones before is within the budget."""
    tiers: list[list[Profile | None]] = [[profile]]
    if Action.CHUNK in allow:
        tiers[0].append(with_chunks(profile))
        tiers.append([with_chunks(profile, finer=True)])
    if Action.OFFLOAD in allow:
        tiers += [[one and with_stem_sent(one) for one in tier] for tier in tiers]
    return [[one for one in tier if one is not None] for tier in tiers]


def keep_everything(profile: Profile) -> tuple[int, ...]:
    """The untouched step: every call in the entry that keeps everything."""
    return tuple(_first(profile, call.kind, Mode.KEEP) for call in profile.calls)


def make_plan(
    profile: Profile,
    choices: Sequence[int],
    budget_bytes: int,
    *,
    strategy: str,
    allow: Sequence[Action] = DEFAULT_ALLOW,
    notes: Sequence[str] = (),
) -> Plan:
    """A plan from choices, with what the simulator predicts of it and of the untouched step."""
    predicted, plain = simulate(profile, choices), simulate(profile, keep_everything(profile))
    return Plan(
        profile=profile,
        choices=tuple(choices),
        budget_bytes=budget_bytes,
        predicted_peak_bytes=predicted.peak_bytes,
        predicted_seconds=predicted.seconds,
        plain_peak_bytes=plain.peak_bytes,
        plain_seconds=plain.seconds,
        strategy=strategy,
        allow=tuple(allow),
        notes=tuple(notes),
    )


def _first(profile: Profile, kind: int, mode: Mode) -> int:
    menu = profile.kinds[kind].menu
    return next((i for i, entry in enumerate(menu) if entry.mode is mode), 0)


def _fastest(profile: Profile, budget_bytes: int, allow: tuple[Action, ...], polish: bool) -> Plan:
    untouched = keep_everything(profile)
    plain = simulate(profile, untouched)
    # Nothing beats the untouched step where it fits, unless blocks may be compiled.
    fastest_there_is = plain.seconds <= profile.step_seconds
    if Action.KEEP in allow and fastest_there_is and plain.peak_bytes <= budget_bytes:
        return make_plan(profile, untouched, budget_bytes, strategy="optimal", allow=allow)
    if Action.OFFLOAD in allow and _may_send(profile):
        return _fastest_with_link(profile, budget_bytes, allow, polish)
    found = [_solve(profile, problem, budget_bytes) for problem in programs(profile, allow)]
    smallest = min((simulate(profile, one.least) for one in found), key=lambda timeline: timeline.peak_bytes)
    if smallest.peak_bytes > budget_bytes:
        raise _out_of_reach(profile, budget_bytes, smallest, allow)
    plans = [
        make_plan(profile, one.choices, budget_bytes, strategy="optimal", allow=allow)
        for one in found
        if one.choices is not None
    ]
    if not plans:
        raise RematError(
            f"internal error: no choices within {budget_bytes} bytes, though a step of "
            f"{smallest.peak_bytes} bytes is known; please report this with the saved profile"
        )
    plan = min(plans, key=lambda one: one.predicted_seconds)
    if plan.predicted_peak_bytes > budget_bytes:
        raise RematError(
            f"internal error: the solver's plan peaks at {plan.predicted_peak_bytes} bytes in the simulator, "
            f"over the budget of {budget_bytes}; please report this with the saved profile"
        )
    gaps = (one.gap_seconds for one in found if one.choices is not None)
    bound = min(other.predicted_seconds - gap for other, gap in zip(plans, gaps, strict=True))
    return replace(plan, notes=_not_proven(plan.predicted_seconds - bound))


def _not_proven(gap_seconds: float) -> tuple[str, ...]:
    if gap_seconds <= 0:
        return ()
    return (f"not proven: a plan faster by up to {format_seconds(gap_seconds)} may exist",)


@dataclass(frozen=True)
class _Solved:
    """Of one program: the choices with the least peak, and the fastest within the budget, if there are any.
    A plan faster than that by `gap_seconds` may exist."""

    least: tuple[int, ...]
    choices: tuple[int, ...] | None
    gap_seconds: float = 0.0


def _solve(profile: Profile, problem: Program, budget_bytes: int) -> _Solved:
    nested = chain(problem)
    least = least_choices(problem, nested)
    if problem.has_ties:
        return _solve_tied(profile, problem, budget_bytes, least)
    if nested is None:
        return _Solved(least, _solve_general(profile, problem, budget_bytes, least))
    found = fastest(nested, budget_bytes, memory_prices(problem, budget_bytes))
    if found is None:
        return _Solved(least, None)
    options = [found.options.get(i, 0) for i in range(len(problem.calls))]
    return _Solved(least, entries(problem, options), found.gap_seconds)


def _solve_tied(profile: Profile, problem: Program, budget_bytes: int, least: tuple[int, ...]) -> _Solved:
    if simulate(profile, least).peak_bytes > budget_bytes:
        return _Solved(least, None)
    known = [[o.entry for o in call.options].index(e) for call, e in zip(problem.calls, least, strict=True)]
    found = fastest_tied(problem, budget_bytes, memory_prices(problem, budget_bytes), known)
    assert found is not None  # no worse than what is known
    return _Solved(least, entries(problem, found.options), found.gap_seconds)


def _solve_general(
    profile: Profile, problem: Program, budget_bytes: int, least: tuple[int, ...]
) -> tuple[int, ...] | None:
    """HiGHS works in floats: pull the limit in by what its solution exceeds it, at last take the least."""
    limit = budget_bytes
    for _ in range(4):
        found = solve_milp(problem, limit)
        if found is None:
            break
        choices = entries(problem, found)
        over = simulate(profile, choices).peak_bytes - budget_bytes
        if over <= 0:
            return choices
        limit -= 2 * over
    return least if simulate(profile, least).peak_bytes <= budget_bytes else None


def _fastest_with_link(profile: Profile, budget_bytes: int, allow: tuple[Action, ...], polish: bool) -> Plan:
    """The best of several proposals, and of the plan without offload, as the simulator judges them."""
    found = proposals(profile, budget_bytes, allow)
    best = min(found, key=lambda proposal: rank(profile, proposal, budget_bytes))
    if polish or best.timeline.peak_bytes > budget_bytes:
        best = polished(profile, budget_bytes, allow, best)
    if best.timeline.peak_bytes > budget_bytes:
        raise _out_of_reach(profile, budget_bytes, best.timeline, allow)
    return _with_link(profile, best.choices, budget_bytes, allow)


def _with_link(
    profile: Profile, choices: tuple[int, ...], budget_bytes: int, allow: tuple[Action, ...]
) -> Plan:
    plan = make_plan(profile, choices, budget_bytes, strategy="optimal", allow=allow)
    gap = plan.predicted_seconds - time_lower_bound(profile, budget_bytes, allow)
    return replace(plan, notes=_not_proven(gap)) if gap > _PROVEN_SHARE * plan.predicted_seconds else plan


def _may_send(profile: Profile) -> bool:
    return any(entry.host_bytes for kind in profile.kinds for entry in kind.menu)


def _sharing_link(plan: Plan) -> Plan:
    """The same, or a faster plan in which some regions send more so that others need not recompute."""
    if not plan.notes:  # it is known to be as fast as any, or nearly so
        return plan
    best = exchanged(plan.profile, plan.budget_bytes, plan.allow, plan.choices)
    if best.choices == plan.choices or best.timeline.peak_bytes > plan.budget_bytes:
        return plan
    made = _with_link(plan.profile, best.choices, plan.budget_bytes, plan.allow)
    return replace(made, plain_peak_bytes=plan.plain_peak_bytes, plain_seconds=plan.plain_seconds)


# ------------------------------------------------------------------------------------------------ refusals


def _out_of_reach(
    profile: Profile, budget_bytes: int, least: Timeline, allow: tuple[Action, ...]
) -> BudgetError:
    needed = least.peak_bytes
    point = least.peak
    parts = {
        "parameters": point.parameters,
        "gradients": point.gradients,
        "optimizer state": point.optimizer,
        "kept for backward": point.kept,
        "working memory": point.working,
        "on its way to the host and back": point.moving,
    }
    shares = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    largest = max(parts, key=lambda name: parts[name])
    hints = []
    if Action.RECOMPUTE not in allow:
        hints.append("allow recompute")
    elif profile.one_graph:
        hints.append("compile blocks one by one with compile=True, which may also offload")
    elif Action.OFFLOAD not in allow and _may_send(profile):
        hints.append("allow offload")
    if point.call < 0 and "head" in point.label and not profile.environment.estimated:
        rest = ", the rest as one graph" if profile.one_graph else ""
        if Action.CHUNK not in allow and profile.names_head:
            hints.append(f'allow "chunk" (head and loss in chunks{rest})')
        elif Action.CHUNK in allow and not profile.names_head:
            hints.append('give the model a get_output_embeddings() that returns its head, for "chunk"')
    if point.phase is Phase.OPTIMIZER and point.working:
        hints.append("give the optimizer foreach=False, or fused=True")
    if largest in ("kept for backward", "working memory") and point.phase is not Phase.OPTIMIZER:
        hints.append("use a smaller batch")
    where = f"The peak is at {point.label!r}, mostly {largest} ({shares})"
    return refusal(budget_bytes, needed, tuple(hints), where)


def refusal(budget_bytes: int, needed: int, hints: tuple[str, ...], where: str) -> BudgetError:
    """The error for a budget that no plan meets."""
    remedies = (f"raise the budget by {format_bytes(needed - budget_bytes)}", *hints)
    return BudgetError(
        f"budget {format_bytes(budget_bytes)}, but {format_bytes(needed)} ({needed} bytes) is the least this "
        f"step can run in; {', or '.join(remedies)}. {where}",
        needed=needed,
        hints=hints,
        where=where,
    )


def _more_than_any(profile: Profile) -> int:
    """A budget that every plan is within, and no larger than it has to be: solvers compute with it."""
    plain = simulate(profile, keep_everything(profile)).peak_bytes
    most = (
        max(e.resident_bytes + e.forward_peak_bytes + e.backward_peak_bytes for e in kind.menu)
        for kind in (profile.kinds[call.kind] for call in profile.calls)
    )
    return plain + sum(most) + sum(profile.boundary_bytes)


def _too_slow(profile: Profile, plan: Plan, max_seconds: float) -> BudgetError:
    """There is a plan, but a slow one: find the budget, to a thousandth, at which one is quick enough; where
    regions share the link, less may do."""
    fastest = _best_head(profile, _more_than_any(profile), plan.allow, polish=True)
    if fastest.predicted_seconds > max_seconds:
        return BudgetError(
            f"max_seconds={max_seconds:g}, but with memory without end the step takes "
            f"{format_seconds(fastest.predicted_seconds)}; no budget helps, raise max_seconds",
            needed=fastest.predicted_peak_bytes,
        )
    low, high = plan.budget_bytes, fastest.predicted_peak_bytes
    while high - low > max(plan.plain_peak_bytes // 1000, 1):
        middle = (low + high) // 2
        if _best_head(profile, middle, plan.allow, polish=True).predicted_seconds <= max_seconds:
            high = middle
        else:
            low = middle
    return BudgetError(
        f"within {format_bytes(plan.budget_bytes)} the step takes {format_seconds(plan.predicted_seconds)}, "
        f"more than max_seconds={max_seconds:g}; raise the budget to {format_bytes(high)}, or max_seconds",
        needed=high,
    )
