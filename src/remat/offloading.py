"""A plan's engine with the host memory that it takes; where that is refused, the same budget without it."""

from __future__ import annotations

import warnings
from dataclasses import replace

from remat.errors import BudgetError, HostMemoryError
from remat.planner.link import host_bytes, pieces, window_bytes
from remat.planner.schedule import make_plan, schedule
from remat.planner.stem import without_stem_sent
from remat.records import Action, Plan
from remat.run.offload import Engine
from remat.units import format_bytes

__all__ = ["engine_for", "stem_engine_for"]


def engine_for(plan: Plan) -> tuple[Plan, Engine | None]:
    """The plan to run, and the engine that moves what it offloads. With one warning, a plan that recomputes
    instead, if the host has no memory for it."""
    try:
        return plan, _engine(plan)
    except HostMemoryError as error:
        return _without_offload(plan, error), None


def _engine(plan: Plan) -> Engine | None:
    """An engine with the host memory that this plan takes; HostMemoryError: it cannot be had."""
    if not host_bytes(plan.profile, plan.choices):
        return None
    engine = Engine(
        plan.profile.environment.device,
        in_flight_limit_bytes=window_bytes(plan.profile, plan.choices),
    )
    sizes = [
        size for call in range(len(plan.choices)) for size in pieces(plan.profile, call, plan.entry(call))
    ]
    try:
        engine.reserve(sizes)
    except HostMemoryError:
        engine.close()
        raise
    return engine


def stem_engine_for(plan: Plan) -> tuple[Plan, Engine | None]:
    """The plan to run, and the engine that moves what runs before the first region, if it sends that: one of
    its own, since its copies wait for nobody else's. With one warning the same plan without, if the host has
    no memory for it."""
    stem = plan.profile.stem
    if stem is None or not plan.profile.stem_sent:
        return plan, None
    engine = Engine(plan.profile.environment.device, in_flight_limit_bytes=sum(stem.sizes))
    try:
        engine.reserve(stem.sizes)
    except HostMemoryError as error:
        engine.close()
        warnings.warn(
            f"remat: what runs before {stem.region} was to wait on the host, which refused: {error}; the "
            f"step takes {format_bytes(stem.nbytes)} more than planned",
            stacklevel=5,
        )
        return _without_stem(plan), None
    return plan, engine


def _without_stem(plan: Plan) -> Plan:
    """The same choices, predicted with the stem where it is."""
    kept = without_stem_sent(plan.profile)
    made = make_plan(kept, plan.choices, plan.budget_bytes, strategy=plan.strategy, allow=plan.allow)
    return replace(
        made, plain_peak_bytes=plan.plain_peak_bytes, plain_seconds=plan.plain_seconds, notes=plan.notes
    )


def _without_offload(plan: Plan, error: HostMemoryError) -> Plan:
    """The same budget without the host; where no such plan exists, the least that each region can keep."""
    plan = _without_stem(plan) if plan.profile.stem_sent else plan
    allow = tuple(action for action in plan.allow if action is not Action.OFFLOAD)
    note = f"offload was planned, but the host refused: {error}. Regions recompute instead"
    warnings.warn(f"remat: {note}; the step is slower than predicted", stacklevel=5)
    try:
        other = schedule(plan.profile, plan.budget_bytes, allow=allow)
    except BudgetError as beyond:
        menus = [plan.profile.kinds[call.kind].menu for call in plan.profile.calls]
        choices = tuple(
            min((i for i, e in enumerate(menu) if not e.host_bytes), key=lambda i: menu[i].resident_bytes)
            if menu[choice].host_bytes
            else choice
            for menu, choice in zip(menus, plan.choices, strict=True)
        )
        other = make_plan(plan.profile, choices, plan.budget_bytes, strategy=plan.strategy, allow=allow)
        note = f"{note}, and the step needs {beyond.needed} bytes"
    return replace(
        other,
        plain_peak_bytes=plan.plain_peak_bytes,
        plain_seconds=plan.plain_seconds,
        notes=(*other.notes, note),
    )
