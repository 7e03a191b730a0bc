"""What happened to a plan while training: events, for the log, for a callback, and for `handle.stats`."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Event", "Journal", "Stats"]

_log = logging.getLogger("remat")
_REMEMBERED = 1000  # events; older ones are only counted
_LEVELS = {
    "plan changed": logging.DEBUG,  # with inputs of many sizes nearly every step
    "planned": logging.INFO,
    "loosened": logging.INFO,
}


@dataclass(frozen=True)
class Event:
    """Something that changed. `kind`: "planned", "plan changed", "fell back", "recovered", "tightened",
    "loosened" or "advice". `seconds` since the handle was made; `step` counts steps."""

    kind: str
    text: str
    step: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"step {self.step:>6} {self.seconds:>8.1f} s  {self.kind}: {self.text}"


@dataclass
class Stats:
    """Counted since the handle was made."""

    steps: int = 0
    hits: int = 0  # steps whose size had its plan ready
    misses: int = 0
    planning_seconds: float = 0.0  # spent on plans for new sizes, in training
    counts: Counter[str] = field(default_factory=Counter)  # events by kind
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    @property
    def recovered(self) -> int:
        """Steps that ran out of memory and were run again."""
        return self.counts["recovered"]

    @property
    def fell_back(self) -> int:
        return self.counts["fell back"]

    @property
    def plan_changes(self) -> int:
        return self.counts["plan changed"]

    def as_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "hits": self.hits,
            "misses": self.misses,
            "planning_seconds": self.planning_seconds,
            "counts": dict(self.counts),
            "events": [event.as_dict() for event in self.events],
        }


class Journal:
    """Writes events down. A callback that raises stops training: it is the user's own code."""

    def __init__(self, on_event: Callable[[Event], None] | None = None) -> None:
        self.stats = Stats()
        self.on_event = on_event
        self._start = time.monotonic()
        self._said: set[str] = set()

    def note_once(self, kind: str, what: str, text: str) -> None:
        """The first of this kind and of `what`; where regions are many, all say the same."""
        if what not in self._said:
            self._said.add(what)
            self.note(kind, text)

    def note(self, kind: str, text: str) -> None:
        event = Event(kind, text, self.stats.steps, time.monotonic() - self._start)
        self.stats.counts[kind] += 1
        self.stats.events.append(event)
        _log.log(_LEVELS.get(kind, logging.WARNING), "%s: %s", kind, text)
        if self.on_event is not None:
            self.on_event(event)
