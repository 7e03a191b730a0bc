"""The size of a batch: which of its dimensions vary, smaller batches made from one, and where a batch that is
new lies among those that were measured."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from remat.check.step import tensors_of
from remat.trees import map_tensors, tensors

__all__ = [
    "Chart",
    "Place",
    "Shapes",
    "doubled",
    "elements",
    "growth_between",
    "lengths_to_try",
    "shapes_of",
    "smaller_batches",
    "text",
]

Shapes = tuple[tuple[str, tuple[int, ...]], ...]  # name of a tensor -> its shape, sorted by name

_LEAST_LENGTH = 8
# Of a length, and at least so much: two smaller sizes, which with the whole one make a parabola.
_SHARES = ((1 / 3, 2 * _LEAST_LENGTH), (1 / 12, _LEAST_LENGTH))
_MULTIPLE = 8  # of lengths that are made up: kernels pad others


def shapes_of(model: nn.Module) -> Callable[[tuple[Any, ...], dict[str, Any]], Shapes]:
    """Reads off a call of the model the shapes of all tensors that have dimensions. Whether an argument is
    passed by name or by position makes no difference."""
    named = [
        name
        for name, parameter in inspect.signature(type(model).forward).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ][1:]

    def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shapes:
        given = {(named[i] if i < len(named) else f"*{i}"): arg for i, arg in enumerate(args)}
        found = []
        for name, argument in (given | kwargs).items():
            if isinstance(argument, torch.Tensor):
                if argument.dim():
                    found.append((name, tuple(argument.shape)))
            elif isinstance(argument, (dict, list, tuple)):
                parts = enumerate(tensors(argument))
                found += [(f"{name}.{i}", tuple(t.shape)) for i, t in parts if t.dim()]
        return tuple(sorted(found))

    return read


def text(shapes: Shapes) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes)


# ----------------------------------------------------------------------------------------- smaller batches


def smaller_batches(batch: Any) -> list[Any]:
    """The beginning of this batch, along its sequences; along its rows where it has no sequences."""
    given, lengths = _with_lengths(batch)
    if lengths:
        made = [{n: _shorter(n, share, least) for n in lengths} for share, least in _SHARES]
        return [_along_sequences(batch, cut) for cut in made if max(cut.values()) < max(lengths)]
    rows = {t.shape[0] for t in given}
    if len(rows) != 1 or max(rows) < 2:
        return []
    (count,) = rows
    fewer = sorted({max(count // 2, 1), max(count // 4, 1)} - {count}, reverse=True)
    return [_mapped(batch, lambda t, n=n: t.narrow(0, 0, n).clone() if t.dim() else t) for n in fewer]  # type: ignore[misc]


def lengths_to_try(batch: Any) -> list[Any]:
    """The same batch at lengths just above those that models pad to: 2^k + 1 and 3 * 2^k + 1."""
    _, lengths = _with_lengths(batch)
    if not lengths:
        return []
    longest = max(lengths)
    steps = sorted({n + 1 for k in range(4, longest.bit_length()) for n in (2**k, 3 * 2 ** (k - 1))})
    return [
        _along_sequences(batch, {n: max(round(n * length / longest), 1) for n in lengths})
        for length in steps
        if length < longest
    ]


def doubled(batch: Any) -> tuple[Any, Any] | None:
    """A short beginning of this batch with all of its rows twice, and one of twice that length; None where it
    has no sequences."""
    _, lengths = _with_lengths(batch)
    if not lengths:
        return None
    short = {n: _shorter(n, *_SHARES[-1]) for n in lengths}
    twice = _mapped(_along_sequences(batch, short), lambda t: torch.cat([t, t]) if t.dim() else t)
    return twice, _along_sequences(batch, {n: 2 * cut for n, cut in short.items()})


def _with_lengths(batch: Any) -> tuple[list[torch.Tensor], set[int]]:
    """Its tensors, and the lengths of its sequences, if they are long enough to be cut."""
    given = [t for t in tensors_of(batch) if t.dim()]
    lengths = {t.shape[1] for t in given if t.dim() == 2 and not t.is_floating_point()}
    lengths = lengths or {t.shape[1] for t in given if t.dim() == 3}
    return given, lengths if lengths and max(lengths) >= 3 * _LEAST_LENGTH else set()


def _shorter(length: int, share: float, least: int) -> int:
    return max(min(length, least), round(length * share / _MULTIPLE) * _MULTIPLE)


def _along_sequences(batch: Any, cut: dict[int, int]) -> Any:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        spread = _is_mask(tensor)
        # [rows, length], [rows, length, width]; of more dimensions ([rows, 1, length, length]) the last two.
        dims = (1,) if tensor.dim() in (2, 3) else tuple(range(2, tensor.dim()))
        for dim in dims:
            length = tensor.shape[dim]
            if length in cut and spread:
                tensor = tensor.index_select(dim, _spread(length, cut[length], tensor.device))
            elif length in cut:
                tensor = tensor.narrow(dim, 0, cut[length])
        return tensor.clone(memory_format=torch.contiguous_format)

    return _mapped(batch, change)


def _is_mask(tensor: torch.Tensor) -> bool:
    """Ones and zeros, some of each. Models run another way where nothing is masked, so that a smaller batch
    has to keep some padding, on whichever side it is."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dim() < 2:
        return False
    ones = tensor == 1
    return bool((ones | (tensor == 0)).all() and ones.any() and not ones.all())


