"""What a region's modules carry from call to call: buffers that a forward writes, parameters that it reads.

A recomputation must not count a batch twice (BatchNorm, an exponential average, power iteration), and must
read the values that the first run read. So, while a region runs again, its attributes (numbers, flags, names
of adapters, tensors without a graph) and its buffers are those of its entry: copies of those that it may
write, nothing in the place of one that it made itself.
Tensors that the first run left in attributes are there afterwards, too.
Which buffers a module writes is learned on its first call, by comparing contents, for not every write tells
autograd (BatchNorm's kernels, `.data`). A later call may write others, so small buffers are copied every
time, and the large ones that are believed to be only read are watched: a write that autograd counts is an
error, not a wrong gradient.
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
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _NormBase

from remat.attributes import SMALL_BYTES, Attributes, Value, exchange, tensors_kept
from remat.errors import RecomputeError
from remat.layouts import bytes_of, equal

__all__ = ["Habits", "ModuleState", "habits", "modules_of", "norms_behind"]

Slot = tuple[str, str]  # (path of the owning submodule, name of the buffer)
Owned = tuple[int, str]  # (which submodule, name of the attribute)


@dataclass
class Habits:
    """What one module was seen to do, in one training mode; knowledge about it, not state of any graph."""

    seen: bool = False
    written: frozenset[Slot] = frozenset()  # buffers that a call wrote
    read: frozenset[Slot] = frozenset()  # buffers that a call left as they were; in neither: not seen yet
    assumed: frozenset[Slot] = (
        frozenset()
    )  # of those seen without values (fake): read, as far as versions say
    inputs: frozenset[int] = frozenset()  # positions of the tensor inputs that it writes in place
    attributes: frozenset[Owned] = frozenset()  # those whose tensors it was seen with
    in_place: frozenset[Owned] = frozenset()  # of them those that it writes in place


_HABITS: WeakKeyDictionary[nn.Module, dict[bool, Habits]] = WeakKeyDictionary()
_NORMS: WeakKeyDictionary[nn.Module, list[weakref.ref[nn.Module]]] = WeakKeyDictionary()


def habits(module: nn.Module) -> Habits:
    return _HABITS.setdefault(module, {}).setdefault(module.training, Habits())


class _Buffer:
    """One buffer at the entry of a call, and its copy if one was made."""

    __slots__ = ("copy", "owner", "slot", "tensor", "version")

    def __init__(self, owner: nn.Module, slot: Slot, tensor: Tensor) -> None:
        self.owner, self.slot, self.tensor, self.version = owner, slot, tensor, _version(tensor)
        self.copy: Tensor | None = None

    @property
    def has_values(self) -> bool:
        return not (self.tensor.is_meta or isinstance(self.tensor, FakeTensor))

    def is_copied_by(self, known: Habits) -> bool:
        """If it may be written, also by kernels that do not count it, or if it costs next to nothing."""
        read = self.slot in known.read or (self.slot in known.assumed and not self.has_values)
        if _is_thawed(self.owner):
            return True
        if read and _is_norm(self.owner):
            return False  # frozen ones are many, and never written
        if self.tensor.requires_grad:
            return not read  # functional_call lent it: a copy is not what the graph knows
        return not read or bytes_of(self.tensor) <= SMALL_BYTES

    def tells_of_a_write(self) -> bool:
        """Without looking at its contents; statistics of norms are written by kernels that tell nobody."""
        now = self.owner._buffers.get(self.slot[1])
        return now is not self.tensor or _version(now) != self.version or _is_thawed(self.owner)

    def was_written(self) -> bool:
        """Compares contents, which waits for the device: once for each buffer."""
        if self.tells_of_a_write():
            return True
        now = self.tensor
        if type(now) is not Tensor or now.is_meta or self.copy is None:
            return False  # contents that cannot be compared, or none
        return not equal(now, self.copy)

    def __str__(self) -> str:
        return f"buffer {self.slot[1]!r} of {type(self.owner).__name__}"


class _Held:
    """A tensor without a graph in an attribute at the entry of a call, and its copy if the call may write it
    in place: one that did so before, or a small one in its first call."""

    __slots__ = ("copy", "name", "place", "slot", "tensor", "version")

    def __init__(self, owner: nn.Module, name: str, tensor: Tensor, known: Habits) -> None:
        self.place, self.name, self.slot = owner.__dict__, name, (id(owner), name)
        self.tensor, self.version = tensor, _version(tensor)
        new = self.slot not in known.attributes and bytes_of(tensor) <= SMALL_BYTES
        # What is written by way of a view is read by way of another tensor: a copy would come between them.
        may_be_written = not tensor._is_view() and (new or self.slot in known.in_place)
        with torch.no_grad():
            self.copy = tensor.clone() if may_be_written else None

    def was_written(self) -> bool:
        return _version(self.tensor) != self.version

    def settle(self, known: Habits) -> None:
        known.attributes |= {self.slot}
        if self.was_written():
            known.in_place |= {self.slot}
        else:
            self.copy = None


class ModuleState:
    """A module's state at the entry of one call."""

    def __init__(self, module: nn.Module) -> None:
        self._habits = known = habits(module)
        self._tables: list[tuple[nn.Module, dict[str, Tensor | None]]] = []
        self._buffers: list[_Buffer] = []
        # torch.func.functional_call puts plain tensors in the place of parameters, for the call only.
        self._lent: list[tuple[nn.Module, str, Tensor]] = []
        self._versions: list[tuple[nn.Module, str, weakref.ref[Tensor], int]] = []
        modules = list(module.named_modules())
        self._attributes = Attributes((owner for _, owner in modules), all_state=True)
        self._held = [_Held(owner, name, tensor, known) for owner, name, tensor in self._attributes.tensors()]
        for path, owner in modules:
            table = owner._buffers
            self._tables.append((owner, dict(table)))
            for name, tensor in table.items():
                if tensor is not None:
                    self._buffers.append(_Buffer(owner, (path, name), tensor))
            for name, p in owner._parameters.items():
                if isinstance(p, nn.Parameter):
                    if not p.is_inference():
                        self._versions.append((owner, name, weakref.ref(p), p._version))
                elif p is not None:
                    self._lent.append((owner, name, p))
        if self._buffers:
            copies: dict[int, Tensor] = {}  # a buffer that two modules share has one copy
            with torch.no_grad():
                for buffer in self._buffers:
                    if buffer.is_copied_by(known):
                        tensor = buffer.tensor
                        if id(tensor) not in copies:
                            copies[id(tensor)] = tensor.clone()
                        buffer.copy = copies[id(tensor)]

    @property
    def nbytes(self) -> int:
        return sum({id(b.copy): bytes_of(b.copy) for b in self._buffers if b.copy is not None}.values())

    def settle(self, region: str) -> None:
        """After the first run: learn what it wrote, let the rest go. A write that nobody expected raises."""
        known = self._habits
        known.seen = True
        for held in self._held:
            held.settle(known)
        for buffer in self._buffers:
            if buffer.slot not in known.read and buffer.slot not in known.written:
                if buffer.was_written():
                    known.written |= {buffer.slot}
                    continue
                if buffer.has_values:
                    known.read |= {buffer.slot}
                else:
                    known.assumed |= {buffer.slot}
                if not buffer.is_copied_by(known):
                    buffer.copy = None
        thawed = [b for b in self._buffers if b.copy is None and _is_thawed(b.owner)]
        lost = self._lost() + thawed
        if lost:
            slots = {buffer.slot for buffer in lost}
            known.written, known.read = known.written | slots, known.read - slots
            raise RecomputeError(
                f"{region}: {lost[0]} ({bytes_of(lost[0].tensor):,} bytes) was written in this call, and not "
                "in those before, so it was not copied and the region cannot be recomputed from its value at "
                "entry. It is copied from now on, the next call is right: run this step again (the buffer "
                "has been written once already), or leave the module out (exclude=...)"
            )

    def _lost(self) -> list[_Buffer]:
        """Those that were written since, though there is no copy."""
        return [b for b in self._buffers if b.copy is None and _version(b.tensor) != b.version]

    def check(self, region: str) -> None:
        """All must be what the first run read: an optimizer step in between would go unnoticed."""
        for owner, name, ref, version in self._versions:
            parameter = owner._parameters.get(name)
            if parameter is not None and parameter is ref() and parameter._version != version:
                raise RecomputeError(
                    f"{region}: parameter {name!r} of {type(owner).__name__} was written between forward and "
                    f"backward (version {version} -> {parameter._version}): recomputation would give other "
                    "values; call backward() before optimizer.step() or any other update"
                )
        for buffer in self._lost():
            known = self._habits
            known.written, known.read = known.written | {buffer.slot}, known.read - {buffer.slot}
            raise RecomputeError(
                f"{region}: {buffer} was written between forward and backward (version {buffer.version} -> "
                f"{_version(buffer.tensor)}): recomputation would give other values; call backward() before "
                "the update, or run this step again: from now on the buffer is copied at every call"
            )

    def touched(self) -> str:
        """After `settle`: something that the call changed, or ''."""
        for place, name, then in self._attributes.changed():
            now = place.get(name)
            if isinstance(now, Tensor) or isinstance(then, Tensor) or now != then:
                owner = next(owner for owner, _ in self._tables if owner.__dict__ is place)
                return f"attribute {name!r} of {type(owner).__name__}"
        for held in self._held:
            if held.was_written():
                return f"the tensor in attribute {held.name!r}"
        written = self._habits.written
        return next((str(b) for b in self._buffers if b.slot in written or b.tells_of_a_write()), "")

    def rewind(self) -> None:
        """Everything as it was at entry, for the call is made once more."""
        exchange(self._attributes.changed())
        for owner, at_entry in self._tables:
            _fill(owner._buffers, at_entry)
        with torch.no_grad():
            pairs = [(buffer.tensor, buffer.copy) for buffer in self._buffers]
            pairs += [(held.tensor, held.copy) for held in self._held]
            for tensor, copy in pairs:
                if copy is not None and not equal(tensor, copy):
                    tensor.copy_(copy)

    @contextmanager
    def as_at_entry(self) -> Iterator[None]:
        """Run with attributes and buffers as they were at entry, and put the present ones back, written to by
        nobody."""
        put_back: list[tuple[dict[str, Any], dict[str, Any]]] = []
        present: list[Value] = []
        # All of them: one that is now what it was at entry may be changed by this run, too.
        now = Attributes((owner for owner, _ in self._tables), all_state=True)
        try:
            present = exchange(self._attributes.changed())  # by the call, or by whoever came after it
            shared = {id(held.tensor): held.copy.clone() for held in self._held if held.copy is not None}
            written = (held for held in self._held if id(held.tensor) in shared)
            present += exchange((held.place, held.name, shared[id(held.tensor)]) for held in written)
            fresh: dict[int, Tensor] = {}
            copied: dict[nn.Module, dict[str, Tensor]] = {}
            for buffer in self._buffers:
                if buffer.copy is not None:
                    if id(buffer.copy) not in fresh:
                        fresh[id(buffer.copy)] = buffer.copy.clone()
                    copied.setdefault(buffer.owner, {})[buffer.slot[1]] = fresh[id(buffer.copy)]
            for owner, at_entry in self._tables:
                put_back.append((owner._buffers, dict(owner._buffers)))
                _fill(owner._buffers, {**at_entry, **copied.get(owner, {})})
            for owner, name, lent in self._lent:
                parameters: dict[str, Any] = owner._parameters
                if parameters[name] is not lent:
                    put_back.append((parameters, dict(parameters)))
                    parameters[name] = lent
            with tensors_kept(owner for owner, _ in self._tables):
                yield
        finally:
            for place, before in reversed(put_back):
                _fill(place, before)
            now.put_back()
            exchange(reversed(present))


def _is_thawed(owner: nn.Module) -> bool:
    return isinstance(owner, _NormBase) and owner.training


def _is_norm(owner: nn.Module) -> bool:
    """One of torch's own, which in eval mode only read."""
    return isinstance(owner, _NormBase) and type(owner).__module__.startswith("torch.nn.")


def _fill(place: dict[str, Any], values: dict[str, Any]) -> None:
    """In their order: it is that of the state dict."""
    if place or values:
        place.clear()
        place.update(values)


def _version(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.is_inference() else tensor._version  # those cannot be written


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
