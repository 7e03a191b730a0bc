"""One step at several sizes: what was measured at a few of them, and what that says of all the others.

Two kinds of numbers change with the size of a batch. Bytes and seconds are read off the chords between the
measured sizes: a sum of products of lengths is convex, so a chord is never below it. Where memory grows in
steps (a model that pads inside), those of the next larger measured size are taken. The numbers inside a
region's graph (shapes, strides, arguments) must be right to the last digit: they are polynomials of the size,
found through the measured sizes, and a result that is no whole number is refused. Whoever runs such a graph
compares it with what is really there; nothing here is taken on trust.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

from remat.records import Entry, Kind, Mode, Profile, RegionGraph, Segment, StepBytes

__all__ = [
    "Family",
    "MisfitError",
    "chord",
    "family",
    "polynomial",
    "template",
    "with_rows",
    "without_recipes",
]

_T = TypeVar("_T")
_QUANTITIES = ("bytes", "seconds")  # fields whose name ends so are measured; all others say what is what
_NUMBER = re.compile(r"\d+")


class MisfitError(ValueError):
    """The step is not the same at all sizes, or a number of it follows no polynomial."""


# ------------------------------------------------------------------------------------------- exact numbers


def polynomial(sizes: Sequence[int], values: Sequence[int]) -> Callable[[int], int]:
    """The whole number that takes these values at these sizes; raises MisfitError where it is not whole.

    A line where the points lie on one, otherwise the parabola (or cubic) through all of them.
    """
    points = list(zip(sizes, values, strict=True))
    coefficients = _newton(points[:2])
    if any(_at(coefficients, sizes, size) != value for size, value in points[2:]):
        coefficients = _newton(points)
    # The same over one denominator: integers are an order of magnitude faster, and there are thousands.
    divisor = math.lcm(*(c.denominator for c in coefficients))
    whole = [int(c * divisor) for c in reversed(coefficients)]
    borders = tuple(reversed(sizes[: len(whole)]))

    def value(size: int) -> int:
        found = 0
        for coefficient, border in zip(whole, borders, strict=True):
            found = found * (size - border) + coefficient
        number, rest = divmod(found, divisor)
        if rest or number < 0:
            raise MisfitError(
                f"a number that is {dict(points)} at the measured sizes is not whole, or below 0, at {size}"
            )
        return number

    return value


def _newton(points: Sequence[tuple[int, int]]) -> list[Fraction]:
    """Divided differences."""
    column = [Fraction(value) for _, value in points]
    result = [column[0]]
    for width in range(1, len(points)):
        column = [
            (b - a) / (points[i + width][0] - points[i][0]) for i, (a, b) in enumerate(pairwise(column))
        ]
        result.append(column[0])
    return result


def _at(coefficients: Sequence[Fraction], sizes: Sequence[int], size: int) -> Fraction:
    found = Fraction(0)
    for place in range(len(coefficients) - 1, -1, -1):
        found = found * (size - sizes[place]) + coefficients[place]
    return found


def template(sizes: Sequence[int], values: Sequence[_T]) -> Callable[[int], _T]:
    """`f(size)`: the same record with its whole numbers as they are at another size. What does not change
    with the size is shared; anything else that changes (text, a float, a length) raises MisfitError."""
    first: Any = values[0]
    if any(type(value) is not type(first) for value in values):
        raise MisfitError(f"{[type(value).__name__ for value in values]} at different sizes")
    if all(value == first for value in values):
        return lambda size: first
    if isinstance(first, int) and not isinstance(first, bool):
        return polynomial(sizes, values)  # type: ignore[arg-type, return-value]
    if isinstance(first, str):
        return _text(sizes, values)  # type: ignore[arg-type, return-value]
    if isinstance(first, tuple):
        lengths = {len(value) for value in values}  # type: ignore[arg-type]
        if len(lengths) > 1:
            raise MisfitError(f"{sorted(lengths)} items at different sizes")
        parts = [template(sizes, items) for items in zip(*values, strict=True)]
        return lambda size: tuple(part(size) for part in parts)  # type: ignore[return-value]
    if is_dataclass(first):
        changing = {
            field.name: template(sizes, [getattr(value, field.name) for value in values])
            for field in fields(first)
            if any(getattr(value, field.name) != getattr(first, field.name) for value in values)
        }
        record: Any = first
        return lambda size: replace(record, **{name: part(size) for name, part in changing.items()})
    raise MisfitError(f"{first!r} changes with the size")


def _text(sizes: Sequence[int], texts: Sequence[str]) -> Callable[[int], str]:
    """Text with numbers in it: '(torch.Size([4, 256]), (256, 1), torch.float32)'."""
    between = [_NUMBER.split(text) for text in texts]
    if any(parts != between[0] for parts in between):
        raise MisfitError(f"{texts[0]!r} is {texts[-1]!r} at another size")
    columns = zip(*([int(number) for number in _NUMBER.findall(text)] for text in texts), strict=True)
    numbers = [template(sizes, column) for column in columns]

    def text(size: int) -> str:
        found = [str(number(size)) for number in numbers]
        return "".join(part + number for part, number in zip(between[0], [*found, ""], strict=True))

    return text


# --------------------------------------------------------------------------------------- measured quantities


def chord(sizes: Sequence[int], values: Sequence[float], size: int) -> float:
    """What a convex quantity is at most: between two measured sizes on their chord, below the least size what
    it is there. Above the largest no chord holds: there the larger of chord and parabola is given."""
    if size <= sizes[0]:
        return values[0]
    for (a, b), (low, high) in zip(pairwise(sizes), pairwise(values), strict=True):
        if size <= b:
            return _line(a, low, b, high, size)
    if len(sizes) == 1:
        return values[-1] * size / sizes[-1]
    beyond = _line(sizes[-2], values[-2], sizes[-1], values[-1], size)
    if len(sizes) > 2:
        points = list(zip(sizes, (Fraction(value) for value in values), strict=True))[-3:]
        beyond = max(beyond, float(_at(_newton(points), [p[0] for p in points], size)))  # type: ignore[arg-type]
    return max(beyond, values[-1])


def _line(a: int, low: float, b: int, high: float, size: int) -> float:
    if isinstance(low, int) and isinstance(high, int):  # exact, rounded up: a byte too few is too few
        return -((low * (b - size) + high * (size - a)) // (a - b))
    return (low * (b - size) + high * (size - a)) / (b - a)


def _blend(sizes: Sequence[int], values: Sequence[Any], size: int, quantity: bool, what: str) -> Any:
    first = values[0]
    if is_dataclass(first):
        counted = isinstance(first, StepBytes)
        changed = {}
        for field in fields(first):
            parts = [getattr(value, field.name) for value in values]
            if any(part != parts[0] for part in parts):
                measured = counted or field.name.endswith(_QUANTITIES)
                changed[field.name] = _blend(sizes, parts, size, measured, field.name)
        return replace(first, **changed) if changed else first  # type: ignore[type-var]
    if isinstance(first, tuple):
        if len({len(value) for value in values}) > 1:
            raise MisfitError(f"{what}: {[len(value) for value in values]} items at different sizes")
        return tuple(_blend(sizes, items, size, quantity, what) for items in zip(*values, strict=True))
    if all(value == first for value in values):
        return first
    if quantity and all(isinstance(value, (int, float)) for value in values):
        found = chord(sizes, values, size)
        return math.ceil(found) if isinstance(first, int) else found
    raise MisfitError(f"{what}: {values[0]!r} at one size, {values[-1]!r} at another")


# ------------------------------------------------------------------------------------------------ the family


@dataclass(frozen=True)
class Family:
    """The same step, measured at `sizes` (ascending), with the same menus. `stepped`: no chord holds."""

    sizes: tuple[int, ...]
    profiles: tuple[Profile, ...]
    notes: tuple[str, ...] = ()
    stepped: bool = False

    def profile_at(self, size: int, before: int = 0) -> Profile:
        """What the step takes at this size: never too little between the measured sizes. Its regions have no
        graphs: see `graph_at`. The step before may have been of size `before`, or of any measured one."""
        largest = self.profiles[-1] if before <= self.sizes[-1] else self._alone(before)
        return _after_the_largest(self._alone(size), largest)

    def _alone(self, size: int) -> Profile:
        if self.stepped:
            size = next((measured for measured in self.sizes if measured >= size), size)
        if size in self.sizes:
            return self.profiles[self.sizes.index(size)]
        bare = [_bare(profile, self.profiles[-1]) for profile in self.profiles]
        blended: Profile = _blend(self.sizes, bare, size, False, "profile")
        return blended

    def signature_at(self, number: int, size: int) -> str:
        """The signature of a kind's calls at exactly this size."""
        if size in self.sizes:
            return self.profiles[self.sizes.index(size)].kinds[number].signature
        return self._templates[number][0](size)

    def graph_at(self, number: int, size: int) -> RegionGraph:
        """The graph of a kind at exactly this size."""
        if size in self.sizes:
            graph = self.profiles[self.sizes.index(size)].kinds[number].graph
        else:
            made = self._templates[number][1]
            graph = None if made is None else made(size)
        if graph is None:
            raise MisfitError(f"kind {number} has no graph")
        return graph

    @cached_property
    def _templates(self) -> list[tuple[Callable[[int], str], Callable[[int], RegionGraph] | None]]:
        return [
            (template(self.sizes, [k.signature for k in kinds]), _graph_template(self.sizes, kinds))
            for kinds in zip(*(profile.kinds for profile in self.profiles), strict=True)
        ]


