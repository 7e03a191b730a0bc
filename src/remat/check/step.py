"""The calling convention: how a batch goes into a model and where the loss comes out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from remat import trees
from remat.errors import InputError

__all__ = [
    "Loss",
    "Output",
    "batch_to",
    "call_model",
    "casting_anew",
    "fingerprint",
    "loss_of",
    "run_step",
    "signature",
    "tensors_of",
]

Loss = Callable[[Any, Any], Tensor]  # (output, batch) -> scalar


def call_model(model: nn.Module, batch: Any) -> Any:
    """Run forward: a mapping is keyword arguments, a tuple or list positional ones, a tensor the only one."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    if isinstance(batch, Tensor):
        return model(batch)
    raise InputError(
        f"batch is a {type(batch).__name__}; give a dict (keyword arguments), a tuple or list (positional) "
        "or a tensor (the only argument)"
    )


def loss_of(output: Any, batch: Any, loss: Loss | None = None) -> Tensor:
    """The scalar to differentiate: `loss(output, batch)`, or what the output itself offers."""
    found: Any
    if loss is not None:
        found = loss(output, batch)
        if not _is_scalar(found):
            raise InputError(f"loss= returned {_describe(found)}; it must return one number as a tensor")
        return found  # type: ignore[no-any-return]
    found = getattr(output, "loss", None)
    if found is None and isinstance(output, Mapping):
        found = output.get("loss")
    if found is None:
        found = output
    if not _is_scalar(found):
        raise InputError(
            f"the model returned {_describe(output)}, and no loss is in it; pass loss=lambda output, batch: "
            "... (for a transformers model, labels in the batch are enough)"
        )
    return found  # type: ignore[no-any-return]


class Output:
    """What the model gives in a step: let go of when there is a loss or, inside of `held`, kept in memory
    while backward runs, as by a loop that says `out = model(batch)`."""

    def __init__(self) -> None:
        self._holding = False
        self._last: Any = None

    def see(self, output: Any) -> Any:
        if self._holding:
            self._last = output
        return output

    @contextmanager
    def held(self) -> Iterator[None]:
        self._holding = True
        try:
            yield
        finally:
            self._holding, self._last = False, None


@contextmanager
def casting_anew() -> Iterator[None]:
    """Inside, autocast has no casts from before, and those made inside are let go of at the end: as in a loop
    that opens it around each forward. Where the caller has it open around many steps, each step but the first
    would find weights cast already, by steps that a training loop does not run."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@casting_anew()
def run_step(model: nn.Module, batch: Any, loss: Loss | None = None, output: Output | None = None) -> Tensor:
    """Forward and loss; the caller runs backward."""
    found = call_model(model, batch)
    return loss_of(found if output is None else output.see(found), batch, loss)


def tensors_of(batch: Any) -> list[Tensor]:
    """Every tensor of the batch, in order."""
    return trees.tensors(_plain(batch))


def batch_to(batch: Any, device: str | torch.device) -> Any:
    """The same batch on another device."""
    return trees.map_tensors(lambda tensor: tensor.to(device), _plain(batch))


def fingerprint(model: nn.Module) -> str:
    """A digest of names, shapes and dtypes of parameters and buffers: which model this is, not its values."""
    digest = hashlib.sha256()
    for kind, named in (
        ("parameter", model.named_parameters(remove_duplicate=False)),
        ("buffer", model.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in sorted(named, key=lambda item: item[0]):
            digest.update(f"{kind} {name} {_describe(tensor)}\n".encode())
    return digest.hexdigest()[:16]


def signature(batch: Any) -> str:
    """The batch's tree, shapes and dtypes as text: '{input_ids: int64[4, 256], labels: int64[4, 256]}'."""
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{key}: {signature(item)}" for key, item in batch.items()) + "}"
    if isinstance(batch, (tuple, list)):
        left, right = "()" if isinstance(batch, tuple) else "[]"
        return left + ", ".join(map(signature, batch)) + right
    if batch is None or isinstance(batch, (bool, int, float, str)):
        return repr(batch)
    return _describe(batch)


def _plain(batch: Any) -> Any:
    # transformers' BatchEncoding is a mapping but no dict.
    return dict(batch) if isinstance(batch, Mapping) and not isinstance(batch, dict) else batch


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"a {type(value).__name__}"
