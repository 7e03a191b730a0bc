"""Composite models and libraries' own switches: the robot policy of the examples, diffusers' function."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.check.live import LiveBytes

EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_one_fit_covers_three_towers_and_recomputes_nothing_twice() -> None:
    torch.manual_seed(0)
    policy = example("robot_policy")
    model = policy.Policy()
    batch = {"images": torch.randn(8, 64, 64), "actions": torch.randn(8, 16, 7), "time": torch.rand(8)}
    model(**batch).backward()
    expected = gradients(model)
    assert len(expected) == len(list(model.parameters()))
    model.zero_grad()
    handle = remat.fit(model, batch, activations=0.45)
    runs: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *_, name=name: runs.update({name: runs.get(name, 0) + 1}))
    with LiveBytes() as live:
        live.watch([*model.parameters(), *model.buffers(), *batch.values()])
        live.reset_peak()
        model(**batch).backward()
        assert live.peak_bytes <= handle.plan.budget_bytes
    found = gradients(model)
    assert not [name for name in expected if not torch.equal(expected[name], found[name])]
    names = {row.name for row in handle.status().rows if row.recomputed}
    assert {name.split(".")[0].split(" ")[0] for name in names} == {"vision_tower", "joint"}
    assert not [row for row in handle.status().rows if row.fallbacks]
    assert runs
    assert max(runs.values()) <= 2  # forward, and at most one recomputation


def flux() -> tuple[nn.Module, dict[str, Any]]:
    import sys

    sys.path.insert(0, str(EXAMPLES.parent / "benchmarks"))
    try:
        from zoo import FAMILIES
    finally:
        sys.path.pop(0)
    built = FAMILIES["FluxTransformer2DModel"].build()
    return built.model, built.batch


@pytest.mark.filterwarnings("ignore")
def test_diffusers_own_switch_takes_our_function() -> None:
    pytest.importorskip("diffusers")
    model, batch = flux()
    plain = copy.deepcopy(model)
    plain(**batch)[0].square().mean().backward()
    calls = []
    ours = remat.checkpoint_fn(offload=True)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[0])
        return ours(*args, **kwargs)

    model.enable_gradient_checkpointing(gradient_checkpointing_func=counted)
    model(**batch)[0].square().mean().backward()
    assert len(calls) == 6  # three double blocks, three single ones
    expected, found = gradients(plain), gradients(model)
    assert expected.keys() == found.keys()
    assert not [name for name in expected if not torch.equal(expected[name], found[name])]
    # Within a budget the switch is off, and on again afterwards.
    calls.clear()
    loss = lambda output, batch: output[0].square().mean()  # noqa: E731
    with remat.fit(model, batch, activations=0.6, loss=loss):
        model.zero_grad()
        model(**batch)[0].square().mean().backward()
        assert not calls
        assert not [name for name in expected if not torch.equal(expected[name], gradients(model)[name])]
    model(**batch)
    assert len(calls) == 6
