"""Plain attributes of modules: numbers, flags, names, None.

A module may say in one of them what its buffers hold: `max_seq_len_cached` beside a table of positions that
grows. So wherever buffers are put back to what they were, these are, too. Of modules without buffers numbers
are (how often they were called) and tensors without a graph (what they remember of the last batch), and not
flags, which say other things (what was built, who is the root). Lists and dictionaries are left alone.

A tensor that a forward leaves in an attribute (its attention map, a loss beside the main one) hangs on the
graph of that forward. `tensors_kept` keeps it there while the module runs again: what the second run would
leave hangs on a graph of its own, which reaches no other region, and which nobody would let go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

__all__ = ["SMALL_BYTES", "Attributes", "Value", "exchange", "plain", "tensors_kept"]

Value = tuple[dict[str, Any], str, Any]  # where, under which name, what

SMALL_BYTES = 16 << 10  # of a tensor whose copy costs next to nothing

_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))
_NUMBERS = frozenset((int, float, complex))
_ABSENT = object()
_OWN = "training"  # a flag that is looked after by itself


class Attributes:
    """Those of these modules, as they are now. `all_state`: all that a forward may read, also whether modules
    train, and tuples and lists of such values."""

    def __init__(self, modules: Iterable[nn.Module], *, all_state: bool = False) -> None:
        self._all_state = all_state
        self._then = [(owner, self._read(owner)) for owner in modules]

    def _read(self, owner: nn.Module) -> dict[str, Any]:
        place = owner.__dict__
        if self._all_state:
            return {n: v for n, v in place.items() if type(v) in _PLAIN or _is_nest(v) or _is_data(v)}
        if owner._buffers:
            return plain(place)
        return {n: v for n, v in place.items() if type(v) in _NUMBERS or _is_data(v)}

    def tensors(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        """Those that a call may write in place: whose, under which name."""
        for owner, then in self._then:
            for name, value in then.items():
                if type(value) is Tensor:
                    yield owner, name, value

    def changed(self) -> list[Value]:
        """What they were, of those that are something else now, that came, or that went."""
        found: list[Value] = []
        for owner, then in self._then:
            place = owner.__dict__
            found += [(place, n, value) for n, value in then.items() if place.get(n, _ABSENT) is not value]
            found += [(place, n, _ABSENT) for n in self._read(owner) if n not in then]
        return found

    def put_back(self) -> None:
        exchange(self.changed())


def exchange(values: Iterable[Value]) -> list[Value]:
    """Put these values in their places; what was there before."""
    before = []
    for place, name, value in values:
        before.append((place, name, place.get(name, _ABSENT)))
        if value is _ABSENT:
            place.pop(name, None)
        else:
            place[name] = value
    return before


@contextmanager
def tensors_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Attributes that hold tensors, and lists of them, are afterwards what they are now; so are those that
    come to hold one inside."""
    before = [(place := module.__dict__, dict(place), _lists(place)) for module in modules]
    try:
        yield
    finally:
        for place, then, lists in before:
            exchange([*_rebound(place, then)])
            for held, items in lists:
                if not _same(held, items) and _has_tensor([*held, *items]):
                    held[:] = items


def _lists(place: dict[str, Any]) -> list[tuple[list[Any], list[Any]]]:
    return [(value, [*value]) for value in place.values() if type(value) is list]


def _rebound(now: dict[str, Any], then: dict[str, Any]) -> Iterator[Value]:
    """What those were that are something else now, if either is made of tensors."""
    for name, value in now.items():
        old = then.get(name, _ABSENT)
        if old is not value and (_has_tensor(value) or _has_tensor(old)):
            yield now, name, old
    for name, old in then.items():
        if name not in now and _has_tensor(old):
            yield now, name, old


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(one is other for one, other in zip(a, b, strict=True))


def _has_tensor(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(isinstance(item, Tensor) for item in value)
    return isinstance(value, Tensor)


def _is_nest(value: Any) -> bool:
    return type(value) in (list, tuple) and all(type(item) in _PLAIN for item in value)


def _is_data(value: Any) -> bool:
    return type(value) is Tensor and value.grad_fn is None and not value.requires_grad


def plain(place: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in place.items() if type(value) in _PLAIN and name != _OWN}
