"""Elementwise operations of a recipe as one kernel: one pass over memory instead of one per operation.

A value and the elementwise operations that lead to it are written as one Triton kernel that rounds after
each operation exactly as the operations do one by one, and never contracts a multiplication and an addition
that are two operations. That gives the same bits; a recipe is nevertheless run fused only if that was seen on
the captured values (`Recipe.fused`), and the spot check looks at fused replays as at any other. Where there
is no Triton, or it cannot compile, recipes run operation by operation: slower, the same.
"""

from __future__ import annotations

import itertools
import linecache
import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any

import torch

from remat._torch_private import (
    current_device_index,
    current_stream_handle,
    direct_launch,
    empty_on_current,
)
from remat.records import Const, Op, Ref, RegionGraph, Value
from remat.run.replay import overload
from remat.run.same import bits

__all__ = [
    "Kernel", "Leaf", "Node", "NotCompiledError", "Tree", "can_fuse", "is_exact", "is_fusible", "is_given",
    "jit", "kernel", "leaves", "node", "operands", "size_of", "source_text",
]  # fmt: skip

_LOG = logging.getLogger(__name__)

_BLOCK = 1024  # elements per program: 8 per thread
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
_ALIGNMENT = 16  # bytes; what Triton assumes of a pointer that it saw so aligned
_NARROW_INDEX = 2**31 - 1

# Values as float32, rounded to what the operation gives. Each is what torch's CUDA kernels compute; what they
# contract (the fma in gelu) is contracted here. Functions from a library differ between its versions, and
# torch rounds within some operations: all but plain arithmetic is compared with torch before it is used.
_UNARY = {
    "aten._to_copy.default": "{0}",
    "aten.exp.default": "libdevice.exp({0})",
    "aten.neg.default": "{0} * (-1.0)",  # 0 - x, as Triton has it, loses the sign of zero
    "aten.relu.default": "tl.where({0} <= 0.0, 0.0, {0})",  # a NaN stays
    "aten.sigmoid.default": "tl.div_rn(1.0, 1.0 + libdevice.exp(-{0}))",
    "aten.silu.default": "tl.div_rn({0}, 1.0 + libdevice.exp(-{0}))",
    "aten.tanh.default": "libdevice.tanh({0})",
}
_GELU = {
    "none": "{0} * 0.5 * (1.0 + libdevice.erf({0} * 0.7071067811865476))",
    "tanh": "0.5 * {0} * (1.0 + libdevice.tanh("
    "0.7978845608028654 * tl.fma({0} * {0} * {0}, tl.full({0}.shape, 0.044715, tl.float32), {0})))",
}
_POWER = {2: "{0} * {0}", 3: "{0} * {0} * {0}"}
_BINARY = {"add": "{0} + {1}", "mul": "{0} * {1}", "sub": "{0} - {1}"}
# Input, weight, bias, mean and inverse deviation, all but the first along the channels. torch's kernel is one
# expression, which its compiler contracts.
_NORM = "aten.batch_norm_elemt.default"
_NORM_FORMULA = "tl.fma({1} * ({0} - {3}), {4}, {2})"
_PLAIN = {*_BINARY.values(), _UNARY["aten._to_copy.default"], _UNARY["aten.neg.default"]}
_TYPES = {"float32": "tl.float32", "bfloat16": "tl.bfloat16", "float16": "tl.float16"}


# ------------------------------------------------------------------------------------------ what is computed


@dataclass(frozen=True)
class Leaf:
    """A tensor that the kernel loads: elements of the tensor that is handed over, `shift` after its first."""

    value: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    shift: int
    dtype: str


@dataclass(frozen=True)
class Node:
    """One operation: `formula` of its operands in float32, rounded to `common`, then to `dtype`."""

    formula: str
    operands: tuple[Tree, ...]
    common: str
    dtype: str


Tree = Node | Leaf | float
Shape = tuple[int, ...]


def leaves(tree: Tree) -> tuple[Leaf, ...]:
    """Each once, in the order in which the kernel takes them."""
    if isinstance(tree, Leaf):
        return (tree,)
    if not isinstance(tree, Node):
        return ()
    return tuple(dict.fromkeys(leaf for operand in tree.operands for leaf in leaves(operand)))


