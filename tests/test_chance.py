"""Models that decide by chance which blocks they call (LayerDrop): planned with all, exact with any."""

from __future__ import annotations

import copy
import random
import subprocess
import sys

import torch
from torch import Tensor, nn

import remat
from models import Case, MlpBlock, squared
from reference import assert_same, step
from test_fit import counted_peak


class LayerDrop(nn.Module):
    def __init__(self, depth: int = 6, drop: float = 0.3, unused: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MlpBlock(32) for _ in range(depth))
        self.drop = drop
        self.unused = unused

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[: -1 if self.unused else None]:
            if random.random() >= self.drop:
                x = block(x)
        return x


def case(**options: object) -> Case:
    torch.manual_seed(0)
    return Case(LayerDrop(**options).train(), torch.randn(256, 32), squared)  # type: ignore[arg-type]


def test_layers_that_are_left_out_by_chance_are_planned() -> None:
    given = case()
    before = random.getstate()
    handle = remat.fit(given.model, given.batch, activations=0.6, loss=squared)
    assert random.getstate() == before
    assert {call.name for call in handle.plan.profile.calls} == {f"blocks.{i}" for i in range(6)}
    called = set()
    for seed in range(8):  # other layers every time
        plain = copy.deepcopy(given.model)
        for module in plain.modules():
            module.__dict__.pop("forward", None)
        random.seed(seed)
        expected = step(given, plain)
        random.seed(seed)
        given.model.zero_grad()
        assert_same(expected, step(given, given.model))
        random.seed(seed)
        assert counted_peak(given) <= handle.plan.budget_bytes
        called.add(len(expected))
    assert len(called) > 1  # the steps did differ


def test_the_first_fit_of_a_process_draws_no_random_number() -> None:
    """Also by what it imports and shows."""
    script = """
import random, torch, remat
from torch import nn
random.seed(3)
model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
before = random.getstate()
remat.fit(model, torch.randn(64, 8), activations=1.0, loss=lambda output, batch: output.sum())
assert random.getstate() == before
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_block_that_is_never_called_costs_a_few_tries_and_no_more() -> None:
    given = case(drop=0.0, unused=True)
    calls = []
    given.model.register_forward_hook(lambda *_: calls.append(1))
    profile = remat.profile(given.model, given.batch, loss=squared)
    unused = len(calls)
    assert len(profile.calls) == 5
    calls.clear()
    given = case(drop=0.0)
    given.model.register_forward_hook(lambda *_: calls.append(1))
    remat.profile(given.model, given.batch, loss=squared)
    assert unused == len(calls) + 3
