"""Where a recipe finds what it keeps: the live tensors from which all else is rebuilt.

A kept storage can be reached by way of a saved tensor that stays, of an input, or of what passes between
submodules; a parameter by its name. A tap is such a tensor that rebuilding reads. What is no tap is computed,
and what is a plain view of something else is read as that.
"""

from __future__ import annotations

import collections
import math
from dataclasses import dataclass

from remat.errors import CaptureError
from remat.records import Recipe, RegionGraph, Role, Saved, Source, Value

__all__ = ["Reach", "Tap"]


@dataclass(frozen=True)
class Tap:
    """A kept tensor that rebuilding reads: an expression that finds it, and what it must look like."""

    expression: str
    text: str
    value: int


class Reach:
    """Taps are numbered as they are asked for, and so are parameters and nodes of the autograd graph."""

    def __init__(self, graph: RegionGraph, recipe: Recipe) -> None:
        self.graph = graph
        self.kept, self.moved = set(recipe.kept), set(recipe.offloaded)
        self.taps: list[Tap] = []
        self.parameters: list[str] = []
        self.passed: set[tuple[str, str]] = set()  # submodules, and which side of them is read
        self.nodes: list[int] = []  # graph nodes that are needed, in the order `find` gives them
        self._tap_of: dict[int, int] = {}  # value -> its place among the taps
        self._find_places(set(recipe.dropped))

    def _find_places(self, gone: set[int]) -> None:
        """For each kept storage the tensors by which it can be reached, the cheapest to reach first."""
        self._places: dict[int, list[tuple[int, Saved | Source]]] = collections.defaultdict(list)
        for source in self.graph.sources:
            if source.kind == "input":
                self._place(source.value, source)
        for index, saved in enumerate(self.graph.saved):
            if index not in gone:
                self._place(saved.value, saved)
        for source in self.graph.sources:
            if source.kind != "input":
                self._place(source.value, source)

    def _place(self, value: int, where: Saved | Source) -> None:
        if self.graph.values[value].storage in self.kept and self.graph.values[value].held:
            self._places[self.graph.values[value].storage].append((value, where))

    def reachable(self, value: int) -> tuple[int, Saved | Source] | None:
        """A live tensor of the same memory, dtype and bits, exactly this value if there is one."""
        wanted = self.graph.values[value]
        if not wanted.held:
            return None
        # Where two foreign tensors lie relative to each other is not known of a later run.
        exact = self.graph.storages[wanted.storage].role is Role.FOREIGN
        found = None
        for other, where in self._places.get(wanted.storage, ()):
            if other == value:
                return other, where
            same = self.graph.values[other]
            if found is None and not exact and (same.dtype, same.bits) == (wanted.dtype, wanted.bits):
                found = (other, where)
        return found

    def tap(self, value: int, where: Saved | Source | None) -> int:
        if value not in self._tap_of:
            self._tap_of[value] = len(self.taps)
            self.taps.append(Tap(*self._find_expression(value, where), value))
        return self._tap_of[value]

    def _find_expression(self, value: int, where: Saved | Source | None) -> tuple[str, str]:
        """How `collect(n, p, i, z)` reaches a kept tensor, and what to call it.

        What autograd saved is detached, because it knows its node, and a node that holds itself is never
        freed. Inputs and parameters come from before the region and cannot make such a cycle.
        """
        if where is None:
            name = self.graph.values[value].parameter
            if name not in self.parameters:
                self.parameters.append(name)
            return f"p[{self.parameters.index(name)}]", f"parameter {name}"
        if isinstance(where, Saved):
            node = f"n[{self.node(where.node)}]"
            if where.item < 0:
                read = f"{node}._saved_{where.attribute.removeprefix('_raw_saved_')}"
            else:
                read = f"saved({node}, {where.attribute!r})[{where.item}]"
            return f"{read}.detach()", f"{where.attribute} of node {where.node}"
        if where.kind == "input":
            return f"i[{where.position}]", f"input {where.position}"
        self.passed.add((where.module, where.kind))
        return (
            f"z[{where.module!r}, {where.kind!r}, {where.call}][{where.position}]",
            f"{where.kind} of {where.module}",
        )

    def node(self, node: int) -> int:
        if node not in self.nodes:
            self.nodes.append(node)
        return self.nodes.index(node)

    def is_moved(self, value: int) -> bool:
        return self.graph.values[value].storage in self.moved

    def op_of(self, value: int) -> int:
        producer = self.graph.values[value].producer
        if producer is None:
            raise CaptureError(f"value {value} cannot be rebuilt: nothing in the region makes it")
        return producer

    def is_tap(self, value: int) -> bool:
        meta = self.graph.values[value]
        return bool(meta.free and meta.parameter) or self.reachable(value) is not None

    def base(self, value: int) -> int:
        """The value that this one is a plain view of, however many views lie between."""
        while not self.is_tap(value):
            op = self.graph.ops[self.op_of(value)]
            if not op.view or not op.inputs:
                break
            below, above = self.graph.values[op.inputs[0]], self.graph.values[value]
            same = (below.storage, below.epoch, below.dtype, below.bits)
            if same != (above.storage, above.epoch, above.dtype, above.bits):
                break
            value = op.inputs[0]
        return value

    def is_whole(self, value: int) -> bool:
        """Not a part of what it is a view of."""
        shapes = (self.graph.values[each].shape for each in (value, self.base(value)))
        return len({math.prod(shape) for shape in shapes}) == 1

    def is_of_input(self, value: int) -> bool:
        """A view of an input: where it begins there is not checked by its offset."""
        return self.graph.storages[self.graph.values[value].storage].role is Role.INPUT

    def ops_below(self, value: int) -> set[int]:
        found: set[int] = set()
        pending = [self.base(value)]
        while pending:
            current = self.base(pending.pop())
            if not self.is_tap(current) and self.op_of(current) not in found:
                found.add(self.op_of(current))
                pending.extend(self.graph.ops[self.op_of(current)].inputs)
        return found

    def needs(self, value: int) -> tuple[int, ...]:
        """Taps that this value rests on, whatever the memo may hold."""
        taps: set[int] = set()
        seen: set[int] = set()
        pending = [value]
        while pending:
            current = self.base(pending.pop())
            if current in seen:
                continue
            seen.add(current)
            meta = self.graph.values[current]
            if meta.free and meta.parameter:
                taps.add(self.tap(current, None))
            elif (reach := self.reachable(current)) is not None:
                taps.add(self.tap(*reach))
            else:
                pending.extend(self.graph.ops[self.op_of(current)].inputs)
        return tuple(sorted(taps))

    def holder(self, value: int) -> int:
        """The value of the tensor whose memory holds this one: a tap, or what is computed."""
        base = self.base(value)
        meta = self.graph.values[base]
        if meta.free and meta.parameter:
            return base
        reach = self.reachable(base)
        if reach is None:
            self._refuse_beyond(base, value)
        return base if reach is None else reach[0]

    def _refuse_beyond(self, base: int, value: int) -> None:
        """What is rebuilt has memory of its own, just as much as it needs."""
        (low, high), (first, last) = (_extent(self.graph.values[v]) for v in (base, value))
        if first < low or last > high:
            raise CaptureError(f"value {value} is a view that reaches beyond the rebuilt value {base}")


def _extent(value: Value) -> tuple[int, int]:
    """First and last element that a value touches, in elements of its storage."""
    if 0 in value.shape:
        return value.offset, value.offset
    reach = sum((size - 1) * step for size, step in zip(value.shape, value.stride, strict=True))
    return value.offset, value.offset + reach
