"""The spot check: a replay that differs from forward raises out of loss.backward(), before an optimizer."""

from __future__ import annotations

import collections
import copy
import ctypes
import gc
import random
import re
import statistics
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import remat
from models import ZOO, Case, squared
from planning import (
    CPU,
    LEAST,
    Planned,
    assert_equal,
    assert_planned_equals_plain,
    bits_of,
    fallbacks,
    on,
    recipe_at,
    regions_at,
    survey_of,
    train,
)
from remat.errors import RecomputeError
from remat.planner.schedule import make_plan
from remat.records import Mode, RegionGraph
from remat.run import same, samples, spotcheck
from remat.run.gather import SAMPLES, WORDS, Flag, Kernels
from remat.run.recipe import compile_recipe
from remat.run.region import PlannedRegion, Variant
from remat.run.samples import PHASES, Layout, Probes, probes
from remat.run.spotcheck import SpotCheck


class Annealed(nn.Module):
    """A number in Python that a schedule changes."""

    def __init__(self, number: Callable[[], float], width: int = 8) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(width, width), number

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.linear(x) / self.number()).softmax(-1).sin().exp()


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.temperature = nn.Linear(8, 8), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.linear(x) / self.temperature).softmax(-1).sin().exp()


class Masked(nn.Module):
    """A mask that no positive factor changes lies behind the same number as what it masks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.temperature = nn.Linear(8, 8), 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x) * self.temperature
        return x + F.softplus(h).masked_fill(h < 0, 0.0)


class Chosen(Masked):
    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x) * self.temperature
        return x + torch.where(h > 0, h.sin(), 0.0)


class Normalised(nn.Module):
    """RMSNorm in single operations: what it gives does not depend on the scale of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.temperature = nn.Linear(8, 8), 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = (x * self.temperature).double()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True))
        return x + self.linear(h.float()).sin()


class Float8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.tanh()
        ctx.save_for_backward(y.to(torch.float8_e4m3fn))
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        y = ctx.saved_tensors[0].to(gradients[0].dtype)
        return gradients[0] * (1 - y * y)


class Compressed(nn.Module):
    """Saves an activation in a dtype that few operations know."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.temperature = nn.Linear(8, 8), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + Float8.apply(self.linear(x).exp() * self.temperature)


class StochasticDepth(nn.Module):
    """Drops its branch by a number that Python's own generator draws."""

    def __init__(self, keep: float = 0.5) -> None:
        super().__init__()
        self.linear, self.keep = nn.Linear(8, 8), keep

    def forward(self, x: Tensor) -> Tensor:
        scale = 1 / self.keep if random.random() < self.keep else 0.0
        return x + (self.linear(x) * scale).sin().exp()


class Swapped(nn.Module):
    """Two branches of equal shape: the autograd graph is the same whichever is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.first = nn.Linear(8, 8), nn.Linear(8, 8), True

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.a if self.first else self.b)(x).sin().exp()


class OneRow(nn.Module):
    """The number touches one row of many."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return x + torch.cat([y[:3], y[3:4] * self.scale, y[4:]]).sin().exp()


def stack(make: Callable[[], nn.Module], depth: int = 3, rows: int = 5) -> Case:
    torch.manual_seed(0)
    return Case(nn.Sequential(*[make() for _ in range(depth)]), torch.randn(rows, 8), squared)


def plan(case: Case, level: float = LEAST, **options: Any) -> Planned:
    planned = regions_at(survey_of(case.model, case.run), level, shadow=False, **options)
    assert all(v.mode is Mode.RECIPE for r in planned.regions for v in r.variants.values()), planned.notes
    return planned


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        f"gradient of {name}": bits_of(p.grad) for name, p in model.named_parameters() if p.grad is not None
    }


def assert_next_step_is_right(case: Case, planned: Planned) -> None:
    """The region now recomputes as a whole, and says so."""
    plain = nn.Sequential(*[copy.deepcopy(block) for block in case.model])
    for block in plain:
        block.__dict__.pop("forward", None)
    plain.zero_grad()
    case.model.zero_grad()
    state = random.getstate()
    case.run(plain).backward()
    random.setstate(state)
    case.run().backward()
    assert_equal(gradients(plain), gradients(case.model))
    off = [r for r in planned.regions if any(v.mode is Mode.FULL for v in r.variants.values())]
    assert off
    assert all("differed" in region.status().why for region in off)


SENTENCE = (
    r"region {}: the replay of aten\.\w+\.\w+ \[5, 8\] float32, made at test_spotcheck\.py:\d+, differs"
)


# ------------------------------------------------------------------------------------ numbers that change


def test_temperature_as_an_attribute() -> None:
    case = stack(Temperature)
    with on(case.model, planned := plan(case)):
        case.run().backward()
        case.model[1].temperature = 0.9
        loss = case.run()
        with pytest.raises(RecomputeError, match=SENTENCE.format(1)) as raised:
            loss.backward()
        assert "zero_grad" in str(raised.value)
        assert_next_step_is_right(case, planned)
        assert [r.status().mode for r in planned.regions] == ["recipe", "full", "recipe"]


