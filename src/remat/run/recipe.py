"""A recipe as a program: where its kept tensors are found, what is dropped, and the code that rebuilds it.

The code is generated once per recipe as straight Python, because it runs between the kernels of a training
step. Each rebuilt value has a function `g<value>(s, m)` that computes it on demand from the kept tensors `s`
and the memo `m`; each dropped saved tensor has a function `r<slot>(s, m)` that calls it and then forgets what
nothing later needs, and a function `u<slot>(s, _)` that does the same for autograd, with the guards that
belong to it. `s` is what stands in the autograd node (run.holders): the frame, then the kept tensors.
Backward asks for the slots in a known order; should it ever ask in another one, or twice (retain_graph), the
functions simply compute again: the order decides how much memory the replay takes, never what it gives.
"""

from __future__ import annotations

import collections
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch

from remat._torch_private import any_autocast_enabled, direct_binding
from remat.errors import CaptureError
from remat.records import Arg, Const, Op, Recipe, Ref, RegionGraph, Role, Saved, Source, Value
from remat.run import fused
from remat.run.holders import refuse, unpack_carefully
from remat.run.moved import MovedSlot
from remat.run.program import Program, Slot
from remat.run.replay import OVERWRITES, constant, overload
from remat.run.samples import probes

__all__ = ["compile_recipe"]

_LOG = logging.getLogger(__name__)

_DEEPEST_CHAIN = 300  # nested calls of generated functions; Python allows about 1,000
_LARGEST_TREE = 24  # operations in one fused kernel


# Bindings that Python reaches faster than the operator itself; called with the same arguments, below
# autograd, they dispatch to the very same kernel.
_FAST: dict[str, Callable[..., Any]] = {
    "aten.add.Tensor": torch.add,
    "aten.addmm.default": torch.addmm,
    "aten.bmm.default": torch.bmm,
    "aten.cat.default": torch.cat,
    "aten.clone.default": torch.clone,
    "aten.cos.default": torch.cos,
    "aten.div.Tensor": torch.div,
    "aten.exp.default": torch.exp,
    "aten.mean.dim": torch.mean,
    "aten.mm.default": torch.mm,
    "aten.mul.Tensor": torch.mul,
    "aten.mul.out": torch.mul,
    "aten.native_layer_norm.default": torch.native_layer_norm,
    "aten.neg.default": torch.neg,
    "aten.pow.Tensor_Scalar": torch.pow,
    "aten.relu.default": torch.relu,
    "aten.rsqrt.default": torch.rsqrt,
    "aten.sigmoid.default": torch.sigmoid,
    "aten.sin.default": torch.sin,
    "aten.sub.Tensor": torch.sub,
    "aten.tanh.default": torch.tanh,
}

# Operations whose result is wrong wherever an operand is. Not among them: sums, where a large term hides the
# error of a small one.
_TELLING = frozenset({
    "mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "mul", "div",
    "neg", "silu", "gelu", "native_dropout", "clone", "copy", "_to_copy", "view",
    "_unsafe_view", "reshape", "t", "transpose", "permute", "unsqueeze", "squeeze", "expand",
})  # fmt: skip


# Where a mode looks on (capture, fake tensors), reshape makes a view; otherwise an alias: the same values,
# edges and saved tensors under another name.
_SAME_NODE = {"ViewBackward0": "ReshapeAliasBackward0", "ReshapeAliasBackward0": "ViewBackward0"}


def compile_recipe(
    graph: RegionGraph, recipe: Recipe, device: torch.device, *, compile_kernels: bool = True
) -> Program:
    """Raises CaptureError if the recipe cannot be carried out. `compile_kernels=False`: only kernels that are
    compiled already are used; what others would fuse runs operation by operation."""
    return _Compiler(graph, recipe, device, compile_kernels).compile()


@dataclass(frozen=True)
class _Tap:
    """A kept tensor that rebuilding reads: an expression that finds it, and what it must look like."""

    expression: str
    text: str
    value: int


