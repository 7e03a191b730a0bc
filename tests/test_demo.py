"""The demo on a model small enough for a test: the same training every way."""

import io

import pytest
from rich.console import Console

from remat.demo import Config, demo

TINY = Config(width=32, heads=2, layers=4, context=64, batch=2, steps=3)


def test_every_way_trains_the_same_and_the_table_says_so():
    out = io.StringIO()
    rows = demo("cpu", TINY, Console(file=out, width=140))
    plain, *others = rows
    assert plain.name == "plain"
    assert len(others) >= 1
    for row in others:
        assert row.verification.bitwise, row.verification
        assert row.losses == plain.losses  # dropout included, every step
        assert row.measurement.activation_bytes < plain.measurement.activation_bytes
    assert out.getvalue().count("yes") == len(others)


@pytest.mark.parametrize("present", [True, False])
def test_it_says_what_compiling_is_predicted_to_take_where_there_is_a_compiler(monkeypatch, present):
    monkeypatch.setattr("remat.compiling.has_compiler", lambda device: present)
    out = io.StringIO()
    *_, fitted = demo("cpu", TINY, Console(file=out, width=200))
    assert fitted.hint.startswith("compile=True is predicted to take") is present
    assert ("compile=True is predicted to take" in out.getvalue()) is present
