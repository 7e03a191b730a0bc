"""What one training step takes: bytes, and seconds on an accelerator or counted operations without one."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from workloads import CUDA, DEVICE

from remat.check.live import Meter
from remat.trace.price import cuda_event

__all__ = [
    "COST_UNIT",
    "Counter",
    "Reading",
    "bytes_in_use",
    "clean",
    "peak_of",
    "read",
    "relative_to",
    "seconds_of",
    "spread_of",
    "synchronize",
]

COST_UNIT = "seconds" if CUDA else "floating-point operations, counted"
Step = Callable[[], None]


@dataclass(frozen=True)
class Reading:
    """`peak_bytes` above what was there before the step. `cost` is in COST_UNIT; `operations` (dispatched,
    views included) are counted only where seconds say nothing."""

    peak_bytes: int
    cost: float
    operations: int | None = None


class Counter(TorchDispatchMode):
    """Counts what is dispatched: operations, and the floating-point operations of those that torch knows."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0
        self.flops = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations += 1
        count = flop_registry.get(getattr(func, "overloadpacket", None))
        if count is not None:
            self.flops += int(count(*args, **(kwargs or {}), out_val=out))
        return out


def read(step: Step) -> Reading:
    """One step, measured; it has been run before."""
    gc.collect()
    return _read_cuda(step) if CUDA else _read_counted(step)


def _read_cuda(step: Step) -> Reading:
    """Active bytes: what a stream of another library still holds counts as well, though it is freed."""
    torch.cuda.synchronize()
    start = torch.cuda.memory_stats(DEVICE)["active_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats(DEVICE)
    seconds = seconds_of(step)
    torch.cuda.synchronize()
    peak = torch.cuda.memory_stats(DEVICE)["active_bytes.all.peak"]
    return Reading(int(peak - start), seconds)


def _read_counted(step: Step) -> Reading:
    with Meter(DEVICE) as meter:
        start = meter.current_bytes()
        meter.reset_peak()
        step()
        peak = meter.peak_bytes() - start
    with Counter() as counter:
        step()
    return Reading(peak, float(counter.flops), counter.operations)


def peak_of(step: Step) -> int:
    """The activation peak: above what is resident, parameters and gradients included."""
    gc.collect()
    with Meter(DEVICE) as meter:
        meter.synchronize()
        start = meter.current_bytes()
        meter.reset_peak()
        step()
        meter.synchronize()
        return meter.peak_bytes() - start


def bytes_in_use() -> int:
    """Above which `peak_of` measures."""
    clean()
    with Meter(DEVICE) as meter:
        meter.synchronize()
        return meter.current_bytes()


def seconds_of(step: Step) -> float:
    if not CUDA:
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin
    start, end = cuda_event(), cuda_event()
    start.record()
    step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


def relative_to(plain: Sequence[Sequence[float]], found: Sequence[Sequence[float]]) -> list[list[float]]:
    """Seconds of each round over the plain step's median in it: a device that warms up slows all of a round
    alike. A round that one of them did not run is left out."""
    pairs = [(round_of, base) for round_of, base in zip(found, plain, strict=False) if round_of and base]
    return [[seconds / statistics.median(base) for seconds in round_of] for round_of, base in pairs]


def spread_of(found: Sequence[float]) -> float | None:
    """Between the quartiles, relative to the median."""
    if len(found) < 2:
        return None
    low, middle, high = statistics.quantiles(found, n=4)
    return (high - low) / middle


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def clean() -> None:
    """Give back what is not in use, on the host as well: torch keeps pinned memory for ever."""
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
        empty_host: Callable[[], None] | None = getattr(torch._C, "_host_emptyCache", None)
        if empty_host is not None:
            empty_host()
