"""A link without an accelerator: device memory is CPU memory, and copies take virtual time.

A copy moves its bytes only when its time has come: when a stream waits for it, or when a stream has computed
past its end. Until then its target holds other bytes. So whatever the engine gets wrong shows as a wrong
value or as an entry in `violations`: memory read before it arrived, or let go while a copy still needed it.

Each stream has its own clock; each direction carries one copy at a time, in the order of asking.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from remat.run.hostmem import anonymous_memory
from remat.run.link import Direction, Link, Mark, Outbound, Stream
from remat.units import format_bytes

__all__ = ["POISON", "Copy", "SimulatedLink"]

POISON = 0xA5


@dataclass(frozen=True, eq=False)
class Copy:
    """One copy on the virtual time line. The device side is not held: that is the engine's duty."""

    number: int
    direction: Direction
    device: weakref.ref[Tensor]
    host: Tensor
    nbytes: int
    start: float
    end: float


class SimulatedLink(Link):
    """Copies in virtual time.

    `capacity_bytes`: pinned memory beyond this is refused. `fails(direction, number)`: whether the n-th copy
    asked for raises. `remember`: how many copies `history` holds. `spoil`: a tensor that the engine lets go
    is overwritten; only for tests in which nobody else uses it any more.
    """

    def __init__(
        self,
        *,
        d2h_bytes_per_second: float = 50e9,
        h2d_bytes_per_second: float = 50e9,
        latency_seconds: float = 10e-6,
        capacity_bytes: int | None = None,
        fails: Callable[[Direction, int], bool] = lambda direction, number: False,
        spoil: bool = False,
        remember: int = 1000,
    ) -> None:
        self.device = torch.device("cpu")
        self.capacity_bytes = capacity_bytes
        self.fails = fails
        self.spoil = spoil
        self.pinned_bytes = 0
        self.waits = 0  # how often a stream really stood still
        self.waited_seconds = 0.0
        self.violations: list[str] = []
        self.history: deque[Copy] = deque(maxlen=remember)
        self._rate = {Direction.OUT: d2h_bytes_per_second, Direction.BACK: h2d_bytes_per_second}
        self._latency = latency_seconds
        self._free_at = dict.fromkeys(Direction, 0.0)
        self._clock: dict[Stream, float] = {}
        self._stream: Stream = "default"
        self._asked = 0
        self._pending: list[Copy] = []

    # -- streams and time

    def current(self) -> Stream:
        return self._stream

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Compute on another stream."""
        before, self._stream = self._stream, stream
        try:
            yield
        finally:
            self._stream = before

    @property
    def now(self) -> float:
        """Seconds on the current stream's clock."""
        return self._clock.get(self._stream, 0.0)

    @property
    def pending(self) -> int:
        return len(self._pending)

    def compute(self, seconds: float) -> None:
        """The current stream is busy for this long."""
        self._advance(self._stream, self.now + seconds)

    def wait(self, stream: Stream, mark: Mark) -> None:
        copy: Copy = mark.event
        short = copy.end - self._clock.get(stream, 0.0)
        if short > 0:
            self.waits += 1
            self.waited_seconds += short
        self._advance(stream, max(copy.end, self._clock.get(stream, 0.0)))

    def synchronize(self) -> None:
        self._carry_out(float("inf"))

    def _advance(self, stream: Stream, time: float) -> None:
        self._clock[stream] = time
        self._carry_out(time)

    # -- memory

    def pin(self, nbytes: int) -> Tensor:
        if self.capacity_bytes is not None and self.pinned_bytes + nbytes > self.capacity_bytes:
            raise RuntimeError(f"simulated refusal: {format_bytes(self.capacity_bytes)} can be pinned")
        self.pinned_bytes += nbytes
        return anonymous_memory(nbytes)

    def unpin(self, memory: Tensor) -> None:
        if any(copy.host.untyped_storage().data_ptr() == memory.data_ptr() for copy in self._pending):
            self.violations.append("host memory was unpinned under a copy")
        self.pinned_bytes -= memory.nbytes

    def let_go(self, source: Tensor) -> None:
        if self.spoil:
            ctypes.memset(source.data_ptr(), POISON, source.nbytes)

    # -- copies

    def send(self, copies: Sequence[Outbound]) -> list[Mark | None]:
        return [self._send(*copy) for copy in copies]

    def _send(self, source: Tensor, target: Tensor, after: Mark | None) -> Mark | None:
        start = self.now if after is None else max(self.now, after.event.end)
        try:
            return self._ask(Direction.OUT, source, target, start)
        except RuntimeError:
            return None

    def fetch(self, source: Tensor, stream: Stream, after: Mark) -> tuple[Tensor, Mark]:
        target = torch.empty(source.shape, dtype=torch.uint8)
        ctypes.memset(target.data_ptr(), POISON, target.nbytes)
        start = max(self._clock.get(stream, 0.0), after.event.end)
        return target, self._ask(Direction.BACK, target, source, start)

    def _ask(self, direction: Direction, device: Tensor, host: Tensor, start: float) -> Mark:
        self._asked += 1
        if self.fails(direction, self._asked):
            raise RuntimeError(f"simulated failure of copy {self._asked}, {direction.value}")
        start = max(start, self._free_at[direction])
        end = start + self._latency + device.nbytes / self._rate[direction]
        copy = Copy(self._asked, direction, weakref.ref(device), host, device.nbytes, start, end)
        self._free_at[direction] = end
        self._pending.append(copy)
        self.history.append(copy)
        return Mark(copy.number, direction, copy)

    def _carry_out(self, until: float) -> None:
        """Move the bytes of every copy that has ended by then, in the order in which they ended."""
        due = sorted((c for c in self._pending if c.end <= until), key=lambda c: (c.end, c.number))
        self._pending = [copy for copy in self._pending if copy.end > until]
        for copy in due:
            device = copy.device()
            if device is None:
                self.violations.append(
                    f"copy {copy.number}, {copy.direction.value}: its device memory was let go"
                )
            # As a copy engine moves them: no operation, so nothing that counts operations or memory sees it.
            if copy.direction is Direction.BACK and device is not None:
                ctypes.memmove(device.data_ptr(), copy.host.data_ptr(), copy.nbytes)
            elif device is not None:
                ctypes.memmove(copy.host.data_ptr(), device.data_ptr(), copy.nbytes)
            elif copy.direction is Direction.OUT:
                ctypes.memset(copy.host.data_ptr(), POISON, copy.nbytes)

    # -- calibration

    def seconds(self, directions: tuple[Direction, ...], buffers: Mapping[Direction, tuple[Tensor, Tensor]],
                repeats: int) -> dict[Direction, float]:  # fmt: skip
        self.synchronize()
        begin = max([self.now, *self._free_at.values()])
        last = {}
        for _ in range(repeats):
            for direction in directions:
                device, host = buffers[direction]
                last[direction] = self._ask(direction, device, host, begin)
        for mark in last.values():
            self.wait(self._stream, mark)
        return {direction: mark.event.end - begin for direction, mark in last.items()}