def _spread(length: int, count: int, device: torch.device) -> torch.Tensor:
    """As many positions, evenly from the first to the last."""
    return torch.tensor([i * (length - 1) // max(count - 1, 1) for i in range(count)], device=device)


def _mapped(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return map_tensors(change, dict(batch) if hasattr(batch, "keys") else batch)


# ----------------------------------------------------------------------------------------------- the chart


@dataclass(frozen=True)
class Place:
    """Where a batch lies: `size` is a measured or imagined size that takes at least as much memory. `exact`:
    it is that size in every dimension, so that graphs fit, not only bytes. `rows`: so many times what that
    size takes."""

    size: int
    exact: bool
    rows: float = 1.0


@dataclass(frozen=True)
class Chart:
    """Shapes that were measured, along one line: all dimensions that vary do so together, and `sizes` are the
    values of the first of them. With one shape only, nothing is known to vary, and its size is called 1.
    `rows_as_length`: twice the rows take no more than twice the length; not so where each row has something
    beside its sequence (an image)."""

    shapes: tuple[Shapes, ...]  # by ascending size
    rows_as_length: bool = True

    @classmethod
    def of(cls, shapes: Sequence[Shapes]) -> Chart | None:
        """None if these shapes do not lie on one line. One that is there twice counts once."""
        shapes = list(dict.fromkeys(shapes))
        if len({_structure(each) for each in shapes}) != 1:
            return None
        columns = [column for column in zip(*map(_numbers, shapes), strict=True) if len(set(column)) > 1]
        if not columns:
            return cls((shapes[0],))
        order = sorted(range(len(shapes)), key=lambda i: columns[0][i])
        for column in columns:
            along = [column[i] for i in order]
            if along != sorted(set(along)):
                return None
        return cls(tuple(shapes[i] for i in order))

    @property
    def sizes(self) -> tuple[int, ...]:
        varying = self._varying()
        return tuple(_numbers(each)[varying[0]] for each in self.shapes) if varying else (1,)

    def _varying(self) -> list[int]:
        columns = list(zip(*map(_numbers, self.shapes), strict=True))
        return [i for i, column in enumerate(columns) if len(set(column)) > 1]

    def place(self, shapes: Shapes) -> Place | None:
        """None: other inputs than were measured, or larger in a dimension that none of them varied in."""
        if _structure(shapes) != _structure(self.shapes[0]):
            return None
        numbers, measured = _numbers(shapes), [_numbers(each) for each in self.shapes]
        varying, sizes = self._varying(), self.sizes
        found = [_along([each[i] for each in measured], sizes, numbers[i]) for i in varying] or [sizes[-1]]
        size, exact = max(found), len(set(found)) == 1
        rows = 1.0
        for i, (number, first) in enumerate(zip(numbers, _is_first(shapes), strict=True)):
            if i in varying or number == measured[-1][i]:
                continue
            exact = False
            if number > measured[-1][i]:
                if not first:
                    return None
                rows = max(rows, number / measured[-1][i])
        if rows > 1 and not varying:
            return None
        if self.rows_as_length:
            return Place(math.ceil(size * rows), exact and rows == 1)
        return Place(size, exact and rows == 1, rows)


def growth_between(measured: Shapes, given: Shapes) -> float:
    """How many times the memory of `measured` other inputs take at the most: as their rows grow, or as the
    square of what else does, be it one dimension or the number of all elements. At least 1."""
    known = dict(measured)
    growth = max(1.0, (elements(given) / max(elements(measured), 1)) ** 2)
    firsts = max((shape[0] for shape in known.values()), default=1)
    others = max((number for shape in known.values() for number in shape[1:]), default=1)
    for name, shape in given:
        like = known.get(name, ())
        if len(like) != len(shape):  # a tensor that was not there: against the largest that were
            like = (firsts, *[others] * (len(shape) - 1))
        ratios = [number / max(before, 1) for number, before in zip(shape, like, strict=True)]
        growth = max(growth, ratios[0], *(ratio**2 for ratio in ratios[1:]))
    return growth


def elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for _, shape in shapes)


def _structure(shapes: Shapes) -> tuple[tuple[str, int], ...]:
    return tuple((name, len(shape)) for name, shape in shapes)


def _numbers(shapes: Shapes) -> list[int]:
    return [number for _, shape in shapes for number in shape]


def _is_first(shapes: Shapes) -> list[bool]:
    return [dim == 0 for _, shape in shapes for dim in range(len(shape))]


def _along(measured: Sequence[int], sizes: Sequence[int], number: int) -> int:
    """The size at which a dimension that varies reaches this number, rounded up."""
    if number <= measured[0]:
        return math.ceil(sizes[0] * number / measured[0])
    for k in range(len(sizes) - 1):
        if number <= measured[k + 1]:
            share = (number - measured[k]) / (measured[k + 1] - measured[k])
            return math.ceil(sizes[k] + share * (sizes[k + 1] - sizes[k]) - 1e-9)
    return math.ceil(sizes[-1] * number / measured[-1] - 1e-9)
