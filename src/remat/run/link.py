"""The link: what copies bytes between a device and the host, and what orders those copies.

The engine in `offload` decides what moves and when; a link carries it out. Two directions, each in order by
itself, each beside the compute streams. A copy is known by its mark: streams wait for marks, the host never
does (but for `synchronize`, which is for the end).

Memory is ordered by streams, not by reference counts: a freed block may be handed out again at once on the
stream that it was allocated on, while a copy still reads or writes it. So whoever lets a device tensor go
that a copy touches must first make that stream wait for the copy's mark. `offload` keeps this rule;
`record_stream` would too, but gives memory back only when the host happens to see an event passed.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from remat.records import LinkRates
from remat.run.hostmem import anonymous_memory

__all__ = [
    "CudaLink",
    "Direction",
    "FreeLink",
    "Link",
    "LinkRates",
    "Mark",
    "Outbound",
    "Stream",
    "calibrate",
]

Stream: TypeAlias = Hashable  # torch.cuda.Stream, or the name of a simulated one

_MIB = 2**20
_TIMES = 3  # that a link is measured; the best counts


class Direction(Enum):
    OUT = "device to host"
    BACK = "host to device"


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """One copy, as others wait for it. A later number of the same direction implies every earlier one."""

    number: int
    direction: Direction
    event: Any


class Outbound(NamedTuple):
    """Device bytes that go to the host. `after`: the last copy that read the target's memory."""

    source: Tensor
    target: Tensor
    after: Mark | None


class Link(ABC):
    """Copies between one device and the host. Calls come one at a time: the engine holds its lock."""

    device: torch.device

    @abstractmethod
    def current(self) -> Stream:
        """The stream on which the calling thread computes now."""

    @abstractmethod
    def pin(self, nbytes: int) -> Tensor:
        """Host memory that copies reach beside compute, as bytes. RuntimeError, MemoryError: refused."""

    @abstractmethod
    def unpin(self, memory: Tensor) -> None:
        """Give memory of `pin` back to the system. No copy may be under way in it."""

    @abstractmethod
    def send(self, copies: Sequence[Outbound]) -> list[Mark | None]:
        """Start to copy device bytes to the host: after all that the current stream has been given so far.
        All together, for that the host orders streams once. None: this one could not be started."""

    @abstractmethod
    def fetch(self, source: Tensor, stream: Stream, after: Mark) -> tuple[Tensor, Mark]:
        """Start to copy host bytes to fresh device memory that belongs to `stream`: after all that the stream
        has been given so far, and after `after`, the copy that brought the bytes to the host."""

    @abstractmethod
    def wait(self, stream: Stream, mark: Mark) -> None:
        """What `stream` is given from now on runs after this copy. The host does not wait."""

    @abstractmethod
    def synchronize(self) -> None:
        """The host waits until every copy is done."""

    def let_go(self, source: Tensor) -> None:  # noqa: B027 - only a simulation does something here
        """The engine gives up a device tensor that was sent; a simulation may spoil it."""

    @abstractmethod
    def seconds(self, directions: tuple[Direction, ...], buffers: Mapping[Direction, tuple[Tensor, Tensor]],
                repeats: int) -> dict[Direction, float]:  # fmt: skip
        """How long `repeats` copies of (device, host) buffers take, all directions started together."""

    def calibrate(self, nbytes: int = 64 * _MIB, repeats: int = 4) -> LinkRates:
        """Measure the link in well under a second, the best of a few times: what others do on the machine
        only slows it down. Waits for the device: not for the middle of a step."""
        pinned: list[Tensor] = []
        try:
            buffers = {}
            for direction in Direction:
                pinned.append(self.pin(nbytes))
                buffers[direction] = (torch.zeros(nbytes, dtype=torch.uint8, device=self.device), pinned[-1])
            alone = {d: self._least_seconds((d,), buffers, repeats)[d] for d in Direction}
            both = self._least_seconds(tuple(Direction), buffers, repeats)
        finally:
            self.synchronize()
            for memory in pinned:
                self.unpin(memory)
        moved = nbytes * repeats
        return LinkRates(
            d2h_bytes_per_second=moved / alone[Direction.OUT],
            h2d_bytes_per_second=moved / alone[Direction.BACK],
            d2h_both_bytes_per_second=moved / both[Direction.OUT],
            h2d_both_bytes_per_second=moved / both[Direction.BACK],
        )

    def _least_seconds(
        self, directions: tuple[Direction, ...], buffers: dict[Direction, tuple[Tensor, Tensor]], repeats: int
    ) -> dict[Direction, float]:
        times = [self.seconds(directions, buffers, repeats) for _ in range(_TIMES)]
        return {direction: min(found[direction] for found in times) for direction in directions}


def calibrate(link: Link | torch.device | str) -> LinkRates:
    """The rates of a link, or of the one that a CUDA device has."""
    return (link if isinstance(link, Link) else CudaLink(torch.device(link))).calibrate()


