"""The usual strategies as plans, and the textbook's closed forms with its own numbers."""

from __future__ import annotations

import pytest

from remat.errors import BudgetError, InputError
from remat.planner import compare, least_budget, simulate
from remat.planner.strategies import (
    best_interval,
    checkpoints_every,
    compute_first,
    full,
    memory_first,
    memory_saved,
    none,
    optimal_interval,
    recomputed_layers,
    sqrt_layers,
    uniform,
)
from remat.records import Mode

from .build import entry, kind, layers, stack


def test_the_textbooks_numbers() -> None:
    assert checkpoints_every(24, 4) == 6
    assert memory_saved(24, 6) == 0.75
    assert recomputed_layers(24, 6) == 18
    assert memory_saved(32, 8) == 0.75
    assert recomputed_layers(32, 8) == 24
    assert checkpoints_every(25, 4) == 7


@pytest.mark.parametrize(
    ("count", "interval"), [(1, 1), (4, 2), (9, 3), (16, 4), (24, 4), (36, 6), (100, 10)]
)
def test_the_optimal_interval_is_the_root(count: int, interval: int) -> None:
    assert optimal_interval(count) == interval
    held = [checkpoints_every(count, d) + d for d in range(1, count + 1)]
    assert checkpoints_every(count, interval) + interval == min(held)


def test_the_best_interval_for_a_memory() -> None:
    assert best_interval(24, memory_bytes=24 * 10, layer_bytes=10) == 1
    assert best_interval(24, memory_bytes=14 * 10, layer_bytes=10) == 2  # 12 checkpoints and a run of 2
    assert best_interval(24, memory_bytes=10 * 10, layer_bytes=10) == 4  # 6 and 4
    with pytest.raises(BudgetError, match="best interval") as caught:
        best_interval(24, memory_bytes=10 * 10 - 1, layer_bytes=10)
    assert best_interval(24, caught.value.needed, 10) == 4


@pytest.mark.parametrize(
    "call",
    [
        lambda: checkpoints_every(4, 0),
        lambda: memory_saved(4, 5),
        lambda: optimal_interval(0),
        lambda: best_interval(4, 10, 0),
        lambda: uniform(layers(2), 0),
        lambda: memory_first(layers(2)),
        lambda: memory_first(layers(2), 10, density=0.5),
        lambda: compute_first(layers(2), density=2.0),
    ],
)
def test_wrong_arguments(call: object) -> None:
    with pytest.raises(InputError):
        call()  # type: ignore[operator]


def test_plans_of_the_strategies() -> None:
    p = layers(9)
    assert none(p).choices == (0,) * 9
    assert full(p).choices == (1,) * 9
    assert uniform(p, 1).choices == full(p).choices
    assert uniform(p, 4).choices == (1, 0, 0, 0, 1, 0, 0, 0, 1)
    assert sqrt_layers(p).choices == (0, 1, 1, 0, 1, 1, 0, 1, 1)
    assert full(p).predicted_seconds == 19.0
    assert full(p).plain_seconds == 10.0
    assert memory_first(p, density=1 / 3).choices == (1, 1, 1, 0, 0, 0, 0, 0, 0)


def test_memory_first_and_compute_first_rank_differently() -> None:
    big = kind(entry(Mode.KEEP, 300, 0.0), entry(Mode.FULL, 0, 9.0, inputs=(0,)))
    small = kind(entry(Mode.KEEP, 100, 0.0), entry(Mode.FULL, 0, 1.0, inputs=(0,)))
    p = stack([big, small], [1, 0, 1])
    assert memory_first(p, density=1 / 3).choices == (0, 1, 0)
    assert compute_first(p, density=2 / 3).choices == (1, 0, 1)
    budget = simulate(p, (0, 1, 0)).peak_bytes
    assert memory_first(p, budget).choices == (0, 1, 0)
    assert memory_first(p, 1).choices == (1, 1, 1)  # as far as it goes


def test_the_table() -> None:
    p = layers(9)
    budget = least_budget(p)
    rows = {row.strategy: row for row in compare(p, budget)}
    names = ["optimal", "none", "full", "uniform every 2", "uniform every 4", "sqrt(L)"]
    assert list(rows) == [*names, "memory-first", "compute-first"]
    assert rows["optimal"].feasible
    assert not rows["none"].feasible
    assert rows["full"].recomputed == 9
    assert "optimal" not in {row.strategy for row in compare(p, budget - 1)}
