"""Calls over pieces and what a module carries from call to call: backward reads what forward read, nothing is
counted twice, and what would be of one piece only runs as a whole."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import remat
from models import squared
from remat.errors import RecomputeError
from remat.handle import Handle
from remat.run.pieces import WholeOnlyError, in_pieces
from test_pieces import CHUNK, WIDTH, Mixing, Normed, Stack, plan_with


def planned(model: nn.Module, batch: Any, **given: Any) -> Handle:
    """Every region in two pieces."""
    profile = remat.profile(model, batch, allow=CHUNK, **given)
    sizes = {entry.cut for kind in profile.kinds for entry in kind.menu if entry.cut}
    return remat.apply(model, plan_with(profile, lambda e: e.cut == max(sizes), CHUNK))


def gradients(model: nn.Module, step: Callable[[nn.Module], Any]) -> dict[str, Tensor | None]:
    model.zero_grad(set_to_none=True)
    step(model)
    return {name: p.grad for name, p in model.named_parameters()}


def assert_same(model: nn.Module, plain: nn.Module, step: Callable[[nn.Module], Any]) -> None:
    found, expected = gradients(model, step), gradients(plain, step)
    for name, value in expected.items():
        assert (value is None) == (found[name] is None), name
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def why(handle: Handle) -> set[str]:
    return {row.why for row in handle.status().rows if row.fallbacks}


# ----------------------------------------------------------------------------- between forward and backward


class Switched(Mixing):
    """What it computes depends on attributes that others may change, and on a buffer and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "ab"})
        self.active, self.strength = "a", 1.0
        self.register_buffer("gain", torch.ones(WIDTH))
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y = super().forward(x) * self.strength
        return (y + self.adapters[self.active](x)) * self.gain * self.frozen * (1.0 if self.training else 0.5)


def two_adapters(model: nn.Module) -> None:
    losses = []
    for name, strength in (("a", 1.0), ("b", 3.0)):
        for block in model.blocks:
            block.active, block.strength = name, strength
        losses.append(loss_of(model, X))
    sum(losses).backward()


def evaluated_in_between(model: nn.Module) -> None:
    loss = loss_of(model.train(), X)
    model.eval()
    loss.backward()
    assert not model.training
    model.train()


X = torch.linspace(-1, 1, 8 * 6 * 4).reshape(8, 6, 4)


@pytest.mark.parametrize("step", [two_adapters, evaluated_in_between])
def test_backward_reads_the_attributes_that_forward_read(step: Callable[[nn.Module], Any]) -> None:
    torch.manual_seed(0)
    model = Stack(Switched)
    plain = copy.deepcopy(model)
    with planned(model, X, loss=squared) as handle:
        for _ in range(2):
            assert_same(model, plain, step)
        assert not why(handle)
    assert [block.active for block in model.blocks] == [block.active for block in plain.blocks]


def test_what_is_written_in_between_raises_or_is_read_as_it_was() -> None:
    torch.manual_seed(0)
    model = Stack(Switched)
    plain = copy.deepcopy(model)
    expected = gradients(plain, lambda model: loss_of(model, X).backward())

    def with_another_gain(model: nn.Module) -> None:
        loss = loss_of(model, X)
        for block in model.blocks:
            block.gain.mul_(2.0)
        loss.backward()

    with planned(model, X, loss=squared):
        for name, found in gradients(model, with_another_gain).items():
            torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=1e-6)
        assert all(torch.equal(block.gain, torch.full((WIDTH,), 2.0)) for block in model.blocks)
        loss = loss_of(model, X)
        with torch.no_grad():
            model.blocks[2].frozen.mul_(2.0)
        with pytest.raises(RecomputeError, match="parameter 'frozen' of Switched was written"):
            loss.backward()


@pytest.mark.parametrize("with_graph", [False, True])
def test_parameters_that_are_lent_for_a_call_are_gone_after_backward(with_graph: bool) -> None:
    """torch.func.functional_call lends a step other weights (averaged, perturbed, an inner loop's)."""
    torch.manual_seed(0)
    model = Stack(Mixing)
    plain = copy.deepcopy(model)

    def step(model: nn.Module) -> None:
        own = dict(model.named_parameters())
        lent = {
            name: p * 0.5 if with_graph else (p.detach() * 0.5).requires_grad_() for name, p in own.items()
        }
        output = torch.func.functional_call(model, lent, (X,))
        output.square().mean().backward()
        if not with_graph:
            for name, p in own.items():
                p.grad = lent[name].grad
        assert all(now is then for now, then in zip(model.parameters(), own.values(), strict=True))

    with planned(model, X, loss=squared) as handle:
        for _ in range(2):
            assert_same(model, plain, step)
        assert_same(model, plain, lambda model: loss_of(model, X).backward())
        assert not why(handle)


