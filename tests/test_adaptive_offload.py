"""Plans of many sizes that send to the host: every step within the budget, every gradient as without remat.

The link is simulated and fast, so that plans send wherever memory is short. It moves bytes only when a stream
waits for a copy: a wrong order shows as wrong gradients, or in `violations`.
"""

from __future__ import annotations

import copy
import functools
import gc
import random
from dataclasses import replace

import pytest
import torch

import remat
from remat.adaptive import AdaptiveHandle
from remat.errors import HostMemoryError
from remat.planner.link import host_bytes
from remat.planner.simulate import simulate
from remat.records import Mode
from remat.run.offload import Engine
from remat.run.recipe import compile_recipe
from remat.run.simulated import SimulatedLink
from remat.run.slabs import Slabs
from remat.sending import load_of, window_gap_bytes
from remat.sizing import Knot, Measured
from remat.stencil import Stencil, stencil
from test_adaptive import assert_equal, counted_peak

pytest.importorskip("transformers")

ALL = ("keep", "recompute", "offload")
LONGEST = 192
LONG, MIDDLE, SHORT = 192, 133, 30  # measured and offloading; not measured and offloading; keeps everything


@pytest.fixture(autouse=True, scope="module")
def fast_link():
    patch = pytest.MonkeyPatch()
    patch.setattr("remat.run.offload._link_of", lambda device: link())
    yield
    patch.undo()


def link(**options):
    return SimulatedLink(
        remember=0, d2h_bytes_per_second=1e13, h2d_bytes_per_second=1e13, latency_seconds=0.0, **options
    )


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=64, max_position_embeddings=LONGEST, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def tokens(length):
    ids = torch.randint(0, 64, (1, length), generator=torch.Generator().manual_seed(length))
    return {"input_ids": ids, "labels": ids}


@functools.cache
def fit_once():
    """A budget that the longest batch does not fit in, and that holds more than recomputing all of it."""
    model = llama()
    profile = remat.profile(model, tokens(LONGEST))
    full = simulate(profile, tuple(profile.kinds[c.kind].reference for c in profile.calls)).peak_bytes
    budget = int(1.45 * full)
    with remat.fit(model, tokens(LONGEST), budget, adaptive=True, allow=ALL) as handle:
        assert isinstance(handle, AdaptiveHandle)
        knots = [Knot(*pair) for pair in zip(handle._chart.shapes, handle._family.profiles, strict=True)]
        return budget, handle._fitted, Measured(tuple(reversed(knots)))


def fitted(**options):
    """A model of its own under plans that were measured once, and one without remat."""
    model = llama()
    plain = copy.deepcopy(model)
    _, plan, measured = fit_once()
    return model, plain, AdaptiveHandle(remat.apply(model, plan), measured, check=True, **options)


def gradients(model, *losses):
    """After a backward through each of them."""
    for loss in losses:
        loss.backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    assert None not in found.values()
    return found


def checked_step(model, plain, handle, length):
    """One step: equal gradients, within the budget, nothing left behind. Gives what it sent."""
    batch = tokens(length)
    expected = gradients(plain, plain(**batch).loss)
    before = sent(handle)
    peak = counted_peak(model, batch, lambda: handle.step(lambda: model(**batch).loss))
    assert_equal(expected, gradients(model))
    assert peak <= fit_once()[0], (length, peak / fit_once()[0])
    if handle.engine is not None:
        counts = handle.engine.counts
        assert counts.kept_bytes == counts.failures == counts.used_bytes == counts.in_flight_bytes == 0
        assert not handle.engine.link.violations
    return sent(handle) - before


def sent(handle):
    return 0 if handle.engine is None else handle.engine.counts.sent_bytes


def load(handle):
    return handle._ready[handle._now].load


# ------------------------------------------------------------------------------------------ within the budget


