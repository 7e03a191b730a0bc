"""Ways to train that come around a planned model: mixed precision, accumulation, unusual optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from models import MlpBlock

STEPS = 6


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[MlpBlock(32) for _ in range(6)]).train()


def batch() -> Tensor:
    return torch.randn(256, 32, generator=torch.Generator().manual_seed(1))


def loss_of(output: Tensor, _: Any = None) -> Tensor:
    return output.float().square().mean()


def train(model: nn.Module, step: Callable[[nn.Module, Tensor], None]) -> dict[str, Tensor]:
    torch.manual_seed(2)
    for _ in range(STEPS):
        step(model, batch())
    return {name: value.clone() for name, value in model.state_dict().items()}


def compare(
    step: Callable[[nn.Module], Callable[[nn.Module, Tensor], None]], fit: Callable[[nn.Module], remat.Handle]
) -> None:
    """`step(model)` makes what trains this model; it is made before the plan, as in a script."""
    plain, planned = net(), net()
    expected = train(plain, step(plain))
    stepping = step(planned)
    handle = fit(planned)
    found = train(planned, stepping)
    assert not [name for name in expected if not torch.equal(expected[name], found[name])]
    assert all(row.recomputed and not row.fallbacks for row in handle.status().rows)
    assert handle.regions


def fit(model: nn.Module, **options: Any) -> remat.Handle:
    return remat.fit(model, batch(), activations=0.7, loss=loss_of, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast_with_a_gradient_scaler(dtype: torch.dtype) -> None:
    def step(model: nn.Module) -> Callable[[nn.Module, Tensor], None]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)

        def run(model: nn.Module, x: Tensor) -> None:
            with torch.autocast("cpu", dtype):
                loss = loss_of(model(x))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        return run

    def planned(model: nn.Module) -> remat.Handle:
        def forward() -> Tensor:
            with torch.autocast("cpu", dtype):
                return loss_of(model(batch()))

        return remat.fit(model, step=forward, activations=0.75)

    compare(step, planned)


def test_accumulation() -> None:
    def step(model: nn.Module) -> Callable[[nn.Module, Tensor], None]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)

        def run(model: nn.Module, x: Tensor) -> None:
            for part in (x, x.flip(0), -x):
                (loss_of(model(part)) / 3).backward()
            optimizer.step()
            optimizer.zero_grad()

        return run

    compare(step, lambda model: fit(model, accumulate=3))


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}], ids=["fused", "foreach"])
def test_fused_optimizers(options: dict[str, bool]) -> None:
    made: list[torch.optim.Optimizer] = []

    def step(model: nn.Module) -> Callable[[nn.Module, Tensor], None]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
        made.append(optimizer)

        def run(model: nn.Module, x: Tensor) -> None:
            loss_of(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()

        return run

    compare(step, lambda model: fit(model, optimizer=made[-1]))


def test_the_optimizer_may_step_in_backward() -> None:
    """Gradients are gone, and weights are new, while the backward of earlier blocks still runs."""

    def step(model: nn.Module) -> Callable[[nn.Module, Tensor], None]:
        optimizers = {p: torch.optim.SGD([p], lr=1e-1) for p in model.parameters()}

        def update(parameter: Tensor) -> None:
            optimizers[parameter].step()  # type: ignore[index]
            optimizers[parameter].zero_grad()  # type: ignore[index]

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)

        def run(model: nn.Module, x: Tensor) -> None:
            loss_of(model(x)).backward()

        return run

    compare(step, lambda model: fit(model))
