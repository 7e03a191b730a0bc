"""A few elements of each tensor that a region drops, taken before it is dropped and again when it is rebuilt.

Two ways to take them. `torch.take` runs everywhere, one operation per tensor. Where Triton is, one kernel
takes those of up to eight tensors at a time, and compares them (run.gather): where the host sets the pace,
the spot check costs what the host does for it. There tensors are small, and those of a region wait for each
other in backward, to be looked at together.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch

from remat._torch_private import current_device_index, current_stream_handle, empty_on_current
from remat.run.fused import can_fuse
from remat.run.gather import AT_ONCE, SAMPLES, WIDEST, WORDS, Flag, Kernels, compiled

__all__ = ["PHASES", "Layout", "Probes", "Samples", "probes"]

_LOG = logging.getLogger(__name__)

PHASES = 16  # sets of samples, taken in turn
_WAITING_BYTES = 2**24  # of rebuilt tensors of a region that wait for each other, to be looked at together


@dataclass(frozen=True)
class Layout:
    """How a dropped tensor lies in memory; what is rebuilt lies the same way."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def numel(self) -> int:
        return math.prod(self.shape)

    def offset(self, index: int) -> int:
        """In elements, of the one with this number in order of the shape."""
        offset = 0
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            index, rest = divmod(index, size)
            offset += rest * step
        return offset


