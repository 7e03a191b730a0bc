"""Offload as part of a plan, on a real link: bits, memory, streams, and a host that never waits."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import remat
from remat.planner.link import host_bytes, window_bytes
from remat.planner.schedule import make_plan
from remat.records import Action, Mode
from test_offload_cuda import delay, host_never_waits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
]
ALL = [Action.KEEP, Action.RECOMPUTE, Action.OFFLOAD]


class Block(nn.Module):
    """Nothing in it sums in an order of its own: the same bits in every run."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, width: int = 256, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.fixture(scope="module")
def planned():
    """A model, a batch, and a plan in which every region sends what it can."""
    torch.manual_seed(0)
    model, batch = Stack().cuda(), torch.randn(8, 512, 256, device="cuda")
    profile = remat.profile(model, batch)
    assert profile.link is not None
    assert profile.link.d2h_bytes_per_second > 1e9
    choices = []
    for call in profile.calls:
        menu = profile.kinds[call.kind].menu
        most = max(range(len(menu)), key=lambda i: (menu[i].host_bytes, -menu[i].extra_seconds))
        assert menu[most].host_bytes > 0
        choices.append(most)
    return model, batch, make_plan(profile, choices, 1 << 40, strategy="all", allow=ALL)


def gradients(model, batch):
    model.zero_grad(set_to_none=True)
    model(batch).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def peak_bytes(model, batch):
    """Of a step, above what was there before it."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model(batch).backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def assert_equal(expected, found):
    assert expected.keys() == found.keys()
    assert not [name for name in expected if not torch.equal(expected[name], found[name])]


def test_gradients_host_bytes_and_peak_are_as_planned(planned):
    model, batch, plan = planned
    expected = gradients(model, batch)
    assert_equal(expected, gradients(model, batch))  # or nothing is shown below
    with remat.apply(model, plan) as handle:
        for _ in range(5):
            assert_equal(expected, gradients(model, batch))
        counts = handle.engine.counts
        assert counts.peak_used_bytes == host_bytes(plan.profile, plan.choices)
        assert counts.kept_bytes == counts.failures == counts.used_bytes == 0
        assert counts.peak_in_flight_bytes <= window_bytes(plan.profile, plan.choices)
        assert not [row for row in handle.status().rows if row.fallbacks]
        peak = peak_bytes(model, batch)
        assert peak <= 1.02 * (plan.predicted_peak_bytes - plan.profile.step.resident)
    assert handle.engine.counts.pinned_bytes == 0


def test_regions_run_again_from_inputs_on_the_host(planned):
    model, batch, plan = planned
    profile = plan.profile
    expected = gradients(model, batch)
    menus = [profile.kinds[call.kind].menu for call in profile.calls]
    choices = [next(i for i, entry in enumerate(menu) if entry.mode is Mode.HOSTED) for menu in menus]
    hosted = make_plan(profile, choices, 1 << 40, strategy="all", allow=ALL)
    full = make_plan(
        profile, [kind_of(profile, call).reference for call in profile.calls], 1 << 40, strategy="all"
    )
    assert hosted.predicted_peak_bytes < full.predicted_peak_bytes
    with remat.apply(model, hosted) as handle:
        for _ in range(2):
            assert_equal(expected, gradients(model, batch))
        counts = handle.engine.counts
        assert counts.sent_bytes == 2 * host_bytes(profile, choices) == 2 * 8 * batch.nbytes
        assert (counts.kept_bytes, counts.failures) == (0, 0)
        peak = peak_bytes(model, batch)
        assert peak <= 1.02 * (hosted.predicted_peak_bytes - profile.step.resident)


def kind_of(profile, call):
    return profile.kinds[call.kind]


def test_slow_copies_change_nothing(planned):
    model, batch, plan = planned
    expected = gradients(model, batch)
    with remat.apply(model, plan) as handle:
        link = handle.engine.link
        for _ in range(3):
            delay(link._out)
            model.zero_grad(set_to_none=True)
            loss = model(batch)
            delay(link._back)
            loss.backward()
            found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
            assert_equal(expected, found)


def test_a_users_stream_and_two_graphs_alive(planned):
    model, batch, plan = planned
    expected = gradients(model, batch)
    stream = torch.cuda.Stream()
    with remat.apply(model, plan):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model.zero_grad(set_to_none=True)
            first, second = model(batch), model(batch)
            first.backward()
            once = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
            model.zero_grad(set_to_none=True)
            second.backward()
            again = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        assert_equal(expected, once)
        assert_equal(expected, again)


def test_the_host_never_waits_in_a_step(planned):
    model, batch, plan = planned
    with remat.apply(model, plan, check=False) as handle:
        gradients(model, batch)
        torch.cuda.synchronize()
        with host_never_waits():
            for _ in range(3):
                model.zero_grad(set_to_none=True)
                model(batch).backward()
        assert handle.engine.counts.late_fetches == 0


def test_many_steps_leak_nothing(planned):
    model, batch, plan = planned
    with remat.apply(model, plan) as handle:
        gradients(model, batch)
        levels = set()
        for step in range(30):
            loss = model(batch)
            if step % 4:
                loss.backward()
            del loss
            model.zero_grad(set_to_none=True)
            counts = handle.engine.counts
            levels.add((counts.pinned_bytes, counts.used_bytes))
        torch.cuda.synchronize()
        handle.engine.settle()
        first = torch.cuda.memory_allocated()
        for _ in range(30):
            gradients(model, batch)
        model.zero_grad(set_to_none=True)
        handle.engine.settle()
        gc.collect()
        assert torch.cuda.memory_allocated() <= first
        assert len({pinned for pinned, _ in levels}) == 1


def test_by_hand(planned):
    model, batch, _ = planned
    expected = gradients(model, batch)
    remat.enable(model, offload=True)
    try:
        for _ in range(3):
            assert_equal(expected, gradients(model, batch))
    finally:
        remat.disable(model)
