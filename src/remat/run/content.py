"""Did a region that ran again as a whole compute what its forward had computed?

torch compares shapes and dtypes. State that neither buffers nor torch's generators hold (a number in an
attribute, an adapter that was switched between two forwards, a generator of the model's own) changes values
and nothing else, and gradients with them. So a few elements of every tensor that autograd saves are noted in
the first run and compared in the second: of those that have a graph, for others (statistics, seeds, masks)
may have elements that no kernel writes. On the host at once; on an accelerator when backward ends, together
with the spot checks of recipes. Weights must be the same ones.

Kernels that add in any order give other bits each time, so what counts is a difference beyond rounding; a
region of which only the last bits differ is left alone after a few times, because looking closely costs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from remat._torch_private import current_backward
from remat.errors import RecomputeError
from remat.run.same import is_dense, nearly_same
from remat.run.samples import Layout
from remat.run.spotcheck import Pass, expect

__all__ = ["Content", "Noise"]

_SAMPLES = 8  # elements of each tensor
_WAITING_BYTES = 2**24  # of tensors that wait for each other, to be looked at together
_ENOUGH = 3  # times that only the last bits of a region differed


class Noise:
    """How often the bits of a region differed within rounding. One for all calls of a module."""

    def __init__(self) -> None:
        self.times = 0

    @property
    def is_usual(self) -> bool:
        return self.times >= _ENOUGH


class Content:
    """What one call saved: `note` in its first run, then `settle`; in each of the next ones `begin_again`,
    `compare`, in the same order, and `end_again`."""

    __slots__ = (
        "_backward", "_expected", "_found", "_kinds", "_noise", "_place", "_running", "_sampler", "_seen",
        "region",
    )  # fmt: skip

    def __init__(self, region: str, noise: Noise) -> None:
        self.region, self._noise = region, noise
        self._kinds: list[Any] = []  # by place; of a weight which one it is; None: not compared
        self._sampler = _Sampler()
        self._expected: list[_Sample] = []
        self._seen = self._place = 0  # tensors and samples of the recomputation that runs
        self._found: list[tuple[Tensor, Tensor]] = []  # on an accelerator: expected, found
        self._backward = -2
        self._running: Pass | None = None

    def note(self, tensor: Tensor) -> None:
        weight = _weight(tensor)
        if weight is not None:
            self._kinds.append(id(weight))
        elif _can_be_compared(tensor):
            self._kinds.append(_kind(tensor))
            self._expected += self._sampler.add(tensor)
        else:
            self._kinds.append(None)

    def settle(self) -> None:
        self._expected += self._sampler.end()

    def begin_again(self) -> None:
        self._sampler = _Sampler()
        self._seen = self._place = 0

    def compare(self, tensor: Tensor) -> None:
        """Raises at once where the tensor is the host's. Which ones are compared was decided in the first
        run: an input that comes back from the host has a graph no more."""
        expected = self._kinds[self._seen] if self._seen < len(self._kinds) else None
        self._seen += 1
        if expected is None:
            return
        weight = _weight(tensor)
        found = _kind(tensor) if weight is None else id(weight)
        if found == expected:
            if weight is None:
                self._look_at(self._sampler.add(tensor))
            return
        self._seen = len(self._kinds)  # of other shapes, dtypes and numbers torch tells
        if isinstance(expected, int) and weight is not None:
            raise self._error()

    def end_again(self) -> None:
        self._look_at(self._sampler.end())

    def _look_at(self, samples: list[_Sample]) -> None:
        for found in samples:
            expected = self._expected[self._place]
            self._place += 1
            if isinstance(found, Tensor) and isinstance(expected, Tensor):
                # torch stops early: the last one may be of fewer tensors.
                self._see(expected[: len(found)], found)
            elif found != expected:
                self._judge(_values(expected), _values(found))

    def _judge(self, expected: Tensor, found: Tensor) -> None:
        if not _alike(expected, found):
            raise self._error()
        self._noise.times += 1

    def _error(self) -> RecomputeError:
        text = f"{self._sentence()} The gradients of this step must not be used"
        return RecomputeError(text, region=self.region)

    def _sentence(self) -> str:
        return (
            f"{self.region}: run again in backward, it computed other values than in forward: something that "
            "it reads has changed in between, or changes with every call (an object in an attribute, a "
            "tensor with a graph that is carried from call to call, a generator of the model's own, a "
            "global, a context, rows that torch.empty made and nobody wrote). Keep such state in a buffer, "
            "run backward before it changes, fill such rows (torch.zeros), or leave the module out "
            "(exclude=... of remat.enable). Where the difference is known to do no harm: check=False of "
            "remat.checkpoint_fn and remat.apply."
        )

    # -- on an accelerator, as a check of the backward pass that runs (run.spotcheck)

    def _see(self, expected: Tensor, found: Tensor) -> None:
        backward = current_backward()
        if backward != self._backward:
            self.forget()
            self._backward = backward
            self._running = expect(self, backward)
        running = self._running
        if running is None:  # by hand, outside of any backward
            self._judge(expected, found)
            return
        self._found.append((expected, found))
        running.has_seen(self, found.device)

    def stacked(self) -> Tensor | None:
        return None

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self._found)

    def is_complete(self) -> bool:
        return True  # as far as backward came

    def is_flagged(self) -> bool:
        return False

    def describe(self) -> str | None:
        if all(_alike(expected, found) for expected, found in self._found):
            self._noise.times += any(not torch.equal(a, b) for a, b in self._found)
            return None
        return self._sentence()

    def forget(self) -> None:
        self._backward, self._running = -2, None
        self._found = []


_Sample = Tensor | tuple[bytes, torch.dtype]  # of several tensors on an accelerator; of one of the host


class _Sampler:
    """Takes elements of tensors as they come. Those of an accelerator wait for each other, as long as they
    are small: where the host sets the pace, what counts is the number of operations."""

    def __init__(self) -> None:
        self._waiting: list[Tensor] = []
        self._bytes = 0

    def add(self, tensor: Tensor) -> list[_Sample]:
        if tensor.device.type == "cpu":
            return [_read(tensor)]
        self._waiting.append(tensor.detach())
        self._bytes += tensor.nbytes
        return self.end() if self._bytes >= _WAITING_BYTES else []

    def end(self) -> list[_Sample]:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in self._waiting:
            by_dtype.setdefault(tensor.dtype, []).append(_elements(tensor))
        self._waiting, self._bytes = [], 0
        with torch.no_grad():
            return [torch.cat(parts) for parts in by_dtype.values()]


def _kind(tensor: Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _can_be_compared(tensor: Tensor) -> bool:
    return (
        tensor.grad_fn is not None
        and type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.is_floating_point()
        and tensor.numel() > 0
    )


def _weight(tensor: Tensor) -> nn.Parameter | None:
    """The parameter that this is, or is a view of, as products read it."""
    base = tensor if tensor._base is None else tensor._base
    return base if isinstance(base, nn.Parameter) else None


def _read(tensor: Tensor) -> tuple[bytes, torch.dtype]:
    """Elements spread over a tensor of the host, read where they lie: modes that look on (a meter, a
    recorder) shall not see an operation that is not the model's."""
    start, size = tensor.data_ptr(), tensor.element_size()
    offsets = _offsets(tuple(tensor.shape), tensor.stride())
    return b"".join(ctypes.string_at(start + at * size, size) for at in offsets), tensor.dtype


def _elements(tensor: Tensor) -> Tensor:
    """The same of an accelerator's: a view of its memory, if that has nothing else in it."""
    count = min(_SAMPLES, tensor.numel())
    if not is_dense(tensor):
        return tensor.take(torch.tensor(_numbers(tensor.numel()), device=tensor.device))
    step = tensor.numel() // count
    return tensor.as_strided((count,), (step,), int(tensor.storage_offset()) + step // 2)


@lru_cache(maxsize=4096)
def _offsets(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    layout = Layout(shape, stride, torch.uint8)
    return tuple(layout.offset(number) for number in _numbers(layout.numel()))


def _numbers(count: int) -> list[int]:
    """In the middle of as many stretches."""
    samples = min(_SAMPLES, count)
    return [(2 * number + 1) * count // (2 * samples) for number in range(samples)]


def _values(sample: Any) -> Tensor:
    content, dtype = sample
    return torch.frombuffer(bytearray(content), dtype=dtype)


def _alike(expected: Tensor, found: Tensor) -> bool:
    """Within rounding; what is not finite is so in both."""
    finite = expected.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return False
    zero = torch.zeros((), dtype=expected.dtype, device=expected.device)
    return nearly_same(expected.where(finite, zero), found.where(finite, zero))
