"""Everything that a report shows, as plain values ready for JSON: the records are read once for all formats.

What a plan does not have (offload, events, a measured run) is an empty list or None here, and is not shown.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import remat
from remat.planner.frontier import frontier
from remat.planner.schedule import keep_everything
from remat.planner.simulate import Timeline, simulate
from remat.planner.strategies import Row, compare
from remat.records import Action, Environment, Plan, Profile
from remat.show.decisions import RegionRow, region_rows
from remat.units import format_bytes

if TYPE_CHECKING:
    from remat.show.text import Report

__all__ = ["comparison", "environment_rows", "facts", "graph_notes", "notes_of", "stem_notes", "trade_off"]

_MOST_POINTS, _LEAST_POINTS = 20, 5  # of the frontier
_CALLS_PER_SECOND = 480  # planned per second or so: what a frontier may take


def facts(report: Report) -> dict[str, Any]:
    """All but the trade-off, which takes up to a second to compute."""
    plan, regions = report.plan, region_rows(report.plan)
    timeline = simulate(plan.profile, plan.choices)
    return {
        "remat": remat.__version__,
        "model": plan.profile.model,
        "signature": plan.profile.signature,
        "strategy": plan.strategy,
        "allow": [action.value for action in plan.allow],
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "peak_at": timeline.peak_at,
        "measured_peak_bytes": report.measured_peak_bytes,
        "measured_step_bytes": None if report.measured is None else report.measured.above_bytes,
        "plain_peak_bytes": plan.plain_peak_bytes,
        "predicted_seconds": plan.predicted_seconds,
        "plain_seconds": plan.plain_seconds,
        "verification": None if report.verification is None else str(report.verification),
        "verified": None if report.verification is None else report.verification.ok,
        "environment": environment_rows(plan.profile.environment),
        "step_bytes": asdict(plan.profile.step),
        "timeline": _timeline(plan, timeline),
        "link": _link(timeline),
        "regions": [_region(row, plan, report) for row in regions],
        "compared": _predicted_and_measured(report),
        "status": [row.as_dict() for row in report.rows],
        "events": [dict(event) for event in report.events],
        "notes": notes_of(plan),
    }


def notes_of(plan: Plan) -> list[str]:
    head = plan.profile.head
    chunks = graph_notes(plan.profile)
    if plan.profile.chunked and head is not None:
        chunks.append(
            f"{head.head} and the loss run in chunks: gradients equal within rounding, not to the bit"
        )
    parts = {plan.entry(call).part for call in range(len(plan.choices))} - {""}
    if parts:
        chunks.append(f"{', '.join(sorted(parts))} of some regions runs in chunks: equal within rounding")
    if any(plan.entry(call).cut for call in range(len(plan.choices))):
        chunks.append("some regions run over pieces of the batch: equal within rounding")
    return [*chunks, *stem_notes(plan.profile), *plan.profile.notes, *plan.notes]


def stem_notes(profile: Profile) -> list[str]:
    """That what runs before the first region waits on the host, if it does."""
    stem = profile.stem
    if stem is None or not profile.stem_sent:
        return []
    return [f"what runs before {stem.region} waits on the host: {format_bytes(sum(stem.sizes))}"]


def graph_notes(profile: Profile) -> list[str]:
    """What is compiled as one graph, if anything is."""
    if profile.one_graph and not profile.chunked:
        return ["the model is compiled as one graph"]
    head = "" if profile.head is None else f"; {profile.head.head} and the loss run eagerly"
    return [f"the trunk {root} is compiled as one graph{head}" for root in profile.graph_roots]


def environment_rows(environment: Environment) -> list[list[str]]:
    """(name, value) pairs for reading."""
    rows = [
        ["device", environment.device_name],
        ["torch", environment.torch_version],
        ["remat", remat.__version__],
    ]
    if environment.device != environment.device_name:
        rows.insert(1, ["torch device", environment.device])
    if environment.total_bytes:
        rows.append(["device memory", format_bytes(environment.total_bytes)])
    how = "estimated without the device" if environment.estimated else "measured on the device"
    return [*rows, ["bytes", how], ["seconds", _source_of_seconds(environment)]]


def _source_of_seconds(environment: Environment) -> str:
    if environment.estimated or not environment.device.startswith("cuda"):
        return "estimated from bytes and FLOPs"
    return "measured on the device"


# ------------------------------------------------------------------------------------------------ the step


def _timeline(plan: Plan, timeline: Timeline) -> dict[str, Any]:
    plain = simulate(plan.profile, keep_everything(plan.profile))
    return {
        "points": [
            {
                "label": point.label,
                "phase": point.phase.value,
                "region": point.call if point.call >= 0 else None,
                "start_bytes": point.start_bytes,
                "peak_bytes": point.peak_bytes,
                "parameters": point.parameters,
                "gradients": point.gradients,
                "optimizer": point.optimizer,
                "kept": point.kept,
                "working": point.working,
                "moving": point.moving,
            }
            for point in timeline.points
        ],
        "plain_peak_bytes": [point.peak_bytes for point in plain.points],
        "plain": "regions untouched, head in chunks" if plan.profile.chunked else "plain step",
    }


def _link(timeline: Timeline) -> dict[str, Any] | None:
    """What crosses the link to the host, point by point of the timeline; None where nothing does."""
    if timeline.link is None:
        return None
    return {
        "host_bytes": timeline.link.host_bytes,
        "waited_seconds": timeline.link.waited_seconds,
        "points": [
            {
                "start_seconds": point.start_seconds,
                "end_seconds": point.end_seconds,
                "to_host_bytes": point.out_bytes,
                "from_host_bytes": point.back_bytes,
                "in_flight_bytes": point.in_flight_bytes,
                "ahead_bytes": point.ahead_bytes,
                "on_host_bytes": point.host_bytes,
                "waited_seconds": point.waited_seconds,
            }
            for point in timeline.link.points
        ],
    }


def _region(row: RegionRow, plan: Plan, report: Report) -> dict[str, Any]:
    counted = next((status for status in report.rows if status.name == row.name), None)
    return {
        **row.as_dict(),
        "resident_bytes": plan.entry(row.index).resident_bytes,
        "measured_bytes": None if counted is None else counted.saved_bytes_after,
    }


def _predicted_and_measured(report: Report) -> list[dict[str, Any]]:
    """What was measured beside what was predicted of the same: forward and backward, without an optimizer."""
    if report.measured is None:
        return []
    plan, profile = report.plan, report.plan.profile
    predicted = simulate(_without_optimizer(profile), plan.choices)
    rows: list[dict[str, Any]] = [
        {
            "what": "peak of forward and backward",
            "unit": "bytes",
            "predicted": predicted.peak_bytes,
            "measured": report.measured_peak_bytes,
        },
        {
            "what": "seconds of forward and backward",
            "unit": "seconds",
            "predicted": predicted.seconds,
            "measured": report.measured.seconds,
        },
    ]
    if report.measured.reserved_bytes is not None:
        rows.append(
            {
                "what": "reserved by the allocator",
                "unit": "bytes",
                "predicted": None,
                "measured": report.measured.reserved_bytes,
            }
        )
    return rows


def _without_optimizer(profile: Profile) -> Profile:
    step = replace(profile.step, optimizer_state=0, optimizer_temporary=0)
    return replace(profile, accumulate=False, step=step)


# ------------------------------------------------------------------------------------------- the trade-off


def trade_off(plan: Plan) -> dict[str, Any]:
    """Time against memory: the frontier, and what people do by hand, on the same profile.

    Planning with offload takes seconds for each budget, so the frontier is that of recomputation alone.
    """
    profile = plan.profile
    points = min(_MOST_POINTS, max(_LEAST_POINTS, _CALLS_PER_SECOND // max(len(profile.calls), 1)))
    found = frontier(profile, points, allow=_without_offload(plan))
    return {
        "offload": Action.OFFLOAD in plan.allow,
        "frontier": [
            {"peak_bytes": point.peak_bytes, "budget_bytes": point.budget_bytes, "seconds": point.seconds}
            for point in found
        ],
        "strategies": [asdict(row) for row in comparison(plan)],
    }


def comparison(plan: Plan) -> list[Row]:
    """This plan first, then what else could be done within the same budget: by hand, and without offload."""
    profile, kept = plan.profile, keep_everything(plan.profile)
    this = Row(
        strategy=plan.strategy,
        peak_bytes=plan.predicted_peak_bytes,
        seconds=plan.predicted_seconds,
        feasible=plan.predicted_peak_bytes <= plan.budget_bytes,
        recomputed=sum(a != b for a, b in zip(plan.choices, kept, strict=True)),
    )
    others = compare(profile, plan.budget_bytes, allow=_without_offload(plan))
    best = [row for row in others if row.strategy == "optimal"]
    hand = [row for row in others if row.strategy != "optimal"]
    if Action.OFFLOAD in plan.allow:
        return [this, *(replace(row, strategy="optimal, no offload") for row in best), *hand]
    return [this, *hand] if plan.strategy == "optimal" else [this, *best, *hand]


def _without_offload(plan: Plan) -> tuple[Action, ...]:
    return tuple(action for action in plan.allow if action is not Action.OFFLOAD)