class Samples(Protocol):
    """Those of one forward: what was expected is there, what is found comes in backward."""

    @property
    def device(self) -> torch.device | None:
        """Where kernels compare, and raise the flag whose address they are given (0: none). None: nobody
        compares but who reads."""
        ...

    def see(self, place: int, tensor: torch.Tensor, flag_at: int) -> bool:
        """Whether samples were taken now: small tensors may wait for each other."""
        ...

    def is_complete(self) -> bool: ...
    def places(self) -> list[int]:
        """Those that were seen."""
        ...

    def pair(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Expected and found, as numbers."""
        ...

    def stacked(self) -> torch.Tensor | None:
        """What was expected and what was found in one tensor, its first dimension 2; None: not to be had."""
        ...

    def pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Expected and found of all that were seen."""
        ...

    def compare(self, expected: torch.Tensor, found: torch.Tensor, flag_at: int) -> bool:
        """Have the flag go up if these numbers differ. False: nobody compares them but who reads."""
        ...

    def forget(self) -> None:
        """What was found."""
        ...


class Probes(Protocol):
    """Where to look. `places` are those of the dropped tensors that are looked at."""

    @property
    def places(self) -> tuple[int, ...]: ...
    def expect(self, tensors: Sequence[torch.Tensor], phase: int) -> Samples:
        """Tensors in the layouts that were given, on any device."""
        ...


def probes(layouts: Mapping[int, Layout], device: torch.device) -> Probes:
    """Samples spread evenly over tensors that lie so; each phase moves them."""
    plain = all(
        layout.dtype.itemsize <= WIDEST and not layout.dtype.is_complex for layout in layouts.values()
    )
    if layouts and plain and can_fuse(device) and _kernels(device) is not None:
        return _Gathered(layouts, device)
    return _Taken({place: _rows(layout.numel()) for place, layout in layouts.items()}, device)


def _rows(count: int) -> list[list[int]]:
    """The numbers of the elements to look at, by phase."""
    samples, spacing = min(SAMPLES, count), max(count // SAMPLES, 1)
    return [[i * spacing + phase * spacing // PHASES for i in range(samples)] for phase in range(PHASES)]


# ---------------------------------------------------------------------------------------------- torch.take


class _Indices:
    """Which elements, by phase: the same for all tensors with as many, in all recipes."""

    def __init__(self, rows: list[list[int]], device: torch.device) -> None:
        self.by_phase = tuple(torch.tensor(rows, dtype=torch.int64, device=device).unbind())


_in_use: weakref.WeakValueDictionary[Any, _Indices] = weakref.WeakValueDictionary()


def _indices(rows: list[list[int]], device: torch.device) -> _Indices:
    key = (device, *map(tuple, rows))
    found = _in_use.get(key)
    return _in_use.setdefault(key, _Indices(rows, device)) if found is None else found


class _Taken:
    def __init__(self, rows: Mapping[int, list[list[int]]], device: torch.device) -> None:
        self.places = tuple(rows)
        self._indices = {place: _indices(of_place, device) for place, of_place in rows.items()}

    def expect(self, tensors: Sequence[torch.Tensor], phase: int) -> _TakenSamples:
        indices = {place: found.by_phase[phase % PHASES] for place, found in self._indices.items()}
        return _TakenSamples(indices, {place: _take(tensors[place], indices[place]) for place in self.places})


def _take(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Also of a tensor that the host has, in a region on an accelerator (an index made without device=), and
    of dtypes that only few operations know."""
    if tensor.element_size() == 1 and tensor.is_floating_point():
        tensor = tensor.view(torch.uint8)
    return tensor.take(index if index.device == tensor.device else index.to(tensor.device))


class _TakenSamples:
    __slots__ = ("_expected", "_found", "_indices")
    device = None

    def __init__(self, indices: dict[int, torch.Tensor], expected: dict[int, torch.Tensor]) -> None:
        self._indices, self._expected = indices, expected
        self._found: dict[int, torch.Tensor] = {}

    def see(self, place: int, tensor: torch.Tensor, flag_at: int) -> bool:
        self._found[place] = _take(tensor, self._indices[place])
        return True

    def is_complete(self) -> bool:
        return len(self._found) == len(self._expected)

    def places(self) -> list[int]:
        return list(self._found)

    def pair(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._expected[place], self._found[place]

    def stacked(self) -> None:
        return None

    def compare(self, expected: torch.Tensor, found: torch.Tensor, flag_at: int) -> bool:
        return False

    def pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return map(self.pair, self._found)

    def forget(self) -> None:
        self._found.clear()


# -------------------------------------------------------------------------------------------- one kernel


@cache
def _kernels(device: torch.device) -> Kernels | None:
    """None if they do not work here."""
    try:
        with torch.cuda.device(device):
            kernels = compiled(device)
            if kernels is not None and _gathers(kernels, device):
                return kernels
    except torch.OutOfMemoryError:  # not remembered: there may be room another time
        raise
    except Exception as error:  # what a compiler raises differs from version to version
        _LOG.info("samples are taken one by one: %s", error)
    return None


def _gathers(kernels: Kernels, device: torch.device) -> bool:
    """Tried once, against torch.take; and whether the flag goes up where it should, and nowhere else."""
    layouts = {
        2: Layout((3, 40), (40, 1), torch.bfloat16),
        5: Layout((40, 3), (1, 40), torch.float32),
        6: Layout((5,), (1,), torch.uint8),
    }
    tensors: dict[int, torch.Tensor] = {}
    for place, layout in layouts.items():
        memory = torch.arange(layout.numel(), device=device).to(layout.dtype)
        tensors[place] = memory.as_strided(layout.shape, layout.stride)
    every = [tensors.get(place, torch.empty(0, device=device)) for place in range(7)]
    ours = _Gathered(layouts, device, kernels).expect(every, 3)
    theirs = _Taken({place: _rows(layout.numel()) for place, layout in layouts.items()}, device).expect(
        every, 3
    )
    flag, numbers = Flag(), torch.arange(WORDS - 1, device=device)
    for place, tensor in tensors.items():
        ours.see(place, tensor, flag.address)
        theirs.see(place, tensor, flag.address)
    ours.compare(numbers, numbers.clone(), flag.address)
    same = all(
        torch.equal(found[: len(expected)], expected) and torch.equal(*ours.pair(place))
        for place in layouts
        for expected, found in [(theirs.pair(place)[0], ours.pair(place)[1])]
    )

    def raised() -> bool:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        up = flag.is_up()
        flag.lower()
        return up

    def wrong_sample() -> None:
        ours.forget()
        for place, tensor in tensors.items():
            ours.see(place, tensor + (place == 5), flag.address)

    if raised() or not same:
        return False
    wrong_sample()
    if not raised():
        return False
    ours.compare(numbers, numbers + (numbers == WORDS - 2), flag.address)
    return raised()


class _Gathered:
    def __init__(
        self, layouts: Mapping[int, Layout], device: torch.device, kernels: Kernels | None = None
    ) -> None:
        found = kernels or _kernels(device)
        assert found is not None
        self.kernels = found
        self.places, self.layouts, self.device = tuple(layouts), dict(layouts), device
        self.about = {place: (row, layout.stride) for row, (place, layout) in enumerate(layouts.items())}
        self.number = -1 if device.index is None else device.index  # of the device, as tensors say it
        by_layout = [_byte_offsets(layout) for layout in layouts.values()]
        self.table = torch.tensor(by_layout, dtype=torch.int64).transpose(0, 1).contiguous().to(device)
        sizes = [layout.dtype.itemsize if layout.numel() else 0 for layout in layouts.values()]
        self.sizes = torch.tensor(sizes, dtype=torch.int32, device=device)
        bytes_per_phase = self.table.stride(0) * self.table.element_size()
        self._tables = [self.table.data_ptr() + phase * bytes_per_phase for phase in range(PHASES)]
        self._sizes_at = self.sizes.data_ptr()
        self.found_after = len(self.places) * SAMPLES * WIDEST  # bytes, of what was expected
        self._shape = (2, len(self.places), SAMPLES, WIDEST)
        self._strides = (self.found_after, SAMPLES * WIDEST, WIDEST, 1)
        self._empty = empty_on_current(device.type)

    def expect(self, tensors: Sequence[torch.Tensor], phase: int) -> _GatheredSamples:
        stack = self._stack()
        stream, out = current_stream_handle(self.device), stack.data_ptr()
        table = self._tables[phase % PHASES]
        looked_at = [tensors[place] for place in self.places]  # they lie as captured
        for row, tensor in enumerate(looked_at):
            if tensor.get_device() != self.number:
                looked_at[row] = self.copied(self.places[row], tensor)
        for first in range(0, len(looked_at), AT_ONCE):
            self._take(table, out, first, (0, 0), looked_at[first : first + AT_ONCE], stream)
        return _GatheredSamples(self, table, stack, out + self.found_after)

    def _stack(self) -> torch.Tensor:
        if self._empty is not None and current_device_index() == self.device.index:
            return self._empty(self._shape, self._strides, torch.uint8)
        return torch.empty(self._shape, dtype=torch.uint8, device=self.device)

    def find(
        self, table: int, out: int, first: int, tensors: list[torch.Tensor], stream: int, flag_at: int
    ) -> None:
        """The samples of rebuilt tensors, compared with what was expected if there is a flag."""
        compared = (-self.found_after, flag_at) if flag_at else (0, 0)
        self._take(table, out, first, compared, tensors, stream)

    def copied(self, place: int, tensor: torch.Tensor) -> torch.Tensor:
        """A copy where the kernel looks, of what lies elsewhere: on the device (an index that was made
        without device= is on the host), and in the layout that was captured."""
        layout = self.layouts[place]
        fresh = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=self.device)
        return fresh.copy_(tensor)

    def _take(
        self,
        table: int,
        out: int,
        first: int,
        compared: tuple[int, int],
        tensors: list[torch.Tensor],
        stream: int,
    ) -> None:
        """The samples of tensors that lie where it looks, for the rows from `first` on, into `out`; compared
        with what lies so far back, for a flag."""
        count = len(tensors)
        addresses = [tensor.data_ptr() for tensor in tensors] + _PADDING[count]
        place = (out, table, self._sizes_at, first, *compared)
        if current_device_index() == self.device.index:
            self.kernels.take(count, stream, *place, *addresses)
            return
        with torch.cuda.device(self.device):
            self.kernels.take(count, stream, *place, *addresses)

    def compare(self, expected: torch.Tensor, found: torch.Tensor, stream: int, flag_at: int) -> None:
        arguments = (expected.data_ptr(), found.data_ptr(), found.numel(), flag_at)
        if current_device_index() == self.device.index:
            self.kernels.unlike(1, stream, *arguments)
            return
        with torch.cuda.device(self.device):
            self.kernels.unlike(1, stream, *arguments)


_PADDING = [[0] * (AT_ONCE - count) for count in range(AT_ONCE + 1)]


def _byte_offsets(layout: Layout) -> list[list[int]]:
    """By phase; short rows repeat their first element, an empty tensor is not read at all."""
    size = layout.dtype.itemsize
    rows = _rows(layout.numel()) if layout.numel() else [[0]] * PHASES
    filled = [[*row, *row[:1] * (SAMPLES - len(row))] for row in rows]
    return [[layout.offset(index) * size if layout.numel() else 0 for index in row] for row in filled]


class _GatheredSamples:
    __slots__ = (
        "_bytes", "_flag_at", "_found", "_probes", "_seen", "_stack", "_stream", "_table", "_waiting",
    )  # fmt: skip

    def __init__(self, probes: _Gathered, table: int, stack: torch.Tensor, found: int) -> None:
        self._probes, self._table = probes, table
        self._stack, self._found = stack, found  # both; where in it what is found begins
        self._seen: set[int] = set()  # rows
        self._waiting: dict[int, torch.Tensor] = {}  # by row: seen, but not looked at yet
        self._bytes = 0  # that those hold
        self._stream = 0  # on which they were made
        self._flag_at = 0  # for them

    @property
    def device(self) -> torch.device:
        return self._probes.device

    def see(self, place: int, tensor: torch.Tensor, flag_at: int) -> bool:
        probes = self._probes
        stream = current_stream_handle(probes.device)
        row, stride = probes.about[place]
        nbytes = tensor.untyped_storage().nbytes()
        looked = False
        if self._waiting and (stream != self._stream or self._bytes + nbytes > _WAITING_BYTES):
            self._look()
            looked = True
        self._stream, self._flag_at = stream, flag_at
        if tensor.get_device() != probes.number or tensor.stride() != stride:
            tensor = probes.copied(place, tensor)
        self._waiting[row] = tensor
        self._bytes += nbytes
        self._seen.add(row)
        if self._bytes < _WAITING_BYTES and len(self._seen) < len(probes.places):
            return looked
        self._look()
        return True

    def _look(self) -> None:
        """Take the samples of those that wait, rows in a row at a time."""
        waiting = self._waiting
        rows = sorted(waiting)
        while rows:
            first = rows[0]
            together = [row for number, row in enumerate(rows[:AT_ONCE]) if row == first + number]
            tensors = [waiting[row] for row in together]
            self._probes.find(self._table, self._found, first, tensors, self._stream, self._flag_at)
            del rows[: len(together)]
        waiting.clear()
        self._bytes = 0

    def _look_late(self) -> None:
        """Some were not rebuilt: only a part of the graph ran. Who compares may be on another stream."""
        if self._waiting:
            self._look()
            if self._stream != current_stream_handle(self._probes.device):
                torch.cuda.synchronize(self._probes.device)

    def compare(self, expected: torch.Tensor, found: torch.Tensor, flag_at: int) -> bool:
        probes = self._probes
        if not flag_at or found.get_device() != probes.number or found.numel() > WORDS:
            return False
        probes.compare(expected, found, current_stream_handle(probes.device), flag_at)
        return True

    def is_complete(self) -> bool:
        return len(self._seen) == len(self._probes.places)

    def places(self) -> list[int]:
        return [place for place, (row, _) in self._probes.about.items() if row in self._seen]

    def pair(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._look_late()
        row, dtype = self._probes.about[place][0], self._probes.layouts[place].dtype
        taken = self._stack[:, row, :, : dtype.itemsize].contiguous()
        expected, found = taken.view(dtype).flatten(1).unbind()
        return expected, found

    def stacked(self) -> torch.Tensor | None:
        return self._stack if self.is_complete() else None

    def pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self._look_late()
        for row in self._seen:
            yield self._stack[0, row], self._stack[1, row]

    def forget(self) -> None:
        self._seen.clear()
        self._waiting.clear()
        self._bytes = 0
