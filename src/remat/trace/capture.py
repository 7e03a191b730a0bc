"""One call of a region -> RegionGraph.

The region runs once on copies of its inputs under a `Recorder`; then the autograd graph that it built is
walked to see what was saved. Nothing of the model is changed: random state is restored, buffers that the
region updates (BatchNorm) are put back, no gradient is computed.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from remat._torch_private import sequence_number
from remat.errors import CaptureError
from remat.layouts import equal
from remat.records import Op, RegionGraph, Role, Saved, Source, Storage, Value
from remat.trace.graphwalk import GraphNode, SavedTensor, next_sequence_number, saved_tensors, walk
from remat.trace.record import RANDOM, Recorder, has_storage
from remat.trees import map_tensors, tensors

__all__ = ["Capture", "capture", "entry_copies"]


@dataclass
class Capture:
    """A region's graph together with the tensors it was made of (for pricing and for the self-check)."""

    graph: RegionGraph
    tensors: list[torch.Tensor]  # of every value; empty if not held
    final: list[bool]  # the live tensor still holds this value


def capture(
    run: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    module: nn.Module,
    *,
    hold: bool = True,
    reseed: int | None = None,
) -> Capture:
    """Run `run(*args, **kwargs)` once and write it down; `module` owns the parameters that it may use.

    Without `hold` nothing outlives the operation that needs it, so that the run takes no more memory than the
    region's own forward; such a capture can be compared, but not priced.
    `reseed` draws other random numbers, and turns the float inputs around and scales them: a second capture
    that must give the same graph shows that no Python number depends on data or chance.
    """
    parameters = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    _refuse_unsupported([tensor for _, tensor in parameters], tensors((args, kwargs)))
    with _no_trace(module, tensors((args, kwargs))):
        if reseed is not None:
            _seed(reseed, tensors((args, kwargs)))
        args, kwargs = entry_copies(args, kwargs, turn=reseed is not None)
        inputs = tensors((args, kwargs))
        # Now: where the region writes to an input, that tensor's grad_fn becomes a node of the region.
        entries = [tensor.grad_fn for tensor in inputs if tensor.grad_fn is not None]
        recorder = Recorder(parameters, inputs, hold=hold)
        since = next_sequence_number()
        with _boundaries(module, recorder) as seen, torch.enable_grad():
            torch.clear_autocast_cache()
            with recorder:
                output = run(*args, **kwargs)
            torch.clear_autocast_cache()
        _forget_replaced(recorder, module, parameters)
        outputs = tensors(output)
        nodes = walk(outputs, entries, since)
        saved = list(saved_tensors(nodes))
        return _Builder(recorder, seen, nodes, saved, outputs).build()


