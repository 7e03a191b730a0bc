"""A step whose logits do not fit as a whole is profiled, planned and trained with the head in chunks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import remat
from models import ZOO
from remat.check.live import LiveBytes
from remat.check.step import tensors_of
from remat.planner.bounds import least_budget
from remat.planner.schedule import with_chunks
from remat.records import Action

ALLOW = ["keep", "recompute", "chunk"]
VOCABULARY, ROWS, WIDTH = 8192, 4 * 64, 32


class Language(torch.nn.Module):
    """Few and narrow blocks, many classes: the logits are what the step takes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(WIDTH, 2, 64, dropout=0.0, batch_first=True) for _ in range(3)
        )
        self.lm_head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.lm_head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output.flatten(0, 1), batch.flatten())


def made() -> tuple[Language, torch.Tensor]:
    torch.manual_seed(0)
    return Language(), torch.randint(0, VOCABULARY, (4, 64))


def gradients(model: torch.nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss(model(batch), batch).backward()
    return [p.grad.clone() for p in model.parameters()]


def logits_bytes() -> int:
    return 4 * ROWS * VOCABULARY


def limited(model: torch.nn.Module, batch: torch.Tensor, above_bytes: int) -> LiveBytes:
    """Above parameters and a set of gradients."""
    held = [*model.parameters(), *model.buffers(), *tensors_of(batch)]
    live = LiveBytes("cpu", limit_bytes=2 * sum(t.nbytes for t in held) + above_bytes)
    live.watch(held)
    return live


def test_a_step_whose_logits_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = made()
    expected = gradients(model, batch)
    model.zero_grad()
    monkeypatch.setattr("remat.run.chunk_loss._OTHER_BYTES", 1 << 20)
    with limited(model, batch, logits_bytes()):
        with pytest.raises(torch.OutOfMemoryError):
            loss(model(batch), batch).backward()
        model.zero_grad()
        with pytest.raises(torch.OutOfMemoryError):
            remat.profile(model, batch, loss=loss, allow=ALLOW[:2])
        profile = remat.profile(model, batch, loss=loss, allow=ALLOW)
        assert all(p.grad is None for p in model.parameters())
        assert profile.chunked
        assert profile.head is not None
        assert any("does not fit" in note for note in profile.notes)
        plan = remat.plan(
            profile, profile.step.resident + profile.step.gradients + logits_bytes(), allow=ALLOW
        )
        assert plan.profile.chunked
        with remat.apply(model, plan):
            found = gradients(model, batch)
    assert not model.lm_head.__dict__.get("forward")  # as it was
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_such_a_profile_has_slices_of_classes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they take is measured, and they are planned where chunks of rows are out of reach."""
    model, batch = made()
    expected = gradients(model, batch)
    model.zero_grad()
    monkeypatch.setattr("remat.run.chunk_loss._OTHER_BYTES", 1 << 20)
    monkeypatch.setattr("remat.run.chunk_columns._OTHER_BYTES", 1 << 18)
    with limited(model, batch, logits_bytes()):
        profile = remat.profile(model, batch, loss=loss, allow=ALLOW)
    assert profile.chunked
    assert profile.head is not None
    assert profile.head.finer is not None
    assert (profile.head.columns, profile.head.finer.columns) == (False, True)
    assert 0.2 < profile.head.finer.step_seconds / profile.step_seconds < 5
    actions = list(map(Action, ALLOW))
    with pytest.raises(remat.BudgetError) as refused:
        remat.plan(profile, 1, allow=ALLOW)
    assert refused.value.needed < least_budget(profile, actions) - model.lm_head.weight.nbytes // 2
    plan = remat.plan(profile, refused.value.needed, allow=ALLOW)
    assert plan.profile.head == profile.head.finer
    held = [*model.parameters(), *model.buffers(), batch]
    with remat.apply(model, plan), LiveBytes(limit_bytes=plan.predicted_peak_bytes) as live:
        live.watch(held)
        model.zero_grad()
        loss(model(batch), batch).backward()
    found = [p.grad for p in model.parameters()]
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("columns", [False, True])
def test_such_a_profile_counts_rows_whose_labels_it_has_not_seen(
    monkeypatch: pytest.MonkeyPatch, columns: bool
) -> None:
    """Rows with a label of -100 are left out of the loss; the next batch may have labels everywhere."""
    model, batch = made()
    labels = batch.clone()

    def masked(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return loss(output, labels)

    monkeypatch.setattr("remat.run.chunk_loss._OTHER_BYTES", 1 << 20)
    labels[0, 8:], labels[1:] = -100, -100
    with limited(model, batch, logits_bytes()):
        profile = remat.profile(model, batch, loss=masked, allow=ALLOW)
    assert profile.chunked
    way = (
        with_chunks(profile, finer=True)
        if columns
        else replace(profile, head=replace(profile.head, finer=None))
    )
    plan = remat.plan(way, least_budget(way, list(map(Action, ALLOW))), allow=ALLOW)
    labels.copy_(batch)
    with remat.apply(model, plan), LiveBytes() as live:
        live.watch([*model.parameters(), batch])
        live.reset_peak()
        loss(model(batch), labels).backward()
    assert live.peak_bytes <= plan.predicted_peak_bytes


def test_slices_that_do_not_fit_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = made()
    monkeypatch.setattr("remat.run.chunk_loss._OTHER_BYTES", 1 << 20)

    def too_much(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("no room for slices")

    monkeypatch.setattr("remat.profiling.with_finer", too_much)
    with limited(model, batch, logits_bytes()):
        profile = remat.profile(model, batch, loss=loss, allow=ALLOW)
    assert profile.chunked
    assert profile.head is not None
    assert profile.head.finer is None


@pytest.mark.parametrize("room", [1, 16], ids=["logits do not fit", "logits fit"])
@pytest.mark.parametrize("allow", [ALLOW[:2], None])
def test_a_profile_with_the_head_in_chunks_is_not_planned_without_them(
    monkeypatch: pytest.MonkeyPatch, room: int, allow: list[str] | None
) -> None:
    """Who leaves "chunk" out wants equal bits, and such a profile cannot say what they take."""
    model, batch = made()
    monkeypatch.setattr("remat.run.chunk_loss._OTHER_BYTES", 1 << 20)
    with limited(model, batch, room * logits_bytes()):
        profile = remat.profile(model, batch, loss=loss, allow=ALLOW)
    budget = profile.step.resident + profile.step.gradients + logits_bytes()
    plan = remat.plan(profile, budget, allow=ALLOW)
    assert plan.profile.chunked
    with pytest.raises(remat.InputError, match=r'lm_head in chunks.*"chunk": add it, or profile'):
        remat.plan(plan.profile, budget, allow=allow)
    if profile.chunked:
        with pytest.raises(remat.InputError, match="lm_head in chunks"):
            remat.plan(profile, 1 << 40, allow=allow)
    else:
        assert not remat.plan(profile, 1 << 40, allow=allow).profile.chunked
    assert remat.plan(plan.profile, budget, allow=ALLOW).choices == plan.choices


def test_where_logits_fit_the_head_is_measured_both_ways() -> None:
    model, batch = made()
    with limited(model, batch, 16 * logits_bytes()):
        profile = remat.profile(model, batch, loss=loss, allow=ALLOW)
    assert not profile.chunked
    assert profile.head is not None


def test_what_does_not_fit_for_another_reason_says_so() -> None:
    """A step whose loss is not one that runs in chunks, and one that has no room at all."""
    model, batch = made()

    def squared(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    with (
        limited(model, batch, logits_bytes()),
        pytest.warns(UserWarning, match="as a whole"),
        pytest.raises(torch.OutOfMemoryError),
    ):
        remat.profile(model, batch, loss=squared, allow=ALLOW)
    with limited(model, batch, 0), pytest.raises(torch.OutOfMemoryError):
        remat.profile(model, batch, loss=loss, allow=ALLOW)
    assert gradients(model, batch)  # nothing stayed on the model
    case = ZOO["llama"]()
    assert not remat.profile(case.model, case.batch, loss=case.loss, allow=ALLOW).chunked
