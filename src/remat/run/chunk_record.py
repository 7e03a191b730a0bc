"""What models do between head and loss, read as: which rows the head gets, and what is done to each number.

An operation on logits is recorded if it leaves the classes of a row together. Then it is one of two things:
a choice or arrangement of rows (a slice, a view), which can be done to the hidden states instead; or
elementwise (a cast, a scale, a tanh), which can be done to a chunk. Everything else is not recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from remat.run.chunk_softmax import Step, apply_steps

__all__ = ["View", "recorded"]


@dataclass(frozen=True)
class View:
    """Logits as rows of hidden states and steps. `meta`: a tensor like them, without memory.

    `classes_second`: the classes were moved from last, (N, d, C), to second, (N, C, d).
    """

    meta: Tensor
    rows: Tensor
    steps: tuple[Step, ...] = ()
    classes_second: bool = False

    @property
    def vocabulary(self) -> int:
        return self.meta.shape[1 if self.classes_second else -1]


def recorded(view: View, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> View | None:
    """What `func(logits, *args, **kwargs)` gives, where that can be said in these terms.

    The same view (`is`) where torch would give the same tensor.
    """
    recorder = _RECORDERS.get(func)
    return None if recorder is None else recorder(view, func, args, kwargs)


def _elementwise(view: View, step: Step) -> View:
    return replace(view, meta=apply_steps((step,), view.meta), steps=(*view.steps, step))


def _cast(view: View, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> View | None:
    dtype = _CASTS.get(func)
    if dtype is not None:
        if args or kwargs:
            return None
    else:
        if kwargs.keys() - {"dtype", "device", "non_blocking"}:
            return None
        for value in (*args, kwargs.get("device"), kwargs.get("dtype")):
            if isinstance(value, torch.dtype):
                dtype = value
            elif not (isinstance(value, bool) or value is None or _is_device(value, view.rows.device)):
                return None
        dtype = dtype or view.meta.dtype
    if not dtype.is_floating_point:
        return None
    return view if dtype == view.meta.dtype else _elementwise(view, ("cast", dtype))


def _is_device(value: Any, device: torch.device) -> bool:
    if not isinstance(value, (str, torch.device)):
        return False
    asked = torch.device(value)
    return asked.type == device.type and asked.index in (None, device.index)


def _scale(view: View, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> View | None:
    if len(args) != 1 or kwargs or type(args[0]) not in (int, float):
        return None
    return _elementwise(view, ("mul" if func in _PRODUCTS else "div", args[0]))


def _tanh(view: View, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> View | None:
    return None if args or kwargs else _elementwise(view, ("tanh", None))


def _contiguous(view: View, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> View | None:
    if args or kwargs:
        return None
    return view if view.meta.is_contiguous() else replace(view, meta=view.meta.contiguous())


def _clone(view: View, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> View | None:
    return None if args or kwargs else replace(view, meta=view.meta.clone())


def _reshape(view: View, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> View | None:
    """Rows stay rows if the last dimension is still the classes: reshaping keeps the order of elements."""
    if view.classes_second or any(isinstance(a, torch.dtype) for a in (*args, *kwargs.values())):
        return None
    try:
        meta = func(view.meta, *args, **kwargs)
    except (RuntimeError, TypeError, IndexError):
        return None  # the real tensor will say what is wrong
    if meta.dim() < 1 or meta.shape[-1] != view.vocabulary:
        return None
    return replace(view, meta=meta, rows=view.rows.reshape(*meta.shape[:-1], view.rows.shape[-1]))


def _index(view: View, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> View | None:
    """An index that leaves the classes whole chooses rows: the same index is applied to the hidden states."""
    index = args[0]
    items = index if isinstance(index, tuple) else (index,)
    if view.classes_second or not _leaves_last_whole(items, view.meta.dim()):
        return None
    rows = view.rows[index]
    if any(isinstance(item, Tensor) for item in items):  # a copy: contiguous
        meta = view.meta.new_empty((*rows.shape[:-1], view.vocabulary))
    else:
        meta = view.meta[index]
    return replace(view, meta=meta, rows=rows)


def _leaves_last_whole(items: tuple[Any, ...], dims: int) -> bool:
    """Whether an index of slices, numbers and index tensors takes all of the last dimension, in order."""
    consumed = 0
    for item in items:
        if type(item) is Tensor and item.dtype in (torch.bool, torch.long):
            consumed += item.dim() if item.dtype == torch.bool else 1
        elif isinstance(item, slice) or (isinstance(item, int) and not isinstance(item, bool)):
            consumed += 1
        elif item is not Ellipsis:
            return False
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    reaches_last = consumed == dims or (bool(dots) and dots[0] != len(items) - 1)
    if len(dots) > 1 or consumed > dims:
        return False
    return not reaches_last or items[-1] == slice(None)


def _move(view: View, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> View | None:
    """(N, d, C) -> (N, C, d), as F.cross_entropy wants the classes of a sequence; and nothing else."""
    if kwargs or view.meta.dim() != 3 or view.classes_second:
        return None
    axes = func(torch.empty((2, 3, 5), device="meta"), *args).shape
    if tuple(axes) != (2, 5, 3):
        return None
    return replace(view, meta=func(view.meta, *args), classes_second=True)


_CASTS = {
    Tensor.float: torch.float32,
    Tensor.double: torch.float64,
    Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
}
_PRODUCTS = {Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.multiply, torch.mul}
_QUOTIENTS = {Tensor.div, Tensor.__truediv__, Tensor.true_divide, torch.div, torch.true_divide}
_RECORDERS: dict[Any, Callable[[View, Any, tuple[Any, ...], dict[str, Any]], View | None]] = {
    **dict.fromkeys([*_CASTS, Tensor.to], _cast),
    **dict.fromkeys([*_PRODUCTS, *_QUOTIENTS], _scale),
    **dict.fromkeys([Tensor.tanh, torch.tanh], _tanh),
    **dict.fromkeys([Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten], _reshape),
    **dict.fromkeys([Tensor.transpose, torch.transpose, Tensor.permute, torch.permute], _move),
    **dict.fromkeys([Tensor.clone, torch.clone, Tensor.detach], _clone),
    Tensor.contiguous: _contiguous,
    Tensor.__getitem__: _index,
}
