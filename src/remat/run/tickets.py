"""What the offload engine hands out and keeps track of: tickets, groups, and where each sent storage is.

State belongs to the graph: tickets are held by the graph's nodes and hold everything else. See `offload`.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from remat.run.link import Mark, Stream
from remat.run.slabs import Extent, Slabs

if TYPE_CHECKING:  # the engine makes these
    from remat.run.offload import Engine

__all__ = ["DeviceCopy", "Flight", "Group", "Stored", "Ticket"]


@dataclass(slots=True, eq=False)
class DeviceCopy:
    """Bytes on the device. `arrival`: the copy that fills them, until their stream was told to wait."""

    data: Tensor
    stream: Stream
    arrival: Mark | None = None


@dataclass(slots=True, eq=False)
class Stored:
    """One storage that was sent: where its bytes are. Shared by its ticket and the engine's queues."""

    witness: Tensor | None  # the tensor that was sent, while `device` is its memory: shows writes to it
    version: int
    stream: Stream
    nbytes: int
    device: DeviceCopy | None
    pool: Slabs | None = None
    extent: Extent | None = None  # None: it never left the device
    sent: Mark | None = None
    fetched: Mark | None = None
    in_flight: bool = False
    used: bool = False  # asked for since it came (back) to the device
    reused: bool = False  # asked for where it was, before it had left the device
    torn: bool = False  # written to while it was being copied
    dead: bool = False

    @property
    def is_original(self) -> bool:
        return self.witness is not None

    @property
    def is_written(self) -> bool:
        witness = self.witness  # another thread may let the ticket die meanwhile
        return witness is not None and witness._version != self.version

    def drop_device(self) -> None:
        self.device = self.witness = None
        self.used = False


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A copy to the host under way, and what must not be freed before its stream waits for it."""

    stored: Stored
    copy: DeviceCopy
    witness: Tensor
    mark: Mark
    number: int


class Ticket:
    """One storage that was sent. Whoever holds it can have the bytes back, any number of times."""

    __slots__ = ("__weakref__", "_stored", "group")

    def __init__(self, group: Group, stored: Stored) -> None:
        self.group = group
        self._stored = stored

    @property
    def nbytes(self) -> int:
        return self._stored.nbytes

    @property
    def is_on_host(self) -> bool:
        """False: the tensor stayed on the device, because no host memory was free or its copy failed."""
        return self._stored.extent is not None

    def get(self, shape: Sequence[int], stride: Sequence[int], offset: int, dtype: torch.dtype) -> Tensor:
        """The tensor that lies so in its storage (offset in elements), for the current stream.

        Tensors of one ticket share memory, as the saved ones did: do not write to them.
        """
        data = self.group.engine._get(self)
        empty = torch.empty(0, dtype=dtype, device=data.device)
        return empty.set_(data.untyped_storage(), offset, tuple(shape), tuple(stride))

    def __del__(self) -> None:
        # Any thread, any time, perhaps inside the engine's own lock: leave a note and touch nothing else.
        stored = getattr(self, "_stored", None)
        if stored is None:
            return
        stored.dead = True  # first: from now on nobody starts a copy for it
        copy = stored.device
        if copy is not None and copy.arrival is None:
            stored.drop_device()  # its stream is in order with all users; a flight holds its own reference
        self.group.engine._note_death(stored)


class Group:
    """What one region call of one graph has sent. Lives as long as its tickets (or whoever holds it)."""

    def __init__(self, engine: Engine, order: int) -> None:
        self.engine = engine
        self.order = order
        self._previous: weakref.ref[Group] | None = None
        self._tickets: dict[tuple[Hashable, int], weakref.ref[Ticket]] = {}

    def send(self, tensor: Tensor) -> Ticket:
        return self.send_all([tensor])[0]

    def send_all(self, tensors: Sequence[Tensor]) -> list[Ticket]:
        """Start to move the tensors' storages to the host. Tensors of one storage get the same ticket.

        Send in the order of forward: what was sent last is fetched first.
        """
        return self.engine._send(self, tensors)

    def reach(self) -> None:
        """Backward has come to this group's region: what it sent is fetched, and what was sent before it."""
        self.engine._come_to(self)

    def prefetch(self) -> None:
        """Start to bring back what is not on the device, within the limit. `get` does it by itself, too."""
        self.engine._prefetch(self)

    def _live(self) -> list[Stored]:
        """In the order of sending."""
        tickets = (ref() for ref in self._tickets.values())
        return [ticket._stored for ticket in tickets if ticket is not None]

    def _find(self, key: tuple[Hashable, int]) -> Ticket | None:
        ref = self._tickets.get(key)
        return None if ref is None else ref()
