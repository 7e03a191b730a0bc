"""Operations that a replay runs in another form: the same bits from fewer passes over memory.

Mixed precision is full of them: a norm casts up, multiplies, and casts down again, three kernels where one
does. Elementwise kernels convert while they load and store, so a recipe may run

    mul(x.float(), r).to(bfloat16)      as      mul(x, r, out=bfloat16)

A batch norm first finds the statistics of its input, and its backward holds them: a replay takes them from
there, and what is left is elementwise.

Every fold is tried on the captured values and taken only if it gives the same bits in less time. (A NaN comes
out as a NaN, but of the device's own bits: the spot check counts all NaNs as one.)
"""

from __future__ import annotations

from dataclasses import replace

import torch

from remat.records import Op, Ref, RegionGraph
from remat.run.replay import dtype_of, replay, replaying
from remat.run.same import same_bits
from remat.trace.capture import Capture
from remat.trace.price import seconds_of

__all__ = ["folded"]

_BINARY = {"aten.mul.Tensor", "aten.add.Tensor", "aten.sub.Tensor", "aten.div.Tensor"}
_OUT = 2  # place of `out` in the schema of a binary operation; add and sub have alpha before it
_OUT_WITH_ALPHA = 3
_NORM_ARGS = 8  # input, weight, bias, two running statistics, training, momentum, eps


def folded(capture: Capture, like: RegionGraph | None = None) -> Capture:
    """The same priced capture with what is folded where that is exact and faster. `like`: the same region
    at another size; what was folded there is folded here, so that its recipes hold for both. Only on an
    accelerator: a host's kernels convert beforehand, in memory of their own."""
    if not _is_on_accelerator(capture):
        return capture
    if like is not None and len(like.ops) != len(capture.graph.ops):
        like = None
    for index in range(len(capture.graph.ops)):
        for fold in (_into_store, _into_load, _widening, _from_statistics):
            current = capture.graph.ops[index]
            candidate, before_seconds = fold(capture.graph, index)
            if candidate is None or not _is_exact(capture, candidate, current):
                continue
            with replaying():
                candidate = replace(candidate, seconds=seconds_of(capture, candidate))
            faster = candidate.seconds < before_seconds
            if faster if like is None else _leads_to(like.ops[index], candidate, current):
                if fold is _from_statistics:
                    rest = max(before_seconds - candidate.seconds, 0.0)
                    candidate = replace(candidate, once_seconds=rest)
                capture = Capture(_with(capture.graph, index, candidate), capture.tensors, capture.final)
    return capture


def _with(graph: RegionGraph, index: int, op: Op) -> RegionGraph:
    """Run `op` in the place of an operation. What that gave besides is not rebuilt any more."""
    lost = set(graph.ops[index].outputs) - set(op.outputs)
    values = tuple(replace(v, producer=None) if i in lost else v for i, v in enumerate(graph.values))
    return replace(graph, ops=(*graph.ops[:index], op, *graph.ops[index + 1 :]), values=values)


def _is_on_accelerator(capture: Capture) -> bool:
    return any(tensor.device.type == "cuda" for tensor in capture.tensors)


def _leads_to(wanted: Op, candidate: Op, current: Op) -> bool:
    """A store is folded before a load: the first of two folds has the name, the second the inputs too."""
    return candidate.name == wanted.name and (
        candidate.inputs == wanted.inputs or current.name != wanted.name
    )


Fold = tuple[Op | None, float]  # what to run instead, and how long what it replaces takes
_NONE: Fold = (None, 0.0)


def _is_cast(op: Op) -> bool:
    """Changes the dtype and nothing else."""
    return (
        op.name == "aten._to_copy.default" and [name for name, _ in op.kwargs] == ["dtype"] and op.replayable
    )


def _into_store(graph: RegionGraph, index: int) -> Fold:
    """cast(binary(a, b)) -> binary(a, b, out=cast), where nobody else wants the value in between."""
    cast = graph.ops[index]
    if not _is_cast(cast):
        return _NONE
    between, made = cast.inputs[0], cast.outputs[0]
    producer = graph.values[between].producer
    if producer is None or graph.ops[producer].name not in _BINARY or not graph.ops[producer].replayable:
        return _NONE
    binary = graph.ops[producer]
    if _wanted_elsewhere(graph, between, index) or not _narrows(graph, between, made):
        return _NONE
    if len(binary.args) != 2 or binary.kwargs:  # alpha
        return _NONE
    packet = binary.name.split(".")[1]
    place = _OUT_WITH_ALPHA if packet in ("add", "sub") else _OUT
    fused = replace(
        cast,
        name=f"aten.{packet}.out",
        args=binary.args,
        kwargs=(("out", None),),
        inputs=binary.inputs,
        written=((place, made),),
        outputs=(made,),
    )
    return fused, cast.seconds + binary.seconds


