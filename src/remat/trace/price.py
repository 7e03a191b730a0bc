"""Seconds per operation: measured on the accelerator, or estimated from bytes and FLOPs.

An operation is timed alone, several runs in a row, so that a kernel that is shorter than its launch is
priced at the launch: that is what a replay of it will cost. Views are free. On a host that does other things
besides, timings of single operations are mostly noise: there, and where the device is not at hand, seconds
come from bytes and FLOPs, so that the same model always gets the same plan.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Any

import torch

from remat.records import Op, RegionGraph
from remat.run.fused import is_fusible
from remat.run.replay import OVERWRITES, decode, dtype_of, overload, replaying, twin
from remat.trace.capture import Capture

__all__ = [
    "HOST",
    "Rates",
    "cuda_event",
    "estimate",
    "fused_prices",
    "launch_seconds",
    "price",
    "seconds_of",
    "time_cuda",
]

_ROUNDS = 3
_RUNS = 5
_LONG_SECONDS = 5e-4  # an operation that takes so long is timed in one round
_FUSED_SECONDS = 1e-6  # an operation in a kernel that runs anyway


def price(capture: Capture) -> Capture:
    """The same capture with the seconds of every replayable operation."""
    if not any(tensor.device.type == "cuda" for tensor in capture.tensors):
        return Capture(estimate(capture.graph, HOST), capture.tensors, capture.final)
    seen: dict[Any, float] = {}
    ops = []
    with replaying():
        for op in capture.graph.ops:
            if not op.replayable or op.view:
                ops.append(op)
                continue
            key = _key(capture.graph, op)
            if key not in seen:
                seen[key] = seconds_of(capture, op)
            ops.append(replace(op, seconds=seen[key]))
    return Capture(replace(capture.graph, ops=tuple(ops)), capture.tensors, capture.final)


def _key(graph: RegionGraph, op: Op) -> Any:
    layouts = tuple((graph.values[v].shape, graph.values[v].stride, graph.values[v].dtype) for v in op.inputs)
    constants = tuple(arg for arg in op.args if isinstance(arg, (bool, int, float, str)))
    return op.name, layouts, constants


def seconds_of(capture: Capture, op: Op) -> float:
    """Time one operation on its captured inputs, on an accelerator."""

    def get(value: int) -> torch.Tensor:
        return capture.tensors[value].detach()

    function = overload(op.name)
    names = [argument.name for argument in function._schema.arguments]
    args = [decode(arg, get) for arg in op.args]
    kwargs = {name: decode(arg, get) for name, arg in op.kwargs}
    written = [(place, capture.graph.values[value]) for place, value in op.written]
    device = capture.tensors[next(v for v in (*op.outputs, *op.inputs) if v >= 0)].device

    def run() -> None:
        for place, value in written:  # what a replay gives it to write to
            before = (
                None if op.name in OVERWRITES else args[place] if place < len(args) else kwargs[names[place]]
            )
            fresh = twin(value, before, device)
            if place < len(args):
                function(*args[:place], fresh, *args[place + 1 :], **kwargs)
            else:
                function(*args, **{**kwargs, names[place]: fresh})
            return
        function(*args, **kwargs)

    run()
    return time_cuda(run)


def cuda_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def time_cuda(run: Any) -> float:
    rounds = []
    for _ in range(_ROUNDS):
        start, end = cuda_event(), cuda_event()
        start.record()
        for _ in range(_RUNS):
            run()
        end.record()
        end.synchronize()
        rounds.append(float(start.elapsed_time(end)) * 1e-3 / _RUNS)
    return statistics.median(rounds)


def launch_seconds(device: torch.device) -> float:
    """The host's time to issue one small operation to an accelerator: priced as those of a region are."""
    one = torch.zeros(1, device=device)

    def run() -> None:
        torch.ops.aten.add.Tensor(one, one)

    with replaying():
        run()
        return time_cuda(run)


def fused_prices(graph: RegionGraph) -> RegionGraph:
    """Priced as fused replay runs it: a neighbour's result that stays in registers is neither written nor
    read, and the rest moves as fast as the best of these operations moved it here."""
    fusible = {i for i, op in enumerate(graph.ops) if op.seconds and is_fusible(graph, op)}
    moved = {i: _touched(graph, graph.ops[i]) for i in fusible}
    rate = max((moved[i] / graph.ops[i].seconds for i in fusible), default=0.0)
    saved = {slot.value for slot in graph.saved}
    readers: dict[int, set[int]] = {}
    for index, op in enumerate(graph.ops):
        for value in op.inputs:
            readers.setdefault(value, set()).add(index)
    ops = list(graph.ops)
    for index in fusible:
        op = ops[index]
        made = op.outputs[0]
        loads = sum(_nbytes(graph, v) for v in op.inputs if graph.values[v].producer not in fusible)
        inside = made not in saved and readers.get(made, set()) <= fusible
        seconds = (loads + (0 if inside else _nbytes(graph, made))) / rate
        ops[index] = replace(op, seconds=min(op.seconds, seconds + _FUSED_SECONDS))
    return replace(graph, ops=tuple(ops))


# ------------------------------------------------------------------------------------------- estimates


@dataclass(frozen=True)
class Rates:
    """What a device moves and computes per second, and what starting one operation costs."""

    bytes_per_second: float
    flops_per_second: float  # matrix products in the dtype that training uses
    launch_seconds: float = 5e-6


HOST = Rates(bytes_per_second=1e10, flops_per_second=1e11, launch_seconds=2e-6)  # one core, in round figures


def estimate(graph: RegionGraph, rates: Rates) -> RegionGraph:
    """Price every replayable operation by the bytes it touches and the FLOPs it does."""
    ops = []
    for op in graph.ops:
        if not op.replayable or op.view:
            ops.append(op)
            continue
        moving = _touched(graph, op) / rates.bytes_per_second
        seconds = max(moving, op.flops / rates.flops_per_second, rates.launch_seconds)
        ops.append(replace(op, seconds=seconds))
    return replace(graph, ops=tuple(ops))


def _touched(graph: RegionGraph, op: Op) -> int:
    return sum(_nbytes(graph, v) for v in {*op.inputs, *op.outputs} if v >= 0)


def _nbytes(graph: RegionGraph, value: int) -> int:
    meta = graph.values[value]
    count = 1
    for size, stride in zip(meta.shape, meta.stride, strict=True):
        count *= size if stride else 1  # an expanded dimension is read once
    return count * dtype_of(meta.dtype).itemsize
