"""Run steps on somebody's model and leave no trace."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from remat import trees
from remat._torch_private import after_accumulation
from remat.errors import RematError

__all__ = ["remember_buffers", "remember_random_state", "untouched"]


@contextmanager
def untouched(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
    """Inside, `.grad` is None everywhere and steps may run; afterwards all is as it was, also after an error.

    Put back: `.grad` (the same tensors with the same values), buffers (same tensors, same values), random
    number generators, train/eval and requires_grad flags. What the user has set to run when a gradient is
    ready (an optimizer that steps in backward) does not run inside. Parameters and optimizer state are not
    copied: they must not be written, and if they were, a RematError says which.
    """
    restore = [
        remember_random_state(),
        _flags(model),
        remember_buffers(model),
        _gradients(model),
        _hooks_after_accumulation(model),
    ]
    versions = _versions(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = None
    try:
        yield
    finally:
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
    named = [(f"parameter {name}", parameter) for name, parameter in model.named_parameters()]
    return [(name, tensor, _version(tensor)) for name, tensor in (*named, *_optimizer_tensors(optimizer))]


def _optimizer_tensors(optimizer: torch.optim.Optimizer | None) -> list[tuple[str, Tensor]]:
    if optimizer is None:
        return []
    states = [optimizer.state[key] for key in list(optimizer.state)]
    return [("optimizer state", tensor) for state in states for tensor in trees.tensors(state)]


def _gradients(model: nn.Module) -> Callable[[], None]:
    saved = [(parameter, parameter.grad) for parameter in model.parameters()]

    def put_back() -> None:
        for parameter, grad in saved:
            parameter.grad = grad

    return put_back


def _hooks_after_accumulation(model: nn.Module) -> Callable[[], None]:
    taken = []
    for parameter in model.parameters():
        hooks = after_accumulation(parameter)
        if hooks:
            taken.append((hooks, dict(hooks)))
            hooks.clear()

    def put_back() -> None:
        for hooks, before in taken:
            hooks.update(before)

    return put_back


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
    """Copies every buffer; the result puts them back: the same tensors with the same values."""
    tables = [(module, dict(module._buffers)) for module in model.modules()]
    saved = [
        (buffer, buffer.detach().clone())
        for buffer in model.buffers()
        if not buffer.is_meta and not isinstance(buffer, FakeTensor)  # these have no values to lose
    ]

    def put_back() -> None:
        for module, table in tables:
            if not _same(module._buffers, table):
                module._buffers.clear()
                module._buffers.update(table)
        with torch.no_grad():
            for buffer, value in saved:
                # Through .data: autograd graphs of the caller that saved the buffer stay valid.
                # Only if it changed: a buffer that is an expanded view cannot be written at all.
                if not torch.equal(buffer.data, value):
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
