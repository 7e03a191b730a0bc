"""Cross entropy over rows of hidden states, a chunk of logits at a time, gradients in the same pass.

For a chunk of rows: logits = head(rows), the row's loss, and at once the gradient of the logits, written over
them; from it the gradient of the rows and a sum for each parameter of the head. So no more than one chunk of
logits exists at any time, and backward only multiplies what was found by the gradient that arrives.

What is computed is always the *sum* of the rows' losses; a mean is that sum divided by the number (or weight)
of all rows. So there is one count for all chunks, and the gradients of a chunk do not underflow in fp16
before a gradient scaler has had its say. Rows with `ignore_index` are left out first. A batch in which all
rows are ignored gives what torch gives: 0 for a sum, nan for a mean, and gradients of zero for both.

The fewer rows are left, the less memory it takes; inside `no_row_ignored` the most that any labels can take.

With reduction="none" each row's gradient is known in backward only: the chunks are then run again.

torch 2.13 has F.linear_cross_entropy, which does less (no module as head, no logit scale, no softcap, no fp32
sum of the weight's gradient) and is absent in 2.11: it is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from remat._torch_private import keeps_graph
from remat.errors import RematError
from remat.run.chunk_columns import Columns
from remat.run.chunk_softmax import Fuse, Step, compiled_softmax, row_terms, softmax_in_place
from remat.run.standins import Autocast, GradientSum, Parameters

__all__ = ["Criterion", "Head", "chunk_rows", "chunked_cross_entropy", "no_row_ignored"]

_CUDA_BYTES = 256 << 20
_CUDA_ROWS = 1024  # below, reading and writing the sum of the weight's gradient costs more than the product
_OTHER_BYTES = 64 << 20
_CUDA_COLUMNS = 64  # a multiple of which logits in half precision should have; see _LinearRunner
_FEW = 1 / 16  # of the columns, that may be added for that

_none_ignored: ContextVar[bool] = ContextVar("no_row_ignored", default=False)


@contextmanager
def no_row_ignored() -> Iterator[None]:
    """Inside, every row is computed as if others were ignored: what no labels of that shape take more than.
    The loss is another one. For steps of which only the bytes matter."""
    token = _none_ignored.set(True)
    try:
        yield
    finally:
        _none_ignored.reset(token)


@dataclass(frozen=True)
class Head:
    """One call of a head: what to run on which parameters, and in which autocast state."""

    module: nn.Module
    forward: Callable[[Tensor], Tensor]
    parameters: Parameters
    autocast: Autocast
    dims: int  # of the hidden states that the head was called with

    @property
    def linear(self) -> nn.Linear | None:
        """The module, if its forward is a matrix product and nothing else."""
        module = self.module
        if type(module) is not nn.Linear or getattr(self.forward, "__func__", None) is not nn.Linear.forward:
            return None
        registered = module._parameters
        return module if registered.get("weight") is not None and "bias" in registered else None

    def run(self, rows: Tensor) -> Tensor:
        """Logits of some rows, given to the head with as many dimensions as it was called with."""
        shaped = rows.reshape((1,) * (self.dims - 2) + rows.shape)
        logits = self.forward(shaped)
        return logits.reshape(rows.shape[0], logits.shape[-1])


@dataclass(frozen=True)
class Criterion:
    """The arguments of F.cross_entropy."""

    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    weight: Tensor | None = None


def chunk_rows(
    count: int, vocabulary: int, device: torch.device, rows: int | None, nbytes: int | None
) -> int:
    """Rows per chunk: chunks of equal length whose logits in fp32 take about `nbytes`."""
    if rows is None:
        cuda = device.type == "cuda"
        rows = max(1, (nbytes or (_CUDA_BYTES if cuda else _OTHER_BYTES)) // (4 * vocabulary))
        if nbytes is None and cuda:
            rows = max(rows, _CUDA_ROWS)
    chunks = max(1, -(-count // rows))
    return max(1, -(-count // chunks))


def chunked_cross_entropy(
    head: Head,
    rows: Tensor,
    target: Tensor,
    steps: tuple[Step, ...],
    dtype: torch.dtype,
    vocabulary: int,
    criterion: Criterion,
    size: int,
    fuse: Fuse,
    width: int = 0,
) -> tuple[Tensor, int]:
    """F.cross_entropy(steps(head(rows)), target), and the number of chunks. `rows` (N, H), `target` (N,).

    `dtype`: of the logits after the steps, which is the dtype of the loss. `width`: classes in a chunk, where
    a linear head is cut by columns; 0: by rows, `size` in a chunk.
    """
    labels, keep, ignored = _kept(target, criterion.ignore_index)
    job = _Job(
        head=head,
        target=labels,
        keep=keep,
        ignored=ignored,
        steps=steps,
        dtype=torch.float64 if dtype == torch.float64 else torch.float32,
        vocabulary=vocabulary,
        criterion=criterion,
        size=size,
        fuse=fuse,
        width=width if head.linear is not None else 0,
    )
    if criterion.reduction == "none":
        loss = _Each.apply(job, rows, *head.parameters.trained)  # type: ignore[no-untyped-call]
    else:
        loss = _Sum.apply(job, rows, *head.parameters.trained)  # type: ignore[no-untyped-call]
    if criterion.reduction == "mean":
        loss = loss / job.denominator()
    now = Autocast.now(rows.device.type)
    return loss if now.enabled else loss.to(dtype), job.chunks


def _kept(target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The labels that count, where they are, and which do not; (target, None, None) if all count."""
    ignored = target == ignore_index
    if _none_ignored.get():
        target = target.masked_fill(ignored, 0)
        ignored.fill_(False)
    keep = ignored.logical_not().nonzero()[:, 0]
    if keep.numel() == target.numel() and not _none_ignored.get():
        return target, None, None
    return target[keep], keep, ignored


