"""The chunked head: the logits of a large vocabulary never exist as a whole.

    with chunk_head(model):
        loss = model(**batch).loss      # the model's own loss function, untouched
        loss.backward()

The head module is wrapped so that it returns lazy logits (run.chunk_logits) while gradients are recorded;
F.cross_entropy then computes loss and gradients chunk by chunk (run.chunk_loss). Without gradients, under a
compiler or inside torch.func the head runs as ever, and so does a head that is not a function of each row
alone, or that draws random numbers.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from remat._torch_private import in_functorch
from remat.errors import InputError
from remat.run.chunk_logits import lazy_logits
from remat.run.chunk_loss import Head
from remat.run.chunk_mlp import draws, independent
from remat.run.chunk_softmax import Fuse
from remat.run.standins import Autocast, Parameters, foreign_leaves
from remat.run.wrap import RegionStatus, unwrap, wrap, wrapped
from remat.units import format_bytes

__all__ = ["ChunkedHead", "Counts", "HeadHandle", "chunk_head", "find_head"]

_OWNER = "remat.apply"


@dataclass
class Counts:
    """What a chunked head did. `reason`: why it last ran plainly or was materialised."""

    calls: int = 0
    losses: int = 0
    chunks: int = 0
    materialised: int = 0
    plain: int = 0
    reason: str = ""


class ChunkedHead:
    """Runs a head lazily. A copy (deepcopy, pickle) starts with fresh counters."""

    owner = _OWNER

    def __init__(
        self,
        name: str,
        rows: int | None = None,
        chunk_bytes: int | None = None,
        fuse: Fuse = "auto",
        columns: bool = False,
    ) -> None:
        self.name, self.rows, self.chunk_bytes = name, rows, chunk_bytes
        self.fuse, self.columns = fuse, columns
        self.counts = Counts()
        self._unfit: str | None = None  # why this head cannot be cut into rows; None: not known yet

    def __getstate__(self) -> tuple[str, int | None, int | None, Fuse, bool]:
        return self.name, self.rows, self.chunk_bytes, self.fuse, self.columns

    def __setstate__(self, state: tuple[str, int | None, int | None, Fuse, bool]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.counts.calls += 1
        head = _head(module, forward, args, kwargs)
        if isinstance(head, str):
            return self._plainly(head, forward, args, kwargs)
        hidden = args[0]
        made = _result_of(head, hidden)
        if made is None:
            return self._plainly("its result is not one row of logits per row", forward, args, kwargs)
        if head.linear is None and self._unfit is None:
            self._unfit = _unfit(head, hidden)
        if self._unfit:
            return self._plainly(self._unfit, forward, args, kwargs)
        return lazy_logits(head, hidden, *made, self)

    def _plainly(
        self, why: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.counts.plain += 1
        self.counts.reason = why
        return forward(*args, **kwargs)

    # What becomes of the lazy logits (run.chunk_logits.Watch).

    def chunked(self, chunks: int) -> None:
        self.counts.losses += 1
        self.counts.chunks += chunks

    def materialised(self, why: str, nbytes: int) -> None:
        self.counts.materialised += 1
        self.counts.reason = why
        if self.counts.materialised == 1:
            warnings.warn(
                f"remat: {why} needs the logits of {self.name!r} as a whole, so they were computed: "
                f"{format_bytes(nbytes)}. The result is the plain model's; if the memory matters, use only "
                "the loss, or take metrics from a forward under torch.no_grad(). (Said once for this head.)",
                stacklevel=_level_of_caller(),
            )

    def status(self) -> RegionStatus:
        counts = self.counts
        why = f"{counts.losses} losses in {counts.chunks} chunks"
        if counts.reason:
            why += f"; as a whole {counts.materialised + counts.plain} times, last for: {counts.reason}"
        return RegionStatus(
            name=self.name,
            tower="",
            mode="chunk",
            active=counts.losses > 0,
            calls=counts.calls,
            fallbacks=counts.materialised + counts.plain,
            why=why if counts.calls else "not called while gradients were recorded",
        )


def _level_of_caller() -> int:
    """The stacklevel, for the function that asks, of the first frame that is neither torch's nor remat's."""
    frame: Any = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("torch", "remat"):
        frame, level = frame.f_back, level + 1
    return level


def _head(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Head | str:
    """The call as a value, or why it has to run plainly."""
    if in_functorch():
        return "inside a torch.func transform"
    if len(args) != 1 or kwargs or type(args[0]) not in (Tensor, nn.Parameter):
        return "it was not called with one plain tensor"
    hidden: Tensor = args[0]
    if hidden.dim() < 2 or not hidden.is_floating_point():
        return f"its input is {hidden.dtype} of shape {tuple(hidden.shape)}"
    if hidden.is_cuda and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured, which forbids counting the ignored rows"
    parameters = Parameters(module)
    if not hidden.requires_grad and not parameters.trained:
        return "nothing needs a gradient"
    if any(type(p) not in (Tensor, nn.Parameter) for p in parameters.trained):
        return "its parameters are of a tensor subclass"
    if _is_sharded(module):
        return (
            "it is an FSDP unit of its own, whose parameters are gone before the loss; shard it with the root"
        )
    if draws(module):
        return "it draws random numbers (dropout), which chunks would draw in another order"
    return Head(module, forward, parameters, Autocast.now(hidden.device.type), hidden.dim())


def _is_sharded(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    unit = getattr(fsdp, "FSDPModule", None)
    return unit is not None and any(isinstance(m, unit) for m in module.modules())


def _unfit(head: Head, hidden: Tensor) -> str:
    """Why a module cannot be run row by row, found on a few rows; "" if it can."""
    rows = hidden.detach().reshape(-1, hidden.shape[-1])[:4]
    stand_ins = head.parameters.stand_ins()
    with torch.enable_grad(), head.parameters.replaced(stand_ins):
        if foreign_leaves([head.run(rows)], stand_ins):
            return "it uses tensors that need gradients and are not its parameters"
    if rows.shape[0] > 1:
        alone = independent(head.run, rows, 0)
        with Parameters(head.module).shaken():
            alone = alone and independent(head.run, rows, 0)
        if not alone:
            return "its logits of one row depend on other rows"
    return ""


def _result_of(head: Head, hidden: Tensor) -> tuple[int, torch.dtype] | None:
    """Number of classes and dtype of the head's logits; None if it is not one row of logits per row."""
    linear = head.linear
    if linear is not None and head.autocast.dtype is None and hidden.dtype == linear.weight.dtype:
        return linear.out_features, hidden.dtype
    # Run on no rows, with gradients recorded: autocast would remember a cast made without.
    with torch.enable_grad():
        try:
            none = head.forward(hidden.detach()[:0])
        except (RuntimeError, ValueError, IndexError, TypeError):
            return None
    if type(none) is not Tensor or none.shape[:-1] != hidden[:0].shape[:-1] or not none.is_floating_point():
        return None
    return none.shape[-1], none.dtype


