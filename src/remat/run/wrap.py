"""The one way in which remat touches a module: an object put in place of its `forward`, and taken off again.

An instance attribute named `forward` is enough: hooks, `state_dict`, the class and `isinstance` stay as they
were, and removing the attribute restores the module exactly. Nothing else of remat edits a model's modules.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import nn

from remat._torch_private import in_jit_trace
from remat.errors import InputError, RematError

__all__ = ["Around", "RegionStatus", "WrappedForward", "bypass", "bypassed", "unwrap", "wrap", "wrapped"]


@dataclass(frozen=True)
class RegionStatus:
    """What one wrapped region did, counted while it ran.

    `recomputed` counts the last step only; a step starts with the first forward after a backward.
    The bytes are what autograd held for one call, each storage once and parameters not counted: without
    remat, and with it. None means not counted yet.
    """

    name: str
    tower: str
    mode: str  # "checkpoint", "checkpoint+offload", "recipe", ...
    active: bool
    calls: int = 0
    recomputed: int = 0
    saved_bytes_before: int | None = None
    saved_bytes_after: int | None = None
    fallbacks: int = 0
    why: str = ""
    host_bytes: int = 0  # of what autograd held, how much waits on the host

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Around(Protocol):
    """How a region runs. It never holds the module, so that it can be copied and pickled with it.

    A copy (deepcopy, pickle) starts with fresh counters.
    """

    @property
    def owner(self) -> str:
        """Which public function put it there: "remat.enable" or "remat.apply"."""

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run `forward(*args, **kwargs)`, the module's own bound forward, in this region's way."""

    def status(self) -> RegionStatus: ...


_ABSENT = object()  # the module had no `forward` of its own in its __dict__


class WrappedForward:
    """Stands in a module's `__dict__["forward"]`; calls the `Around` while gradients are recorded.

    The module is held weakly: a strong reference would make a cycle, and `del model` would no longer free it.
    """

    def __init__(self, module: nn.Module, around: Around, previous: Any = _ABSENT) -> None:
        self._module = weakref.ref(module)
        self._previous = previous
        self.around: Around | None = around

    @property
    def module(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise RematError("the module of this forward is gone; keep the model alive while calling it")
        return module

    @property
    def original(self) -> Callable[..., Any]:
        """The module's forward as it was before the wrap."""
        if self._previous is not _ABSENT:
            return self._previous  # type: ignore[no-any-return]
        module = self.module
        return type(module).forward.__get__(module)  # type: ignore[no-any-return]

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        # inspect.signature and functools follow this name; as a property it costs no reference cycle.
        return self.original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        around = self.around
        if around is None or bypassed():
            return self.original(*args, **kwargs)
        module = self.module
        if self._previous is not _ABSENT:
            return around(module, self._previous, args, kwargs)
        return around(module, type(module).forward.__get__(module), args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> WrappedForward:
        # While a module is being copied, memo maps it to its half-made copy; alone, this copies the module
        # too, as the copy of a bound method would.
        module = copy.deepcopy(self.module, memo)
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        previous = self._previous if self._previous is _ABSENT else copy.deepcopy(self._previous, memo)
        return _rebuild(module, copy.deepcopy(self.around, memo), previous is not _ABSENT, previous)

    def __reduce__(self) -> tuple[Any, ...]:
        own = self._previous is not _ABSENT
        return _rebuild, (self.module, self.around, own, self._previous if own else None)

    def __repr__(self) -> str:
        owner = "nobody" if self.around is None else self.around.owner
        return f"<forward of {type(self._module()).__name__}, wrapped by {owner}>"


def bypassed() -> bool:
    """Asked for, or nothing to save, or a compiler is looking on: it must see the model's own code."""
    return torch.compiler.is_compiling() or not torch.is_grad_enabled() or in_jit_trace() or _LOCAL.bypass


class _Local(threading.local):
    bypass = False


_LOCAL = _Local()


@contextmanager
def bypass() -> Iterator[None]:
    """Inside, on this thread, wrapped modules run their own forward: the untouched step to compare with."""
    before = _LOCAL.bypass
    _LOCAL.bypass = True
    try:
        yield
    finally:
        _LOCAL.bypass = before


def _rebuild(module: nn.Module, around: Around | None, own: bool, previous: Any) -> WrappedForward:
    made = WrappedForward.__new__(WrappedForward)
    made._module = weakref.ref(module)
    made._previous = previous if own else _ABSENT
    made.around = around
    return made


def wrapped(module: nn.Module) -> WrappedForward | None:
    """The wrapper that stands in this module, or None."""
    forward = module.__dict__.get("forward")
    return forward if isinstance(forward, WrappedForward) else None


def wrap(module: nn.Module, around: Around) -> None:
    """Let `around` run this module's forward from now on. The same owner may replace its own wrapper."""
    there = wrapped(module)
    if there is not None and there.around is not None:
        if there.around.owner != around.owner:
            raise InputError(
                f"{type(module).__name__} is wrapped by {there.around.owner} already: {around.owner} cannot "
                f"wrap it too; undo the first with {_UNDO.get(there.around.owner, 'its own remove function')}"
            )
        there.around = around
        return
    module.forward = WrappedForward(module, around, module.__dict__.get("forward", _ABSENT))


_UNDO = {"remat.enable": "remat.disable(model)", "remat.apply": "handle.remove()"}


def unwrap(module: nn.Module) -> bool:
    """Restore the module's own forward exactly. False if no wrapper of ours stands there (any more)."""
    there = wrapped(module)
    if there is None:
        return False
    if there._previous is _ABSENT:
        del module.__dict__["forward"]
    else:
        module.forward = there._previous
    return True
