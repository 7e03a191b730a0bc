"""Regions over pieces of the batch, a head cut by classes, on an accelerator: gradients, peaks, copies."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import remat
from remat.planner.schedule import make_plan, with_chunks
from remat.records import Action, Mode
from test_offload_plans_cuda import Stack, gradients, peak_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
]
ALL = [Action.KEEP, Action.RECOMPUTE, Action.OFFLOAD, Action.CHUNK]


def assert_near(expected, found, rounding):
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        gap = (found[name].double() - value.double()).norm() / value.double().norm()
        assert gap < rounding, name


@pytest.mark.parametrize("mode", [Mode.CHUNK, Mode.HOSTED])
def test_pieces_of_the_batch(mode: Mode) -> None:
    torch.manual_seed(0)
    model, batch = Stack().cuda(), torch.randn(16, 512, 256, device="cuda")
    expected = gradients(model, batch)
    plain = peak_bytes(model, batch)
    profile = remat.profile(model, batch, allow=ALL)
    sizes = {entry.cut for kind in profile.kinds for entry in kind.menu if entry.cut}
    assert sizes == {(0, 4), (0, 1)}
    for cut in sizes:
        menus = [profile.kinds[call.kind].menu for call in profile.calls]
        choices = [next(i for i, e in enumerate(menu) if e.mode is mode and e.cut == cut) for menu in menus]
        plan = make_plan(profile, choices, 1 << 40, strategy="all", allow=ALL)
        with remat.apply(model, plan) as handle:
            for _ in range(4):
                assert_near(expected, gradients(model, batch), 1e-3)
            assert not [row for row in handle.status().rows if row.fallbacks]
            if mode is Mode.HOSTED:
                assert handle.engine.counts.kept_bytes == handle.engine.counts.failures == 0
            peak = peak_bytes(model, batch)
        assert peak < 0.5 * plain
        assert peak <= 1.02 * (plan.predicted_peak_bytes - profile.step.resident)


class Classifier(nn.Module):
    def __init__(self, classes: int = 32001, width: int = 256) -> None:
        super().__init__()
        self.trunk, self.head = Stack(width, 2), nn.Linear(width, classes, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.trunk.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten())


def test_a_head_cut_by_classes() -> None:
    torch.manual_seed(0)
    model = Classifier().cuda().bfloat16()
    batch = {
        "x": torch.randn(4, 1024, 256, device="cuda", dtype=torch.bfloat16),
        "labels": torch.randint(0, 32001, (4, 1024), device="cuda"),
    }

    def step() -> dict[str, torch.Tensor]:
        model.zero_grad(set_to_none=True)
        model(**batch).backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    expected = step()
    profile = remat.profile(model, batch, allow=ALL)
    peaks = {}
    for finer in (False, True):
        found = with_chunks(profile, finer=finer)
        assert found is not None
        plan = make_plan(found, [0] * len(found.calls), 1 << 40, strategy="all", allow=ALL)
        with remat.apply(model, plan):
            assert_near(expected, step(), 2e-2)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step()
            torch.cuda.synchronize()
            peaks[finer] = torch.cuda.max_memory_allocated() - before
    assert peaks[True] < peaks[False]
