"""What runs before the first region waits on the host, for budgets that nothing else meets."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import remat
from planning import assert_equal
from remat._torch_private import current_backward
from remat.planner.simulate import simulate
from remat.planner.stem import with_stem_sent, without_stem_sent
from remat.records import Plan, Profile
from remat.run import offload
from remat.run.stem import StemSender, candidates, graph_behind

HOST = ["keep", "recompute", "offload"]


class Block(nn.Module):
    """Wide inside: its own working set is what a step peaks at."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.norm = nn.Conv2d(width, 8 * width, 1), nn.BatchNorm2d(8 * width)
        self.narrow = nn.Conv2d(8 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.relu(self.norm(self.wide(x))))


class Net(nn.Module):
    """A stem at twice the resolution holds more than the boundaries of all blocks, as in a convolutional
    network."""

    def __init__(self, keeps_features: bool = False) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.act, self.pool = nn.ReLU(inplace=True), nn.MaxPool2d(2)
        self.blocks = nn.ModuleList(Block(16) for _ in range(4))
        self.head = nn.Linear(16, 10)
        self.keeps_features = keeps_features
        self.scale = 1.0
        self.extra = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.conv(x)))
        features = x if self.keeps_features else None
        if self.extra:
            x = x * self.scale
        x = self.pool(x)
        for block in self.blocks:
            x = block(x)
        out = self.head(x.mean((2, 3)))
        return out if features is None else out + features.mean()


def loss(output: Tensor, batch: Tensor) -> Tensor:
    return output.pow(2).mean()


def made(**options: bool) -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net(**options), torch.randn(16, 3, 64, 64)


