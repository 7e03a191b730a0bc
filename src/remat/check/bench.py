"""One way to run a region, run for real: what it holds, how high it peaks, how long it takes.

The region runs alone, forward and backward, on copies of its inputs. Backward ends where the region's own
graph does: what lies beyond belongs to the step that the region was met in, and is left as it is. Bytes come
from one run under the meter, seconds from others without it, because counting bytes slows a machine without
accelerator down.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from remat.check.live import Meter
from remat.errors import InputError
from remat.trace.capture import entry_copies
from remat.trace.graphwalk import next_sequence_number, walk
from remat.trace.price import cuda_event
from remat.trees import tensors

__all__ = ["Bench", "bench", "issuing_seconds", "timing"]

_ENOUGH_SECONDS = 0.08  # of timing for one entry
_ROUNDS = 3
_ISSUED = 4  # forwards that are timed for the host alone
_REENTRANT = "CheckpointFunctionBackward"  # torch.utils.checkpoint refuses to run towards some inputs only


@dataclass(frozen=True)
class Bench:
    """`resident_bytes` counts everything that stays until backward except the inputs; the rest as in Entry.
    `host_seconds` is how long the host takes to issue it all: where that is nearly all of `seconds`, the
    device waits for the host. `forward_seconds` are those of forward alone, of an accelerator; 0.0 otherwise:
    a host's are estimates. `host_forward_seconds`: what the host takes to issue forward. `reaches_out`:
    gradients leave it by other ways than its inputs and parameters (a tensor with a graph in an attribute,
    parameters that were lent)."""

    resident_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    seconds: float = 0.0
    host_seconds: float = 0.0
    forward_seconds: float = 0.0
    reaches_out: bool = False
    host_forward_seconds: float = 0.0

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
    at_backward: Callable[[], None] = lambda: None,
) -> Bench:
    """Run `call` on copies of `inputs`, forward and backward, gradients of `modules` cleared each time.
    `at_backward` is called in the metered run when backward begins, and is a part of it."""
    parameters = [p for module in modules for p in module.parameters()]
    with Meter(device) as meter:
        levels = _run(call, inputs, parameters, meter, follow=True, at_backward=at_backward)
    measured = Bench(
        resident_bytes=levels.held - levels.start,
        forward_peak_bytes=levels.forward_peak - levels.start,
        backward_peak_bytes=levels.backward_peak - levels.backward_start,
        reaches_out=levels.reaches_out,
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
    forwards: list[tuple[Any, Any]] = []
    issuing: list[float] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        start, begin = _timestamp(device), time.perf_counter()
        output = call(*args, **kwargs)
        issuing.append(time.perf_counter() - begin)
        forwards.append((start, _timestamp(device)))
        return output

    # Following the graph takes the host's time, so it is left out where it is known to find nothing.
    times = _times(lambda: _run(forward, inputs, parameters, None, follow=measured.reaches_out), device)
    return replace(  # whatever else happens only ever adds
        measured,
        seconds=min(whole for whole, _ in times),
        host_seconds=min(host for _, host in times),
        forward_seconds=min(_elapsed(start, end) for start, end in forwards),
        host_forward_seconds=min(issuing),
    )


def issuing_seconds(
    call: Callable[..., Any], inputs: tuple[tuple[Any, ...], dict[str, Any]], device: torch.device
) -> float:
    """What the host takes to issue a forward that has run before: the least of a few, each with nothing left
    to do for the device, so that the host never waits for it."""
    times = []
    for _ in range(_ISSUED):
        args, kwargs = entry_copies(*inputs)
        _timestamp(device, wait=True)
        begin = time.perf_counter()
        with torch.enable_grad():
            output = call(*args, **kwargs)
        times.append(time.perf_counter() - begin)
        del output
    return min(times)


@dataclass
class _Levels:
    start: int = 0
    forward_peak: int = 0
    held: int = 0
    backward_start: int = 0
    backward_peak: int = 0
    reaches_out: bool = False


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
    *,
    follow: bool,
    at_backward: Callable[[], None] = lambda: None,
) -> _Levels:
    """`follow`: find out where the region's graph ends, and end backward there."""
    levels = _Levels()
    args, kwargs = entry_copies(*inputs)
    # Now: where the region writes to an input, that tensor's grad_fn becomes a node of the region.
    entries = [t.grad_fn for t in tensors((args, kwargs)) if t.grad_fn is not None] if follow else []
    since = next_sequence_number() if follow else 0
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
        at_backward()

    differentiable = [t for t in tensors(output) if t.requires_grad]
    del output
    if differentiable:
        end = _Exit.apply(begin, *differentiable)  # type: ignore[no-untyped-call]
        del differentiable
        if meter is not None:
            levels.held = meter.current_bytes() - end.untyped_storage().nbytes()
        ends = _ends(end, entries, since, parameters) if follow else []
        levels.reaches_out = bool(ends)
        if ends:
            _backward_to(ends, end)
        else:
            end.backward()
        if meter is not None:
            meter.synchronize()
            levels.backward_peak = max(meter.peak_bytes(), levels.backward_start)
    else:
        levels.held = levels.start
    for parameter in parameters:
        parameter.grad = None
    return levels


