"""Blocks that no structure repeats, because a step runs one of them again and again."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import remat
from models import Case, MlpBlock, squared
from reference import assert_same, step
from remat.check.live import LiveBytes
from remat.check.step import tensors_of
from remat.records import Mode
from remat.trace.discover import find_blocks
from remat.trace.loops import with_loops


class Looped(nn.Module):
    """One block, run over and over; what it makes is scaled before it comes back to it."""

    def __init__(self, times: int = 6) -> None:
        super().__init__()
        self.times = times
        self.start, self.block, self.head = nn.Linear(24, 24), MlpBlock(24), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for _ in range(self.times):
            x = x + 0.5 * self.block(x)
        return self.head(x)


class Core(nn.Module):
    """Blocks before and after, and between them a list of one that is looped."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.ModuleList(MlpBlock(24) for _ in range(2))
        self.core = nn.ModuleList([MlpBlock(24)])
        self.neck = MlpBlock(24)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.before:
            x = block(x)
        for _ in range(4):
            x = self.core[0](x)
        return self.neck(self.neck(x))


class Siamese(nn.Module):
    """One encoder for two views: it runs twice, and is no loop."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 24))

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x) * self.encoder(x.flip(0))


class Once(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.only = nn.ModuleList([MlpBlock(24)])

    def forward(self, x: Tensor) -> Tensor:
        return self.only[0](x)


class Raw(nn.Module):
    """A block without submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(24, 48) / 8), nn.Parameter(torch.randn(48, 24) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.up).tanh() @ self.down


class Refined(nn.Module):
    """Such blocks, and beside them something small that is looped."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Raw() for _ in range(3))
        self.refine = nn.Sequential(nn.Linear(24, 4), nn.Tanh(), nn.Linear(4, 24))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x + self.refine(x + self.refine(x))


class Stack(nn.Module):
    """Plain layers, and beside them something that is looped."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.refine = MlpBlock(24)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.refine(self.refine(x))


class Depth(nn.Module):
    """All of a core, run again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.core = nn.Sequential(*(Raw() for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.core(self.core(x))


class Cell(nn.Module):
    """A slice of the sequence at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = MlpBlock(24)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for part in x.unbind(1):
            state = self.cell(state + part.relu() * part)
        return state


class Slices(nn.Module):
    """Blocks that run on parts of the sequence, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gated() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.cat([block(part) for part in x.chunk(4, 1)], 1)
        return x


class Gated(nn.Module):
    """Saves what it is given, and views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.down(self.up(x.sin()).tanh() * x[..., :1].exp()).sigmoid() + x[..., 1:2] * x


class Marked(Looped):
    """Its author has said what the regions are."""

    def forward(self, x: Tensor) -> Tensor:
        return remat.region("everything", super().forward)(x)


def case(build: Callable[[], nn.Module]) -> Case:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Case(build().train(), torch.randn(96, 24), squared)


def albert() -> Case:
    from transformers import AlbertConfig, AlbertForMaskedLM

    config = AlbertConfig(
        vocab_size=64, embedding_size=16, hidden_size=32, num_hidden_layers=6, num_attention_heads=4,
        intermediate_size=128, max_position_embeddings=32, hidden_dropout_prob=0.1,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        ids = torch.randint(0, 64, (8, 32))
        batch = {"input_ids": ids, "labels": ids}
        return Case(AlbertForMaskedLM(config).train(), batch, lambda output, batch: output.loss)


def names(given: Case) -> list[str]:
    found = with_loops(given.model, find_blocks(given.model), lambda: given.run())
    return [block.name for block in found]


def test_what_reads_its_own_output_is_looped() -> None:
    assert names(case(Looped)) == ["block"]
    assert names(albert()) == ["albert.encoder.albert_layer_groups.0"]
    assert names(case(Stack)) == ["layers.0", "layers.1", "layers.2", "refine"]
    assert names(case(Core)) == ["before.0", "before.1", "core.0"], "the neck does not stand in a list"


@pytest.mark.parametrize(
    "build", [Siamese, Once, Marked, Refined, Depth, lambda: Looped(1), lambda: MlpBlock(24)]
)
def test_all_else_is_found_as_before(build: Callable[[], nn.Module]) -> None:
    given = case(build)
    assert names(given) == [block.name for block in find_blocks(given.model)]


def test_the_probing_forward_keeps_nothing_and_leaves_no_hook() -> None:
    given = case(Looped)
    dictionaries = {name: repr(module.__dict__) for name, module in given.model.named_modules()}
    graphs = []

    def run() -> Tensor:
        loss = given.run()
        graphs.append(loss.requires_grad)
        return loss

    with_loops(given.model, find_blocks(given.model), run)
    assert graphs == [False]
    assert {name: repr(module.__dict__) for name, module in given.model.named_modules()} == dictionaries


def test_a_step_that_cannot_run_without_gradients_has_no_loops() -> None:
    given = case(Looped)

    def run() -> Tensor:
        loss = given.run()
        loss.backward()
        return loss

    blocks = find_blocks(given.model)
    assert with_loops(given.model, blocks, run) == blocks
    given.model.zero_grad(set_to_none=True)


def test_models_of_repeated_blocks_are_not_run_for_it() -> None:
    given = case(lambda: nn.Sequential(*[MlpBlock(24) for _ in range(4)]))

    def run() -> Tensor:
        raise AssertionError("there is nothing to find")

    blocks = find_blocks(given.model)
    assert with_loops(given.model, blocks, run) == blocks


@pytest.mark.parametrize(
    ("build", "shares"), [(lambda: case(Looped), (0.7, 0.5)), (lambda: case(Core), (0.6,)), (albert, (0.4,))]
)
def test_looped_blocks_meet_the_budget_with_equal_gradients(
    build: Callable[[], Case], shares: tuple[float, ...]
) -> None:
    given = build()
    expected = step(given, copy.deepcopy(given.model))
    for share in shares:
        given.model.zero_grad(set_to_none=True)
        with remat.fit(given.model, given.batch, activations=share, loss=given.loss) as handle:
            assert handle.regions
            with LiveBytes() as live:
                live.watch([*given.model.parameters(), *given.model.buffers(), *tensors_of(given.batch)])
                live.reset_peak()
                given.run().backward()
                assert live.peak_bytes <= handle.plan.budget_bytes
            given.model.zero_grad(set_to_none=True)
            assert_same(expected, step(given, given.model))
            assert not [row for row in handle.status().rows if row.fallbacks]


@pytest.mark.parametrize(("build", "kinds", "share"), [(Cell, 2, 0.6), (Slices, 2, 0.6)])
def test_slices_of_one_tensor_are_calls_of_one_kind(
    build: Callable[[], nn.Module], kinds: int, share: float
) -> None:
    """They begin elsewhere in its storage, and have recipes all the same."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        given = Case(build().train(), torch.randn(24, 8, 24), squared)
    expected = step(given, copy.deepcopy(given.model))
    with remat.fit(given.model, given.batch, activations=share, loss=given.loss) as handle:
        plan = handle.plan
        assert len(plan.profile.kinds) == kinds
        assert {plan.entry(i).mode for i in range(len(plan.choices))} & {Mode.RECIPE}
        assert_same(expected, step(given, given.model))
        assert not [row for row in handle.status().rows if row.fallbacks]


def test_a_looped_block_is_estimated_without_the_device() -> None:
    given = case(Looped)
    profile = remat.profile(lambda: Looped(), lambda: torch.randn(96, 24), loss=squared, device="a100-40gb")
    assert [call.name for call in profile.calls] == ["block"] * given.model.times
