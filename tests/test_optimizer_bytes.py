"""What `fit` believes of an optimizer, against what the optimizer does to parameters of many shapes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.check.live import LiveBytes
from remat.check.optimizer import optimizer_bytes
from remat.errors import InputError

CPU = torch.device("cpu")
Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, foreach=False),
    "adafactor": torch.optim.Adafactor,  # factored state: little for a matrix, most of a 3 x 3 kernel
    "rmsprop, centered": lambda p: torch.optim.RMSprop(p, centered=True, foreach=False),
    "rprop foreach": lambda p: torch.optim.Rprop(p, foreach=True),
    "adadelta foreach": lambda p: torch.optim.Adadelta(p, foreach=True),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3000, 96)
        self.convolutions = nn.ModuleList(nn.Conv2d(64, 64, 3) for _ in range(4))
        self.linears = nn.ModuleList(nn.Linear(256, 300) for _ in range(4))


def step_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[int, int]:
    """(state, temporary) bytes, counted."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    held = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    with LiveBytes() as live:
        live.watch([*model.parameters(), *(p.grad for p in model.parameters()), *held])
        before = live.current_bytes
        live.reset_peak()
        optimizer.step()
        return sum(t.nbytes for t in held), live.peak_bytes - before


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_and_temporaries_are_those_of_the_real_step(name: str) -> None:
    model = Net()
    optimizer = OPTIMIZERS[name](model.parameters())
    expected = optimizer_bytes(optimizer, CPU)
    assert not optimizer.state, "the optimizer itself has not been run"
    state, temporary = step_of(optimizer, model)
    assert state <= expected.state <= 1.02 * state + 1024
    assert temporary <= expected.temporary + 1024
    assert expected.temporary <= 1.5 * temporary + 1024


@pytest.mark.parametrize(
    ("name", "most"),
    [("adamw", 1.05), ("adamw foreach", 1.05), ("rprop foreach", 1.05), ("adadelta foreach", 1.25)],
)
def test_two_dtypes_in_one_group(name: str, most: float) -> None:
    """With foreach one dtype's temporaries are still there when the other's are made; without, a parameter's
    neighbour is the one before it in the group, of whichever dtype."""
    model = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(6))
    for linear in model[1::2]:
        linear.bfloat16()
    optimizer = OPTIMIZERS[name](model.parameters())
    expected = optimizer_bytes(optimizer, CPU).temporary
    _, temporary = step_of(optimizer, model)
    assert temporary <= expected + 1024
    assert expected <= most * temporary + 1024


class Counting(torch.optim.AdamW):
    """Has an attribute of its own, as 8-bit optimizers have."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.initialized = False

    def step(self, closure: Any = None) -> Any:
        self.initialized = self.initialized or True
        return super().step(closure)


def test_an_optimizer_with_attributes_of_its_own() -> None:
    optimizer = Counting(Net().parameters())
    assert optimizer_bytes(optimizer, CPU).state > 0
    assert not optimizer.initialized, "only its twins have stepped"


class InOneBuffer(torch.optim.SGD):
    """Keeps its state for all parameters together."""

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        if "buffer" not in self.state:
            self.state["buffer"] = {"all": torch.zeros(sum(p.numel() for p in parameters))}
        return super().step(closure)


def test_state_that_is_kept_elsewhere_than_under_a_parameter() -> None:
    model = Net()
    expected = optimizer_bytes(InOneBuffer(model.parameters(), lr=1e-3), CPU).state
    assert expected == pytest.approx(sum(p.nbytes for p in model.parameters()), rel=1e-3)


def test_an_optimizer_that_needs_a_closure_is_refused_with_a_remedy() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)])
    loss = lambda output, batch: output.square().mean()  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(InputError, match=r"LBFGS\.step\(\) cannot be tried .* Leave optimizer= out"):
            remat.fit(
                model,
                torch.randn(4, 8),
                activations=0.9,
                loss=loss,
                optimizer=torch.optim.LBFGS(model.parameters()),
            )