def _forget_replaced(recorder: Recorder, module: nn.Module, before: list[tuple[str, torch.Tensor]]) -> None:
    """A name that the region itself gave to another tensor does not find the one that it had read."""
    now = dict(
        [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    )
    replaced = {name for name, tensor in before if now.get(name) is not tensor}
    for value in recorder.values:
        if value.parameter in replaced:
            value.parameter = ""


def _seed(seed: int, inputs: list[torch.Tensor]) -> None:
    torch.default_generator.manual_seed(seed)
    for index in {tensor.device.index for tensor in inputs if tensor.device.type == "cuda"}:
        torch.cuda.default_generators[index].manual_seed(seed)


def _refuse_unsupported(parameters: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
    for tensor in (*parameters, *inputs):
        if tensor.layout is not torch.strided:
            raise CaptureError(
                f"a sparse tensor ({tensor.layout}) takes part; its values cannot be told apart"
            )
    for tensor in inputs:
        if not has_storage(tensor):
            raise CaptureError(f"an input of type {type(tensor).__name__} has no storage of its own")


# ------------------------------------------------------------------------------------------------ inputs


class _Entry(torch.autograd.Function):
    """Fresh copies that stand in the graph as a real region's inputs do: not leaves, so that an in-place
    operation on them is allowed, and ending the walk."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, make: Callable[[], tuple[torch.Tensor, ...]]) -> Any:
        copies = make()
        ctx.mark_non_differentiable(
            *(copy for copy in copies if not (copy.is_floating_point() or copy.is_complex()))
        )
        return copies

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None


def entry_copies(args: tuple[Any, ...], kwargs: dict[str, Any], *, turn: bool = False) -> tuple[Any, Any]:
    """Copies of all tensor inputs, storage by storage, so that inputs that share memory still do."""
    given = tensors((args, kwargs))
    clones: dict[int, torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in clones:
            elements = storage.nbytes() // tensor.element_size()
            flat = tensor.detach().as_strided((elements,), (1,), 0)
            clones[storage._cdata] = _turned(flat) if turn else flat.clone()
        flat = clones[storage._cdata]
        if flat.dtype != tensor.dtype:
            flat = flat.view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    anchored = [tensor for tensor in given if tensor.requires_grad]
    anchor = torch.empty((), device=given[0].device if given else "cpu", requires_grad=True)
    with torch.no_grad():
        plain = {id(tensor): copy(tensor) for tensor in given if not tensor.requires_grad}
        # Views of one storage must stay views of one copy, but outputs of a Function must not be views of
        # each other: only a storage with a single differentiable input goes through it as its own tensor.
        made = {id(tensor): copy(tensor) for tensor in anchored}
    with torch.enable_grad():
        results: Any = ()
        if anchored:
            make = functools.partial(tuple, [_own(made[id(tensor)]) for tensor in anchored])
            results = _Entry.apply(anchor, make)  # type: ignore[no-untyped-call]
    replaced = {**plain, **{id(t): r for t, r in zip(anchored, results, strict=True)}}
    new_args, new_kwargs = map_tensors(lambda tensor: replaced[id(tensor)], (args, kwargs))
    return new_args, new_kwargs


def _turned(flat: torch.Tensor) -> torch.Tensor:
    """Other data of the same kind: in another order, and its largest element, mean and norm differ too."""
    if not (flat.is_floating_point() or flat.is_complex()):
        return flat.clone()
    return flat.flip(0).mul_(0.75) if flat.element_size() > 1 else flat.flip(0)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that autograd does not know as a view."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


@contextmanager
def _no_trace(module: nn.Module, inputs: list[torch.Tensor]) -> Iterator[None]:
    """Random state and buffers as before."""
    cuda = sorted({t.device.index for t in (*module.parameters(), *inputs) if t.device.type == "cuda"})
    tables = [(submodule, dict(submodule._buffers)) for submodule in module.modules()]
    values = [buffer for buffer in module.buffers() if not isinstance(buffer, FakeTensor)]  # those have none
    buffers = [(buffer, buffer.detach().clone()) for buffer in values]
    versions = [buffer._version for buffer, _ in buffers]
    try:
        with torch.random.fork_rng(devices=cuda):
            yield
    finally:
        for submodule, table in tables:
            submodule._buffers.clear()  # also of those that this call registered
            submodule._buffers.update(table)
        with torch.no_grad():
            for (buffer, before), version in zip(buffers, versions, strict=True):
                if buffer._version != version or not equal(buffer, before):
                    buffer.copy_(before)


# ---------------------------------------------------------------------------------- what modules pass on


@contextmanager
def _boundaries(module: nn.Module, recorder: Recorder) -> Iterator[dict[int, Source]]:
    """Values that go into or come out of a submodule: at run time a module hook can see them."""
    seen: dict[int, Source] = {}
    calls: collections.Counter[str] = collections.Counter()
    handles = []

    def note(tree: Any, kind: str, name: str) -> None:
        for position, leaf in enumerate(tensors(tree)):
            value = recorder.find(leaf) if has_storage(leaf) else None
            if value is not None:
                seen.setdefault(value, Source(value, kind, position, name, calls[name]))

    def hooks(name: str) -> tuple[Any, Any]:
        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            note((args, kwargs), "module_input", name)

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            note(output, "module_output", name)
            calls[name] += 1

        return before, after

    for name, submodule in module.named_modules():
        if name:
            before, after = hooks(name)
            handles.append(submodule.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(submodule.register_forward_hook(after, with_kwargs=True))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


# ------------------------------------------------------------------------------------------ the graph


@dataclass
class _Builder:
    recorder: Recorder
    seen: dict[int, Source]
    nodes: list[GraphNode]
    saved: list[SavedTensor]
    outputs: list[torch.Tensor]

    def build(self) -> Capture:
        recorder = self.recorder
        self._refuse_numbers_of_weights()
        output_values = [recorder.intern(tensor) for tensor in self.outputs]
        slots = self._slots()
        sources = self._sources(slots, output_values)
        visible = self._visible(slots, sources)
        self.free = self._free_values()
        self._mark_outputs(output_values)
        storages = tuple(Storage(raw.nbytes, raw.role) for raw in recorder.storages)
        values = tuple(self._value(index, visible) for index in range(len(recorder.values)))
        graph = RegionGraph(
            storages=storages,
            values=values,
            ops=tuple(self._op(index) for index in range(len(recorder.ops))),
            saved=slots,
            nodes=tuple((node.name, node.parent, node.edge) for node in self.nodes),
            sources=sources,
            inputs=tuple(recorder.inputs),
            outputs=tuple(output_values),
        )
        final = [recorder.is_final(value) for value in range(len(values))]
        return Capture(graph, recorder.tensors, final)

    def _slots(self) -> tuple[Saved, ...]:
        """Saved tensors in the order in which backward will ask for them: the last made node comes first."""
        rank = {
            n: place
            for place, n in enumerate(sorted(range(len(self.nodes)), key=self._sequence, reverse=True))
        }
        slots = [
            (rank[saved.node], saved, self.recorder.intern(saved.tensor))
            for saved in self.saved
            if has_storage(saved.tensor)
        ]
        slots.sort(key=lambda slot: (slot[0], slot[1].attribute, slot[1].item))
        return tuple(
            Saved(saved.node, saved.attribute, saved.item, value, order)
            for order, (_, saved, value) in enumerate(slots)
        )

    def _sequence(self, node: int) -> int:
        return sequence_number(self.nodes[node].node)

    def _sources(self, slots: tuple[Saved, ...], output_values: list[int]) -> tuple[Source, ...]:
        """Where to find values that are not among the saved tensors: inputs first, then module boundaries.

        Not the region's outputs: unless autograd saved them, whoever gets them may write to them.
        """
        found = {
            value: Source(value, "input", position) for position, value in enumerate(self.recorder.inputs)
        }
        taken = {slot.value for slot in slots}
        leaves = {self.recorder.values[value].storage for value in output_values}
        for value, source in self.seen.items():
            if value not in taken and self.recorder.values[value].storage not in leaves:
                found.setdefault(value, source)
        return tuple(source for value, source in sorted(found.items()) if self.recorder.is_final(value))

    def _visible(self, slots: tuple[Saved, ...], sources: tuple[Source, ...]) -> set[tuple[int, Any, int]]:
        """(storage, dtype, bits) that a live tensor shows at the end of the region."""
        values = {slot.value for slot in slots} | {source.value for source in sources}
        raw = self.recorder.values
        return {(raw[v].storage, raw[v].dtype, raw[v].bits) for v in values if self.recorder.is_final(v)}

    def _free_values(self) -> set[int]:
        """Parameters and buffers that are found by name and not written here, and views of them."""
        recorder = self.recorder
        free: set[int] = set()
        for index, raw in enumerate(recorder.values):  # a view comes after what it is a view of
            storage = recorder.storages[raw.storage]
            if storage.role is Role.PARAMETER and storage.epoch == 0:
                producer = None if raw.producer is None else recorder.ops[raw.producer]
                if raw.parameter or (
                    producer is not None and producer.view and free.issuperset(producer.inputs)
                ):
                    free.add(index)
        return free

    def _refuse_numbers_of_weights(self) -> None:
        """A Python number that rests on weights (or on integers) is the same in both captures, but perhaps
        not in the next step. What rests on float inputs or chance is found by the second capture; a bool can
        only choose a branch, which shows in the autograd graph."""
        for op in self.recorder.ops:
            if op.overload is torch.ops.aten._local_scalar_dense.default:
                (value,) = op.inputs
                if self.recorder.values[value].dtype is not torch.bool and not self._varies(value):
                    raise CaptureError(
                        "it reads a number from the weights or from integers (.item(), float(), int()) at "
                        f"{op.source or 'an unknown line'}, which may change from step to step"
                    )

    def _varies(self, value: int) -> bool:
        """Whether the second capture sees other data behind this value."""
        pending, seen = [value], set[int]()
        while pending:
            current = pending.pop()
            if current in seen:
                continue
            seen.add(current)
            raw = self.recorder.values[current]
            if raw.producer is not None:
                op = self.recorder.ops[raw.producer]
                if op.reason == RANDOM:
                    return True
                pending.extend(op.inputs)
            elif self.recorder.storages[raw.storage].role is Role.INPUT and raw.dtype.is_floating_point:
                return True
        return False

    def _mark_outputs(self, output_values: list[int]) -> None:
        for value in output_values:
            storage = self.recorder.storages[self.recorder.values[value].storage]
            if storage.role is Role.INTERNAL:
                storage.role = Role.OUTPUT

    def _value(self, index: int, visible: set[tuple[int, Any, int]]) -> Value:
        raw = self.recorder.values[index]
        return Value(
            storage=raw.storage,
            epoch=raw.epoch,
            shape=raw.shape,
            stride=raw.stride,
            offset=raw.offset,
            dtype=str(raw.dtype).removeprefix("torch."),
            producer=raw.producer,
            held=self.recorder.is_final(index) and (raw.storage, raw.dtype, raw.bits) in visible,
            free=index in self.free,
            parameter=raw.parameter,
            bits=raw.bits,
        )

    def _op(self, index: int) -> Op:
        raw = self.recorder.ops[index]
        return Op(
            name=str(raw.overload),
            args=raw.args,
            kwargs=raw.kwargs,
            inputs=tuple(dict.fromkeys(raw.inputs)),
            outputs=tuple(raw.outputs),
            written=tuple(raw.written),
            flops=raw.flops,
            replayable=not raw.reason,
            view=raw.view,
            reason=raw.reason,
            source=raw.source,
        )
