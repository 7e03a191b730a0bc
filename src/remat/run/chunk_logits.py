"""Logits that are not there yet: a tensor that remembers how it would be computed.

`LazyLogits` has the shape, dtype, device and grad_fn of the logits, and no memory. What models do between the
head and the loss (`.float()`, slices, views, a scale, a softcap) is written down and gives lazy logits again;
`F.cross_entropy` (nn.CrossEntropyLoss calls it) evaluates them chunk by chunk. Anything else gets what the
plain model would have computed: the head is run as a whole, in the grad mode and under the autocast state of
its call, and what was written down is done. From then on every use goes to that tensor, so that in-place
writes and views behave as ever.

Code that does not ask `__torch_function__` (an autograd.Function given the logits, a C++ extension) finds
values through `__torch_dispatch__`, and the gradients that it sends back through the node in the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from remat._torch_private import below_torch_function, wrapper_tensor
from remat.errors import RecomputeError, RematError
from remat.run.chunk_columns import slice_width
from remat.run.chunk_loss import Criterion, Head, chunk_rows, chunked_cross_entropy
from remat.run.chunk_record import View, recorded
from remat.run.chunk_softmax import Fuse, apply_steps
from remat.trees import map_tensors

__all__ = ["LazyLogits", "Watch", "lazy_logits"]


class Watch(Protocol):
    """Told what becomes of lazy logits, and asked how to cut them."""

    rows: int | None
    chunk_bytes: int | None
    fuse: Fuse
    columns: bool

    def chunked(self, chunks: int) -> None: ...

    def materialised(self, why: str, nbytes: int) -> None: ...


class _Call:
    """One call of the head, shared by everything that is derived from its logits."""

    def __init__(self, head: Head, hidden: Tensor, vocabulary: int, watch: Watch) -> None:
        self.head, self.hidden, self.vocabulary, self.watch = head, hidden, vocabulary, watch
        self.version = hidden._version
        self.used = False  # a loss was computed in chunks: no gradient will come through the logits

    def check(self, when: str) -> None:
        self.head.parameters.check(when)
        if self.hidden._version != self.version:
            raise RecomputeError(
                f"the hidden states were written in place after the head was called (version {self.version} "
                f"-> {self.hidden._version}), and {when} would now read other values than the plain model; "
                "write to a copy, or take the chunked head off (handle.remove())"
            )


def lazy_logits(head: Head, hidden: Tensor, vocabulary: int, dtype: torch.dtype, watch: Watch) -> Tensor:
    """The logits of `head(hidden)`, not computed yet. `dtype`: of what the head would return."""
    meta = torch.empty((*hidden.shape[:-1], vocabulary), dtype=dtype, device="meta")
    return _attach(_Recipe(_Call(head, hidden, vocabulary, watch), View(meta, hidden)))


@dataclass(frozen=True)
class _Recipe:
    """How lazy logits come about: from a call of the head, as rows and steps.

    `parent` and `replay` say the same in terms of the logits they were derived from, for the case that those
    exist, and may have been written to. `loose`: not attached to the graph by us (made by detach, or without
    gradients). A custom Function that returns it attaches it (DDP passes every output through one).
    """

    call: _Call
    view: View
    parent: LazyLogits | None = None
    replay: Callable[[Tensor], Tensor] | None = None
    loose: bool = False

    def compute(self, rows: Tensor) -> Tensor:
        """All of it at once, from the rows (and whatever parameters the head has now)."""
        with self.call.head.autocast.again():
            logits = self.call.head.run(rows.reshape(-1, rows.shape[-1]))
        with self.call.head.autocast.off():
            logits = apply_steps(self.view.steps, logits).reshape(*rows.shape[:-1], self.call.vocabulary)
        return logits.transpose(1, 2) if self.view.classes_second else logits


class _Attach(torch.autograd.Function):
    """Puts lazy logits into the graph. Its backward runs only if something took them for plain ones."""

    @staticmethod
    def forward(ctx: Any, recipe: _Recipe, rows: Tensor, *parameters: Tensor) -> LazyLogits:
        ctx.recipe = recipe
        return LazyLogits(recipe)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        recipe: _Recipe = ctx.recipe
        call = recipe.call
        if torch.is_grad_enabled():
            raise RematError(
                "backward(create_graph=True) reached lazy logits that a custom autograd.Function had taken; "
                "take the chunked head off for second derivatives (handle.remove())"
            )
        call.check("backward")
        parameters = call.head.parameters
        with torch.enable_grad():
            rows = recipe.view.rows.detach().requires_grad_(ctx.needs_input_grad[1])
            stand_ins = parameters.stand_ins()
            with parameters.replaced(stand_ins):
                logits = recipe.compute(rows)
            inputs = [rows, *stand_ins] if rows.requires_grad else stand_ins
            found = torch.autograd.grad(logits, inputs, grad, allow_unused=True)
        return None, *(found if rows.requires_grad else (None, *found))


class _Bridge(torch.autograd.Function):
    """Loose logits made real: values, with the gradient sent to whatever attached the loose ones."""

    @staticmethod
    def forward(ctx: Any, loose: LazyLogits, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def _bridge(loose: LazyLogits, values: Tensor) -> Tensor:
    values = values.detach()
    with below_torch_function():  # by now a question to the loose logits would go to what is being made here
        attached = loose.requires_grad
    return _Bridge.apply(loose, values) if attached else values  # type: ignore[no-untyped-call]


def _attach(recipe: _Recipe) -> Tensor:
    trained = recipe.call.head.parameters.trained
    return _Attach.apply(recipe, recipe.view.rows, *trained)  # type: ignore[no-any-return,no-untyped-call]


class LazyLogits(Tensor):
    """Behaves like the logits; computes them only where that cannot be avoided. See the file's header."""

    _recipe: _Recipe
    _real: Tensor | None

    @staticmethod
    def __new__(cls, recipe: _Recipe) -> LazyLogits:
        meta = recipe.view.meta
        made: LazyLogits = wrapper_tensor(
            cls, tuple(meta.shape), meta.stride(), meta.dtype, recipe.view.rows.device
        )
        made._recipe, made._real = recipe, None
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        lazy = args[0] if args and isinstance(args[0], LazyLogits) else None
        if lazy is not None and not lazy._exists():
            if func in _METADATA or (func in _GRADIENT_HOOKS and lazy._recipe.call.used):
                return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
            derived = lazy._record(func, args[1:], kwargs)
            if derived is not None:
                return derived
        if func is Tensor.retain_grad and lazy is not None and lazy._recipe.call.used:
            raise RematError(
                "retain_grad() on logits whose loss was computed in chunks: no gradient passes through them; "
                "call it before the loss, or take the chunked head off (handle.remove())"
            )
        why = _name(func)
        plain = map_tensors(lambda t: t._exist(why) if isinstance(t, LazyLogits) else t, (args, kwargs))
        return func(*plain[0], **plain[1])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Below autograd: values only. The graph above was built on the lazy logits' own node."""
        if func._schema.is_mutable:
            raise RematError(
                f"{func} writes to lazy logits from below __torch_function__, where the write would be lost; "
                "give it logits.contiguous().clone(), or take the chunked head off (handle.remove())"
            )
        plain = map_tensors(
            lambda t: t._value_only(str(func)) if isinstance(t, LazyLogits) else t, (args, kwargs or {})
        )
        return func(*plain[0], **plain[1])

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Lazy logits again, where the operation allows it."""
        recipe = self._recipe
        loose = func is Tensor.detach or not torch.is_grad_enabled()
        if recipe.loose or (loose and func not in _LOOSE):
            return None
        view = recorded(recipe.view, func, args, kwargs)
        if view is None or view is recipe.view:
            return None if view is None else self
        made = _Recipe(recipe.call, view, self, lambda logits: func(logits, *args, **kwargs), loose)
        return LazyLogits(made) if loose else _attach(made)

    # ------------------------------------------------------------------------------------ becoming real

    def _exists(self) -> bool:
        """Whether this, or anything it was derived from, is there: then in-place writes are to be seen."""
        lazy: LazyLogits | None = self
        while lazy is not None:
            if lazy._real is not None:
                return True
            lazy = lazy._recipe.parent
        return False

    def _exist(self, why: str) -> Tensor:
        """The logits as the plain model would have them, graph included; computed once."""
        if self._real is None:
            recipe = self._recipe
            with torch.enable_grad():
                if recipe.parent is not None and recipe.replay is not None:
                    real = recipe.replay(recipe.parent._exist(why))
                    self._real = _bridge(self, real) if recipe.loose else real
                else:
                    recipe.call.check(f"{why} on the logits")
                    with recipe.call.head.autocast.again():
                        real = recipe.call.head.forward(recipe.call.hidden)
                    recipe.call.watch.materialised(why, real.nbytes)
                    self._real = real
        return self._real

    def _value_only(self, why: str) -> Tensor:
        """Values for code below autograd. Not kept: a graph could not be recorded here."""
        if self._real is not None:
            return self._real.detach()
        recipe = self._recipe
        if recipe.parent is not None and recipe.replay is not None and recipe.parent._exists():
            return recipe.replay(recipe.parent._value_only(why)).detach()
        recipe.call.check(f"{why} on the logits")
        with torch.no_grad():
            values = recipe.compute(recipe.view.rows.detach())
        recipe.call.watch.materialised(why, values.nbytes)
        return values


def _name(func: Any) -> str:
    """What to call a torch function in a message: "Tensor.argmax", "torch.softmax"."""
    attribute = getattr(getattr(func, "__self__", None), "__name__", None)
    if attribute is not None:  # the getter of a property
        return f"Tensor.{attribute}"
    name = str(getattr(func, "__qualname__", getattr(func, "__name__", "an operation")))
    return name.replace("_TensorBase.", "Tensor.").replace("TensorBase.", "Tensor.")


# --------------------------------------------------------------------------------------------- the loss


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """F.cross_entropy of lazy logits: in chunks, or plainly where the arguments are out of the ordinary."""
    criterion = Criterion(reduction, ignore_index, label_smoothing, weight)
    legacy = size_average is not None or reduce is not None
    why = "legacy arguments" if legacy else _why_plain(input, target, criterion)
    if why:
        plain = [
            t._exist(f"cross_entropy, {why}") if isinstance(t, LazyLogits) else t
            for t in (input, target, weight)
        ]
        return F.cross_entropy(
            plain[0], plain[1], plain[2], size_average, ignore_index, reduce, reduction, label_smoothing
        )
    recipe: _Recipe = input._recipe
    call, watch = recipe.call, recipe.call.watch
    call.check("the loss")
    rows = recipe.view.rows.reshape(-1, recipe.view.rows.shape[-1])
    size = chunk_rows(rows.shape[0], call.vocabulary, rows.device, watch.rows, watch.chunk_bytes)
    width = 0
    if watch.columns:
        width = slice_width(rows.shape[0], call.vocabulary, rows.device, watch.chunk_bytes)
    loss, chunks = chunked_cross_entropy(
        call.head, rows, target.reshape(-1), recipe.view.steps, input.dtype, call.vocabulary, criterion, size,
        watch.fuse, width,
    )  # fmt: skip
    call.used = True
    watch.chunked(chunks)
    return loss.reshape(target.shape) if reduction == "none" else loss


def _why_plain(logits: Any, target: Any, criterion: Criterion) -> str:
    """Why a loss is not computed in chunks; "" if it is."""
    if not isinstance(logits, LazyLogits):
        return "the logits are not its first argument"
    if logits._exists():
        return "the logits exist already"
    if logits._recipe.loose:
        return "the logits were detached or passed through a custom Function"
    if not torch.is_grad_enabled() or not logits.requires_grad:
        return "no gradient is recorded"
    if type(target) is not Tensor or target.dtype != torch.long or target.device != logits.device:
        return "the target is not a tensor of class indices on the same device"
    second = logits._recipe.view.classes_second
    expected = (logits.shape[0], logits.shape[2]) if second else logits.shape[:-1]
    if target.shape != expected or (logits.dim() != 2 and not second):
        return f"logits {tuple(logits.shape)} with target {tuple(target.shape)}"
    weight = criterion.weight
    if weight is not None and (type(weight) is not Tensor or weight.requires_grad):
        return "the class weights need a gradient"
    if weight is not None and weight.shape != (logits._recipe.call.vocabulary,):
        return f"{tuple(weight.shape)} class weights"
    if criterion.reduction not in ("none", "mean", "sum") or not 0.0 <= criterion.label_smoothing <= 1.0:
        return "its arguments"  # torch says what is wrong with them
    return ""


# Answered without the logits: what is known beforehand.
_METADATA = {
    *(
        getattr(Tensor, name).__get__
        for name in (
            "device", "dtype", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_mkldnn", "is_mps",
            "is_nested", "is_quantized", "is_sparse", "is_sparse_csr", "is_xpu", "itemsize", "layout",
            "nbytes", "ndim", "output_nr", "requires_grad", "shape", "_backward_hooks", "_base", "_version",
        )
    ),
    Tensor.__len__, Tensor.dim, Tensor.element_size, Tensor.is_complex, Tensor.is_contiguous,
    Tensor.is_floating_point, Tensor.is_inference, Tensor.is_signed, Tensor.ndimension, Tensor.nelement,
    Tensor.numel, Tensor.size, Tensor.storage_offset, Tensor.stride,
    torch.is_complex, torch.is_floating_point, torch.numel,
}  # fmt: skip

# Possible without a graph of our own: metrics detach, DDP clones every output inside a custom Function.
_LOOSE = {Tensor.detach, Tensor.clone, torch.clone}

# After the loss, these are about a gradient that will not come (FSDP and DDP register them on every output).
_GRADIENT_HOOKS = {Tensor.register_hook, Tensor.grad.__get__}  # type: ignore[union-attr]
