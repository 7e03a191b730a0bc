"""A sample of the sweep over model families (benchmarks/families.py); `make families` runs all of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
SAMPLE = ("bloom", "m2m_100", "swin", "SanaTransformer2DModel")


@pytest.fixture(scope="module")
def sweep() -> Iterator[Any]:
    pytest.importorskip("transformers")
    pytest.importorskip("diffusers")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import families

        yield families
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SAMPLE)
def test_half_of_the_activations_are_enough(sweep: Any, name: str) -> None:
    row = sweep.examine(sweep.FAMILIES[name])
    assert not row.problem
    assert row.verdict == "fits"
    assert 0.7 * row.budget_bytes < row.peak_bytes <= row.budget_bytes
    assert row.planned


def test_a_difference_is_found(sweep: Any) -> None:
    """The judge itself: another bit, a missing gradient, a NaN in the same place."""
    values = {"a": torch.tensor([1.0, float("nan")]), "b": torch.tensor([2.0])}
    assert not sweep.difference(values, {name: value.clone() for name, value in values.items()})
    assert sweep.difference(values, {**values, "b": torch.tensor([2.0000002])}) == "b differs"
    assert "only on one side" in sweep.difference(values, {"a": values["a"]})


def test_there_are_enough_of_them_and_on_the_page(sweep: Any) -> None:
    count = [family.library for family in sweep.FAMILIES.values()]
    assert count.count("transformers") >= 60
    assert count.count("diffusers") >= 10
    groups = {family.group for family in sweep.FAMILIES.values()}
    assert groups >= {"text", "mixture of experts", "state space", "encoder-decoder"}
    assert groups >= {"vision", "audio", "multimodal", "U-Net", "image transformer", "video transformer"}
    text = (ROOT / "docs" / "families.md").read_text()
    assert "- 0 failed." in text
    named = [family.library for family in sweep.FAMILIES.values() if f"| {family.name} |" in text]
    assert named.count("transformers") >= 60
    assert named.count("diffusers") >= 10
