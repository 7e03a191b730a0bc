"""A token-wise part of a region in chunks, as an entry of its menu: for long sequences, if allowed."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

import remat
from models import Case, own_loss, squared
from remat.codec import from_json, to_json
from remat.planner.bounds import least_budget
from remat.records import Action, Mode, Plan
from test_fit import counted_peak

EXACT = (Action.KEEP, Action.RECOMPUTE)
CHUNKS = (*EXACT, Action.CHUNK)


@functools.cache
def _built():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=64, max_position_embeddings=256, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    ids = torch.randint(0, 64, (1, 256))
    batch = {"input_ids": ids, "labels": ids}
    return model, batch, remat.profile(model, batch, allow=CHUNKS)


def long_llama():
    model, batch, profile = _built()
    return Case(copy.deepcopy(model), batch, own_loss), profile


def gradients(given):
    given.model.zero_grad(set_to_none=True)
    given.run().backward()
    return {name: p.grad.clone() for name, p in given.model.named_parameters()}


def test_the_menu_has_both_ways_and_budgets_reach_further():
    _, profile = long_llama()
    entries = [entry for entry in profile.kinds[0].menu if entry.mode is Mode.CHUNK]
    assert sorted(entry.again for entry in entries) == [False, True]
    assert {(entry.part, entry.chunk_size) for entry in entries} == {("mlp", 32)}
    assert all(0 <= entry.gradient_gap < 1e-5 for entry in entries)
    plain = profile.kinds[0].menu[0]
    assert all(entry.resident_bytes < plain.resident_bytes for entry in entries)
    full = profile.kinds[0].menu[profile.kinds[0].reference]
    assert all(entry.backward_peak_bytes < full.backward_peak_bytes for entry in entries)
    assert least_budget(profile, CHUNKS) < 0.7 * least_budget(profile, EXACT)


def test_the_budget_is_met_with_gradients_equal_within_rounding():
    given, profile = long_llama()
    expected = gradients(given)
    plan = remat.plan(profile, least_budget(profile, CHUNKS) + 50_000, allow=CHUNKS)
    assert any(plan.entry(i).mode is Mode.CHUNK for i in range(len(plan.choices)))
    with remat.apply(given.model, plan) as handle:
        found = gradients(given)
        assert counted_peak(given) <= 1.01 * plan.predicted_peak_bytes
        rows = [row for row in handle.status().rows if row.name.endswith(".mlp")]
        assert rows
        assert not [row for row in rows if row.fallbacks]
        assert "equal within rounding" in str(handle.report())
        assert "positions at a time" in "".join(row["reason"] for row in handle.report().as_dict()["regions"])
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)
    again = gradients(given)
    assert all(torch.equal(again[name], expected[name]) for name in expected)  # nothing stays behind


def test_fit_with_chunks_of_parts_is_confirmed():
    given, profile = long_llama()
    budget = least_budget(profile, CHUNKS) + 100_000
    handle = remat.fit(given.model, given.batch, budget, allow=CHUNKS)
    assert any(handle.plan.entry(i).mode is Mode.CHUNK for i in range(len(handle.plan.choices)))
    assert counted_peak(given) <= budget
    handle.remove()


def test_chunks_are_used_only_if_they_are_allowed_and_travel_with_the_plan():
    _, profile = long_llama()
    budget = least_budget(profile, EXACT)
    exact = remat.plan(profile, budget, allow=EXACT)
    assert not any(exact.entry(i).mode is Mode.CHUNK for i in range(len(exact.choices)))
    plan = remat.plan(profile, least_budget(profile, CHUNKS), allow=CHUNKS)
    assert from_json(Plan, to_json(plan)) == plan
    given = Case(copy.deepcopy(_built()[0]), _built()[1], own_loss)
    assert not any(
        e.mode is Mode.CHUNK for k in remat.profile(given.model, given.batch).kinds for e in k.menu
    )


class Mixer(nn.Module):
    """Its tokens see each other: it must not be cut."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(length, 2 * length), nn.Linear(2 * length, length)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x.transpose(1, 2)).relu()).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.part(x)


class Noisy(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 2 * width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(2 * width, width))


@pytest.mark.parametrize(
    ("make", "length", "chunked"),
    [
        (lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)), 64, True),
        (
            lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)),
            32,
            False,
        ),  # too short to matter
        (lambda: Mixer(64, 8), 64, False),
        (lambda: Noisy(8), 64, False),
        (lambda: nn.Linear(8, 8), 64, False),  # nothing between its input and its output
    ],
    ids=["mlp", "short", "mixer", "dropout", "linear"],
)
def test_parts_are_found_by_what_they_do(make, length, chunked):
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(make()) for _ in range(2)])
    profile = remat.profile(model, torch.randn(2, length, 8), loss=squared, allow=CHUNKS)
    assert any(entry.part for kind in profile.kinds for entry in kind.menu) == chunked
