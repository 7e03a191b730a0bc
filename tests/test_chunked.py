"""Chunks along a dimension give the same values and gradients as one pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import MlpBlock
from remat.errors import InputError, RematError
from remat.run.chunked import chunked


def gradients(model: nn.Module, x: Tensor, run: Any) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    torch.manual_seed(3)
    y = run(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize(("size", "dim"), [(1, 1), (3, 1), (4, 1), (10, 1), (99, 1), (3, -2), (2, 0)])
def test_equal_to_one_pass(size: int, dim: int) -> None:
    torch.manual_seed(0)
    model, x = MlpBlock(8, dropout=0.0).double(), torch.randn(2, 10, 8).double()
    expected = gradients(model, x, model)
    found = gradients(model, x, lambda x: chunked(model, x, size, dim))
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_dropout_is_the_same_in_forward_and_backward() -> None:
    """Bit for bit against the same chunks without checkpointing (the uneven tail included)."""
    torch.manual_seed(0)
    model, x = MlpBlock(8, dropout=0.5), torch.randn(2, 10, 8)
    expected = gradients(model, x, lambda x: torch.cat([model(piece) for piece in x.split(4, 1)], 1))
    found = gradients(model, x, lambda x: chunked(model, x, 4))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_nested_results_are_joined() -> None:
    x = torch.randn(2, 5, 3)
    out = chunked(lambda x: {"a": x + 1, "b": (x * 2, None)}, x, 2)
    assert torch.equal(out["a"], x + 1)
    assert torch.equal(out["b"][0], x * 2)
    assert out["b"][1] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no function", torch.ones(2, 3), 1), "not a callable"),
        ((torch.tanh, [1.0], 1), "not a tensor"),
        ((torch.tanh, torch.ones(2, 3), 0), "at least 1"),
        ((torch.tanh, torch.ones(2, 3), "4"), "size='4'"),
        ((torch.tanh, torch.ones(2, 3), True), "size=True"),
        ((torch.tanh, torch.ones(2, 3), 1, 2), "dim=2"),
        ((torch.sum, torch.ones(2, 3), 1), "scalar per chunk"),
    ],
)
def test_bad_input(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        chunked(*arguments)
    assert isinstance(error.value, RematError)