def size_of(tree: Tree) -> int:
    """How many operations it has."""
    return 1 + sum(map(size_of, tree.operands)) if isinstance(tree, Node) else 0


def operands(op: Op) -> tuple[int | float, ...] | None:
    """What a fusible operation combines: values and numbers. None: not such an operation."""
    formula = _formula(op)
    if formula is None:
        return None
    args = op.args[: sum(f"{{{place}}}" in formula for place in range(len(op.args)))]
    found: list[int | float] = []
    for arg in args:
        if isinstance(arg, Ref):
            found.append(arg.value)
        elif isinstance(arg, (int, float)) and not isinstance(arg, bool) and math.isfinite(arg):
            found.append(float(arg))
        else:
            return None
    return tuple(found)


def is_fusible(graph: RegionGraph, op: Op) -> bool:
    """Elementwise, one dense result, floating point all through."""
    found = operands(op) if op.replayable and not op.view else None
    if found is None or len(op.outputs) != 1 or op.outputs[0] < 0:
        return False
    values = [graph.values[v] for v in found if isinstance(v, int)]
    made = graph.values[op.outputs[0]]
    if not values or any(v.dtype not in _TYPES or v.bits for v in (*values, made)):
        return False
    # A tensor without dimensions does not promote, and may be the host's.
    return _is_dense(made) and made.offset == 0 and all(v.shape for v in values)


def node(graph: RegionGraph, op: Op, inner: tuple[Tree, ...]) -> Node:
    formula = _formula(op)
    assert formula is not None
    types = {graph.values[v].dtype for v in operands(op) or () if isinstance(v, int)}
    if op.name == _NORM:
        after = len(graph.values[op.outputs[0]].shape) - 2  # dimensions after the channels
        inner = (inner[0], *(_along_channels(tree, after) for tree in inner[1:]))
    common = next(iter(types)) if len(types) == 1 else "float32"
    return Node(formula, inner, common, graph.values[op.outputs[0]].dtype)


def _along_channels(tree: Tree, after: int) -> Tree:
    """A tensor of one dimension as one that has `after` more, over which it is broadcast."""
    if isinstance(tree, Leaf):
        return replace(tree, shape=(*tree.shape, *(1,) * after), stride=(*tree.stride, *(0,) * after))
    if isinstance(tree, Node):
        return replace(tree, operands=tuple(_along_channels(operand, after) for operand in tree.operands))
    return tree


def _formula(op: Op) -> str | None:
    name = _functional(op)
    packet, _, variant = name.removeprefix("aten.").partition(".")
    kwargs = dict(op.kwargs)
    if name == "aten._to_copy.default":
        return _UNARY[name] if list(kwargs) == ["dtype"] and isinstance(kwargs["dtype"], Const) else None
    if packet in _BINARY and variant in ("Tensor", "out") and len(op.args) == 2:
        return _BINARY[packet] if set(kwargs) <= ({"out"} if variant == "out" else set()) else None
    if name == "aten.gelu.default":
        return _GELU.get(str(kwargs.get("approximate", "none"))) if len(op.args) == 1 else None
    if name == "aten.pow.Tensor_Scalar":
        return next((text for exponent, text in _POWER.items() if op.args[1] == exponent), None)
    if name == _NORM:
        return _NORM_FORMULA if not kwargs and all(isinstance(arg, Ref) for arg in op.args[:5]) else None
    return _UNARY.get(name) if not kwargs and len(op.args) == 1 else None


def _functional(op: Op) -> str:
    """The name of the operation that gives what this one writes over its first argument; "" if it writes
    otherwise. A kernel writes to memory of its own."""
    packet, _, variant = op.name.rpartition(".")
    if op.written and op.written == tuple((0, value) for value in op.outputs) and packet.endswith("_"):
        return f"{packet[:-1]}.{variant}"
    return op.name if not op.written or variant == "out" else ""


def _is_dense(value: Value) -> bool:
    expected = 1
    for step, size in sorted(zip(value.stride, value.shape, strict=True)):
        if size != 1 and step != expected:
            return False
        expected *= size
    return expected > 0


