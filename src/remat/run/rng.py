"""Random state of a region: the generators of the CPU and of the devices that the region works on."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

__all__ = ["RandomState", "restored"]


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
