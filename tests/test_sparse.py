"""Models whose buffers are sparse: graph networks keep their adjacency so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.layouts import bytes_of, equal

NODES, WIDTH = 48, 64


def adjacency() -> Tensor:
    chance = torch.Generator().manual_seed(0)
    edges = torch.randint(0, NODES, (2, 4 * NODES), generator=chance)
    values = torch.rand(4 * NODES, generator=chance)
    return torch.sparse_coo_tensor(edges, values, (NODES, NODES)).coalesce()


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "coo": adjacency,
    "csr": lambda: adjacency().to_sparse_csr(),
    "csc": lambda: adjacency().to_sparse_csc(),
}


class Convolution(nn.Module):
    def __init__(self, layout: str) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("adjacency", LAYOUTS[layout]())

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.mix(torch.sparse.mm(self.adjacency, x)))


def network(layout: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Convolution(layout) for _ in range(6)))


def loss(output: Tensor, batch: Tensor) -> Tensor:
    return output.pow(2).mean()


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    loss(model(x), x).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_the_untouched_model(layout: str) -> None:
    plain = network(layout)
    x = torch.randn(NODES, WIDTH)
    expected = gradients(plain, x)
    by_hand, planned = network(layout), network(layout)
    remat.enable(by_hand)
    handle = remat.fit(planned, x, activations=0.9, loss=loss)
    for model in (by_hand, planned):
        for _ in range(2):
            assert all(map(torch.equal, expected, gradients(model, x)))
    planned.zero_grad(set_to_none=True)
    handle.step(lambda: loss(planned(x), x))
    assert all(map(torch.equal, expected, (p.grad for p in planned.parameters())))
    for before, after in zip(plain.buffers(), planned.buffers(), strict=True):
        assert equal(before, after)
    handle.remove()
    assert remat.verify(planned, x, handle.plan, loss=loss).ok


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_what_a_sparse_tensor_is_compared_by() -> None:
    first, second = adjacency(), adjacency()
    assert equal(first, second)
    assert bytes_of(first) == first.indices().nbytes + first.values().nbytes
    second.values()[3] += 1
    assert not equal(first, second)
    assert not equal(first, first.to_dense())
    assert not equal(first.to_sparse_csr(), second.to_sparse_csr())
    assert equal(torch.ones(3), torch.ones(3))
