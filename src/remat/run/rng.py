"""Random state of a region: torch's generators, of the CPU and of the devices that the region works on, and
those of Python and numpy."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

__all__ = ["RandomState", "SameChance", "restored"]


class RandomState:
    """The state of every generator involved, as it was when this was made."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self.devices = tuple(devices)
        self._cpu = torch.get_rng_state()
        self._states = tuple(torch.get_device_module(d).get_rng_state(d) for d in self.devices)

    def now(self) -> RandomState:
        """The present state of the same generators."""
        return RandomState(self.devices)

    def set(self) -> None:
        torch.set_rng_state(self._cpu)
        for device, state in zip(self.devices, self._states, strict=True):
            torch.get_device_module(device).set_rng_state(state, device)

    def __eq__(self, other: object) -> bool:
        # Compared as bytes, read without an operation: dispatch modes may be recording or faking the model.
        return isinstance(other, RandomState) and self._bytes() == other._bytes()

    __hash__ = None  # type: ignore[assignment]

    def _bytes(self) -> list[bytes]:
        return [ctypes.string_at(state.data_ptr(), state.nbytes) for state in (self._cpu, *self._states)]


@contextmanager
def restored(state: RandomState | None) -> Iterator[None]:
    """Run with the generators at `state`, and leave them as they were before. None: leave them alone."""
    if state is None:
        yield
        return
    before = state.now()
    state.set()
    try:
        yield
    finally:
        before.set()


class SameChance:
    """A forward that draws the same from Python's and numpy's generators when it runs again."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self._runs = 0
        self._entry: tuple[Any, Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._runs += 1
        if self._runs > 1 and self._entry is None:  # it did not draw
            return self._forward(*args, **kwargs)
        before = _generators()
        if self._entry is not None:
            _set_generators(self._entry)
        try:
            return self._forward(*args, **kwargs)
        finally:
            if self._entry is not None:
                _set_generators(before)
            elif not _same_generators(before, _generators()):
                self._entry = before


def _generators() -> tuple[Any, Any]:
    return random.getstate(), numpy.random.get_state()


def _set_generators(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    numpy.random.set_state(state[1])


def _same_generators(a: tuple[Any, Any], b: tuple[Any, Any]) -> bool:
    same = a[0] == b[0] and a[1][2:] == b[1][2:]
    return same and bool(numpy.array_equal(a[1][1], b[1][1]))
