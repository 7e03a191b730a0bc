"""What a region does when its forward has returned, as generated code: look through the autograd graph, read
what is kept, put rows and tickets in the place of saved tensors, and see that all of it is as captured.

    find(outputs, entries), collect(n, p, i, z), rows(f, s), hook(n, rows, pack), differs(tensors),
    move(n, h, unpack)

as `run.program.Program` describes them.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch

from remat.records import Role, Saved, Value
from remat.run.reach import Reach

__all__ = ["Release"]

# Where a mode looks on (capture, fake tensors), reshape makes a view; otherwise an alias: the same values,
# edges and saved tensors under another name.
_SAME_NODE = {"ViewBackward0": "ReshapeAliasBackward0", "ReshapeAliasBackward0": "ViewBackward0"}


class Release:
    """The code, in `lines`, and the names that it uses."""

    def __init__(self, at: Reach) -> None:
        self.at, self.graph = at, at.graph
        self.lines: list[str] = []
        self.names: dict[str, Any] = {"method": MethodType, "saved": saved_of}

    def write(self, dropped: list[Saved], needs: list[tuple[int, ...]], moved: list[Saved]) -> None:
        """For the saved tensors that are dropped, each with the taps that it needs, and those that move."""
        self._rows(needs)
        self._hook(dropped)
        self._differs(dropped)
        self._move(moved)
        self._collect()
        self._find()

    def _rows(self, needs: list[tuple[int, ...]]) -> None:
        """Each slot has a row of its own, with what it reads and nothing else: a row dies with its node, and
        with the last row that has it a kept tensor."""
        self.lines += ["def rows(f, s):", "    return ("]
        for wanted in needs:
            kept = (f"s[{tap}]" if tap in wanted else "None" for tap in range(len(self.at.taps)))
            self.lines.append(f"        [{', '.join(['f', *kept])}],")
        self.lines.append("    )")

    def _hook(self, dropped: list[Saved]) -> None:
        """No Python runs in it but its own: autograd hands the tensor to a list's append, keeps the None that
        it gets, and will call the slot's function with the row that it is bound to."""
        self.lines += ["def hook(n, rows, pack):", "    pass"]
        for number, saved in enumerate(dropped):
            self.lines.append(
                f"    {self._raw(saved)}.register_hooks(pack, method(u{number}, rows[{number}]))"
            )

    def _move(self, moved: list[Saved]) -> None:
        self.lines += ["def move(n, h, unpack):", "    pass"]
        for number, saved in enumerate(moved):
            self.lines.append(f"    {self._raw(saved)}.register_hooks(h[{number}].pack, unpack)")

    def _raw(self, saved: Saved) -> str:
        item = "" if saved.item < 0 else f"[{saved.item}]"
        return f"n[{self.at.node(saved.node)}].{saved.attribute}{item}"

    def _differs(self, dropped: list[Saved]) -> None:
        self.lines.append("def differs(tensors):")
        for number, saved in enumerate(dropped):
            meta = self.graph.values[saved.value]
            # An input's storage may begin anywhere.
            begins = "" if self.at.is_of_input(saved.value) else f" or t.storage_offset() != {meta.offset}"
            self.lines += [
                f"    t = tensors[{number}]",
                f"    if t.shape != {meta.shape} or t.dtype is not {self._dtype(saved.value)} "
                f"or t.stride() != {meta.stride}{begins}: return {number}",
            ]
        self.lines.append("    return None")

    def _collect(self) -> None:
        self.lines += ["def shifted(t, shape, stride, shift):"]
        self.lines += ["    return t.as_strided(shape, stride, t.storage_offset() + shift)"]
        self.lines.append("def collect(n, p, i, z):")
        self._aliases()
        for number, tap in enumerate(self.at.taps):
            meta = self.graph.values[tap.value]
            self.lines.append(f"    s{number} = {tap.expression}")
            self.lines.append(
                f"    if s{number}.shape != {meta.shape} or s{number}.dtype is not {self._dtype(tap.value)} "
                f"or s{number}.stride() != {meta.stride}: return {number}"
            )
        self.lines.append(f"    return ({''.join(f's{number}, ' for number in range(len(self.at.taps)))})")

    def _aliases(self) -> None:
        """Inputs that share memory must share it in the same way; if inputs are written, no others may.

        The signature does not say so, and looking costs: only where the recipe rests on it.
        """
        values, storages = self.graph.values, self.graph.storages
        groups: dict[int, list[int]] = collections.defaultdict(list)
        for place, value in enumerate(self.graph.inputs):
            groups[values[value].storage].append(place)
        distance = "i[{b}].data_ptr() - i[{a}].data_ptr() != {shift}"
        memory = "i[{}].untyped_storage()._cdata"
        for storage, (a, *others) in groups.items():
            if storage in self.at.kept:
                for b in others:
                    shift = _byte_offset(values[self.graph.inputs[b]]) - _byte_offset(
                        values[self.graph.inputs[a]]
                    )
                    near = distance.format(a=a, b=b, shift=shift)
                    apart = f"{memory.format(a)} != {memory.format(b)}"
                    self.lines.append(
                        f"    if {near} or {apart}: "
                        f"return 'inputs {a} and {b} do not share memory as captured'"
                    )
        written = {v.storage for v in values if v.epoch and storages[v.storage].role is Role.INPUT}
        if written and len(groups) > 1:
            firsts = ", ".join(memory.format(places[0]) for places in groups.values())
            self.lines.append(
                f"    if len({{{firsts}}}) != {len(groups)}: return 'inputs share memory that is written'"
            )

    def _find(self) -> None:
        """Every node of the graph is visited and its name compared, also where nothing is dropped. None may
        be one that made an input: where a region hands an input on, what comes next is another region's."""
        parents = {parent for _, parent, _ in self.graph.nodes if parent >= 0}
        names = [name for name, _, _ in self.graph.nodes]
        self.names["types"], self.names["is_other"] = _known_nodes(names)
        self.lines.append("def find(outputs, entries):")
        for index, (_, parent, edge) in enumerate(self.graph.nodes):
            node = f"outputs[{-1 - parent}].grad_fn" if parent < 0 else f"e{parent}[{edge}][0]"
            other = f"type(n{index}) is not types[{index}] and is_other({index}, n{index})"
            self.lines += [f"    n{index} = {node}", f"    if {other}: return {index}"]
            if index in parents:
                self.lines.append(f"    e{index} = n{index}.next_functions")
        visited = "".join(f"n{index}, " for index in range(len(self.graph.nodes)))
        self.lines.append(f"    if not entries.isdisjoint(({visited})): return 0")
        found = "".join(f"n{index}, " for index in self.at.nodes)
        self.lines.append(f"    return ({found})")

    def _dtype(self, value: int) -> str:
        name = self.graph.values[value].dtype
        self.names[f"dtype_{name}"] = getattr(torch, name)
        return f"dtype_{name}"


def _known_nodes(names: Sequence[str]) -> tuple[list[Any], Callable[[int, Any], bool]]:
    """The types of nodes that have been seen to bear these names, and a function that says whether a node of
    another type bears another name. Asking a node for its name takes ten times as long as for its type."""
    types: list[Any] = [None] * len(names)

    def is_other(index: int, node: Any) -> bool:
        name = node.name()
        if name not in (names[index], _SAME_NODE.get(names[index])):
            return True
        if type(node).__name__ == name:  # not a type that several kinds of nodes share
            types[index] = type(node)
        return False

    return types, is_other


def _byte_offset(value: Value) -> int:
    return value.offset * getattr(torch, value.dtype).itemsize  # type: ignore[no-any-return]


def saved_of(node: Any, attribute: str) -> Any:
    """A list of saved tensors: a Python function's node keeps it under another name than a C++ node."""
    name = "_saved_" + attribute.removeprefix("_raw_saved_")
    return getattr(node, name) if hasattr(node, name) else node.saved_tensors
