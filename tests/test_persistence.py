"""Saving, copying, moving and changing a model while a handle is on it: it works, or an error says why."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from models import Case, MlpBlock, own_loss, squared
from reference import assert_same, step
from test_fit import case


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[MlpBlock(32) for _ in range(5)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


def fitted() -> tuple[Case, remat.Handle, nn.Module]:
    """A planned model, its handle and an untouched twin."""
    torch.manual_seed(0)
    given = Case(Net().train(), torch.randn(256, 32), squared)
    twin = copy.deepcopy(given.model)
    handle = remat.fit(given.model, given.batch, activations=0.7, loss=squared)
    assert handle.regions
    return given, handle, twin


def assert_trains_like(given: Case, model: nn.Module, twin: nn.Module) -> None:
    for trained in (model, twin):
        trained.zero_grad()
    assert_same(step(given, twin), step(given, model))


def recomputed(model: nn.Module) -> int:
    return sum(row.recomputed for row in remat.status(model).rows)


def calls(model: nn.Module) -> int:
    return sum(row.calls for row in remat.status(model).rows)


def test_state_dict_is_the_same_and_loads_both_ways() -> None:
    given, _, twin = fitted()
    assert list(given.model.state_dict()) == list(twin.state_dict())
    torch.manual_seed(9)
    other = Net()
    given.model.load_state_dict(other.state_dict())
    other.load_state_dict(given.model.state_dict())
    assert_trains_like(given, given.model, other.train())
    assert recomputed(given.model)


def test_save_pretrained_and_load(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    given = case("llama")
    handle = remat.fit(given.model, given.batch, activations=0.6)
    given.model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path).train()
    assert not [module for module in loaded.modules() if "forward" in vars(module)]
    assert_same(step(given, loaded), step(given, given.model))
    assert handle.regions


@pytest.mark.parametrize("way", ["torch.save", "deepcopy", "pickle"])
def test_a_copy_runs_as_planned_with_its_own_weights(way: str, tmp_path: Path) -> None:
    given, handle, twin = fitted()
    if way == "torch.save":
        torch.save(given.model, tmp_path / "model.pt")
        copied = torch.load(tmp_path / "model.pt", weights_only=False)
    elif way == "deepcopy":
        copied = copy.deepcopy(given.model)
    else:
        copied = pickle.loads(pickle.dumps(given.model))
    with torch.no_grad():
        for model in (copied, twin):
            for parameter in model.parameters():
                parameter.mul_(1.5)
    before = calls(given.model)
    assert_trains_like(given, copied, twin)
    assert recomputed(copied)
    assert calls(given.model) == before  # the original did not run
    handle.remove()
    assert_trains_like(given, copied, copy.deepcopy(twin))  # what is done to one is not done to the other


def child(text: bytes, found: Any) -> None:
    torch.set_num_threads(1)
    model, batch = pickle.loads(text)
    torch.manual_seed(1234)
    squared(model(batch), batch).backward()
    found.put(({n: p.grad.numpy() for n, p in model.named_parameters()}, recomputed(model)))


def test_a_planned_model_goes_to_another_process() -> None:
    given, _, twin = fitted()
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    process = context.Process(target=child, args=(pickle.dumps((given.model, given.batch)), found))
    process.start()
    gradients, count = found.get(timeout=300)
    process.join()
    torch.manual_seed(1234)
    squared(twin(given.batch), given.batch).backward()
    for name, parameter in twin.named_parameters():
        assert torch.equal(parameter.grad, torch.from_numpy(gradients[name]))
    assert count


def test_a_plan_and_a_report_are_pickled_and_a_handle_is_not() -> None:
    _, handle, _ = fitted()
    assert pickle.loads(pickle.dumps(handle.plan)) == handle.plan
    with pytest.raises(remat.RematError, match=r"handle\.plan"):
        pickle.dumps(handle)
    with pytest.raises(remat.RematError, match=r"handle\.plan"):
        copy.deepcopy(handle)


@pytest.mark.parametrize("change", ["double", "bfloat16", "half"])
def test_another_dtype_is_exact_and_counted(change: str) -> None:
    """A plan is for one dtype. Another one recomputes as a whole: exact, in little memory, and said so."""
    given, handle, twin = fitted()
    changed = Case(getattr(given.model, change)(), getattr(given.batch, change)(), squared)
    assert_trains_like(changed, changed.model, getattr(twin, change)())
    assert all("not planned" in row.why for row in handle.status().rows)


def test_to_the_same_device_changes_nothing() -> None:
    given, handle, twin = fitted()
    given.model.to("cpu", torch.float32)
    assert_trains_like(given, given.model, twin)
    assert not [row for row in handle.status().rows if row.fallbacks]


def test_an_adapter_that_is_added_afterwards() -> None:
    """The planned layers get another structure: every gradient stays right."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    given = case("llama")
    twin = copy.deepcopy(given.model)
    handle = remat.fit(given.model, given.batch, activations=0.6)
    models = []
    for model in (given.model, twin):
        torch.manual_seed(3)
        models.append(get_peft_model(model, config).train())
    adapted = Case(models[0], given.batch, own_loss)
    for _ in range(4):  # the fourth runs with what the first three have taught
        found, expected = step(adapted, models[0]), step(adapted, models[1])
        assert_same(expected, found)
        assert all("lora_" in name for name in found if name.startswith("gradient"))
        for model in models:
            model.zero_grad()
    assert all(row.fallbacks and row.why for row in handle.status().rows)
    handle.remove()
    assert not [module for module in given.model.modules() if "forward" in vars(module)]


def test_weights_only_files_hold_nothing_of_ours() -> None:
    given, _, _ = fitted()
    file = io.BytesIO()
    torch.save(given.model.state_dict(), file)
    file.seek(0)
    assert list(torch.load(file, weights_only=True)) == list(given.model.state_dict())
