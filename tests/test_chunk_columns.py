"""A linear head cut by classes: where no other plan fits, and no more memory than its gradients take."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import remat
from models import Case
from remat.check.live import LiveBytes
from remat.planner.bounds import least_budget
from remat.planner.schedule import keep_everything, make_plan, with_chunks
from remat.records import Action
from remat.run import chunk_columns, chunk_loss
from remat.run.chunk import chunk_head
from remat.run.chunk_columns import slice_width
from remat.run.recover import Failure
from test_fit import counted_peak

VOCABULARY, WIDTH, TOKENS = 4000, 32, 256
CHUNKS = ("keep", "recompute", "chunk")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def loss_of(output: Tensor, batch: Any) -> Tensor:
    return output


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many of them as a real model has: 32 rows, 64 classes."""
    monkeypatch.setattr(chunk_loss, "_OTHER_BYTES", 32 * 4 * VOCABULARY)
    monkeypatch.setattr(chunk_columns, "_OTHER_BYTES", 64 * 4 * TOKENS)


@pytest.mark.parametrize(
    ("rows", "vocabulary", "device", "nbytes", "width"),
    [
        (4096, 32000, CPU, None, 1024),  # 16 MiB in fp32
        (1024, 32000, CUDA, None, 2048),  # a sixteenth of the classes, less than 64 MiB
        (16384, 32000, CUDA, None, 1024),
        (1 << 20, 32000, CUDA, None, 16),  # no multiple of 64 is so small
        (1 << 26, 32000, CUDA, None, 1),
        (10, 100, CPU, None, 64),
        (10, 50, CPU, None, 50),
        (33, 37, CPU, 33 * 4 * 5, 5),
        (100, 1000, CPU, 100 * 4 * 130, 128),
    ],
)
def test_width_of_a_slice(
    rows: int, vocabulary: int, device: torch.device, nbytes: int | None, width: int
) -> None:
    assert slice_width(rows, vocabulary, device, nbytes) == width


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """Few layers, many classes: the head is what the step takes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).view(-1, VOCABULARY).float(), labels.view(-1))


def case(dtype: torch.dtype = torch.float32) -> Case:
    torch.manual_seed(0)
    tokens = torch.randint(0, 64, (2, TOKENS // 2))
    labels = torch.randint(0, VOCABULARY, (2, TOKENS // 2))
    model = Model().to(dtype)
    return Case(model, {"tokens": tokens, "labels": labels}, loss_of)


def gradients(given: Case) -> dict[str, Tensor]:
    given.model.zero_grad(set_to_none=True)
    given.run().backward()
    return {name: p.grad.clone() for name, p in given.model.named_parameters()}


def peak(given: Case, **options: Any) -> int:
    """Of what the step makes."""
    with chunk_head(given.model, fuse=False, **options), LiveBytes() as live:
        given.model.zero_grad(set_to_none=True)
        given.run().backward()
        return live.peak_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_more_than_the_gradient_of_the_weight_exists_at_a_time(dtype: torch.dtype) -> None:
    given = case(dtype)
    weight = given.model.head.weight.nbytes
    by_rows = peak(given, rows=32)
    by_columns = peak(given, columns=True, chunk_bytes=TOKENS * 4 * 64)
    rest = 8 * TOKENS * 64 * 4 + 16 * TOKENS * 2 * WIDTH * 4  # a few slices, and what the blocks hold
    assert by_columns < weight + rest
    assert by_rows > by_columns + weight / 2


@pytest.mark.usefixtures("small_chunks")
def test_it_is_the_plan_where_no_other_fits(tmp_path: Path) -> None:
    given = case()
    expected = gradients(given)
    profile = remat.profile(given.model, given.batch, allow=CHUNKS)
    assert profile.head is not None
    assert profile.head.finer is not None
    assert (profile.head.columns, profile.head.finer.columns) == (False, True)
    allow = list(map(Action, CHUNKS))
    coarse, finer = with_chunks(profile), with_chunks(profile, finer=True)
    assert coarse is not None
    assert finer is not None
    least, more = least_budget(finer, allow), least_budget(coarse, allow)
    assert least < more < least_budget(profile, [Action.KEEP, Action.RECOMPUTE])
    assert remat.plan(profile, more, allow=CHUNKS).profile.head == profile.head
    plan = remat.plan(profile, more - 1, allow=CHUNKS)
    assert plan.profile.head == profile.head.finer
    with pytest.raises(remat.BudgetError) as refused:
        remat.plan(profile, least - 1, allow=CHUNKS)
    assert refused.value.needed == least
    plan.save(tmp_path / "plan.json")
    assert remat.Plan.load(tmp_path / "plan.json") == plan
    with remat.apply(given.model, plan) as handle:
        found = gradients(given)
        assert counted_peak(given) <= plan.predicted_peak_bytes
        (row,) = [row for row in handle.status().rows if row.name == "head"]
        assert (row.active, row.fallbacks) == (True, 0)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-7)
    again = gradients(given)
    assert all(torch.equal(again[name], expected[name]) for name in expected)


@pytest.mark.usefixtures("small_chunks")
def test_a_plan_with_chunks_of_rows_goes_over_to_it() -> None:
    """Planned again from such a plan's own profile, and where a step that runs it is out of memory."""
    given = case()
    expected = gradients(given)
    given.model.zero_grad(set_to_none=True)
    profile = remat.profile(given.model, given.batch, allow=CHUNKS)
    coarse, finer = with_chunks(profile), with_chunks(profile, finer=True)
    assert coarse is not None
    assert finer is not None
    assert with_chunks(coarse, finer=True) == finer
    assert with_chunks(coarse) is with_chunks(finer) is with_chunks(finer, finer=True) is None
    allow = list(map(Action, CHUNKS))
    least, more = least_budget(finer, allow), least_budget(coarse, allow)
    plan = remat.plan(profile, more, allow=CHUNKS)
    assert plan.profile == coarse
    assert remat.plan(plan.profile, more - 1, allow=CHUNKS).profile == finer
    plan = remat.plan(profile, more + 2**15, allow=CHUNKS)  # with room for what handle.step copies
    held = [*given.model.parameters(), *given.batch.values()]
    with remat.apply(given.model, plan) as handle, LiveBytes(limit_bytes=(least + more) // 2) as live:
        live.watch(held)
        handle.step(given.run)
        found = {name: p.grad.clone() for name, p in given.model.named_parameters()}
        assert handle.plan.profile == finer
        assert [event.kind for event in handle.stats.events] == ["plan changed", "recovered"]
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-7)


