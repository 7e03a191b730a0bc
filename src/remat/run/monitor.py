"""Watches how full the device is, over steps: tighten before it fills, loosen when there is room again.

The textbook's rule is 80 % and 50 % of the memory: tighten above, loosen below. A budget may itself be more
than 80 % of the device, so the upper mark is at least half-way between the budget and the whole. Counted is
what is gone from the device: this process's share with its fragments, and everybody else's.

It never oscillates: after a change it waits to see the effect; it loosens only if what it would give back
still leaves a gap to the upper mark, and only after a number of calm readings, which doubles each time that
loosening turned out to be wrong.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

__all__ = ["Monitor", "Reading", "fragmentation_advice", "read_device"]

_HIGH, _LOW = 0.8, 0.5  # the textbook's rule
_GAP = 0.05  # of the device, below the upper mark, that loosening must leave
_SETTLE = 4  # readings after a change, before the next one
_PATIENCE = 16  # calm readings before the first loosening
_MOST_PATIENCE = 2**14
_FRAGMENTS = 0.1  # of the device, held by the allocator and not used at the peak: worth a word


@dataclass(frozen=True)
class Reading:
    """Bytes on the device. `total`: what this process may take at most; `reserved`: what its allocator has,
    `peak`: the most of it that was in use at a time; `others`: what other processes have."""

    total: int
    reserved: int
    peak: int
    others: int = 0

    @property
    def fragments(self) -> int:
        return max(self.reserved - self.peak, 0)


def read_device(device: torch.device) -> Reading | None:
    """None where there is nothing to read: without an accelerator nobody states how much there is."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    return Reading(
        total=allowed_bytes(device),
        reserved=reserved,
        peak=torch.cuda.max_memory_allocated(device),
        others=max(total - free - reserved, 0),
    )


def allowed_bytes(device: torch.device) -> int:
    """What this process may take of a CUDA device (`set_per_process_memory_fraction`), others aside."""
    allowed = getattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)(device)
    return int(torch.cuda.mem_get_info(device)[1] * allowed)


def fragmentation_advice(reading: Reading) -> str | None:
    """What to set in the environment, if that would help and is not set."""
    if reading.fragments < _FRAGMENTS * reading.total:
        return None
    settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if "expandable_segments:True" in settings:
        return None
    return (
        f"the allocator holds {reading.fragments / 2**30:.1f} GiB in pieces that no step has used at a time; "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, set before the program starts, avoids most of that"
    )


class Monitor:
    """`observe` is called with a reading once per step (or less often) and says what to do."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self._since_change = _SETTLE
        self._calm = 0
        self._patience = _PATIENCE
        self._loosened = False  # the last change was a loosening

    def high(self, total: int) -> float:
        """The share of the device above which it is about to fill."""
        return max(_HIGH, (1 + min(self._budget / total, 1)) / 2)

    def observe(self, reading: Reading, limit_bytes: int, given_back_bytes: int) -> int:
        """+1: tighten, -1: loosen, 0: stay. `limit_bytes` is what steps may take now; `given_back_bytes` what
        loosening by one would add to that (0: nothing is tightened)."""
        self._since_change += 1
        fill = (max(reading.reserved, limit_bytes) + reading.others) / reading.total
        high = self.high(reading.total)
        if fill > high:
            self._calm = 0
            return self._tighten() if self._since_change > _SETTLE else 0
        after = fill + given_back_bytes / reading.total
        if given_back_bytes and (after <= high - _GAP or after <= _LOW):
            self._calm += 1
            if self._calm >= self._patience and self._since_change > _SETTLE:
                self._calm, self._since_change, self._loosened = 0, 0, True
                return -1
        else:
            self._calm = 0
        return 0

    def ran_out(self) -> None:
        """A step ran out of memory and was tightened: that counts as this monitor's own change."""
        self._tighten()

    def _tighten(self) -> int:
        if self._loosened:
            self._patience = min(2 * self._patience, _MOST_PATIENCE)
        self._calm, self._since_change, self._loosened = 0, 0, False
        return 1
