"""One way to run a region, run for real: what it holds, how high it peaks, how long it takes.

The region runs alone, forward and backward, on copies of its inputs. Bytes come from one run under the meter,
seconds from others without it, because counting bytes slows a machine without accelerator down.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from remat.check.live import Meter
from remat.trace.price import cuda_event
from remat.trace.capture import entry_copies
from remat.trees import tensors

__all__ = ["Bench", "bench"]

_IN_A_ROW = 4
_ENOUGH_SECONDS = 0.15


@dataclass(frozen=True)
class Bench:
    """`resident_bytes` counts everything that stays until backward except the inputs; the rest as in Entry.
    `host_seconds` is how long the host takes to issue it all: where that is nearly all of `seconds`, the device
    waits for the host."""

    resident_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    seconds: float
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
    repeats: int = 2,
) -> Bench:
    """Run `call` on copies of `inputs`, forward and backward. Gradients of `modules` are cleared each time."""
    parameters = [p for module in modules for p in module.parameters()]
    with Meter(device) as meter:
        levels = _run(call, inputs, parameters, meter)
    times = [_seconds(call, inputs, parameters, device) for _ in range(repeats)]
    while times and device.type == "cuda" and sum(whole for whole, _ in times) * _IN_A_ROW < _ENOUGH_SECONDS:
        times.append(_seconds(call, inputs, parameters, device))  # short regions are noisy: look longer
    return Bench(
        resident_bytes=levels.held - levels.start,
        forward_peak_bytes=levels.forward_peak - levels.start,
        backward_peak_bytes=levels.backward_peak - levels.backward_start,
        seconds=min((whole for whole, _ in times), default=0.0),  # whatever else happens only ever adds
        host_seconds=min((host for _, host in times), default=0.0),
    )


@dataclass
class _Levels:
    start: int = 0
    forward_peak: int = 0
    held: int = 0
    backward_start: int = 0
    backward_peak: int = 0


class _Exit(torch.autograd.Function):
    """Takes a region's outputs without holding them, and starts its backward with gradients of its own making,
    which nobody else holds either: as the next region in a step would."""

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


def _seconds(
    call: Callable[..., Any],
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    parameters: list[nn.Parameter],
    device: torch.device,
) -> tuple[float, float]:
    """Per run, (seconds, seconds of the host). On an accelerator several runs in a row without waiting: in a
    step the host runs ahead of the device, too."""
    if device.type != "cuda":
        begin = time.perf_counter()
        _run(call, inputs, parameters, None)
        took = time.perf_counter() - begin
        return took, took
    start, end = cuda_event(), cuda_event()
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    start.record()
    for _ in range(_IN_A_ROW):
        _run(call, inputs, parameters, None)
    end.record()
    host = time.perf_counter() - begin
    end.synchronize()
    return start.elapsed_time(end) * 1e-3 / _IN_A_ROW, host / _IN_A_ROW