def test_a_stream_of_lengths():
    model, plain, handle = fitted()
    handle.plan_ahead()
    pinned = handle.engine.counts.pinned_bytes
    drawn = [LONG, 190, 171, 150, MIDDLE, 120, 101, 90, 75, 66, 55, 40, SHORT, 20]
    random.Random(0).shuffle(drawn)
    drawn += drawn[:4]  # some of them again
    offloading = set()
    for length in [LONG, *drawn]:
        moved = checked_step(model, plain, handle, length)
        assert moved == sum(load(handle).sizes)
        assert moved <= host_bytes(handle.plan.profile, handle.plan.choices)
        if moved:
            offloading.add(length)
        if length in (LONG, *handle.sizes):
            assert moved == host_bytes(handle.plan.profile, handle.plan.choices)
        if length <= SHORT:
            assert not moved
            assert not handle.regions
            assert all(handle.plan.entry(i).mode is Mode.KEEP for i in range(6))
    assert len(offloading - set(handle.sizes)) >= 3
    assert handle.engine.counts.prefetch_hits > 0  # regions are known as neighbours
    # What was planned for these has to hold at smaller sizes: pieces are not counted on.
    assert all(kind.graph is None for made in handle._plans.values() for kind in made.plan.profile.kinds)
    assert LONG in offloading
    assert MIDDLE in offloading
    assert not handle.stats.fell_back
    assert handle.engine.counts.pinned_bytes == pinned  # all that was ever needed was there from the start
    assert any("to the host" in event.text for event in handle.stats.events if event.kind == "plan changed")
    handle.remove()


def test_fit_takes_the_host_memory_of_all_plans_and_remove_gives_it_back():
    model = llama()
    budget, plan, _ = fit_once()
    handle = remat.fit(model, tokens(LONGEST), budget, adaptive=True, allow=ALL)
    loads = [handle._load(planned.plan, planned.size).host_bytes for planned in handle._plans.values()]
    assert handle.engine.counts.pinned_bytes == max(*loads, load_of(plan).host_bytes)
    loss = model(**tokens(MIDDLE)).loss
    handle.remove()
    assert handle.engine.counts.pinned_bytes > 0  # what the graph still needs
    loss.backward()
    plain = llama()
    assert_equal(gradients(plain, plain(**tokens(MIDDLE)).loss), gradients(model))
    del loss
    gc.collect()
    assert handle.engine.counts.pinned_bytes == 0
    assert not handle.engine.link.violations


def test_the_window_of_a_plan_may_be_wider_than_a_part_of_it_needs():
    """Then what a step holds that falls back after some regions is counted with the plan's own."""
    _, plan, _ = fit_once()
    menu = plan.profile.kinds[0].menu
    least, _, most = sorted(
        (i for i, e in enumerate(menu) if e.host_bytes), key=lambda i: menu[i].host_bytes
    )[::2][:3]
    mixed = replace(plan, choices=(least, *plan.choices[1:-1], most))
    reference = plan.profile.kinds[0].reference
    assert window_gap_bytes(mixed, mixed.choices) == 0
    assert window_gap_bytes(mixed, [reference] * 6) == 0
    gap = window_gap_bytes(mixed, [least] + [reference] * 5)
    assert gap == max(menu[c].host_bytes for c in mixed.choices) - menu[least].host_bytes > 0


def test_on_the_cpu_offload_has_to_be_asked_for():
    model = llama()
    with remat.fit(model, tokens(64), activations=0.7, adaptive=True) as handle:
        model(**tokens(64)).loss.backward()
        assert handle.engine is None
        assert handle._fitted.profile.link is None


def test_long_and_short_batches_in_turn_take_no_more_host_memory():
    model, plain, handle = fitted()
    levels = set()
    for turn in range(24):
        length = (LONG, SHORT, MIDDLE, 25, 150)[turn % 5]
        checked_step(model, plain, handle, length)
        if turn >= 5:
            levels.add(handle.engine.counts.pinned_bytes)
    assert len(levels) == 1
    handle.remove()
    assert handle.engine.counts.pinned_bytes == 0


def test_the_window_is_that_of_the_size_that_runs():
    model, _, handle = fitted()
    for length in (LONG, MIDDLE, SHORT):
        handle.engine and handle.engine.settle()
        model(**tokens(length))
        assert handle.engine._limit == load(handle).window_bytes
        assert [region.place for region in handle.regions] == list(range(len(handle.regions)))
        assert handle.engine.counts.in_flight_bytes <= load(handle).window_bytes
        menu = [handle.plan.entry(i).host_bytes for i in range(6)]
        assert load(handle).window_bytes <= max(menu)
    assert load(handle).window_bytes == 0
    handle.remove()


