"""Run a token-wise module (an MLP) over chunks of a long sequence: one chunk's activations live at once.

Forward runs chunk after chunk and keeps only the input; backward runs each chunk again, with the random and
autocast state of its first run. The parameters are inputs of one autograd node: their gradients are summed
over the chunks in fp32 and reach each parameter once, as one gradient, so hooks on it (DDP's, FSDP's) fire
once. Whether a module treats tokens independently is found out by running it on a slice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from remat._torch_private import in_functorch
from remat.errors import InputError, RematError
from remat.run.rng import RandomState, restored
from remat.run.standins import Autocast, GradientSum, Parameters, foreign_leaves
from remat.run.wrap import RegionStatus, bypass

__all__ = ["ChunkedModule", "draws", "independent", "token_wise"]

_OWNER = "remat.apply"
_DROPOUTS = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU,
)  # fmt: skip
_SLACK = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


# ------------------------------------------------------------------------------------ is it token-wise?


def token_wise(module: nn.Module, example_input: Tensor, dim: int = 1) -> bool:
    """Whether `module(x)` cut along `dim` is `module` of x cut along `dim`, tried on this input.

    False for a module that draws random numbers, carries statistics from call to call, or gives anything but
    one tensor. The module, its gradients and the random state are left as they were.
    """
    if not isinstance(example_input, Tensor) or example_input.dim() <= dim or example_input.shape[dim] < 2:
        raise InputError(f"example_input must be a tensor with at least two positions along dimension {dim}")
    if draws(module) or any(name.startswith("running_") for name, _ in _named_buffers(module)):
        return False
    with bypass():
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
                if not _close(whole.narrow(dim, start, length), fn(x.narrow(dim, start, length))):
                    return False
        except (RuntimeError, ValueError, IndexError, TypeError):
            return False  # it cannot run on a part
    return True


def _close(a: Tensor, b: Any) -> bool:
    """Equal up to the noise of products of another shape."""
    if type(b) is not Tensor or a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    slack = _SLACK.get(a.dtype, 1e-4)
    a, b = a.detach().double(), b.detach().double()
    return not a.numel() or bool((a - b).abs().max() <= slack * a.abs().max())


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

    def __getstate__(self) -> tuple[str, int, int]:
        return self.name, self.size, self.dim

    def __setstate__(self, state: tuple[str, int, int]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.calls += 1
        why = _why_plain(args, kwargs, self.dim)
        parameters = Parameters(module)
        if not why and not args[0].requires_grad and not parameters.trained:
            why = "nothing needs a gradient"
        if why:
            self.plain += 1
            self.reason = why
            return forward(*args, **kwargs)
        x: Tensor = args[0]
        self.chunks += -(-x.shape[self.dim] // self.size)
        job = _Job(forward, parameters, Autocast.now(x.device.type), self.size, self.dim, self.name)
        return _Chunks.apply(job, x, *parameters.trained)  # type: ignore[no-untyped-call]

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


def _why_plain(args: tuple[Any, ...], kwargs: dict[str, Any], dim: int) -> str:
    if in_functorch():
        return "inside a torch.func transform"
    if len(args) != 1 or kwargs or type(args[0]) not in (Tensor, nn.Parameter):
        return "it was not called with one plain tensor"
    if args[0].dim() <= dim:
        return f"its input has {args[0].dim()} dimensions"
    return ""


class _Job:
    """One call: how to run a chunk, and with which random state."""

    def __init__(
        self,
        forward: Callable[..., Any],
        parameters: Parameters,
        autocast: Autocast,
        size: int,
        dim: int,
        name: str,
    ) -> None:
        self.forward, self.parameters, self.autocast = forward, parameters, autocast
        self.size, self.dim, self.name = size, dim, name
        self.random: list[RandomState | None] = []

    def pieces(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.split(x.detach(), self.size, self.dim)

    def first(self, x: Tensor) -> Tensor:
        """All chunks, without a graph."""
        devices = () if x.device.type in ("cpu", "meta") else (x.device,)
        out: Tensor | None = None
        start = 0
        for piece in self.pieces(x):
            before = RandomState(devices)
            result = self.forward(piece)
            self.random.append(before if before.now() != before else None)
            if type(result) is not Tensor or result.shape[: self.dim + 1] != piece.shape[: self.dim + 1]:
                raise RematError(
                    f"{self.name} gave {_describe(result)} for a chunk of shape {tuple(piece.shape)}; only a "
                    "module that gives one tensor with a value per position can be chunked (see token_wise)"
                )
            if out is None:
                shape = list(result.shape)
                shape[self.dim] = x.shape[self.dim]
                out = result.new_empty(shape)
            out.narrow(self.dim, start, piece.shape[self.dim]).copy_(result)
            start += piece.shape[self.dim]
        assert out is not None, "split gives at least one piece"
        return out

    def again(self, x: Tensor, grad: Tensor, needs_x: bool) -> tuple[Tensor | None, list[Tensor | None]]:
        """The gradients of x and of the trained parameters, chunk by chunk."""
        pieces = self.pieces(x)
        sums = [GradientSum(p.dtype, len(pieces)) for p in self.parameters.trained]
        stand_ins = self.parameters.stand_ins()
        found: list[Tensor] = []
        grads = torch.split(grad, self.size, self.dim)
        for piece, slope, random in zip(pieces, grads, self.random, strict=True):
            leaf = piece.detach().requires_grad_(needs_x)
            replaced = self.parameters.replaced(stand_ins)
            with restored(random), torch.enable_grad(), self.autocast.again(), replaced:
                out = self.forward(leaf)
            inputs = [leaf, *stand_ins] if needs_x else stand_ins
            if foreign_leaves(out, inputs):
                raise RematError(
                    f"{self.name} uses tensors that need gradients and are not its parameters: these "
                    "gradients would be lost; register them as parameters of the module, or do not chunk it"
                )
            slopes = torch.autograd.grad(out, inputs, slope, allow_unused=True)
            for total, part in zip(sums, slopes[int(needs_x) :], strict=True):
                total.add(part)
            if needs_x:
                found.append(torch.zeros_like(leaf) if slopes[0] is None else slopes[0])
        of_parameters = [
            None if s.total is None else s.total.to(p.dtype)
            for s, p in zip(sums, self.parameters.trained, strict=True)
        ]
        return torch.cat(found, self.dim) if needs_x else None, of_parameters


def _describe(result: Any) -> str:
    return f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__


class _Chunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: _Job, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.job = job
        ctx.save_for_backward(x, *parameters)  # the parameters: so that torch notices if they are written
        return job.first(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RematError(
                f"backward(create_graph=True) reached {ctx.job.name}, which runs in chunks and has no second "
                "derivative; take the chunks off for this step (handle.remove())"
            )
        x = ctx.saved_tensors[0]
        of_x, of_parameters = ctx.job.again(x, grad, ctx.needs_input_grad[1])
        return None, of_x, *of_parameters
