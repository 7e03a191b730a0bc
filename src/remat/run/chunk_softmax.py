"""Softmax cross entropy of a chunk of logits with its gradient: in place, or compiled into one kernel.

With p = softmax(x), a class weight w (1 if there is none), smoothing s and V classes, a row's loss is

    (1 - s) w_t (lse - x_t)  +  s/V sum_c w_c (lse - x_c),          lse = logsumexp(x)

and its gradient with respect to x_c

    a p_c  -  (1 - s) w_t [c = t]  -  s/V w_c,                      a = (1 - s) w_t + s/V sum_c w_c

where x is what the recorded steps (a cast, a scale, a softcap) make of the head's logits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from remat._torch_private import any_length, in_dispatch_mode

__all__ = [
    "Fuse",
    "RowTerms",
    "Step",
    "apply_steps",
    "backward_steps",
    "compiled_softmax",
    "forward_steps",
    "row_terms",
    "softmax_fusible",
    "softmax_in_place",
]

_LOG = logging.getLogger(__name__)

Step = tuple[Literal["cast", "mul", "div", "tanh"], Any]
"""One elementwise operation between the head and the loss: ("cast", dtype), ("mul", 2.0), ("tanh", None)."""

Fuse = bool | Literal["auto"]
"""Whether softmax and gradient are one compiled kernel. "auto": on CUDA, where a compiler works."""


def apply_steps(steps: tuple[Step, ...], logits: Tensor) -> Tensor:
    for kind, value in steps:
        if kind == "cast":
            logits = logits.to(value)
        elif kind == "tanh":
            logits = torch.tanh(logits)
        else:
            logits = logits * value if kind == "mul" else logits / value
    return logits


def _row_terms(
    target: Tensor, dtype: torch.dtype, smoothing: float, weight: Tensor | None, vocabulary: int
) -> tuple[Any, Any, Any]:
    """(1 - s) w_t, a, s/V w: numbers without class weights, tensors with."""
    if weight is None:
        return 1.0 - smoothing, 1.0, smoothing / vocabulary
    weight = weight.to(dtype)
    own = (1.0 - smoothing) * weight[target]
    return own, own + smoothing / vocabulary * weight.sum(), smoothing / vocabulary * weight


@dataclass(frozen=True)
class RowTerms:
    """The same for code that takes some classes at a time."""

    smoothing: float
    own: Any
    all_of_it: Any
    spread: Any

    def spread_over(self, columns: slice) -> Any:
        """The last of them, for some classes."""
        return self.spread[columns] if isinstance(self.spread, Tensor) else self.spread

    def smoothed(self, x: Tensor, columns: slice) -> Tensor:
        """What smoothing takes off each row's loss, for some classes."""
        spread = self.spread_over(columns)
        return x @ spread if isinstance(spread, Tensor) else x.sum(1) * spread


def row_terms(
    target: Tensor, dtype: torch.dtype, smoothing: float, weight: Tensor | None, vocabulary: int
) -> RowTerms:
    return RowTerms(smoothing, *_row_terms(target, dtype, smoothing, weight, vocabulary))


@dataclass
class Stepped:
    """What the recorded steps made of logits, and what their gradient needs."""

    x: Tensor
    last: torch.dtype  # behind the last step
    dtypes: list[torch.dtype]  # before each
    kept: list[Tensor]  # what each tanh gave


def forward_steps(steps: tuple[Step, ...], logits: Tensor, dtype: torch.dtype, *, overwrite: bool) -> Stepped:
    """The steps on logits, in memory that may be written to, in `dtype`. `overwrite`: that of the logits is
    such."""
    x, kept, dtypes = logits, [], []
    for kind, value in steps:
        dtypes.append(x.dtype)
        if kind == "cast":
            cast = x.to(value)
            overwrite, x = overwrite or cast is not x, cast
        elif kind == "tanh":
            x = x.tanh_() if overwrite else x.tanh()
            kept.append(x)
            overwrite = False  # its gradient needs it
        else:
            out = x if overwrite else torch.empty_like(x)
            x = torch.mul(x, value, out=out) if kind == "mul" else torch.div(x, value, out=out)
            overwrite = True
    wide = x.to(dtype)
    return Stepped(wide if overwrite or wide is not x else x.clone(), x.dtype, dtypes, kept)


def backward_steps(steps: tuple[Step, ...], gradient: Tensor, made: Stepped) -> Tensor:
    """The gradient of the logits, from that of what the steps made of them. Both are written over."""
    x, kept = gradient.to(made.last), list(made.kept)
    for (kind, value), before in zip(reversed(steps), reversed(made.dtypes), strict=True):
        if kind == "cast":
            x = x.to(before)
        elif kind == "tanh":
            x.mul_(kept.pop().square_().neg_().add_(1.0))
        else:
            x = x.mul_(value) if kind == "mul" else x.div_(value)
    return x


