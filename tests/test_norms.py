"""Norms beside the blocks that are written out in operations are regions, too."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from models import ZOO, Case, MlpBlock, squared
from reference import assert_same, step
from remat.check.live import LiveBytes
from remat.planner.schedule import make_plan
from remat.records import Action, Mode
from remat.trace.discover import find_blocks
from remat.trace.norms import with_norms


class WrittenNorm(nn.Module):
    """As Llama has it: in float32, operation by operation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


class Stack(nn.Module):
    def __init__(self, norm: nn.Module, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.layers = nn.ModuleList(MlpBlock(16) for _ in range(layers))
        self.norm = norm
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def stack(norm: nn.Module | None = None) -> Case:
    torch.manual_seed(0)
    return Case(Stack(norm or WrittenNorm(16)).train(), torch.randn(64, 8), squared)


def held_bytes(case: Case, model: nn.Module) -> int:
    """After forward, for backward."""
    with LiveBytes() as live:
        loss = case.run(model)
        held = live.current_bytes
    assert loss.grad_fn is not None
    return held


def beside(model: nn.Module) -> list[str]:
    blocks = find_blocks(model)
    found = with_norms(model, blocks)
    assert found[: len(blocks)] == blocks
    assert all(model.get_submodule(block.name) is block.module for block in found)
    return [block.name for block in found[len(blocks) :]]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", ["model.norm"]),
        ("t5", ["encoder.final_layer_norm", "decoder.final_layer_norm"]),
        ("gpt2", []),  # torch's own LayerNorm is one operation
        ("vit", []),
        ("resnet", []),
    ],
)
def test_zoo(name: str, expected: list[str]) -> None:
    assert beside(ZOO[name]().model) == expected


def test_what_counts() -> None:
    assert beside(Stack(WrittenNorm(16))) == ["norm"]
    assert beside(Stack(nn.LayerNorm(16))) == []
    assert beside(Stack(nn.Sequential(nn.Linear(16, 16), WrittenNorm(16)))) == ["norm.1"]
    assert beside(nn.Sequential(WrittenNorm(16))) == []  # without blocks nothing is planned


@pytest.mark.parametrize("way", ["in place", "wrapped", "around"])
def test_what_its_user_compiled_is_left_alone(way: str) -> None:
    model = Stack(nn.Sequential(WrittenNorm(16)))
    if way == "in place":
        model.norm[0].compile(backend="eager")  # type: ignore[index]
    elif way == "wrapped":
        model.norm = torch.compile(WrittenNorm(16), backend="eager")  # type: ignore[assignment]
    else:
        model.norm.compile(backend="eager")
    assert beside(model) == []


def test_its_tensors_are_recomputed_and_gradients_stay_equal_to_the_bit() -> None:
    case = stack()
    expected = step(case, copy.deepcopy(case.model))
    profile = remat.profile(case.model, case.batch, loss=case.loss, allow=["keep", "recompute"])
    assert [call.name for call in profile.calls] == ["layers.0", "layers.1", "layers.2", "norm"]
    menu = profile.kinds[profile.calls[3].kind].menu
    assert menu[0].mode is Mode.KEEP
    assert menu[0].resident_bytes >= 64 * 16 * 4
    model = copy.deepcopy(case.model)
    kept = held_bytes(case, model)
    for choice, entry in list(enumerate(menu))[1:]:
        plan = make_plan(profile, (0, 0, 0, choice), 10**9, strategy="optimal", allow=(Action.KEEP,))
        assert entry.mode in (Mode.RECIPE, Mode.FULL)
        with remat.apply(model, plan):
            model.zero_grad()
            assert_same(expected, step(case, model))
            assert held_bytes(case, model) <= kept - (menu[0].resident_bytes - entry.resident_bytes)
    model.zero_grad()
    assert_same(expected, step(case, model))


@pytest.mark.usefixtures("forgets_compiled")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::FutureWarning:torch")
def test_it_is_compiled_with_the_blocks() -> None:
    case = stack()
    expected = step(case, copy.deepcopy(case.model))
    model = copy.deepcopy(case.model)
    handle: Any = remat.fit(model, case.batch, loss=case.loss, activations=0.5, compile="aot_eager")
    plan = handle.plan
    norm = plan.profile.kinds[plan.profile.calls[3].kind]
    assert plan.profile.calls[3].name == "norm"
    assert norm.compiler
    assert norm.menu[plan.choices[3]].mode is Mode.COMPILED
    model.zero_grad()
    assert_same(expected, step(case, model))
    handle.remove()
