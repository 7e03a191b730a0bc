"""Nests that go into regions and come out: what is looked into, and how it is put together again."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import remat
from models import Case, squared
from reference import assert_step_unchanged
from remat._torch_private import flatten
from remat.trees import leaves, map_tensors, signature, tensors


@dataclasses.dataclass(frozen=True)
class Pair:
    first: Tensor
    rest: dict[str, Any]


@dataclasses.dataclass
class State:
    hidden: Tensor
    step: int = 0
    pair: Pair | None = None


@dataclasses.dataclass(eq=False)
class Settings(nn.Module):
    width: int

    def __post_init__(self) -> None:
        super().__init__()


def state() -> State:
    return State(torch.ones(2), 3, Pair(torch.zeros(3), {"a": [torch.full((1,), 7.0), "text"]}))


def test_dataclasses_are_looked_into_and_modules_are_not() -> None:
    found = leaves((state(), Settings(4)))
    assert [type(leaf).__name__ for leaf in found] == ["Tensor", "int", "Tensor", "Tensor", "str", "Settings"]
    twice = map_tensors(lambda tensor: tensor * 2, state())
    assert isinstance(twice, State)
    assert isinstance(twice.pair, Pair)
    assert [tensor.tolist() for tensor in tensors(twice)] == [[2, 2], [0, 0, 0], [14]]
    assert (twice.step, twice.pair.rest["a"][1]) == (3, "text")


def test_they_are_put_together_again_and_nothing_holds_their_tensors() -> None:
    given = state()
    hidden = weakref.ref(given.hidden)
    parts, build = flatten([given, 5])
    assert len(parts) == 6
    built = build([part + 1 if isinstance(part, Tensor) else part for part in parts])
    assert built[0].hidden.tolist() == [2, 2]
    assert built[0].pair.rest["a"][0].tolist() == [8]
    assert given.hidden.tolist() == [1, 1]
    del given, parts
    gc.collect()
    assert hidden() is None  # though `build` lives
    assert build is not None


def test_the_signature_knows_their_fields() -> None:
    one = signature((state(),), {}, True)
    assert one == signature((state(),), {}, True)
    assert one != signature((dataclasses.replace(state(), step=4),), {}, True)
    assert one != signature((dataclasses.replace(state(), hidden=torch.ones(3)),), {}, True)
    hash(one)


class Block(nn.Module):
    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.writes = writes

    def forward(self, given: State) -> State:
        hidden = given.hidden + self.down(F.gelu(self.up(self.norm(given.hidden))))
        if self.writes:
            given.hidden = hidden
            return given
        return State(hidden, given.step + 1)


class Model(nn.Module):
    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(writes) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        passed = State(x)
        for block in self.blocks:
            passed = block(passed)
        return passed.hidden


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("share", [0.4, 0.7, 1.0])
def test_blocks_that_pass_a_dataclass_on(writes: bool, share: float) -> None:
    torch.manual_seed(0)
    case = Case(Model(writes), torch.randn(16, 12, 8), squared)
    assert_step_unchanged(
        case, lambda model: remat.fit(model, case.batch, activations=share, loss=squared), passes=2
    )
    assert_step_unchanged(case, remat.enable)
