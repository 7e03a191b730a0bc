"""Equal to the bit, a sum by which to tell without the other at hand; and equal but for rounding."""

from __future__ import annotations

import functools
from typing import Any

import torch

__all__ = ["bits", "checksum", "is_dense", "nearly_same", "same_bits"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORD_BYTES = 8
_COLUMNS = 61  # a prime: rows of a matrix begin in different ones
_SLACK = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_PIECE = (1 << 11) * _COLUMNS * _WORD_BYTES  # elements; whole rows of every dtype


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


def nearly_same(a: torch.Tensor, b: Any) -> bool:
    """Equal up to the noise of products of another shape: each element, by what the largest has of it."""
    if type(b) is not torch.Tensor or a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    slack = _SLACK.get(a.dtype, 1e-4)
    a, b = a.detach().double(), b.detach().double()
    return not a.numel() or bool((a - b).abs().max() <= slack * a.abs().max())


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers that depend on every bit, the same wherever the memory begins, computed in next to no memory:
    the plan has none to spare.

    Words of eight bytes are added modulo 2**64: exact in any order, and nothing has to be converted. A sum of
    narrower integers would first copy all of them into wider ones, four times a bf16 tensor's own size. They
    are added in so many columns that what only changed places shows as well.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dim() == 0:
        tensor = tensor.view(1)
    if is_dense(tensor) and not tensor.is_neg():
        flat = tensor.as_strided((tensor.numel(),), (1,))
        if flat.storage_offset() * flat.element_size() % _WORD_BYTES == 0:
            return _sums(flat)
        pieces = torch.split(flat, _PIECE)
    else:
        axis = max(range(tensor.dim()), key=tensor.size)
        rows = max(1, _PIECE * tensor.size(axis) // max(1, tensor.numel()))
        pieces = torch.split(tensor, rows, axis)
    copies = (piece.clone(memory_format=torch.contiguous_format).view(-1) for piece in pieces)
    return functools.reduce(torch.add, map(_sums, copies))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its memory has each of its elements once, and nothing in between."""
    expected = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def _sums(flat: torch.Tensor) -> torch.Tensor:
    """Of each column, and of what is left over after the last whole row. The memory begins at a word."""
    whole = flat.numel() - flat.numel() % (_COLUMNS * _WORD_BYTES // flat.element_size())
    columns = flat[:whole].view(torch.int64).view(-1, _COLUMNS).sum(0)
    return torch.cat((columns, bits(flat[whole:]).sum(dtype=torch.int64).view(1)))