@pytest.mark.usefixtures("small_chunks")
def test_the_way_the_head_is_cut_is_a_tighter_plan_by_itself() -> None:
    given = case()
    profile = remat.profile(given.model, given.batch, allow=CHUNKS)
    coarse, finer = with_chunks(profile), with_chunks(profile, finer=True)
    assert coarse is not None
    assert finer is not None
    allow = list(map(Action, CHUNKS))
    tightest = remat.plan(finer, least_budget(finer, allow), allow=CHUNKS)
    plan = make_plan(coarse, tightest.choices, 1 << 40, strategy="none", allow=allow)
    with remat.apply(given.model, plan) as handle:
        assert handle._next_plan(Failure("out of memory", reserved_bytes=1)) is not None
        assert (handle.plan.profile, handle.plan.choices) == (finer, tightest.choices)
        assert handle._next_plan(Failure("out of memory", reserved_bytes=1)) is None


@pytest.mark.usefixtures("small_chunks")
def test_a_plan_without_chunks_knows_that_it_is_there() -> None:
    given = case()
    profile = remat.profile(given.model, given.batch, allow=CHUNKS)
    finer = with_chunks(profile, finer=True)
    assert finer is not None
    allow = list(map(Action, CHUNKS))
    plan = make_plan(profile, keep_everything(profile), 1 << 40, strategy="none", allow=allow)
    least = least_budget(finer, allow)
    with remat.apply(given.model, plan) as handle, LiveBytes(limit_bytes=least // 2) as live:
        live.watch([*given.model.parameters(), *given.batch.values()])
        with pytest.raises(remat.RecoveryError) as stopped:
            handle.step(given.run)
    assert stopped.value.needed == least


@pytest.mark.usefixtures("small_chunks")
def test_fit_confirms_it() -> None:
    given = case()
    profile = remat.profile(given.model, given.batch, allow=CHUNKS)
    coarse = with_chunks(profile)
    assert coarse is not None
    budget = least_budget(coarse, list(map(Action, CHUNKS))) - 1000
    handle = remat.fit(given.model, given.batch, budget, allow=CHUNKS)
    assert handle.plan.profile.head is not None
    assert handle.plan.profile.head.columns
    assert counted_peak(given) <= budget
    assert remat.verify(given.model, given.batch).ok
    handle.remove()


@pytest.mark.parametrize("classes", [slice(0, 64), slice(0, 200), slice(128, 192), slice(3936, 4000)])
def test_classes_that_are_ruled_out(classes: slice) -> None:
    """A bias of -inf, also on all classes of a slice, be it the first, one between or the last."""
    given = case()
    given.model.head = nn.Linear(WIDTH, VOCABULARY)
    with torch.no_grad():
        given.model.head.bias[classes] = -torch.inf
    given.batch["labels"].clamp_(min=200, max=3900)
    expected, loss = gradients(given), given.run().detach()
    with chunk_head(given.model, columns=True, chunk_bytes=TOKENS * 4 * 64) as handle:
        torch.testing.assert_close(given.run().detach(), loss)
        found = gradients(given)
        assert handle.counts.chunks == 2 * -(-VOCABULARY // 64)
    assert loss.isfinite()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-7)


def test_a_frozen_head_does_without() -> None:
    given = case()
    given.model.head.requires_grad_(False)
    profile = remat.profile(given.model, given.batch, allow=CHUNKS)
    assert profile.head is not None
    assert profile.head.finer is None


def test_copies_of_the_model_cut_it_the_same_way() -> None:
    given = case()
    with chunk_head(given.model, columns=True, chunk_bytes=TOKENS * 4 * 64) as handle:
        twin = copy.deepcopy(given.model)
        gradients(given)
        once = handle.counts.chunks
    assert once == -(-VOCABULARY // 64)
    around = twin.head.__dict__["forward"].around
    Case(twin, given.batch, loss_of).run().backward()
    assert around.counts.chunks == once
