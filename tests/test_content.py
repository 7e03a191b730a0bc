"""A region that runs again as a whole computes what forward computed, or says that it does not."""

from __future__ import annotations

import contextvars
import copy
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import remat
from models import squared
from remat.errors import RecomputeError
from remat.run import content, spotcheck
from remat.run.checkpoint import checkpoint_fn

WIDTH = 8


class Core(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def run(self, x: Tensor, scale: Any = 1.0) -> Tensor:
        return x + self.down(F.gelu(self.up(x)) * scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


class Counting(Core):
    """An annealed number; the module has no buffers."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.run(x, 1 / (1 + self.calls))


class Remembering(Core):
    """Keeps a part of the last batch in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        before, self.memory = self.memory, x.detach().mean((0, 1))
        return self.run(x, 1 + before.sum())


class Adapted(Core):
    """One of two weights of the same shape, chosen by the name in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "ab"})
        self.active = ["a"]

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x + self.adapters[self.active[0]](x))


class Own(Core):
    """Draws from a generator of its own."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.generator = make()

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.generator, torch.Generator):
            return self.run(x, torch.rand((*x.shape[:1], 1, 1), generator=self.generator))
        return self.run(x, float(self.generator.random()))


SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)


class InContext(Core):
    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, SCALE.get())


class Spiking(Core):
    """Its state has a graph, and is carried from call to call."""

    state: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.state = torch.tanh(self.up(x)) + 0.5 * self.state
        return x + self.down(self.state)


