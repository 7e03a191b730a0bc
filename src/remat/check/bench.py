"""One way to run a region, run for real: what it holds, how high it peaks, how long it takes.

The region runs alone, forward and backward, on copies of its inputs. Bytes come from one run under the meter,
seconds from others without it, because counting bytes slows a machine without accelerator down.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from remat.check.live import Meter
from remat.trace.capture import entry_copies
from remat.trace.price import cuda_event
from remat.trees import tensors

__all__ = ["Bench", "bench", "timing"]

_ENOUGH_SECONDS = 0.08  # of timing for one entry
_ROUNDS = 3


@dataclass(frozen=True)
class Bench:
    """`resident_bytes` counts everything that stays until backward except the inputs; the rest as in Entry.
    `host_seconds` is how long the host takes to issue it all: where that is nearly all of `seconds`, the
    device waits for the host."""

    resident_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    seconds: float = 0.0
    host_seconds: float = 0.0

    @property
    def launch_bound(self) -> bool:
        return self.host_seconds > 0.85 * self.seconds


def bench(
    call: Callable[..., Any],
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    modules: Sequence[nn.Module],
    device: torch.device,
    *,
    timed: bool = True,
) -> Bench:
    """Run `call` on copies of `inputs`, forward and backward, gradients of `modules` cleared each time."""
    parameters = [p for module in modules for p in module.parameters()]
    with Meter(device) as meter:
        levels = _run(call, inputs, parameters, meter)
    measured = Bench(
        resident_bytes=levels.held - levels.start,
        forward_peak_bytes=levels.forward_peak - levels.start,
        backward_peak_bytes=levels.backward_peak - levels.backward_start,
    )
    return timing(measured, call, inputs, modules, device) if timed else measured


def timing(
    measured: Bench,
    call: Callable[..., Any],
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    modules: Sequence[nn.Module],
    device: torch.device,
) -> Bench:
    """The same with seconds; the call has been run before."""
    parameters = [p for module in modules for p in module.parameters()]
    times = _times(call, inputs, parameters, device)
    return replace(  # whatever else happens only ever adds
        measured,
        seconds=min(whole for whole, _ in times),
        host_seconds=min(host for _, host in times),
    )


@dataclass
class _Levels:
    start: int = 0
    forward_peak: int = 0
    held: int = 0
    backward_start: int = 0
    backward_peak: int = 0


class _Exit(torch.autograd.Function):
    """Takes a region's outputs without holding them, and starts its backward with gradients of its own
    making, which nobody else holds either: as the next region in a step would."""

    @staticmethod
    def forward(ctx: Any, begin: Callable[[], None], *outputs: torch.Tensor) -> torch.Tensor:
        ctx.begin = begin
        ctx.layouts = [(t.shape, t.dtype, t.device, t.requires_grad) for t in outputs]
        return outputs[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        made = [
            torch.ones(shape, dtype=dtype, device=device) if needed else None
            for shape, dtype, device, needed in ctx.layouts
        ]
        ctx.begin()
        return (None, *made)


def _run(
    call: Callable[..., Any],
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    parameters: list[nn.Parameter],
    meter: Meter | None,
) -> _Levels:
    levels = _Levels()
    args, kwargs = entry_copies(*inputs)
    if meter is not None:
        levels.start = meter.current_bytes()
        meter.reset_peak()
    with torch.enable_grad():
        output = call(*args, **kwargs)
    if meter is not None:
        levels.forward_peak = meter.peak_bytes()

    def begin() -> None:
        if meter is not None:
            levels.backward_start = meter.current_bytes()
            meter.reset_peak()

    differentiable = [t for t in tensors(output) if t.requires_grad]
    del output
    if differentiable:
        end = _Exit.apply(begin, *differentiable)  # type: ignore[no-untyped-call]
        del differentiable
        if meter is not None:
            levels.held = meter.current_bytes() - end.untyped_storage().nbytes()
        end.backward()
        if meter is not None:
            meter.synchronize()
            levels.backward_peak = max(meter.peak_bytes(), levels.backward_start)
    else:
        levels.held = levels.start
    for parameter in parameters:
        parameter.grad = None
    return levels


def _times(
    call: Callable[..., Any],
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    parameters: list[nn.Parameter],
    device: torch.device,
) -> list[tuple[float, float]]:
    """(seconds, seconds of the host) per run, a few rounds; the shorter a run, the more of them in a row."""
    first = _seconds(call, inputs, parameters, device, 1)
    if device.type != "cuda":
        return [first]
    in_a_row = min(round(_ENOUGH_SECONDS / _ROUNDS / max(first[0], 1e-6)), 16)
    if in_a_row <= 2:  # long: what the host does before the first operation does not show
        return [first, _seconds(call, inputs, parameters, device, 1)]
    return [_seconds(call, inputs, parameters, device, in_a_row) for _ in range(_ROUNDS)]


def _seconds(
    call: Callable[..., Any],
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    parameters: list[nn.Parameter],
    device: torch.device,
    in_a_row: int,
) -> tuple[float, float]:
    """Per run, (seconds, seconds of the host). Several runs in a row without waiting: in a step the host runs
    ahead of the device, too."""
    start = _timestamp(device, wait=True)
    begin = time.perf_counter()
    for _ in range(in_a_row):
        _run(call, inputs, parameters, None)
    host = time.perf_counter() - begin
    end = _timestamp(device)
    if start is None or end is None:
        return host / in_a_row, host / in_a_row
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3 / in_a_row, host / in_a_row


def _timestamp(device: torch.device, *, wait: bool = False) -> Any:
    """A mark on the accelerator's own clock; None where there is none."""
    if device.type != "cuda":
        return None
    if wait:
        torch.cuda.synchronize(device)
    event = cuda_event()
    event.record()
    return event
