"""The peak of one forward and backward that starts without gradients."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from remat.check.live import Meter
from remat.check.untouched import backward, clear_gradients

__all__ = ["StepPeak", "release_cached", "step_peak"]


@dataclass(frozen=True)
class StepPeak:
    """`above_bytes`: the peak above the level at the start of the step. `reserved_bytes`: what the CUDA
    allocator has taken from the device by then, with what it holds in fragments."""

    above_bytes: int
    seconds: float
    reserved_bytes: int | None = None


def step_peak(model: nn.Module, run: Callable[[], torch.Tensor], device: torch.device) -> StepPeak:
    """Run forward and backward three times: warm, metered, timed."""

    def step() -> None:
        clear_gradients(model)
        backward(run())

    step()
    clear_gradients(model)
    with Meter(device) as meter:
        start = meter.current_bytes()
        meter.reset_peak()
        step()
        meter.synchronize()
        above = meter.peak_bytes() - start
    begin = time.perf_counter()
    step()
    meter.synchronize()
    seconds = time.perf_counter() - begin
    reserved = torch.cuda.memory_reserved(device) if device.type == "cuda" else None
    return StepPeak(above, seconds, reserved)


def release_cached(device: torch.device) -> None:
    """Give free memory back to the device: what comes next must not find it in pieces of other sizes."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
