"""Tensors that a forward leaves in attributes, with the graph that they hang on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import remat
from models import squared
from remat.check.live import LiveBytes
from remat.check.peak import step_peak
from remat.errors import BudgetError
from remat.planner.bounds import least_budget
from remat.records import Action


class Block(nn.Module):
    """Attention whose map can be looked at, and which has a loss of its own."""

    def __init__(self, width: int, left: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.left = left

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(rows, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        attention = (q @ k.transpose(-1, -2) / width**0.5).softmax(-1)
        self.seen = self.left(attention)
        read = F.dropout((attention @ v).transpose(1, 2).reshape(rows, length, width), 0.1)
        return x + F.gelu(self.out(read))


LEFT: dict[str, Callable[[Tensor], Any]] = {
    "the map": lambda attention: attention,
    "a loss": lambda attention: attention.pow(2).mean(),
    "a tuple": lambda attention: (attention.sum(-1), "map"),
}


def stack(left: str, width: int = 32, layers: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width, LEFT[left]) for _ in range(layers)))


def both_losses(model: nn.Sequential, x: Tensor) -> list[Tensor]:
    """The gradients of a loss and, in a second pass, of what was left in attributes."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    model(x).pow(2).mean().backward(retain_graph=True)
    seen = [block.seen[0] if isinstance(block.seen, tuple) else block.seen for block in model]
    sum(tensor.pow(2).sum() for tensor in seen).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("left", LEFT)
def test_gradients_through_what_was_left_reach_the_blocks_before(left: str) -> None:
    plain = stack(left)
    model = copy.deepcopy(plain)
    x = torch.randn(4, 16, 32)
    remat.enable(model)
    for expected, found in zip(both_losses(plain, x), both_losses(model, x), strict=True):
        assert torch.equal(expected, found)


def peak_of(model: nn.Module, x: Tensor) -> int:
    """Of a step that begins without what another has left."""
    model.zero_grad(set_to_none=True)
    for module in model:
        module.seen = None
    with LiveBytes() as live:
        live.watch([*model.parameters(), x])
        live.reset_peak()
        model(x).pow(2).mean().backward()
        return live.peak_bytes


@pytest.mark.parametrize("share", [1.01, 0.8, 0.7])
def test_budgets_are_met_where_maps_are_left(share: float) -> None:
    x = torch.randn(8, 32, 32)
    plain = peak_of(stack("the map"), x)
    model = stack("the map")
    budget = int(plain * share)
    handle = remat.fit(model, x, budget, loss=lambda output, batch: output.pow(2).mean())
    assert peak_of(model, x) <= budget
    peak = max(peaks_of(model, x))
    assert peak <= budget
    assert handle.plan.predicted_peak_bytes == pytest.approx(peak, rel=0.03)


class Looking(nn.Module):
    """Leaves its attention map, without the graph, where somebody can look at it."""

    seen: Tensor | None = None

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.mix, self.up, self.down = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(x).chunk(3, -1)
        attention = (q @ k.mT / 4).softmax(-1)
        self.seen = attention.detach().clone()
        x = x + attention @ v
        return x + self.down(F.gelu(self.up(x)))


def peaks_of(model: nn.Module, x: Tensor, steps: int = 3) -> list[int]:
    """Of one step after the other; each begins with what the one before has left."""
    peaks = []
    with LiveBytes() as live:
        live.watch([*model.parameters(), x])
        for _ in range(steps):
            model.zero_grad(set_to_none=True)
            live.reset_peak()
            model(x).pow(2).mean().backward()
            peaks.append(live.peak_bytes)
    return peaks


class Delaying(nn.Module):
    """Holds what it made in this step and in the one before."""

    kept: Tensor | None = None
    before: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.mix(x))
        self.before, self.kept = self.kept, y.detach().clone()
        return y


def test_a_measured_step_begins_with_what_another_has_left() -> None:
    torch.manual_seed(0)
    model, x = Delaying(), torch.randn(8, 32, 16)
    first, *later = peaks_of(model, x)
    assert later == [later[0]] * 2
    assert later[0] > first
    weights = sum(p.nbytes for p in model.parameters()) + x.nbytes
    model.before = model.kept = None
    run = lambda: model(x).pow(2).mean()  # noqa: E731
    assert step_peak(model, run, torch.device("cpu")).above_bytes == later[0] - weights


@pytest.mark.parametrize("room", [0, 2000, 200_000])
def test_budgets_are_met_in_every_step_where_maps_are_left(room: int) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Looking() for _ in range(6))), torch.randn(4, 64, 16)
    ways = {"loss": squared, "allow": ("keep", "recompute")}
    profile = remat.profile(model, x, **ways)
    budget = least_budget(profile, [Action.KEEP, Action.RECOMPUTE]) + room
    try:
        remat.fit(model, x, budget=budget, **ways)
    except BudgetError as error:
        budget = error.needed
        remat.fit(model, x, budget=budget, **ways)
    assert max(peaks_of(model, x)) <= budget


