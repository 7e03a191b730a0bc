"""verify beside a handle: the reference is the untouched step, and the handle is at work afterwards."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn

import remat
from models import Case, InARow
from reference import assert_same, step
from remat.adaptive import AdaptiveHandle
from remat.run.wrap import wrapped


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(InARow):
    def __init__(self) -> None:
        super().__init__(Block() for _ in range(6))


BATCH = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


@functools.cache
def plan_for(share: float) -> remat.Plan:
    return remat.plan(remat.profile(net(), BATCH), activations=share)


def planned_blocks(model: nn.Module) -> int:
    return sum(wrapped(module) is not None for module in model.modules())


def watched(model: nn.Module) -> tuple[Any, list[int]]:
    """A step, and how many blocks ran under a plan in each run of it."""
    seen: list[int] = []

    def run(batch: torch.Tensor) -> torch.Tensor:
        seen.append(planned_blocks(model))
        return model(batch)

    return run, seen


def test_a_model_at_work_is_compared_with_the_untouched_step_and_goes_on_working() -> None:
    model = net()
    expected = step(Case(net(), BATCH, own_loss_of), net())
    handle = remat.apply(model, plan_for(0.6))
    there, on = handle.regions, planned_blocks(model)
    assert on
    run, seen = watched(model)
    result = remat.verify(model, BATCH, handle.plan, step=run)
    assert result.bitwise
    assert seen == [0, 0, on]
    assert planned_blocks(model) == on
    assert handle.regions == there
    assert_same(expected, step(Case(model, BATCH, own_loss_of), model))
    assert all(row.calls for row in handle.status().rows)
    handle.remove()
    assert not planned_blocks(model)


def own_loss_of(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return output


def test_another_plan_is_compared_beside_the_one_at_work() -> None:
    model = net()
    with remat.apply(model, plan_for(0.6)) as handle:
        on = planned_blocks(model)
        assert remat.verify(model, BATCH, plan_for(1.0)).bitwise
        assert planned_blocks(model) == on
        assert handle.plan is plan_for(0.6)


def test_a_broken_region_at_work_is_caught() -> None:
    model = net()
    with remat.apply(model, plan_for(0.6)) as handle:
        module = model.get_submodule(handle.regions[0].name)
        region = handle.regions[0]
        wrapper = wrapped(module)
        assert wrapper is not None
        wrapper.around = Broken(region)
        assert not remat.verify(model, BATCH).ok
        wrapper.around = region


class Broken:
    owner = "remat.apply"

    def __init__(self, region: Any) -> None:
        self.region = region

    def __call__(self, module: Any, forward: Any, args: Any, kwargs: Any) -> Any:
        return 1.01 * self.region(module, forward, args, kwargs)

    def status(self) -> Any:
        return self.region.status()


def test_a_planned_copy_has_no_handle_to_put_its_plan_back() -> None:
    with remat.apply(net(), plan_for(0.6)) as handle:
        twin = copy.deepcopy(handle.model)
    assert planned_blocks(twin)
    with pytest.raises(remat.InputError, match="without a plan"):
        remat.verify(twin, BATCH, plan_for(0.6))
    assert remat.verify(twin, BATCH).bitwise


def test_an_adaptive_handle_goes_on_after_verify() -> None:
    model = net()
    handle = remat.fit(model, BATCH, activations=0.6, adaptive=True)
    assert isinstance(handle, AdaptiveHandle)
    model(BATCH).backward()
    on, steps = planned_blocks(model), handle.stats.steps
    run, seen = watched(model)
    assert remat.verify(model, BATCH, handle.plan, step=run).bitwise
    assert seen == [0, 0, on]
    assert (planned_blocks(model), handle.stats.steps) == (on, steps)
    model(BATCH[:64]).backward()
    assert handle.stats.steps == steps + 1
    handle.remove()
    assert not planned_blocks(model)


def test_functions_are_bypassed_for_the_reference() -> None:
    class Called(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number, block in enumerate(self.blocks):
                x = remat.region(f"called.{number}", functools.partial(_call, block))(x)
            return x.square().mean()

    def _call(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block.down(torch.tanh(block.up(block.norm(x)))) + x  # type: ignore[operator, union-attr]

    torch.manual_seed(0)
    model = Called()
    with remat.fit(model, BATCH, activations=0.6) as handle:
        calls = {row.name: row.calls for row in handle.status().rows}
        assert any(name.startswith("called") for name in calls)
        assert remat.verify(model, BATCH).bitwise
        assert {row.name: row.calls - calls[row.name] for row in handle.status().rows} == dict.fromkeys(
            calls, 1
        )


def test_a_chunked_head_is_equal_within_rounding_and_said_to_be() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=2048,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).train()
    ids = torch.randint(0, 2048, (8, 64))
    batch = {"input_ids": ids, "labels": ids}
    handle = remat.fit(model, batch, activations=0.4, allow=["keep", "recompute", "chunk"])
    assert handle.plan.profile.chunked
    assert handle.verification is not None
    assert handle.verification.ok
    assert not handle.verification.bitwise
    assert str(handle.verification).startswith("equal within rounding")
    assert "lm_head and the loss in chunks" in str(handle.verification)
    for plan in (handle.plan, None):
        result = remat.verify(model, batch, plan)
        assert result.ok, str(result)
        assert not result.bitwise
        assert "lm_head in chunks (rounding may differ by 0.0001" in str(result)
    assert wrapped(model.lm_head) is not None
    handle.remove()


def test_a_second_plan_is_refused_while_one_is_at_work() -> None:
    model = net()
    first = remat.apply(model, plan_for(0.6))
    on = planned_blocks(model)
    with pytest.raises(remat.InputError, match=r"handle\.remove\(\)"):
        remat.apply(model, plan_for(0.6))
    assert planned_blocks(model) == on
    first.remove()
    second = remat.apply(model, plan_for(0.6))
    first.remove()
    assert planned_blocks(model) == on
    second.remove()
    assert not planned_blocks(model)


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_removed_handle_plans_nothing_any_more(adaptive: bool) -> None:
    model = net()
    handle = remat.fit(model, BATCH, activations=0.8, adaptive=adaptive)
    model(BATCH).backward()
    handle.remove()
    failures = [torch.OutOfMemoryError("once")]

    def run() -> torch.Tensor:
        if failures:
            raise failures.pop()
        return model(BATCH)

    handle.step(run)
    assert not planned_blocks(model)


def test_a_removed_handle_cannot_be_paused() -> None:
    """Its plan would be on the model afterwards."""
    model = net()
    handle = remat.fit(model, BATCH, activations=0.8)
    handle.remove()
    with pytest.raises(remat.InputError, match="was removed"), handle.paused():
        pass
    assert not planned_blocks(model)
