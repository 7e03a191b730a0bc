"""Outputs that a far region reads: skips from an encoder to a decoder, one tower after another.

The encoder's blocks end in a relu in place, which holds its output for its own backward. The decoder's block
that reads it is done long before: in between, the tensor is there because of its maker alone.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import remat
from models import Case, squared
from reference import assert_step_unchanged
from remat.check.live import LiveBytes
from remat.planner.schedule import make_plan
from remat.planner.simulate import simulate, spans
from remat.records import Phase

WIDTH = 16


class Block(nn.Module):
    def __init__(self, middle: int, wide: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Conv2d(wide, middle, 3, padding=1)
        self.norm = nn.BatchNorm2d(middle)
        self.last = nn.Conv2d(middle, WIDTH, 1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        x = x if skip is None else torch.cat([x, skip], 1)
        return self.relu(self.last(F.gelu(self.norm(self.first(x)))))


class Skips(nn.Module):
    """Each skip is read by one decoder block, and by the code between regions."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, WIDTH, 3, padding=1), nn.Linear(WIDTH, 5)
        self.down = nn.ModuleList(Block(8) for _ in range(depth))
        self.bottom = nn.ModuleList([Block(128)])
        self.up = nn.ModuleList(Block(8, 2 * WIDTH) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.stem(x), []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = x * 0.5
        for block in self.bottom:
            x = block(x)
        for block in self.up:
            x = block(x * 0.5, skips.pop())
        return self.head(x.mean((2, 3)))


class Towers(nn.Module):
    """What the first blocks make is read by the last ones; another tower runs in between."""

    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.stems = nn.ModuleList(nn.Conv2d(3, WIDTH, 3, padding=1) for _ in range(2))
        self.first = nn.ModuleList(Block(8) for _ in range(count))
        self.second = nn.ModuleList(Block(64) for _ in range(2))
        self.last = nn.ModuleList(Block(8) for _ in range(count))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        made = [block(self.stems[0](x)) for block in self.first]
        y = self.stems[1](x)
        for block in self.second:
            y = block(y)
        for block, h in zip(self.last, made, strict=True):
            y = y + block(h)
        return self.head(y.mean((2, 3)))


@pytest.fixture(params=[Skips, Towers])
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = request.param()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


@pytest.fixture
def batch() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 3, 24, 24)


def peak_bytes(model: nn.Module, batch: Tensor, plan: remat.Plan) -> int:
    """Of a step under this plan beyond parameters, gradients and the batch: they are there before it."""

    def step() -> None:
        squared(model(batch), batch).backward()

    with remat.apply(model, plan):
        step()
        with LiveBytes() as live:
            live.watch(
                [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None), batch]
            )
            there = live.current_bytes
            step()
            return live.peak_bytes - there


def test_backward_of_each_region_is_seen_to_end_before_an_earlier_one_begins(
    model: nn.Module, batch: Tensor
) -> None:
    profile = remat.profile(model, batch, loss=squared, accumulate=True)
    found = [span for span in spans(profile) if span is not None]
    assert len(found) == len(profile.calls)
    assert all(span.recorded and span.returns == span.backward for span in found)
    assert all(later.backward < earlier.backward for earlier, later in pairwise(found))


@pytest.mark.parametrize("allow", [("keep", "recompute"), ("keep", "recompute", "offload")])
def test_every_plan_stays_within_what_the_simulator_predicts(
    model: nn.Module, batch: Tensor, allow: tuple[str, ...]
) -> None:
    """Each entry of the first regions in turn: most of them hold the output that is read far away."""
    profile = remat.profile(model, batch, loss=squared, accumulate=True, allow=allow)
    there = profile.step.resident + profile.step.gradients
    references = [profile.kinds[call.kind].reference for call in profile.calls]
    count = sum(call.name.startswith(("down", "first")) for call in profile.calls)
    menu = profile.kinds[profile.calls[0].kind].menu
    assert any(entry.holds_outputs for entry in menu)
    for number, entry in enumerate(menu):
        choices = [number] * count + references[count:]
        plan = make_plan(profile, choices, 1 << 40, strategy="optimal", allow=list(map(remat.Action, allow)))
        measured = peak_bytes(model, batch, plan)
        predicted = simulate(profile, choices).peak_bytes - there
        assert measured <= predicted, entry
        assert predicted <= 1.05 * measured, entry


@pytest.mark.parametrize("share", [0.9, 0.75, 0.6])
def test_budgets_are_met_and_gradients_are_the_same(model: nn.Module, batch: Tensor, share: float) -> None:
    profile = remat.profile(model, batch, loss=squared, accumulate=True)
    there = profile.step.resident + profile.step.gradients
    try:
        plan = remat.plan(profile, activations=share)
    except remat.BudgetError as error:  # the bottom of a U-Net alone takes most of it
        plan = remat.plan(profile, error.needed)
    assert peak_bytes(model, batch, plan) <= plan.budget_bytes - there
    assert_step_unchanged(Case(model, batch, squared), lambda model: remat.apply(model, plan))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, scale: Tensor, x: Tensor, skip: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x + skip))) * scale  # the scale's gradient is there first


class Given(nn.Module):
    """Every block reads what it shares with another, and a parameter of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 5)
        self.scales = nn.ParameterList(torch.ones(WIDTH) for _ in range(3))
        self.blocks = nn.ModuleList(Scaled() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(
            sum(block(scale, x, x) for block, scale in zip(self.blocks, self.scales, strict=True))
        )


def test_a_leafs_gradient_does_not_end_a_backward() -> None:
    torch.manual_seed(0)
    model, batch = Given(), torch.randn(64, 8)
    profile = remat.profile(model, batch, loss=squared)
    saved = batch.shape[0] * 8 * WIDTH * 4
    for call in range(3):
        own = [s for s in profile.segments if s.call == call and s.phase is Phase.BACKWARD]
        assert max(s.peak_bytes - s.start_bytes for s in own) > 2 * saved  # its products are in it
    assert all(s.peak_bytes - s.start_bytes < saved for s in profile.segments if s.call < 0)
