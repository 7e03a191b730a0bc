"""A kept tensor that waits on the host: what stands for it in an autograd node, or where a recipe reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from remat.run.host import can_host
from remat.run.offload import Engine, Group, Ticket

__all__ = ["Moved", "MovedSlot", "send_all", "unmove"]


@dataclass(frozen=True)
class MovedSlot:
    """A saved tensor that goes to the host, as captured."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    label: str


class Moved:
    """One tensor: on the device until `send_all`, afterwards a ticket and how the tensor lies in its storage.

    Several of them may be views of one storage, which is sent once. A tensor that cannot be sent (a subclass,
    another device) stays, and its version is watched as autograd would: hooks switch autograd's check off.

    A region's output that its last operation holds is lent: it stays here as well, until the region that
    reads it sends that storage to the host. From then on this has a share in the reader's ticket.
    """

    __slots__ = ("__weakref__", "_group", "_layout", "_ticket", "_version", "name", "tensor")

    def __init__(self, name: str, tensor: torch.Tensor | None = None) -> None:
        self.name = name
        self.tensor = tensor
        self._ticket: Ticket | None = None
        self._group: Group | None = None
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

    def lend(self, engine: Engine, group: Group | None) -> None:
        """Hold the tensor until somebody else sends its storage. `group`: what its own region sends, which
        comes back when backward asks for this."""
        self.keep()
        if self._may_leave(engine):
            assert self.tensor is not None
            self._group = group
            engine.lend(self, self.tensor)

    def sent_by(self, ticket: Ticket, version: int) -> None:
        """Somebody has sent the storage as it was at this version: share the ticket, if that is ours."""
        if self.tensor is not None and version == self._version:
            self._let_go(ticket)

    def _may_leave(self, engine: Engine) -> bool:
        return self.tensor is not None and self.tensor.device == engine.device and can_host(self.tensor)

    def _let_go(self, ticket: Ticket) -> None:
        tensor = self.tensor
        assert tensor is not None
        self._layout = (tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype)
        self._ticket = ticket
        self.tensor = None  # last: another thread may ask meanwhile

    def get(self) -> torch.Tensor:
        """The tensor, on the device: for reading only."""
        tensor = self.tensor
        if tensor is None:
            assert self._ticket is not None
            assert self._layout is not None
            found = self._ticket.get(*self._layout)
            if self._group is not None:
                self._group.reach()
            return found
        if tensor._version != self._version:
            raise RuntimeError(
                f"{self.name}: one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: it is at version {tensor._version}; expected version "
                f"{self._version} instead"
            )
        return tensor


def send_all(moved: Sequence[Moved], group: Group) -> None:
    """Let the tensors go; their storages are on their way to the host."""
    leaving: list[Moved] = []
    tensors: list[torch.Tensor] = []
    for one in moved:
        if one.tensor is not None and one._may_leave(group.engine):
            leaving.append(one)
            tensors.append(one.tensor)
        else:
            one.keep()
    if leaving:
        for one, ticket in zip(leaving, group.send_all(tensors), strict=True):
            one._let_go(ticket)


def unmove(moved: Moved) -> torch.Tensor:
    """What autograd calls when it wants the saved tensor back."""
    return moved.get()
