"""Reports: what each decision says of itself, and the same facts as text, JSON and scalars."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import remat
from planner.build import GraphBuilder
from remat.planner.simulate import simulate
from remat.records import Action, Mode, Plan
from remat.show.decisions import region_rows, tensor_rows
from remat.show.facts import trade_off
from remat.show.scalars import scalars_of
from remat.show.text import Report

LAYERS = 6
PARTS = ("parameters", "gradients", "optimizer", "kept", "moving", "working")


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 64), nn.Linear(64, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


def model_and_batch() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(LAYERS))), torch.randn(4, 16, 32)


def mean_square(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return output.square().mean()


@functools.cache
def planned(activations: float = 0.5) -> Plan:
    model, batch = model_and_batch()
    optimizer = torch.optim.AdamW(model.parameters())
    found = remat.profile(model, batch, loss=mean_square, optimizer=optimizer)
    return remat.plan(found, activations=activations)


# ----------------------------------------------------------------------------------------------- decisions


@pytest.mark.parametrize("activations", [1.0, 0.6, 0.5])
def test_the_bytes_of_every_region_add_up(activations):
    plan = planned(activations)
    rows = region_rows(plan)
    assert [row.name for row in rows] == [str(i) for i in range(LAYERS)]
    for row in rows:
        assert row.kept_bytes + row.recomputed_bytes + row.offloaded_bytes == row.saved_bytes
        assert row.extra_seconds == plan.entry(row.index).extra_seconds
        assert row.born < row.gone
        assert row.reason
    if activations == 1.0:
        assert all("the budget has room; next would be" in row.reason for row in rows)
    else:
        assert any(row.reason.startswith("frees") for row in rows)


def test_every_saved_tensor_has_its_decision():
    plan = planned(0.5)
    index = next(i for i in range(LAYERS) if plan.entry(i).mode is Mode.RECIPE)
    kind, entry = plan.profile.kinds[plan.profile.calls[index].kind], plan.entry(index)
    rows = tensor_rows(kind, entry)
    assert sum(row.seconds for row in rows) == pytest.approx(entry.recipe.replay_seconds)
    assert {row.action for row in rows} == {"keep", "recompute"}
    assert all(row.reason for row in rows)
    by_line = [row for row in rows if row.source.startswith("test_report.py:")]
    assert by_line, "the lines of the model's own source"
    gelu = [row for row in rows if row.operation == "gelu"]
    assert [(row.shape, row.dtype) for row in gelu] == [((4, 16, 64), "float32")]
    mask = [row for row in rows if row.reason.startswith("cannot be rebuilt")]
    assert mask, "dropout's mask is kept, and it says why"
    dropped = sum(row.nbytes for row in rows if row.action == "recompute")
    assert dropped > 0


def test_seconds_are_charged_once_and_to_the_first_that_asks():
    g = GraphBuilder()
    x = g.input(16)
    a = g.op(x, nbytes=8, seconds=3.0)
    b = g.op(a, nbytes=4, seconds=1.0)
    g.save(a, b)
    graph = g.graph()
    from remat.planner.menu import finish
    from remat.records import Entry, Kind

    recipe = finish(graph, [graph.values[x].storage])
    entry = Entry(Mode.RECIPE, 16, 0, 0, 4.0, recipe=recipe)
    kind = Kind("k", (entry,), 12, 4.0, graph)
    rows = {row.nbytes: row for row in tensor_rows(kind, entry)}
    first = min(graph.saved, key=lambda saved: saved.order)
    asked_first = graph.storages[graph.values[first.value].storage].nbytes
    assert sum(row.seconds for row in rows.values()) == 4.0
    assert rows[asked_first].seconds == (4.0 if asked_first == 4 else 3.0)
    assert rows[16].action == "keep"
    assert rows[16].reason == "an input, from which others are rebuilt"


def test_offloaded_tensors_and_the_link_show_when_a_plan_has_them():
    plan = planned(0.5)
    index = next(i for i in range(LAYERS) if plan.entry(i).mode is Mode.RECIPE)
    kind = plan.profile.kinds[plan.profile.calls[index].kind]
    entry = plan.entry(index)
    internal = next(s for s in entry.recipe.kept if kind.graph.storages[s].charge_bytes)
    moved = kind.graph.storages[internal].charge_bytes
    recipe = replace(entry.recipe, offloaded=(internal,), host_bytes=moved)
    other = replace(
        entry, recipe=recipe, host_bytes=moved, resident_bytes=max(entry.resident_bytes - moved, 0)
    )
    menu = tuple(other if e is entry else e for e in kind.menu)
    kinds = tuple(replace(k, menu=menu) if k is kind else k for k in plan.profile.kinds)
    plan = replace(plan, profile=replace(plan.profile, kinds=kinds))

    row = region_rows(plan)[index]
    assert row.offloaded_bytes == moved
    assert "wait on the host" in row.reason
    kept = tensor_rows(kinds[plan.profile.calls[index].kind], other)
    assert [row.nbytes for row in kept if row.action == Action.OFFLOAD.value] == [moved]
    data = Report(plan).as_dict()
    assert row.way.endswith("+offload")
    sent, back = (sum(p[k] for p in data["link"]["points"]) for k in ("to_host_bytes", "from_host_bytes"))
    assert sent == data["link"]["host_bytes"] > 0
    assert sent >= back  # what has not left the device yet is used where it is
    for point in data["timeline"]["points"]:
        assert sum(point[part] for part in PARTS) == point["peak_bytes"]
    assert "on the host" in str(Report(plan))
    assert "on the host" not in str(planned(0.5).report())


# ------------------------------------------------------------------------------------------------- reports


def test_a_plan_that_may_offload_is_compared_quickly():
    """Planning with offload takes seconds for each budget: the curve is of recomputation, and says so."""
    plan = replace(planned(0.5), allow=(Action.KEEP, Action.RECOMPUTE, Action.OFFLOAD))
    found = trade_off(plan)
    assert found["offload"] is True
    assert [row["strategy"] for row in found["strategies"]][:3] == ["optimal", "optimal, no offload", "none"]
    assert found["strategies"][0]["seconds"] == plan.predicted_seconds


def test_a_plan_reports_itself(tmp_path):
    plan = planned(0.5)
    data = json.loads(plan.report().save(tmp_path / "plan.json").read_text())
    points = data["timeline"]["points"]
    for point in points:
        assert sum(point[part] for part in PARTS) == point["peak_bytes"]
    assert max(point["peak_bytes"] for point in points) == plan.predicted_peak_bytes
    assert max(data["timeline"]["plain_peak_bytes"]) == plan.plain_peak_bytes
    assert len(data["timeline"]["plain_peak_bytes"]) == len(points)
    assert data["regions"][0]["name"] == "0"
    frontier = data["trade_off"]["frontier"]
    assert [p["seconds"] for p in frontier] == sorted((p["seconds"] for p in frontier), reverse=True)
    assert {"optimal", "none", "full", "sqrt(L)"} <= {r["strategy"] for r in data["trade_off"]["strategies"]}
    assert data["compared"] == data["events"] == []
    assert data["link"] is None
    text = plan.report().save(tmp_path / "plan.txt").read_text()
    assert "not verified" in text
    assert "█" in text


def test_a_handle_reports_what_was_measured():
    model, batch = model_and_batch()
    with remat.fit(model, batch, activations=0.5, loss=mean_square) as handle:
        mean_square(model(batch), batch).backward()
        report = handle.report()
    data = report.as_dict()
    peak, seconds = data["compared"]
    assert peak["measured"] == report.measured_peak_bytes
    assert peak["predicted"] == pytest.approx(peak["measured"], rel=0.05)
    assert seconds["measured"] > 0
    assert data["verified"] is True
    assert any(region["measured_bytes"] for region in data["regions"])


def test_events_are_shown_with_the_keys_they_have():
    report = Report(planned(), events=[{"step": 7, "what": "tighter plan", "why": "length 4096"}])
    assert "event: step 7, what tighter plan, why length 4096" in str(report)
    assert report.as_dict()["events"] == [{"step": 7, "what": "tighter plan", "why": "length 4096"}]


# ------------------------------------------------------------------------------------------------- scalars


def test_scalars_are_flat_numbers_of_the_same_names():
    model, batch = model_and_batch()
    with remat.fit(model, batch, activations=0.5, loss=mean_square) as handle:
        mean_square(model(batch), batch).backward()
        found = scalars_of(handle)
    assert all(isinstance(value, float) and math.isfinite(value) for value in found.values())
    plan = handle.plan
    assert found["remat/budget_bytes"] == plan.budget_bytes
    assert found["remat/slowdown"] == plan.predicted_seconds / plan.plain_seconds
    assert found["remat/bitwise"] == 1.0
    assert found["remat/recomputed_calls"] > 0
    assert found["remat/fallbacks"] == 0
    assert found["remat/regions_planned"] == sum(plan.entry(i).mode is not Mode.KEEP for i in range(LAYERS))
    saved = sum(plan.profile.kinds[call.kind].saved_bytes for call in plan.profile.calls)
    parts = ("kept", "recomputed", "offloaded")
    assert sum(found[f"remat/{part}_bytes"] for part in parts) == saved
    assert set(scalars_of(plan, prefix="")) < {name.removeprefix("remat/") for name in found}
    assert simulate(plan.profile, plan.choices).seconds == plan.predicted_seconds


def test_scalars_of_something_else_are_refused():
    with pytest.raises(remat.InputError, match="no handle, report or plan"):
        scalars_of(nn.Linear(1, 1))
