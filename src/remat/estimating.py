"""model factory, batch factory, device -> Profile, without the device: the counterpart of `profiling`.

The step, and every menu entry of every distinct region, runs once on fake tensors, with the very code that
runs in training, while live storages are counted. What differs from a profile measured on the device:

- bytes are those of the CPU's operations. Where an accelerator's differ, `trace.fake` says what is done about
  it; attention's backward is given the single-precision copy of the queries that fused kernels work in,
  matrix products their workspace. The allocator's rounding and fragments are not in it.
- a recipe that the region does not carry out on fake tensors is described by formulas instead: it holds what
  the recipe keeps, peaks in forward like the untouched region, and in backward by `working_set_bytes` more.
- seconds are the longest of moving an operation's bytes, doing its FLOPs, and starting it, over the device's
  rates. Shares of each other (how much slower is a plan?) are better than the seconds themselves.

A plan made on it can be shown, compared and saved; `apply` refuses it, because a plan must be confirmed by
running it: `remat.fit` on the device does that.
"""

from __future__ import annotations

import difflib
import os
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    unset_fake_temporarily,
)

from remat.check.bench import Bench, bench
from remat.check.live import Meter
from remat.check.optimizer import OptimizerBytes, optimizer_bytes
from remat.check.step import Loss, Output, fingerprint, run_step, signature, tensors_of
from remat.check.untouched import untouched
from remat.devices import Device
from remat.devices import device as find_device
from remat.errors import CaptureError, InputError
from remat.hosting import link_amounts
from remat.menus import menu_entry, sorted_menu
from remat.planner.menu import recipes, working_set_bytes
from remat.profiling import region_call, storage_bytes, survey_notes
from remat.records import (
    Entry,
    Environment,
    Kind,
    LinkRates,
    Mode,
    Phase,
    Profile,
    Recipe,
    RegionGraph,
    Segment,
    StepBytes,
)
from remat.run.checkpoint import Options, run_checkpointed
from remat.run.install import installed_region
from remat.run.quiet import quiet
from remat.run.recipe import compile_recipe
from remat.run.region import PlannedRegion, Variant
from remat.trace.discover import find_blocks
from remat.trace.fake import AcceleratorKernels, OpSeconds, build, faking, new_mode, without_memory
from remat.trace.loops import with_loops
from remat.trace.price import Rates, estimate
from remat.trace.survey import Species, survey, timeline
from remat.trees import map_tensors

__all__ = ["OptimizerLike", "estimate_profile", "optimizer_class"]

Progress = Callable[[str], None]
OptimizerLike: TypeAlias = "str | Callable[..., torch.optim.Optimizer]"

_LIBRARIES = (os.path.dirname(torch.__file__), os.path.dirname(__file__))
_LEVELS = 16  # shares of a region's saved bytes that a recipe is sought for
_HOST = torch.device("cpu")  # where fake tensors live
_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"
_NO_CHUNKS = (
    'chunks are not estimated, though "chunk" is allowed: fit on the device itself measures them, and may '
    "get by with less memory than this"
)
_ACCUMULATOR_BYTES = 4  # per element of the queries, while a fused kernel runs attention backward


def estimate_profile(
    model: nn.Module | Callable[[], nn.Module],
    batch: Any,
    device: str | Device,
    *,
    loss: Loss | None = None,
    optimizer: OptimizerLike | None = None,
    accumulate: bool | int = False,
    dtype: torch.dtype | None = None,
    offload: bool = True,
    chunk: bool = False,
    progress: Progress = lambda doing: None,
) -> Profile:
    """What one training step would take on `device` (a name like "h100-80gb", or a Device with your numbers).

    `model` is a function that builds the model: it is called where tensors take no memory (a model that
    exists is used as it is, and left so). `batch` is a function that makes the batch, or the batch.
    `optimizer` is the name of a torch optimizer ("adamw") or a function that makes one from parameters.
    `dtype` is what parameters and buffers are cast to, as model.to(dtype) would. `offload`: also ways that
    send tensors to the host, where the device's link is known. `chunk`: a note says that chunks are not
    estimated.
    """
    target = find_device(device)
    mode = new_mode()
    progress("building the model without memory")
    net = model if isinstance(model, nn.Module) else build(model, mode)
    if next(net.parameters(), None) is None:
        raise InputError(f"{type(net).__name__} has no parameters; there is nothing to train")
    with without_memory(net, mode, dtype):
        held = _optimizer_bytes(net, optimizer, target)
        with faking(mode, accelerator=target.type != "cpu") as kernels, untouched(net), quiet(net):
            job = _Estimate(net, _batch(batch), loss, target, kernels, progress, _link(target, offload))
            try:
                found = job.profile(held, accumulate is True or accumulate > 1)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise _reads_values(net, error) from error
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise _does_not_run(net, error) from error
    return replace(found, notes=(*found.notes, _NO_CHUNKS)) if chunk else found


