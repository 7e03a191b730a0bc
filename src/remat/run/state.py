"""What a region's modules carry from call to call: buffers that a forward writes, parameters that it reads.

A recomputation must not count a batch twice (BatchNorm, an exponential average, power iteration), and must
read the values that the first run read. So, while a region runs again, the buffers it writes are replaced by
copies of their values at entry, and put back afterwards. Which buffers those are is learned on a module's
first call, by comparing contents: BatchNorm's kernels write running statistics without telling autograd.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from remat.errors import RecomputeError

__all__ = ["Habits", "ModuleState", "habits", "modules_of", "norms_behind"]

Slot = tuple[str, str]  # (path of the owning submodule, name of the buffer)


@dataclass
class Habits:
    """What one module was seen to do, in one training mode; knowledge about it, not state of any graph."""

    buffers: frozenset[Slot] | None = None  # None: not seen yet
    inputs: frozenset[int] = frozenset()  # positions of the tensor inputs that it writes in place


_HABITS: WeakKeyDictionary[nn.Module, dict[bool, Habits]] = WeakKeyDictionary()
_NORMS: WeakKeyDictionary[nn.Module, list[weakref.ref[nn.Module]]] = WeakKeyDictionary()


def habits(module: nn.Module) -> Habits:
    return _HABITS.setdefault(module, {}).setdefault(module.training, Habits())


class ModuleState:
    """A module's state at the entry of one call."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        known = habits(module)
        slots = _all_slots(module) if known.buffers is None else known.buffers
        self._objects = {slot: _buffers_of(module, slot)[slot[1]] for slot in slots}
        with torch.no_grad():
            self._entry = {slot: value.clone() for slot, value in self._objects.items() if value is not None}
        parameters = [(owner, name, p) for owner in module.modules() for name, p in owner._parameters.items()]
        # torch.func.functional_call puts plain tensors in the place of parameters, for the call only.
        self._lent = [
            (owner, name, p)
            for owner, name, p in parameters
            if p is not None and not isinstance(p, nn.Parameter)
        ]
        self._versions = [
            (owner, name, weakref.ref(p), p._version)
            for owner, name, p in parameters
            if isinstance(p, nn.Parameter) and not p.is_inference()
        ]

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self._entry.values())

    def settle(self) -> None:
        """After the first run: learn what it wrote, and let the rest go."""
        known = habits(self._module)
        if known.buffers is None:
            written = {slot for slot, value in self._entry.items() if self._was_written(slot, value)}
            known.buffers = frozenset(written)
        self._entry = {slot: value for slot, value in self._entry.items() if slot in known.buffers}
        self._objects = {}

    def _was_written(self, slot: Slot, entry: Tensor) -> bool:
        now = _buffers_of(self._module, slot).get(slot[1])
        if now is not self._objects[slot] or now is None:
            return True
        if type(now) is not Tensor or now.is_meta:
            return False  # nothing to compare: fake and meta tensors have no contents
        return not torch.equal(now, entry)

    def check(self, region: str) -> None:
        """The parameters must be what the first run read: an optimizer step in between would go unnoticed."""
        for owner, name, ref, version in self._versions:
            parameter = owner._parameters.get(name)
            if parameter is not None and parameter is ref() and parameter._version != version:
                raise RecomputeError(
                    f"{region}: parameter {name!r} of {type(owner).__name__} was written between forward and "
                    f"backward (version {version} -> {parameter._version}): recomputation would give other "
                    "values; call backward() before optimizer.step() or any other update"
                )

    @contextmanager
    def as_at_entry(self) -> Iterator[None]:
        """Run with buffers as they were at entry, and put the present ones back, written to by nobody."""
        put_back: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for slot, value in self._entry.items():
                buffers, name = _buffers_of(self._module, slot), slot[1]
                put_back.append((buffers, name, buffers[name]))
                buffers[name] = value.clone()
            for owner, name, lent in self._lent:
                if owner._parameters[name] is not lent:
                    put_back.append((owner._parameters, name, owner._parameters[name]))
                    owner._parameters[name] = lent
            yield
        finally:
            for place, name, value in reversed(put_back):
                place[name] = value


def _all_slots(module: nn.Module) -> list[Slot]:
    return [
        (path, name)
        for path, owner in module.named_modules()
        for name, value in owner._buffers.items()
        if value is not None
    ]


def _buffers_of(module: nn.Module, slot: Slot) -> dict[str, Any]:
    return module.get_submodule(slot[0])._buffers


# ------------------------------------------------------------------------- the modules behind a function


def modules_of(fn: Any) -> tuple[nn.Module, ...]:
    """The module that a call of `fn` is a call of, if that is certain: the module itself, a bound method."""
    if isinstance(fn, nn.Module):
        return (fn,)
    if isinstance(fn, functools.partial):
        return modules_of(fn.func)
    owner = getattr(fn, "__self__", None)
    return (owner,) if isinstance(owner, nn.Module) else ()


def norms_behind(fn: Any, args: Sequence[Any]) -> list[nn.Module]:
    """Normalisation layers that a plain function can reach: arguments, closure, defaults, globals it names.

    Which of them it calls is not known, so each is protected while the function runs again.
    """
    roots = [root for place in (*_reach(fn), *args) for root in _as_modules(place)]
    return [norm for root in roots for norm in _norms(root) if norm.training]


def _reach(fn: Any) -> list[Any]:
    if isinstance(fn, functools.partial):
        return [*_reach(fn.func), *fn.args, *fn.keywords.values()]
    if not inspect.isfunction(fn):
        return [fn, getattr(fn, "__self__", None)]
    found = [cell.cell_contents for cell in fn.__closure__ or () if _filled(cell)]
    found += fn.__defaults__ or ()
    found += [fn.__globals__[name] for name in fn.__code__.co_names if name in fn.__globals__]
    return found


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _as_modules(place: Any) -> list[nn.Module]:
    if isinstance(place, nn.Module):
        return [place]
    if isinstance(place, (list, tuple)):
        return [item for item in place if isinstance(item, nn.Module)]
    return modules_of(place) if callable(place) and not isinstance(place, type) else []  # type: ignore[return-value]


def _norms(root: nn.Module) -> list[nn.Module]:
    if root not in _NORMS:  # walking a whole model on every call of a layer would cost more than the layer
        _NORMS[root] = [weakref.ref(m) for m in root.modules() if isinstance(m, _NormBase)]
    return [norm for ref in _NORMS[root] if (norm := ref()) is not None]


@contextmanager
def untouched_statistics(norms: Callable[[], list[nn.Module]]) -> Iterator[None]:
    """Let these layers write to copies of their statistics; in training no output depends on them."""
    put_back = []
    try:
        for norm in norms():
            for name, value in norm._buffers.items():
                if value is not None:
                    put_back.append((norm._buffers, name, value))
        for buffers, name, value in put_back:
            buffers[name] = value.clone()
        yield
    finally:
        for buffers, name, value in put_back:
            buffers[name] = value
