"""The joint graph of a compiled block, forward and backward in one, as a graph to seek recipes for.

What the compiler is about to split into a forward and a backward graph is read into the same records as an
eager region: every value that forward computes and backward reads is a saved tensor, and any value of forward
may be kept. What depends on gradients, or serves backward alone, always runs in backward.

Prices are those of compiled code: products and attention take what they take alone (measured on CUDA), while
what the compiler fuses into its neighbours costs no launch and hardly any traffic of its own. Keeping a value
that forward would not have written to memory has a price, too. These are estimates, to rank saved sets by:
the best ones are compiled and measured.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from remat._torch_private import WRITTEN, size_hint
from remat.records import Arg, Op, Recipe, RegionGraph, Role, Saved, Storage, Value
from remat.trace.flops import flops_of
from remat.trace.fusion import is_fused, touched_bytes
from remat.trace.price import HOST, Rates, time_cuda
from remat.trace.record import RANDOM, draws_random_numbers

__all__ = [
    "Joint",
    "is_random",
    "is_view",
    "kept_labels",
    "labels",
    "made_bytes",
    "price_joint",
    "read_joint",
    "readers",
]

_FUSED_SHARE = 0.25  # of the seconds that moving a fused operation's result would take
_PROBE_BYTES = 1 << 26  # moved to see how fast the device does it
_WRITTEN_TO = "reads a tensor that forward writes to"
_ALIASES = ("aten._unsafe_view.default",)  # views, though their schema does not say so


@dataclass(frozen=True)
class Joint:
    """`keep_seconds[s]` is what keeping storage s costs beside its bytes (less than 0: backward would have to
    write it to memory if it were not kept)."""

    graph: RegionGraph
    nodes: tuple[fx.Node, ...]  # of each operation
    backward: tuple[fx.Node, ...]  # make tensors of forward's values alone, but only for backward
    keep_seconds: tuple[float, ...] = ()

    @property
    def random(self) -> bool:
        return is_random(self.graph)


def is_random(graph: RegionGraph) -> bool:
    return any(op.reason == RANDOM for op in graph.ops)


def labels(ops: Iterable[Op], *, placed: bool = False) -> tuple[str, ...]:
    """A name for each operation that is the same in every graph of this block, whatever the lengths: its own,
    and its number among those of that name. `placed`: among those of that name and source line, which is also
    the same where operations that several blocks have in common were merged."""
    seen: Counter[str] = Counter()
    named = []
    for op in ops:
        name = f"{op.name}@{op.source}" if placed else op.name
        named.append(f"{name}#{seen[name]}")
        seen[name] += 1
    return tuple(named)


def kept_labels(graph: RegionGraph, recipe: Recipe, *, placed: bool = False) -> frozenset[str]:
    """The operations whose results a recipe keeps."""
    names = labels(graph.ops, placed=placed)
    kept = set(recipe.kept)
    return frozenset(
        names[value.producer]
        for value in graph.values
        if value.storage in kept and value.producer is not None and not graph.ops[value.producer].view
    )


def read_joint(
    module: fx.GraphModule, resident: Iterable[int], outputs: int, inputs: Sequence[int] = ()
) -> Joint:
    """`resident`: which primals are parameters or buffers. `outputs`: how many outputs are forward's.
    `inputs`: the primal of each tensor that the block is called with, -1 for one that the graph never reads.
    """
    return _Reader(module.graph, frozenset(resident), outputs).read(inputs)


class _Reader:
    def __init__(self, graph: fx.Graph, resident: frozenset[int], outputs: int) -> None:
        self._graph = graph
        self._resident = resident
        self._storages: list[Storage] = []
        self._values: list[Value] = []
        self._value: dict[fx.Node, int] = {}
        self._ops: list[Op] = []
        self._op: dict[fx.Node, int] = {}
        self._written: set[int] = set()  # storages of inputs that forward writes to
        results = [node if isinstance(node, fx.Node) else None for node in _results(graph)]
        self._outputs = [node for node in results[:outputs] if node is not None]
        self._gradients = [node for node in results[outputs:] if node is not None]
        self._forward = _ancestors(self._outputs)
        for node in graph.nodes:  # results that only backward wants are made in forward all the same
            if node.target is operator.getitem and node.args[0] in self._forward:
                self._forward.add(node)

    def read(self, inputs: Sequence[int]) -> Joint:
        primals = []
        for node in self._graph.nodes:
            if node.op == "placeholder" and not _is_tangent(node):
                primals.append(node)
                if isinstance(node.meta.get("val"), torch.Tensor):
                    role = Role.PARAMETER if len(primals) - 1 in self._resident else Role.INPUT
                    self._add(node, self._storage(node, role), None)
                    if node.meta.get(WRITTEN):
                        self._written.add(self._values[self._value[node]].storage)
            elif node.op == "call_function" and node in self._forward:
                self._read_op(node)
        for node in self._outputs:
            self._is_output(node)
        graph = RegionGraph(
            storages=tuple(self._storages),
            values=tuple(self._values),
            ops=tuple(self._ops),
            saved=tuple(self._saved()),
            nodes=(),
            sources=(),
            inputs=tuple(self._input(primals, primal) for primal in inputs),
            outputs=tuple(self._value[node] for node in self._outputs if node in self._value),
        )
        # Inputs that the graph never reads were added as values of their own.
        graph = replace(graph, storages=tuple(self._storages), values=tuple(self._values))
        return Joint(graph, tuple(self._op), tuple(self._of_backward()))

    def _input(self, primals: list[fx.Node], primal: int) -> int:
        if 0 <= primal < len(primals) and primals[primal] in self._value:
            return self._value[primals[primal]]
        self._storages.append(Storage(0, Role.INPUT))
        self._values.append(Value(len(self._storages) - 1, 0, (), (), 0, "float32", None, held=False))
        return len(self._values) - 1

    def _read_op(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            self._read_item(node)
            return
        if not _yields_tensors(node):
            return
        name = str(node.target)
        view = is_view(node.target)
        index = len(self._ops)
        self._op[node] = index
        reason = RANDOM if _is_random(node) else _WRITTEN_TO if self._reads_written(node, view) else ""
        self._ops.append(
            Op(
                name=name,
                args=_constants(node),
                kwargs=(),
                inputs=tuple(self._value[n] for n in node.all_input_nodes if n in self._value),
                outputs=(),
                flops=0 if view else _flops(node),
                replayable=not reason,
                view=view,
                reason=reason,
                source=_source(node),
            )
        )
        if isinstance(node.meta["val"], torch.Tensor):
            made = self._base(node) if view else self._storage(node, Role.INTERNAL)
            self._add(node, made, index)

    def _reads_written(self, node: fx.Node, view: bool) -> bool:
        """Backward would find there what forward has left. A view is only looked at by what reads it."""
        read = (self._values[self._value[n]].storage for n in node.all_input_nodes if n in self._value)
        return not view and not self._written.isdisjoint(read)

    def _read_item(self, node: fx.Node) -> None:
        parent = node.args[0]
        if parent not in self._op or not isinstance(node.meta.get("val"), torch.Tensor):
            return
        index = self._op[parent]  # type: ignore[index]
        op = self._ops[index]
        if op.view:
            storage = self._base(parent)  # type: ignore[arg-type]
        else:
            storage = self._storage(node, Role.INTERNAL)
        self._add(node, storage, index)

    def _base(self, node: fx.Node) -> int:
        """The storage that a view shows: that of its first tensor."""
        first = next(n for n in node.all_input_nodes if n in self._value)
        return self._values[self._value[first]].storage

    def _storage(self, node: fx.Node, role: Role) -> int:
        self._storages.append(Storage(_nbytes(node.meta["val"]), role))
        return len(self._storages) - 1

    def _add(self, node: fx.Node, storage: int, producer: int | None) -> None:
        value = node.meta["val"]
        self._value[node] = len(self._values)
        self._values.append(
            Value(
                storage=storage,
                epoch=0,
                shape=tuple(size_hint(size) for size in value.shape),
                stride=tuple(size_hint(size) for size in value.stride()),
                offset=0,
                dtype=str(value.dtype).removeprefix("torch."),
                producer=producer,
                held=True,
                free=self._storages[storage].role is Role.PARAMETER,
            )
        )
        if producer is not None:
            op = self._ops[producer]
            self._ops[producer] = replace(op, outputs=(*op.outputs, self._value[node]))

    def _is_output(self, node: fx.Node) -> None:
        if node in self._value:
            storage = self._values[self._value[node]].storage
            if self._storages[storage].role is Role.INTERNAL:
                self._storages[storage] = replace(self._storages[storage], role=Role.OUTPUT)

    def _of_backward(self) -> list[fx.Node]:
        """What only backward wants, though it depends on no gradient."""
        behind: set[fx.Node] = set()
        found = []
        for node in self._graph.nodes:
            if _is_tangent(node) or any(read in behind for read in node.all_input_nodes):
                behind.add(node)
            elif node.op == "call_function" and node not in self._forward and _yields_tensors(node):
                found.append(node)
        return found

    def _saved(self) -> list[Saved]:
        """Each value that something of backward reads, in the order in which backward reads first."""
        read = [
            value
            for node in self._graph.nodes
            if node.op != "output" and node not in self._forward
            for value in node.all_input_nodes
        ]
        found = [self._value[node] for node in (*read, *self._gradients) if node in self._value]
        return [Saved(i, "", 0, value, i) for i, value in enumerate(dict.fromkeys(found))]


def _is_tangent(node: fx.Node) -> bool:
    return "tangents" in str(node.target)


def _results(graph: fx.Graph) -> list[Any]:
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    return list(output.args[0])


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found


def _constants(node: fx.Node) -> tuple[Arg, ...]:
    """Numbers and text among the arguments: blocks that differ in them are different blocks."""
    return tuple(
        arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, (bool, int, float, str))
    )


def _yields_tensors(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return any(isinstance(item, torch.Tensor) for item in value)
    return isinstance(value, torch.Tensor)


def is_view(target: Any) -> bool:
    """Whether an operation only shows what it reads."""
    schema = getattr(target, "_schema", None)
    if str(target) in _ALIASES:
        return True
    return schema is not None and any(
        r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
    )


def _is_random(node: fx.Node) -> bool:
    return hasattr(node.target, "_schema") and draws_random_numbers(node.target, node.args, node.kwargs)


def made_bytes(node: fx.Node) -> int:
    """What the results of an operation take."""
    value = node.meta.get("val")
    results = value if isinstance(value, (tuple, list)) else (value,)
    return sum(_nbytes(result) for result in results if isinstance(result, torch.Tensor))


def _nbytes(value: torch.Tensor) -> int:
    last = sum((size_hint(n) - 1) * size_hint(s) for n, s in zip(value.shape, value.stride(), strict=True))
    return (last + 1) * value.element_size() if all(size_hint(n) for n in value.shape) else 0


def _flops(node: fx.Node) -> int:
    def concrete(read: fx.Node) -> Any:
        return _map(read.meta.get("val"), lambda tensor: _empty(tensor, "meta"))

    args, kwargs = fx.map_arg((node.args, node.kwargs), concrete)
    return flops_of(node.target, args, kwargs, concrete(node))


def _map(value: Any, change: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_map(item, change) for item in value)
    return size_hint(value) if isinstance(value, torch.SymInt) else value


def _empty(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    shape = [size_hint(size) for size in tensor.shape]
    stride = [size_hint(size) for size in tensor.stride()]
    return torch.empty_strided(shape, stride, dtype=tensor.dtype, device=device)


def _source(node: fx.Node) -> str:
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    if not lines:
        return ""
    path, number = lines[-1].split('"')[1], lines[-1].split("line ")[1].split(",")[0]
    return f"{path.rsplit('/', 1)[-1]}:{number}"


# ------------------------------------------------------------------------------------------------ prices


def price_joint(joint: Joint, device: torch.device) -> Joint:
    """The same with seconds: of every operation if it is replayed, of every storage if it is kept."""
    rates = _rates(device)
    measured: dict[Any, float] = {}
    ops = []
    for op, node in zip(joint.graph.ops, joint.nodes, strict=True):
        if op.view:
            ops.append(op)
            continue
        if is_fused(node.target):
            ops.append(replace(op, seconds=_fused_seconds(joint.graph, op, rates)))
            continue
        key = (op.name, tuple(_layout(joint.graph, value) for value in op.inputs))
        if key not in measured:
            measured[key] = _alone_seconds(joint.graph, op, node, rates, device)
        ops.append(replace(op, seconds=measured[key]))
    graph = replace(joint.graph, ops=tuple(ops))
    return replace(joint, graph=graph, keep_seconds=_keep_seconds(joint, rates))


def _layout(graph: RegionGraph, value: int) -> Any:
    return graph.values[value].shape, graph.values[value].stride, graph.values[value].dtype


def _rates(device: torch.device) -> Rates:
    if device.type != "cuda":
        return HOST
    probe = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=device)
    seconds = time_cuda(lambda: probe.add_(1))
    return replace(HOST, bytes_per_second=2 * _PROBE_BYTES / seconds)


def _fused_seconds(graph: RegionGraph, op: Op, rates: Rates) -> float:
    """A reduction reads all of its input before the next operation can begin; the rest comes along."""
    made = sum(touched_bytes(graph, value) for value in op.outputs)
    read = max((touched_bytes(graph, value) for value in op.inputs), default=0)
    nbytes = read if read > 4 * made else _FUSED_SHARE * made
    return nbytes / rates.bytes_per_second


def _alone_seconds(graph: RegionGraph, op: Op, node: fx.Node, rates: Rates, device: torch.device) -> float:
    if device.type == "cuda" and op.replayable:
        try:
            return _measured_seconds(node, device)
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            pass  # it does not run on made-up data: by bytes and FLOPs then
    nbytes = sum(touched_bytes(graph, value) for value in (*op.inputs, *op.outputs))
    return max(nbytes / rates.bytes_per_second, op.flops / rates.flops_per_second, rates.launch_seconds)


def _measured_seconds(node: fx.Node, device: torch.device) -> float:
    def real(read: fx.Node) -> Any:
        return _map(read.meta["val"], lambda tensor: _filled(_empty(tensor, device)))

    args, kwargs = fx.map_arg((node.args, node.kwargs), real)
    target: Any = node.target
    _share_out_rows(target, args, kwargs)
    with torch.no_grad():
        target(*args, **kwargs)
        return time_cuda(lambda: target(*args, **kwargs))


def _share_out_rows(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """A product by groups takes the ends of the groups as numbers: made up as zeros, it would do nothing."""
    schema = getattr(target, "_schema", None)
    if schema is None:  # an operation of higher order
        return
    given = {a.name: v for a, v in zip(schema.arguments, args, strict=False)} | dict(kwargs)
    ends = given.get("offs")
    if not isinstance(ends, torch.Tensor) or not isinstance(given.get("self"), torch.Tensor):
        return
    left, right = given["self"], given["mat2"]
    # Of two matrices, the dimension that is summed over is cut; else that of the one that is no batch.
    rows = left.shape[-1 if right.dim() == 2 else 0] if left.dim() == 2 else right.shape[-1]
    count = ends.numel()
    ends.copy_(torch.arange(1, count + 1, device=ends.device) * rows // count)


def _filled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.normal_() if tensor.is_floating_point() else tensor.zero_()


def _keep_seconds(joint: Joint, rates: Rates) -> tuple[float, ...]:
    """Keeping: written by forward, unless it is in memory anyway, and read by backward. Dropping: written by
    backward where a product or attention reads it; fused operations take it from registers."""
    graph = joint.graph
    written: set[int] = {i for i, s in enumerate(graph.storages) if s.role is not Role.INTERNAL}
    wanted: set[int] = set()
    forward = set(joint.nodes)
    for op, node in zip(graph.ops, joint.nodes, strict=True):
        if op.view:
            continue
        alone = not is_fused(node.target)
        made = {graph.values[v].storage for v in op.outputs}
        read = {graph.values[v].storage for v in op.inputs}
        if alone:
            written |= made | read
        if any(user not in forward and not is_fused(user.target) for user in readers(node)):
            wanted |= made
    seconds = []
    for index, storage in enumerate(graph.storages):
        if storage.role is Role.PARAMETER:
            seconds.append(0.0)
            continue
        moves = (index not in written) + 1 - (index in wanted)
        seconds.append(moves * storage.nbytes / rates.bytes_per_second)
    return tuple(seconds)


def readers(node: fx.Node) -> Iterable[fx.Node]:
    """Who reads what this node makes, also through views."""
    stack, seen = list(node.users), set()
    while stack:
        user = stack.pop()
        if user in seen or user.op != "call_function":
            continue
        seen.add(user)
        if user.target is operator.getitem or is_view(user.target):
            stack += list(user.users)
        else:
            yield user
