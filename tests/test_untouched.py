"""Steps run inside `untouched` leave no trace, whatever they do and however they end."""

import random

import numpy
import pytest
import torch
from torch import nn

import remat
from remat import RematError
from remat.check.untouched import leaves_of, untouched


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
        self.register_buffer("mask", torch.ones(1).expand(4))  # an expanded view cannot be written
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("nothing", None)

    def forward(self, x):
        self.calls = self.calls + 1  # rebinds the buffer
        return self.body(x * self.mask).sum()


def snapshot(model):
    return {
        "parameters": [
            (p, p.detach().clone(), p._version, p.requires_grad, p.grad) for p in model.parameters()
        ],
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "buffers": [(name, id(b), b.clone()) for name, b in model.named_buffers()],
        "modes": [m.training for m in model.modules()],
        "random": (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),
        "hooks": [(len(m._forward_hooks), len(m._backward_hooks)) for m in model.modules()],
    }


def assert_same(before, after):
    for (p, value, version, trained, grad), (q, *now) in zip(
        before["parameters"], after["parameters"], strict=True
    ):
        assert p is q
        assert grad is now[3]
        assert (version, trained) == (now[1], now[2])
        assert torch.equal(value, now[0])
    for one, two in zip(before["gradients"], after["gradients"], strict=True):
        assert one is two if one is None else torch.equal(one, two)
    for (name, identity, value), (name2, identity2, value2) in zip(
        before["buffers"], after["buffers"], strict=True
    ):
        assert (name, identity) == (name2, identity2)
        assert torch.equal(value, value2)
    for key in ("modes", "random", "hooks"):
        assert before[key] == after[key]


def disturb(model, x, error=None):
    model(x).backward()
    model(x).backward()  # accumulates
    model.eval()
    model.body[0].weight.requires_grad_(False)
    model.register_buffer("late", torch.ones(2))
    random.random()
    numpy.random.rand()
    torch.rand(3)
    if error is not None:
        raise error


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("raises", [False, True])
def test_nothing_remains(gradients, raises):
    model, x = Net(), torch.randn(3, 4)
    model.body[3].eval()
    if gradients:
        model(x).backward()
    before = snapshot(model)
    if raises:
        with pytest.raises(ZeroDivisionError), untouched(model):
            disturb(model, x, ZeroDivisionError())
    else:
        with untouched(model):
            assert all(p.grad is None for p in model.parameters())
            disturb(model, x)
    assert_same(before, snapshot(model))


def test_a_graph_of_the_caller_survives():
    model, x = nn.Sequential(nn.BatchNorm1d(4).eval(), nn.Linear(4, 1)), torch.randn(3, 4, requires_grad=True)
    loss = model(x).sum()  # saved the running statistics
    with untouched(model):
        model.train()
        model(x).sum().backward()
    loss.backward()


def test_a_written_parameter_is_an_error():
    model = nn.Linear(2, 2)
    with pytest.raises(RematError, match="parameter weight"), untouched(model), torch.no_grad():
        model.weight.add_(1)


@pytest.mark.parametrize("warm", [False, True])
def test_an_optimizer_step_is_an_error(warm):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)

    def step():
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    if warm:
        step()
    with pytest.raises(RematError, match="must not run the optimizer"), untouched(model, optimizer):
        step()


def test_an_error_of_the_body_comes_first():
    model = nn.Linear(2, 2)

    def body():
        model.weight.data.add_(1)
        model.weight.detach().add_(1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), untouched(model):
        body()


def test_meta_models():
    model = nn.BatchNorm1d(4, device="meta")
    with untouched(model):
        model(torch.zeros(2, 4, device="meta"))


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("had", [False, True])
@pytest.mark.parametrize("adaptive", [False, True])
def test_fit_leaves_what_is_trained_beside_the_model(had, adaptive):
    backbone, head = Chain(), nn.Linear(8, 1)
    x = torch.randn(16, 8, requires_grad=True)
    before = torch.ones_like(head.weight) if had else None
    head.weight.grad = before
    stepped = []
    head.bias.register_post_accumulate_grad_hook(stepped.append)
    handle = remat.fit(
        backbone, x, "1GiB", step=lambda x: head(backbone(x)).square().mean(), adaptive=adaptive
    )
    handle.remove()
    assert head.weight.grad is before
    assert before is None or torch.equal(before, torch.ones_like(before))
    assert head.bias.grad is x.grad is None
    assert not stepped
    head(backbone(x)).sum().backward()
    assert len(stepped) == 1


def test_leaves_are_found_once():
    a, b, c = (torch.ones(2, requires_grad=True) for _ in range(3))
    loss = (a * b + a.exp() * torch.ones(2)).sum()
    assert {id(leaf) for leaf in leaves_of(loss)} == {id(a), id(b)}
    assert len(leaves_of(loss)) == 2
    assert leaves_of(c) == [c]
    assert leaves_of(loss.detach()) == []
