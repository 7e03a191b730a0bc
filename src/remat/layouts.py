"""Tensors of any layout: dense, or sparse as the matrices of graph networks are."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["bytes_of", "equal", "parts"]

_BY_ROW = (torch.sparse_csr, torch.sparse_bsr)
_BY_COLUMN = (torch.sparse_csc, torch.sparse_bsc)


def parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The dense tensors that a sparse one is made of; a dense one itself."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in _BY_ROW:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in _BY_COLUMN:
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def bytes_of(tensor: Tensor) -> int:
    """Of its elements; of a sparse tensor, those that it has."""
    return sum(part.numel() * part.element_size() for part in parts(tensor))


def equal(a: Tensor, b: Tensor) -> bool:
    """The same values, also of sparse tensors."""
    if a.layout is not b.layout or a.shape != b.shape:
        return False
    return all(torch.equal(one, other) for one, other in zip(parts(a), parts(b), strict=True))