def test_a_recomputation_lets_go_of_its_graph() -> None:
    """Of a checkpointed block nothing stays but what its forward left."""
    x = torch.randn(8, 32, 32)
    kept, detached = stack("the map"), stack("the map")
    for block in detached:
        block.left = lambda attention: attention.detach()
    for model in (kept, detached):
        remat.enable(model)
    assert peak_of(kept, x) == pytest.approx(peak_of(detached, x), rel=0.03)


class Consumed(nn.Module):
    """Its losses are taken by whoever trains it, before backward."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 16)
        self.loss: Tensor | None = None
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.mix(x))
        self.loss = x.pow(2).mean()
        self.losses.append(x.abs().mean())
        return x


def test_what_was_taken_before_backward_stays_taken() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(Consumed() for _ in range(3)))
    model = copy.deepcopy(plain)
    remat.enable(model)
    x = torch.randn(4, 16)
    for _ in range(2):
        for each in (plain, model):
            each.zero_grad(set_to_none=True)
            loss = each(x).sum()
            for block in each:
                loss = loss + block.loss + sum(block.losses)
                block.loss = None
                block.losses.clear()
            loss.backward()
            assert [(block.loss, block.losses) for block in each] == [(None, [])] * 3
        for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(expected.grad, found.grad)


def test_what_comes_and_goes() -> None:
    """An attribute that only a recomputation makes is taken away; one that it removes comes back."""
    module = nn.Linear(2, 2)
    first = module.seen = torch.ones(1)
    module.names, module.maps = ["a"], [torch.ones(1)]
    with remat.attributes.tensors_kept([module]):
        del module.seen
        module.other = [torch.zeros(1)]
        module.names.append("b")
        module.maps.append(torch.zeros(1))
        module.count = 3
    assert module.seen is first
    assert not hasattr(module, "other")
    assert (module.count, module.names) == (3, ["a", "b"])  # no tensors
    assert len(module.maps) == 1


class Turning(nn.Module):
    """Called several times in a step; which gain it uses goes round in circles."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.turn = nn.Linear(8, 16), nn.Linear(16, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        gain = (1.0, 0.5, 0.25)[self.turn]
        self.turn = (self.turn + 1) % 3
        return x + self.down(F.gelu(self.up(x)) * gain)


class Looped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Turning() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            for block in self.blocks:
                x = block(x)
        return x


def test_an_attribute_that_is_back_where_it_was_stays_there() -> None:
    """At backward it is what it was at entry; the recomputation changes it nevertheless."""
    torch.manual_seed(0)
    model, x = Looped(), torch.randn(4, 5, 8)
    plain = copy.deepcopy(model)
    remat.enable(model)
    for _ in range(3):
        for each in (model, plain):
            each.zero_grad()
            each(x).square().mean().backward()
        assert [block.turn for block in model.blocks] == [0, 0]
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)


class Summing(nn.Module):
    """Adds up what it has seen, in place, in tensors that are no buffers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.sums = nn.Linear(8, 8), torch.zeros(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.sums += x.detach().sum((0, 1))
        return x + torch.tanh(self.up(x))


@pytest.mark.parametrize("width", [1, 1000], ids=["small", "large"])
def test_what_is_added_up_in_place_is_added_once(width: int) -> None:
    """A large one from the second call on: it is not known before that the call writes it."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Summing(width) for _ in range(3))), torch.randn(4, 5, 8)
    plain = copy.deepcopy(model)
    remat.enable(model)
    for step in range(3):
        for each in (model, plain):
            each(x).square().mean().backward()
        if width > 1 and step == 0:
            for ours, theirs in zip(model, plain, strict=True):
                ours.sums.copy_(theirs.sums)
    for ours, theirs in zip(model, plain, strict=True):
        assert torch.equal(ours.sums, theirs.sums)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_a_profile_leaves_sums_as_they_were() -> None:
    model = nn.Sequential(*(Summing(1) for _ in range(3)))
    remat.profile(model, torch.randn(4, 5, 8), loss=lambda output, batch: output.square().mean())
    assert not any(block.sums.any() for block in model)


class Sharing(nn.Module):
    """Writes to a tensor that another module inside of it reads by its own name."""

    def __init__(self) -> None:
        super().__init__()
        self.writer, self.reader = nn.Linear(8, 8), nn.Linear(8, 8)
        self.writer.memory = self.reader.memory = torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.writer(x))
        self.writer.memory += x.detach().mean((0, 1))
        return x + torch.tanh(self.reader(x) * self.reader.memory)


def test_a_tensor_that_two_modules_share_is_shared_when_it_is_written_again() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Sharing() for _ in range(3))), torch.randn(4, 5, 8)
    plain = copy.deepcopy(model)
    remat.enable(model)
    for _ in range(3):
        for each in (model, plain):
            each.zero_grad()
            each(x).square().mean().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        for ours, theirs in zip(model, plain, strict=True):
            assert ours.writer.memory is ours.reader.memory
            assert torch.equal(ours.writer.memory, theirs.writer.memory)