def family(measured: Sequence[tuple[int, Profile]]) -> Family:
    """A family of what was measured; menus are cut down to what all sizes have in common.

    Raises MisfitError if the step itself differs: other regions, another number of them, another order.
    """
    pairs = sorted(measured, key=lambda pair: pair[0])
    sizes, profiles = tuple(size for size, _ in pairs), [profile for _, profile in pairs]
    if len({len(profile.kinds) for profile in profiles}) > 1:
        raise MisfitError(f"{[len(p.kinds) for p in profiles]} distinct regions at sizes {list(sizes)}")
    notes: list[str] = []
    columns = []
    for kinds in zip(*(profile.kinds for profile in profiles), strict=True):
        columns.append(_common_menus(sizes, kinds, notes))
    made = Family(
        sizes,
        tuple(replace(p, kinds=tuple(k)) for p, k in zip(profiles, zip(*columns, strict=True), strict=True)),
        tuple(notes),
    )
    for size in (sizes[0] + 1, sizes[-1] + 1):
        made.profile_at(size)  # raises MisfitError now rather than in the middle of training
    return made


def _common_menus(sizes: Sequence[int], kinds: Sequence[Kind], notes: list[str]) -> list[Kind]:
    recipes = True
    try:
        template(sizes, [kind.signature for kind in kinds])
        _graph_template(sizes, kinds)
    except MisfitError as error:
        recipes = False
        notes.append(f"no recipes between the measured sizes: {error}")
    menus = [{_way(entry): entry for entry in kind.menu} for kind in kinds]
    common = [
        way
        for way in menus[-1]
        if all(way in menu for menu in menus) and (recipes or way[0] is not Mode.RECIPE)
    ]
    return [
        replace(kind, menu=tuple(menu[way] for way in common), graph=kind.graph if recipes else None)
        for kind, menu in zip(kinds, menus, strict=True)
    ]


