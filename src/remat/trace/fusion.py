"""What a compiler would make of a captured region: products and attention as they are, all else fused, so
that only what enters and leaves a fused kernel is moved."""

from __future__ import annotations

from typing import Any

import torch

from remat.records import Op, RegionGraph
from remat.run.replay import dtype_of, overload

__all__ = ["compiled_share", "is_fused", "touched_bytes"]

_FUSED = frozenset((
    "_fused_rms_norm", "_log_softmax", "_safe_softmax", "_softmax", "_to_copy", "amax", "amin", "any",
    "arange", "argmax", "argmin", "bernoulli", "cat", "clone", "constant_pad_nd", "copy", "cumsum",
    "diagonal_copy", "embedding", "empty", "empty_like", "fill", "flip", "full", "full_like", "gather",
    "index", "index_select", "lift_fresh_copy", "logsumexp", "masked_fill", "max", "mean", "min",
    "native_dropout", "native_group_norm", "native_layer_norm", "new_empty", "new_full", "new_ones",
    "new_zeros", "ones", "ones_like", "permute_copy", "prod", "rand", "rand_like", "randn", "randn_like",
    "repeat", "roll", "rsub", "scalar_tensor", "select_scatter", "slice_scatter", "softplus", "split",
    "stack", "std", "std_mean", "sum", "tril", "triu", "var", "var_mean", "where", "zeros", "zeros_like",
))  # fmt: skip


def is_fused(target: Any) -> bool:
    """Whether a compiler makes this operation part of its neighbours' kernels."""
    if torch.Tag.pointwise in getattr(target, "tags", ()) or getattr(target, "namespace", "") == "prims":
        return True
    return getattr(target, "_opname", "").removesuffix("_") in _FUSED


def touched_bytes(graph: RegionGraph, value: int) -> int:
    """What reading or writing a value moves: an expanded dimension is one."""
    meta = graph.values[value]
    count = 1
    for size, stride in zip(meta.shape, meta.stride, strict=True):
        count *= size if stride else 1
    return count * dtype_of(meta.dtype).itemsize


def compiled_share(graph: RegionGraph) -> float:
    """Estimated seconds of compiled code, as a share of those that the operations take one by one."""
    fused = [op for op in graph.ops if not op.view and _is_fused_op(op)]
    alone = [op for op in graph.ops if not op.view and op not in fused]
    eager = sum(op.seconds for op in graph.ops)
    rate = max((_moved(graph, op) / op.seconds for op in fused if op.seconds), default=0.0)
    if not rate or not eager:
        return 1.0
    inside = {value for op in fused for value in op.outputs if value >= 0}
    wanted = {
        *graph.outputs,
        *(saved.value for saved in graph.saved),
        *(v for op in alone for v in op.inputs),
    }
    written = {graph.values[value].storage for value in wanted}
    crossing = {value for value in inside if graph.values[value].storage in written}
    crossing |= {value for op in fused for value in op.inputs if value not in inside}
    moving = sum(touched_bytes(graph, value) for value in crossing) / rate
    return min((sum(op.seconds for op in alone) + moving) / eager, 1.0)


def _moved(graph: RegionGraph, op: Op) -> int:
    return sum(touched_bytes(graph, v) for v in {*op.inputs, *op.outputs} if v >= 0)


def _is_fused_op(op: Op) -> bool:
    try:
        return is_fused(overload(op.name))
    except (AttributeError, ValueError, KeyError):  # not an operation of torch's own
        return False