def _ends(
    end: torch.Tensor, entries: Sequence[Any], since: int, parameters: Sequence[nn.Parameter]
) -> list[GradientEdge]:
    """Where backward has to stop so as to run all of the region's graph and nothing beyond; [] if the graph
    ends by itself, in inputs and parameters.

    Autograd runs a node on the way to another one that gradients are asked for. So of two ends one behind the
    other only the nearer is named, and the gradient of the farther is not computed.
    """
    nodes = walk([end], entries, since)
    own = {entry.node for entry in nodes}
    ends = dict.fromkeys(
        edge
        for entry in nodes
        for edge in entry.node.next_functions
        if edge[0] is not None and edge[0] not in own
    )
    known = {id(parameter) for parameter in parameters if parameter.is_leaf}
    stop = set(entries)
    foreign = {n for n, _ in ends if n not in stop and id(getattr(n, "variable", None)) not in known}
    if not foreign:
        return []
    if any(entry.name == _REENTRANT for entry in nodes):
        raise InputError(
            "a block uses torch.utils.checkpoint with use_reentrant=True inside and also reads a tensor with "
            "a graph that is not among its arguments (from an attribute or a closure), so its backward "
            "cannot be run alone: pass use_reentrant=False, or give the block that tensor as an argument"
        )
    behind, pending = set[Any](), list(foreign)
    while pending:
        for following, _ in pending.pop().next_functions:
            if following is not None and following not in behind:
                behind.add(following)
                pending.append(following)
    return [GradientEdge(node, place) for node, place in ends if node not in behind]


def _backward_to(ends: Sequence[GradientEdge], end: torch.Tensor) -> None:
    """Not end.backward(inputs=...): that would run the nodes that these edges lead to, and free what they
    hold, and add to `.grad` of leaves beyond."""
    torch.autograd.grad(end, ends, allow_unused=True)


def _times(run: Callable[[], Any], device: torch.device) -> list[tuple[float, float]]:
    """(seconds, seconds of the host) per run, a few rounds; the shorter a run, the more of them in a row."""
    first = _seconds(run, device, 1)
    if device.type != "cuda":
        return [first]
    in_a_row = min(round(_ENOUGH_SECONDS / _ROUNDS / max(first[0], 1e-6)), 16)
    if in_a_row <= 2:  # long: what the host does before the first operation does not show
        return [first, _seconds(run, device, 1)]
    return [_seconds(run, device, in_a_row) for _ in range(_ROUNDS)]


def _seconds(run: Callable[[], Any], device: torch.device, in_a_row: int) -> tuple[float, float]:
    """Per run, (seconds, seconds of the host). Several runs in a row without waiting: in a step the host runs
    ahead of the device, too."""
    start = _timestamp(device, wait=True)
    begin = time.perf_counter()
    for _ in range(in_a_row):
        run()
    host = time.perf_counter() - begin
    end = _timestamp(device)
    if start is None or end is None:
        return host / in_a_row, host / in_a_row
    end.synchronize()
    return _elapsed(start, end) / in_a_row, host / in_a_row


def _elapsed(start: Any, end: Any) -> float:
    """Seconds between two marks that the accelerator has passed; 0.0 where there is none."""
    return 0.0 if start is None or end is None else float(start.elapsed_time(end)) * 1e-3


def _timestamp(device: torch.device, *, wait: bool = False) -> Any:
    """A mark on the accelerator's own clock; None where there is none."""
    if device.type != "cuda":
        return None
    if wait:
        torch.cuda.synchronize(device)
    event = cuda_event()
    event.record()
    return event