def test_a_forward_without_backward_leaves_nothing_under_way_for_the_next_batch():
    model, plain, handle = fitted()
    model(**tokens(LONG))
    assert handle.engine.counts.in_flight_bytes > 0
    handle._before_forward((), tokens(SHORT))
    assert handle.engine.counts.in_flight_bytes == 0
    model(**tokens(LONG))
    handle._before_forward((), tokens(LONG))
    assert handle.engine.counts.in_flight_bytes == 0
    gc.collect()
    checked_step(model, plain, handle, SHORT)
    handle.remove()


# --------------------------------------------------------------------------------------------------- the host


def test_a_size_that_the_host_refuses_recomputes_and_the_others_offload():
    model, plain, handle = fitted()
    checked_step(model, plain, handle, MIDDLE)
    middle = load(handle).host_bytes
    handle._host.close()
    largest = load_of(handle._fitted).host_bytes
    assert largest > middle
    handle._host.engine = Engine("cpu", in_flight_limit_bytes=0, host_limit_bytes=largest - 1)
    for _ in range(2):
        assert checked_step(model, plain, handle, LONG) == 0
        assert len(handle.regions) > 0
        assert checked_step(model, plain, handle, MIDDLE) > 0
    assert not host_bytes(handle.plans[LONG].profile, handle.plans[LONG].choices)
    refused = [event for event in handle.stats.events if event.kind == "fell back"]
    assert len(refused) == 1
    assert f"no offload at size {LONG}" in refused[0].text
    handle.remove()


@pytest.mark.parametrize("limit_bytes", [0, 2**17])
def test_what_the_host_refuses_is_known_before_training(monkeypatch, limit_bytes):
    model, plain, handle = fitted()
    monkeypatch.setattr("remat.run.offload.available_host_bytes", lambda: 2 * limit_bytes)
    handle.plan_ahead()
    assert handle.stats.fell_back == 1
    assert LONG in handle._hostless
    for length in (LONG, MIDDLE, 101, SHORT):
        checked_step(model, plain, handle, length)
    assert handle.stats.fell_back == 1
    assert handle.engine.counts.pinned_bytes <= limit_bytes
    handle.remove()


