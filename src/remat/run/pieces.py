"""Run a call over pieces of its inputs: what one piece holds for backward is all that is held at once.

Forward runs piece after piece and keeps only the inputs; backward runs each piece again, with the random and
autocast state of its first run, and with attributes and buffers as they were then. The parameters are inputs
of one autograd node: their gradients are summed over the pieces in fp32 and reach each parameter once, as one
gradient, so hooks on it (DDP's, FSDP's) fire once. Right for whatever treats the positions that are cut apart
independently: who calls this has tried that.

What somebody outside takes from the inside (a loss that is left in an attribute, an output that a hook
collects) is of one piece only, and has a graph that ends here. So everything goes into a piece through a
fence, one node that lives as long as anything that depends on it: whether something was taken is seen as
soon as the piece has returned, and a gradient that comes back to the fence raises. What a call leaves in its
module, or writes to a list or dictionary that it was given, would be of one piece, too. All this is seen in
forward (`WholeOnlyError`), and what was changed is put back, so that the call can run as a whole.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from remat._torch_private import flatten, keeps_graph
from remat.attributes import tensors_kept
from remat.errors import RecomputeError, RematError
from remat.run.hosted import Hosted, to_device, to_host
from remat.run.inputs import Leaving
from remat.run.rng import RandomState, restored
from remat.run.standins import Autocast, GradientSum, Parameters, foreign_leaves
from remat.run.state import ModuleState

__all__ = ["Cut", "WholeOnlyError", "in_pieces", "length_along"]

Cut = tuple[int, int]  # the dimension that is cut, and the positions of one piece


class WholeOnlyError(RematError):
    """A call does what pieces cannot; it has left nothing behind, and can still run as a whole."""


def in_pieces(
    name: str,
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    cut: Cut,
    leaving: Leaving | None = None,
) -> Any:
    """`forward(*args, **kwargs)`, which runs `module`. Cut are the tensors that are `length_along` the
    dimension; results are joined along it. `leaving`: inputs that wait on the host."""
    job = _Job(name, module, forward, args, kwargs, cut, leaving)
    given, job.given = job.given, ()
    return job.built(_Pieces.apply(job, *given, *job.parameters.trained))  # type: ignore[no-untyped-call]


def length_along(tensors: Sequence[Tensor], dim: int) -> int:
    """Positions along a dimension: those of the largest tensor that has it; 0 if none does."""
    having = [tensor for tensor in tensors if tensor.dim() > dim]
    return max(having, key=lambda tensor: tensor.numel()).shape[dim] if having else 0


class _Job:
    """One call. It lives as long as its graph, and holds no tensors but by way of autograd and the host."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cut: Cut,
        leaving: Leaving | None,
    ) -> None:
        self.name, self._module, self._forward, self._leaving = name, module, forward, leaving
        self.parameters = Parameters(module)
        self._state = ModuleState(module)
        leaves, self._build = flatten((args, kwargs))
        self.given: Sequence[Tensor] = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._leaves = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._dim, self._size = cut
        self._length = length_along(self.given, self._dim)
        self._is_cut = [t.dim() > self._dim and t.shape[self._dim] == self._length for t in self.given]
        self._needs = [tensor.requires_grad for tensor in self.given]
        self._starts = range(0, self._length, self._size)
        self._devices = tuple({t.device for t in self.given if t.device.type not in ("cpu", "meta")})
        self._autocast = Autocast.now(self._devices[0].type if self._devices else "cpu")
        self._random: list[RandomState | None] = []  # by piece, if it draws
        self._away: list[int] = []  # those of the given that wait on the host
        self._hosted: Hosted | None = None
        self._result: tuple[list[Any], Callable[[list[Any]], Any]] | None = None

    # -- forward

    def first(self, given: Sequence[Tensor]) -> list[Tensor]:
        """All pieces, each let go of when it has returned; their outputs, joined."""
        versions = [_version(tensor) for tensor in given]
        try:
            with tensors_kept(self._module.modules()):
                outputs = self._all_pieces(given)
                self._state.settle(self.name)
                touched = self._state.touched()
            if touched:
                raise WholeOnlyError(
                    f"{self.name} changes {touched} when it runs, so it cannot run in pieces, for each would"
                )
        except WholeOnlyError:
            self._state.rewind()
            raise
        for number, (tensor, version) in enumerate(zip(given, versions, strict=True)):
            if _version(tensor) != version:
                raise RecomputeError(
                    f"{self.name}: input {number} was written in place inside the region, which runs in "
                    "pieces and again in backward; use the operation that is not in-place, or clone it first"
                )
        return outputs

    def _all_pieces(self, given: Sequence[Tensor]) -> list[Tensor]:
        _see_that_no_gradient_is_hooked(self.name, self._module)
        stand_ins = self.parameters.stand_ins()
        outputs: list[Tensor] = []
        for start in self._starts:
            before = RandomState(self._devices)
            with torch.enable_grad():
                piece = self._piece(given, start)
                inside, weights, fence = _fenced(self.name, piece, stand_ins)
                with self.parameters.replaced(weights):
                    result = self._run(inside)
            self._random.append(before if before.now() != before else None)
            if start == 0:
                self._see_that_no_gradient_is_lost(result, [*piece, *stand_ins])
            with torch.no_grad():
                self._join(result, outputs, start)
            del piece, inside, weights, result
            if _is_held(fence, self._module):
                raise WholeOnlyError(
                    f"a tensor from inside of {self.name} is held by something outside of it (a hook, an "
                    "attribute or a list), so it cannot run in pieces: the tensor would be of one piece only"
                )
        return outputs

    def _see_that_no_gradient_is_lost(self, result: Any, known: Sequence[Tensor]) -> None:
        outputs = [leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor)]
        if foreign_leaves(outputs, known):
            raise WholeOnlyError(
                f"{self.name} uses tensors that need gradients and are neither inputs nor parameters of it, "
                "so it cannot run in pieces: these gradients would be lost; register them as parameters of "
                "the module"
            )

    def _size_at(self, start: int) -> int:
        return min(self._size, self._length - start)

    def _piece(self, given: Sequence[Tensor], start: int) -> list[Tensor]:
        """Leaves for one piece, which share the memory of what is given."""
        size = self._size_at(start)
        cut = (
            tensor.narrow(self._dim, start, size) if is_cut else tensor
            for tensor, is_cut in zip(given, self._is_cut, strict=True)
        )
        return [t.detach().requires_grad_(needs) for t, needs in zip(cut, self._needs, strict=True)]

    def _run(self, inside: Sequence[Tensor]) -> Any:
        filled = _filled(self._leaves, inside)
        args, kwargs = self._build(filled)
        result = self._forward(*args, **kwargs)
        left = flatten((args, kwargs))[0]  # these lists and dictionaries are copies of those that were given
        if len(left) != len(filled) or any(now is not then for now, then in zip(left, filled, strict=True)):
            raise WholeOnlyError(
                f"{self.name} writes to a list, a dictionary or a dataclass that it is given, so it cannot "
                "run in pieces: that would be of one piece only"
            )
        return result

    def _join(self, result: Any, outputs: list[Tensor], start: int) -> None:
        """Copy what one piece gave to where it belongs."""
        leaves, build = flatten(result)
        parts = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        others = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        size = self._size_at(start)
        if not parts or any(p.dim() <= self._dim or p.shape[self._dim] != size for p in parts):
            shapes = ", ".join(str(tuple(part.shape)) for part in parts) or type(result).__name__
            raise RematError(
                f"{self.name} gave {shapes} for a piece of {size} positions along dimension {self._dim}; "
                "only what gives tensors with a value per position can run in pieces"
            )
        if self._result is None:
            self._result = others, build
            outputs += [_room_for_all(part, self._dim, self._length) for part in parts]
        elif others != self._result[0]:
            raise RematError(f"{self.name} gave something else for one piece than for another")
        for whole, part in zip(outputs, parts, strict=True):
            whole.narrow(self._dim, start, size).copy_(part)

    def built(self, outputs: Sequence[Tensor]) -> Any:
        """What the call gives, with these tensors in it."""
        assert self._result is not None
        others, build = self._result
        return build(_filled(others, outputs))

    # -- in between

    def hold(self, ctx: Any, given: Sequence[Tensor]) -> None:
        """Until backward: the inputs, and the parameters, so that torch notices if they are written."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            self._away = [number for number, tensor in enumerate(given) if leaving.takes(tensor)]
            self._hosted = to_host([given[number] for number in self._away], leaving.group)
        stay = (None if number in self._away else tensor for number, tensor in enumerate(given))
        ctx.save_for_backward(*stay, *self.parameters.trained)

    def held(self, ctx: Any) -> list[Tensor]:
        given = list(ctx.saved_tensors[: len(self._needs)])  # raises if backward has been here before
        hosted = self._hosted
        if not keeps_graph():  # this lives as long as the loss, but shall not keep what it fetches
            self._hosted = None
        if hosted is not None:
            for number, tensor in zip(self._away, to_device(hosted), strict=True):
                given[number] = tensor.detach()
        return given

    # -- backward

    def again(self, given: Sequence[Tensor], slopes: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of what was given and of the trained parameters, for those of the outputs."""
        trained = self.parameters.trained
        wanted = [number for number, needs in enumerate(self._needs) if needs]
        found = [self._gradient(given[number], self._is_cut[number]) for number in wanted]
        found += [self._gradient(parameter, is_cut=False) for parameter in trained]
        stand_ins = self.parameters.stand_ins()
        self._state.check(self.name)
        with self._state.as_at_entry():
            for start, random in zip(self._starts, self._random, strict=True):
                inside = self._piece(given, start)
                replaced = self.parameters.replaced(stand_ins)
                with restored(random), torch.enable_grad(), self._autocast.again(), replaced:
                    result = self._run(inside)
                inputs = [*(inside[number] for number in wanted), *stand_ins]
                parts = self._gradients_of(result, inputs, slopes, start)
                del inside, result, inputs
                for total, part in zip(found, parts, strict=True):
                    total.add(part, start)
                del parts
        of_given: list[Tensor | None] = [None] * len(given)
        for number, total in zip(wanted, found, strict=False):
            of_given[number] = total.value()
        return [*of_given, *(total.value() for total in found[len(wanted) :])]

    def _gradient(self, tensor: Tensor, is_cut: bool) -> _Joined | _Added:
        return _Joined(tensor, self._dim) if is_cut else _Added(tensor, len(self._starts))

    def _gradients_of(
        self, result: Any, inputs: list[Tensor], slopes: Sequence[Tensor | None], start: int
    ) -> Sequence[Tensor | None]:
        parts = (leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor))
        pairs = [
            (part, slope.narrow(self._dim, start, self._size_at(start)))
            for part, slope in zip(parts, slopes, strict=True)
            if slope is not None and part.requires_grad
        ]
        if not pairs:
            return [None] * len(inputs)
        outputs, given = zip(*pairs, strict=True)
        return torch.autograd.grad(outputs, inputs, given, allow_unused=True)


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: _Job, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = tensors[: len(tensors) - len(job.parameters.trained)]
        outputs = job.first(given)
        job.hold(ctx, given)
        ctx.job = job
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t in outputs if not (t.is_floating_point() or t.is_complex())))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> Any:
        job: _Job = ctx.job
        if torch.is_grad_enabled():
            raise RematError(
                f"backward(create_graph=True) reached {job.name}, which runs in pieces and has no second "
                "derivative; take them off for this step (handle.remove())"
            )
        return None, *job.again(job.held(ctx), slopes)