class FromZero(nn.Module):
    """The number lies in front of a weight that begins as zero: the product is right whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last, self.temperature = nn.Linear(8, 8), nn.Linear(8, 8), 1.0
        nn.init.zeros_(self.last.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last((self.linear(x) * self.temperature).sin()).tanh()


class Gated(FromZero):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return x + ((self.linear(x) * self.temperature).sin() * self.gate).tanh()


@pytest.mark.parametrize("make", [Masked, Chosen, Normalised, Compressed, FromZero, Gated])
def test_a_number_that_other_tensors_hide(make: Callable[[], nn.Module]) -> None:
    case = stack(make, rows=64)
    with on(case.model, planned := plan(case)):
        case.run().backward()
        case.model[1].temperature = 2.0
        with pytest.raises(RecomputeError, match="region 1: the replay of"):
            case.run().backward()
        assert_next_step_is_right(case, planned)


def test_memory_that_lacks_while_tensors_are_replaced() -> None:
    """Running out of memory is for whoever runs the step again, not a graph that looks different."""
    case = stack(Temperature)
    with on(case.model, planned := plan(case)):
        region = planned.regions[1]
        variants = region.variants

        def fails(*_: Any) -> None:
            raise torch.OutOfMemoryError("no memory")

        for step in ("find", "hook"):
            region.variants = {
                key: replace(variant, program=replace(variant.program, **{step: fails}))
                for key, variant in variants.items()
            }
            region.known.clear()
            with pytest.raises(torch.OutOfMemoryError):
                case.run()
        region.variants = variants
        region.known.clear()
        assert not fallbacks(planned)
        case.run().backward()
    found = gradients(case.model)
    case.model.zero_grad()
    case.run().backward()
    assert_equal(gradients(case.model), found)


def test_the_error_names_the_line_that_used_the_number() -> None:
    case = stack(Temperature)
    line = Temperature.forward.__code__.co_firstlineno + 1
    with on(case.model, plan(case)):
        case.model[1].temperature = 0.9
        with pytest.raises(RecomputeError, match=rf"test_spotcheck\.py:{line}\b"):
            case.run().backward()


def test_a_schedule_in_a_closure() -> None:
    step = [1.0]
    case = stack(lambda: Annealed(lambda: 1.0 + 0.1 * step[0]))
    with on(case.model, planned := plan(case)):
        case.run().backward()
        step[0] += 1
        with pytest.raises(RecomputeError, match="2 more regions differ too"):
            case.run().backward()
        assert_next_step_is_right(case, planned)
        step[0] += 1
        assert_next_step_is_right(case, planned)


def test_stochastic_depth_by_python() -> None:
    random.seed(0)
    case = stack(StochasticDepth)
    found = survey_of(case.model, case.run)
    planned = regions_at(found, LEAST, shadow=False)
    raised = 0
    with on(case.model, planned):
        for _ in range(12):
            plain = nn.Sequential(*[copy.deepcopy(block) for block in case.model])
            for block in plain:
                block.__dict__.pop("forward", None)
            plain.zero_grad()
            case.model.zero_grad()
            state = random.getstate()
            case.run(plain).backward()
            random.setstate(state)
            try:
                case.run().backward()
            except RecomputeError:
                raised += 1
                continue
            assert_equal(gradients(plain), gradients(case.model))
    assert raised or planned.notes, "either the two captures differed, or the spot check raised"
    assert raised <= 3, "a region is switched off when it was caught"


def test_swapped_branches_of_equal_shape() -> None:
    case = stack(Swapped)
    with on(case.model, planned := plan(case)):
        case.run().backward()
        case.model[0].first = False
        with pytest.raises(RecomputeError, match=SENTENCE.format(0)):
            case.run().backward()
        assert_next_step_is_right(case, planned)


def test_without_the_check_the_gradients_are_silently_wrong() -> None:
    """What the check is for; and that these tests would notice if it did nothing."""
    case = stack(Temperature)
    with on(case.model, plan(case, check=False)):
        case.model[1].temperature = 0.5
        plain = stack(Temperature).model
        plain[1].temperature = 0.5
        case.run(plain).backward()
        case.run().backward()
    with pytest.raises(AssertionError, match="differ"):
        assert_equal(gradients(plain), gradients(case.model))


# ------------------------------------------------------------------------------------------ broken recipes


def corrupted(graph: RegionGraph) -> RegionGraph:
    """Some number that an operation was captured with is another one."""
    ops = list(graph.ops)
    for index, op in enumerate(ops):
        for place, arg in enumerate(op.args):
            if isinstance(arg, float) and op.replayable:
                args = (*op.args[:place], arg * 1.5, *op.args[place + 1 :])
                ops[index] = replace(op, args=args)
                return replace(graph, ops=tuple(ops))
    raise AssertionError("no number to change")


@pytest.mark.parametrize("shadow", [True, False])
def test_a_corrupted_recipe(shadow: bool) -> None:
    case = stack(lambda: Annealed(lambda: 1.25))
    found = survey_of(case.model, case.run)
    regions = []
    for sighting in found.sightings:
        species = found.species[sighting.species]
        assert species.graph is not None
        graph = corrupted(species.graph)
        program = compile_recipe(graph, recipe_at(graph, LEAST), CPU)
        variants = {species.signature: Variant(Mode.RECIPE, program)}
        regions.append(PlannedRegion(sighting.name, sighting.tower, variants, shadow=shadow))
    planned = Planned(regions)
    plain = copy.deepcopy(case.model)
    case.run(plain).backward()
    with on(case.model, planned):
        if shadow:  # the first step compares every rebuilt tensor while the real ones are there
            case.run().backward()
            assert_equal(gradients(plain), gradients(case.model))
            assert all("does not give the same bits" in why for why in fallbacks(planned).values())
            assert len(fallbacks(planned)) == 3
        else:
            with pytest.raises(RecomputeError, match=r"region 0: .*2 more regions"):
                case.run().backward()
        case.model.zero_grad()
        case.run().backward()
        assert_equal(gradients(plain), gradients(case.model))
        assert [r.status().mode for r in regions] == ["full", "full", "full"]


def test_one_row_is_found_within_one_rotation() -> None:
    case = stack(OneRow, depth=4, rows=512)
    with on(case.model, planned := plan(case)):
        for _ in range(4):
            case.run().backward()
        case.model[2].scale = 1.5
        steps = 0
        with pytest.raises(RecomputeError, match=r"region 2: .*\[512, 8\]"):  # noqa: PT012 (which step is the point)
            for _ in range(len(planned.regions)):
                case.model.zero_grad()
                steps += 1
                case.run().backward()
        assert steps <= 4


def test_one_row_escapes_the_samples_alone() -> None:
    case = stack(OneRow, depth=4, rows=512)
    planned = plan(case)
    for region in planned.regions:
        region.turns = 0  # no checksums
    with on(case.model, planned):
        case.model[2].scale = 1.5
        case.run().backward()


def test_a_region_called_several_times_a_step_has_each_call_checked() -> None:
    """The rotation counts steps: counting calls, one of two calls would never have its turn."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([OneRow(), OneRow()])

        def forward(self, x: Tensor) -> Tensor:
            for number in (0, 1, 0, 1):
                self.blocks[number].calls = getattr(self.blocks[number], "calls", 0) + 1
                x = self.blocks[number](x)
            return x

    torch.manual_seed(0)
    for call in (0, 1):
        case = Case(Twice(), torch.randn(512, 8), squared)
        case.model.blocks[0].requires_grad_(True)
        planned = regions_at(survey_of(case.model, case.run), LEAST, shadow=False)
        with on(case.model, planned):
            case.run().backward()
            calls = [0]

            def change(module: Any, args: Any, call: int = call, calls: list[int] = calls) -> None:
                module.scale = 1.5 if calls[0] % 2 == call else 1.0
                calls[0] += 1

            case.model.blocks[0].register_forward_pre_hook(change)
            with pytest.raises(RecomputeError, match=r"region blocks\.0"):  # noqa: PT012
                for _ in range(len(planned.regions)):
                    case.run().backward()