def test_plans_stay_within_the_hosts_memory():
    _, plan, measured = fit_once()
    wanted = host_bytes(plan.profile, plan.choices)
    poor = tuple(
        Knot(knot.shapes, replace(knot.profile, host_limit_bytes=wanted // 2)) for knot in measured.knots
    )
    model, plain = llama(), llama()
    handle = AdaptiveHandle(remat.apply(model, plan), Measured(poor), check=True)
    for length in (190, MIDDLE, 101):
        checked_step(model, plain, handle, length)
        assert host_bytes(handle.plan.profile, handle.plan.choices) <= wanted // 2
    handle.remove()


def test_host_memory_that_was_cut_for_other_sizes_is_not_counted_on():
    """Two slabs of 3 do not hold three pieces of 2, though they have room for 6."""
    unit = 512
    slabs = Slabs(lambda n: torch.empty(n, dtype=torch.uint8), lambda memory: None, 100 * unit, unit)
    slabs.make_room([3 * unit])
    slabs.make_room([3 * unit, 3 * unit])
    assert slabs.total_bytes == 6 * unit
    slabs.make_room([2 * unit] * 3)
    assert slabs.total_bytes == 8 * unit
    draw = random.Random(0)
    for _ in range(100):
        sizes = [draw.randint(1, 6 * unit) for _ in range(draw.randint(1, 12))]
        slabs.make_room(sizes)
        had = slabs.total_bytes
        taken = [slabs.take(size) for size in sizes]
        assert slabs.total_bytes == had
        for extent in taken:
            slabs.give(extent, None)
    with pytest.raises(HostMemoryError, match="limit"):
        slabs.make_room([unit] * 101)
    assert slabs.total_bytes == had


# ------------------------------------------------------------------------------------- the ways steps are run


@pytest.mark.parametrize("layer", [-1, 3])
def test_running_out_of_memory_in_backward_with_copies_under_way(layer):
    model, plain, handle = fitted()
    seen = []

    def strike(gradient):
        if not seen:
            seen.append(handle.engine.counts)
            raise torch.OutOfMemoryError("injected")

    def watch(module, args, output):
        (output[0] if isinstance(output, tuple) else output).register_hook(strike)

    hook = model.model.layers[layer].register_forward_hook(watch)
    expected = gradients(plain, plain(**tokens(MIDDLE)).loss)
    handle.step(lambda: model(**tokens(MIDDLE)).loss)
    assert_equal(expected, gradients(model))
    assert handle.stats.recovered == 1
    assert seen[0].used_bytes > 0
    assert seen[0].in_flight_bytes + seen[0].inbound_bytes > 0
    hook.remove()
    for length in (MIDDLE, LONG, SHORT):
        checked_step(model, plain, handle, length)
    handle.remove()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("sizes", [(LONG, MIDDLE), (MIDDLE, LONG), (LONG, SHORT), (SHORT, LONG)])
def test_two_graphs_of_different_sizes_before_their_backwards(sizes, order):
    model, plain, handle = fitted()

    def both(model):
        losses = [model(**tokens(length)).loss for length in sizes]
        return gradients(model, *(losses[index] for index in order))

    expected = both(plain)
    for _ in range(2):
        assert_equal(expected, both(model))
    counts = handle.engine.counts
    assert counts.sent_bytes > 0
    assert counts.used_bytes == counts.kept_bytes == 0
    assert not handle.engine.link.violations
    handle.remove()


def test_no_group_of_an_earlier_graph_is_taken_for_a_neighbour():
    engine = Engine("cpu", in_flight_limit_bytes=1000, link=link())
    first = engine.group(0)
    held = [first.send(torch.zeros(10))]
    engine.begin(1000)
    second = engine.group(3)
    held.append(second.send(torch.zeros(10)))
    assert second._previous is None
    third = engine.group(4)
    held.append(third.send(torch.zeros(10)))
    assert third._previous() is second


def test_accumulation_over_sizes():
    model, plain, handle = fitted()

    def steps(model):
        for length in (LONG, SHORT, MIDDLE):
            model(**tokens(length)).loss.backward()
        return gradients(model)

    assert_equal(steps(plain), steps(model))
    assert handle.engine.counts.kept_bytes == 0
    handle.remove()


def test_a_copy_of_the_model_and_verify_beside_the_handle():
    model, plain, handle = fitted()
    assert checked_step(model, plain, handle, MIDDLE)
    other = copy.deepcopy(model)
    expected = gradients(plain, plain(**tokens(MIDDLE)).loss)
    assert_equal(expected, gradients(other, other(**tokens(MIDDLE)).loss))
    assert remat.verify(model, tokens(MIDDLE)).bitwise
    assert remat.verify(model, tokens(LONG), fit_once()[1]).bitwise  # with the handle off meanwhile
    assert checked_step(model, plain, handle, MIDDLE)
    handle.remove()
    assert_equal(expected, gradients(other, other(**tokens(MIDDLE)).loss))


# ----------------------------------------------------------------------------------------- recipes that send


def test_a_stencil_sends_what_compiling_would():
    _, _, handle = fitted()
    family, size = handle._family, 101
    found = [entry.recipe for entry in family.profiles[-1].kinds[0].menu if entry.host_bytes]
    assert found
    graphs = [profile.kinds[0].graph for profile in family.profiles]
    for recipe in found:
        made = stencil(
            family.sizes, graphs, functools.partial(family.graph_at, 0), recipe, torch.device("cpu")
        ).at(size)
        expected = compile_recipe(family.graph_at(0, size), recipe, torch.device("cpu"))
        assert made.moved == expected.moved
        assert made.moved_taps == expected.moved_taps
        assert made.send_order == expected.send_order
        assert made.send_order
    handle.remove()


def test_a_graph_that_does_not_fit_is_found_out_within_the_budget(monkeypatch):
    model, plain, handle = fitted()
    at = Stencil.at
    monkeypatch.setattr(Stencil, "at", lambda self, size: at(self, size + 8))
    for _ in range(2):
        assert checked_step(model, plain, handle, MIDDLE) == 0
    assert handle.stats.fell_back
    assert checked_step(model, plain, handle, LONG) > 0
    handle.remove()


def test_host_bytes_follow_the_size():
    _, plan, measured = fit_once()
    for knot in measured.knots:
        for kind in knot.profile.kinds:
            for entry in kind.menu:
                if entry.recipe is not None:
                    sizes = [kind.graph.storages[s].nbytes for s in entry.recipe.offloaded]
                    assert entry.host_bytes == sum(sizes)
        assert knot.profile.link == plan.profile.link
        assert knot.profile.host_limit_bytes == plan.profile.host_limit_bytes
    assert any(entry.host_bytes for entry in measured.knots[-1].profile.kinds[0].menu)
