"""Run a token-wise module (an MLP) over chunks of a long sequence: one chunk's activations live at once
(`run.pieces`). Whether a module treats tokens independently is found out by running it on a slice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from remat._torch_private import in_functorch
from remat.errors import InputError
from remat.run.checkpoint import needs_gradients
from remat.run.pieces import WholeOnlyError, in_pieces
from remat.run.rng import RandomState, restored
from remat.run.same import nearly_same
from remat.run.standins import Parameters
from remat.run.wrap import RegionStatus, bypass

__all__ = ["ChunkedModule", "draws", "independent", "token_wise"]

_OWNER = "remat.apply"
_DROPOUTS = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU,
)  # fmt: skip


# ------------------------------------------------------------------------------------ is it token-wise?


def token_wise(module: nn.Module, example_input: Tensor, dim: int = 1) -> bool:
    """Whether `module(x)` cut along `dim` is `module` of x cut along `dim`, tried on this input with the
    weights that it has, and with others: what mixes positions may have weights that begin as zero.

    False for a module that draws random numbers, carries statistics from call to call, or gives anything but
    one tensor. The module, its gradients and the random state are left as they were.
    """
    if not isinstance(example_input, Tensor) or example_input.dim() <= dim or example_input.shape[dim] < 2:
        raise InputError(f"example_input must be a tensor with at least two positions along dimension {dim}")
    if draws(module) or any(name.startswith("running_") for name, _ in _named_buffers(module)):
        return False
    with bypass():
        if not independent(module, example_input, dim):
            return False
        with Parameters(module).shaken():
            return independent(module, example_input, dim)


def draws(module: nn.Module) -> bool:
    """Whether a module has an active dropout."""
    return any(
        isinstance(m, _DROPOUTS) and m.training and getattr(m, "p", 1.0) > 0.0 for m in module.modules()
    )


def independent(fn: Callable[[Tensor], Any], x: Tensor, dim: int) -> bool:
    """Whether positions of `x` along `dim` do not see each other in `fn`: each half alone gives the same."""
    x = x.detach()
    devices = () if x.device.type in ("cpu", "meta") else (x.device,)
    before = RandomState(devices)
    # Gradients are recorded, though not wanted: autocast would remember a cast made without.
    with torch.enable_grad(), restored(before):
        try:
            whole = fn(x)
            if type(whole) is not Tensor or whole.dim() != x.dim() or whole.shape[dim] != x.shape[dim]:
                return False
            if before.now() != before:
                return False
            half = x.shape[dim] // 2
            for start, length in ((0, half), (half, x.shape[dim] - half)):
                if not nearly_same(whole.narrow(dim, start, length), fn(x.narrow(dim, start, length))):
                    return False
        except (RuntimeError, ValueError, IndexError, TypeError):
            return False  # it cannot run on a part
    return True


def _named_buffers(module: nn.Module) -> list[tuple[str, Any]]:
    return [(name, b) for m in module.modules() for name, b in m._buffers.items() if b is not None]


# ------------------------------------------------------------------------------------ run it in chunks


class ChunkedModule:
    """Runs a token-wise module over chunks of `size` positions along `dim`. Copies start counting anew."""

    owner = _OWNER

    def __init__(self, name: str, size: int, dim: int = 1) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InputError(f"size={size!r}; say how many positions a chunk has, an int of at least 1")
        self.name, self.size, self.dim = name, size, dim
        self.calls = self.chunks = self.plain = 0
        self.reason = ""
        self._taken = ""  # why it never runs in chunks

    def __getstate__(self) -> tuple[str, int, int]:
        return self.name, self.size, self.dim

    def __setstate__(self, state: tuple[str, int, int]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.calls += 1
        why = self._taken or _why_plain(module, args, kwargs, self.dim)
        if not why:
            try:
                output = in_pieces(self.name, module, forward, args, kwargs, (self.dim, self.size))
                self.chunks += -(-args[0].shape[self.dim] // self.size)
                return output
            except WholeOnlyError as error:
                why = self._taken = str(error)
        self.plain += 1
        self.reason = why
        return forward(*args, **kwargs)

    def status(self) -> RegionStatus:
        why = f"{self.chunks} chunks" if self.calls else "not called while gradients were recorded"
        if self.reason:
            why += f"; as a whole {self.plain} times, last because: {self.reason}"
        return RegionStatus(
            name=self.name,
            tower="",
            mode="chunk",
            active=self.calls > self.plain,
            calls=self.calls,
            recomputed=self.calls - self.plain,
            fallbacks=self.plain,
            why=why,
        )


def _why_plain(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dim: int) -> str:
    if in_functorch():
        return "inside a torch.func transform"
    if len(args) != 1 or kwargs or type(args[0]) not in (Tensor, nn.Parameter):
        return "it was not called with one plain tensor"
    if args[0].dim() <= dim:
        return f"its input has {args[0].dim()} dimensions"
    if not needs_gradients(args, (module,)):
        return "nothing needs a gradient"
    return ""
