"""One recipe at any size: its generated code is compiled once, with the numbers that change left open.

Compiling a recipe takes tens of milliseconds, most of it Python's own compiler. The code of two sizes differs
in whole numbers only, and those follow the size as the graph's do (planner.sizes). So the text that three
measured sizes give is merged into one with places for numbers, compiled, and run once per size to make the
functions of that size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from types import CodeType
from typing import Any

import torch

from remat.planner.sizes import MisfitError, template
from remat.records import Recipe, RegionGraph
from remat.run.program import Program
from remat.run.recipe import compile_recipe
from remat.run.samples import probes

__all__ = ["Stencil", "stencil"]

_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")  # a whole number, not part of a name or of a fraction
_PLACES = "K"
_SAME = (
    "parameters", "passed", "kept", "memo_size", "replayed_ops", "moved_taps", "send_order", "recipe",
    "device",
)  # fmt: skip


_Shape = tuple[tuple[int, ...], tuple[int, ...], str]  # shape, stride, label


@dataclass(frozen=True)
class Stencil:
    code: CodeType
    numbers: tuple[Callable[[int], int], ...]
    slots: Callable[[int], tuple[_Shape, ...]]
    moved: Callable[[int], tuple[_Shape, ...]]
    graph: Callable[[int], RegionGraph]
    like: Program  # at one size: everything that is the same at all

    def at(self, size: int) -> Program:
        """Raises MisfitError if a number is not whole at this size."""
        names = dict(self.like.find.__globals__)
        names[_PLACES] = [number(size) for number in self.numbers]
        exec(self.code, names)
        slots = tuple(
            replace(slot, shape=shape, stride=stride, label=label, rebuild=names[f"r{place}"])
            for place, (slot, (shape, stride, label)) in enumerate(
                zip(self.like.slots, self.slots(size), strict=True)
            )
        )
        made = {field.name: getattr(self.like, field.name) for field in fields(Program)}
        made |= {name: names[name] for name in made if callable(made[name]) and name in names}
        made["slots"] = slots
        made["moved"] = tuple(
            replace(slot, shape=shape, stride=stride, label=label)
            for slot, (shape, stride, label) in zip(self.like.moved, self.moved(size), strict=True)
        )
        looked_at = {place: slot.layout for place, slot in enumerate(slots) if slot.checked}
        made["probes"] = probes(looked_at, self.like.device)
        return _Sized(**made, exact=self.graph, size=size)


@dataclass(frozen=True)
class _Sized(Program):
    """A program whose graph is worked out only if it is pickled: `graph` and `text` are another size's."""

    exact: Callable[[int], RegionGraph] = field(kw_only=True)
    size: int = field(kw_only=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return compile_recipe, (self.exact(self.size), self.recipe, self.device)


def stencil(
    sizes: Sequence[int],
    graphs: Sequence[RegionGraph],
    graph: Callable[[int], RegionGraph],
    recipe: Recipe,
    device: torch.device,
) -> Stencil:
    """Compile the recipe at every measured size and merge; raises MisfitError if the code itself differs."""
    programs = [compile_recipe(each, recipe, device) for each in graphs]
    for name in _SAME:
        if any(getattr(program, name) != getattr(programs[0], name) for program in programs):
            raise MisfitError(f"the {name} of a recipe differ with the size")
    if any([m.dtype for m in p.moved] != [m.dtype for m in programs[0].moved] for p in programs):
        raise MisfitError("what a recipe sends to the host differs with the size")
    if any(program.probes.places != programs[0].probes.places for program in programs):
        raise MisfitError("what the spot check looks at differs with the size")
    text, numbers = _merged(sizes, [program.text for program in programs])
    return Stencil(
        code=compile(text, "<remat recipe>", "exec"),
        numbers=numbers,
        slots=template(sizes, [tuple((s.shape, s.stride, s.label) for s in p.slots) for p in programs]),
        moved=template(sizes, [tuple((m.shape, m.stride, m.label) for m in p.moved) for p in programs]),
        graph=graph,
        like=programs[-1],
    )


def _merged(sizes: Sequence[int], texts: Sequence[str]) -> tuple[str, tuple[Callable[[int], int], ...]]:
    between = [_NUMBER.split(text) for text in texts]
    if any(parts != between[0] for parts in between):
        raise MisfitError("the code of a recipe differs with the size in more than numbers")
    places: dict[tuple[int, ...], int] = {}  # numbers at the measured sizes -> place
    merged = [between[0][0]]
    columns = zip(*(_NUMBER.findall(text) for text in texts), strict=True)
    for column, part in zip(columns, between[0][1:], strict=True):
        if len(set(column)) == 1:
            merged += [column[0], part]  # as it is: it may be the exponent of 1e-06
        else:
            place = places.setdefault(tuple(map(int, column)), len(places))
            merged += [f"{_PLACES}[{place}]", part]
    return "".join(merged), tuple(template(sizes, column) for column in places)