# --------------------------------------------------------------------------------------- on a model


class HeadHandle:
    """A head that runs in chunks, until `remove()` or the end of a `with` block."""

    def __init__(self, module: nn.Module, around: ChunkedHead) -> None:
        self._module, self._around = module, around
        self._wrapper = wrapped(module)

    @property
    def name(self) -> str:
        return self._around.name

    @property
    def counts(self) -> Counts:
        return self._around.counts

    def remove(self) -> None:
        """Give the head its own forward back. Nothing happens if that was done, or if it was wrapped anew."""
        there = wrapped(self._module)
        if there is not None and there.around is self._around:
            unwrap(self._module)
        elif self._wrapper is not None and self._wrapper.around is self._around:
            self._wrapper.around = None  # somebody wrapped it once more: ours stays below, and stands still

    def __enter__(self) -> HeadHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


def chunk_head(
    model: nn.Module,
    *,
    head: str | None = None,
    rows: int | None = None,
    chunk_bytes: int | None = None,
    fuse: Fuse = "auto",
    columns: bool = False,
) -> HeadHandle:
    """Compute the loss of `model` in chunks of its logits, until the handle is removed.

    head:   module path of the head; by default the model's `get_output_embeddings()`.
    rows:   rows (tokens) per chunk; by default so many that a chunk's logits take `chunk_bytes` in fp32
            (by default 256 MiB and at least 1,024 rows on CUDA, 64 MiB elsewhere).
    fuse:   compile softmax and gradient into one kernel: "auto" on CUDA, True where possible, False never.
    columns: cut a linear head by classes instead of rows: less memory, for four products instead of three.
            Other heads are cut by rows all the same.

    Called again for the same head, it replaces the earlier options.
    """
    _check_size("rows", rows)
    _check_size("chunk_bytes", chunk_bytes)
    if fuse not in (True, False, "auto"):
        raise InputError(f"fuse={fuse!r}; say True, False or 'auto'")
    name, module = _find(model, head)
    there = wrapped(module)
    if there is not None and there.around is not None and not isinstance(there.around, ChunkedHead):
        raise InputError(
            f"{name} is wrapped as a region by {there.around.owner}; a head that is chunked cannot be a "
            "region too: leave it out (exclude=), or do not chunk it"
        )
    around = ChunkedHead(name, rows, chunk_bytes, fuse, columns)
    wrap(module, around)
    return HeadHandle(module, around)


def find_head(model: nn.Module) -> tuple[str, nn.Module] | None:
    """The module that makes the logits, by the model's own word (`get_output_embeddings`), with its path."""
    names = {id(module): name for name, module in model.named_modules()}
    for module in model.modules():
        ask = getattr(module, "get_output_embeddings", None)
        if not callable(ask):
            continue
        try:
            found = ask()
        except (AttributeError, NotImplementedError):
            continue
        if isinstance(found, nn.Module) and id(found) in names:
            return names[id(found)], found
    return None


def _find(model: nn.Module, head: str | None) -> tuple[str, nn.Module]:
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}, not an nn.Module")
    if head is None:
        found = find_head(model)
        if found is None:
            raise InputError(
                f"{type(model).__name__} does not name its head (get_output_embeddings() gives none); pass "
                "its module path, as in head='lm_head'"
            )
        return found
    try:
        return head, model.get_submodule(head)
    except AttributeError:
        raise InputError(
            f"head={head!r}: {type(model).__name__} has no such module; its last ones are "
            f"{[name for name, _ in model.named_modules()][-3:]}"
        ) from None


def _check_size(what: str, value: object) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise InputError(f"{what}={value!r}; say an int of at least 1, or leave it out")
