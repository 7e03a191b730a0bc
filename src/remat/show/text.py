"""A plan and what became of it, for reading."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remat.errors import InputError
from remat.planner.simulate import Timeline, simulate
from remat.records import Plan
from remat.show.decisions import grouped, region_rows
from remat.show.facts import facts, notes_of, trade_off
from remat.units import format_bytes, format_seconds

if TYPE_CHECKING:  # they import torch, which reading a saved plan does not need
    from remat.check.peak import StepPeak
    from remat.check.verify import Verification
    from remat.run.wrap import RegionStatus

__all__ = ["Report"]

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 64


@dataclass(frozen=True)
class Report:
    """print(report) for a person, report.as_dict() for a program, report.save("fit.html" / ".json" / ".txt").

    `events`: what happened while it ran, one mapping each, in order; keys are shown as they are.
    """

    plan: Plan
    verification: Verification | None = None
    measured: StepPeak | None = None
    rows: Sequence[RegionStatus] = ()
    events: Sequence[Mapping[str, Any]] = ()

    @property
    def measured_peak_bytes(self) -> int | None:
        """Of forward and backward, absolute; an optimizer's state is not in it."""
        if self.measured is None:
            return None
        step = self.plan.profile.step
        return step.parameters + step.buffers + step.other + self.measured.above_bytes

    def __str__(self) -> str:
        plan = self.plan
        timeline = simulate(plan.profile, plan.choices)
        lines = [
            f"{plan.profile.model} {plan.profile.signature} on {plan.profile.environment.device_name}",
            _line("budget", format_bytes(plan.budget_bytes), ""),
            _line("peak", format_bytes(plan.predicted_peak_bytes), f"predicted, at {timeline.peak_at}"),
            *self._measured_lines(),
            _line(
                "plain step",
                format_bytes(plan.plain_peak_bytes),
                f"{format_seconds(plan.plain_seconds)}, predicted",
            ),
            _line(
                "slowdown",
                f"{plan.predicted_seconds / plan.plain_seconds:.3f}x" if plan.plain_seconds else "unknown",
                f"{_difference(plan.predicted_seconds - plan.plain_seconds)} per step, predicted",
            ),
            _line("gradients", str(self.verification) if self.verification else "not verified", ""),
            "",
            f"memory over the step, up to {format_bytes(timeline.peak_bytes)}:",
            _sparkline(timeline),
            "",
            *self._region_lines(),
            *self._event_lines(),
            *(f"note: {note}" for note in notes_of(plan)),
        ]
        return "\n".join(lines)

    def _measured_lines(self) -> list[str]:
        if self.measured is None or self.measured_peak_bytes is None:
            return []
        reserved = self.measured.reserved_bytes
        detail = "measured, forward and backward" + (
            f"; {format_bytes(reserved)} reserved" if reserved else ""
        )
        return [_line("", format_bytes(self.measured_peak_bytes), detail)]

    def _region_lines(self) -> list[str]:
        """Equal regions in one line: how many, what they keep, what it costs."""
        rows = region_rows(self.plan)
        hosted = any(row.offloaded_bytes for row in rows)
        head = f"{'regions':<34}{'way':<18}{'held each':>12}{'of':>12}"
        lines = [head + (f"{'on the host':>13}" if hosted else "") + f"{'extra each':>12}"]
        for row, count in grouped(rows):
            host = f"{format_bytes(row.offloaded_bytes):>13}" if hosted else ""
            name = f"{count} x {row.tower or 'blocks'}"
            lines.append(
                f"{name:<34}{row.way:<18}{format_bytes(row.kept_bytes):>12}"
                f"{format_bytes(row.saved_bytes):>12}{host}{format_seconds(row.extra_seconds):>12}"
            )
        return lines

    def _event_lines(self) -> list[str]:
        return [
            "event: " + ", ".join(f"{key} {value}" for key, value in event.items()) for event in self.events
        ]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON, at once; the trade-off takes a second, and is in saved reports."""
        return facts(self)

    def save(self, path: str | Path) -> Path:
        """Write the report; the ending decides: .html (one file that works offline), .json or .txt."""
        path = Path(path)
        if path.suffix == ".html":
            from remat.show.html import page

            text = page(self)
        elif path.suffix == ".json":
            text = json.dumps({**facts(self), "trade_off": trade_off(self.plan)}, indent=1)
        elif path.suffix == ".txt":
            text = str(self) + "\n"
        else:
            ending = path.suffix or "a file without ending"
            raise InputError(f"cannot write a report as {ending!r}; use .html, .json or .txt")
        path.write_text(text, encoding="utf-8")
        return path


def _line(name: str, value: str, detail: str) -> str:
    return f"  {name:<12}{value:<14}{detail}".rstrip()


def _difference(seconds: float) -> str:
    return f"{format_seconds(abs(seconds))} {'less' if seconds < 0 else 'more'}"


def _sparkline(timeline: Timeline) -> str:
    peaks = [point.peak_bytes for point in timeline.points]
    if not peaks:
        return ""
    low, high = min(point.start_bytes for point in timeline.points), max(peaks)
    columns = min(_WIDTH, len(peaks))
    starts = [len(peaks) * column // columns for column in range(columns + 1)]
    heights = [max(peaks[a:b]) for a, b in pairwise(starts)]
    return "".join(_BARS[round((height - low) / max(high - low, 1) * (len(_BARS) - 1))] for height in heights)
