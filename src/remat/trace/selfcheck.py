"""Which operations of a capture can be replayed, found by replaying each one.

Every operation that looks replayable runs once more on its recorded inputs, in the state in which replays
run. A result that differs in any bit or in layout will not be rebuilt; an operation that changed its inputs
without saying so is not replayed at all.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensor

from remat.records import Op, RegionGraph, Value
from remat.run.replay import replay, replaying
from remat.run.same import same_bits
from remat.trace.capture import Capture

__all__ = ["checked"]


def checked(capture: Capture) -> Capture:
    """The same capture with operations and values that do not replay to the bit marked as such.

    Fake tensors have no bits: what was captured of them stands until a real step confirms it.
    """
    if any(isinstance(tensor, FakeTensor) for tensor in capture.tensors):
        return capture
    graph = capture.graph
    ops, lost = list(graph.ops), set[int]()
    with replaying():
        for index, op in enumerate(graph.ops):
            if op.replayable:
                reason, wrong = _try(capture, op)
                if reason:
                    ops[index] = replace(op, replayable=False, reason=reason)
                lost |= wrong
    values = tuple(_without_producer(value) if i in lost else value for i, value in enumerate(graph.values))
    return replace_graph(capture, replace(graph, ops=tuple(ops), values=values))


def replace_graph(capture: Capture, graph: RegionGraph) -> Capture:
    return Capture(graph, capture.tensors, capture.final)


def _without_producer(value: Value) -> Value:
    return replace(value, producer=None)


def _try(capture: Capture, op: Op) -> tuple[str, set[int]]:
    """(why the operation is not replayable at all, values of it that come out differently)."""
    made = [*(v for v in op.outputs if v >= 0), *(v for _, v in op.written)]
    if not all(capture.final[v] for v in (*op.inputs, *made)):
        return "", set()  # memory was written since: judged by the shadow step instead
    before = {v: capture.tensors[v].detach().clone() for v in op.inputs}
    try:
        results = replay(capture.graph, op, lambda v: capture.tensors[v].detach(), _device(capture, made))
    except Exception as error:  # whatever it raises, it is not replayable
        return f"replay raised {type(error).__name__}", set()
    if not all(torch.equal(_raw(before[v]), _raw(capture.tensors[v])) for v in op.inputs):
        for v, tensor in before.items():
            capture.tensors[v].detach().copy_(tensor)
        return "writes to its inputs without saying so", set()
    return "", {v for v, tensor in results.items() if not same_bits(tensor, capture.tensors[v])}


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Comparable also where there are NaNs."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return torch.nan_to_num(tensor) if tensor.is_floating_point() else tensor


def _device(capture: Capture, values: list[int]) -> torch.device:
    return capture.tensors[values[0]].device if values else torch.device("cpu")
