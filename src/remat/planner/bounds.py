"""Limits of what any plan can do: the least budget a step can run in, and the least time within a budget."""

from __future__ import annotations

import math
from collections.abc import Sequence

from remat.planner.chain import bound_seconds, chain, least_peak
from remat.planner.program import Program, lagrangian_bound, memory_prices, program, solve_milp
from remat.planner.simulate import simulate
from remat.records import Action, Profile

__all__ = ["least_budget", "least_choices", "time_lower_bound"]

DEFAULT_ALLOW = (Action.KEEP, Action.RECOMPUTE)


def least_budget(profile: Profile, allow: Sequence[Action] = DEFAULT_ALLOW) -> int:
    """The least number of bytes that this step can run in."""
    return simulate(profile, least_choices(profile, program(profile, allow))).peak_bytes


def time_lower_bound(profile: Profile, budget_bytes: int, allow: Sequence[Action] = DEFAULT_ALLOW) -> float:
    """Seconds that no plan within the budget can undercut; infinite where there is no plan.

    The optimum of the relaxed program, in which a call may be spread over several entries, made safe against
    the solver's rounding.
    """
    problem = program(profile, allow)
    if simulate(profile, least_choices(profile, problem)).peak_bytes > budget_bytes:
        return math.inf
    prices = memory_prices(problem, budget_bytes)
    nested = chain(problem)
    if nested is None:
        bound = lagrangian_bound(problem, budget_bytes, prices)
    else:
        settled = sum(c.options[0].seconds for i, c in enumerate(problem.calls) if i not in nested.calls)
        bound = bound_seconds(nested, budget_bytes, prices) + settled
    fastest = sum(min(option.seconds for option in call.options) for call in problem.calls)
    return profile.step_seconds + max(bound, fastest)


def least_choices(profile: Profile, problem: Program) -> tuple[int, ...]:
    """Menu entries, one per call, with the least peak of all."""
    nested = chain(problem)
    if nested is not None:
        _, chosen = least_peak(nested)
        options = tuple(chosen.get(i, 0) for i in range(len(problem.calls)))
    else:
        found = solve_milp(problem, None, gap=0.0)
        options = found if found is not None else tuple(0 for _ in problem.calls)
    return entries(problem, options)


def entries(problem: Program, options: Sequence[int]) -> tuple[int, ...]:
    """From options of the program to entries of the menus."""
    return tuple(call.options[option].entry for call, option in zip(problem.calls, options, strict=True))
