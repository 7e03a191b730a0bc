"""A recipe as a program: what is dropped, and the code that rebuilds it from what is kept (`run.reach`).

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
import math
from collections.abc import Callable
from typing import Any

import torch

from remat._torch_private import any_autocast_enabled, direct_binding
from remat.errors import CaptureError
from remat.records import Arg, Const, Op, Recipe, Ref, RegionGraph, Saved, Value
from remat.run import fused
from remat.run.fusing import Fusing
from remat.run.holders import refuse, unpack_carefully
from remat.run.moved import MovedSlot
from remat.run.program import Program, Slot
from remat.run.reach import Reach
from remat.run.release import Release
from remat.run.replay import OVERWRITES, constant, overload
from remat.run.samples import probes
from remat.run.telling import looked_at

__all__ = ["compile_recipe"]

_DEEPEST_CHAIN = 300  # nested calls of generated functions; Python allows about 1,000

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


def compile_recipe(
    graph: RegionGraph, recipe: Recipe, device: torch.device, *, compile_kernels: bool = True
) -> Program:
    """Raises CaptureError if the recipe cannot be carried out. `compile_kernels=False`: only kernels that are
    compiled already are used; what others would fuse runs operation by operation."""
    return _Compiler(graph, recipe, device, compile_kernels).compile()


class _Compiler:
    def __init__(
        self, graph: RegionGraph, recipe: Recipe, device: torch.device, compile_kernels: bool
    ) -> None:
        self.graph, self.recipe, self.device = graph, recipe, device
        self.at = Reach(graph, recipe)
        self.fusing = Fusing(self.at, device, compile_kernels)
        self.names: dict[str, Any] = _NAMES | {"device": device}  # namespace of the generated code
        self.lines: list[str] = []
        self.memo: dict[int, int] = {}
        self.shown: dict[int, int] = {}  # the one view of a value that all readers want
        self.given: set[int] = set()  # of these: their kernels give that view

    def compile(self) -> Program:
        moved = self._moved_slots()
        dropped = sorted((self.graph.saved[i] for i in self.recipe.dropped), key=lambda saved: saved.order)
        self._plan_memo(dropped)
        for op_index in sorted({self.at.op_of(v) for v in self.needed}):
            self._emit_op(op_index)
        needs = [self.at.needs(saved.value) for saved in dropped]
        checked = looked_at(self.at, dropped)
        for number, saved in enumerate(dropped):
            self._emit_slot(number, saved)
            self._emit_unpack(number, saved, needs[number], number in checked)
        lent = self._lent_slots()
        release = Release(self.at)
        release.write(dropped, needs, [*moved, *lent])
        text = "\n".join((*self.lines, *release.lines))
        self.names |= release.names
        exec(compile(text, "<remat recipe>", "exec"), self.names)
        taps = tuple(n for n, tap in enumerate(self.at.taps) if self.at.is_moved(tap.value))
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
            parameters=tuple(self.at.parameters),
            passed=frozenset(self.at.passed),
            kept=tuple(tap.text for tap in self.at.taps),
            memo_size=len(self.memo),
            replayed_ops=len(self.recipe.replayed),
            text=text,
            graph=self.graph,
            recipe=self.recipe,
            device=self.device,
        )

    # -- what goes to the host

    def _moved_slots(self) -> list[Saved]:
        """Saved tensors whose storages go to the host."""
        found = [saved for saved in self.graph.saved if self.at.is_moved(saved.value)]
        for saved in found:
            if not self.graph.values[saved.value].held:
                raise CaptureError(
                    f"{saved.attribute} of node {saved.node} was written to after it was saved"
                )
        return found

    def _lent_slots(self) -> list[Saved]:
        """Outputs that autograd holds and no replay reads."""
        read = {self.graph.values[tap.value].storage for tap in self.at.taps}
        lent = self.graph.saved_outputs & self.at.kept - self.at.moved - read
        values = self.graph.values
        return [s for s in self.graph.saved if values[s.value].storage in lent and values[s.value].held]

    def _moved_slot(self, saved: Saved) -> MovedSlot:
        meta = self.graph.values[saved.value]
        label = f"{saved.attribute} {list(meta.shape)} {meta.dtype}"
        return MovedSlot(meta.shape, meta.stride, getattr(torch, meta.dtype), label)

    def _send_order(self, moved: list[Saved], taps: tuple[int, ...]) -> tuple[int, ...]:
        values = [*(saved.value for saved in moved), *(self.at.taps[tap].value for tap in taps)]
        return tuple(sorted(range(len(values)), key=lambda place: self.graph.values[values[place]].storage))

    # -- what is computed, and how long it lives

    def _plan_memo(self, dropped: list[Saved]) -> None:
        """Which values are computed, how often read, and by which slot last."""
        readers, views = self._walk(dropped)
        if self.recipe.fused and fused.can_fuse(self.device):
            for value in sorted(
                self.needed, key=self.at.op_of
            ):  # what is read has its tree before its readers
                self.fusing.fuse(value, readers)
            readers, views = self._walk(dropped)
        made_together = collections.Counter(self.at.op_of(value) for value in self.needed)
        for value in self.needed:
            # A value that is read once goes straight to its reader.
            if made_together[self.at.op_of(value)] > 1 or readers[value] > 1:
                self.memo[value] = len(self.memo)
            if len(views[value]) == 1:
                self._show(value, *views[value])

    def _show(self, value: int, wanted: int) -> None:
        """All readers of a value want this view of it: a kernel gives it as it is, otherwise the memo has it,
        so that it is made once and not for every reader."""
        made, view = self.graph.values[value], self.graph.values[wanted]
        if value in self.fusing.kernels and fused.is_given(view, made):
            self.fusing.give(value, view)
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
            wanted, value = value, self.at.base(value)
            if self.at.is_tap(value):
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
                touch(read, slot, depth + 1, by_address=value in self.fusing.kernels)

        for slot, saved in enumerate(dropped):
            touch(saved.value, slot, 0)
        return readers, views

    def _reads(self, value: int) -> tuple[int, ...]:
        """What computing a value reads: for a fused one what its kernel loads."""
        if value in self.fusing.kernels:
            return tuple(dict.fromkeys(leaf.value for leaf in fused.leaves(self.fusing.kernels[value][0])))
        return self.graph.ops[self.at.op_of(value)].inputs

    # -- code

    def _source(self, value: int) -> str:
        """An expression that gives the tensor whose memory holds this value."""
        base = self.at.base(value)
        meta = self.graph.values[base]
        if meta.free and meta.parameter:
            return _place(self.at.tap(base, None))
        reach = self.at.reachable(base)
        if reach is None:
            return f"g{base}(s, m)"
        return f"{_place(self.at.tap(*reach))}{'.get()' if self.at.is_moved(reach[0]) else ''}"

    def _expression(self, value: int) -> str:
        text, at = self._source(value), self.at.holder(value)
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
        made = [value for value in self.needed if self.at.op_of(value) == op_index]
        call, results = self._fused_call(made[0]) if made[0] in self.fusing.kernels else self._call(op)
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
        tree, kernel = self.fusing.kernels[value]
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
        base = self.at.base(value)
        return self.memo.get(base) if self.shown.get(base, base) == value else None

    def _watched(self, needs: tuple[int, ...]) -> tuple[int, ...]:
        """Taps whose versions are compared before they are read. What is on the host watches itself."""
        return tuple(tap for tap in needs if not self.at.is_moved(self.at.taps[tap].value))

    def _slot(self, number: int, saved: Saved, needs: tuple[int, ...], checked: bool) -> Slot:
        meta = self.graph.values[saved.value]
        op = self.graph.ops[self.at.op_of(saved.value)]
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


def _is_transposed(below: Value, above: Value) -> bool:
    return (below.shape[::-1], below.stride[::-1]) == (above.shape, above.stride)


def _place(tap: int) -> str:
    """Where a slot's functions find a kept tensor: the frame comes before them."""
    return f"s[{tap + 1}]"


_NAMES = {
    "autocasts": any_autocast_enabled,
    "carefully": unpack_carefully,
    "empty_strided": torch.empty_strided,
    "is_grad_enabled": torch.is_grad_enabled,
    "refuse": refuse,
}  # of the generated code