class Stack(nn.Module):
    def __init__(self, *makes: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for make in makes for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def once(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def with_two_adapters(model: nn.Module, x: Tensor) -> Tensor:
    total = torch.zeros(())
    for name in "ab":
        for block in model.blocks:
            block.active = [name]
        total = total + once(model, x)
    return total


def in_context(model: nn.Module, x: Tensor) -> Tensor:
    token = SCALE.set(0.5)
    try:
        return once(model, x)
    finally:
        SCALE.reset(token)


def three_times(model: nn.Module, x: Tensor) -> Tensor:
    for block in model.blocks:
        block.state = 0.0
    return once(model, x) + once(model, x) + once(model, x)


def evaluated_before_backward(model: nn.Module, x: Tensor) -> Tensor:
    loss = once(model, x)
    model.eval()
    return loss


Step = Callable[[nn.Module, Tensor], Tensor]
RIGHT: dict[str, tuple[Callable[[], nn.Module], Step]] = {
    "counter": (Counting, once),
    "memory": (Remembering, once),
    "adapters": (Adapted, with_two_adapters),
    "mode": (lambda: nn.Sequential(Core(), nn.Dropout(0.5)), evaluated_before_backward),
}
REFUSED: dict[str, tuple[Callable[[], nn.Module], Step]] = {
    "torch": (lambda: Own(lambda: torch.Generator().manual_seed(0)), once),
    "numpy": (lambda: Own(lambda: numpy.random.default_rng(0)), once),
    "python": (lambda: Own(lambda: random.Random(0)), once),
    "context": (InContext, in_context),
    "graph": (Spiking, three_times),
}
BATCH = torch.randn(4, 6, WIDTH, generator=torch.Generator().manual_seed(1))


def fresh(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return Stack(make)


def gradients(model: nn.Module, step: Step) -> list[Tensor]:
    torch.manual_seed(3)
    model.zero_grad(set_to_none=True)
    step(model, BATCH).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize(("make", "step"), RIGHT.values(), ids=RIGHT)
def test_state_in_attributes_is_that_of_forward(make: Callable[[], nn.Module], step: Step) -> None:
    expected = gradients(fresh(make), step)
    model = fresh(make)
    remat.enable(model)
    assert all(map(torch.equal, gradients(model, step), expected))
    remat.disable(model)
    model = fresh(make)
    profile = remat.profile(model, BATCH, step=lambda batch: step(model, batch))
    plan = remat.plan(profile, activations=1.0)
    full = tuple(profile.kinds[call.kind].reference for call in profile.calls)
    model = fresh(make)
    with remat.apply(model, dataclasses.replace(plan, choices=full)):
        assert all(map(torch.equal, gradients(model, step), expected))


@pytest.mark.parametrize(("make", "step"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_put_back_raises(make: Callable[[], nn.Module], step: Step) -> None:
    model = fresh(make)
    remat.enable(model)
    with pytest.raises(RecomputeError, match="computed other values than in forward") as raised:
        gradients(model, step)
    assert raised.value.region.startswith("blocks.")
    remat.disable(model)
    model.zero_grad(set_to_none=True)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RecomputeError, match="computed other values than in forward"):
        remat.fit(model, BATCH, activations=0.5, step=lambda batch: step(model, batch))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert "forward" not in model.blocks[0].__dict__


def test_who_does_not_want_it_says_so() -> None:
    model = REFUSED["python"][0]()
    x = BATCH.clone().requires_grad_()
    checkpoint_fn(check=False)(model, x).sum().backward()
    checkpoint_fn(preserve_rng_state=False)(model, x).sum().backward()
    with pytest.raises(RecomputeError, match="other values"):
        checkpoint_fn()(model, x).sum().backward()


def test_a_plan_leaves_out_the_blocks_that_cannot_run_again() -> None:
    torch.manual_seed(0)
    model = Stack(REFUSED["torch"][0], Core)
    handle = remat.fit(model, BATCH, activations=0.9, loss=squared)
    assert {call.name for call in handle.plan.profile.calls} == {f"blocks.{n}" for n in (3, 4, 5)}
    assert "blocks.0 and 2 more stay as they are: blocks." in str(handle.report())
    planned = [gradients(model, once) for _ in range(2)]
    handle.remove()
    assert all(torch.isfinite(g).all() for found in planned for g in found)


class Noisy(Core):
    """Other last bits in every call, as kernels that add in any order give them."""

    size = 1e-7

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x * (1 + self.size * torch.randn(x.shape, generator=self.generator)))


def test_rounding_is_no_difference_and_not_looked_at_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    model, judged = Noisy(), []
    judge = content.Content._judge
    monkeypatch.setattr(
        content.Content, "_judge", lambda self, a, b: (judged.append(1), judge(self, a, b))[1]
    )
    for _ in range(6):
        remat.checkpoint(model, BATCH.clone().requires_grad_()).sum().backward()
    seen = len(judged)
    assert seen >= 3
    remat.checkpoint(model, BATCH.clone().requires_grad_()).sum().backward()
    assert len(judged) == seen
    other = Noisy()
    other.size = 1e-2
    with pytest.raises(RecomputeError, match="other values"):
        remat.checkpoint(other, BATCH.clone().requires_grad_()).sum().backward()


@pytest.mark.parametrize("name", ["adapters", "torch"])
def test_on_an_accelerator_it_is_read_when_backward_ends(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Here with the host's tensors, as if they were elsewhere: taken together, compared with all others."""

    class Sampler(content._Sampler):
        def add(self, tensor: Tensor) -> list[Any]:
            self._waiting.append(tensor.detach())
            return self.end() if len(self._waiting) == 3 else []

    monkeypatch.setattr(content, "_Sampler", Sampler)
    monkeypatch.setattr(spotcheck.Pass, "has_seen", lambda self, check, device: None)
    make, step = {**RIGHT, **REFUSED}[name]
    model = fresh(make)
    remat.enable(model)
    if name == "adapters":
        assert all(map(torch.equal, gradients(model, step), gradients(fresh(make), step)))
        return
    with pytest.raises(RecomputeError, match="2 more regions differ too") as raised:
        gradients(model, step)
    assert raised.value.region == "blocks.0"


class Lending(Core):
    """Only its last product reads another weight the second time."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.order = nn.Linear(2 * WIDTH, WIDTH), iter((0, 1, 0, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.other if next(self.order) else self.down)(F.gelu(self.up(x)))


def test_another_weight_is_noticed() -> None:
    with pytest.raises(RecomputeError, match="other values"):
        remat.checkpoint(Lending(), BATCH.clone().requires_grad_()).sum().backward()


@pytest.mark.parametrize("shape", [(3,), (4, 5, 6), (1, 1)])
def test_elements_of_dense_and_other_tensors(shape: tuple[int, ...]) -> None:
    x = torch.arange(2 * torch.Size(shape).numel()).float().view(2, *shape)[1]
    for tensor in (x, x.mT if x.dim() > 1 else x, x[..., ::2]):
        found = content._elements(tensor)
        assert found.numel() == min(8, tensor.numel())
        assert set(found.tolist()) <= set(tensor.flatten().tolist())
        assert len(set(found.tolist())) == found.numel()
        assert len(content._read(tensor)[0]) == 4 * min(8, tensor.numel())


def test_nothing_stays_in_memory() -> None:
    model = Core()
    x = BATCH.clone().requires_grad_()
    from remat.check.live import LiveBytes

    with LiveBytes() as live:
        live.watch([*model.parameters(), x])
        before = live.current_bytes
        y = remat.checkpoint(model, x)
        assert live.current_bytes - before == y.untyped_storage().nbytes()


def test_verify_does_not_take_state_for_noise() -> None:
    model = fresh(Counting)
    remat.enable(model)
    assert remat.verify(model, BATCH, loss=squared).bitwise
    remat.disable(model)
    model = Stack(Core, lambda: Noisy())
    for block in model.blocks[3:]:
        block.size = 0.3
    remat.enable(model, only="blocks.0")
    found = remat.verify(model, BATCH, loss=squared)
    assert (found.ok, found.repeatable) == (False, False)
    assert "cannot be told: two untouched steps from the same random state differ" in str(found)


class Sparse(Core):
    """Most of its weights count for nothing; what is saved of them is no dense tensor."""

    def forward(self, x: Tensor) -> Tensor:
        few = (self.up.weight * (self.up.weight > 0)).to_sparse()
        return torch.sparse.mm(few, x.reshape(-1, WIDTH).T)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_tensors_are_not_looked_at() -> None:
    model, found = Sparse(), []
    for run in (model, lambda x: remat.checkpoint(model, x)):
        model.zero_grad(set_to_none=True)
        run(BATCH.clone().requires_grad_()).square().mean().backward()
        found.append(model.up.weight.grad)
    assert torch.equal(*found)
