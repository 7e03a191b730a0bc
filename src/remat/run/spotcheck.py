"""The spot check: did replay give back what was dropped?

A Python number that is baked into a recipe (a temperature, a drop-path rate) may change between steps
without any shape changing. So a few elements of dropped tensors are kept and compared with the replayed ones,
on the device: of as many tensors as it takes for every replayed operation to lie behind one of them. And one
region per step, in turn, compares a checksum over all bits of those tensors. The result is read once, when
backward ends: loss.backward() itself raises, before an optimizer can use the gradients.
"""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable, Sequence

import torch

from remat._torch_private import at_end_of_backward, current_backward
from remat.errors import RecomputeError
from remat.run.same import bits

__all__ = ["SAMPLES", "Grid", "SpotCheck", "sample_grid"]

SAMPLES = 16  # elements of each tensor
_BACKWARDS_REMEMBERED = 16  # backwards that raised never read their checks; only so many are held

# Number of samples, stride between them, how often it can be moved, by how much.
Grid = tuple[int, int, int, int]
Report = Callable[[int], str]  # told which slot differs; gives the sentence for the error


def sample_grid(shape: tuple[int, ...], stride: tuple[int, ...]) -> Grid:
    """Samples spread evenly over the memory of a dense tensor, or along the longest dimension of another."""
    count = 1
    for size in shape:
        count *= size
    if not count:
        return 0, 0, 1, 0
    if _is_dense(shape, stride):
        samples, spacing = min(SAMPLES, count), max(count // SAMPLES, 1)
        return samples, spacing, count - (samples - 1) * spacing, 1
    longest = max(range(len(shape)), key=lambda dim: shape[dim])
    samples, spacing = min(SAMPLES, shape[longest]), max(shape[longest] // SAMPLES, 1)
    return samples, spacing * stride[longest], shape[longest] - (samples - 1) * spacing, stride[longest]


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


class SpotCheck:
    """What one graph expects of the tensors that it dropped."""

    __slots__ = (
        "_backward", "_checksums", "_expected", "_found", "_grids", "_phase", "_places", "_report", "_wrong",
    )  # fmt: skip

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        grids: Sequence[Grid],
        places: Sequence[int],
        report: Report,
        *,
        phase: int,
        whole: bool,
    ) -> None:
        """Sample those of the dropped tensors that `places` names. `phase` moves the grid, `whole` takes
        checksums of them too."""
        self._grids, self._places, self._report, self._phase = grids, places, report, phase
        self._backward = -2  # the pass that is looked at: with retain_graph there may be several
        self._expected = torch.cat([self._sample(place, tensors[place]) for place in places])
        self._found: dict[int, torch.Tensor] = {}
        self._checksums = {place: _checksum(tensors[place]) for place in places} if whole else None
        self._wrong: list[tuple[int, torch.Tensor]] = []

    def _sample(self, place: int, tensor: torch.Tensor) -> torch.Tensor:
        count, spacing, places, shift = self._grids[place]
        sample = tensor.as_strided(
            (count,), (spacing,), tensor.storage_offset() + self._phase % places * shift
        )
        return (
            torch.view_as_real(sample.resolve_conj())[:, self._phase % 2] if sample.is_complex() else sample
        )

    def see(self, place: int, tensor: torch.Tensor) -> None:
        """Take the same samples of the replayed tensor (only for the places that were given)."""
        backward = current_backward()
        if backward != self._backward:
            self._backward = backward
            self._found.clear()
            self._wrong.clear()
            _expect(self, backward)
        self._found[place] = self._sample(place, tensor).clone()
        if self._checksums is not None:
            differs = _checksum(tensor) != self._checksums[place]
            if tensor.is_floating_point():
                differs &= ~_has_nan(tensor)  # whose bits are the device's own
            self._wrong.append((place, differs))

    def samples(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(what was expected, what was found in pieces), of the tensors that were replayed."""
        if len(self._found) == len(self._places):
            return self._expected, [self._found[place] for place in self._places]
        starts, start = {}, 0
        for place in self._places:
            starts[place] = start
            start += self._grids[place][0]
        seen = [place for place in self._places if place in self._found]
        parts = [self._expected.narrow(0, starts[place], self._grids[place][0]) for place in seen]
        return torch.cat(parts) if parts else self._expected[:0], [self._found[place] for place in seen]

    def flags(self) -> list[torch.Tensor]:
        """Results of the checksums, on the device."""
        return [flag for _, flag in self._wrong]

    def describe(self) -> str | None:
        """The sentence for the first tensor that differs, in the order of forward; None: none does."""
        expected, found = self.samples()
        wrong = [place for place, flag in self._wrong if bool(flag)]
        start = 0
        for place, piece in zip((p for p in self._places if p in self._found), found, strict=True):
            part = expected[start : start + piece.numel()]
            start += piece.numel()
            if bool(_unequal(part, piece.to(part.dtype)).any()):
                wrong.append(place)
        return self._report(max(wrong)) if wrong else None


def _unequal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Differ in any bit; all NaNs count as one."""
    differs = bits(a) != bits(b)
    return differs & ~(a.isnan() & b.isnan()) if a.is_floating_point() else differs


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A number that depends on every element, computed without memory of its own: the plan has none to spare.

    Dense memory is summed as 64-bit words, exactly; anything else as it is, in the same order each time.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if _is_dense(tuple(tensor.shape), tensor.stride()) and not tensor.is_neg():
        flat = tensor.as_strided((tensor.numel(),), (1,))
        size, offset = flat.element_size(), flat.storage_offset()
        words = flat.numel() * size % 8 == 0 and offset * size % 8 == 0
        if words and flat.numel():
            return (flat.view(torch.uint8) if flat.dtype is torch.bool else flat).view(torch.int64).sum()
    if tensor.is_floating_point():
        return tensor.sum(dtype=torch.float32 if tensor.element_size() < 4 else tensor.dtype)
    return tensor.count_nonzero()


def _has_nan(tensor: torch.Tensor) -> torch.Tensor:
    """Also true of an infinity of each sign; then the checksum says nothing, either."""
    return tensor.sum(dtype=torch.float32 if tensor.element_size() < 4 else tensor.dtype).isnan()


# Checks of the backward passes that are running, by the number of the pass: its worker threads share it.
_running: collections.OrderedDict[int, list[SpotCheck]] = collections.OrderedDict()
_lock = threading.Lock()


def _expect(check: SpotCheck, backward: int) -> None:
    """Have this check read when the running backward pass ends."""
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
    if not any(bool(flag) for flag in _differences(checks)):
        return
    sentences = [sentence for check in checks if (sentence := check.describe()) is not None]
    if not sentences:
        return
    more = f" {len(sentences) - 1} more regions differ too." if len(sentences) > 1 else ""
    raise RecomputeError(
        f"{sentences[-1]}{more} The gradients of this step are wrong and must not be used: call zero_grad() "
        "and run the step again; the region now recomputes as a whole."
    )


def _differences(checks: list[SpotCheck]) -> list[torch.Tensor]:
    """One flag per device and dtype: True if anything differs in any bit."""
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    flags: dict[torch.device, list[torch.Tensor]] = {}
    for check in checks:
        expected, found = check.samples()
        if found:
            ours, theirs = groups.setdefault((expected.device, expected.dtype), ([], []))
            ours.append(expected)
            theirs.append(torch.cat(found))
        for flag in check.flags():
            flags.setdefault(flag.device, []).append(flag)
    for ours, theirs in groups.values():
        flag = _unequal(torch.cat(ours), torch.cat(theirs)).any()
        flags.setdefault(flag.device, []).append(flag)
    return [torch.stack(found).any() for found in flags.values()]
