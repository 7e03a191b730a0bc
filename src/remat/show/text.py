"""A plan and what became of it, for reading."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from remat.check.peak import StepPeak
from remat.check.verify import Verification
from remat.errors import InputError
from remat.planner.simulate import Timeline, simulate
from remat.records import Entry, Mode, Plan
from remat.run.wrap import RegionStatus
from remat.units import format_bytes, format_seconds

__all__ = ["Report"]

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 64


@dataclass(frozen=True)
class Report:
    """print(report) for a person, report.as_dict() for a program, report.save("fit.json" / "fit.txt")."""

    plan: Plan
    verification: Verification | None = None
    measured: StepPeak | None = None
    rows: Sequence[RegionStatus] = ()

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
                f"{format_seconds(plan.predicted_seconds - plan.plain_seconds)} more per step, predicted",
            ),
            _line("gradients", str(self.verification) if self.verification else "not verified", ""),
            "",
            f"memory over the step, up to {format_bytes(timeline.peak_bytes)}:",
            _sparkline(timeline),
            "",
            *self._region_lines(),
            *(f"note: {note}" for note in self._notes()),
        ]
        return "\n".join(lines)

    def _notes(self) -> list[str]:
        head = self.plan.profile.head
        chunks = []
        if self.plan.profile.chunked and head is not None:
            chunks = [
                f"{head.head} and the loss run in chunks: gradients equal within rounding, not to the bit"
            ]
        return [*chunks, *self.plan.profile.notes, *self.plan.notes]

    def _measured_lines(self) -> list[str]:
        if self.measured is None:
            return []
        step = self.plan.profile.step
        peak = step.parameters + step.buffers + step.other + self.measured.above_bytes
        reserved = self.measured.reserved_bytes
        detail = "measured, forward and backward" + (
            f"; {format_bytes(reserved)} reserved" if reserved else ""
        )
        return [_line("", format_bytes(peak), detail)]

    def _region_lines(self) -> list[str]:
        """Equal regions in one line: how many, what they keep, what it costs."""
        plan = self.plan
        groups = Counter(
            (call.tower, call.kind, plan.choices[i]) for i, call in enumerate(plan.profile.calls)
        )
        lines = [f"{'regions':<34}{'way':<10}{'held each':>12}{'of':>12}{'extra each':>12}"]
        for (tower, kind, choice), count in groups.items():
            found = plan.profile.kinds[kind]
            entry = found.menu[choice]
            lines.append(
                f"{f'{count} x {tower}':<34}{_way(entry):<10}{format_bytes(entry.resident_bytes):>12}"
                f"{format_bytes(found.saved_bytes):>12}{format_seconds(entry.extra_seconds):>12}"
            )
        return lines

    def as_dict(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "model": plan.profile.model,
            "budget_bytes": plan.budget_bytes,
            "predicted_peak_bytes": plan.predicted_peak_bytes,
            "measured_step_bytes": None if self.measured is None else self.measured.above_bytes,
            "plain_peak_bytes": plan.plain_peak_bytes,
            "predicted_seconds": plan.predicted_seconds,
            "plain_seconds": plan.plain_seconds,
            "verification": None if self.verification is None else str(self.verification),
            "regions": [
                {
                    "name": call.name,
                    "call": call.call,
                    "mode": plan.entry(i).mode.value,
                    "resident_bytes": plan.entry(i).resident_bytes,
                    "saved_bytes": plan.profile.kinds[call.kind].saved_bytes,
                    "extra_seconds": plan.entry(i).extra_seconds,
                }
                for i, call in enumerate(plan.profile.calls)
            ],
            "status": [row.as_dict() for row in self.rows],
            "notes": self._notes(),
        }

    def save(self, path: str | Path) -> Path:
        """Write the report; the ending decides: .json or .txt."""
        path = Path(path)
        if path.suffix == ".json":
            text = json.dumps(self.as_dict(), indent=1)
        elif path.suffix == ".txt":
            text = str(self) + "\n"
        else:
            raise InputError(
                f"cannot write a report as {path.suffix or 'a file without ending'!r}; use .json or .txt"
            )
        path.write_text(text, encoding="utf-8")
        return path


def _line(name: str, value: str, detail: str) -> str:
    return f"  {name:<12}{value:<14}{detail}".rstrip()


def _way(entry: Entry) -> str:
    if entry.mode is Mode.RECIPE and entry.recipe is not None:
        return f"recipe/{len(entry.recipe.dropped)}"
    return entry.mode.value


def _sparkline(timeline: Timeline) -> str:
    peaks = [point.peak_bytes for point in timeline.points]
    if not peaks:
        return ""
    low, high = min(point.start_bytes for point in timeline.points), max(peaks)
    columns = min(_WIDTH, len(peaks))
    starts = [len(peaks) * column // columns for column in range(columns + 1)]
    heights = [max(peaks[a:b]) for a, b in pairwise(starts)]
    return "".join(_BARS[round((height - low) / max(high - low, 1) * (len(_BARS) - 1))] for height in heights)