# ------------------------------------------------------------------------------------- several backwards


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(8, 8), nn.Linear(8, 8), 1.0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x).sin().exp(), (self.b(x) * self.scale).sin().exp()


class OneBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Heads(), Heads()])

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (*self.blocks[0](x), *self.blocks[1](x))


def test_the_second_backward_of_one_graph_is_checked_too() -> None:
    torch.manual_seed(0)
    case = Case(OneBlock(), torch.randn(5, 8), squared)
    with on(case.model, plan(case)):
        case.model.blocks[0].scale = 2.0
        a, b, *_ = case.model(case.batch)
        a.sum().backward(retain_graph=True)  # what changed has no part in this
        with pytest.raises(RecomputeError, match=r"region blocks\.0"):
            b.sum().backward()


def test_a_backward_that_raised_does_not_hide_the_next() -> None:
    case = stack(Temperature)
    with on(case.model, plan(case)):
        case.model[1].temperature = 0.5
        x = case.batch.clone().requires_grad_()
        loss = case.run()
        stop = [True]
        loss_of = squared(case.model(x), None)
        x.register_hook(lambda g: 1 / 0 if stop[0] else g)
        with pytest.raises((ZeroDivisionError, RecomputeError)):
            loss_of.backward(retain_graph=True)
        stop[0] = False
        with pytest.raises(RecomputeError):
            loss.backward()


def test_autograd_grad_raises_too() -> None:
    case = stack(Temperature)
    with on(case.model, plan(case)):
        case.model[1].temperature = 0.5
        with pytest.raises(RecomputeError):
            torch.autograd.grad(case.run(), list(case.model.parameters()))


def test_unpacking_by_hand_outside_of_backward() -> None:
    """A tool that looks at the graph gets the tensor; nothing is queued, nothing raises."""
    case = stack(Temperature)
    with on(case.model, plan(case)):
        y = case.model[0](case.batch)
        seen = []
        pending = [y.grad_fn]
        while pending:
            node = pending.pop()
            if node is not None:
                seen += [getattr(node, name) for name in dir(node) if name.startswith("_saved_result")]
                pending += [child for child, _ in node.next_functions]
        assert seen
        y.sum().backward()


# ------------------------------------------------------------------------------------ what must not trip it


