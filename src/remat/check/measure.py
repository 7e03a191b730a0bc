"""What one training step costs: bytes at its peak, by what they are for, and seconds."""

from __future__ import annotations

import functools
import inspect
import statistics
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from remat import trees
from remat.check.live import Meter, storages_of
from remat.errors import InputError
from remat.units import format_bytes, format_seconds

__all__ = ["Buckets", "Measurement", "measure"]


@dataclass(frozen=True)
class Buckets:
    """The peak by purpose; the sum is the peak. `other`: resident before the step and none of the rest
    (buffers, the batch); `activations`: made by the step and no gradient of a parameter."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    other: int


@dataclass(frozen=True)
class Measurement:
    """One training step. `activation_bytes` is the peak above what was resident before the step, so that
    gradients which the step makes count. `reserved_bytes`: what the CUDA allocator took from the device."""

    device: str
    peak_bytes: int
    resident_bytes: int
    seconds: float
    at_peak: Buckets
    reserved_bytes: int | None = None

    @property
    def activation_bytes(self) -> int:
        return self.peak_bytes - self.resident_bytes

    def __str__(self) -> str:
        parts = ", ".join(
            f"{name} {format_bytes(nbytes)}" for name, nbytes in vars(self.at_peak).items() if nbytes
        )
        reserved = "" if self.reserved_bytes is None else f", reserved {format_bytes(self.reserved_bytes)}"
        return (
            f"peak {format_bytes(self.peak_bytes)} on {self.device} = {parts or 'nothing'}{reserved}\n"
            f"resident {format_bytes(self.resident_bytes)} before the step, activation peak "
            f"{format_bytes(self.activation_bytes)}, {format_seconds(self.seconds)} per step"
        )


def measure(
    step: Callable[[], Any],
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    warmup: int = 1,
    repeats: int = 3,
    device: str | torch.device | None = None,
) -> Measurement:
    """Measure `step`, a function that runs one training step (optimizer and zero_grad included, if it likes).

    It is called `warmup` times, once more to count bytes and `repeats` times for the median of the seconds.
    What it uses by name - models, optimizers, tensors - is found in its closure and globals; name `model` and
    `optimizer` if it reaches them some other way. On CUDA the allocator is read, which counts all there is
    on the device; elsewhere live tensor storage is counted: that of the named and found, and what the step
    makes.
    """
    if not callable(step):
        raise InputError(f"step is a {type(step).__name__}; pass a function that runs one training step")
    for name, count, least in (("warmup", warmup, 0), ("repeats", repeats, 1)):
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            raise InputError(f"{name}={count!r}; it must be an integer of at least {least}")
    uses = _uses(step, model, optimizer)
    place = torch.device(device) if device is not None else uses.device()
    for _ in range(warmup):
        step()
    counted = _count_bytes(step, uses, place)
    seconds = statistics.median(_seconds(step, place) for _ in range(repeats))
    return Measurement(device=str(place), seconds=seconds, **counted)


# ------------------------------------------------------------------------------------- what a step uses


@dataclass(frozen=True)
class _Uses:
    """Models, optimizers and tensors that a step works on."""

    models: tuple[nn.Module, ...]
    optimizers: tuple[Optimizer, ...]
    tensors: tuple[Tensor, ...]

    def parameters(self) -> list[nn.Parameter]:
        mine = (p for model in self.models for p in model.parameters())
        stepped = (p for opt in self.optimizers for group in opt.param_groups for p in group["params"])
        return list({id(p): p for p in (*mine, *stepped)}.values())

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters() if p.grad is not None]

    def state(self) -> list[Tensor]:
        return [t for opt in self.optimizers for state in opt.state.values() for t in trees.tensors(state)]

    def rest(self) -> list[Tensor]:
        return [*(buffer for model in self.models for buffer in model.buffers()), *self.tensors]

    def device(self) -> torch.device:
        known: list[Tensor] = [*self.parameters(), *self.tensors]
        if known:
            return known[0].device
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _uses(step: Callable[[], Any], model: nn.Module | None, optimizer: Optimizer | None) -> _Uses:
    found = [leaf for value in _names_used(step) for leaf in trees.leaves(value)]
    models = [model] if model is not None else [leaf for leaf in found if isinstance(leaf, nn.Module)]
    optimizers = (
        [optimizer] if optimizer is not None else [leaf for leaf in found if isinstance(leaf, Optimizer)]
    )
    return _Uses(tuple(models), tuple(optimizers), tuple(leaf for leaf in found if isinstance(leaf, Tensor)))


def _names_used(step: Any) -> list[Any]:
    """Values of the variables that a function refers to, of a partial's arguments, of a method's object."""
    if isinstance(step, functools.partial):
        return [*step.args, *step.keywords.values(), *_names_used(step.func)]
    if inspect.ismethod(step):
        owner = step.__self__
        held = [owner] if isinstance(owner, nn.Module) else list(getattr(owner, "__dict__", {}).values())
        return [*held, *_names_used(step.__func__)]
    if inspect.isfunction(step):
        names = inspect.getclosurevars(step)
        return [*names.nonlocals.values(), *names.globals.values()]
    return []


# ------------------------------------------------------------------------------------------ bytes


def _count_bytes(step: Callable[[], Any], uses: _Uses, device: torch.device) -> dict[str, Any]:
    meter = Meter(device)
    meter.synchronize()
    parameters, state = _bytes_on(device, uses.parameters()), _bytes_on(device, uses.state())
    with ExitStack() as stack:
        stack.enter_context(meter)
        meter.watch([*uses.parameters(), *uses.gradients(), *uses.state(), *uses.rest()])
        resident = meter.current_bytes()
        ledger = _GradientLedger(meter, device)
        stack.callback(ledger.stop)
        ledger.born(uses.gradients())  # no name may hold them: the step frees them
        resident_gradients = ledger.nbytes
        meter.reset_peak()
        for parameter in uses.parameters():
            if parameter.requires_grad and parameter.is_leaf:
                hook = parameter.register_post_accumulate_grad_hook(ledger.accumulated)  # type: ignore[no-untyped-call]
                stack.callback(hook.remove)
        step()
        meter.synchronize()
        ledger.close_segment()
    other = max(0, resident - parameters - state - resident_gradients)
    reserved = None
    if device.type == "cuda":
        reserved = int(torch.cuda.memory_stats(device)["reserved_bytes.all.peak"])
    return {
        "peak_bytes": ledger.peak_bytes,
        "resident_bytes": resident,
        "reserved_bytes": reserved,
        "at_peak": Buckets(
            parameters=parameters,
            gradients=ledger.bytes_at_peak,
            optimizer=state,
            activations=ledger.peak_bytes - parameters - ledger.bytes_at_peak - state - other,
            other=other,
        ),
    }


class _GradientLedger:
    """How many bytes of parameter gradients exist when the level is highest.

    The births and deaths of gradients cut the step into segments in which that number is constant; each
    segment's own peak is read at its end. No allocator is asked for more than its peak, so that the same
    works on CUDA and with counted storages.
    """

    def __init__(self, meter: Meter, device: torch.device) -> None:
        self.nbytes = 0
        self.peak_bytes = 0
        self.bytes_at_peak = 0
        self._meter = meter
        self._device = device
        self._alive: dict[int, tuple[weakref.finalize[Any, Any], int]] = {}

    def accumulated(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.born([parameter.grad])

    def born(self, gradients: Iterable[Tensor]) -> None:
        for storage, device in (pair for gradient in gradients for pair in storages_of(gradient)):
            key = id(storage)
            if key not in self._alive and device.type == self._device.type:
                self.close_segment()
                self._alive[key] = (weakref.finalize(storage, self._died, key), storage.nbytes())
                self.nbytes += storage.nbytes()

    def _died(self, key: int) -> None:
        self.close_segment()
        self.nbytes -= self._alive.pop(key)[1]

    def close_segment(self) -> None:
        peak = self._meter.peak_bytes()
        if peak > self.peak_bytes:
            self.peak_bytes, self.bytes_at_peak = peak, self.nbytes
        self._meter.reset_peak()

    def stop(self) -> None:
        for on_death, _ in self._alive.values():
            on_death.detach()


def _bytes_on(device: torch.device, tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind these tensors, each storage once."""
    found = {id(s): s for tensor in tensors for s, place in storages_of(tensor) if place.type == device.type}
    return sum(storage.nbytes() for storage in found.values())


# ----------------------------------------------------------------------------------------- seconds


def _seconds(step: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        with torch.cuda.device(device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            step()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3
    start_time = time.perf_counter()
    step()
    return time.perf_counter() - start_time
