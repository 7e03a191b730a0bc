"""Tightens before the device fills, loosens when there is room, never oscillates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.run.monitor import Monitor, Reading, fragmentation_advice, read_device

GB = 10**9
NOTCH = 0.9


class Training:
    """A process that takes what its limit allows, beside others that take what they like."""

    def __init__(self, budget, total=100 * GB):
        self.monitor, self.budget, self.total = Monitor(budget), budget, total
        self.notch, self.changes = 0, []

    @property
    def limit(self):
        return int(self.budget * NOTCH**self.notch)

    def step(self, others=0, fragments=0):
        reading = Reading(self.total, self.limit + fragments, self.limit, others)
        more = int(self.limit / NOTCH) - self.limit if self.notch else 0
        change = self.monitor.observe(reading, self.limit, more)
        assert change >= 0 or self.notch > 0
        self.notch += change
        if change:
            self.changes.append(change)


def test_a_quiet_device_changes_nothing():
    training = Training(70 * GB)
    for _ in range(1000):
        training.step()
    assert not training.changes


def test_a_budget_above_eighty_per_cent_is_the_users_own_choice():
    training = Training(95 * GB)
    for _ in range(1000):
        training.step(others=GB)
    assert not training.changes


def test_others_that_grow_are_made_room_for_before_the_device_is_full():
    training = Training(70 * GB)
    for step in range(200):
        others = min(step, 40) * GB
        training.step(others=others)
        assert others + training.limit <= 100 * GB
    assert training.notch > 0
    assert set(training.changes) == {1}


def test_fragments_count():
    training = Training(70 * GB)
    for _ in range(20):
        training.step(fragments=16 * GB)
    assert training.changes[0] == 1


def test_what_was_taken_away_is_given_back_later():
    training = Training(70 * GB)
    for _ in range(50):
        training.step(others=30 * GB)
    assert training.notch > 0
    for _ in range(500):
        training.step()
    assert training.notch == 0


@pytest.mark.parametrize("others", range(0, 60, 3))
def test_steady_others_bring_no_oscillation(others):
    training = Training(70 * GB)
    for _ in range(5000):
        training.step(others=others * GB)
    assert -1 not in training.changes


@given(st.lists(st.integers(0, 40), min_size=50, max_size=300), st.integers(1, 8))
def test_changes_of_direction_get_rarer_whatever_others_do(pattern, repeat):
    training = Training(70 * GB)
    for number in range(3000):
        training.step(others=pattern[number // repeat % len(pattern)] * GB)
    turns = sum(a != b for a, b in zip(training.changes, training.changes[1:], strict=False))
    assert turns <= 24  # patience doubles with every wrong loosening: 16, 32, ... within 3,000 steps


def test_running_out_counts_as_a_change():
    training = Training(70 * GB)
    for _ in range(20):
        training.step()
    training.monitor.ran_out()
    training.step(others=25 * GB)
    assert not training.changes  # waits to see the effect


def test_advice_only_where_it_would_help(monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert fragmentation_advice(Reading(100 * GB, 50 * GB, 49 * GB)) is None
    assert "expandable_segments" in fragmentation_advice(Reading(100 * GB, 70 * GB, 50 * GB))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert fragmentation_advice(Reading(100 * GB, 70 * GB, 50 * GB)) is None


def test_without_an_accelerator_there_is_nothing_to_read():
    import torch

    assert read_device(torch.device("cpu")) is None
