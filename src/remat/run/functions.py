"""Regions that are functions: `remat.region("name", fn)`.

Where each layer is a function over several modules (two towers with joint attention), no module call marks
the unit that should be planned. The name does: a plan finds the function by it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from remat._torch_private import in_jit_trace
from remat.errors import InputError
from remat.run.wrap import Around

__all__ = ["every_function", "functions", "install_function", "region", "remove_function"]

_installed: dict[str, tuple[Around, weakref.ref[nn.Module]]] = {}
_visitors: list[tuple[Callable[[str], Around], weakref.ref[nn.Module]]] = []


def region(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, marked as a region called `name`: planned by fit, and otherwise exactly `fn`.

    Give a function that runs once per layer a name per layer: remat.region(f"joint.{i}", layer)(...).
    """
    if not isinstance(name, str) or not name:
        raise InputError(f"region name {name!r}; give a text that names this function in plans and errors")
    if not callable(fn):
        raise InputError(
            f"region {name!r} got a {type(fn).__name__}; pass the function: remat.region(name, fn)(x)"
        )

    def run(*args: Any, **kwargs: Any) -> Any:
        if (_installed or _visitors) and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            around, model = _around(name)
            if around is not None and model is not None and not in_jit_trace():
                return around(model, fn, args, kwargs)
        return fn(*args, **kwargs)

    return run


def _around(name: str) -> tuple[Around | None, nn.Module | None]:
    if _visitors:
        make, model = _visitors[-1]
        return make(name), model()
    found = _installed.get(name)
    return (None, None) if found is None else (found[0], found[1]())


def install_function(name: str, around: Around, model: nn.Module) -> None:
    there = _installed.get(name)
    if there is not None and there[1]() is not None and there[1]() is not model:
        raise InputError(
            f"a region named {name!r} is planned for another model; give each model's regions their own names"
        )
    _installed[name] = (around, weakref.ref(model))


def remove_function(name: str) -> None:
    _installed.pop(name, None)


def functions(model: nn.Module) -> dict[str, Around]:
    """The planned functions of this model."""
    return {name: around for name, (around, owner) in _installed.items() if owner() is model}


@contextmanager
def every_function(model: nn.Module, make: Callable[[str], Around]) -> Iterator[None]:
    """Inside, every marked function runs under what `make(name)` gives."""
    _visitors.append((make, weakref.ref(model)))
    try:
        yield
    finally:
        _visitors.pop()