def _way(entry: Entry) -> tuple[Any, ...]:
    """What an entry does, whatever the size."""
    recipe = entry.recipe
    if recipe is None:
        return entry.mode, entry.part, entry.again, entry.fetches_inputs, entry.host_bytes > 0, entry.cut
    return entry.mode, recipe.kept, recipe.dropped, recipe.replayed, recipe.offloaded, recipe.fused


def _graph_template(sizes: Sequence[int], kinds: Sequence[Kind]) -> Callable[[int], RegionGraph] | None:
    graphs = [kind.graph for kind in kinds]
    if all(graph is None for graph in graphs):
        return None
    bare: list[Any] = [None if graph is None else _unpriced(graph) for graph in graphs]
    return template(sizes, bare)


def _unpriced(graph: RegionGraph) -> RegionGraph:
    """Without what was measured of it; a graph that only runs needs none of that."""
    return replace(graph, ops=tuple(replace(op, seconds=0.0, flops=0) for op in graph.ops))


def _bare(profile: Profile, like: Profile) -> Profile:
    """Text and graphs are none of `_blend`'s business."""
    return replace(
        profile,
        kinds=tuple(
            replace(kind, graph=None, signature=same.signature, note="")
            for kind, same in zip(profile.kinds, like.kinds, strict=True)
        ),
        signature=like.signature,
        notes=like.notes,
    )