@dataclass
class _Compiler:
    graph: RegionGraph
    recipe: Recipe
    device: torch.device
    compile_kernels: bool
    taps: list[_Tap] = field(default_factory=list)
    tap_of: dict[int, int] = field(default_factory=dict)  # value -> its place among the taps
    parameters: list[str] = field(default_factory=list)
    passed: set[tuple[str, str]] = field(default_factory=set)
    names: dict[str, Any] = field(default_factory=dict)  # namespace of the generated code
    lines: list[str] = field(default_factory=list)
    memo: dict[int, int] = field(default_factory=dict)
    shown: dict[int, int] = field(default_factory=dict)  # the one view of a value that all readers want
    given: set[int] = field(default_factory=set)  # of these: their kernels give that view
    kernels: dict[int, tuple[fused.Node, fused.Kernel]] = field(default_factory=dict)  # by value
    trees: dict[int, fused.Node | None] = field(default_factory=dict)  # by value
    nodes: list[int] = field(
        default_factory=list
    )  # graph nodes that are needed, in the order `find` gives them

    def compile(self) -> Program:
        self.kept = set(self.recipe.kept)
        self.moved = set(self.recipe.offloaded)
        moved = self._moved_slots()
        dropped = sorted((self.graph.saved[i] for i in self.recipe.dropped), key=lambda saved: saved.order)
        self._places()
        self._plan_memo(dropped)
        for op_index in sorted({self._op_of(v) for v in self.needed}):
            self._emit_op(op_index)
        needs = [self._needs(saved.value) for saved in dropped]
        checked = self._checked(dropped)
        for number, saved in enumerate(dropped):
            self._emit_slot(number, saved)
            self._emit_unpack(number, saved, needs[number], number in checked)
        self._emit_rows(needs)
        self._emit_hook(dropped)
        self._emit_differs(dropped)
        lent = self._lent_slots()
        self._emit_move([*moved, *lent])
        self._emit_collect()
        self._emit_find()
        text = "\n".join(self.lines)
        self.names |= _NAMES | {"device": self.device}
        exec(compile(text, "<remat recipe>", "exec"), self.names)
        taps = tuple(n for n, tap in enumerate(self.taps) if self._is_moved(tap.value))
        slots = tuple(self._slot(n, saved, needs[n], n in checked) for n, saved in enumerate(dropped))
        return Program(
            find=self.names["find"],
            collect=self.names["collect"],
            rows=self.names["rows"],
            hook=self.names["hook"],
            differs=self.names["differs"],
            move=self.names["move"],
            moved=tuple(self._moved_slot(saved) for saved in moved),
            lent=tuple(self._moved_slot(saved) for saved in lent),
            moved_taps=taps,
            send_order=self._send_order(moved, taps),
            slots=slots,
            probes=probes({n: slot.layout for n, slot in enumerate(slots) if slot.checked}, self.device),
            parameters=tuple(self.parameters),
            passed=frozenset(self.passed),
            kept=tuple(tap.text for tap in self.taps),
            memo_size=len(self.memo),
            replayed_ops=len(self.recipe.replayed),
            text=text,
            graph=self.graph,
            recipe=self.recipe,
            device=self.device,
        )

    # -- where kept values are

    def _places(self) -> None:
        """For each kept storage the tensors by which it can be reached, the cheapest to reach first."""
        self.places: dict[int, list[tuple[int, Saved | Source]]] = collections.defaultdict(list)
        gone = set(self.recipe.dropped)
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
            self.places[self.graph.values[value].storage].append((value, where))

    def _reachable(self, value: int) -> tuple[int, Saved | Source] | None:
        """A live tensor of the same memory, dtype and bits, exactly this value if there is one."""
        wanted = self.graph.values[value]
        if not wanted.held:
            return None
        # Where two foreign tensors lie relative to each other is not known of a later run.
        exact = self.graph.storages[wanted.storage].role is Role.FOREIGN
        found = None
        for other, where in self.places.get(wanted.storage, ()):
            if other == value:
                return other, where
            same = self.graph.values[other]
            if found is None and not exact and (same.dtype, same.bits) == (wanted.dtype, wanted.bits):
                found = (other, where)
        return found

    def _tap(self, value: int, where: Saved | Source | None) -> int:
        if value not in self.tap_of:
            self.tap_of[value] = len(self.taps)
            self.taps.append(_Tap(*self._find_expression(value, where), value))
        return self.tap_of[value]

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
            node = f"n[{self._node(where.node)}]"
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

    def _node(self, node: int) -> int:
        if node not in self.nodes:
            self.nodes.append(node)
        return self.nodes.index(node)

    # -- what goes to the host

    def _is_moved(self, value: int) -> bool:
        return self.graph.values[value].storage in self.moved

    def _moved_slots(self) -> list[Saved]:
        """Saved tensors whose storages go to the host."""
        found = [saved for saved in self.graph.saved if self._is_moved(saved.value)]
        for saved in found:
            if not self.graph.values[saved.value].held:
                raise CaptureError(
                    f"{saved.attribute} of node {saved.node} was written to after it was saved"
                )
        return found

    def _lent_slots(self) -> list[Saved]:
        """Outputs that autograd holds and no replay reads."""
        read = {self.graph.values[tap.value].storage for tap in self.taps}
        lent = self.graph.saved_outputs & self.kept - self.moved - read
        values = self.graph.values
        return [s for s in self.graph.saved if values[s.value].storage in lent and values[s.value].held]

    def _moved_slot(self, saved: Saved) -> MovedSlot:
        meta = self.graph.values[saved.value]
        label = f"{saved.attribute} {list(meta.shape)} {meta.dtype}"
        return MovedSlot(meta.shape, meta.stride, getattr(torch, meta.dtype), label)

    def _send_order(self, moved: list[Saved], taps: tuple[int, ...]) -> tuple[int, ...]:
        values = [*(saved.value for saved in moved), *(self.taps[tap].value for tap in taps)]
        return tuple(sorted(range(len(values)), key=lambda place: self.graph.values[values[place]].storage))

    # -- what is computed, and how long it lives

    def _op_of(self, value: int) -> int:
        producer = self.graph.values[value].producer
        if producer is None:
            raise CaptureError(f"value {value} cannot be rebuilt: nothing in the region makes it")
        return producer

    def _is_tap(self, value: int) -> bool:
        meta = self.graph.values[value]
        return bool(meta.free and meta.parameter) or self._reachable(value) is not None

    def _base(self, value: int) -> int:
        """The value that this one is a plain view of, however many views lie between."""
        while not self._is_tap(value):
            op = self.graph.ops[self._op_of(value)]
            if not op.view or not op.inputs:
                break
            below, above = self.graph.values[op.inputs[0]], self.graph.values[value]
            same = (below.storage, below.epoch, below.dtype, below.bits)
            if same != (above.storage, above.epoch, above.dtype, above.bits):
                break
            value = op.inputs[0]
        return value

    def _plan_memo(self, dropped: list[Saved]) -> None:
        """Which values are computed, how often read, and by which slot last."""
        readers, views = self._walk(dropped)
        if self.recipe.fused and fused.can_fuse(self.device):
            for value in sorted(self.needed, key=self._op_of):  # what is read has its tree before its readers
                self._fuse(value, readers)
            readers, views = self._walk(dropped)
        made_together = collections.Counter(self._op_of(value) for value in self.needed)
        for value in self.needed:
            # A value that is read once goes straight to its reader.
            if made_together[self._op_of(value)] > 1 or readers[value] > 1:
                self.memo[value] = len(self.memo)
            if len(views[value]) == 1:
                self._show(value, *views[value])

    def _show(self, value: int, wanted: int) -> None:
        """All readers of a value want this view of it: a kernel gives it as it is, otherwise the memo has it,
        so that it is made once and not for every reader."""
        made, view = self.graph.values[value], self.graph.values[wanted]
        if value in self.kernels and fused.is_given(view, made):
            tree, _ = self.kernels[value]
            self.kernels[value] = tree, fused.kernel(tree, made, self.device, given=view, compile_new=False)
            self.shown[value] = wanted
            self.given.add(value)
        elif value in self.memo and view.offset == made.offset:
            self.shown[value] = wanted

    def _walk(self, dropped: list[Saved]) -> tuple[collections.Counter[int], dict[int, set[int]]]:
        """Walk backward once. Returns how often each value is read, and as which views of it."""
        self.needed: dict[int, None] = {}
        self.last: dict[int, int] = {}
        readers: collections.Counter[int] = collections.Counter()
        views: dict[int, set[int]] = collections.defaultdict(set)

        def touch(value: int, slot: int, depth: int, *, by_address: bool = False) -> None:
            wanted, value = value, self._base(value)
            if self._is_tap(value):
                return
            if depth > _DEEPEST_CHAIN:
                raise CaptureError(f"rebuilding takes a chain of more than {_DEEPEST_CHAIN} operations")
            readers[value] += 1
            if not by_address:
                views[value].add(wanted)
            self.last[value] = slot
            if value in self.needed:
                return
            self.needed[value] = None
            for read in self._reads(value):
                touch(read, slot, depth + 1, by_address=value in self.kernels)

        for slot, saved in enumerate(dropped):
            touch(saved.value, slot, 0)
        return readers, views

    def _reads(self, value: int) -> tuple[int, ...]:
        """What computing a value reads: for a fused one what its kernel loads."""
        if value in self.kernels:
            return tuple(dict.fromkeys(leaf.value for leaf in fused.leaves(self.kernels[value][0])))
        return self.graph.ops[self._op_of(value)].inputs

    # -- elementwise operations in one kernel

    def _fuse(self, value: int, readers: collections.Counter[int]) -> None:
        tree = self._tree(value, readers)
        if tree is None or not self._is_worth_it(tree, value):
            return
        try:
            made = self.graph.values[value]
            kernel = fused.kernel(tree, made, self.device, compile_new=self.compile_kernels)
            self.kernels[value] = (tree, kernel)
        except fused.NotCompiledError:
            pass
        except Exception as error:  # a compiler's errors are its own; operation by operation always works
            _LOG.warning("a chain of operations runs unfused, its kernel does not compile: %s", error)

    def _is_worth_it(self, tree: fused.Node, value: int) -> bool:
        """More than one operation, or one that torch's kernels are slow at: a cast, a broadcast."""
        made = self.graph.values[value]
        simple = all(
            leaf.dtype == made.dtype and leaf.shape == made.shape and leaf.stride == made.stride
            for leaf in fused.leaves(tree)
        )
        return fused.size_of(tree) > 1 or not simple

    def _tree(self, value: int, readers: collections.Counter[int]) -> fused.Node | None:
        if value not in self.trees:
            self.trees[value] = self._new_tree(value, readers)
        return self.trees[value]

    def _new_tree(self, value: int, readers: collections.Counter[int]) -> fused.Node | None:
        op = self.graph.ops[self._op_of(value)]
        if not fused.is_fusible(self.graph, op):
            return None
        types = {self.graph.values[v].dtype for v in op.inputs}
        if not all(fused.is_exact(op, dtype, self.device) for dtype in types):
            return None
        inner = tuple(
            self._operand(operand, readers) if isinstance(operand, int) else operand
            for operand in fused.operands(op) or ()
        )
        return fused.node(self.graph, op, inner)

    def _operand(self, value: int, readers: collections.Counter[int]) -> fused.Node | fused.Leaf:
        """The operations behind an operand too, if nobody else wants it or it costs no more to compute it
        again than to load it."""
        if self._base(value) == value and not self._is_tap(value):
            tree = self._tree(value, readers)
            if tree is not None and fused.size_of(tree) < _LARGEST_TREE:
                loads = sum(_nbytes(self.graph.values[leaf.value]) for leaf in fused.leaves(tree))
                if readers[value] == 1 or loads <= _nbytes(self.graph.values[value]):
                    return tree
        meta = self.graph.values[value]
        shift = meta.offset - self.graph.values[self._holder(value)].offset
        return fused.Leaf(value, meta.shape, meta.stride, shift, meta.dtype)

    def _checked(self, dropped: list[Saved]) -> set[int]:
        """Slots to look at, such that none of the others is wrong if they are right."""
        wholes = {self._base(saved.value) for saved in dropped if self._is_whole(saved.value)}
        told: set[int] = set()
        chosen = set()
        for number, saved in enumerate(dropped):  # backward asks for the end of a chain first
            base, whole = self._base(saved.value), self._is_whole(saved.value)
            if whole and base in told and not self._is_of_input(saved.value):
                continue
            chosen.add(number)
            if whole and not self._is_tap(base):
                told |= self._told_by(base, wholes)
        return chosen

    def _is_whole(self, value: int) -> bool:
        """Not a part of what it is a view of."""
        shapes = (self.graph.values[each].shape for each in (value, self._base(value)))
        return len({math.prod(shape) for shape in shapes}) == 1

    def _told_by(self, value: int, wholes: set[int]) -> set[int]:
        """Values that are right if this one is: down the chain of operations that let every error of an
        operand through, as long as nothing else that may be wrong could make up for it. A comparison hides
        most errors, a norm those that all elements share; so does a value that is read twice on the way."""
        below = self._ops_below(value)
        readers = collections.Counter(self._base(read) for op in below for read in self.graph.ops[op].inputs)
        told = {value}
        while True:
            op = self.graph.ops[self._op_of(value)]
            if op.name.split(".")[1] not in _TELLING or not _is_number(self.graph.values[value].dtype):
                return told
            reads = [read for read in op.inputs if not self._is_tap(self._base(read))]
            follow = [r for r in reads if self._is_whole(r) and readers[self._base(r)] == 1]
            if not follow or any(self._base(r) not in wholes for r in reads if r != follow[0]):
                return told
            value = self._base(follow[0])
            told.add(value)

    def _is_of_input(self, value: int) -> bool:
        """A view of an input: where it begins there is not checked by its offset."""
        return self.graph.storages[self.graph.values[value].storage].role is Role.INPUT

    def _ops_below(self, value: int) -> set[int]:
        found: set[int] = set()
        pending = [self._base(value)]
        while pending:
            current = self._base(pending.pop())
            if not self._is_tap(current) and self._op_of(current) not in found:
                found.add(self._op_of(current))
                pending.extend(self.graph.ops[self._op_of(current)].inputs)
        return found

    # -- code

    def _holder(self, value: int) -> int:
        """The value of the tensor whose memory holds this one: a tap, or what is computed."""
        base = self._base(value)
        meta = self.graph.values[base]
        if meta.free and meta.parameter:
            return base
        reach = self._reachable(base)
        if reach is None:
            self._refuse_beyond(base, value)
        return base if reach is None else reach[0]

    def _source(self, value: int) -> str:
        """An expression that gives the tensor whose memory holds this value."""
        base = self._base(value)
        meta = self.graph.values[base]
        if meta.free and meta.parameter:
            return _place(self._tap(base, None))
        reach = self._reachable(base)
        if reach is None:
            return f"g{base}(s, m)"
        return f"{_place(self._tap(*reach))}{'.get()' if self._is_moved(reach[0]) else ''}"

    def _expression(self, value: int) -> str:
        text, at = self._source(value), self._holder(value)
        at = self.shown.get(at, at)
        return text if at == value else self._view(text, at, value)

    def _view(self, text: str, base: int, value: int) -> str:
        """Any view of plain memory is one as_strided; offsets are relative: a run may start elsewhere."""
        below, above = self.graph.values[base], self.graph.values[value]
        shift = above.offset - below.offset
        if shift == 0:
            if len(below.shape) == 2 and _is_transposed(below, above):
                return f"{text}.mT"  # of a weight; it takes less
            return f"{text}.as_strided({above.shape}, {above.stride})"
        return f"shifted({text}, {above.shape}, {above.stride}, {shift})"

    def _refuse_beyond(self, base: int, value: int) -> None:
        """What is rebuilt has memory of its own, just as much as it needs."""
        (low, high), (first, last) = (_extent(self.graph.values[v]) for v in (base, value))
        if first < low or last > high:
            raise CaptureError(f"value {value} is a view that reaches beyond the rebuilt value {base}")

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
        call, results = self._fused_call(made[0]) if made[0] in self.kernels else self._call(op)
        for value in made:
            if self.shown.get(value, value) != value and value not in self.given:
                results[value] = self._view(results[value], value, self.shown[value])
        for value in made:
            self.lines.append(f"def g{value}(s, m):  # {op.name} {op.source}")
            if value not in self.memo:
                self.lines += [*call, f"    return {results[value]}"]
                continue
            self.lines += [f"    v = m[{self.memo[value]}]", "    if v is None:"]
            self.lines += ["    " + line for line in call]
            for other in made:
                also = "v = " if other == value else ""
                self.lines.append(f"        {also}m[{self.memo[other]}] = {results[other]}")
            self.lines.append("    return v")

    def _fused_call(self, value: int) -> tuple[list[str], dict[int, str]]:
        tree, kernel = self.kernels[value]
        tensors = ", ".join(self._source(leaf.value) for leaf in fused.leaves(tree))
        return [f"    r = {self._name('k', kernel)}({tensors})"], {value: "r"}

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
            before = "" if op.name in OVERWRITES else f".copy_({self._argument(arg)})"
            lines.append(f"    w{place} = {self._fresh(value)}{before}")
            results[value] = f"w{place}"
            return f"w{place}"

        args = [argument(place, arg) for place, arg in enumerate(op.args)]
        args += [f"{name}={argument(names.index(name), arg)}" for name, arg in op.kwargs]
        if self._is_plain_cast(op):
            lines.append(f"    r = {args[0]}.to({args[1].removeprefix('dtype=')})")
        else:
            fast = _FAST.get(op.name) or direct_binding(op.name) or function
            lines.append(f"    r = {self._name('f', fast)}({', '.join(args)})")
        for place, value in enumerate(op.outputs):
            if value >= 0:
                results.setdefault(value, "r" if len(op.outputs) == 1 else f"r[{place}]")
        return lines, results

    def _is_plain_cast(self, op: Op) -> bool:
        """Tensor.to does it in half the time; to the same dtype it would not make a copy."""
        if op.name != "aten._to_copy.default" or [name for name, _ in op.kwargs] != ["dtype"]:
            return False
        return self.graph.values[op.inputs[0]].dtype != self.graph.values[op.outputs[0]].dtype

    def _fresh(self, value: int) -> str:
        """Memory of its own for a value that an operation writes to: its functional twin."""
        meta = self.graph.values[value]
        return f"empty_strided({meta.shape}, {meta.stride}, dtype={self._dtype(value)}, device=device)"

    def _dtype(self, value: int) -> str:
        name = self.graph.values[value].dtype
        self.names[f"dtype_{name}"] = getattr(torch, name)
        return f"dtype_{name}"

    def _rebuilding(self, number: int, saved: Saved) -> list[str]:
        release = [f"m[{self.memo[v]}]" for v in self.memo if self.last[v] == number]
        forget = [f"    {' = '.join(release)} = None"] if release else []
        return [f"    v = {self._expression(saved.value)}", *forget]

    def _emit_slot(self, number: int, saved: Saved) -> None:
        self.lines += [f"def r{number}(s, m):", *self._rebuilding(number, saved), "    return v"]

    def _emit_unpack(self, number: int, saved: Saved, needs: tuple[int, ...], checked: bool) -> None:
        """What autograd calls when it wants the saved tensor back."""
        watched = self._watched(needs)
        guards = [f"if is_grad_enabled() or autocasts(): return carefully(s, {number})"]
        if watched:
            changed = " or ".join(f"{_place(tap)}._version != e[{tap}]" for tap in watched)
            guards = ["e = f.versions", f"if {changed}: refuse(s, {number})", *guards]
        rebuild, *forget = self._rebuilding(number, saved)
        self.lines += [f"def u{number}(s, _):", "    f = s[0]", "    if f.keeps: return f.get()"]
        self.lines.append("    m = f.memo")
        ready = self._ready(saved.value)
        if ready is None:
            self.lines += [*(f"    {guard}" for guard in guards), rebuild]
        else:  # rebuilt for another slot before, from what was as it should be then
            self.lines += [f"    v = m[{ready}]", "    if v is None:"]
            self.lines += [*(f"        {guard}" for guard in guards), f"    {rebuild}"]
        self.lines += forget
        if checked:
            self.lines += ["    k = f.check", f"    if k is not None: k.see({number}, v)"]
        self.lines += ["    c = f.counts", "    c.rebuilt += 1", "    c.in_backward = True", "    return v"]

    def _ready(self, value: int) -> int | None:
        """Where in the memo this very tensor may be."""
        base = self._base(value)
        return self.memo.get(base) if self.shown.get(base, base) == value else None

    def _watched(self, needs: tuple[int, ...]) -> tuple[int, ...]:
        """Taps whose versions are compared before they are read. What is on the host watches itself."""
        return tuple(tap for tap in needs if not self._is_moved(self.taps[tap].value))

    def _needs(self, value: int) -> tuple[int, ...]:
        """Taps that this value rests on, whatever the memo may hold."""
        taps: set[int] = set()
        seen: set[int] = set()
        pending = [value]
        while pending:
            current = self._base(pending.pop())
            if current in seen:
                continue
            seen.add(current)
            meta = self.graph.values[current]
            if meta.free and meta.parameter:
                taps.add(self._tap(current, None))
            elif (reach := self._reachable(current)) is not None:
                taps.add(self._tap(*reach))
            else:
                pending.extend(self.graph.ops[self._op_of(current)].inputs)
        return tuple(sorted(taps))

    def _emit_rows(self, needs: list[tuple[int, ...]]) -> None:
        """Each slot has a row of its own, with what it reads and nothing else: a row dies with its node, and
        with the last row that has it a kept tensor."""
        self.lines += ["def rows(f, s):", "    return ("]
        for wanted in needs:
            kept = (f"s[{tap}]" if tap in wanted else "None" for tap in range(len(self.taps)))
            self.lines.append(f"        [{', '.join(['f', *kept])}],")
        self.lines.append("    )")

    def _emit_hook(self, dropped: list[Saved]) -> None:
        """No Python runs in it but its own: autograd hands the tensor to a list's append, keeps the None that
        it gets, and will call the slot's function with the row that it is bound to."""
        self.lines += ["def hook(n, rows, pack):", "    pass"]
        for number, saved in enumerate(dropped):
            self.lines.append(
                f"    {self._raw(saved)}.register_hooks(pack, method(u{number}, rows[{number}]))"
            )

    def _emit_move(self, moved: list[Saved]) -> None:
        self.lines += ["def move(n, h, unpack):", "    pass"]
        for number, saved in enumerate(moved):
            self.lines.append(f"    {self._raw(saved)}.register_hooks(h[{number}].pack, unpack)")

    def _raw(self, saved: Saved) -> str:
        item = "" if saved.item < 0 else f"[{saved.item}]"
        return f"n[{self._node(saved.node)}].{saved.attribute}{item}"

    def _emit_differs(self, dropped: list[Saved]) -> None:
        self.lines.append("def differs(tensors):")
        for number, saved in enumerate(dropped):
            meta = self.graph.values[saved.value]
            # An input's storage may begin anywhere.
            begins = "" if self._is_of_input(saved.value) else f" or t.storage_offset() != {meta.offset}"
            self.lines += [
                f"    t = tensors[{number}]",
                f"    if t.shape != {meta.shape} or t.dtype is not {self._dtype(saved.value)} "
                f"or t.stride() != {meta.stride}{begins}: return {number}",
            ]
        self.lines.append("    return None")

    def _emit_collect(self) -> None:
        self.lines += ["def shifted(t, shape, stride, shift):"]
        self.lines += ["    return t.as_strided(shape, stride, t.storage_offset() + shift)"]
        self.lines.append("def collect(n, p, i, z):")
        self._emit_aliases()
        for number, tap in enumerate(self.taps):
            meta = self.graph.values[tap.value]
            self.lines.append(f"    s{number} = {tap.expression}")
            self.lines.append(
                f"    if s{number}.shape != {meta.shape} or s{number}.dtype is not {self._dtype(tap.value)} "
                f"or s{number}.stride() != {meta.stride}: return {number}"
            )
        self.lines.append(f"    return ({''.join(f's{number}, ' for number in range(len(self.taps)))})")

    def _emit_aliases(self) -> None:
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
            if storage in self.kept:
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

    def _emit_find(self) -> None:
        """Every node of the graph is visited and its name compared, also where nothing is dropped."""
        parents = {parent for _, parent, _ in self.graph.nodes if parent >= 0}
        names = [name for name, _, _ in self.graph.nodes]
        self.names["types"], self.names["is_other"] = _known_nodes(names)
        self.lines.append("def find(outputs):")
        for index, (_, parent, edge) in enumerate(self.graph.nodes):
            node = f"outputs[{-1 - parent}].grad_fn" if parent < 0 else f"e{parent}[{edge}][0]"
            other = f"type(n{index}) is not types[{index}] and is_other({index}, n{index})"
            self.lines += [f"    n{index} = {node}", f"    if {other}: return {index}"]
            if index in parents:
                self.lines.append(f"    e{index} = n{index}.next_functions")
        found = "".join(f"n{index}, " for index in self.nodes)
        self.lines.append(f"    return ({found})")

    def _slot(self, number: int, saved: Saved, needs: tuple[int, ...], checked: bool) -> Slot:
        meta = self.graph.values[saved.value]
        op = self.graph.ops[self._op_of(saved.value)]
        return Slot(
            shape=meta.shape,
            stride=meta.stride,
            dtype=getattr(torch, meta.dtype),
            checked=checked,
            needs=self._watched(needs),
            rebuild=self.names[f"r{number}"],
            label=f"{op.name} {list(meta.shape)} {meta.dtype}",
            source=op.source,
        )


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