def _reads_values(model: nn.Module, error: Exception) -> InputError:
    return InputError(
        f"what {type(model).__name__} computes depends on values, which an estimate does not have ({error} "
        f"at {_line_of(error)}); run remat.profile on the device, without device="
    )


def _does_not_run(model: nn.Module, error: Exception) -> InputError:
    return InputError(
        f"{type(model).__name__} does not run on tensors without memory ({error} at {_line_of(error)}): it "
        "is wrong for this batch, or an operation asks for another dtype (dtype= casts weights); or run "
        "remat.profile on the device, without device="
    )


def _line_of(error: Exception) -> str:
    """The last line that is the model's own."""
    return next(
        (
            f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"
            for frame in reversed(traceback.extract_tb(error.__traceback__))
            if not frame.filename.startswith(_LIBRARIES)
        ),
        "an unknown line",
    )


def _batch(batch: Any) -> Any:
    made = _called(batch) if callable(batch) and not isinstance(batch, torch.Tensor) else batch

    def on_host(tensor: torch.Tensor) -> torch.Tensor:
        """A batch that was made on an accelerator is planned like one that was not."""
        return tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")

    return map_tensors(on_host, dict(made)) if isinstance(made, dict) else map_tensors(on_host, made)


def _called(factory: Callable[[], Any]) -> Any:
    """Without memory where that works; for real where the factory looks at what it makes."""
    try:
        return factory()
    except Exception:
        with unset_fake_temporarily():
            return factory()


@dataclass
class _Estimate:
    model: nn.Module
    batch: Any
    loss: Loss | None
    target: Device
    kernels: AcceleratorKernels
    progress: Progress
    link: LinkRates | None = None
    output: Output = field(default_factory=Output)

    def run(self) -> torch.Tensor:
        return run_step(self.model, self.batch, self.loss, self.output)

    def profile(self, held: OptimizerBytes | None, accumulate: bool) -> Profile:
        blocks = with_loops(self.model, find_blocks(self.model), self.run)
        kinds: list[Kind] = []

        def describe(species: Species, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.progress(f"solving the menu of {species.example.name}")
            if species.graph is not None and self.kernels.attention_drops:
                species.graph = _without_attention(species.graph)
            kinds.append(_Menu(species, (args, kwargs), self.target, self.link).kind())

        self.progress("surveying regions")
        found = survey(self.model, blocks, self.run, self.progress, describe)
        if not found.sightings:
            raise InputError(
                f"{type(self.model).__name__} has no repeated blocks that this step calls; mark what should "
                'be planned with remat.region("name", fn)'
            )
        self.progress("running a step")
        for parameter in self.model.parameters():
            parameter.grad = None
        clock = _clock(self.target)
        with Meter(_HOST) as meter, clock:
            with nullcontext() if held is None else self.output.held():
                segments = timeline(self.model, blocks, self.run, meter, found.sightings)
                level = meter.current_bytes()
            output_bytes = level - meter.current_bytes()
        calls = tuple(region_call(sighting) for sighting in found.sightings)
        ran = {segment.call for segment in segments if segment.phase is Phase.BACKWARD}
        references = [
            kinds[call.kind].menu[kinds[call.kind].reference] for i, call in enumerate(calls) if i in ran
        ]
        return Profile(
            model=type(self.model).__name__,
            fingerprint=fingerprint(self.model),
            signature=signature(self.batch),
            environment=_environment(self.target),
            step=self._step_bytes(held, output_bytes),
            kinds=tuple(kinds),
            calls=calls,
            boundary_bytes=tuple(found.boundary_bytes),
            segments=_with_workspace(segments, [kinds[call.kind] for call in calls], self.target),
            step_seconds=max(clock.seconds - sum(entry.extra_seconds for entry in references), 0.0),
            accumulate=accumulate,
            notes=(*_disclosure(self.model, self.target), *survey_notes(found)),
            link=self.link,
        )

    def _step_bytes(self, held: OptimizerBytes | None, output_bytes: int) -> StepBytes:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        batch = sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(self.batch))
        return StepBytes(
            parameters=storage_bytes(self.model.parameters(), _HOST),
            buffers=storage_bytes(self.model.buffers(), _HOST),
            gradients=sum(p.numel() * p.element_size() for p in parameters),
            optimizer_state=held.state if held else 0,
            optimizer_temporary=held.temporary if held else 0,
            other=batch + self.target.workspace_bytes,
            outputs=output_bytes,
        )