class Overflows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).float()
        scale = torch.rsqrt(y.square().mean(-1, keepdim=True))
        return F.silu((y * scale).to(x.dtype)) * (y * y).exp().to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_nan_and_infinity_are_values_like_any_other(dtype: torch.dtype, bad: float) -> None:
    """A step that overflows is skipped by a gradient scaler; it is no reason to stop the training."""
    case = stack(Overflows, rows=40)
    model = case.model.to(dtype)
    case = Case(model, case.batch.to(dtype), squared)
    with on(model, planned := plan(case)):
        case.run().backward()
        case.batch[::3] = bad
        model.zero_grad()
        case.run().backward()
        plain = copy.deepcopy(model)
        for block in plain:
            block.__dict__.pop("forward", None)
        plain.zero_grad()
        case.run(plain).backward()
    assert_equal(gradients(plain), gradients(model))
    assert not fallbacks(planned)


# --------------------------------------------------------------------------------------------- its own parts


def layout_of(tensor: Tensor) -> Layout:
    return Layout(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _take(
    programs: int,
    stream: int,
    out: int,
    table: int,
    sizes: int,
    first: int,
    back: int,
    flag: int,
    *addresses: int,
) -> None:
    """What the kernel does, by address."""
    for number in range(programs):
        row = first + number
        size = ctypes.c_int32.from_address(sizes + 4 * row).value
        for sample in range(SAMPLES):
            at = ctypes.c_int64.from_address(table + 8 * (row * SAMPLES + sample)).value
            read = ctypes.string_at(addresses[number] + at, size) if size else b""
            place = out + (row * SAMPLES + sample) * 8
            ctypes.memmove(place, read.ljust(8, b"\0"), 8)
            if back and ctypes.string_at(place, 8) != ctypes.string_at(place + back, 8):
                ctypes.c_int32.from_address(flag).value = 1


def _unlike(programs: int, stream: int, one: int, other: int, count: int, flag: int) -> None:
    assert count <= WORDS
    if ctypes.string_at(one, 8 * count) != ctypes.string_at(other, 8 * count):
        ctypes.c_int32.from_address(flag).value = 1


@pytest.fixture(params=["taken", "gathered"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Probes]:
    """Both ways to take samples; the kernel's with a stand-in that reads the same addresses."""
    if request.param == "gathered":
        gathers_by_address(monkeypatch)
    return probes


def gathers_by_address(monkeypatch: pytest.MonkeyPatch, take: Callable[..., None] = _take) -> None:
    kernels = Kernels(take, _unlike)
    monkeypatch.setattr(samples, "can_fuse", lambda device: True)
    monkeypatch.setattr(samples, "_kernels", lambda device: kernels)
    monkeypatch.setattr(samples, "current_device_index", lambda: None)
    monkeypatch.setattr(samples, "current_stream_handle", lambda device: 0)


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_gathered_samples_pass_what_is_right_and_catch_what_is_wrong(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathers_by_address(monkeypatch)
    case = ZOO[model]()
    found = survey_of(case.model, case.run)
    planned = regions_at(found, LEAST, shadow=False)
    programs = [v.program for r in planned.regions for v in r.variants.values() if v.program]
    assert programs
    assert all(isinstance(program.probes, samples._Gathered) for program in programs)
    expected = train(copy.deepcopy(case.model), case.run)
    assert_planned_equals_plain(case.model, case.run, planned, expected)
    assert not fallbacks(planned)
    assert samples._gathers(Kernels(_take, _unlike), CPU)


def _takes_wrongly(programs: int, stream: int, out: int, *rest: int) -> None:
    _take(programs, stream, out, *rest)
    ctypes.memset(out, 255, 1)


def _never_compares(*arguments: int) -> None:
    _take(*arguments[:6], 0, *arguments[7:])


def _always_raises(*arguments: int) -> None:
    _take(*arguments)
    if arguments[6]:
        ctypes.c_int32.from_address(arguments[7]).value = 1


@pytest.mark.parametrize("take", [_takes_wrongly, _never_compares, _always_raises])
def test_a_kernel_that_does_not_do_what_it_should_is_not_used(
    take: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gathers_by_address(monkeypatch)
    assert not samples._gathers(Kernels(take, _unlike), CPU)
    assert not samples._gathers(Kernels(_take, lambda *_: None), CPU)


class Event:
    """Stands for one of CUDA's: tells on which stream it was recorded last, and whether it was waited for."""

    recorded, waited = None, False

    def record(self, stream: int) -> None:
        self.recorded = stream

    def synchronize(self) -> None:
        self.waited = True


class OnCuda:
    """A device that is said to be CUDA's, its stream of now, and what is compared when a pass ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gathers_by_address(monkeypatch, self._take)
        self.stream, self.launched, self.compared, self.passes = 1, [], 0, 0
        self.differ = spotcheck._differ
        device = torch.device("cuda", 0)
        monkeypatch.setattr(samples._GatheredSamples, "device", device)
        monkeypatch.setattr(samples, "current_stream_handle", lambda device: self.stream)
        monkeypatch.setattr(spotcheck, "current_stream_handle", lambda device: self.stream)
        monkeypatch.setattr(spotcheck, "current_backward", lambda: self.passes)
        monkeypatch.setattr(spotcheck, "at_end_of_backward", lambda call: True)
        monkeypatch.setattr(spotcheck, "_differ", self._differ)
        monkeypatch.setattr(spotcheck, "_beside", lambda running: nullcontext())
        monkeypatch.setattr(spotcheck, "_checks_before", 0)
        monkeypatch.setattr(spotcheck, "_running", collections.OrderedDict())
        monkeypatch.setattr(spotcheck, "_flags", [])
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.stream)

    def _take(self, programs: int, stream: int, *rest: int) -> None:
        self.launched.append(stream)
        _take(programs, stream, *rest)

    def _differ(self, checks: list[SpotCheck]) -> bool:
        self.compared += 1
        return self.differ(checks)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> OnCuda:
    return OnCuda(monkeypatch)


TENSORS = [torch.arange(4000.0 + n) for n in range(3)]


def checks_of(count: int) -> list[SpotCheck]:
    where = probes({place: layout_of(tensor) for place, tensor in enumerate(TENSORS)}, CPU)
    return [SpotCheck(TENSORS, where, str, phase=1, whole=[1]) for _ in range(count)]


def test_kernels_raise_a_flag_that_is_read_when_backward_ends(on_cuda: OnCuda) -> None:
    """Nothing else is compared then, unless it is up."""

    def backward(error: str) -> None:
        on_cuda.passes += 1
        for number, check in enumerate(checks_of(2)):
            for place, tensor in enumerate(TENSORS):
                rebuilt = tensor.clone()
                if error == "a sample" and (number, place) == (0, 2):
                    rebuilt += 1
                if error == "a checksum" and (number, place) == (1, 1):
                    rebuilt[1] += 1  # between samples
                check.see(place, rebuilt)
        mark = spotcheck._running[on_cuda.passes].mark[1]
        spotcheck._read(on_cuda.passes)
        assert mark.waited

    backward("")
    assert on_cuda.compared == 0
    for error, place in (("a sample", "2"), ("a checksum", "1")):
        on_cuda.compared = 0
        with pytest.raises(RecomputeError, match=place):
            backward(error)
        assert on_cuda.compared == 1
        backward("")
        assert on_cuda.compared == 1, "its flag is down"
    assert len(spotcheck._flags) == 1, "passes after each other share one"


def test_passes_at_the_same_time_have_flags_of_their_own(on_cuda: OnCuda) -> None:
    wrong, right = checks_of(2)
    for place, tensor in enumerate(TENSORS):
        on_cuda.passes = 1
        wrong.see(place, tensor + 1)
        on_cuda.passes = 2
        right.see(place, tensor.clone())
    spotcheck._read(2)
    assert on_cuda.compared == 0
    with pytest.raises(RecomputeError):
        spotcheck._read(1)


def test_what_other_streams_took_is_compared_by_who_reads(on_cuda: OnCuda) -> None:
    """The mark lies in one stream; a kernel in another need not have run when it has been passed."""
    (check,) = checks_of(1)
    for place, tensor in enumerate(TENSORS):
        on_cuda.stream = 1 + place // 2
        check.see(place, tensor.clone())
    assert sorted(set(on_cuda.launched)) == [1, 2]
    spotcheck._read(on_cuda.passes)
    assert on_cuda.compared == 1


def test_a_part_of_a_graph_is_compared_by_who_reads(on_cuda: OnCuda) -> None:
    whole, part = checks_of(2)
    for place, tensor in enumerate(TENSORS):
        whole.see(place, tensor.clone())
    part.see(0, TENSORS[0] + 1)
    with pytest.raises(RecomputeError):
        spotcheck._read(on_cuda.passes)
    assert on_cuda.compared == 1


def test_more_tensors_than_one_launch_takes(way: Callable[..., Probes]) -> None:
    tensors = [torch.arange(40.0 + n) for n in range(19)]
    where = way({place: layout_of(tensor) for place, tensor in enumerate(tensors) if place != 4}, CPU)
    for wrong in (None, 0, 7, 8, 18):
        check = SpotCheck(tensors, where, str, phase=1)
        for place, tensor in enumerate(tensors):
            if place != 4:
                check.see(place, tensor + 1 if place == wrong else tensor)
        assert check.is_complete()
        assert check.describe() == (None if wrong is None else str(wrong))


def test_small_tensors_wait_for_each_other_and_large_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[int, int, int]] = []
    flag = Flag()

    def take(programs: int, stream: int, out: int, table: int, sizes: int, first: int, *rest: int) -> None:
        launched.append((programs, stream, first))
        _take(programs, stream, out, table, sizes, first, *rest)

    gathers_by_address(monkeypatch, take)
    tensors = [torch.arange(40.0 + n) for n in range(11)]
    layouts = {place: layout_of(tensor) for place, tensor in enumerate(tensors)}
    taken = probes(layouts, CPU).expect(tensors, 2)
    assert launched == [(8, 0, 0), (3, 0, 8)]
    launched.clear()
    for place in reversed(range(11)):  # as backward asks
        taken.see(place, tensors[place].clone(), flag.address)
    assert launched == [(8, 0, 0), (3, 0, 8)]
    assert all(torch.equal(*taken.pair(place)) for place in range(11))

    taken.forget()
    launched.clear()
    for place in (9, 3, 4):
        taken.see(place, tensors[place] + (place == 4), flag.address)
    assert not launched
    assert len(list(taken.pairs())) == 3, "those that were seen"
    assert launched == [(2, 0, 3), (1, 0, 9)]
    assert [torch.equal(*taken.pair(place)) for place in (9, 3, 4)] == [True, True, False]

    taken.forget()
    launched.clear()
    streams = iter([5, 5, 6, 5])
    monkeypatch.setattr(samples, "current_stream_handle", lambda device: next(streams))
    for place in (1, 2, 3, 5):
        taken.see(place, tensors[place], flag.address)
    assert launched == [(2, 5, 1), (1, 6, 3)], "each where it was made"

    monkeypatch.setattr(samples, "current_stream_handle", lambda device: 0)
    monkeypatch.setattr(samples, "_WAITING_BYTES", 350)
    taken = probes(layouts, CPU).expect(tensors, 2)
    launched.clear()
    for place in range(5):  # of 160 bytes and a few more
        assert taken.see(place, tensors[place], flag.address) == (place in (2, 4)), "two at a time"
    assert launched == [(2, 0, 0), (2, 0, 2)]
    taken.forget()
    launched.clear()
    monkeypatch.setattr(samples, "_WAITING_BYTES", 100)
    held = tensors[7].clone()
    memory = weakref.ref(held.untyped_storage())
    taken.see(7, held, flag.address)
    del held
    assert (launched, memory()) == ([(1, 0, 7)], None)


def test_what_waits_counts_by_the_memory_that_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice holds all of the tensor that it is a part of."""
    gathers_by_address(monkeypatch)
    monkeypatch.setattr(samples, "_WAITING_BYTES", 1000)
    tensors = [torch.arange(10.0) for _ in range(3)]
    taken = probes({place: layout_of(tensor) for place, tensor in enumerate(tensors)}, CPU).expect(tensors, 2)
    flag = Flag()
    assert not taken.see(0, tensors[0], flag.address), "40 bytes wait"
    assert taken.see(1, torch.arange(400.0)[:10], flag.address), "1,600 do not"


@pytest.mark.parametrize("wrong", [None, (0, 1), (1, 2), (2, 0)])
def test_whole_and_partial_samples_are_compared_together(
    wrong: tuple[int, int] | None, way: Callable[..., Probes]
) -> None:
    """Of the third check not all tensors were rebuilt: only a part of its graph ran."""
    tensors = [torch.arange(40.0 + n) for n in range(4)]
    where = way({place: layout_of(tensor) for place, tensor in enumerate(tensors)}, CPU)
    checks = [SpotCheck(tensors, where, str, phase=phase) for phase in range(3)]
    for number, check in enumerate(checks):
        for place, tensor in enumerate(tensors[:2] if number == 2 else tensors):
            check.see(place, tensor + 1 if (number, place) == wrong else tensor)
    assert [check.is_complete() for check in checks] == [True, True, False]
    assert spotcheck._differ(checks) == (wrong is not None)


def test_a_tensor_that_is_rebuilt_with_other_strides(way: Callable[..., Probes]) -> None:
    tensor = torch.randn(6, 50)
    check = SpotCheck([tensor], way({0: layout_of(tensor)}, CPU), str, phase=5)
    check.see(0, tensor.t().contiguous().t())
    assert check.describe() is None


def all_recipes(case: Case) -> remat.Plan:
    """Every region drops all that it can."""
    profile = remat.profile(case.model, case.batch, loss=case.loss, allow=["keep", "recompute"])
    menus = [profile.kinds[call.kind].menu for call in profile.calls]
    recipes = [[i for i, entry in enumerate(menu) if entry.mode is Mode.RECIPE] for menu in menus]
    return make_plan(profile, [found[-1] for found in recipes], 1 << 40, strategy="by hand")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("gathered", [True, False])
def test_a_number_that_changes_on_cuda(gathered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    differ = spotcheck._differ
    monkeypatch.setattr(spotcheck, "_differ", lambda checks: compared.append(checks) or differ(checks))
    if not gathered:
        monkeypatch.setattr(samples, "can_fuse", lambda device: False)
    torch.manual_seed(0)
    model = nn.Sequential(*[Temperature() for _ in range(6)]).cuda()
    case = Case(model, torch.randn(1 << 15, 8, device="cuda"), squared)
    with remat.apply(model, all_recipes(case)) as handle:
        for _ in range(8):  # each region has its checksum taken
            case.run().backward()
        compared.clear()
        case.run().backward()
        assert len(compared) == (not gathered), "kernels have compared, and the flag is down"
        model[2].temperature = 0.9
        with pytest.raises(RecomputeError, match=r"region 2: the replay of .*test_spotcheck\.py"):
            case.run().backward()
        model.zero_grad()
        case.run().backward()
        found = gradients(model)
        assert [row.mode for row in handle.status().rows] == ["recipe"] * 2 + ["full"] + ["recipe"] * 3
    model.zero_grad()
    case.run().backward()
    assert_equal(gradients(model), found)


class ReadsBackwards(nn.Module):
    """Its index is on the host, wherever the rest is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x.sin())[:, torch.arange(63, -1, -1)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("gathered", [True, False])
def test_an_index_on_the_host_is_sampled(gathered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not gathered:
        monkeypatch.setattr(samples, "can_fuse", lambda device: False)
    torch.manual_seed(0)
    model = nn.Sequential(*[ReadsBackwards() for _ in range(24)]).cuda()
    case = Case(model, torch.randn(1 << 15, 64, device="cuda"), squared)
    case.run().backward()
    expected = gradients(model)
    model.zero_grad()
    plan = all_recipes(case)
    with remat.apply(model, plan) as handle:
        case.run().backward()
        assert all(v.program is not None for r in handle.regions for v in r.variants.values())
        assert not any(region.counts.fallbacks for region in handle.regions)
    assert_equal(expected, gradients(model))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_kernel_gathers_what_take_takes() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    assert samples._kernels(device) is not None, "they work here, and were compared with torch.take"
    tensors = [
        torch.randn(300, 7, device=device).bfloat16().t(),
        torch.randint(9, (6,), device=device),
        torch.randn(4, 1000, device=device)[:, 3:],
        torch.randn(77, device=device) > 0,
        torch.randn(5, device=device, dtype=torch.float64),
    ]
    layouts = {place: layout_of(tensor) for place, tensor in enumerate(tensors)}
    flag = Flag()
    for phase in range(PHASES):
        ours = samples._Gathered(layouts, device).expect(tensors, phase)
        theirs = samples._Taken({p: samples._rows(x.numel()) for p, x in enumerate(tensors)}, device)
        other = theirs.expect(tensors, phase)
        for place, tensor in enumerate(tensors):
            ours.see(place, tensor, flag.address)
            other.see(place, tensor, flag.address)
            expected, found = ours.pair(place)
            assert torch.equal(expected, found)
            assert torch.equal(found[: len(other.pair(place)[0])], other.pair(place)[0])


@pytest.mark.parametrize(
    ("shape", "stride"),
    [((4, 8), (8, 1)), ((8, 4), (1, 8)), ((3, 5, 7), (35, 7, 1)), ((6, 8), (0, 1)), ((5, 3), (9, 2)),
     ((), ()), ((1, 1), (5, 5)), ((0, 4), (4, 1)), ((1000,), (1,)), ((1000,), (3,)), ((2, 1, 9), (9, 77, 1))],
)  # fmt: skip
def test_samples_lie_inside_the_tensor(
    way: Callable[..., Probes], shape: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    memory = torch.arange(5000.0)
    tensor = memory.as_strided(shape, stride, 7)
    inside = set(tensor.flatten().tolist())
    seen: set[float] = set()
    flag = Flag()
    for phase in range(PHASES):
        taken = way({0: layout_of(tensor)}, CPU).expect([tensor], phase)
        taken.see(0, tensor, flag.address)
        expected, found = taken.pair(0)
        assert torch.equal(expected, found)
        assert len(expected) <= SAMPLES
        if tensor.numel():
            assert set(expected.tolist()) <= inside
        seen |= set(expected.tolist())
    wandered = min(tensor.numel(), SAMPLES * PHASES) * 0.9
    if tensor.is_contiguous():
        assert len(seen) >= min(wandered, tensor.numel() // SAMPLES * SAMPLES), "another set in each phase"


def test_a_conjugated_tensor_can_be_sampled() -> None:
    memory = torch.randn(4, 4, dtype=torch.complex64)
    for error in (0, 1, 1j):
        check = SpotCheck([memory.conj()], probes({0: layout_of(memory)}, CPU), str, phase=0, whole=[0])
        check.see(0, (memory + error).conj())
        assert check.describe() == ("0" if error else None), "the checksum sees both parts"


def test_a_checksum_does_not_depend_on_where_the_memory_begins(way: Callable[..., Probes]) -> None:
    """What is dropped may be a view at an odd offset, and is rebuilt at the beginning of its own memory."""
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.bool):
        memory = torch.arange(34).remainder(5).to(dtype)
        tensor = memory[1:33]
        check = SpotCheck([tensor], way({0: layout_of(tensor)}, CPU), str, phase=0, whole=[0])
        check.see(0, tensor.clone())
        assert check.describe() is None
        check.see(0, ~tensor if dtype is torch.bool else tensor + 1)
        assert check.describe() == "0"


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "transposed": lambda x: x.t(),
    "at an odd offset": lambda x: x.flatten()[1:],
    "with holes": lambda x: x[:, :-3],
    "strided": lambda x: x[:, ::2],
    "expanded": lambda x: x[:, :1].expand(-1, 64),
    "odd in number": lambda x: x.flatten()[:-1],
    "one element": lambda x: x[0, 0],
    "lazily negated": lambda x: torch._neg_view(x) if x.dtype.is_floating_point else x,
    "one element, negated": lambda x: torch._neg_view(x[0, 0]) if x.dtype.is_floating_point else x[0, 0],
    "empty": lambda x: x[:0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int16,
        torch.uint8,
        torch.bool,
    ],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
def test_a_checksum_depends_on_every_element(
    layout: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same, "_COLUMNS", 3)
    monkeypatch.setattr(same, "_PIECE", 24)  # several of them
    torch.manual_seed(0)
    memory = (
        torch.randn(9, 13).mul(50).to(dtype)
        if dtype.is_floating_point
        else torch.randint(0, 2, (9, 13)).to(dtype)
    )
    tensor = LAYOUTS[layout](memory)
    expected = same.checksum(tensor)
    assert torch.equal(same.checksum(LAYOUTS[layout](memory.clone())), expected)
    bytes_of = memory.view(torch.uint8)
    seen = {offset + byte for offset in offsets(tensor) for byte in range(memory.element_size())}
    for place in range(bytes_of.numel()):
        bytes_of.view(-1)[place] ^= 1
        found = same.checksum(LAYOUTS[layout](memory))
        bytes_of.view(-1)[place] ^= 1
        assert torch.equal(found, expected) == (place not in seen)


def offsets(tensor: Tensor) -> list[int]:
    """Where the elements begin, in bytes."""
    places = torch.arange(tensor.untyped_storage().nbytes() // tensor.element_size())
    picked = places.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return [place * tensor.element_size() for place in picked.flatten().tolist()]


@pytest.mark.parametrize(
    "change", [torch.neg, lambda x: 2 * x, lambda x: x + 1, lambda x: x.roll(1), lambda x: x.roll(64)]
)
def test_a_checksum_tells_apart_what_changed_everywhere_alike(change: Callable[[Tensor], Tensor]) -> None:
    """So many elements, each moved by a power of two: sums no wider than the elements would be equal."""
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        tensor = torch.randn(1 << 16).to(dtype)
        assert not torch.equal(same.checksum(tensor), same.checksum(change(tensor)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checksum_takes_next_to_no_memory(layout: str) -> None:
    """On the host inside of one operation, which only the profiler sees."""
    for dtype in (torch.bfloat16, torch.float32, torch.uint8):
        tensor = LAYOUTS[layout](torch.ones(1 << 10, 1 << 13, dtype=dtype))
        with torch.profiler.profile(profile_memory=True) as seen:
            same.checksum(tensor)
        most = max(event.self_cpu_memory_usage for event in seen.events())
        assert most <= same._PIECE * dtype.itemsize


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checksum_takes_next_to_no_memory_of_a_gpu(layout: str) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.uint8):
        memory = torch.randint(0, 100, (1 << 10, 1 << 13)).to("cuda", dtype)
        tensor = LAYOUTS[layout](memory)
        begin = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        found = same.checksum(tensor)
        assert torch.cuda.max_memory_allocated() - begin <= 2 * same._PIECE * dtype.itemsize + (1 << 16)
        assert torch.equal(found.cpu(), same.checksum(LAYOUTS[layout](memory.cpu())))


def test_a_slice_that_begins_elsewhere_is_kept() -> None:
    """Same shape, same stride, another part of the same memory: nothing but the offset tells."""

    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.start = nn.Linear(8, 8), 0

        def forward(self, x: Tensor) -> Tensor:
            wide = self.linear(x).sin()
            part = wide[:, self.start : self.start + 4].cos()
            return x + wide.cos() + torch.cat([part, part], 1)

    case = stack(Sliced, depth=4)
    planned = plan(case)
    plain = copy.deepcopy(case.model)
    with on(case.model, planned):
        for block in (*case.model, *plain):
            block.start = 3
        case.run().backward()
        case.run(plain).backward()
    assert_equal(gradients(plain), gradients(case.model))
    assert fallbacks(planned)


def test_checks_die_with_their_graph() -> None:
    """Without the collector: a check that knows its pass must not keep all checks of the pass alive."""

    def checks() -> int:
        return sum(type(thing) is SpotCheck for thing in gc.get_objects())

    case = stack(OneRow, depth=4, rows=8)
    planned = plan(case)
    with on(case.model, planned):
        case.run().backward()
        gc.collect()
        gc.disable()
        try:
            before = checks()
            for _ in range(3):
                case.model.zero_grad()
                case.run().backward()
            assert checks() == before
        finally:
            gc.enable()


def test_different_dtypes_in_one_check(way: Callable[..., Probes]) -> None:
    tensors = [
        torch.randn(4, 4),
        torch.randint(9, (6,)),
        torch.randn(3).bfloat16(),
        torch.tensor([True, False]),
    ]
    where = way({place: layout_of(tensor) for place, tensor in enumerate(tensors)}, CPU)
    for wrong in (None, 0, 1, 2, 3):
        check = SpotCheck(tensors, where, str, phase=3)
        for place, tensor in enumerate(tensors):
            changed = ~tensor if tensor.dtype is torch.bool else tensor + 1
            check.see(place, changed if place == wrong else tensor)
        assert check.describe() == (None if wrong is None else str(wrong))


def test_overhead_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Printed, not asserted: host timings on a shared machine say little."""
    case = ZOO["llama"]()
    found = survey_of(case.model, case.run)
    seconds = {}
    for name, check in (("without", False), ("with", True)):
        planned = regions_at(found, LEAST, shadow=False, check=check)
        with on(case.model, planned):
            rounds = []
            for _ in range(12):
                case.model.zero_grad()
                start = time.perf_counter()
                case.run().backward()
                rounds.append(time.perf_counter() - start)
            seconds[name] = statistics.median(rounds[2:])
    slots = sum(len(v.program.slots) for r in planned.regions for v in r.variants.values() if v.program)
    extra = seconds["with"] - seconds["without"]
    with capsys.disabled():
        print(
            f"\nspot check, tiny Llama, {len(planned.regions)} regions, {slots} dropped tensors: "
            f"{seconds['without'] * 1e3:.2f} ms -> {seconds['with'] * 1e3:.2f} ms per step, "
            f"{extra / max(slots, 1) * 1e6:.1f} us per dropped tensor"
        )
    assert re.fullmatch(r"\d+", str(slots))