def _is_transposed(below: Value, above: Value) -> bool:
    return (below.shape[::-1], below.stride[::-1]) == (above.shape, above.stride)


def _is_number(dtype: str) -> bool:
    found: torch.dtype = getattr(torch, dtype)
    return found.is_floating_point or found.is_complex


def _place(tap: int) -> str:
    """Where a slot's functions find a kept tensor: the frame comes before them."""
    return f"s[{tap + 1}]"


def _extent(value: Value) -> tuple[int, int]:
    """First and last element that a value touches, in elements of its storage."""
    if 0 in value.shape:
        return value.offset, value.offset
    reach = sum((size - 1) * step for size, step in zip(value.shape, value.stride, strict=True))
    return value.offset, value.offset + reach


def _nbytes(value: Value) -> int:
    return math.prod(value.shape) * int(getattr(torch, value.dtype).itemsize)


def _byte_offset(value: Value) -> int:
    return value.offset * getattr(torch, value.dtype).itemsize  # type: ignore[no-any-return]


def saved_of(node: Any, attribute: str) -> Any:
    """A list of saved tensors: a Python function's node keeps it under another name than a C++ node."""
    name = "_saved_" + attribute.removeprefix("_raw_saved_")
    return getattr(node, name) if hasattr(node, name) else node.saved_tensors


_NAMES = {
    "autocasts": any_autocast_enabled,
    "carefully": unpack_carefully,
    "empty_strided": torch.empty_strided,
    "is_grad_enabled": torch.is_grad_enabled,
    "method": MethodType,
    "refuse": refuse,
    "saved": saved_of,
}  # of the generated code
