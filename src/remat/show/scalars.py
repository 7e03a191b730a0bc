"""A handle, report or plan as a flat dict of numbers, for loggers: TensorBoard, wandb, a CSV file.

for name, value in scalars_of(handle).items():
    writer.add_scalar(name, value, step)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from remat.errors import InputError
from remat.records import Mode, Plan
from remat.show.decisions import region_rows

if TYPE_CHECKING:
    from remat.handle import Handle
    from remat.show.text import Report

__all__ = ["scalars_of"]


def scalars_of(found: Handle | Report | Plan, prefix: str = "remat/") -> dict[str, float]:
    """Numbers only, one level deep, the same names every time; what is not known is left out.

    Bytes end in `_bytes`, seconds in `_seconds`. From a handle, what its regions did in the last step is
    counted too. Nothing here waits for the device.
    """
    report = _report_of(found)
    plan, rows = report.plan, region_rows(report.plan)
    scalars: dict[str, float | None] = {
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "plain_peak_bytes": plan.plain_peak_bytes,
        "predicted_seconds": plan.predicted_seconds,
        "plain_seconds": plan.plain_seconds,
        "slowdown": plan.predicted_seconds / plan.plain_seconds if plan.plain_seconds else None,
        "kept_bytes": sum(row.kept_bytes for row in rows),
        "recomputed_bytes": sum(row.recomputed_bytes for row in rows),
        "offloaded_bytes": sum(row.offloaded_bytes for row in rows),
        "regions": len(rows),
        "regions_planned": sum(row.mode != Mode.KEEP.value for row in rows),
        "measured_peak_bytes": report.measured_peak_bytes,
        "measured_seconds": None if report.measured is None else report.measured.seconds,
        "verified": None if report.verification is None else float(report.verification.ok),
        "bitwise": None if report.verification is None else float(report.verification.bitwise),
    }
    if report.rows:
        scalars["recomputed_calls"] = sum(row.recomputed for row in report.rows)
        scalars["fallbacks"] = sum(row.fallbacks for row in report.rows)
    return {f"{prefix}{name}": float(value) for name, value in scalars.items() if value is not None}


def _report_of(found: Any) -> Report:
    from remat.show.text import Report

    if isinstance(found, Report):
        return found
    if isinstance(found, Plan):
        return Report(found)
    make = getattr(found, "report", None)
    made = make() if callable(make) else None
    if not isinstance(made, Report):
        raise InputError(f"{type(found).__name__} is no handle, report or plan; pass what remat.fit returns")
    return made
