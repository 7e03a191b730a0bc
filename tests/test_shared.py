"""Modules that one step calls several times: what runs is what was planned and predicted, call by call."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import remat
from models import Case, MlpBlock, squared
from reference import assert_same, step
from remat.check.live import LiveBytes
from remat.planner.ties import disagreement
from remat.records import Mode

SHARES = (0.8, 0.6, 0.5, 0.4)


class Tower(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MlpBlock(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Twin(nn.Module):
    """Two views go through one tower."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        return (self.tower(x) - self.tower(x.flip(0))).square() + self.tower(x[:40]).mean()


def twin() -> Case:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Case(Twin().train(), torch.randn(96, 24), squared)


@functools.cache
def profile_of_twin() -> remat.Profile:
    case = twin()
    return remat.profile(case.model, case.batch, loss=case.loss)


def counted_peak(case: Case) -> int:
    with LiveBytes() as live:
        live.watch([*case.model.parameters(), case.batch])
        live.reset_peak()
        case.run().backward()
        peak = live.peak_bytes
    case.model.zero_grad(set_to_none=True)
    return peak


def assert_runs_as_planned(handle: remat.Handle) -> None:
    """Every call's variant, found as the region finds it: by its name and its signature."""
    plan, regions = handle.plan, {region.name: region for region in handle.regions}
    for index, call in enumerate(plan.profile.calls):
        entry = plan.entry(index)
        if call.name not in regions:
            assert entry.mode is Mode.KEEP
            continue
        variant = regions[call.name].variants[plan.profile.kinds[call.kind].signature]
        assert (variant.mode, variant.resident_bytes) == (entry.mode, entry.resident_bytes)


def test_a_tower_that_runs_twice_runs_as_planned_at_every_budget() -> None:
    case = twin()
    expected = step(case, copy.deepcopy(case.model))
    profile = profile_of_twin()
    assert [call.name for call in profile.calls].count("tower.blocks.0") == 3
    assert len(profile.kinds) >= 2, "the third call is of another size: it is not tied to the others"
    plans = [remat.plan(profile, activations=share) for share in SHARES]
    for plan in plans:
        assert disagreement(profile, plan.choices) is None
        with remat.apply(case.model, plan) as handle:
            assert_runs_as_planned(handle)
            peak = counted_peak(case)
            assert peak <= plan.budget_bytes
            assert abs(plan.predicted_peak_bytes - peak) <= 0.03 * peak
            assert_same(expected, step(case, case.model))
            case.model.zero_grad(set_to_none=True)
            assert not [row for row in handle.status().rows if row.fallbacks]
    assert any(plan.choices[0] != plan.choices[6] for plan in plans), "other inputs, other entry"
    seconds = [plan.predicted_seconds for plan in plans]
    assert all(more <= less for more, less in itertools.pairwise(seconds))


def test_a_saved_plan_runs_alike_and_one_that_cannot_is_refused(tmp_path: Path) -> None:
    case = twin()
    profile = profile_of_twin()
    remat.plan(profile, activations=0.5).save(tmp_path / "plan.json")
    plan = remat.Plan.load(tmp_path / "plan.json")
    with remat.apply(case.model, plan) as handle:
        assert_runs_as_planned(handle)
    reference = profile.kinds[profile.calls[0].kind].reference
    other = 0 if plan.choices[3] == reference else reference
    mixed = (*plan.choices[:3], other, *plan.choices[4:])
    with pytest.raises(remat.PlanError, match=r"different entries for calls of tower\.blocks\.0"):
        remat.apply(case.model, dataclasses.replace(plan, choices=mixed))
    assert not remat.status(case.model).rows, "refused before anything was changed"


def test_sizes_between_plan_calls_alike() -> None:
    """An adaptive plan: at a size that was not measured, too, and at one at which all calls are alike."""
    case = twin()
    batches = [torch.randn(rows, 24) for rows in (48, 72, 40, 96)]
    expected = [step(Case(case.model, batch, squared), copy.deepcopy(case.model)) for batch in batches]
    handle = remat.fit(case.model, batches[3], activations=0.5, loss=squared, adaptive=batches[:1])
    for batch, plain in zip(batches, expected, strict=True):
        case.model.zero_grad(set_to_none=True)
        assert_same(plain, step(Case(case.model, batch, squared), case.model))
        assert handle.plan is None or disagreement(handle.plan.profile, handle.plan.choices) is None
    handle.remove()
