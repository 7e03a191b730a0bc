"""Limits of what any plan can do: the least budget a step can run in, and the least time within a budget."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from remat.errors import RematError
from remat.planner.chain import Chain, bound_seconds, chain, least_peak
from remat.planner.program import (
    Program,
    Window,
    lagrangian_bound,
    memory_prices,
    program,
    programs,
    solve_milp,
    window_sizes,
)
from remat.planner.simulate import simulate
from remat.planner.ties import disagreement
from remat.records import Action, Mode, Profile

__all__ = ["all_hosted", "least_budget", "least_choices", "time_lower_bound"]

DEFAULT_ALLOW = (Action.KEEP, Action.RECOMPUTE)


def least_budget(profile: Profile, allow: Sequence[Action] = DEFAULT_ALLOW) -> int:
    """The least number of bytes that this step can run in (with offload: that any proposal found)."""
    ways: list[tuple[Sequence[Action], Window | None]] = [(allow, None)]
    if Action.OFFLOAD in allow and (sizes := window_sizes(profile)):
        without = [action for action in allow if action is not Action.OFFLOAD]
        ways = [(without, None)] if Action.KEEP in allow or Action.RECOMPUTE in allow else []
        ways += [(allow, Window(nbytes)) for nbytes in sizes]
    problems = [problem for actions, window in ways for problem in programs(profile, actions, window)]
    found = [least_choices(problem, chain(problem)) for problem in problems]
    if Action.OFFLOAD in allow:
        found += all_hosted(profile, allow)
    return min(simulate(profile, choices).peak_bytes for choices in found)


def time_lower_bound(profile: Profile, budget_bytes: int, allow: Sequence[Action] = DEFAULT_ALLOW) -> float:
    """Seconds that no plan within the budget can undercut; infinite where there is no plan.

    The optimum of the relaxed program, in which a call may be spread over several entries, made safe against
    the solver's rounding.
    """
    return profile.step_seconds + min(
        _least_extra_seconds(profile, problem, budget_bytes) for problem in programs(profile, allow)
    )


def _least_extra_seconds(profile: Profile, problem: Program, budget_bytes: int) -> float:
    nested = chain(problem)
    least = simulate(profile, least_choices(problem, nested))
    if max((point.peak_bytes - point.moving for point in least.points), default=0) > budget_bytes:
        return math.inf  # even if copies took no memory
    prices = memory_prices(problem, budget_bytes)
    if nested is None:
        return lagrangian_bound(problem, budget_bytes, prices)
    linked = set(nested.calls)
    settled = sum(c.options[0].seconds for i, c in enumerate(problem.calls) if i not in linked)
    return bound_seconds(nested, budget_bytes, prices) + settled


def least_choices(problem: Program, nested: Chain | None) -> tuple[int, ...]:
    """Menu entries, one per call, with the least peak of all."""
    if nested is not None:
        _, chosen = least_peak(nested)
        return entries(problem, [chosen.get(i, 0) for i in range(len(problem.calls))])
    found = solve_milp(problem, None, gap=0.0)
    if found is None:
        raise RematError("internal error: no least peak was found; please report this with the saved profile")
    return entries(problem, found)


def entries(problem: Program, options: Sequence[int]) -> tuple[int, ...]:
    """From options of the program to entries of the menus."""
    return tuple(call.options[option].entry for call, option in zip(problem.calls, options, strict=True))


def all_hosted(profile: Profile, allow: Sequence[Action]) -> Iterator[tuple[int, ...]]:
    """Every region runs again from inputs on the host, in chunks or not: where the budget is the least, the
    room that a window leaves everywhere is too much."""
    problem = program(profile, allow)
    for in_chunks in (False, True):
        chosen = []
        for call, of in zip(problem.calls, profile.calls, strict=True):
            menu = profile.kinds[of.kind].menu
            options = [(menu[option.entry], option) for option in call.options]
            hosted = [option for entry, option in options if entry.mode is Mode.HOSTED]
            alike = [o for entry, o in options if entry.mode is Mode.HOSTED and entry.in_chunks == in_chunks]
            fit = alike or hosted or [option for _, option in options]
            chosen.append(
                min(fit, key=lambda option: (option.held_bytes, max(option.above, default=0))).entry
            )
        choices = tuple(chosen)
        if disagreement(profile, choices) is None:
            yield choices
