"""Tables that a forward grows, with a plain attribute that says how far: recomputed from what they were."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.attributes import Attributes, exchange

WIDTH = 16


def angles(length: int) -> Tensor:
    return torch.outer(torch.arange(length).float(), torch.linspace(1, 0.01, WIDTH))


class InPlace(nn.Module):
    """A table of fixed size, filled as far as `have`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(size, WIDTH), persistent=False)
        self.have = 0

    def forward(self, length: int) -> Tensor:
        if length <= self.have:
            return self.table[:length].detach()
        found = angles(length)
        self.table[:length] = found
        self.have = length
        return found


class Replaced(nn.Module):
    """A table that is made again, longer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._make(size // 64)

    def _make(self, length: int) -> None:
        self.max_seq_len_cached = length
        self.register_buffer("table", angles(length), persistent=False)

    def forward(self, length: int) -> Tensor:
        if length > self.max_seq_len_cached:
            self._make(length)
        return self.table[:length]


class Block(nn.Module):
    def __init__(self, table: Callable[[int], nn.Module], size: int) -> None:
        super().__init__()
        self.up, self.down, self.table = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), table(size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x * self.table(x.shape[1]).cos())))


class Net(nn.Module):
    def __init__(self, table: Callable[[int], nn.Module], size: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(table, size) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    model(x).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def put_on(model: nn.Module, x: Tensor, how: str) -> Any:
    if how == "enable":
        return remat.enable(model)
    with pytest.raises(remat.BudgetError) as caught:
        remat.fit(model, x, 1000)
    return remat.fit(model, x, caught.value.needed)


@pytest.mark.parametrize("how", ["enable", "fit"])
@pytest.mark.parametrize(("table", "size"), [(InPlace, 64), (InPlace, 1024), (Replaced, 1024)])
def test_gradients_are_those_of_the_untouched_model(
    table: Callable[[int], nn.Module], size: int, how: str
) -> None:
    torch.manual_seed(0)
    plain = Net(table, size)
    model = copy.deepcopy(plain)
    batches = [torch.randn(2, length, WIDTH) for length in (16, 16, 48, 48)]
    put_on(model, batches[0], how)
    for number, x in enumerate(batches):
        try:
            found = gradients(model, x)
        except remat.RecomputeError:  # a large buffer that no call had written before: said, and learned
            assert number == 2
            assert size * WIDTH * 4 > 2**14
            continue
        expected = gradients(plain, x)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_fit_leaves_attributes_as_they_were() -> None:
    torch.manual_seed(0)
    model = Net(InPlace, 64)
    x = torch.randn(64, 16, WIDTH)
    with remat.fit(model, x, activations=0.7):
        assert [block.table.have for block in model.blocks] == [0, 0, 0]
        assert not any(block.table.table.any() for block in model.blocks)


def test_attributes_that_come_go_and_change() -> None:
    module, bare = nn.BatchNorm1d(2), nn.Linear(2, 2)
    bare.number, bare.built, bare.memory = 1, False, torch.zeros(2)
    everything = Attributes([module, bare], all_state=True)
    module.number, module.gone, module.kept, module.filled = 1, "a", [1], None
    before = Attributes([module, bare])
    bare.number, bare.built, bare.memory = 2, True, torch.ones(2)
    module.number, module.came, module.filled = 2, True, torch.ones(3)
    del module.gone
    module.kept.append(2)
    module.eval()
    changed = before.changed()
    of_bare = {name for place, name, _ in changed if place is bare.__dict__}
    assert of_bare == {"number", "memory"}  # flags of who has no buffers say other things
    changed = [one for one in changed if one[0] is module.__dict__]
    assert {name for _, name, _ in changed} == {"number", "gone", "came", "filled"}
    all_changed = {(place is bare.__dict__, name) for place, name, _ in everything.changed()}
    assert {(True, "built"), (True, "number"), (False, "training"), (False, "filled")} <= all_changed
    present = exchange(changed)
    assert (module.number, module.gone, module.filled) == (1, "a", None)
    assert not hasattr(module, "came")
    assert module.kept == [1, 2]
    assert not module.training
    exchange(present)
    assert (module.number, module.came) == (2, True)
    assert torch.equal(module.filled, torch.ones(3))
    assert not hasattr(module, "gone")
