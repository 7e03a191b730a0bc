"""What the untouched model gives: loss, every gradient, every buffer, and the random state it leaves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from models import Case

SEED = 1234


def step(
    case: Case,
    model: nn.Module,
    *,
    prepare: Callable[[nn.Module], Any] | None = None,
    passes: int = 1,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, Tensor]:
    """Forward and backward (`passes` times, accumulating), from a fixed seed. `model` is changed."""
    if prepare is not None:
        prepare(model)
    torch.manual_seed(SEED)
    found: dict[str, Tensor] = {}
    for i in range(passes):
        with context():
            loss = case.run(model)
        found[f"random after forward {i}"] = torch.rand(3)
        loss.backward()
        found[f"loss {i}"] = loss.detach()
        found[f"random after backward {i}"] = torch.rand(3)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.grad is not None:
            found[f"gradient of {name}"] = parameter.grad
    for name, buffer in model.named_buffers():
        found[f"buffer {name}"] = buffer.clone()
    return found


def assert_same(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    """Bit for bit; what is missing on either side is a failure."""
    assert expected.keys() == found.keys(), f"only on one side: {sorted(expected.keys() ^ found.keys())}"
    different = [name for name in expected if not torch.equal(expected[name], found[name])]
    assert not different, f"differ: {different}"


def assert_step_unchanged(case: Case, prepare: Callable[[nn.Module], Any], **options: Any) -> nn.Module:
    """A step after `prepare(model)` is bit-equal to the untouched step. Returns the prepared model."""
    plain, prepared = copy.deepcopy(case.model), copy.deepcopy(case.model)
    expected = step(case, plain, **options)
    assert any(name.startswith("gradient") for name in expected)
    assert_same(expected, step(case, prepared, prepare=prepare, **options))
    return prepared
