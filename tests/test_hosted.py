"""Regions that run again from inputs that wait on the host: the least memory a block can run in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import remat
from models import Case, squared
from reference import assert_step_unchanged
from remat.check.live import LiveBytes
from remat.planner.bounds import least_budget
from remat.planner.link import pieces
from remat.planner.schedule import make_plan
from remat.planner.simulate import simulate
from remat.records import Action, Entry, Mode, Profile
from remat.show.decisions import region_rows, tensor_rows

WIDTH = 32
HOST = ("keep", "recompute", "offload")


class Block(nn.Module):
    """Reads the stream, and a scale that all blocks read."""

    def __init__(self, dropout: float = 0.0, inplace: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first, self.last = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout, self.inplace = nn.Dropout(dropout), inplace

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        if self.inplace:
            x = x.mul_(0.5)
        return x + self.dropout(self.last(F.relu(self.first(self.norm(x))))) * scale


class Stack(nn.Module):
    def __init__(self, count: int = 5, **options: float) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(count))  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.full((1, 48, WIDTH), 0.5)
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, scale)
        return self.head(x)


def case_of(**options: float) -> Case:
    torch.manual_seed(0)
    model = Stack(**options)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return Case(model, torch.randn(4, 48, 8), squared)


def profile_of(case: Case, allow: Sequence[str] = HOST) -> Profile:
    return remat.profile(case.model, case.batch, loss=case.loss, accumulate=True, allow=allow)


def hosted_plan(profile: Profile, allow: Sequence[str] = HOST) -> remat.Plan:
    """Every region in its hosted entry."""
    menus = [profile.kinds[call.kind].menu for call in profile.calls]
    choices = [next(i for i, e in enumerate(menu) if e.mode is Mode.HOSTED) for menu in menus]
    return make_plan(profile, choices, 1 << 40, strategy="optimal", allow=list(map(Action, allow)))


def menu_of(profile: Profile) -> dict[Mode, Entry]:
    return {entry.mode: entry for entry in profile.kinds[profile.calls[1].kind].menu}


def peak_bytes(case: Case) -> int:
    model = case.model

    def step() -> None:
        case.run(model).backward()

    step()
    with LiveBytes() as live:
        present = (p.grad for p in model.parameters() if p.grad is not None)
        live.watch([*model.parameters(), *present, case.batch])
        there = live.current_bytes
        step()
        return live.peak_bytes - there


@pytest.mark.parametrize("options", [{}, {"dropout": 0.1}])
def test_gradients_are_those_of_the_untouched_model(options: dict[str, float]) -> None:
    case = case_of(**options)
    plan = hosted_plan(profile_of(case))
    assert_step_unchanged(case, lambda model: remat.apply(model, plan), passes=2)


def test_a_block_that_writes_to_its_input_holds_a_copy_and_sends_nothing() -> None:
    assert Mode.HOSTED not in menu_of(profile_of(case_of(inplace=True)))


def test_only_what_no_other_region_reads_goes_to_the_host() -> None:
    case = case_of()
    profile = profile_of(case)
    hosted, full = menu_of(profile)[Mode.HOSTED], menu_of(profile)[Mode.FULL]
    stream = 4 * 48 * WIDTH * 4
    assert (hosted.fetches_inputs, hosted.holds_inputs) == ((0,), (1,))
    assert hosted.host_bytes == stream
    assert pieces(profile, 1, hosted) == (stream,)
    rows = tensor_rows(profile.kinds[profile.calls[1].kind], hosted)
    assert {(stream, "offload"), (4 * stream, "recompute")} <= {(row.nbytes, row.action) for row in rows}
    assert hosted.forward_peak_bytes <= full.forward_peak_bytes
    assert hosted.backward_peak_bytes <= full.backward_peak_bytes + stream
    with remat.apply(case.model, hosted_plan(profile)) as handle:
        case.run(case.model).backward()
        engine = handle.engine
        assert engine is not None
        assert engine.counts.sent_bytes == stream * len(profile.calls)
        assert engine.counts.kept_bytes == 0
        row = handle.status().rows[0]
        assert (row.mode, row.host_bytes, row.fallbacks) == ("hosted", stream, 0)


def test_the_simulator_predicts_its_peak_and_the_least_budget_is_lower_with_it() -> None:
    case = case_of(count=8)
    profile = profile_of(case)
    there = profile.step.resident + profile.step.gradients
    plan = hosted_plan(profile)
    with remat.apply(case.model, plan):
        measured = peak_bytes(case)
    predicted = simulate(profile, plan.choices).peak_bytes - there
    assert measured <= predicted <= 1.05 * measured
    least = least_budget(profile, list(map(Action, HOST)))
    assert least <= predicted + there
    assert least < least_budget(profile, [Action.KEEP, Action.RECOMPUTE])
    with pytest.raises(remat.BudgetError) as refused:
        remat.plan(profile, least - 1, allow=HOST)
    assert refused.value.needed == least
    tight = remat.plan(profile, least, allow=HOST)
    assert Mode.HOSTED in {tight.entry(call).mode for call in range(len(tight.choices))}
    with remat.apply(case.model, tight):
        assert peak_bytes(case) <= least - there


def test_without_offload_there_is_no_such_entry() -> None:
    assert Mode.HOSTED not in menu_of(profile_of(case_of(), ("keep", "recompute")))
    profile = profile_of(case_of())
    plan = remat.plan(profile, least_budget(profile), allow=("keep", "recompute"))
    assert Mode.HOSTED not in {plan.entry(call).mode for call in range(len(plan.choices))}


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class Mixed(nn.Module):
    """A mixer over the sequence, and an MLP that can run in chunks of it."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm, self.mlp = nn.Linear(128, 128), nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.gelu(self.mix(x.transpose(1, 2))).transpose(1, 2)
        return x + self.mlp(self.norm(x))