def test_backward_runs_in_the_autocast_of_forward() -> None:
    torch.manual_seed(0)
    model = Stack(Mixing)
    plain = copy.deepcopy(model)

    def step(model: nn.Module) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, X)
        loss.backward()  # outside, as it should be

    def profiled(batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model, batch)

    profile = remat.profile(model, X, step=profiled, allow=CHUNK)
    seen = []
    with remat.apply(model, plan_with(profile, lambda e: e.cut == (0, 4), CHUNK)) as handle:
        model.blocks[1].up.register_forward_hook(lambda module, args, y: seen.append(y.dtype))
        found, expected = gradients(model, step), gradients(plain, step)
        assert not why(handle)
    assert seen == [torch.bfloat16] * 4  # two pieces, forward and again
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0.05, atol=0.01)


# ---------------------------------------------------------------------------------- written by each piece


class Written(Mixing):
    """Leaves something behind in the way that `how` says."""

    how = ""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("usage", torch.zeros(WIDTH))
        self.last: Tensor | None = torch.zeros(WIDTH)
        self.counts = {"rows": 0}
        self.rows = 0

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        sums = x.detach().sum((0, 1))
        if self.how == "data":
            self.usage.data.add_(sums)
        elif self.how == "buffer":
            self.usage.add_(sums)
        elif self.how == "attribute":
            self.last = sums
        elif self.how == "in place":
            self.last.add_(sums)  # type: ignore[union-attr]
        elif self.how == "dictionary":
            self.counts["rows"] += x.shape[0]
        elif self.how == "number":
            self.rows = x.shape[0] * 1000
        return super().forward(x)


WAYS = ["data", "buffer", "attribute", "in place", "dictionary", "number"]


@pytest.mark.parametrize("how", WAYS)
def test_no_pieces_are_offered_where_a_call_leaves_something_behind(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Written, "how", how)
    profile = remat.profile(Stack(Written), X, loss=squared, allow=CHUNK)
    assert not [entry for kind in profile.kinds for entry in kind.menu if entry.cut]


@pytest.mark.parametrize("how", ["data", "buffer", "attribute", "number"])
def test_what_begins_to_leave_something_behind_runs_as_a_whole(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Stack(Written)
    plain = copy.deepcopy(model)
    with planned(model, X, loss=squared) as handle:
        monkeypatch.setattr(Written, "how", how)
        for _ in range(2):
            assert_same(model, plain, lambda model: loss_of(model, X).backward())
        for ours, theirs in zip(model.blocks, plain.blocks, strict=True):
            torch.testing.assert_close(ours.usage, theirs.usage)
            torch.testing.assert_close(ours.last, theirs.last)
            assert ours.rows == theirs.rows
        if how == "data":  # nothing tells of it; each piece adds its part, once
            assert not why(handle)
            return
        (reason,) = {text.split(" changes ")[1] for text in why(handle)}
        assert "of Written when it runs, so it cannot run in pieces" in reason


def test_statistics_that_are_thawed_later_are_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    model = Stack(Normed)
    for block in model.blocks:
        block.norm.eval()
    with planned(model, X, loss=squared) as handle:
        plain = Stack(Normed)
        plain.load_state_dict(model.state_dict())
        for block in (*model.blocks, *plain.blocks):
            block.norm.train()
        assert_same(model, plain, lambda model: loss_of(model, X).backward())
        for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs)
        assert len(why(handle)) == len(model.blocks)


# ------------------------------------------------------------------------------- written to what is given


@dataclasses.dataclass
class Told:
    loss: Tensor


class Telling(Mixing):
    """Adds a loss of its own to what the blocks are given to write to."""

    def forward(self, x: Tensor, told: Any) -> Tensor:  # type: ignore[override]
        loss = x.square().mean()
        if isinstance(told, list):
            told.append(loss)
        elif isinstance(told, dict):
            told["loss"] = told["loss"] + loss
        else:
            told.loss = told.loss + loss
        return super().forward(x)


class Collecting(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(4, WIDTH), nn.ModuleList(Telling() for _ in range(3))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        zero = torch.zeros(())
        told: Any = {"list": [zero], "dict": {"loss": zero}, "dataclass": Told(zero)}[self.kind]
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, told)
        losses = told if self.kind == "list" else [told["loss"]] if self.kind == "dict" else [told.loss]
        return x.square().mean() + sum(losses)


@pytest.mark.parametrize("kind", ["list", "dict", "dataclass"])
def test_what_is_written_to_an_argument_is_not_lost(kind: str) -> None:
    torch.manual_seed(0)
    model = Collecting(kind)
    profile = remat.profile(model, X, allow=CHUNK)
    assert not [entry for kind in profile.kinds for entry in kind.menu if entry.cut]
    block, told = model.blocks[0], {"loss": torch.zeros(())}
    with pytest.raises(WholeOnlyError, match="writes to a list, a dictionary or a dataclass"):
        in_pieces("it", block, block.forward, (torch.randn(4, 3, WIDTH), told), {}, (0, 2))
    assert not told["loss"].any()


# --------------------------------------------------------------------- rows that see each other, or may do so


