"""Which tensors can wait on the host between forward and backward."""

from __future__ import annotations

from torch import Tensor, nn, strided

__all__ = ["can_host"]


def can_host(tensor: Tensor) -> bool:
    """Plain tensors of a device that has a link: parameters and their views are resident anyway."""
    base = tensor._base if tensor._is_view() else tensor
    plain = type(tensor) is Tensor and tensor.layout is strided and tensor.device.type in ("cuda", "cpu")
    return plain and not isinstance(base, nn.Parameter) and not tensor.is_conj() and not tensor.is_neg()
