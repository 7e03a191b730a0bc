"""The spot check: did replay give back what was dropped?

A Python number that is baked into a recipe (a temperature, a drop-path rate) may change between steps
without any shape changing. So a few elements of every dropped tensor are kept and compared with the replayed
ones, on the device; and one region per step, in turn, compares a checksum over all bits. The result is read
once, when backward ends: loss.backward() itself raises, before an optimizer can use the gradients.
"""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from remat._torch_private import at_end_of_backward, current_backward
from remat.errors import RecomputeError
from remat.run.same import bits

__all__ = ["SAMPLES", "Sampled", "SpotCheck", "sample_grid"]

_GRID = 4  # 4 x 4 elements of each tensor
SAMPLES = _GRID * _GRID
_BACKWARDS_REMEMBERED = 16  # backwards that raised never read their checks; only so many are held


class Sampled(Protocol):
    """What the check needs to know of a dropped tensor."""

    @property
    def grid(self) -> Grid: ...


Grid = tuple[tuple[int, int], tuple[int, int], int, int]
Report = Callable[[int], str]  # told which slot differs; gives the sentence for the error


def sample_grid(shape: tuple[int, ...], stride: tuple[int, ...]) -> Grid:
    """Size and stride of a grid over the two longest dimensions; how often it can be moved, and by how much."""
    longest = sorted(range(len(shape)), key=lambda dim: shape[dim], reverse=True)[:2]
    size, step, places, shift = [1, 1], [0, 0], 1, 0
    for axis, dim in enumerate(longest):
        size[axis] = min(_GRID, shape[dim])
        spacing = shape[dim] // size[axis] if size[axis] else 0
        step[axis] = spacing * stride[dim]
        if axis == 0:
            places, shift = max(spacing, 1), stride[dim]
    return (size[0], size[1]), (step[0], step[1]), places, shift


class SpotCheck:
    """What one graph expects of the tensors that it dropped."""

    __slots__ = ("_checksums", "_expected", "_found", "_phase", "_report", "_seen", "_slots", "_starts", "_wrong")

    def __init__(
        self, tensors: Sequence[torch.Tensor], slots: Sequence[Sampled], report: Report, *, phase: int, whole: bool
    ) -> None:
        """Sample tensors that are about to be dropped. `phase` moves the grid, `whole` takes checksums too."""
        self._slots, self._report, self._phase = slots, report, phase
        self._starts: list[int] = []
        start = 0
        for slot in slots:
            self._starts.append(start)
            start += slot.grid[0][0] * slot.grid[0][1]
        self._expected = torch.cat([self._sample(place, tensor) for place, tensor in enumerate(tensors)])
        self._found = torch.empty_like(self._expected)
        self._seen: set[int] = set()
        self._checksums = [_checksum(tensor) for tensor in tensors] if whole else None
        self._wrong: list[tuple[int, torch.Tensor]] = []

    def _sample(self, place: int, tensor: torch.Tensor) -> torch.Tensor:
        size, step, places, shift = self._slots[place].grid
        offset = tensor.storage_offset() + self._phase % places * shift
        grid = tensor.as_strided(size, step, offset)
        if grid.is_complex():
            grid = torch.view_as_real(grid)[..., 0]
        return grid.reshape(-1)

    def see(self, place: int, tensor: torch.Tensor) -> None:
        """Take the same samples of the replayed tensor."""
        if not self._seen:
            _expect(self)
        self._seen.add(place)
        start = self._starts[place]
        sample = self._sample(place, tensor)
        self._found.narrow(0, start, sample.numel()).copy_(sample)
        if self._checksums is not None:
            self._wrong.append((place, _checksum(tensor) != self._checksums[place]))

    def differs(self) -> torch.Tensor:
        """One flag on the device: True if anything that was seen differs in any bit."""
        if len(self._seen) < len(self._starts):
            return torch.stack([flag for _, flag in self._flags()]).any()
        flag = (bits(self._expected) != bits(self._found)).any()
        for _, wrong in self._wrong:
            flag = flag | wrong
        return flag

    def _flags(self) -> list[tuple[int, torch.Tensor]]:
        unequal = bits(self._expected) != bits(self._found)
        sizes = [slot.grid[0][0] * slot.grid[0][1] for slot in self._slots]
        flags = [(p, unequal[self._starts[p] : self._starts[p] + sizes[p]].any()) for p in sorted(self._seen)]
        return flags + self._wrong

    def describe(self) -> str:
        """The sentence for the first slot that differs, in the order of the forward pass."""
        return self._report(max(place for place, flag in self._flags() if bool(flag)))


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    return bits(tensor).sum(dtype=torch.int64)


# Checks of the backward passes that are running, by the number of the pass: its worker threads share it.
_running: collections.OrderedDict[int, list[SpotCheck]] = collections.OrderedDict()
_lock = threading.Lock()


def _expect(check: SpotCheck) -> None:
    """Have this check read when the running backward pass ends."""
    backward = current_backward()
    with _lock:
        first = backward not in _running
        checks = _running.setdefault(backward, [])
        while len(_running) > _BACKWARDS_REMEMBERED:
            _running.popitem(last=False)
    checks.append(check)
    if first and not at_end_of_backward(functools.partial(_read, backward)):
        _running.pop(backward, None)  # unpacked by hand, outside of any backward: nobody will read it


def _read(backward: int) -> None:
    """Raise if any replay of this backward pass differed: one read from the device for all regions."""
    checks = _running.pop(backward, [])
    flags = [check.differs() for check in checks]
    devices = {flag.device for flag in flags}
    if not any(bool(torch.stack([f for f in flags if f.device == device]).any()) for device in devices):
        return
    sentences = [check.describe() for check, flag in zip(checks, flags, strict=True) if bool(flag)]
    raise RecomputeError(
        f"{sentences[-1]}"
        + (f" ({len(sentences) - 1} more regions differ too.)" if len(sentences) > 1 else "")
        + " The gradients of this step are wrong and must not be used: call zero_grad() and run the step again;"
        " the region now recomputes as a whole."
    )