class Routed(nn.Module):
    """Each expert takes so many tokens of the batch, counted in their order; at first none has too many."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4), nn.Parameter(torch.randn(4, WIDTH, WIDTH) * 0.3)
        nn.init.zeros_(self.gate.bias)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        flat = x.reshape(-1, WIDTH)
        weight, expert = self.gate(flat).softmax(-1).max(-1)
        one = F.one_hot(expert, 4)
        fits = (one.cumsum(0) * one).sum(-1) <= flat.shape[0]
        out = torch.einsum("nw,nwv->nv", flat, self.experts[expert]) * (weight * fits)[:, None]
        return x + out.view(rows, length, WIDTH)


class Counted(Mixing):
    """Says how many rows there were."""

    def forward(self, x: Any) -> Any:  # type: ignore[override]
        rows = x[0] if isinstance(x, tuple) else x
        return super().forward(rows), 2 * len(rows)


class Leaning(Mixing):
    """Rows see each other where the last is larger than the first: not in the batch that is profiled."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        first, last = x.detach()[0].square().mean(), x.detach()[-1].square().mean()
        return super().forward(x) - (last > first).to(x.dtype) * x.mean(0, keepdim=True)


class Falling(nn.Module):
    """Gives its blocks rows, each smaller than the one before; so do they."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(4, WIDTH), nn.ModuleList(Leaning() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x * torch.linspace(3.0, 0.5, len(x))[:, None, None])
        return x


class Stateful:
    """An argument of one's own."""

    calls = 0


class Boxed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixing = Mixing()

    def forward(self, x: Tensor, box: Stateful) -> Tensor:
        box.calls += 1
        return self.mixing(x)


class Boxes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(4, WIDTH), nn.ModuleList(Boxed() for _ in range(3))
        self.box = Stateful()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, self.box)
        return x


@pytest.mark.parametrize(
    "make",
    [lambda: Stack(Routed), lambda: Stack(Counted), Falling, Boxes],
    ids=["capacity", "a number", "other data", "an object"],
)
def test_no_pieces_are_offered_to(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()

    def loss(output: Any, batch: Tensor) -> Tensor:
        return (output[0] if isinstance(output, tuple) else output).square().mean()

    profile = remat.profile(model, X, loss=loss, allow=CHUNK)
    assert profile.calls
    assert not [entry for kind in profile.kinds for entry in kind.menu if entry.cut]


# ----------------------------------------------------------------------------------------------- by others


def test_hooks_on_saved_tensors_end_pieces_for_that_call_alone() -> None:
    torch.manual_seed(0)
    model = Stack(Mixing)
    plain = copy.deepcopy(model)

    def step(around: AbstractContextManager[Any]) -> Callable[[nn.Module], None]:
        def run(model: nn.Module) -> None:
            with around:
                loss_of(model, X).backward()

        return run

    with planned(model, X, loss=squared) as handle:
        assert_same(model, plain, step(torch.autograd.graph.save_on_cpu()))
        assert all("another saved-tensor hook" in text for text in why(handle))
        assert_same(model, plain, step(nullcontext()))
        assert all(row.mode == "chunk" and row.fallbacks == 1 for row in handle.status().rows)


def test_a_gradient_hook_inside_sees_the_gradient_of_the_whole() -> None:
    torch.manual_seed(0)
    model = Stack(Mixing)
    plain = copy.deepcopy(model)

    def clipped(module: nn.Module, to_inputs: Any, from_outputs: Any) -> Any:
        return tuple(gradient / gradient.norm() for gradient in to_inputs)

    with planned(model, X, loss=squared) as handle:
        for block in (*model.blocks, *plain.blocks):
            block.up.register_full_backward_hook(clipped)
        for _ in range(2):
            assert_same(model, plain, lambda model: loss_of(model, X).backward())
        assert all("a backward hook of up" in text for text in why(handle))


def test_a_weight_of_another_module_is_seen_in_forward() -> None:
    """Its gradient would be lost in pieces."""
    torch.manual_seed(0)
    model = Stack(Mixing)
    model.other = nn.Linear(WIDTH, WIDTH)  # of the stack, and of none of its blocks
    plain = copy.deepcopy(model)
    with planned(model, X, loss=squared) as handle:
        for each in (model, plain):
            for block in each.blocks:
                block.up.register_forward_hook(
                    lambda module, args, y, each=each: (
                        y + F.linear(args[0], each.other.weight).repeat(1, 1, 4)
                    )
                )
        for _ in range(2):
            assert_same(model, plain, lambda model: loss_of(model, X).backward())
        assert all("neither inputs nor parameters" in text for text in why(handle))


def test_without_gradients_it_runs_as_it_is() -> None:
    """Frozen, and nothing to train before it: pieces would only take time."""
    model = Stack(Mixing)
    with planned(model, X, loss=squared) as handle:
        model.requires_grad_(False)
        seen: list[int] = []
        model.blocks[0].up.register_forward_hook(lambda module, args, y: seen.append(args[0].shape[0]))
        model(X)
        model.requires_grad_(True)
        with torch.no_grad():
            model(X)
        assert seen == [8, 8]
        assert not why(handle)