class CudaLink(Link):
    """One copy stream per direction; host memory registered with the driver."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._out = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._back = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._number = 0
        self._told: dict[tuple[Stream, Direction], int] = {}  # the last mark that a stream waits for

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def pin(self, nbytes: int) -> Tensor:
        """Memory of our own that is registered, not torch's pinned memory: that is rounded up to a power of
        two, and stays with the process after it has been freed."""
        memory = anonymous_memory(nbytes)
        with torch.cuda.device(self.device):
            result = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), nbytes, 0)  # type: ignore[no-untyped-call]
        try:
            torch.cuda.check_error(result)
        except RuntimeError:
            self._forget_error()
            raise
        return memory

    def unpin(self, memory: Tensor) -> None:
        with torch.cuda.device(self.device):
            result = torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
        torch.cuda.check_error(result)

    def _forget_error(self) -> None:
        """The driver reports a refusal once more to the next kernel that asks; let that be one of ours."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self.device)

    def send(self, copies: Sequence[Outbound]) -> list[Mark | None]:
        stream = self.current()
        self._out.wait_stream(stream)
        marks: list[Mark | None] = []
        with torch.cuda.stream(self._out):
            for source, target, after in copies:
                try:
                    if after is not None and not self._comes_after(stream, after):
                        self._out.wait_event(after.event)
                    target.copy_(source, non_blocking=True)
                    marks.append(self._mark(Direction.OUT))
                except RuntimeError:
                    marks.append(None)
        return marks

    def _comes_after(self, stream: Stream, mark: Mark) -> bool:
        """Whether what the stream was given so far waits for this copy: then so does whoever waits for it."""
        return self._told.get((stream, mark.direction), 0) >= mark.number

    def fetch(self, source: Tensor, stream: Stream, after: Mark) -> tuple[Tensor, Mark]:
        assert isinstance(stream, torch.cuda.Stream)
        with nullcontext() if stream == self.current() else torch.cuda.stream(stream):
            target = torch.empty(source.shape, dtype=torch.uint8, device=self.device)
        self._back.wait_stream(stream)  # work of that stream may still use the block that was handed out
        if not self._comes_after(stream, after):
            self._back.wait_event(after.event)
        with torch.cuda.stream(self._back):
            target.copy_(source, non_blocking=True)
        return target, self._mark(Direction.BACK)

    def wait(self, stream: Stream, mark: Mark) -> None:
        assert isinstance(stream, torch.cuda.Stream)
        if not self._comes_after(stream, mark):
            stream.wait_event(mark.event)
            self._told[stream, mark.direction] = mark.number

    def synchronize(self) -> None:
        """By asking, since torch's sync debug mode, which is about the user's step, would raise here."""
        while not (self._out.query() and self._back.query()):
            time.sleep(1e-4)

    def _mark(self, direction: Direction) -> Mark:
        self._number += 1
        stream = self._out if direction is Direction.OUT else self._back
        return Mark(self._number, direction, stream.record_event())

    def seconds(self, directions: tuple[Direction, ...], buffers: Mapping[Direction, tuple[Tensor, Tensor]],
                repeats: int) -> dict[Direction, float]:  # fmt: skip
        streams = {Direction.OUT: self._out, Direction.BACK: self._back}

        def copy(direction: Direction) -> None:
            device, host = buffers[direction]
            target, source = (host, device) if direction is Direction.OUT else (device, host)
            with torch.cuda.stream(streams[direction]):
                target.copy_(source, non_blocking=True)

        for direction in directions:  # the first copy of a buffer is slower
            streams[direction].wait_stream(self.current())
            copy(direction)
        torch.cuda.synchronize(self.device)
        begin = {d: streams[d].record_event(_timer()) for d in directions}
        for _ in range(repeats):
            for direction in directions:
                copy(direction)
        end = {d: streams[d].record_event(_timer()) for d in directions}
        torch.cuda.synchronize(self.device)
        return {d: begin[d].elapsed_time(end[d]) / 1e3 for d in directions}


def _timer() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class FreeLink(Link):
    """A link that takes no time, to time all the rest: what is sent stays on the device and is handed back.

    Values are right, memory is not.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = CudaLink(device).device if device.type == "cuda" else device
        self._sent: dict[int, Tensor] = {}  # by the address on the host
        self._number = 0

    def current(self) -> Stream:
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else "default"

    def pin(self, nbytes: int) -> Tensor:
        return anonymous_memory(nbytes)

    def unpin(self, memory: Tensor) -> None:
        self._sent.clear()

    def send(self, copies: Sequence[Outbound]) -> list[Mark | None]:
        self._sent.update((target.data_ptr(), source) for source, target, _ in copies)
        return [self._mark(Direction.OUT) for _ in copies]

    def fetch(self, source: Tensor, stream: Stream, after: Mark) -> tuple[Tensor, Mark]:
        return self._sent[source.data_ptr()], self._mark(Direction.BACK)

    def _mark(self, direction: Direction) -> Mark:
        self._number += 1
        return Mark(self._number, direction, None)

    def wait(self, stream: Stream, mark: Mark) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def seconds(self, directions: tuple[Direction, ...], buffers: Mapping[Direction, tuple[Tensor, Tensor]],
                repeats: int) -> dict[Direction, float]:  # fmt: skip
        return dict.fromkeys(directions, 1e-12)
