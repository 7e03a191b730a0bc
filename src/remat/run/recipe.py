"""A recipe as a program: where its kept tensors are found, what is dropped, and the code that rebuilds it.

The code is generated once per recipe as straight Python, because it runs between the kernels of a training
step. Each rebuilt value has a function `g<value>(s, m)` that computes it on demand from the kept tensors `s`
and the memo `m`; each dropped saved tensor has a function `u<slot>(s, m)` that calls it and then forgets what
nothing later needs. Backward asks for the slots in a known order; should it ever ask in another one, or
twice (retain_graph), the functions simply compute again: the order decides how much memory the replay takes,
never what it gives.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from remat.errors import CaptureError
from remat.records import Arg, Const, Op, Recipe, Ref, RegionGraph, Saved
from remat.run.replay import OVERWRITES, constant, overload, twin
from remat.run.spotcheck import Grid, sample_grid

__all__ = ["Program", "Slot", "Tap", "compile_recipe"]

_DEEPEST_CHAIN = 300  # nested calls of generated functions; Python allows about 1,000


@dataclass(frozen=True)
class Tap:
    """A kept tensor that rebuilding reads, and where it is found when the region returns."""

    kind: str  # "saved", "input", "module_input", "module_output", "parameter"
    position: int = 0  # input: among the region's tensors; saved: index into Program's found nodes
    attribute: str = ""
    item: int = -1
    name: str = ""  # submodule, or parameter
    call: int = 0
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Slot:
    """A saved tensor that is dropped."""

    node: int  # index into Program's found nodes
    attribute: str
    item: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    grid: Grid  # where the spot check looks
    needs: tuple[int, ...]  # taps that rebuilding reads, however far back
    rebuild: Callable[[list[Any], list[Any]], torch.Tensor]
    label: str
    source: str


@dataclass(frozen=True)
class Program:
    """What a region with this recipe does when its forward has returned, and when backward asks.

    `find(outputs)` walks the autograd graph and gives the nodes that taps and slots live on, or the number
    of the first node that is not as it was captured.
    """

    find: Callable[[list[torch.Tensor]], tuple[Any, ...] | int]
    taps: tuple[Tap, ...]
    slots: tuple[Slot, ...]
    memo_size: int
    dropped_bytes: int
    replayed_ops: int
    text: str  # the generated code, for explain and for debugging

    @property
    def modules(self) -> frozenset[str]:
        """Submodules whose inputs or outputs are tapped."""
        return frozenset(tap.name for tap in self.taps if tap.kind.startswith("module"))


def compile_recipe(graph: RegionGraph, recipe: Recipe, device: torch.device) -> Program:
    return _Compiler(graph, recipe, device).compile()


@dataclass
class _Compiler:
    graph: RegionGraph
    recipe: Recipe
    device: torch.device
    taps: list[Tap] = field(default_factory=list)
    tap_of: dict[int, int] = field(default_factory=dict)  # value -> tap that is exactly this value
    names: dict[str, Any] = field(default_factory=dict)  # namespace of the generated code
    lines: list[str] = field(default_factory=list)
    memo: dict[int, int] = field(default_factory=dict)
    nodes: list[int] = field(default_factory=list)  # graph nodes that are needed, in the order `find` gives them

    def compile(self) -> Program:
        self.kept = set(self.recipe.kept)
        dropped = sorted((self.graph.saved[i] for i in self.recipe.dropped), key=lambda saved: saved.order)
        self._places()
        self._plan_memo(dropped)
        for op_index in sorted({self._op_of(v) for v in self.needed}):
            self._emit_op(op_index)
        pieces = [self._emit_slot(number, saved) for number, saved in enumerate(dropped)]
        self._emit_find()
        text = "\n".join(self.lines)
        self.names |= {"twin": twin, "values": self.graph.values, "device": self.device}
        exec(compile(text, "<remat recipe>", "exec"), self.names)
        slots = tuple(self._slot(number, saved, needs) for number, (saved, needs) in enumerate(pieces))
        return Program(
            find=self.names["find"],
            taps=tuple(self.taps),
            slots=slots,
            memo_size=len(self.memo),
            dropped_bytes=sum(
                self.graph.storages[s].nbytes for s in {self.graph.values[saved.value].storage for saved in dropped}
            ),
            replayed_ops=len(self.recipe.replayed),
            text=text,
        )

    # -- where kept values are

    def _places(self) -> None:
        """For each kept storage the tensors by which it can be reached, the cheapest to reach first."""
        self.places: dict[int, list[tuple[int, Any]]] = collections.defaultdict(list)
        gone = set(self.recipe.dropped)
        for index, saved in enumerate(self.graph.saved):
            if index not in gone:
                self._place(saved.value, saved)
        for source in sorted(self.graph.sources, key=lambda source: source.kind != "input"):
            self._place(source.value, source)

    def _place(self, value: int, where: Any) -> None:
        if self.graph.values[value].storage in self.kept and self.graph.values[value].held:
            self.places[self.graph.values[value].storage].append((value, where))

    def _reachable(self, value: int) -> tuple[int, Any] | None:
        """A live tensor of the same memory, dtype and bits, exactly this value if there is one."""
        wanted = self.graph.values[value]
        if not wanted.held:
            return None
        found = None
        for other, where in self.places.get(wanted.storage, ()):
            if other == value:
                return other, where
            same = self.graph.values[other]
            if found is None and (same.dtype, same.bits) == (wanted.dtype, wanted.bits):
                found = (other, where)
        return found

    def _tap(self, value: int, where: Any) -> int:
        if value in self.tap_of:
            return self.tap_of[value]
        meta = self.graph.values[value]
        layout: dict[str, Any] = dict(shape=meta.shape, stride=meta.stride, dtype=getattr(torch, meta.dtype))
        if where is None:
            tap = Tap("parameter", name=meta.parameter, **layout)
        elif isinstance(where, Saved):
            tap = Tap("saved", self._node(where.node), where.attribute, where.item, **layout)
        else:
            tap = Tap(where.kind, where.position, name=where.module, call=where.call, **layout)
        self.tap_of[value] = len(self.taps)
        self.taps.append(tap)
        return self.tap_of[value]

    def _node(self, node: int) -> int:
        if node not in self.nodes:
            self.nodes.append(node)
        return self.nodes.index(node)

    # -- what is computed, and how long it lives

    def _op_of(self, value: int) -> int:
        producer = self.graph.values[value].producer
        if producer is None:
            raise CaptureError(f"value {value} cannot be rebuilt: nothing in the region makes it")
        return producer

    def _is_tap(self, value: int) -> bool:
        meta = self.graph.values[value]
        return bool(meta.free and meta.parameter) or self._reachable(value) is not None

    def _plan_memo(self, dropped: list[Saved]) -> None:
        """Walk backward once: which values are computed, how often read, and by which slot last."""
        self.needed: dict[int, None] = {}
        self.last: dict[int, int] = {}
        readers: collections.Counter[int] = collections.Counter()

        def touch(value: int, slot: int, depth: int) -> None:
            if self._is_tap(value):
                return
            if depth > _DEEPEST_CHAIN:
                raise CaptureError(f"rebuilding takes a chain of more than {_DEEPEST_CHAIN} operations")
            readers[value] += 1
            self.last[value] = slot
            if value in self.needed:
                return
            self.needed[value] = None
            op = self.graph.ops[self._op_of(value)]
            for read in op.inputs:
                touch(read, slot, depth + 1)

        for slot, saved in enumerate(dropped):
            touch(saved.value, slot, 0)
        made_together = collections.Counter(self._op_of(value) for value in self.needed)
        for value in self.needed:
            # A parameter's view costs nothing; a value read once goes straight to its reader.
            several = made_together[self._op_of(value)] > 1
            if several or (readers[value] > 1 and not self.graph.values[value].free):
                self.memo[value] = len(self.memo)

    # -- code

    def _expression(self, value: int) -> str:
        meta = self.graph.values[value]
        if meta.free and meta.parameter:
            return f"s[{self._tap(value, None)}]"
        reach = self._reachable(value)
        if reach is None:
            return f"g{value}(s, m)"
        other, where = reach
        tap = f"s[{self._tap(other, where)}]"
        if other == value:
            return tap
        shift = meta.offset - self.graph.values[other].offset
        return f"{tap}.as_strided({meta.shape}, {meta.stride}, {tap}.storage_offset() + {shift})"

    def _argument(self, arg: Arg) -> str:
        if isinstance(arg, Ref):
            return self._expression(arg.value)
        if isinstance(arg, tuple):
            return "[" + ", ".join(self._argument(item) for item in arg) + "]"
        if isinstance(arg, Const):
            return self._name("c", constant(arg))
        if isinstance(arg, float) and not math.isfinite(arg):
            return self._name("c", arg)
        return repr(arg)

    def _name(self, prefix: str, content: Any) -> str:
        name = f"{prefix}{len(self.names)}"
        self.names[name] = content
        return name

    def _emit_op(self, op_index: int) -> None:
        op = self.graph.ops[op_index]
        made = [value for value in self.needed if self._op_of(value) == op_index]
        call, results = self._call(op)
        for value in made:
            self.lines.append(f"def g{value}(s, m):  # {op.name} {op.source}")
            if value not in self.memo:
                self.lines += [*call, f"    return {results[value]}"]
                continue
            self.lines += [f"    v = m[{self.memo[value]}]", "    if v is None:"]
            self.lines += ["    " + line for line in call]
            for other in made:
                self.lines.append(f"        m[{self.memo[other]}] = {results[other]}")
            self.lines += [f"        v = m[{self.memo[value]}]", "    return v"]

    def _call(self, op: Op) -> tuple[list[str], dict[int, str]]:
        """Lines that run the operation, and for each value it gives the expression that holds it."""
        function = overload(op.name)
        written = dict(op.written)
        names = [argument.name for argument in function._schema.arguments]
        lines: list[str] = []
        results: dict[int, str] = {}

        def argument(place: int, arg: Arg) -> str:
            if place not in written:
                return self._argument(arg)
            value = written[place]
            before = "None" if op.name in OVERWRITES else self._argument(arg)
            lines.append(f"    w{place} = twin(values[{value}], {before}, device)")
            results[value] = f"w{place}"
            return f"w{place}"

        args = [argument(place, arg) for place, arg in enumerate(op.args)]
        args += [f"{name}={argument(names.index(name), arg)}" for name, arg in op.kwargs]
        lines.append(f"    r = {self._name('f', function)}({', '.join(args)})")
        for place, value in enumerate(op.outputs):
            if value >= 0:
                results.setdefault(value, "r" if len(op.outputs) == 1 else f"r[{place}]")
        return lines, results

    def _emit_slot(self, number: int, saved: Saved) -> tuple[Saved, tuple[int, ...]]:
        release = [f"m[{self.memo[v]}]" for v in self.memo if self.last[v] == number]
        self.lines += [f"def u{number}(s, m):", f"    v = {self._expression(saved.value)}"]
        if release:
            self.lines.append(f"    {' = '.join(release)} = None")
        self.lines.append("    return v")
        self._node(saved.node)  # `find`, which is written last, has to give it
        return saved, self._needs(saved.value)

    def _needs(self, value: int) -> tuple[int, ...]:
        """Taps that this value rests on, whatever the memo may hold."""
        taps: set[int] = set()
        seen: set[int] = set()
        pending = [value]
        while pending:
            current = pending.pop()
            if current in seen:
                continue
            seen.add(current)
            meta = self.graph.values[current]
            if meta.free and meta.parameter:
                taps.add(self._tap(current, None))
                continue
            reach = self._reachable(current)
            if reach is not None:
                taps.add(self._tap(*reach))
            else:
                pending.extend(self.graph.ops[self._op_of(current)].inputs)
        return tuple(sorted(taps))

    def _emit_find(self) -> None:
        """Every node of the graph is visited and its name compared, also where nothing is dropped."""
        parents = {parent for _, parent, _ in self.graph.nodes if parent >= 0}
        self.lines.append("def find(outputs):")
        for index, (name, parent, edge) in enumerate(self.graph.nodes):
            node = f"outputs[{-1 - parent}].grad_fn" if parent < 0 else f"e{parent}[{edge}][0]"
            self.lines += [f"    n{index} = {node}", f"    if n{index}.name() != {name!r}: return {index}"]
            if index in parents:
                self.lines.append(f"    e{index} = n{index}.next_functions")
        found = "".join(f"n{index}, " for index in self.nodes)
        self.lines.append(f"    return ({found})")

    def _slot(self, number: int, saved: Saved, needs: tuple[int, ...]) -> Slot:
        meta = self.graph.values[saved.value]
        op = self.graph.ops[self._op_of(saved.value)]
        return Slot(
            node=self._node(saved.node),
            attribute=saved.attribute,
            item=saved.item,
            shape=meta.shape,
            stride=meta.stride,
            dtype=getattr(torch, meta.dtype),
            grid=sample_grid(meta.shape, meta.stride),
            needs=needs,
            rebuild=self.names[f"u{number}"],
            label=f"{op.name} {list(meta.shape)} {meta.dtype}",
            source=op.source,
        )
