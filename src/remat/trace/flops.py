"""Floating-point operations of one call: torch's own formulas, those of attention on the host, and those of
products by groups (experts).

Attention that is causal skips the upper half of its work, which torch's formulas do not know.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

__all__ = ["flops_of"]

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_BACKWARD_PRODUCTS = 5  # scores again, and the gradients of values, scores, keys and queries; forward has two
_FORWARD_PRODUCTS = 2


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """0 for operations that only move data, and for those that no formula knows."""
    packet = getattr(func, "_overloadpacket", None)
    try:
        if packet == _FORWARD:
            return _attention(args[0], args[1], args[2], _argument(func, args, kwargs, "is_causal"))
        if packet == _BACKWARD:
            forward = _attention(args[1], args[2], args[3], _argument(func, args, kwargs, "is_causal"))
            return forward * _BACKWARD_PRODUCTS // _FORWARD_PRODUCTS
        if packet == getattr(torch.ops.aten, "_grouped_mm", None):
            return _grouped(args[0], args[1])
        formula = flop_registry.get(packet)
        return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
    except Exception:  # a formula that does not know this overload; the figure is only an estimate
        return 0


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> int:
    batch, heads, length, width = query.shape
    flops = 2 * batch * heads * length * key.shape[2] * (width + value.shape[3])
    return flops // 2 if causal else flops


def _grouped(left: torch.Tensor, right: torch.Tensor) -> int:
    """Every row meets one group's matrix; with two batches, or of two matrices cut along what is summed over,
    it is what an ordinary product takes."""
    batch = left.shape[0] if left.dim() == right.dim() == 3 else 1
    return 2 * batch * left.shape[-2] * left.shape[-1] * right.shape[-1]


def _argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[place] if place < len(args) else kwargs.get(name, argument.default_value)
    return None
