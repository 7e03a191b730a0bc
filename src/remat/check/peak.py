"""The peak of one forward and backward that starts without gradients."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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


def step_peak(
    model: nn.Module,
    run: Callable[[], torch.Tensor],
    device: torch.device,
    holding: Callable[[], AbstractContextManager[None]] = nullcontext,
    metering: Callable[[], AbstractContextManager[None]] | None = None,
) -> StepPeak:
    """Run forward and backward: warm, metered, timed. An accelerator counts bytes by itself, and is no slower
    for it: there the metered run is the timed one. `holding`: what holds the model's output meanwhile.
    `metering`: what makes the metered run take its most, which is then not the one that is timed.

    What a step leaves behind (an attention map in an attribute) is there when the next one begins, as in all
    but the first step of a training: it counts as above the start."""
    meter = Meter(device)

    def step() -> float:
        clear_gradients(model)
        meter.synchronize()
        begin = time.perf_counter()
        with holding():
            backward(run())
        meter.synchronize()
        return time.perf_counter() - begin

    clear_gradients(model)
    start = meter.current_bytes()  # of an accelerator; all others begin to count after the warm run
    with nullcontext() if metering is None else metering():
        step()
        clear_gradients(model)
        with meter:
            meter.reset_peak()
            seconds = step()
            clear_gradients(model)
            if device.type != "cuda" and meter.current_bytes() > start:
                meter.reset_peak()
                seconds = step()
            above = meter.peak_bytes() - start
    if device.type == "cpu" or metering is not None:
        seconds = step()
    reserved = torch.cuda.memory_reserved(device) if device.type == "cuda" else None
    return StepPeak(above, seconds, reserved)


def release_cached(device: torch.device) -> None:
    """Give free memory back to the device: what comes next must not find it in pieces of other sizes."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