def _see_that_no_gradient_is_hooked(name: str, module: nn.Module) -> None:
    """The hooks of the module itself are around all pieces."""
    for path, inner in module.named_modules():
        if inner is not module and (inner._backward_hooks or inner._backward_pre_hooks):
            raise WholeOnlyError(
                f"a backward hook of {path} in {name} would see the gradient of one piece at a time, so it "
                "cannot run in pieces"
            )


_TENSOR = object()  # stands for a tensor among the leaves of a nest


def _filled(leaves: Sequence[Any], tensors: Sequence[Tensor]) -> list[Any]:
    following = iter(tensors)
    return [next(following) if leaf is _TENSOR else leaf for leaf in leaves]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # those cannot be written


def _room_for_all(part: Tensor, dim: int, length: int) -> Tensor:
    """An output as long as all pieces, its dimensions in the order in which they lie in this one."""
    shape = [length if place == dim else size for place, size in enumerate(part.shape)]
    order = sorted(range(part.dim()), key=lambda place: -part.stride()[place])
    return torch.empty_permuted(shape, order, dtype=part.dtype, device=part.device)


class _Joined:
    """The gradient of an input that is cut: that of each piece has its place in it."""

    def __init__(self, tensor: Tensor, dim: int) -> None:
        self._total, self._dim = torch.zeros_like(tensor), dim

    def add(self, part: Tensor | None, start: int) -> None:
        if part is not None:
            self._total.narrow(self._dim, start, part.shape[self._dim]).copy_(part)

    def value(self) -> Tensor:
        return self._total


