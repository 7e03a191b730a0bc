"""A kept tensor that waits on the host: what stands for it in an autograd node, or where a recipe reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from remat.run.host import can_host
from remat.run.offload import Group, Ticket

__all__ = ["Moved", "MovedSlot", "unmove"]


@dataclass(frozen=True)
class MovedSlot:
    """A saved tensor that goes to the host, as captured."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    label: str


class Moved:
    """One tensor: on the device until `send`, afterwards a ticket and how the tensor lies in its storage.

    Several of them may be views of one storage, which is sent once. A tensor that cannot be sent (a subclass,
    another device) stays, and its version is watched as autograd would: hooks switch autograd's check off.
    """

    __slots__ = ("_layout", "_ticket", "_version", "name", "tensor")

    def __init__(self, name: str, tensor: torch.Tensor | None = None) -> None:
        self.name = name
        self.tensor = tensor
        self._ticket: Ticket | None = None
        self._version = 0
        self._layout: tuple[Sequence[int], Sequence[int], int, torch.dtype] | None = None

    def pack(self, tensor: torch.Tensor) -> Moved:
        self.tensor = tensor
        return self

    def is_as_captured(self, slot: MovedSlot) -> bool:
        tensor = self.tensor
        return (
            tensor is not None
            and tensor.dtype is slot.dtype
            and tensor.shape == slot.shape
            and tensor.stride() == slot.stride
        )

    def keep(self) -> None:
        """Hold the tensor after all."""
        if self.tensor is not None:
            self._version = self.tensor._version

    def send(self, group: Group) -> None:
        """Let the tensor go; its storage is on its way to the host."""
        tensor = self.tensor
        if tensor is None or tensor.device != group.engine.device or not can_host(tensor):
            self.keep()
            return
        self._layout = (tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype)
        self._ticket = group.send(tensor)
        self.tensor = None

    def get(self) -> torch.Tensor:
        """The tensor, on the device: for reading only."""
        if self._ticket is not None:
            assert self._layout is not None
            return self._ticket.get(*self._layout)
        assert self.tensor is not None
        if self.tensor._version != self._version:
            raise RuntimeError(
                f"{self.name}: one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: it is at version {self.tensor._version}; expected version "
                f"{self._version} instead"
            )
        return self.tensor


def unmove(moved: Moved) -> torch.Tensor:
    """What autograd calls when it wants the saved tensor back."""
    return moved.get()
