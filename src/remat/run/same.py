"""Equal to the bit."""

from __future__ import annotations

import torch

__all__ = ["bits", "same_bits"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, so that NaN equals NaN and 0.0 is not -0.0."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor if tensor.dtype is torch.bool else tensor.view(_INTEGERS[tensor.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in shape, layout, dtype and every bit."""
    if a.shape != b.shape or a.dtype != b.dtype or (a.numel() > 0 and a.stride() != b.stride()):
        return False
    return torch.equal(bits(a.detach()), bits(b.detach()))
