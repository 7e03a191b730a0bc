"""What stands in an autograd node where a saved tensor was, and gives it back when backward asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from remat.errors import RecomputeError
from remat.run.program import Program, Slot
from remat.run.replay import replaying
from remat.run.spotcheck import SpotCheck

__all__ = ["Counts", "Frame", "Holder", "unpack"]


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
    """One forward of a region, as far as its backward is concerned. Held by its holders alone."""

    __slots__ = ("check", "counts", "device_type", "memo", "name", "program", "versions")

    def __init__(self, name: str, counts: Counts, program: Program, kept: Sequence[torch.Tensor]) -> None:
        self.name = name
        self.counts = counts
        self.program = program
        self.memo: list[Any] = [None] * program.memo_size
        self.versions = [tensor._version for tensor in kept]
        self.device_type = program.device.type
        self.check: SpotCheck | None = None


class Holder:
    """Stands in an autograd node where a saved tensor was."""

    __slots__ = ("frame", "place", "slot", "sources", "tensor", "version")

    def __init__(self, frame: Frame, place: int, slot: Slot, sources: list[Any]) -> None:
        self.frame, self.place, self.slot, self.sources = frame, place, slot, sources
        self.tensor: torch.Tensor | None = None
        self.version = 0

    def pack(self, tensor: torch.Tensor) -> Holder:
        self.tensor = tensor
        return self

    def is_as_captured(self) -> bool:
        tensor, slot = self.tensor, self.slot
        return (
            tensor is not None
            and tensor.dtype is slot.dtype
            and tensor.shape == slot.shape
            and tensor.stride() == slot.stride
            and (slot.offset is None or tensor.storage_offset() == slot.offset)
        )

    def keep(self) -> None:
        """Hold the tensor after all, and watch its version: autograd does not where there are hooks."""
        if self.tensor is not None:
            self.version = self.tensor._version

    def kept(self) -> torch.Tensor:
        assert self.tensor is not None
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"region {self.frame.name}: one of the variables needed for gradient computation has been "
                f"modified by an inplace operation: {self.slot.label} ({self.slot.source}) is at version "
                f"{self.tensor._version}; expected version {self.version} instead"
            )
        return self.tensor


def _rebuilt(holder: Holder, frame: Frame, slot: Slot) -> torch.Tensor:
    tensor = slot.rebuild(holder.sources, frame.memo)
    if slot.checked and frame.check is not None:
        frame.check.see(holder.place, tensor)
    return tensor


def unpack(holder: Holder) -> torch.Tensor:
    """What autograd calls when it wants the saved tensor back."""
    if holder.tensor is not None:
        return holder.kept()
    frame, sources, slot = holder.frame, holder.sources, holder.slot
    for number in slot.needs:
        if sources[number]._version != frame.versions[number]:
            raise RecomputeError(
                f"region {frame.name}: {frame.program.kept[number]}, from which {slot.label} ({slot.source}) "
                f"is rebuilt, was modified in place after the forward pass (version "
                f"{sources[number]._version}, expected {frame.versions[number]}); "
                "clone it before writing to it"
            )
    if torch.is_grad_enabled() or torch.is_autocast_enabled(frame.device_type):
        with replaying():  # create_graph, or backward inside autocast
            tensor = _rebuilt(holder, frame, slot)
    else:
        tensor = _rebuilt(holder, frame, slot)
    frame.counts.rebuilt += 1
    frame.counts.in_backward = True
    return tensor