def _environment(target: Device) -> Environment:
    return Environment(target.type, target.name, torch.__version__, target.total_bytes, estimated=True)


def _disclosure(model: nn.Module, target: Device) -> tuple[str, ...]:
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    workspace = ("the workspace of fused recurrent layers is not seen by fake tensors: expect more",)
    return (
        f"an estimate for {target.name}, made on fake tensors: bytes were counted, seconds come from "
        "bytes and FLOPs, nothing was measured; leave a few percent of memory for the allocator's fragments",
        f"{target.name}: {target.note}",
        *(workspace if recurrent else ()),
    )


def _clock(target: Device) -> OpSeconds:
    return OpSeconds(target.bytes_per_second, target.flops_per_second, target.launch_seconds)


# ------------------------------------------------------------------------------------------------- menus


@dataclass
class _Menu:
    """The ways to run one distinct region, each run once on fake tensors."""

    species: Species
    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    target: Device
    link: LinkRates | None

    def kind(self) -> Kind:
        example = self.species.example
        graph = None if self.species.graph is None else _priced(self.species.graph, self.target)
        modules = (example.module,)

        def full(*args: Any, **kwargs: Any) -> Any:
            return run_checkpointed(example.forward, args, kwargs, Options(name=example.name), modules)

        forward_seconds = self._forward_seconds()
        keep = self._run(example.forward)
        entries = [
            menu_entry(Mode.KEEP, keep, 0.0, graph, len(example.inputs)),
            menu_entry(Mode.FULL, self._run(full), forward_seconds, None, len(example.inputs)),
        ]
        if graph is not None:
            links: tuple[int, ...] = ()
            if self.link is not None:
                links = link_amounts(self.link, forward_seconds, 2 * forward_seconds, graph)
            for recipe in _recipes(graph, links):
                ran = self._run_recipe(graph, recipe, keep)
                entries.append(
                    menu_entry(Mode.RECIPE, ran, recipe.replay_seconds, graph, len(example.inputs), recipe)
                )
        workspace = _workspace_bytes(graph, self.target)
        return Kind(
            signature=self.species.signature,
            menu=sorted_menu([_estimated(entry, workspace) for entry in entries]),
            saved_bytes=entries[0].resident_bytes,
            forward_seconds=forward_seconds,
            graph=graph,
            note=self.species.note,
        )

    def _run(self, call: Callable[..., Any]) -> Bench:
        return bench(call, self.inputs, (self.species.example.module,), _HOST, timed=False)

    def _forward_seconds(self) -> float:
        args, kwargs = self.inputs
        clock = _clock(self.target)
        with torch.no_grad(), clock:
            self.species.example.forward(*args, **kwargs)
        return clock.seconds

    def _run_recipe(self, graph: RegionGraph, recipe: Recipe, keep: Bench) -> Bench:
        if recipe.offloaded:  # fake tensors have no bytes to move: run it with all of them kept
            ran = self._run_recipe(graph, replace(recipe, offloaded=()), keep)
            return _moved(graph, recipe, ran)
        if not recipe.dropped:
            return keep
        example = self.species.example
        try:
            variant = Variant(Mode.RECIPE, compile_recipe(graph, recipe, _HOST))
            planned = PlannedRegion(
                example.name, example.tower, {self.species.signature: variant}, check=False
            )
            with installed_region(example.module, example.forward, planned) as call:
                ran = self._run(call)
            if not planned.counts.fallbacks:
                return ran
        except CaptureError:
            pass
        return _by_formula(graph, recipe, keep)


def _by_formula(graph: RegionGraph, recipe: Recipe, keep: Bench) -> Bench:
    """Held: what the recipe keeps. Forward: untouched until it returns. Backward: rebuilt tensors on top."""
    held = keep.resident_bytes - graph.saved_bytes + recipe.resident_bytes
    return Bench(
        resident_bytes=max(held, recipe.resident_bytes),
        forward_peak_bytes=keep.forward_peak_bytes,
        backward_peak_bytes=keep.backward_peak_bytes + working_set_bytes(graph, recipe),
        seconds=0.0,
    )