class _Added:
    """The gradient of what all pieces read."""

    def __init__(self, tensor: Tensor, pieces: int) -> None:
        self._sum, self._dtype = GradientSum(tensor.dtype, pieces), tensor.dtype

    def add(self, part: Tensor | None, start: int) -> None:
        self._sum.add(part)

    def value(self) -> Tensor | None:
        return None if self._sum.total is None else self._sum.total.to(self._dtype)


# ------------------------------------------------------------------------------------------------ the fence


class _Post:
    """Held by the fence of one piece and nothing else, so that it lives as long as that."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Fence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, post: _Post, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.post = post
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RecomputeError(
            f"{ctx.post.name} runs in pieces, and a tensor from inside of it is used outside (a hook, an "
            "attribute or a list took it): its gradient would be lost, so those of this step must not be "
            'used. Leave "chunk" out of allow, or give that tensor as an output'
        )


def _fenced(
    name: str, inside: list[Tensor], weights: list[Tensor]
) -> tuple[list[Tensor], list[Tensor], weakref.ref[_Post]]:
    """The same tensors, those that need gradients through one node; and a sign of its life."""
    post = _Post(name)
    inner = [number for number, tensor in enumerate(inside) if tensor.requires_grad]
    passed = _Fence.apply(post, *(inside[number] for number in inner), *weights)  # type: ignore[no-untyped-call]
    through = list(inside)
    for number, tensor in zip(inner, passed, strict=False):
        through[number] = tensor
    return through, list(passed[len(inner) :]), weakref.ref(post)


_IN_CYCLES: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # what they make goes only when it is collected


def _is_held(fence: weakref.ref[_Post], module: nn.Module) -> bool:
    if fence() is None or module in _IN_CYCLES:
        return False
    gc.collect()
    if fence() is not None:
        return True
    _IN_CYCLES.add(module)
    return False
