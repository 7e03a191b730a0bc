"""What people do by hand, as plans on the same profile, so that it can be compared with the optimum.

Every strategy chooses between the untouched region (KEEP) and its recomputation as a whole (FULL). The
textbook's closed forms, which assume equal layers and count nothing else, are below.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from remat.errors import BudgetError, InputError
from remat.planner.schedule import keep_everything, make_plan, schedule
from remat.planner.simulate import simulate
from remat.planner.ties import tied_calls
from remat.records import Action, Plan, Profile

__all__ = [
    "Row",
    "best_interval",
    "checkpoints_every",
    "compare",
    "compute_first",
    "full",
    "memory_first",
    "memory_saved",
    "none",
    "optimal_interval",
    "recomputed_layers",
    "sqrt_layers",
    "uniform",
]


# ---------------------------------------------------------------------------------------------- strategies


def none(profile: Profile, budget_bytes: int = 0) -> Plan:
    """Every region untouched."""
    return make_plan(profile, keep_everything(profile), budget_bytes, strategy="none")


def full(profile: Profile, budget_bytes: int = 0) -> Plan:
    """Every region recomputed: what `gradient_checkpointing_enable()` does."""
    return _plan(profile, range(len(profile.calls)), budget_bytes, "full")


def uniform(profile: Profile, every: int, budget_bytes: int = 0) -> Plan:
    """Recompute every n-th region, starting with the first: every=1 is all of them."""
    if every < 1:
        raise InputError(f"every={every}: say 1 to recompute every region, 2 for every second, and so on")
    return _plan(profile, range(0, len(profile.calls), every), budget_bytes, f"uniform every {every}")


def sqrt_layers(profile: Profile, budget_bytes: int = 0) -> Plan:
    """Keep one region in sqrt(L) whole, recompute the others: the textbook's interval, region by region.

    The textbook recomputes a run of layers from one checkpoint; here every region holds its own input, so
    that the kept regions are what the interval spaces out.
    """
    interval = optimal_interval(len(profile.calls)) if profile.calls else 1
    recompute = [i for i in range(len(profile.calls)) if i % interval != 0 or interval == 1]
    return _plan(profile, recompute, budget_bytes, "sqrt(L)")


def memory_first(profile: Profile, budget_bytes: int | None = None, *, density: float | None = None) -> Plan:
    """Recompute the regions that free the most bytes first, to a budget or to a share of the regions."""
    return _ranked(profile, "memory-first", lambda i: -_freed_bytes(profile, i), budget_bytes, density)


def compute_first(profile: Profile, budget_bytes: int | None = None, *, density: float | None = None) -> Plan:
    """Recompute the regions that cost the fewest seconds first, to a budget or to a share of the regions."""
    return _ranked(profile, "compute-first", lambda i: _extra_seconds(profile, i), budget_bytes, density)


def _full_entry(profile: Profile, call: int) -> int:
    return profile.kinds[profile.calls[call].kind].reference


def _freed_bytes(profile: Profile, call: int) -> int:
    menu = profile.kinds[profile.calls[call].kind].menu
    return (
        menu[keep_everything(profile)[call]].resident_bytes - menu[_full_entry(profile, call)].resident_bytes
    )


def _extra_seconds(profile: Profile, call: int) -> float:
    return profile.kinds[profile.calls[call].kind].menu[_full_entry(profile, call)].extra_seconds


def _choices(profile: Profile, recompute: Sequence[int]) -> tuple[int, ...]:
    choices = list(keep_everything(profile))
    for group in tied_calls(profile):
        if not set(recompute).isdisjoint(group):
            for call in group:
                choices[call] = _full_entry(profile, call)
    return tuple(choices)


def _plan(profile: Profile, recompute: Sequence[int], budget_bytes: int, strategy: str) -> Plan:
    return make_plan(profile, _choices(profile, recompute), budget_bytes, strategy=strategy)


def _ranked(
    profile: Profile,
    strategy: str,
    key: Callable[[int], float],
    budget_bytes: int | None,
    density: float | None,
) -> Plan:
    if (budget_bytes is None) == (density is None):
        raise InputError(f"{strategy} goes either to a budget or to a density: give exactly one of the two")
    order = sorted(range(len(profile.calls)), key=lambda call: (key(call), call))
    if density is not None:
        if not 0 <= density <= 1:
            raise InputError(f"density={density}: it is the share of regions to recompute, from 0 to 1")
        return _plan(profile, order[: round(density * len(order))], 0, strategy)
    assert budget_bytes is not None
    for count in range(len(order) + 1):
        if simulate(profile, _choices(profile, order[:count])).peak_bytes <= budget_bytes:
            return _plan(profile, order[:count], budget_bytes, strategy)
    return _plan(
        profile, order, budget_bytes, strategy
    )  # as far as it goes; the table shows that it is not enough


# ------------------------------------------------------------------------------------------------ the table


@dataclass(frozen=True)
class Row:
    """One strategy beside the others. `feasible`: its simulated peak is within the budget."""

    strategy: str
    peak_bytes: int
    seconds: float
    feasible: bool
    recomputed: int  # region calls that do not simply keep


def compare(
    profile: Profile, budget_bytes: int, *, allow: Sequence[Action] = (Action.KEEP, Action.RECOMPUTE)
) -> tuple[Row, ...]:
    """The optimum for a budget, if there is one, and every strategy beside it."""
    plans: list[Plan] = []
    with contextlib.suppress(BudgetError):  # the strategies are shown all the same, none of them feasible
        plans.append(schedule(profile, budget_bytes, allow=allow))
    plans += [none(profile, budget_bytes), full(profile, budget_bytes)]
    plans += [uniform(profile, every, budget_bytes) for every in (2, 4) if every < len(profile.calls)]
    plans += [
        sqrt_layers(profile, budget_bytes),
        memory_first(profile, budget_bytes),
        compute_first(profile, budget_bytes),
    ]
    untouched = keep_everything(profile)
    return tuple(
        Row(
            strategy=plan.strategy,
            peak_bytes=plan.predicted_peak_bytes,
            seconds=plan.predicted_seconds,
            feasible=plan.predicted_peak_bytes <= budget_bytes,
            recomputed=sum(a != b for a, b in zip(plan.choices, untouched, strict=True)),
        )
        for plan in plans
    )


# ---------------------------------------------------------------------------- the textbook's closed forms


def checkpoints_every(layers: int, interval: int) -> int:
    """Checkpoints kept when layers 0, n, 2n, ... are: 24 layers every 4 keep 6."""
    if layers < 0 or interval < 1:
        raise InputError(
            f"layers={layers}, interval={interval}: layers is at least 0, the interval at least 1"
        )
    return math.ceil(layers / interval)


def memory_saved(layers: int, checkpoints: int) -> float:
    """The share of activation memory that K checkpoints of N layers save: (N - K) / N."""
    return recomputed_layers(layers, checkpoints) / layers if layers else 0.0


def recomputed_layers(layers: int, checkpoints: int) -> int:
    """Layers that run twice with K checkpoints of N layers: N - K."""
    if not 0 <= checkpoints <= layers:
        raise InputError(f"checkpoints={checkpoints} of {layers} layers: from 0 to the number of layers")
    return layers - checkpoints


def optimal_interval(layers: int) -> int:
    """The interval d with the least L/d + d, about sqrt(L): checkpoints plus the run being recomputed."""
    if layers < 1:
        raise InputError(f"layers={layers}: at least 1")
    root = math.isqrt(layers)
    return min((root, root + 1), key=lambda d: (checkpoints_every(layers, d) + d, d))


def best_interval(layers: int, memory_bytes: int, layer_bytes: int) -> int:
    """The least interval d (fewest layers recomputed at once) whose ceil(L/d) + d layers fit the memory.

    Interval 1 keeps every layer and recomputes nothing, so it needs L layers and not one more.
    """
    if layer_bytes < 1:
        raise InputError(f"layer_bytes={layer_bytes}: at least 1")
    slots = memory_bytes // layer_bytes
    if slots >= layers:
        return 1
    for interval in range(2, optimal_interval(layers) + 1):
        if checkpoints_every(layers, interval) + interval <= slots:
            return interval
    best = optimal_interval(layers)
    needed = min(layers, checkpoints_every(layers, best) + best) * layer_bytes
    raise BudgetError(
        f"{memory_bytes} bytes hold {slots} layers of {layer_bytes} bytes, but {layers} layers need {needed} "
        f"bytes even at the best interval, {best}; give at least that, or recompute at two levels",
        needed=needed,
    )
