"""Cross entropy of a linear head, some classes at a time: all rows of a slice of the logits, twice.

In chunks of rows the gradient of the head's weight is a sum over chunks, which takes as much as the weight in
fp32 while it is added up. A slice of columns has all of its own part of that gradient at once, in one
product: nothing is added up but the gradient of the rows. So this is the way with the least memory, for four
products instead of three: the first pass finds each row's normaliser, the second forms the logits again, and
from them the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from remat.run.chunk_softmax import RowTerms, Step, backward_steps, forward_steps
from remat.run.standins import GradientSum

__all__ = ["Columns", "slice_width"]

_CUDA_BYTES = 64 << 20
_OTHER_BYTES = 16 << 20
_SLICES = 16  # about, at the least
_ALIGNED = 64  # columns: products like it, and every slice but the last has it


def slice_width(rows: int, vocabulary: int, device: torch.device, nbytes: int | None) -> int:
    """Classes in one slice: so many that its logits in fp32 take about `nbytes`. By default a few of all: of
    few rows all logits are little, and beside the weight's gradient they would be most of what is taken."""
    wanted = (nbytes or (_CUDA_BYTES if device.type == "cuda" else _OTHER_BYTES)) // (4 * max(rows, 1))
    width = max(wanted - wanted % _ALIGNED, min(_ALIGNED, max(wanted, 1)))
    if nbytes is None:
        width = min(width, -(-vocabulary // (_SLICES * _ALIGNED)) * _ALIGNED)
    return min(width, vocabulary)


@dataclass(frozen=True)
class Columns:
    """One loss. `rows` and `target` hold no ignored rows; `products` is the dtype that the head multiplies
    in, `dtype` that of the softmax; `width` is of one slice."""

    linear: nn.Linear
    rows: Tensor
    target: Tensor
    steps: tuple[Step, ...]
    terms: RowTerms
    products: torch.dtype
    dtype: torch.dtype
    width: int

    @property
    def vocabulary(self) -> int:
        return self.linear.weight.shape[0]

    def _slices(self) -> Iterator[slice]:
        for start in range(0, self.vocabulary, self.width):
            yield slice(start, min(start + self.width, self.vocabulary))

    def _weight(self, columns: slice) -> Tensor:
        return self.linear.weight.detach()[columns].to(self.products)

    def _logits(self, columns: slice) -> Tensor:
        bias = self.linear.bias
        part = None if bias is None else bias.detach()[columns].to(self.products)
        return F.linear(self.rows, self._weight(columns), part)

    def normalisers(self) -> tuple[Tensor, Tensor]:
        """Each row's logsumexp and its loss."""
        lowest = torch.finfo(self.dtype).min  # not -inf: of a slice of -inf, a difference would be nan
        top = self.target.new_full(self.target.shape, lowest, dtype=self.dtype)
        norm, at_target, smooth = (torch.zeros_like(top) for _ in range(3))
        for columns in self._slices():
            x = forward_steps(self.steps, self._logits(columns), self.dtype, overwrite=True).x
            here, place = self._hits(columns)
            at_target += torch.where(here, x.gather(1, place)[:, 0], 0.0)
            if self.terms.smoothing:
                smooth += self.terms.smoothed(x, columns)
            higher = torch.maximum(top, x.amax(1))
            norm.mul_((top - higher).exp_()).add_(x.sub_(higher[:, None]).exp_().sum(1))
            top = higher
        lse = norm.log_().add_(top)
        return lse, self.terms.all_of_it * lse - self.terms.own * at_target - smooth

    def gradients(
        self, lse: Tensor, upstream: Tensor | None, needs_rows: bool, trained: Sequence[Tensor]
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Of the rows, and of each trained parameter. `upstream`: per row."""
        weight, bias = self.linear.weight, self.linear.bias
        slices = -(-self.vocabulary // self.width)
        of_rows = GradientSum(self.products, slices) if needs_rows else None
        found = {id(p): torch.empty_like(p) for p in trained if p is weight or p is bias}
        scale: Any = 1.0 if upstream is None else upstream.to(self.dtype)
        for columns in self._slices():
            slope = self._slope(columns, lse, scale)
            if id(weight) in found:
                found[id(weight)][columns] = slope.t() @ self.rows
            if bias is not None and id(bias) in found:
                found[id(bias)][columns] = slope.sum(0, dtype=self.dtype)
            if of_rows is not None:
                of_rows.add_product(slope.t(), self._weight(columns))
            del slope
        return None if of_rows is None else of_rows.total, [found.get(id(p)) for p in trained]

    def _slope(self, columns: slice, lse: Tensor, scale: Any) -> Tensor:
        """The gradient of these logits, in their dtype."""
        made = forward_steps(self.steps, self._logits(columns), self.dtype, overwrite=True)
        x = made.x.sub_(lse[:, None]).exp_()
        x.mul_(_column(self.terms.all_of_it * scale))
        if self.terms.smoothing:
            x.sub_(_column(scale) * self.terms.spread_over(columns))
        here, place = self._hits(columns)
        hit = torch.where(here, self.terms.own * scale, 0.0).to(x.dtype)
        x.scatter_add_(1, place, -hit[:, None])
        return backward_steps(self.steps, x, made)

    def _hits(self, columns: slice) -> tuple[Tensor, Tensor]:
        """Which rows have their class here, and where; anywhere, if not."""
        here = (self.target >= columns.start) & (self.target < columns.stop)
        return here, torch.where(here, self.target - columns.start, 0)[:, None]


def _column(value: Any) -> Any:
    return value[:, None] if isinstance(value, Tensor) else value