def test_a_part_in_chunks_goes_with_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, WIDTH), *(Mixed() for _ in range(4)), nn.Linear(WIDTH, 4))
    case = Case(model, torch.randn(2, 128, 8), squared)
    allow = (*HOST, "chunk")
    profile = profile_of(case, allow)
    menu = profile.kinds[profile.calls[0].kind].menu
    chunked = next(i for i, e in enumerate(menu) if e.mode is Mode.HOSTED and e.part)
    whole = next(e for e in menu if e.mode is Mode.HOSTED and not e.part)
    again = next(e for e in menu if e.mode is Mode.CHUNK and e.again)
    assert menu[chunked].part == "mlp"
    assert menu[chunked].forward_peak_bytes < whole.forward_peak_bytes
    assert menu[chunked].host_bytes == whole.host_bytes
    assert menu[chunked].chunk_size == again.chunk_size
    choices = [chunked] * len(profile.calls)
    plan = make_plan(profile, choices, 1 << 40, strategy="optimal", allow=list(map(Action, allow)))
    found = remat.verify(model, case.batch, plan, loss=squared)
    assert found.ok
    assert "blocks, or parts of them, in chunks" in found.how
    row = region_rows(plan)[0]
    assert row.way == "chunk+full+offload"
    assert "mlp runs 16 positions at a time, the rest again as a whole, its inputs wait on" in row.reason
    # What needs chunks is only taken where they are allowed.
    without = remat.plan(profile, least_budget(profile, list(map(Action, HOST))), allow=HOST)
    assert not any(without.entry(call).part for call in range(len(without.choices)))


def test_without_an_engine_the_region_recomputes_from_inputs_that_stay() -> None:
    case = case_of()
    plan = hosted_plan(profile_of(case))

    def prepare(model: nn.Module) -> None:
        handle = remat.apply(model, plan)
        for region in handle.regions:
            region.engine = None

    assert_step_unchanged(case, prepare)


def test_a_saved_plan_does_the_same(tmp_path: Path) -> None:
    case = case_of()
    plan = hosted_plan(profile_of(case))
    plan.save(tmp_path / "plan.json")
    again = remat.Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert region_rows(again)[0].way == "full+offload"
    assert_step_unchanged(case, lambda model: remat.apply(model, again))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.first(torch.sin(a))) + 1, torch.tanh(self.second(torch.sin(b))) + 1


class Shared(nn.Module):
    """The first block is called again and again; in its last call another block reads its input, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Pair() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        a = self.embed(x)
        a, b = a + 1, a + 2
        for _ in range(6):
            a, b = self.blocks[0](a, b)
        read_twice = b
        a, b = self.blocks[0](a, read_twice)
        a, b = self.blocks[1](a, read_twice)
        for block in self.blocks[2:]:
            a, b = block(a, b)
        return a + b


def test_calls_that_cannot_be_told_apart_send_the_same_inputs() -> None:
    torch.manual_seed(0)
    case = Case(Shared(), torch.randn(128, 8), squared)
    for parameter in case.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    profile = profile_of(case)
    sent = {
        (profile.calls[call].kind, entry.fetches_inputs)
        for call in range(7)
        for entry in profile.kinds[profile.calls[call].kind].menu
        if entry.mode is Mode.HOSTED
    }
    assert len(sent) == 2  # the last call is of another kind, and its second input is not its own
    least = least_budget(profile, list(map(Action, HOST)))
    plan = remat.plan(profile, least, allow=HOST)
    with remat.apply(case.model, plan):
        assert peak_bytes(case) <= least - profile.step.resident - profile.step.gradients


class Writing(nn.Module):
    """A function as a region, that writes to its input: it cannot run again from it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.weight = nn.Linear(8, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.half = remat.region("half", self._half)

    def _half(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return torch.tanh(torch.sin(x) @ self.weight) + x

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + 1
        for _ in range(3):
            x = self.half(x)
        return x


def test_a_function_that_writes_to_its_input_has_no_such_entry() -> None:
    torch.manual_seed(0)
    case = Case(Writing(), torch.randn(16, 8), squared)
    profile = profile_of(case)
    assert Mode.HOSTED not in {entry.mode for kind in profile.kinds for entry in kind.menu}
