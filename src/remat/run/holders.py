"""What stands in an autograd node where a saved tensor was, and gives it back when backward asks.

A row is a list: the frame of the forward that it belongs to, then the kept tensors from which the slot's
tensor is rebuilt, None where it does not read one. The functions that autograd calls with a row are generated
(run.recipe): between the kernels of backward every call counts. Here is what they call when all is not well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from remat.errors import RecomputeError
from remat.run.program import Program, Slot
from remat.run.replay import replaying
from remat.run.spotcheck import SpotCheck

__all__ = ["Counts", "Frame", "Kept", "refuse", "unpack_carefully"]


@dataclass
class Counts:
    """What a region did. `rebuilt` counts since the last forward that followed a backward."""

    calls: int = 0
    rebuilt: int = 0
    fallbacks: int = 0
    why: str = ""
    in_backward: bool = False
    steps: int = 0  # forwards that followed a backward


class Frame:
    """One forward of a region, as far as its backward is concerned. Held by its rows alone."""

    __slots__ = ("check", "counts", "memo", "name", "program", "versions")
    keeps = False

    def __init__(self, name: str, counts: Counts, program: Program, kept: Sequence[torch.Tensor]) -> None:
        self.name = name
        self.counts = counts
        self.program = program
        self.memo: list[Any] = [None] * program.memo_size
        self.versions = [tensor._version for tensor in kept]
        self.check: SpotCheck | None = None


class Kept:
    """Stands in a row in place of its frame: the slot's tensor was not dropped after all. Its version is
    watched here, because autograd does not where there are hooks."""

    __slots__ = ("_name", "_slot", "_tensor", "_version")
    keeps = True

    def __init__(self, name: str, slot: Slot, tensor: torch.Tensor) -> None:
        self._name, self._slot, self._tensor, self._version = name, slot, tensor, tensor._version

    def get(self) -> torch.Tensor:
        if self._tensor._version != self._version:
            raise RuntimeError(
                f"region {self._name}: one of the variables needed for gradient computation has been "
                f"modified by an inplace operation: {self._slot.label} ({self._slot.source}) is at version "
                f"{self._tensor._version}; expected version {self._version} instead"
            )
        return self._tensor


def unpack_carefully(row: list[Any], place: int) -> torch.Tensor:
    """Where backward records what it does (create_graph), or runs inside autocast."""
    frame: Frame = row[0]
    slot = frame.program.slots[place]
    with replaying():
        tensor = slot.rebuild(row, frame.memo)
        if slot.checked and frame.check is not None:
            frame.check.see(place, tensor)
    frame.counts.rebuilt += 1
    frame.counts.in_backward = True
    return tensor


def refuse(row: list[Any], place: int) -> None:
    """A kept tensor is not what it was when forward ended."""
    frame: Frame = row[0]
    slot = frame.program.slots[place]
    for number in slot.needs:
        found, expected = row[number + 1]._version, frame.versions[number]
        if found != expected:
            raise RecomputeError(
                f"region {frame.name}: {frame.program.kept[number]}, from which {slot.label} ({slot.source}) "
                f"is rebuilt, was modified in place after the forward pass (version {found}, expected "
                f"{expected}); clone it before writing to it"
            )