# ----------------------------------------------------------------------------------------------------- text


def source_text(tree: Node, made: Value) -> str:
    """The kernel that computes `tree` in the layout of `made`: its elements in the order of memory."""
    found = leaves(tree)
    sizes, strides = _coalesced(made, found)
    count = math.prod(made.shape)
    far = max([count, *(_reach(leaf) for leaf in found)]) > _NARROW_INDEX
    program = "tl.program_id(0).to(tl.int64)" if far else "tl.program_id(0)"
    lines = [  # the count is an argument: one kernel then serves batches of all sizes, in most layouts
        f"def fused(out, count, {', '.join(f'p{i}' for i in range(len(found)))}):",
        f"    i = {program} * {_BLOCK} + tl.arange(0, {_BLOCK})",
        "    inside = i < count",
    ]
    rest = "i"
    for dim in range(len(sizes) - 1, -1, -1):
        lines.append(f"    c{dim} = {rest} % {sizes[dim]}" if dim else f"    c0 = {rest}")
        if dim:
            lines.append(f"    r{dim} = {rest} // {sizes[dim]}")
            rest = f"r{dim}"
    for number, (leaf, steps) in enumerate(zip(found, strides, strict=True)):
        terms = [f"c{dim} * {step}" if step != 1 else f"c{dim}" for dim, step in enumerate(steps) if step]
        where = " + ".join([*(terms or ["i * 0"]), *([str(leaf.shift)] if leaf.shift else [])])
        lines.append(f"    v{number} = tl.load(p{number} + ({where}), inside).to(tl.float32)")
    names: dict[Node, str] = {}
    result = _emit(tree, {leaf: f"v{i}" for i, leaf in enumerate(found)}, names, lines)
    lines.append(f"    tl.store(out + i, {result}.to({_TYPES[made.dtype]}), inside)")
    return "\n".join(lines) + "\n"


def _emit(tree: Tree, loaded: dict[Leaf, str], names: dict[Node, str], lines: list[str]) -> str:
    if isinstance(tree, Leaf):
        return loaded[tree]
    if not isinstance(tree, Node):
        return f"({tree!r})"
    if tree not in names:
        given = [_emit(operand, loaded, names, lines) for operand in tree.operands]
        text = tree.formula.format(*given)
        for dtype in dict.fromkeys((tree.common, tree.dtype)):
            if dtype != "float32":
                text = f"({text}).to({_TYPES[dtype]}).to(tl.float32)"
        names[tree] = f"t{len(names)}"
        lines.append(f"    {names[tree]} = {text}")
    return names[tree]


def _coalesced(made: Value, found: tuple[Leaf, ...]) -> tuple[list[int], list[list[int]]]:
    """Dimensions from outer to inner in the memory of `made`, merged where every tensor runs on evenly; and
    for each leaf its step along each of them."""
    order = sorted((d for d, size in enumerate(made.shape) if size != 1), key=lambda d: -made.stride[d])
    steps = [[_step(leaf, d - len(made.shape)) for d in order] for leaf in found]
    sizes = [made.shape[d] for d in order]
    dim = len(sizes) - 2
    while dim >= 0:
        if all(row[dim] == row[dim + 1] * sizes[dim + 1] for row in steps):
            sizes[dim : dim + 2] = [sizes[dim] * sizes[dim + 1]]
            for row in steps:
                del row[dim]
        dim -= 1
    return sizes or [1], [row or [0] for row in steps]


def _step(leaf: Leaf, dim: int) -> int:
    """Along a dimension counted from the last; 0 where it is broadcast."""
    if -dim > len(leaf.shape) or leaf.shape[dim] == 1:
        return 0
    return leaf.stride[dim]


def _reach(leaf: Leaf) -> int:
    return leaf.shift + sum((size - 1) * step for size, step in zip(leaf.shape, leaf.stride, strict=True))


# -------------------------------------------------------------------------------------------------- kernels


class NotCompiledError(Exception):
    """A kernel that would have to be compiled first, where there is no time for that."""


