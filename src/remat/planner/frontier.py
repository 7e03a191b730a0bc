"""The trade-off itself: for a range of budgets, how long the step takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from remat.errors import InputError
from remat.planner.bounds import DEFAULT_ALLOW, least_budget
from remat.planner.schedule import keep_everything, schedule
from remat.planner.simulate import simulate
from remat.records import Action, Profile

__all__ = ["FrontierPoint", "frontier"]


@dataclass(frozen=True)
class FrontierPoint:
    """With `budget_bytes` the step takes `seconds`; with less than `peak_bytes` it takes longer."""

    budget_bytes: int
    peak_bytes: int
    seconds: float


def frontier(
    profile: Profile, points: int = 20, *, allow: Sequence[Action] = DEFAULT_ALLOW
) -> tuple[FrontierPoint, ...]:
    """The fastest plan at `points` budgets, from the least to the untouched step's peak; each time once."""
    if points < 2:
        raise InputError(f"points={points}: at least 2, the least budget and the untouched step")
    least = least_budget(profile, allow)
    plain = max(simulate(profile, keep_everything(profile)).peak_bytes, least)
    budgets = sorted({least + (plain - least) * i // (points - 1) for i in range(points)})
    found: list[FrontierPoint] = []
    for budget in budgets:
        plan = schedule(profile, budget, allow=allow)
        point = FrontierPoint(budget, plan.predicted_peak_bytes, plan.predicted_seconds)
        if not found or point.seconds < found[-1].seconds:
            found.append(point)
    return tuple(found)