def softmax_in_place(
    logits: Tensor,
    target: Tensor,
    steps: tuple[Step, ...],
    dtype: torch.dtype,
    smoothing: float,
    weight: Tensor | None,
    upstream: Tensor | None,
    overwrite: bool,
    gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """Rows' losses and the gradient of `logits`, in one buffer of `dtype` (the logits' own, if possible)."""
    made = forward_steps(steps, logits, dtype, overwrite=overwrite)
    x = made.x
    del logits

    own, all_of_it, spread = _row_terms(target, dtype, smoothing, weight, x.shape[1])
    at_target = x.gather(1, target[:, None])[:, 0]
    smooth = 0.0 if not smoothing else x.sum(1) * spread if weight is None else x @ spread
    top = x.amax(1, keepdim=True)
    x.sub_(top).exp_()
    norm = x.sum(1)
    lse = norm.log() + top[:, 0]
    loss = all_of_it * lse - own * at_target - smooth
    if not gradient:
        return loss, None

    scale: Any = 1.0 if upstream is None else upstream.to(dtype)
    x.mul_((all_of_it * scale / norm)[:, None])
    if smoothing:
        x.sub_(spread if upstream is None else scale[:, None] * spread)
    hit = (own * scale) * torch.ones_like(norm)
    x.scatter_add_(1, target[:, None], -hit[:, None])
    return loss, backward_steps(steps, x, made)


def softmax_fusible(
    logits: Tensor,
    target: Tensor,
    steps: tuple[Step, ...],
    dtype: torch.dtype,
    smoothing: float,
    weight: Tensor | None,
    upstream: Tensor | None,
    classes: int,
) -> tuple[Tensor, Tensor]:
    """The same without in-place operations or scatter: a compiler makes two passes over the logits of it.
    Columns from `classes` on have no part in it, and gradients of zero."""
    x, slope = logits, None
    for kind, value in steps:
        x = apply_steps(((kind, value),), x)
        if kind == "tanh":
            factor: Any = 1.0 - x.to(dtype).square()
        elif kind == "cast":
            continue
        else:
            factor = value if kind == "mul" else 1.0 / value
        slope = factor if slope is None else slope * factor
    x = x.to(dtype)
    own, all_of_it, spread = _row_terms(target, dtype, smoothing, weight, classes)
    column = torch.arange(x.shape[1], device=x.device)[None]
    real, finite = column < classes, x
    if x.shape[1] > classes:
        finite, x = x.where(real, 0.0), x.where(real, -torch.inf)
        spread = real.to(dtype) * spread if weight is None else _widened(spread, x.shape[1])
    top = x.amax(1, keepdim=True)
    lse = (x - top).exp().sum(1).log() + top[:, 0]
    hit = column == target[:, None]
    at_target = x[:, :classes].gather(1, target[:, None])[:, 0]
    loss = all_of_it * lse - own * at_target
    if weight is not None:
        own, all_of_it = own[:, None], all_of_it[:, None]
    gradient = (x - lse[:, None]).exp() * all_of_it - hit.to(dtype) * own
    if smoothing:
        loss = loss - (finite * spread).sum(1)
        gradient = gradient - spread
    if upstream is not None:
        gradient = gradient * upstream.to(dtype)[:, None]
    if slope is not None:
        gradient = gradient * slope
    if x.shape[1] > classes:
        gradient = gradient.where(real, 0.0)
    return loss, gradient.to(logits.dtype)


def _widened(row: Tensor, columns: int) -> Tensor:
    return torch.nn.functional.pad(row, (0, columns - row.shape[0]))


# --------------------------------------------------------------------------------------- compiled softmax


class Compiled:
    """The fusible softmax, compiled. Where that does not work, calls give None, and from then on at once."""

    def __init__(self) -> None:
        self.works: bool | None = None  # None: not tried yet
        self._kernel: Callable[..., tuple[Tensor, Tensor]] | None = None

    def __call__(self, logits: Tensor, target: Tensor, *more: Any) -> tuple[Tensor, Tensor] | None:
        if self.works is False or in_dispatch_mode():  # torch compiles nothing while a mode looks on
            return None
        if self._kernel is None:
            self._kernel = torch.compile(softmax_fusible, fullgraph=True)
        try:
            any_length(logits)  # one kernel for chunks of all lengths, not one for each
            any_length(target)
            found = self._kernel(logits, target, *more)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # what a missing compiler raises differs from version to version
            self.works = False
            _LOG.warning("the chunked loss runs unfused: its softmax could not be compiled: %s", error)
            return None
        self.works = True
        return found


compiled_softmax = Compiled()
