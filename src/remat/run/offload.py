"""The offload engine: moves saved tensors to the host behind compute, and back before backward asks.

    engine = Engine(device, in_flight_limit_bytes=...)   one per device
    group = engine.group(order)                          one per region call of one graph
    tickets = group.send_all(tensors)                    one per storage; the caller lets its tensors go
    engine.lend(lender, tensor)                          lets its tensor go when somebody sends the storage
    tensor = ticket.get(shape, stride, offset, dtype)    in backward

Out. A copy starts on its own stream once the producing stream has got there. The engine holds the device
memory until that stream has been told to wait for the copy, and tells it only when more than
`in_flight_limit_bytes` are on their way: by then the copy is done, or compute has outrun the link and must
slow down. Neither the host waits, nor does memory depend on timing: the same step takes the same bytes.

Back. When backward reaches a group, copies for that group and for the group sent just before it are started,
at most `in_flight_limit_bytes` that nobody has asked for yet; the rest follows as copies are used. A copy
that was not started in time is started by `get`. Memory that is still on the device is simply used again.

State belongs to the graph: tickets are held by the graph's nodes and hold everything else, the engine knows
groups only weakly. When a ticket dies, its host bytes are free for the next step; device memory that a copy
may still write to goes when its stream has been told to wait. Tickets die in any thread, at any time, so
their end only leaves a note, which the next call to the engine reads.

Streams. Device copies belong to the stream on which the tensor was sent. Autograd runs the backward of an
operation on the stream of its forward, so `get` normally meets its own stream; on another one it fetches a
copy for that stream. A sent tensor must have been allocated on the stream on which it is sent (or have been
recorded on it): that stream is the one that waits before the memory goes.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from remat._torch_private import storage_ref
from remat.errors import HostMemoryError, InputError, OffloadError
from remat.run.disk import file_memory
from remat.run.host import can_host
from remat.run.hostmem import available_host_bytes
from remat.run.link import CudaLink, Link, Mark, Outbound, Stream
from remat.run.simulated import SimulatedLink
from remat.run.slabs import SLAB_BYTES, Extent, Slabs, aligned
from remat.run.tickets import DeviceCopy, Flight, Group, Stored, Ticket
from remat.units import format_bytes

__all__ = ["HOST_SHARE", "Counts", "Engine", "Group", "Lender", "Ticket"]

HOST_SHARE = 0.5  # of the available host memory, unless a limit is given
_GROUPS_AT_WORK = 2  # backward of one group may still run when the next one is reached


class Lender(Protocol):
    """Whoever holds a tensor only until its storage is sent."""

    def sent_by(self, ticket: Ticket, version: int) -> None: ...


@dataclass(frozen=True)
class Counts:
    """What an engine holds now and has done so far."""

    pinned_bytes: int  # host memory taken from the system
    disk_bytes: int  # disk taken from the system
    used_bytes: int  # of both, what tickets occupy
    peak_used_bytes: int
    in_flight_bytes: int  # device memory held for copies to the host
    peak_in_flight_bytes: int
    inbound_bytes: int  # device memory fetched ahead, not yet asked for
    peak_inbound_bytes: int
    sent_bytes: int
    fetched_bytes: int
    kept_bytes: int  # sent, but no host memory was free: stayed on the device
    waits: int  # times a stream was told to wait so that memory could go
    direct_hits: int  # gets served by memory that had not left yet
    prefetch_hits: int  # gets served by a copy started ahead
    late_fetches: int  # gets that had to start their copy
    failures: int  # copies that could not be started


class Engine:
    """Moves storages between one device and the host. Safe to call from several threads.

    `in_flight_limit_bytes` bounds the device memory held for copies, in each direction.
    `host_limit_bytes`: pinned memory at most; by default half of what is available now.
    `disk_limit_bytes`: files at most, for what exceeds host memory; by default none.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        in_flight_limit_bytes: int = 512 * 2**20,
        host_limit_bytes: int | None = None,
        disk_limit_bytes: int = 0,
        disk_directory: str | None = None,
        slab_bytes: int = SLAB_BYTES,
        link: Link | None = None,
    ) -> None:
        if (
            in_flight_limit_bytes < 0
            or (host_limit_bytes or 0) < 0
            or disk_limit_bytes < 0
            or slab_bytes <= 0
        ):
            raise InputError(
                f"in_flight_limit_bytes={in_flight_limit_bytes}, host_limit_bytes={host_limit_bytes}, "
                f"disk_limit_bytes={disk_limit_bytes}, slab_bytes={slab_bytes}: limits are 0 bytes or more, "
                "and a slab has at least one"
            )
        self._link = link if link is not None else _link_of(torch.device(device))
        if host_limit_bytes is None:
            host_limit_bytes = int(available_host_bytes() * HOST_SHARE)
        self._host = Slabs(self._link.pin, self._link.unpin, host_limit_bytes, slab_bytes)
        self._disk = Slabs(
            lambda nbytes: file_memory(nbytes, disk_directory),
            lambda memory: None,  # a file goes with the last tensor of it
            disk_limit_bytes,
            slab_bytes,
            what="disk for offload",
        )
        self._limit = in_flight_limit_bytes
        self._lock = threading.Lock()
        self._local = threading.local()  # .last: the group that this thread sent last
        self._closed = False

        self._flights: deque[Flight] = deque()
        self._flight_number = 0
        self._flight_at_last_reach = 0
        self._in_flight_bytes = self._peak_in_flight_bytes = 0

        self._at_work: deque[weakref.ref[Group]] = deque()
        self._wanted: deque[Stored] = deque()
        self._inbound: dict[Stored, None] = {}
        self._inbound_bytes = self._peak_inbound_bytes = 0

        self._lenders: dict[Hashable, list[weakref.ref[Lender]]] = {}  # by storage
        self._lenders_gone: deque[Hashable] = deque()

        self._dead: deque[Stored] = deque()
        self._peak_used_bytes = 0
        self._sent_bytes = self._fetched_bytes = self._kept_bytes = 0
        self._waits = self._direct_hits = self._prefetch_hits = self._late_fetches = self._failures = 0
        self._at_end = weakref.finalize(self, _give_all_back, self._link, (self._host, self._disk))

    @property
    def device(self) -> torch.device:
        return self._link.device

    @property
    def link(self) -> Link:
        return self._link

    @property
    def _used_bytes(self) -> int:
        return self._host.used_bytes + self._disk.used_bytes

    @property
    def counts(self) -> Counts:
        with self._lock:
            self._bury()
            return Counts(
                pinned_bytes=self._host.total_bytes,
                disk_bytes=self._disk.total_bytes,
                used_bytes=self._used_bytes,
                peak_used_bytes=self._peak_used_bytes,
                in_flight_bytes=self._in_flight_bytes,
                peak_in_flight_bytes=self._peak_in_flight_bytes,
                inbound_bytes=self._inbound_bytes,
                peak_inbound_bytes=self._peak_inbound_bytes,
                sent_bytes=self._sent_bytes,
                fetched_bytes=self._fetched_bytes,
                kept_bytes=self._kept_bytes,
                waits=self._waits,
                direct_hits=self._direct_hits,
                prefetch_hits=self._prefetch_hits,
                late_fetches=self._late_fetches,
                failures=self._failures,
            )

    def reserve(self, sizes: int | Sequence[int]) -> None:
        """Take host memory (and disk for what exceeds its limit) now, when a plan is applied: so many bytes
        in whole slabs, or room for storages of these sizes and no more.

        HostMemoryError: it cannot be had, so the plan has to offload less. Nothing has been moved yet.
        """
        nbytes = sizes if isinstance(sizes, int) else sum(map(aligned, sizes))
        with self._lock:
            if self._closed:
                raise HostMemoryError(f"{format_bytes(nbytes)} asked of a closed engine; make a new one")
            on_host = nbytes if self._disk.limit_bytes == 0 else min(nbytes, self._host.limit_bytes)
            exactly = not isinstance(sizes, int)
            self._host.reserve(on_host, exactly=exactly)
            self._disk.reserve(nbytes - on_host, exactly=exactly)

    def widen(self, nbytes: int) -> None:
        """Let at least this much be in flight, each way."""
        with self._lock:
            self._limit = max(self._limit, nbytes)

    def begin(self, nbytes: int) -> None:
        """A forward begins, perhaps under another plan: from here on at most this is in flight, each way. No
        device memory is held for what was sent before, and no group of before is this forward's neighbour."""
        with self._lock:
            self._bury()
            self._settle(0)
            self._limit = nbytes
            self._local.last = None

    def make_room(self, sizes: Sequence[int]) -> None:
        """Have host memory for storages of these sizes, sent in this order when nothing else is there: as
        they will be cut from the slabs that exist. HostMemoryError: it cannot be had, and nothing changes."""
        with self._lock:
            if self._closed:
                raise HostMemoryError(f"{format_bytes(sum(sizes))} asked of a closed engine; make a new one")
            self._host.make_room(sizes)

    def group(self, order: int) -> Group:
        """For one region call. `order` grows along one forward pass: that is how neighbours are known."""
        return Group(self, order)

    def lend(self, lender: Lender, tensor: Tensor) -> None:
        """`lender` holds this tensor. It is told when the storage is sent, as long as it lives."""
        key = storage_ref(tensor)
        with self._lock:
            self._forget_lenders()
            gone = self._lenders_gone
            reference = weakref.ref(lender, lambda _: gone.append(key))  # any thread, any time: only a note
            self._lenders.setdefault(key, []).append(reference)

    def _forget_lenders(self) -> None:
        while self._lenders_gone:
            key = self._lenders_gone.popleft()
            left = [reference for reference in self._lenders.get(key, ()) if reference() is not None]
            if left:
                self._lenders[key] = left
            else:
                self._lenders.pop(key, None)

    def last_group(self) -> Group | None:
        """The one that this thread sent last, if it lives."""
        last: weakref.ref[Group] | None = getattr(self._local, "last", None)
        return None if last is None else last()

    def settle(self) -> None:
        """Hold no device memory for copies to the host: streams wait for them from here on."""
        with self._lock:
            self._bury()
            self._settle(0)

    def close(self) -> None:
        """Give host memory back, after pending copies. What live tickets occupy goes when they die; until
        then they still work. Later sends stay on the device."""
        with self._lock:
            self._closed = True
            self._settle(0)
            self._wanted.clear()
            self._bury()
            self._link.synchronize()
            self._host.close()
            self._disk.close()

    # -- out

    def _send(self, group: Group, tensors: Sequence[Tensor]) -> list[Ticket]:
        for tensor in tensors:
            if tensor.device != self.device or not can_host(tensor):
                raise InputError(
                    f"a {type(tensor).__name__} {tuple(tensor.shape)} on {tensor.device} cannot be offloaded "
                    f"by the engine of {self.device}; send plain strided tensors of that device, and no "
                    "parameters"
                )
        with self._lock:
            self._bury()
            keys = [(storage_ref(tensor), tensor._version) for tensor in tensors]
            new: dict[tuple[Hashable, int], Tensor] = {}
            tickets: dict[tuple[Hashable, int], Ticket] = {}
            for key, tensor in zip(keys, tensors, strict=True):
                known = group._find(key)
                if known is not None:
                    tickets[key] = known
                else:
                    new.setdefault(key, tensor)
            if new:
                self._link_to_previous(group)
                for key, stored in zip(new, self._start_flights(list(new.values())), strict=True):
                    tickets[key] = ticket = Ticket(group, stored)
                    group._tickets[key] = weakref.ref(ticket)
                    for reference in self._lenders.pop(key[0], ()):
                        lender = reference()
                        if lender is not None:
                            lender.sent_by(ticket, key[1])
                self._settle(self._limit)
            return [tickets[key] for key in keys]

    def _link_to_previous(self, group: Group) -> None:
        if group._tickets:
            return
        last = self.last_group()
        if last is not None and last.order < group.order:
            group._previous = weakref.ref(last)
        self._local.last = weakref.ref(group)

    def _start_flights(self, tensors: Sequence[Tensor]) -> list[Stored]:
        stream = self._link.current()
        everything = [_on_device(tensor, stream) for tensor in tensors]
        leaving = [stored for stored in everything if stored.nbytes and self._find_room(stored)]
        if leaving:
            for stored, mark in zip(leaving, self._started(leaving), strict=True):
                if mark is not None:
                    self._take_off(stored, mark)
                else:  # keep the device memory: nothing is lost
                    assert stored.pool is not None
                    assert stored.extent is not None
                    self._failures += 1
                    stored.pool.give(stored.extent, None)
                    stored.pool = stored.extent = None
        self._kept_bytes += sum(stored.nbytes for stored in everything if stored.extent is None)
        self._peak_used_bytes = max(self._peak_used_bytes, self._used_bytes)
        return everything

    def _find_room(self, stored: Stored) -> bool:
        pool, extent = self._take(stored.nbytes)
        if extent is not None:
            stored.pool, stored.extent = pool, extent
        return extent is not None

    def _started(self, leaving: Sequence[Stored]) -> Sequence[Mark | None]:
        copies = []
        for stored in leaving:
            assert stored.device is not None
            assert stored.extent is not None
            copies.append(Outbound(stored.device.data, stored.extent.memory, stored.extent.read_until))
        try:
            return self._link.send(copies)
        except RuntimeError:
            return [None] * len(leaving)

    def _take_off(self, stored: Stored, mark: Mark) -> None:
        assert stored.device is not None
        assert stored.witness is not None
        stored.sent, stored.in_flight = mark, True
        self._flight_number += 1
        self._flights.append(Flight(stored, stored.device, stored.witness, mark, self._flight_number))
        self._sent_bytes += stored.nbytes
        self._in_flight_bytes += stored.nbytes

    def _take(self, nbytes: int) -> tuple[Slabs, Extent | None]:
        extent = self._host.take(nbytes)
        if extent is not None or self._disk.limit_bytes == 0:
            return self._host, extent
        return self._disk, self._disk.take(nbytes)

    def _settle(self, limit: int) -> None:
        """Let device memory go, oldest copy first, until at most `limit` bytes are in flight."""
        while self._in_flight_bytes > limit:
            self._land(self._flights.popleft())
        self._peak_in_flight_bytes = max(self._peak_in_flight_bytes, self._in_flight_bytes)

    def _land(self, flight: Flight) -> None:
        stored = flight.stored
        self._link.wait(flight.copy.stream, flight.mark)
        self._waits += 1
        self._in_flight_bytes -= stored.nbytes
        stored.in_flight = False
        stored.torn = flight.witness._version != stored.version
        if stored.device is flight.copy and not stored.used:
            stored.drop_device()
            self._link.let_go(flight.copy.data)

    # -- back

    def _get(self, ticket: Ticket) -> Tensor:
        with self._lock:
            self._bury()
            reached = self._reach(ticket.group)
            data = self._present(ticket._stored)
            self._fetch_for(reached)
            return data

    def _come_to(self, group: Group) -> None:
        with self._lock:
            self._bury()
            self._fetch_for(self._reach(group))

    def _fetch_for(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self._want(group)
        self._pump()

    def _present(self, stored: Stored) -> Tensor:
        """The bytes on the device, ready for the current stream."""
        stream = self._link.current()
        if stored.is_original and self._can_reuse(stored, stream):
            assert stored.device is not None
            self._direct_hits += 1
            stored.used = stored.reused = True
            return stored.device.data
        if stored.torn or stored.extent is None:
            raise _written(stored)
        if stored.device is not None and (stored.is_original or stored.device.stream != stream):
            self._retire(stored)
        if stored.device is None:
            self._late_fetches += 1
            self._fetch_now(stored, stream)
        elif stored.device.arrival is not None:
            self._prefetch_hits += 1
        copy = stored.device
        assert copy is not None
        if copy.arrival is not None:
            self._link.wait(stream, copy.arrival)
            copy.arrival = None
        self._leave_inbound(stored)
        stored.used = True
        return copy.data

    def _can_reuse(self, stored: Stored, stream: Stream) -> bool:
        """Whether the memory in which the tensor came still serves, and may be used on this stream."""
        if stored.is_written:
            stored.torn |= stored.in_flight
            return False
        return stored.extent is None or stored.stream == stream

    def _fetch(self, stored: Stored, stream: Stream) -> None:
        assert stored.extent is not None
        assert stored.sent is not None
        try:
            data, mark = self._link.fetch(stored.extent.memory, stream, stored.sent)
        except torch.OutOfMemoryError:  # has its own numbers and remedy
            raise
        except RuntimeError as error:
            self._failures += 1
            raise OffloadError(
                f"{format_bytes(stored.nbytes)} of an offloaded saved tensor could not be copied back to "
                f"{self.device} ({error}); the host still has them: repeat backward (retain_graph=True), "
                "or plan without offload"
            ) from error
        stored.fetched = mark
        stored.witness = None
        stored.device = DeviceCopy(data, stream, mark)
        stored.used = False
        self._fetched_bytes += stored.nbytes

    def _fetch_now(self, stored: Stored, stream: Stream) -> None:
        """Somebody asks: if the device is full, what was fetched ahead for others gives way."""
        try:
            self._fetch(stored, stream)
        except torch.OutOfMemoryError:
            if not self._inbound:
                raise
            for ahead in list(self._inbound):
                self._retire(ahead)
            self._fetch(stored, stream)

    def _retire(self, stored: Stored) -> None:
        """Let go of what is on the device; the host has it."""
        copy = stored.device
        if copy is not None and copy.arrival is not None:
            self._link.wait(copy.stream, copy.arrival)
            self._waits += 1
        self._leave_inbound(stored)
        stored.drop_device()

    def _leave_inbound(self, stored: Stored) -> None:
        if stored in self._inbound:
            del self._inbound[stored]
            self._inbound_bytes -= stored.nbytes

    # -- ahead of backward

    def _prefetch(self, group: Group) -> None:
        with self._lock:
            self._bury()
            self._want(group)
            self._pump()

    def _reach(self, group: Group) -> tuple[Group, ...]:
        """Backward asks for something of this group. Returns the groups to fetch for, if it is a new one."""
        if any(ref() is group for ref in self._at_work):
            return ()
        self._at_work.append(weakref.ref(group))
        while len(self._at_work) > _GROUPS_AT_WORK:
            self._leave(self._at_work.popleft()())
        candidates = [ref() for ref in (*self._at_work, group._previous) if ref is not None]
        needed = tuple(each for each in candidates if each is not None)
        for each in needed:
            self._claim(each)
        # In flight since the last group was reached: a whole region's backward has been queued meanwhile.
        while self._flights and self._flights[0].number <= self._flight_at_last_reach:
            self._land(self._flights.popleft())
        self._flight_at_last_reach = self._flight_number
        self._wanted.clear()
        self._make_room(needed)
        return needed

    def _claim(self, group: Group) -> None:
        """Memory that is about to go, but will be asked for soon, stays."""
        for stored in group._live():
            if stored.in_flight and stored.is_original and not stored.is_written:
                stored.used = True

    def _leave(self, group: Group | None) -> None:
        """Backward is past this group. If it lives on (retain_graph), its device memory goes nevertheless."""
        for stored in () if group is None else group._live():
            if stored.used and stored.extent is not None and not stored.in_flight:
                self._retire(stored)

    def _make_room(self, needed: tuple[Group, ...]) -> None:
        """Copies that were fetched ahead for other groups and never asked for give way."""
        soon = {stored for group in needed for stored in group._live()}
        missing = sum(stored.nbytes for stored in soon if stored.device is None)
        room = self._limit - min(missing, self._limit)
        for stored in [stored for stored in self._inbound if stored not in soon]:
            if self._inbound_bytes <= room:
                break
            self._retire(stored)

    def _want(self, group: Group) -> None:
        self._wanted.extend(stored for stored in reversed(group._live()) if stored.device is None)

    def _pump(self) -> None:
        """Start wanted copies, as long as there is room for what nobody has asked for yet."""
        while self._wanted:
            stored = self._wanted[0]
            if stored.dead or stored.device is not None or stored.torn or stored.nbytes > self._limit:
                self._wanted.popleft()  # nothing to fetch, or too large to hold ahead: `get` fetches it
                continue
            if self._inbound_bytes + stored.nbytes > self._limit:
                return
            self._wanted.popleft()
            try:
                self._fetch(stored, stored.stream)
            except (OffloadError, torch.OutOfMemoryError):
                self._wanted.clear()  # nobody has asked yet: `get` will try again, and speak
                return
            self._inbound[stored] = None
            self._inbound_bytes += stored.nbytes
            self._peak_inbound_bytes = max(self._peak_inbound_bytes, self._inbound_bytes)

    # -- the end of tickets

    def _note_death(self, stored: Stored) -> None:
        self._dead.append(stored)
        # No later call may come, or not soon; and what was reused has its memory until its copy has landed.
        if (self._closed or stored.reused) and self._lock.acquire(blocking=False):
            try:
                self._bury()
            finally:
                self._lock.release()

    def _bury(self) -> None:
        """Take back what dead tickets held."""
        while self._dead:  # other threads may add to it, only the holder of the lock takes from it
            self._bury_one(self._dead.popleft())

    def _bury_one(self, stored: Stored) -> None:
        if stored.in_flight and stored.reused:  # its memory goes with its last reader, not later
            flight = next(flight for flight in self._flights if flight.stored is stored)
            self._flights.remove(flight)
            self._land(flight)
        self._retire(stored)
        if stored.extent is not None:
            assert stored.pool is not None
            if self._closed:
                self._link.synchronize()  # its slab may go back to the system
            # The next copy into these bytes comes after the last one out of them.
            stored.pool.give(stored.extent, stored.fetched)
            stored.extent = None


def _link_of(device: torch.device) -> Link:
    if device.type == "cuda":
        return CudaLink(device)
    if device.type == "cpu":
        return SimulatedLink(remember=0)
    raise InputError(f"offload from {device} is not supported; use a CUDA device, or the CPU (simulated)")


def _on_device(tensor: Tensor, stream: Stream) -> Stored:
    storage = tensor.untyped_storage()
    data = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    return Stored(
        witness=tensor.detach(),
        version=tensor._version,
        stream=stream,
        nbytes=storage.nbytes(),
        device=DeviceCopy(data, stream),
    )


def _written(stored: Stored) -> OffloadError:
    return OffloadError(
        f"a saved tensor of {format_bytes(stored.nbytes)} was modified in place after the forward pass, "
        "while only the device had it; clone it before writing to it, or exclude the region"
    )


def _give_all_back(link: Link, pools: tuple[Slabs, ...]) -> None:
    """When the engine is gone, or the process ends: nobody is there to be told of a fault of the device."""
    if any(pool.slabs for pool in pools):
        with suppress(RuntimeError):
            link.synchronize()
    for pool in pools:
        with suppress(RuntimeError):
            pool.abandon()