class Kernel:
    """A compiled kernel; called with the tensors of its leaves it gives the value."""

    __slots__ = (
        "_count", "_device", "_dtype", "_empty", "_jit", "_launch", "_programs", "_shape", "_stride", "text",
    )  # fmt: skip

    def __init__(self, text: str, dtype: str, shape: Shape, stride: Shape, device: torch.device) -> None:
        self.text = text
        self._shape, self._stride, self._device = tuple(shape), tuple(stride), device
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._count = math.prod(shape)
        self._programs = -(-self._count // _BLOCK)
        self._jit = jit(text)
        self._empty = empty_on_current(device.type)
        self._launch: Callable[..., None] | None = None  # what is compiled already, for aligned tensors

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        launch, empty, device = self._launch, self._empty, self._device
        if launch is None or empty is None or current_device_index() != device.index:
            return self._run(tensors)
        addresses = [tensor.data_ptr() for tensor in tensors]
        together = 0
        for address in addresses:
            together |= address
        if together % _ALIGNMENT:
            return self._run(tensors)
        out = empty(self._shape, self._stride, self._dtype)
        launch(self._programs, current_stream_handle(device), out.data_ptr(), self._count, *addresses)
        return out

    def _run(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Through Triton, which asks what it is given, and compiles once more for what is not aligned."""
        out = torch.empty_strided(self._shape, self._stride, dtype=self._dtype, device=self._device)
        # Triton launches on the current device.
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            self._jit[(self._programs, 1, 1)](out, self._count, *tensors, **_OPTIONS)
        return out

    def prepare(self, dtypes: tuple[str, ...]) -> None:
        """Compile now, for tensors that begin where torch's do: a grid of no programs launches nothing."""
        tensors = [torch.empty(1, dtype=getattr(torch, dtype), device=self._device) for dtype in dtypes]
        out = torch.empty(1, dtype=self._dtype, device=self._device)
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            compiled = self._jit[(0, 1, 1)](out, self._count, *tensors, **_OPTIONS)
            if self._device.type == "cuda":
                addresses = [tensor.data_ptr() for tensor in (out, *tensors)]
                trial = (addresses[0], self._count, *addresses[1:])
                self._launch = direct_launch(compiled, current_stream_handle(self._device), *trial)


_numbers = itertools.count()  # of sources; compiled in several threads
_kernels: dict[Any, Kernel] = {}
_seen: set[Any] = set()  # what has been compiled: text, divisibility of the count, device


def kernel(
    tree: Node, made: Value, device: torch.device, *, given: Value | None = None, compile_new: bool = True
) -> Kernel:
    """Compiled and ready. Kernels are shared: regions of a kind, and recipes of a menu, ask for the same.

    `given`: the view of `made` that it gives, if another is wanted (`is_given` says whether it can).
    May be called from several threads, which then compile side by side. `compile_new=False`: NotCompiledError
    unless its code is there already.
    """
    given = given or made
    text = source_text(tree, made)
    count = math.prod(made.shape)
    types = tuple(leaf.dtype for leaf in leaves(tree))
    code = (text, types, count % _ALIGNMENT == 0, count == 1, count > _NARROW_INDEX, device)
    key = (code, given.shape, given.stride)  # the same code may serve several layouts
    found = _kernels.get(key)
    if found is None:
        if not compile_new and code not in _seen:
            raise NotCompiledError(text)
        found = Kernel(text, made.dtype, given.shape, given.stride, device)
        found.prepare(types)
        found = _kernels.setdefault(key, found)
        _seen.add(code)
    return found


def is_given(view: Value, made: Value) -> bool:
    """Whether a kernel for `made` can give this view of it: all of its memory, in the same order."""
    same = (view.storage, view.epoch, view.offset, view.dtype, math.prod(view.shape))
    return same == (made.storage, made.epoch, made.offset, made.dtype, math.prod(made.shape)) and _is_dense(
        view
    )


@cache
def jit(text: str, name: str = "fused", unspecialized: tuple[str, ...] = ()) -> Any:
    """The Triton function of this name in this text; Triton compiles once for any value of `unspecialized`.
    It reads the source of what it compiles: linecache has it."""
    triton = import_module("triton")
    file = f"<remat {name} {next(_numbers)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    space: dict[str, Any] = {
        "tl": import_module("triton.language"),
        "libdevice": import_module("triton.language.extra.cuda.libdevice"),
        "__name__": __name__,
    }
    exec(compile(text, file, "exec"), space)
    return triton.jit(space[name], do_not_specialize=list(unspecialized))


def can_fuse(device: torch.device) -> bool:
    """Whether Triton is there and compiles for this device. Says once why not."""
    return device.type == "cuda" and torch.version.hip is None and _works(device)


@cache
def _works(device: torch.device) -> bool:
    try:
        return _gives_torch_bits("{0} * {0}", lambda x: x * x, "bfloat16", device)
    except torch.OutOfMemoryError:  # not remembered: there may be room another time
        raise
    except Exception as error:  # what a missing compiler raises differs from version to version
        _LOG.warning("recipes run operation by operation: a fused kernel could not be compiled: %s", error)
        return False


def is_exact(op: Op, dtype: str, device: torch.device) -> bool:
    """Whether this operation gives torch's bits in a kernel: plain arithmetic does, the rest is tried."""
    formula = _formula(op)
    assert formula is not None
    if formula in _PLAIN:
        return True
    if formula == _NORM_FORMULA:
        return _norm_is_exact(dtype, device)
    return _tried(formula, op.name, op.args[1:], op.kwargs, dtype, device)


@cache
def _norm_is_exact(dtype: str, device: torch.device) -> bool:
    """On numbers of all magnitudes, each in a channel whose statistics are not round."""
    numbers = _numbers_of(dtype, device).view(2, -1, 16)
    channels = torch.arange(1, numbers.shape[1] + 1, device=device)
    weight, bias, mean, invstd = (1.0 + (channels * step).sin() for step in (0.7, 1.3, 2.1, 3.9))
    given = (numbers, weight, bias, mean, invstd)
    found = [Leaf(i, tuple(x.shape), x.stride(), 0, str(x.dtype)[6:]) for i, x in enumerate(given)]
    inner = (found[0], *(_along_channels(leaf, 1) for leaf in found[1:]))
    try:
        fast = _kernel_of(Node(_NORM_FORMULA, inner, "float32", dtype), numbers)(*given)
        return _same(fast, torch.batch_norm_elemt(*given, 1e-5))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        _LOG.warning("batch norms run unfused, their kernel does not compile: %s", error)
        return False


@cache
def _tried(
    formula: str,
    name: str,
    args: tuple[Any, ...],
    kwargs: tuple[tuple[str, Any], ...],
    dtype: str,
    device: torch.device,
) -> bool:
    function = overload(name)
    try:
        return _gives_torch_bits(formula, lambda x: function(x, *args, **dict(kwargs)), dtype, device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        _LOG.warning("%s runs unfused, its kernel does not compile: %s", name, error)
        return False


def _gives_torch_bits(
    formula: str, function: Callable[[torch.Tensor], torch.Tensor], dtype: str, device: torch.device
) -> bool:
    x = _numbers_of(dtype, device)
    leaf = Leaf(0, tuple(x.shape), x.stride(), 0, dtype)
    return _same(_kernel_of(Node(formula, (leaf,), dtype, dtype), x)(x), function(x))


def _numbers_of(dtype: str, device: torch.device) -> torch.Tensor:
    """Every finite number of 16 bits, or as many of 32 bits, of all magnitudes."""
    kind: torch.dtype = getattr(torch, dtype)
    patterns = torch.arange(-(2**15), 2**15, device=device)
    if kind.itemsize == 2:
        x = patterns.to(torch.int16).view(kind)
    else:  # a prime step through the numbers, so that their last bits vary
        x = (patterns * 65521).to(torch.int32).view(kind)
    return torch.where(x.isfinite(), x, 1.0)


def _kernel_of(tree: Node, like: torch.Tensor) -> Kernel:
    """The kernel that gives a tensor of this layout."""
    made = Value(0, 0, tuple(like.shape), like.stride(), 0, tree.dtype, None, True)
    return kernel(tree, made, like.device)


def _same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool(((bits(found) == bits(expected)) | (found.isnan() & expected.isnan())).all())