def _into_load(graph: RegionGraph, index: int) -> Fold:
    """binary(cast(x), b) -> binary(x, b), where b alone decides that the result is computed as before."""
    op = graph.ops[index]
    base = op.name.replace(".out", ".Tensor")
    if base not in _BINARY or not op.replayable or len(op.args) < 2:
        return _NONE
    for place in (0, 1):
        arg, other = op.args[place], op.args[1 - place]
        if not isinstance(arg, Ref) or not isinstance(other, Ref):
            continue
        producer = graph.values[arg.value].producer
        if producer is None or not _is_cast(graph.ops[producer]):
            continue
        source = graph.ops[producer].inputs[0]
        decides = (
            graph.values[other.value].dtype == graph.values[arg.value].dtype
            and graph.values[other.value].shape
        )
        if decides and _narrows(graph, arg.value, source):
            args = list(op.args)
            args[place] = Ref(source)
            inputs = tuple(dict.fromkeys(a.value for a in args if isinstance(a, Ref)))
            return replace(op, args=tuple(args), inputs=inputs), op.seconds
    return _NONE


def _widening(graph: RegionGraph, index: int) -> Fold:
    """cast up -> mul(x, 1.0, out=wide): the same values, by a kernel that is vectorised; the cast is not."""
    cast = graph.ops[index]
    if not _is_cast(cast) or not _narrows(graph, cast.outputs[0], cast.inputs[0]):
        return _NONE
    made = cast.outputs[0]
    return (
        replace(
            cast,
            name="aten.mul.out",
            args=(Ref(cast.inputs[0]), 1.0),
            kwargs=(("out", None),),
            written=((_OUT, made),),
        ),
        cast.seconds,
    )


def _from_statistics(graph: RegionGraph, index: int) -> Fold:
    """A batch norm in training -> its result from the mean and deviation that its backward holds."""
    norm = graph.ops[index]
    if norm.name != "aten.native_batch_norm.default" or not norm.replayable or len(norm.args) != _NORM_ARGS:
        return _NONE
    x, weight, bias, _, _, training, _, eps = norm.args
    made, *statistics = norm.outputs
    held = {slot.value for slot in graph.saved if graph.values[slot.value].held}
    if training is not True or not held.issuperset(statistics):
        return _NONE
    args = (x, weight, bias, *map(Ref, statistics), eps)
    inputs = tuple(arg.value for arg in args if isinstance(arg, Ref))
    name = "aten.batch_norm_elemt.default"
    return replace(norm, name=name, args=args, inputs=inputs, outputs=(made,), written=()), norm.seconds


def _narrows(graph: RegionGraph, wide: int, narrow: int) -> bool:
    """Both floating point, the second with fewer bytes."""
    wide_type, narrow_type = dtype_of(graph.values[wide].dtype), dtype_of(graph.values[narrow].dtype)
    both = wide_type.is_floating_point and narrow_type.is_floating_point
    return both and narrow_type.itemsize < wide_type.itemsize


def _wanted_elsewhere(graph: RegionGraph, value: int, reader: int) -> bool:
    storage = graph.values[value].storage
    if any(graph.values[slot.value].storage == storage for slot in graph.saved):
        return True
    if any(graph.values[output].storage == storage for output in graph.outputs):
        return True
    return any(value in op.inputs for index, op in enumerate(graph.ops) if index != reader)


def _is_exact(capture: Capture, fold: Op, current: Op) -> bool:
    """Compared with what was captured, or, where that was written to since, with the operation itself."""
    made = fold.outputs[0]
    if not all(capture.final[v] for v in (*fold.inputs, *current.inputs)):
        return False

    def run(op: Op) -> torch.Tensor:
        found: torch.Tensor = replay(
            capture.graph, op, lambda v: capture.tensors[v].detach(), capture.tensors[made].device
        )[made]
        return found

    try:
        with replaying():
            expected = capture.tensors[made] if capture.final[made] else run(current)
            return same_bits(run(fold), expected)
    except Exception:  # not possible in this form: the plain form stays
        return False
