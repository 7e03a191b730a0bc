"""What is wrapped in a model and what it did: rows of data, and the same as a table for a person."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from remat.run.wrap import RegionStatus
from remat.units import format_bytes

__all__ = ["Status"]

_HEADER = ("region", "mode", "active", "calls", "recomputed", "saved before", "saved after", "why")


@dataclass(frozen=True)
class Status:
    """One row per region, counted while the model ran; notes about the model as a whole."""

    rows: tuple[RegionStatus, ...]
    notes: tuple[str, ...] = ()

    @property
    def active(self) -> bool:
        """Whether any region really ran."""
        return any(row.active for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        return {"regions": [row.as_dict() for row in self.rows], "notes": list(self.notes)}

    def __str__(self) -> str:
        if not self.rows:
            return "\n".join(["remat: nothing is enabled on this model", *self.notes])
        lines = _table([_HEADER, *(_cells(row) for row in self.rows)])
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _cells(row: RegionStatus) -> tuple[str, ...]:
    return (
        row.name,
        row.mode,
        "yes" if row.active else "no",
        str(row.calls),
        str(row.recomputed),
        _bytes(row.saved_bytes_before),
        _bytes(row.saved_bytes_after),
        row.why,
    )


def _bytes(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_bytes(nbytes)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
