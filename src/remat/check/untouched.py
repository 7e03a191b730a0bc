"""Run steps on somebody's model and leave no trace."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from remat import trees
from remat._torch_private import after_accumulation
from remat.attributes import SMALL_BYTES, Attributes
from remat.errors import InputError, RematError
from remat.layouts import equal

__all__ = [
    "Outside",
    "backward",
    "clear_gradients",
    "leaves_of",
    "parameters_of",
    "remember_buffers",
    "remember_random_state",
    "untouched",
]


@contextmanager
def untouched(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[Outside]:
    """Inside, `.grad` is None everywhere and steps may run; afterwards all is as it was, also after an error.

    Put back: `.grad` (the same tensors with the same values), buffers (same tensors, same values), random
    number generators, train/eval and requires_grad flags. What the user has set to run when a gradient is
    ready (an optimizer that steps in backward) does not run inside. Parameters and optimizer state are not
    copied: they must not be written, and if they were, a RematError says which.

    A step may train more than the model, such as a head beside it. Its gradients are put back if the steps
    inside run `backward` of this file, which finds them in the loss's graph. Buffers of modules outside the
    model cannot be found there: running statistics of such a head see the steps that run inside.
    """
    outside = Outside(model)
    restore = [
        remember_random_state(),
        _flags(model),
        remember_buffers(model),
        _gradients(model.parameters()),
        _hooks_after_accumulation(model.parameters()),
        outside.put_back,
    ]
    versions = _versions(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = None
    outside.remember(parameters_of(optimizer))
    token = _running.set(outside)
    try:
        yield outside
    finally:
        _running.reset(token)
        for put_back in restore:
            put_back()
    written = [name for name, tensor, version in versions if _version(tensor) != version]
    state = _optimizer_tensors(optimizer)
    known = {id(tensor) for _, tensor, _ in versions}
    written += [name for name, tensor in state if id(tensor) not in known]
    if written:
        raise RematError(
            f"the step wrote to {len(written)} tensors that it should only read, first {written[0]}; it must "
            "not run the optimizer or change weights: pass forward and loss only"
        )


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _versions(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[tuple[str, Tensor, int]]:
    named: list[tuple[str, Tensor]] = [(f"parameter {name}", p) for name, p in model.named_parameters()]
    known = {id(parameter) for _, parameter in named}
    named += [("a parameter of the optimizer", p) for p in parameters_of(optimizer) if id(p) not in known]
    return [(name, tensor, _version(tensor)) for name, tensor in (*named, *_optimizer_tensors(optimizer))]


def _optimizer_tensors(optimizer: torch.optim.Optimizer | None) -> list[tuple[str, Tensor]]:
    if optimizer is None:
        return []
    states = [optimizer.state[key] for key in list(optimizer.state)]
    return [("optimizer state", tensor) for state in states for tensor in trees.tensors(state)]


def _gradients(parameters: Iterable[Tensor]) -> Callable[[], None]:
    saved = [(weakref.ref(parameter), parameter.grad) for parameter in parameters]

    def put_back() -> None:
        for reference, grad in saved:
            parameter = reference()
            if parameter is not None:
                parameter.grad = grad

    return put_back


def _hooks_after_accumulation(parameters: Iterable[Tensor]) -> Callable[[], None]:
    taken = []
    for parameter in parameters:
        hooks = after_accumulation(parameter)
        if hooks:
            taken.append((hooks, dict(hooks)))
            hooks.clear()

    def put_back() -> None:
        for hooks, before in taken:
            hooks.update(before)

    return put_back


# ------------------------------------------------------------------------------------- outside the model


class Outside:
    """Leaves that a step's loss depends on and that are no parameters of the model, as they were before.

    Held weakly: a leaf that the step makes itself shall not stay in memory when the step is over.
    """

    def __init__(self, model: nn.Module) -> None:
        self._known = {id(parameter) for parameter in model.parameters()}
        self._leaves: list[weakref.ref[Tensor]] = []
        self._restore: list[Callable[[], None]] = []

    @property
    def leaves(self) -> list[Tensor]:
        return [leaf for reference in self._leaves if (leaf := reference()) is not None]

    def remember(self, leaves: Iterable[Tensor]) -> None:
        """Those that are new start without gradient."""
        alive = self._known | {id(leaf) for leaf in self.leaves}
        new = [leaf for leaf in leaves if id(leaf) not in alive]
        self._restore += [_gradients(new), _hooks_after_accumulation(new)]
        self._leaves += [weakref.ref(leaf) for leaf in new]
        for leaf in new:
            leaf.grad = None

    def put_back(self) -> None:
        for put_back in self._restore:
            put_back()
        self._restore.clear()  # gradients of before shall not stay in memory with this


_running: ContextVar[Outside | None] = ContextVar("untouched", default=None)


def backward(loss: Tensor) -> None:
    """`loss.backward()` of a step that runs inside `untouched`."""
    if not loss.requires_grad:
        raise InputError(
            "the loss needs no gradient: nothing that it is computed from trains. Is every parameter frozen, "
            "was it detached, or computed under torch.no_grad()?"
        )
    outside = _running.get()
    if outside is not None:
        outside.remember(leaves_of(loss))
    loss.backward()  # type: ignore[no-untyped-call]


def clear_gradients(model: nn.Module) -> None:
    """Between two steps inside `untouched`: `.grad` is None everywhere again."""
    outside = _running.get()
    for tensor in (*model.parameters(), *(outside.leaves if outside is not None else ())):
        tensor.grad = None


def leaves_of(loss: Tensor) -> list[Tensor]:
    """The tensors whose `.grad` loss.backward() adds to, each once. (What a reentrant checkpoint runs is not
    in the graph.)"""
    if loss.grad_fn is None:
        return [loss] if loss.requires_grad else []
    stack, seen, found = [loss.grad_fn], {loss.grad_fn}, []
    while stack:
        node = stack.pop()
        leaf = getattr(node, "variable", None)  # of AccumulateGrad
        if isinstance(leaf, Tensor):
            found.append(leaf)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return found


def parameters_of(optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    return [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]


def _flags(model: nn.Module) -> Callable[[], None]:
    training = [(module, module.training) for module in model.modules()]
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]

    def put_back() -> None:
        for module, mode in training:
            module.training = mode
        for parameter, requires_grad in trained:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)

    return put_back


def remember_buffers(model: nn.Module) -> Callable[[], None]:
    """Copies every buffer; the result puts them back: the same tensors with the same values. And so it does
    with plain attributes, which may say what is in a buffer, and small tensors in attributes."""
    attributes = Attributes(model.modules())
    small = [tensor for _, _, tensor in attributes.tensors() if tensor.nbytes <= SMALL_BYTES]
    tables = [(module, dict(module._buffers)) for module in model.modules()]
    saved = [
        (buffer, buffer.detach().clone())
        for buffer in (*model.buffers(), *small)
        if not buffer.is_meta and not isinstance(buffer, FakeTensor)  # these have no values to lose
    ]

    def put_back() -> None:
        attributes.put_back()
        for module, table in tables:
            if not _same(module._buffers, table):
                module._buffers.clear()
                module._buffers.update(table)
        with torch.no_grad():
            for buffer, value in saved:
                # Through .data: autograd graphs of the caller that saved the buffer stay valid.
                # Only if it changed: a buffer that is an expanded view cannot be written at all.
                if not equal(buffer.data, value):
                    buffer.data.copy_(value)

    return put_back


def _same(now: dict[str, Any], before: dict[str, Any]) -> bool:
    return list(now) == list(before) and all(now[name] is before[name] for name in before)


def remember_random_state() -> Callable[[], None]:
    """The state of every generator of Python, numpy and torch; the result puts it back."""
    python, numbers, cpu = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda = torch.cuda.get_rng_state_all() if started else []

    def put_back() -> None:
        random.setstate(python)
        numpy.random.set_state(numbers)
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)

    return put_back
