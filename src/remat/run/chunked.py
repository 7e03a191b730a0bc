"""Run a function over pieces of a long sequence, each checkpointed: one piece's activations live at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from remat._torch_private import flatten
from remat.errors import InputError
from remat.run.checkpoint import checkpoint

__all__ = ["chunked"]


def chunked(fn: Callable[[Tensor], Any], x: Tensor, size: int, dim: int = 1) -> Any:
    """`fn(x)`, computed on chunks of `size` along `dim` and put together again.

    Right for every function that treats positions along `dim` independently (an MLP, a norm, a head). The
    last chunk may be shorter. The result may be a nest of tensors; each is joined along `dim`.
    """
    _check(fn, x, size, dim)
    if x.shape[dim] <= size:
        return checkpoint(fn, x)
    results = [flatten(checkpoint(fn, piece)) for piece in torch.split(x, size, dim)]
    build = results[0][1]
    return build([_join(parts, dim) for parts in zip(*(leaves for leaves, _ in results), strict=True)])


def _join(parts: tuple[Any, ...], dim: int) -> Any:
    if not isinstance(parts[0], Tensor):
        return parts[0]
    if parts[0].dim() == 0:
        raise InputError(
            "fn gave a scalar per chunk, which cannot be joined along dim; return per-position values"
        )
    return torch.cat(parts, dim)


def _check(fn: object, x: object, size: object, dim: object) -> None:
    if not callable(fn):
        raise InputError(f"fn is a {type(fn).__name__}, not a callable")
    if not isinstance(x, Tensor):
        raise InputError(f"x is a {type(x).__name__}, not a tensor; chunked cuts one tensor along dim")
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InputError(f"size={size!r}; say how many positions a chunk has, an int of at least 1")
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise InputError(f"dim={dim!r}, but x has {x.dim()} dimensions {tuple(x.shape)}")