def _moved(graph: RegionGraph, recipe: Recipe, ran: Bench) -> Bench:
    """What is offloaded is not held in between, and is on top of that level once it is fetched. Inputs are
    not part of what a region holds."""
    inputs = {graph.values[value].storage for value in graph.inputs}
    held = sum(graph.storages[s].nbytes for s in recipe.offloaded if s not in inputs)
    return replace(
        ran,
        resident_bytes=max(ran.resident_bytes - held, 0),
        backward_peak_bytes=ran.backward_peak_bytes + recipe.host_bytes,
    )


def _link(target: Device, offload: bool) -> LinkRates | None:
    rate = target.link_bytes_per_second
    return LinkRates(rate, rate, rate, rate) if offload and rate else None


def _recipes(graph: RegionGraph, links: tuple[int, ...]) -> tuple[Recipe, ...]:
    levels = [level / _LEVELS for level in range(_LEVELS, 0, -1)]
    return recipes(graph, levels=levels, link_bytes=links)


def _priced(graph: RegionGraph, target: Device) -> RegionGraph:
    """Every operation with its seconds on the device, in the dtype that most of the region's FLOPs are in."""
    flops: dict[str, int] = {}
    for op in graph.ops:
        for value in op.inputs[:1]:
            dtype = graph.values[value].dtype
            flops[dtype] = flops.get(dtype, 0) + op.flops
    dtype = max(flops, key=lambda name: flops[name], default="float32")
    rates = Rates(target.bytes_per_second, target.flops_per_second(dtype), target.launch_seconds)
    return estimate(graph, rates)


def _without_attention(graph: RegionGraph) -> RegionGraph:
    """Attention that draws random numbers cannot be replayed; the fake one, which draws none, must not be."""
    ops = (
        replace(op, replayable=False, reason="draws random numbers") if op.name == _ATTENTION else op
        for op in graph.ops
    )
    return replace(graph, ops=tuple(ops))


def _estimated(entry: Entry, workspace_bytes: int) -> Entry:
    return replace(entry, measured=False, backward_peak_bytes=entry.backward_peak_bytes + workspace_bytes)


def _workspace_bytes(graph: RegionGraph | None, target: Device) -> int:
    """What a fused kernel takes for itself while it runs attention backward: gradients of the queries are
    summed up in single precision."""
    if graph is None or target.type == "cpu":
        return 0
    queries = [graph.values[op.inputs[0]].shape for op in graph.ops if op.name == _ATTENTION]
    return max((_ACCUMULATOR_BYTES * torch.Size(shape).numel() for shape in queries), default=0)


def _with_workspace(segments: tuple[Segment, ...], kinds: list[Kind], target: Device) -> tuple[Segment, ...]:
    extra = [_workspace_bytes(kind.graph, target) for kind in kinds]
    return tuple(
        replace(s, peak_bytes=s.peak_bytes + extra[s.call])
        if s.call >= 0 and s.phase is Phase.BACKWARD
        else s
        for s in segments
    )


# --------------------------------------------------------------------------------------------- optimizer


def _optimizer_bytes(model: nn.Module, given: OptimizerLike | None, target: Device) -> OptimizerBytes | None:
    """A probe with small real parameters, scaled up (check.optimizer)."""
    if given is None:
        return None
    make = optimizer_class(given) if isinstance(given, str) else given
    if isinstance(make, torch.optim.Optimizer):
        raise InputError(
            "optimizer belongs to parameters that exist, but the model is built anew; pass its class, its "
            'name ("adamw"), or a function: lambda parameters: torch.optim.AdamW(parameters, lr=1e-4)'
        )
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    for group in optimizer.param_groups:
        if target.type != "cpu" and group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True  # torch's own choice on an accelerator: all parameters at once
    return optimizer_bytes(optimizer, _HOST)


def optimizer_class(name: str) -> Callable[..., torch.optim.Optimizer]:
    """ "adamw" -> torch.optim.AdamW."""
    classes = {
        cls.__name__.lower(): cls
        for cls in vars(torch.optim).values()
        if isinstance(cls, type)
        and issubclass(cls, torch.optim.Optimizer)
        and cls is not torch.optim.Optimizer
    }
    found = classes.get(name.strip().lower())
    if found is None:
        near = difflib.get_close_matches(name.lower(), classes, n=1) or sorted(classes)
        raise InputError(f"optimizer={name!r} is not one of torch.optim; did you mean {', '.join(near)}?")
    return found
