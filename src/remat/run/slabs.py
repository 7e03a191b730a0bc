"""Host memory for offload: a few large slabs, kept across steps, cut into extents first-fit.

Pinning memory costs milliseconds, so a slab is pinned once and reused by every step; a training step asks
for the same sizes in the same order each time and gives them back in reverse, which first-fit with coalescing
serves without loss. Where the memory comes from (pinned RAM, a file) is the caller's choice.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from torch import Tensor

from remat.errors import HostMemoryError
from remat.run.link import Mark
from remat.units import format_bytes

__all__ = ["SLAB_BYTES", "Extent", "Slabs", "aligned"]

SLAB_BYTES = 64 * 2**20
_ALIGNMENT = 512  # what copy engines like; extents stay a multiple of it apart
_PIECES = 4096  # that a slab remembers: every step asks for the same


@dataclass(frozen=True, eq=False)
class Extent:
    """A piece of a slab. `read_until`: the last copy that reads it for those who had it before."""

    slab: Slab
    offset: int
    nbytes: int
    read_until: Mark | None

    @property
    def memory(self) -> Tensor:
        return self.slab.piece(self.offset, self.nbytes)


@dataclass(frozen=True)
class Gap:
    """Free bytes of a slab."""

    offset: int
    nbytes: int
    read_until: Mark | None

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(eq=False)
class Slab:
    """One piece of memory; its gaps are sorted by offset and never touch."""

    memory: Tensor
    gaps: list[Gap] = field(init=False)
    pieces: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gaps = [Gap(0, self.memory.nbytes, None)]

    @property
    def is_empty(self) -> bool:
        return len(self.gaps) == 1 and self.gaps[0].nbytes == self.memory.nbytes

    def piece(self, offset: int, nbytes: int) -> Tensor:
        """Made once: that takes the host as long as an operation on the device."""
        found = self.pieces.get((offset, nbytes))
        if found is None:
            if len(self.pieces) >= _PIECES:
                self.pieces.clear()
            found = self.pieces[offset, nbytes] = self.memory[offset : offset + nbytes]
        return found

    def take(self, nbytes: int) -> Extent | None:
        size = aligned(nbytes)
        for place, gap in enumerate(self.gaps):
            if gap.nbytes < size:
                continue
            rest = Gap(gap.offset + size, gap.nbytes - size, gap.read_until)
            self.gaps[place : place + 1] = [rest] if rest.nbytes else []
            return Extent(self, gap.offset, nbytes, gap.read_until)
        return None

    def give(self, extent: Extent, read_until: Mark | None) -> None:
        new = Gap(extent.offset, aligned(extent.nbytes), _later(extent.read_until, read_until))
        place = bisect_left(self.gaps, new.offset, key=lambda gap: gap.offset)
        first = last = place
        if place > 0 and self.gaps[place - 1].end == new.offset:
            first -= 1
        if place < len(self.gaps) and self.gaps[place].offset == new.end:
            last += 1
        for gap in self.gaps[first:last]:
            offset = min(gap.offset, new.offset)
            new = Gap(offset, gap.nbytes + new.nbytes, _later(gap.read_until, new.read_until))
        self.gaps[first:last] = [new]


@dataclass
class Slabs:
    """All slabs of one kind, at most `limit_bytes` together.

    `used_bytes` counts what was asked for; `total_bytes` what was taken from the system.
    """

    allocate: Callable[[int], Tensor]
    release: Callable[[Tensor], None]
    limit_bytes: int
    slab_bytes: int = SLAB_BYTES
    what: str = "pinned host memory"
    total_bytes: int = 0
    used_bytes: int = 0
    peak_used_bytes: int = 0
    closed: bool = False
    slabs: list[Slab] = field(default_factory=list)

    def reserve(self, nbytes: int, *, exactly: bool = False) -> None:
        """Have at least this much, in one new slab if more is needed; HostMemoryError: it cannot be had."""
        missing = nbytes - self.total_bytes
        if missing <= 0:
            return
        if nbytes > self.limit_bytes:
            raise HostMemoryError(
                f"offload wants {format_bytes(nbytes)} of {self.what}, but the limit is "
                f"{format_bytes(self.limit_bytes)}; offload {format_bytes(nbytes - self.limit_bytes)} less, "
                "or raise the limit"
            )
        self._grow(missing, exactly=exactly)

    def make_room(self, sizes: Sequence[int]) -> None:
        """Have room for extents of these sizes, taken in this order while all others are free: slabs that
        came for other sizes may be cut so that they do not fit. HostMemoryError: it cannot be had."""
        free = [slab.memory.nbytes for slab in self.slabs]
        missing = 0
        for size in map(aligned, sizes):
            place = next((n for n, nbytes in enumerate(free) if nbytes >= size), None)
            if place is None:
                missing += size
            else:
                free[place] -= size
        if missing:
            self.reserve(self.total_bytes + missing, exactly=True)

    def take(self, nbytes: int) -> Extent | None:
        """Memory for `nbytes`; None when the limit or the system says no."""
        extent = self._fit(nbytes)
        if extent is None and not self.closed and aligned(nbytes) <= self.limit_bytes - self.total_bytes:
            with suppress(HostMemoryError):
                self._grow(nbytes)
                extent = self._fit(nbytes)
        if extent is not None:
            self.used_bytes += nbytes
            self.peak_used_bytes = max(self.peak_used_bytes, self.used_bytes)
        return extent

    def give(self, extent: Extent, read_until: Mark | None) -> None:
        extent.slab.give(extent, read_until)
        self.used_bytes -= extent.nbytes
        if self.closed:
            self._release_empty()

    def close(self) -> None:
        """Nothing more is given out. Empty slabs go now, the others when their last extent comes back."""
        self.closed = True
        self._release_empty()

    def abandon(self) -> None:
        """The end: every slab goes, whatever is in it."""
        self.closed = True
        while self.slabs:
            self._release(self.slabs[-1])

    def _fit(self, nbytes: int) -> Extent | None:
        if self.closed:
            return None
        return next((extent for slab in self.slabs if (extent := slab.take(nbytes)) is not None), None)

    def _grow(self, nbytes: int, *, exactly: bool = False) -> None:
        step = _ALIGNMENT if exactly else self.slab_bytes
        wanted = -(-aligned(nbytes) // step) * step
        size = min(wanted, self.limit_bytes - self.total_bytes)  # the last slab may be a smaller one
        try:
            memory = self.allocate(size)
        except (RuntimeError, MemoryError, OSError) as error:
            raise HostMemoryError(
                f"{format_bytes(size)} more of {self.what} were refused ({error}); "
                f"{format_bytes(self.total_bytes)} are held already; offload less, or free some"
            ) from error
        self.slabs.append(Slab(memory))
        self.total_bytes += size

    def _release_empty(self) -> None:
        for slab in [slab for slab in self.slabs if slab.is_empty]:
            self._release(slab)

    def _release(self, slab: Slab) -> None:
        self.slabs.remove(slab)
        self.total_bytes -= slab.memory.nbytes
        self.release(slab.memory)


def aligned(nbytes: int) -> int:
    """What an extent of so many bytes takes."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _later(one: Mark | None, other: Mark | None) -> Mark | None:
    if one is None or other is None:
        return one or other
    return one if one.number >= other.number else other
