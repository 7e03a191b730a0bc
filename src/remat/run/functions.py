"""Regions that are functions: `remat.region("name", fn)`.

Where each layer is a function over several modules (two towers with joint attention), no module call marks
the unit that should be planned. The name does: a plan finds the function by it.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from remat.errors import InputError
from remat.run.wrap import Around, bypassed

__all__ = [
    "called_functions",
    "every_function",
    "functions",
    "install_function",
    "region",
    "remove_function",
]

_installed: dict[str, tuple[Around, weakref.ref[nn.Module]]] = {}
_visitors: list[tuple[Callable[[str], Around], weakref.ref[nn.Module]]] = []

_noted: list[list[str]] = []


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
        if _noted:
            _noted[-1].append(name)
        if (_installed or _visitors) and not bypassed():
            around, model = _around(name)
            if around is not None and model is not None and _belongs(fn, args, model):
                return around(model, fn, args, kwargs)
        return fn(*args, **kwargs)

    return run


# The modules of a planned model; a set of weak references, made again where one is missing.
_members: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[nn.Module]] = weakref.WeakKeyDictionary()


def _belongs(fn: Callable[..., Any], args: tuple[Any, ...], model: nn.Module) -> bool:
    """Names are shared by all models of a class, and by copies: only the planned one's functions are planned.

    Where no module stands behind the function, nothing speaks against it.
    """
    behind = [thing for thing in (*_behind(fn), *args) if isinstance(thing, nn.Module)]
    known = _members.get(model)
    if known is not None and all(module in known for module in behind):
        return True
    known = _members[model] = weakref.WeakSet(model.modules())
    return all(module in known for module in behind)


def _behind(fn: Any) -> list[Any]:
    """What a function is bound to, was given beforehand or closes over."""
    if isinstance(fn, functools.partial):
        return [*_behind(fn.func), *fn.args, *fn.keywords.values()]
    found = [fn, getattr(fn, "__self__", None)]
    for cell in getattr(fn, "__closure__", None) or ():
        try:
            content = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        found += _behind(content) if inspect.isroutine(content) and content is not fn else [content]
    return found


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
def called_functions() -> Iterator[list[str]]:
    """The names of all marked functions that are called inside, also where no gradients are computed."""
    _noted.append([])
    try:
        yield _noted[-1]
    finally:
        _noted.pop()


@contextmanager
def every_function(model: nn.Module, make: Callable[[str], Around]) -> Iterator[None]:
    """Inside, every marked function runs under what `make(name)` gives."""
    _visitors.append((make, weakref.ref(model)))
    try:
        yield
    finally:
        _visitors.pop()