# ------------------------------------------------------------------------------------------- all chunks


@dataclass(frozen=True)
class _Job:
    """Everything about one loss but the rows. `target` holds no ignored rows; `keep` says where the kept ones
    are, and `ignored` which are not kept."""

    head: Head
    target: Tensor
    keep: Tensor | None
    ignored: Tensor | None
    steps: tuple[Step, ...]
    dtype: torch.dtype  # the softmax is computed in it
    vocabulary: int
    criterion: Criterion
    size: int
    fuse: Fuse
    width: int

    @property
    def chunks(self) -> int:
        if self.width and self.target.numel():
            return -(-self.vocabulary // self.width)
        return -(-self.target.numel() // self.size)

    def denominator(self) -> Any:
        weight = self.criterion.weight
        return self.target.numel() if weight is None else weight[self.target].sum().to(self.dtype)

    def losses(self, rows: Tensor) -> Tensor:
        """Each row's loss, no gradients."""
        found = [torch.zeros(0, dtype=self.dtype, device=rows.device)]
        with torch.no_grad(), self.head.autocast.off():
            columns = self._columns(rows)
            if columns is not None:
                return self._everywhere(columns.normalisers()[1], rows.shape[0])
            runner = _runner(self.head, False, self.chunks)
            for a in range(0, self.target.numel(), self.size):
                logits = runner.logits(self._rows(rows, a))
                found.append(self._softmax(runner, logits, a, None, gradient=False)[0])
            return self._everywhere(torch.cat(found), rows.shape[0])

    def _everywhere(self, kept: Tensor, count: int) -> Tensor:
        """Zero for rows that are ignored."""
        return kept if self.keep is None else kept.new_zeros(count).index_copy_(0, self.keep, kept)

    def _columns(self, rows: Tensor) -> Columns | None:
        """The loss by columns, if it is to be cut so."""
        linear = self.head.linear
        if not self.width or linear is None or not self.target.numel():
            return None
        products = _products_in(self.head, linear)
        kept = rows.detach() if self.keep is None else rows.detach().index_select(0, self.keep)
        smoothing, weight = self.criterion.label_smoothing, self.criterion.weight
        terms = row_terms(self.target, self.dtype, smoothing, weight, self.vocabulary)
        return Columns(
            linear, kept.to(products), self.target, self.steps, terms, products, self.dtype, self.width
        )

    def gradients(
        self, rows: Tensor, needs_rows: bool, upstream: Tensor | None
    ) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
        """Sum of the losses; gradient of the rows, still undefined at ignored ones (`_without_ignored`); one
        per trained parameter. `upstream`: per kept row."""
        total = torch.zeros((), dtype=self.dtype, device=rows.device)
        with torch.no_grad(), self.head.autocast.off():
            columns = self._columns(rows)
            if columns is not None:
                return self._gradients_by(columns, rows, needs_rows, upstream)
            gradient = torch.empty_like(rows) if needs_rows else None
            runner = _runner(self.head, needs_rows, self.chunks)
            for a in range(0, self.target.numel(), self.size):
                logits = runner.logits(self._rows(rows, a))
                loss, slope = self._softmax(runner, logits, a, upstream, gradient=True)
                del logits
                total += loss.sum()
                piece = runner.backward(slope)
                if gradient is not None and piece is not None:
                    if self.keep is None:
                        gradient[a : a + self.size] = piece
                    else:
                        gradient.index_copy_(0, self.keep[a : a + self.size], piece.to(gradient.dtype))
                del slope, piece
        return total, gradient, runner.parameters()

    def _gradients_by(
        self, columns: Columns, rows: Tensor, needs_rows: bool, upstream: Tensor | None
    ) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
        lse, losses = columns.normalisers()
        total = losses.sum()
        del losses
        of_rows, of_parameters = columns.gradients(lse, upstream, needs_rows, self.head.parameters.trained)
        if of_rows is not None and self.keep is not None:
            everywhere = torch.empty_like(rows)
            of_rows = everywhere.index_copy_(0, self.keep, of_rows.to(rows.dtype))
        elif of_rows is not None:
            of_rows = of_rows.to(rows.dtype)
        return total, of_rows, of_parameters

    def _rows(self, rows: Tensor, a: int) -> Tensor:
        """The rows of the chunk that begins at kept row `a`."""
        rows = rows.detach()
        if self.keep is None:
            return rows[a : a + self.size]
        return rows.index_select(0, self.keep[a : a + self.size])

    def _softmax(
        self, runner: _Runner, logits: Tensor, a: int, upstream: Tensor | None, gradient: bool
    ) -> tuple[Tensor, Any]:
        target = self.target[a : a + self.size]
        scale = None if upstream is None else upstream[a : a + self.size]
        smoothing, weight = self.criterion.label_smoothing, self.criterion.weight
        common = (target, self.steps, self.dtype, smoothing, weight, scale)
        if gradient and (self.fuse is True or (self.fuse == "auto" and logits.is_cuda)):
            found = compiled_softmax(logits, *common, self.vocabulary)
            if found is not None:
                return found
        classes = logits[:, : self.vocabulary]
        loss, slope = softmax_in_place(classes, *common, runner.overwrite, gradient)
        wider = logits.shape[1] - self.vocabulary
        return loss, F.pad(slope, (0, wider)) if slope is not None and wider else slope


class _Sum(torch.autograd.Function):
    """Sum of the losses; its gradients are found in forward."""

    @staticmethod
    def forward(ctx: Any, job: _Job, rows: Tensor, *parameters: Tensor) -> Tensor:
        total, gradient, sums = job.gradients(rows, ctx.needs_input_grad[1], None)
        ctx.chunks = job.chunks
        ctx.dtypes = [rows.dtype, *(p.dtype for p in parameters)]
        ctx.save_for_backward(job.ignored, gradient, *sums)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _refuse_second_derivative()
        ignored, gradient, *sums = ctx.saved_tensors
        if not ctx.chunks:  # every row was ignored: no gradient, whatever nan or inf comes from above
            grad = torch.zeros_like(grad)
        overwrite = not keeps_graph()
        found = [
            None if value is None else _scaled(value, grad, dtype, overwrite)
            for value, dtype in zip([gradient, *sums], ctx.dtypes, strict=True)
        ]
        return None, _without_ignored(found[0], ignored), *found[1:]


class _Each(torch.autograd.Function):
    """Each row's loss. The gradients need what arrives in backward, so the chunks run again there."""

    @staticmethod
    def forward(ctx: Any, job: _Job, rows: Tensor, *parameters: Tensor) -> Tensor:
        ctx.job = job
        ctx.save_for_backward(rows, *parameters)
        return job.losses(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _refuse_second_derivative()
        rows, *parameters = ctx.saved_tensors
        job: _Job = ctx.job
        if not keeps_graph():
            ctx.job = None  # who keeps the loss keeps this node, but shall not keep the labels
        upstream = grad if job.keep is None else grad.index_select(0, job.keep)
        _, gradient, sums = job.gradients(rows, ctx.needs_input_grad[1], upstream)
        found = [None if s is None else s.to(p.dtype) for s, p in zip(sums, parameters, strict=True)]
        return None, _without_ignored(gradient, job.ignored), *found


def _without_ignored(gradient: Tensor | None, ignored: Tensor | None) -> Tensor | None:
    """Zero at ignored rows, as in torch, whatever nan or inf came from above."""
    if gradient is None or ignored is None:
        return gradient
    return gradient.masked_fill_(ignored[:, None], 0.0)


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():
        raise RematError(
            "backward(create_graph=True) reached a chunked loss, which has no second derivative: its first "
            "was computed in forward and the logits are gone; take the chunked head off for this step "
            "(handle.remove())"
        )


def _scaled(value: Tensor, factor: Tensor, dtype: torch.dtype, overwrite: bool) -> Tensor:
    """`value * factor` in `dtype`, computed in the wider of the two and rounded once."""
    out = value if overwrite and value.dtype == dtype else torch.empty_like(value, dtype=dtype)
    return torch.mul(value, factor.reshape((1,) * value.dim()), out=out)


# -------------------------------------------------------------------------------------- one chunk's head


class _Runner(Protocol):
    """Runs a head on chunk after chunk and adds up the gradients of its parameters."""

    overwrite: bool  # nothing needs the logits again: they may be written over

    def logits(self, rows: Tensor) -> Tensor:
        """A row of logits for each; columns behind those of the vocabulary mean nothing."""

    def backward(self, slope: Tensor) -> Tensor | None:
        """From the gradient of the latest logits, just as wide: the gradient of its rows, if wanted."""

    def parameters(self) -> list[Tensor | None]:
        """The sum for each of `Parameters.trained`."""


def _runner(head: Head, needs_rows: bool, chunks: int) -> _Runner:
    linear = head.linear
    if linear is None:
        return _ModuleRunner(head, needs_rows, chunks)
    return _LinearRunner(linear, head, needs_rows, chunks)


class _LinearRunner:
    """A plain nn.Linear: products written out, so that nothing is kept and nothing is formed twice.

    In half precision, products of matrices whose rows do not begin at aligned addresses, such as logits of
    50,257 classes, take CUDA three times as long. So the weight is copied with rows of zeros behind it, and
    all that is as wide as the vocabulary gets wider.
    """

    overwrite = True

    def __init__(self, linear: nn.Linear, head: Head, needs_rows: bool, chunks: int) -> None:
        self._cast = _products_in(head, linear)
        plain = type(linear.weight) in (Tensor, nn.Parameter)
        more = _columns_to_add(linear.weight.shape[0], self._cast, linear.weight.device) if plain else 0
        self._weight = _longer(linear.weight.detach(), self._cast, more)
        self._bias = None if linear.bias is None else _longer(linear.bias.detach(), self._cast, more)
        self._needs_rows, self._chunks = needs_rows, chunks
        self._trained = head.parameters.trained
        self._sums = {id(p): GradientSum(p.dtype, chunks) for p in self._trained}
        self._of_weight = self._sums.get(id(linear.weight))
        self._of_bias = None if linear.bias is None else self._sums.get(id(linear.bias))

    def logits(self, rows: Tensor) -> Tensor:
        self._rows = rows.to(self._cast)
        return F.linear(self._rows, self._weight, self._bias)

    def backward(self, slope: Tensor) -> Tensor | None:
        if self._of_weight is not None:
            self._of_weight.add_product(slope, self._rows)
        if self._of_bias is not None:
            self._of_bias.add(slope.sum(0, dtype=self._of_bias.dtype))
        return slope @ self._weight if self._needs_rows else None

    def parameters(self) -> list[Tensor | None]:
        found = [_total(self._sums[id(p)], p, self._chunks) for p in self._trained]
        # No slice: autograd adds in place (to the gradient of a tied embedding) what nobody else refers to.
        return [None if t is None else t.resize_(p.shape) for t, p in zip(found, self._trained, strict=True)]


def _products_in(head: Head, linear: nn.Linear) -> torch.dtype:
    """The dtype that the head multiplies in."""
    if not head.autocast.enabled or linear.weight.dtype == torch.float64:  # autocast leaves fp64 alone
        return linear.weight.dtype
    return head.autocast.dtype or linear.weight.dtype


def _columns_to_add(columns: int, dtype: torch.dtype, device: torch.device) -> int:
    """To a row of logits, so that the next one begins where the device likes it, if they are few."""
    more = -columns % _CUDA_COLUMNS if device.type == "cuda" and dtype.itemsize == 2 else 0
    return more if more <= _FEW * columns else 0


def _longer(tensor: Tensor, dtype: torch.dtype, more: int) -> Tensor:
    """In this type, with so many rows of zeros behind it; the tensor itself, if that is the same."""
    if not more:
        return tensor.to(dtype)
    made = tensor.new_zeros((tensor.shape[0] + more, *tensor.shape[1:]), dtype=dtype)
    made[: tensor.shape[0]] = tensor
    return made


class _ModuleRunner:
    """Any module: it runs on stand-ins for its parameters, and autograd gives each chunk's gradients."""

    overwrite = False

    def __init__(self, head: Head, needs_rows: bool, chunks: int) -> None:
        self._head, self._needs_rows, self._chunks = head, needs_rows, chunks
        self._stand_ins = head.parameters.stand_ins()
        self._sums = [GradientSum(p.dtype, chunks) for p in head.parameters.trained]

    def logits(self, rows: Tensor) -> Tensor:
        self._rows = rows.detach().requires_grad_(self._needs_rows)
        replaced = self._head.parameters.replaced(self._stand_ins)
        with torch.enable_grad(), self._head.autocast.again(), replaced:
            self._logits = self._head.run(self._rows)
        return self._logits.detach()

    def backward(self, slope: Tensor) -> Tensor | None:
        inputs = [self._rows, *self._stand_ins] if self._needs_rows else self._stand_ins
        found = torch.autograd.grad(self._logits, inputs, slope, allow_unused=True)
        del self._logits
        for total, piece in zip(self._sums, found[-len(self._sums) :] if self._sums else (), strict=True):
            total.add(piece)
        return found[0] if self._needs_rows else None

    def parameters(self) -> list[Tensor | None]:
        trained = self._head.parameters.trained
        return [_total(s, p, self._chunks) for s, p in zip(self._sums, trained, strict=True)]


def _total(found: GradientSum, parameter: Tensor, chunks: int) -> Tensor | None:
    """A parameter that the head does not use has no gradient; without any rows it has zeros, as in torch."""
    return found.total if chunks else torch.zeros_like(parameter)
