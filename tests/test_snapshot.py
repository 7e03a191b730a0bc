"""Snapshots: each allocation carries the name of its region; nothing of it stays, gradients are the same."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import remat
from remat.check import snapshot as module


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def make(device: str = "cpu") -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), *(Block() for _ in range(2))).to(device), torch.randn(4, 8).to(
        device
    )


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.fixture
def labels(monkeypatch):
    """What the allocator would be told, in order, without repeats."""
    said: list[str] = []

    def label(text: str) -> None:
        if not said or said[-1] != text:
            said.append(text)

    monkeypatch.setattr(module, "label_allocations", label)
    return said


def test_a_plain_step_is_labelled_region_by_region(labels):
    model, x = make()
    expected = step(model, x)
    with module.named_allocations(model):
        found = step(model, x)
    assert labels == [
        "between regions", "1 forward", "between regions", "2 forward", "between regions",
        "2 backward", "1 backward", "",
    ]  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_recomputed_region_is_labelled_again(labels):
    model, x = make()
    expected = step(model, x)
    remat.enable(model)
    with module.named_allocations(model):
        found = step(model, x)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert labels[-1] == ""
    assert "2 backward" in labels


def test_a_step_that_fails_leaves_no_hook(labels):
    model, x = make()

    def fail() -> None:
        with module.named_allocations(model):
            model(x[:, :3])

    with pytest.raises(RuntimeError):
        fail()
    assert labels[-1] == ""
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_without_cuda_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model, x = make()
    with remat.fit(model, x, activations=1.0, loss=lambda out, batch: out.square().mean()) as handle:
        refused = handle.snapshot(tmp_path / "step.pickle")
        with pytest.raises(remat.InputError, match="no CUDA device here"):
            refused.__enter__()


def test_it_is_saved_even_if_the_step_runs_out_of_memory(tmp_path, monkeypatch):
    told: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "record_allocations", told.append)
    monkeypatch.setattr(module, "save_allocations", told.append)
    monkeypatch.setattr(module, "label_allocations", lambda text: None)
    model, _ = make()
    path = tmp_path / "step.pickle"

    def fail() -> None:
        with module.snapshot(model, path):
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        fail()
    assert told == [True, str(path), False]
    missing = module.snapshot(model, tmp_path / "no" / "step.pickle")
    with pytest.raises(remat.InputError, match="there is no folder"):
        missing.__enter__()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_file_names_the_regions(tmp_path):
    model, x = make("cuda")
    with module.snapshot(model, tmp_path / "step.pickle"):
        step(model, x)
    data = pickle.loads((tmp_path / "step.pickle").read_bytes())
    found = {entry.get("user_metadata", "") for trace in data["device_traces"] for entry in trace}
    assert {"1 forward", "2 forward", "2 backward"} <= found