def gradients(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss(model(batch), batch).backward()
    return {
        f"gradient of {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.fixture(scope="module")
def profile() -> Profile:
    model, batch = made()
    return remat.profile(model, batch, loss=loss, allow=HOST)


def least(profile: Profile) -> int:
    with pytest.raises(remat.BudgetError) as caught:
        remat.plan(profile, 1, allow=HOST)
    return caught.value.needed


def tight_plan(profile: Profile) -> Plan:
    plan = remat.plan(profile, least(profile), allow=HOST)
    assert plan.profile.stem_sent
    return plan


def test_what_can_wait_is_found_and_what_others_hold_is_not(profile: Profile) -> None:
    stem = profile.stem
    assert stem is not None
    assert stem.region == "blocks.0"
    image = 16 * 16 * 64 * 64 * 4
    indices = 16 * 16 * 32 * 32 * 8
    # The convolution's output (of the norm), the activation's, and the pool's indices; never the batch.
    assert sorted(stem.sizes) == sorted((image, image, indices))
    assert stem.nbytes == sum(stem.sizes)
    model, batch = made(keeps_features=True)
    other = remat.profile(model, batch, loss=loss, allow=HOST).stem
    assert other is not None
    assert other.nbytes == image + indices  # the activation's output is used once more
    handle = model.act.register_forward_hook(lambda module, _, output: setattr(model, "seen", output))
    other = remat.profile(model, batch, loss=loss, allow=HOST).stem
    handle.remove()
    assert other is not None
    assert sorted(other.sizes) == sorted((image, indices))


def test_it_is_the_last_resort_and_reaches_lower(profile: Profile) -> None:
    without = least(replace(profile, stem=None))
    assert least(profile) <= without - profile.stem.nbytes // 2
    assert not remat.plan(profile, without, allow=HOST).profile.stem_sent
    assert tight_plan(profile).predicted_seconds > remat.plan(profile, without, allow=HOST).predicted_seconds
    with pytest.raises(remat.BudgetError):
        remat.plan(profile, without - 1, allow=["keep", "recompute"])


def test_the_peak_is_as_predicted_and_gradients_are_those_of_the_untouched_model(profile: Profile) -> None:
    model, batch = made()
    expected = gradients(model, batch)
    plan = tight_plan(profile)

    def step() -> None:
        loss(model(batch), batch).backward()

    with remat.apply(model, plan) as handle:
        for _ in range(3):
            assert_equal(expected, gradients(model, batch))
        sender = handle._installation.stem
        assert (sender.sent, sender.skipped) == (3, 0)
        assert sender.engine.counts.kept_bytes == 0
        assert sender.engine.counts.in_flight_bytes == 0
        model.zero_grad(set_to_none=True)
        measured = remat.measure(step, model=model)
        assert any("waits on the host" in note for note in handle.status().notes)
        assert any("waits on the host" in note for note in handle.report().as_dict()["notes"])
    assert measured.peak_bytes <= 1.02 * plan.predicted_peak_bytes
    assert not model.blocks[0]._forward_pre_hooks
    assert not model.blocks[0]._forward_hooks
    assert_equal(expected, gradients(model, batch))


def test_fit_meets_a_budget_that_takes_it(profile: Profile) -> None:
    model, batch = made()
    expected = gradients(model, batch)
    without = least(replace(profile, stem=None))
    with remat.fit(model, batch, budget=(least(profile) + without) // 2, loss=loss, allow=HOST) as handle:
        assert handle.plan.profile.stem_sent
        resident = handle.plan.profile.step.resident
        assert resident + handle.measured.above_bytes <= handle.plan.budget_bytes
        assert_equal(expected, gradients(model, batch))


def test_a_plan_survives_json_and_so_do_models_that_are_copied(profile: Profile, tmp_path: Path) -> None:
    model, batch = made()
    expected = gradients(model, batch)
    tight_plan(profile).save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    with remat.apply(model, plan):
        twin, stranger = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        for other in (twin, stranger):
            assert_equal(expected, gradients(other, batch))


def test_another_graph_in_front_sends_nothing(profile: Profile) -> None:
    model, batch = made()
    model.extra = True
    expected = gradients(model, batch)
    with remat.apply(model, tight_plan(profile)) as handle:
        assert_equal(expected, gradients(model, batch))
        sender = handle._installation.stem
        assert (sender.sent, sender.skipped) == (0, 1)
        assert "not the one that was profiled" in sender.why
        assert any("not the one" in event.text for event in handle.stats.events)


def test_what_is_written_to_later_comes_back_as_it_was(profile: Profile) -> None:
    model, batch = made()
    expected = gradients(model, batch)
    seen: list[Tensor] = []
    with remat.apply(model, tight_plan(profile)):
        handle = model.pool.register_forward_hook(lambda _, args, output: seen.append(args[0]))
        model.zero_grad()
        value = loss(model(batch), batch)
        with torch.no_grad():
            seen[0].add_(1.0)
        value.backward()
        handle.remove()
    found = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_equal(expected, found)


def test_nothing_is_sent_where_nothing_is_recorded_or_others_keep_saved_tensors(profile: Profile) -> None:
    model, batch = made()
    with remat.apply(model, tight_plan(profile)) as handle:
        sender = handle._installation.stem
        with torch.no_grad():
            model(batch)
        assert (sender.sent, sender.skipped) == (0, 0)
        with torch.autograd.graph.save_on_cpu():
            loss(model(batch), batch).backward()
        assert (sender.sent, sender.skipped) == (0, 1)


def test_a_host_without_memory_is_said(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = made()
    expected = gradients(model, batch)
    plan = tight_plan(profile)

    reserve = offload.Engine.reserve

    def refuse(self: offload.Engine, sizes: Sequence[int]) -> None:
        if sizes == plan.profile.stem.sizes:
            raise remat.HostMemoryError("no")
        reserve(self, sizes)

    monkeypatch.setattr(offload.Engine, "reserve", refuse)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with remat.apply(model, plan) as handle:
            assert handle._installation.stem is None
            assert not handle.plan.profile.stem_sent
            assert handle.plan.predicted_peak_bytes > plan.predicted_peak_bytes
            assert not any("waits on the host" in note for note in handle.status().notes)
            assert_equal(expected, gradients(model, batch))
    assert any("was to wait on the host" in str(one.message) for one in said)


def test_a_graph_that_needs_no_stem_has_none() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.TransformerEncoderLayer(32, 4, dropout=0.0) for _ in range(3)))
    assert remat.profile(model, torch.randn(8, 4, 32), loss=loss, allow=HOST).stem is None


def test_a_profile_with_the_stem_sent_differs_where_it_is_away(profile: Profile) -> None:
    sent = with_stem_sent(profile)
    assert sent is not None
    assert with_stem_sent(sent) is None
    assert with_stem_sent(replace(profile, host_limit_bytes=profile.stem.nbytes - 1)) is None
    assert with_stem_sent(replace(profile, link=None)) is None
    less = [a.start_bytes - b.start_bytes for a, b in zip(profile.segments, sent.segments, strict=True)]
    assert less[:3] == [0, 0, 0]  # the stem itself, the first region's forward, and what follows it
    assert set(less[3:]) == {profile.stem.nbytes}
    first, last = sent.segments[0], sent.segments[-1]
    assert (first.end_bytes, last.end_bytes) == (
        profile.segments[0].end_bytes,
        profile.segments[-1].end_bytes,
    )
    assert last.peak_bytes == profile.segments[-1].peak_bytes
    choices = [0] * len(profile.calls)
    assert simulate(sent, choices).peak_bytes < simulate(profile, choices).peak_bytes


def test_a_pickled_sender_sends_nothing(profile: Profile) -> None:
    found = pickle.loads(pickle.dumps(StemSender(profile.stem, offload.Engine("cpu"))))
    assert found.engine is None
    found.before(nn.Identity(), (), {})
    found.after(nn.Identity(), (), None)
    assert (found.sent, found.skipped) == (0, 0)


# ---------------------------------------------------------------------------------- what a review found


def test_what_was_written_to_before_it_was_sent_is_refused_as_without(profile: Profile) -> None:
    model, batch = made()

    def write(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        args[0].detach().mul_(2.0)

    model.pool.register_forward_hook(write)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(model, batch)
    with remat.apply(model, tight_plan(profile)) as handle:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(model, batch)
        sender = handle._installation.stem
        assert (sender.sent, sender.skipped) == (0, 1)
        assert "written to" in sender.why


def test_plans_of_many_sizes_do_not_send_it(profile: Profile) -> None:
    model, batch = made()
    budget = (least(profile) + least(replace(profile, stem=None))) // 2
    with pytest.raises(remat.BudgetError):  # and do not say that they met such a budget
        remat.fit(model, batch, budget=budget, loss=loss, allow=HOST, adaptive=True)
    assert not model.blocks[0]._forward_pre_hooks


def test_a_step_that_runs_out_of_memory_may_send_it_next(profile: Profile) -> None:
    model, _ = made()
    without = least(replace(profile, stem=None))
    plan = remat.plan(profile, without, allow=HOST)
    with remat.apply(model, plan) as handle:
        assert handle._needed() <= least(profile) + profile.stem.nbytes // 4
        assert handle._needed() < without
        handle._go_over_to(tight_plan(profile), "for the test")
        assert handle._installation.stem.on_skip is not None
        with handle.paused():
            assert not model.blocks[0]._forward_pre_hooks
        assert handle._installation.stem.on_skip is not None


def test_a_plan_is_made_anew_from_one_that_sends_it(profile: Profile) -> None:
    plan = tight_plan(profile)
    assert without_stem_sent(plan.profile) == profile
    again = remat.plan(plan.profile, 1 << 40, allow=HOST)
    assert not again.profile.stem_sent
    assert again.plain_peak_bytes == plan.plain_peak_bytes
    assert again.plain_seconds == pytest.approx(plan.plain_seconds)


def test_largest_counts_on_it() -> None:
    model, _ = made()

    def batch(size: int) -> Tensor:
        torch.manual_seed(size)
        return torch.randn(size, 3, 64, 64)

    own = remat.profile(model, batch(8), loss=loss, allow=HOST)
    budget = least(own) + (1 << 18)
    found = remat.largest(model, batch, budget=budget, start=2, limit=8, loss=loss, allow=HOST)
    assert found.size == 8


def test_hooks_of_the_users_own_do_not_end_a_profile() -> None:
    """What they gave away comes back in backward alone."""
    model, batch = made()
    inner = model.norm.forward

    def unpack(tensor: Tensor) -> Tensor:
        assert current_backward() >= 0
        return tensor

    def hooked(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            return inner(x)

    model.norm.forward = hooked
    with pytest.raises(AssertionError):
        candidates(graph_behind((model.norm(model.conv(batch)),), {}), torch.device("cpu"))
    assert remat.profile(model, batch, loss=loss, allow=HOST).stem is None


def test_an_error_in_the_first_region_leaves_nothing_under_way(profile: Profile) -> None:
    model, batch = made()
    with remat.apply(model, tight_plan(profile)) as handle:
        broken = model.blocks[0].wide.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(batch)
        broken.remove()
        assert handle._installation.stem.engine.counts.in_flight_bytes == 0


def test_a_copy_of_a_planned_model_can_be_planned_itself(profile: Profile) -> None:
    model, batch = made()
    expected = gradients(model, batch)
    plan = tight_plan(profile)
    with remat.apply(model, plan):
        twin = copy.deepcopy(model)
    remat.disable(twin)
    with remat.apply(twin, plan) as handle:
        assert_equal(expected, gradients(twin, batch))
        sender = handle._installation.stem
        assert (sender.sent, sender.skipped) == (1, 0)
    assert not twin.blocks[0]._forward_pre_hooks
    assert not twin.blocks[0]._forward_hooks


def test_a_second_plan_is_refused_where_only_the_stem_is_sent(profile: Profile) -> None:
    model, _ = made()
    plan = tight_plan(profile)
    only = replace(plan, choices=tuple(0 for _ in plan.choices))
    with remat.apply(model, only) as handle:
        assert not handle.regions
        with pytest.raises(remat.InputError):
            remat.apply(model, plan)