def _after_the_largest(profile: Profile, largest: Profile) -> Profile:
    """The step before may have been of another size: what it gave is as large as it can be."""
    if profile is largest:
        return profile
    head = profile.head
    if head is not None and largest.head is not None:
        head = replace(head, output_bytes=max(head.output_bytes, largest.head.output_bytes))
    outputs = max(profile.step.outputs, largest.step.outputs)
    return replace(profile, step=replace(profile.step, outputs=outputs), head=head)


def with_rows(profile: Profile, rows: float, batch_bytes: int) -> Profile:
    """The same with so many times the rows, of which each takes all that is not a gradient; `batch_bytes` is
    what the larger batch has beyond this one."""

    def times(nbytes: int) -> int:
        return math.ceil(nbytes * rows)

    def larger(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
        found, before = [], 0
        for segment in segments:
            after = segment.gradient_bytes
            found.append(
                replace(
                    segment,
                    start_bytes=before + times(segment.start_bytes - before),
                    peak_bytes=before + times(segment.peak_bytes - before),
                    end_bytes=after + times(segment.end_bytes - after),
                )
            )
            before = after
        return tuple(found)

    def entry(one: Entry) -> Entry:
        return replace(
            one,
            resident_bytes=times(one.resident_bytes),
            forward_peak_bytes=times(one.forward_peak_bytes),
            backward_peak_bytes=times(one.backward_peak_bytes),
            host_bytes=times(one.host_bytes),
            extra_seconds=one.extra_seconds * rows,
        )

    kinds = (
        replace(
            kind,
            menu=tuple(map(entry, kind.menu)),
            saved_bytes=times(kind.saved_bytes),
            forward_seconds=kind.forward_seconds * rows,
            backward_seconds=kind.backward_seconds * rows,
            device_seconds=kind.device_seconds * rows,
        )
        for kind in profile.kinds
    )
    head, step = profile.head, profile.step
    if head is not None:
        head = replace(
            head,
            segments=larger(head.segments),
            step_seconds=head.step_seconds * rows,
            output_bytes=times(head.output_bytes),
        )
    return replace(
        profile,
        kinds=tuple(kinds),
        boundary_bytes=tuple(map(times, profile.boundary_bytes)),
        segments=larger(profile.segments),
        step_seconds=profile.step_seconds * rows,
        step=replace(step, outputs=times(step.outputs), other=step.other + batch_bytes),
        head=head,
        stem=None,  # measured at one size
    )


def without_recipes(profile: Profile) -> Profile:
    """The same with whole regions only: what needs no graph, and so runs at any size. Such a region runs all
    its calls alike, whatever comes in."""
    kinds = (
        replace(kind, menu=tuple(e for e in kind.menu if e.mode is not Mode.RECIPE), signature="")
        for kind in profile.kinds
    )
    return replace(profile, kinds=tuple(kinds))
