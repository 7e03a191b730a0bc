"""Blocks that read a tensor with a graph of its own from an attribute: what `fit` runs ends where they do."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

import remat
from remat.check.bench import bench

CPU = torch.device("cpu")
WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.given: tuple[Tensor, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        for tensor in self.given:
            x = x + tensor.sin()
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """`condition(model, x)` gives what the blocks find in their attribute."""

    def __init__(self, condition: Callable[[Stack, Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.condition = condition
        self.side = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        given = self.condition(self, x)
        for block in self.blocks:
            block.given = given
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


def computed(model: Stack, x: Tensor) -> tuple[Tensor, ...]:
    return (model.side(x.mean(1, keepdim=True)),)


def one_behind_the_other(model: Stack, x: Tensor) -> tuple[Tensor, ...]:
    first = model.side(x.mean(1, keepdim=True)).exp()
    return first, model.side(first).tanh()


def from_the_blocks_own_weights(model: Stack, x: Tensor) -> tuple[Tensor, ...]:
    return (torch.stack([block.norm.weight for block in model.blocks]).exp().mean(0),)


def lent(model: nn.Module, x: Tensor) -> Tensor:
    """Parameters that are computed from the model's own."""
    derived = {name: parameter * 1.01 for name, parameter in model.named_parameters()}
    return torch.func.functional_call(model, derived, (x,))


def gradients(model: nn.Module, step: Callable[[], Tensor]) -> list[Tensor]:
    model.zero_grad()
    step().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("run", [Stack.__call__, lent])
@pytest.mark.parametrize("condition", [computed, one_behind_the_other, from_the_blocks_own_weights])
def test_conditioning_with_a_graph_can_be_fitted(condition, run) -> None:
    torch.manual_seed(0)
    plain, x = Stack(condition), torch.randn(4, 16, WIDTH)
    model = copy.deepcopy(plain)
    handle = remat.fit(model, x, activations=0.7, step=lambda batch: run(model, batch))
    assert handle.status().rows
    assert all(parameter.grad is None for parameter in model.parameters())
    expected, found = gradients(plain, lambda: run(plain, x)), gradients(model, lambda: run(model, x))
    assert len(expected) == len(found)
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("read", [lambda leaf: leaf, lambda leaf: leaf[:, :1]], ids=["leaf", "slice"])
@pytest.mark.parametrize("before", [None, 3.0])
def test_leaves_outside_keep_their_gradients(read, before: float | None) -> None:
    torch.manual_seed(0)
    leaf = torch.randn(1, 16, WIDTH, requires_grad=True)
    leaf.grad = grad = None if before is None else torch.full_like(leaf, before)
    seen: list[Tensor] = []
    leaf.register_post_accumulate_grad_hook(seen.append)
    plain, x = Stack(lambda model, x: (read(leaf),)), torch.randn(4, 16, WIDTH)
    model = copy.deepcopy(plain)

    def as_before() -> bool:
        return leaf.grad is grad and (grad is None or bool((grad == before).all())) and not seen

    with pytest.raises(remat.BudgetError):
        remat.fit(model, x, budget=1)
    assert as_before()
    handle = remat.fit(model, x, activations=0.7)
    assert handle.status().rows
    assert as_before()
    found = []
    for network in (plain, model):
        leaf.grad = None
        found.append([*gradients(network, functools.partial(network, x)), leaf.grad])
    assert all(map(torch.equal, *found))


def test_the_gradient_that_leaves_is_measured() -> None:
    """As large as the output, and computed in a step, too."""
    x = torch.randn(64, WIDTH, requires_grad=True)
    leaf = torch.randn(64, WIDTH, requires_grad=True)

    def peak(given: Tensor) -> int:
        return bench(lambda x: x * given, ((x,), {}), (), CPU, timed=False).backward_peak_bytes

    alone = peak(leaf.detach())
    assert peak(leaf.exp()) == alone + x.nbytes
    assert leaf.grad is None


def test_a_graph_that_ends_by_itself_is_run_as_in_a_step() -> None:
    """All the way: gradients are accumulated, which a hook sees, and reentrant checkpoints run."""

    class Reentrant(Block):
        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=True)

    block, seen = Reentrant(), []
    block.up.weight.register_post_accumulate_grad_hook(seen.append)
    x = torch.randn(2, 4, WIDTH, requires_grad=True)
    assert not bench(block.forward, ((x,), {}), (block,), CPU).reaches_out
    assert len(seen) == 2  # for the bytes and for the seconds


def test_a_reentrant_checkpoint_beside_such_a_tensor_is_refused() -> None:
    class Reentrant(Block):
        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.up, x, use_reentrant=True).sum() * self.given[0]

    block = Reentrant()
    block.given = (torch.randn(3, requires_grad=True).exp(),)
    x = torch.randn(2, 4, WIDTH, requires_grad=True)
    with pytest.raises(remat.InputError, match="use_reentrant=False"):
        bench(block.forward, ((x,), {}), (block,), CPU)
