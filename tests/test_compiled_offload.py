"""Compiled blocks whose saved tensors wait on the host, over the simulated link.

The backend is "aot_eager" where bits are compared (see test_compiled). The link moves bytes only when a
stream waits for a copy, so that a wrong order shows as wrong gradients, or in `violations`.
"""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config

import remat
from models import Case, MlpBlock, squared
from reference import SEED, assert_same, step
from remat import compiling
from remat._torch_private import compiled_node, storage_ref
from remat.check.bench import Bench
from remat.compiling import chosen_sets, moving, set_seconds
from remat.errors import CaptureError
from remat.menus import menu_entry
from remat.planner.link import host_bytes, window_bytes
from remat.planner.program import actions
from remat.planner.schedule import make_plan
from remat.planner.simulate import simulate
from remat.records import Action, Mode, Plan, Role
from remat.run import compiled
from remat.run import outgoing as sends
from remat.run.link import Direction
from remat.run.meter import storages_of
from remat.run.offload import Engine
from remat.run.outgoing import outgoing
from remat.run.simulated import SimulatedLink
from remat.trees import tensors
from test_compiled import (
    COMPILES,
    CPU,
    FAMILIES,
    Mlps,
    _joint,
    counted_peak,
    fit,
    needs_compiler,
    price_joint,
    profile,
    stack,
)

ALL = ["keep", "recompute", "offload"]
pytestmark = COMPILES
_profiles: dict[str, remat.Profile] = {}


def profile_of_stack() -> remat.Profile:
    if "stack" not in _profiles:
        case = stack(layers=4)
        _profiles["stack"] = profile(case, case.model, allow=ALL)
    return _profiles["stack"]


def sending(found: remat.Profile) -> Plan:
    """Every block sends as much as any entry does; saved sets alternate over the layers."""
    choices = []
    for number, call in enumerate(found.calls):
        menu = found.kinds[call.kind].menu
        entries = [i for i, entry in enumerate(menu) if entry.mode is Mode.COMPILED and entry.host_bytes]
        choices.append(entries[number % len(entries)])
    return make_plan(found, choices, 1 << 40, strategy="by hand", allow=[Action(action) for action in ALL])


def same_model(case: Case) -> nn.Module:
    return copy.deepcopy(case.model)


# ----------------------------------------------------------------------------------- budgets and gradients


@pytest.mark.parametrize("name", ["llama", "gpt2", "vit"])
def test_families_with_everything_that_can_wait_on_the_host(name: str) -> None:
    """Gradients equal those of the untouched model bit for bit, dropout and all; what is sent is what was
    planned; by a count of our own the peak is the predicted one."""
    torch.manual_seed(0)
    case = FAMILIES[name]()
    case.model.train()
    found = profile(case, case.model, allow=ALL)
    plan = sending(found)
    expected = step(case, same_model(case))
    with remat.apply(case.model, plan) as handle:
        assert_same(expected, step(case, case.model))
        assert handle.engine is not None
        counts = handle.engine.counts
        assert counts.sent_bytes == counts.peak_used_bytes == host_bytes(found, plan.choices) > 0
        assert counts.used_bytes == counts.kept_bytes == counts.failures == 0
        assert counts.peak_in_flight_bytes <= window_bytes(found, plan.choices)
        peak = found.step.resident + counted_peak(case, case.model)
        # What is fetched ahead is counted in full.
        assert -0.01 * peak <= plan.predicted_peak_bytes - peak <= 0.15 * peak
        assert not any(region.counts.fallbacks for region in handle.regions)
        assert [row.mode for row in handle.status().rows] == ["compiled"] * len(found.calls)
    link = handle.engine.link
    assert isinstance(link, SimulatedLink)
    assert not link.violations
    assert handle.engine.counts.pinned_bytes == 0
    case.model.zero_grad(set_to_none=True)
    assert_same(expected, step(case, case.model))  # nothing is left on the model


def test_fit_meets_a_budget_with_compiled_blocks_and_the_host() -> None:
    case = stack(layers=6)
    plain = same_model(case)
    peak = counted_peak(case, same_model(case))
    with fit(case, case.model, activations=0.4, allow=ALL) as handle:
        assert host_bytes(handle.plan.profile, handle.plan.choices) > 0
        assert counted_peak(case, case.model) <= 0.4 * peak + 1024
        assert "compiled+offload" in str(handle.report())
        case.model.zero_grad(set_to_none=True)
        assert_same(step(case, plain), step(case, case.model))
        assert handle.verification is not None
        assert handle.verification.ok


def test_verify_compares_with_compiled_blocks_that_hold_everything() -> None:
    case = stack(layers=4)
    result = remat.verify(case.model, case.batch, sending(profile_of_stack()), loss=case.loss)
    assert result.bitwise


def test_a_plan_may_use_the_host_only_if_that_is_allowed() -> None:
    found = profile_of_stack()
    for entry in found.kinds[0].menu:
        assert (Action.OFFLOAD in actions(entry)) == bool(entry.host_bytes)
    plan = remat.plan(found, activations=0.5, allow=["keep", "recompute"])
    assert not host_bytes(found, plan.choices)


def test_sending_takes_no_other_compiled_code() -> None:
    case, found = stack(layers=4), profile_of_stack()
    compiled._cache.clear()
    with remat.apply(case.model, sending(found)):
        case.run().backward()
        sets = [e for e in found.kinds[0].menu if e.mode is Mode.COMPILED and not e.host_bytes]
        assert len(compiled._cache) <= len(sets) <= 4


# ----------------------------------------------------------------------------- the ways steps are written


def test_accumulation() -> None:
    case = stack(layers=4)
    expected = step(case, same_model(case), passes=3)
    with remat.apply(case.model, sending(profile_of_stack())):
        assert_same(expected, step(case, case.model, passes=3))


def test_two_forwards_before_their_backwards_in_either_order() -> None:
    case = stack(layers=4)

    def both(model: nn.Module, order: tuple[int, ...]) -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        losses = [case.run(model), case.run(model) * 2]
        for index in order:
            losses[index].backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = same_model(case)
    with remat.apply(case.model, sending(profile_of_stack())):
        for order in ((0, 1), (1, 0)):
            assert_same(both(plain, order), both(case.model, order))


def _twice(case: Case, model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss = case.run(model)
    loss.backward(retain_graph=True)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_retain_graph_is_refused_as_by_any_compiled_block_and_the_next_step_is_right() -> None:
    """Compiled backward code writes into what it was given; torch says how to have it otherwise."""
    case = stack(layers=4)
    expected = step(case, same_model(case))
    with remat.apply(case.model, sending(profile_of_stack())) as handle:
        with pytest.raises(RuntimeError, match="donated"):
            _twice(case, case.model)
        gc.collect()
        case.model.zero_grad(set_to_none=True)
        assert_same(expected, step(case, case.model))
        gc.collect()
        assert handle.engine is not None
        assert handle.engine.counts.used_bytes == 0


def test_retain_graph_where_compiled_code_leaves_its_inputs_alone() -> None:
    case = stack(layers=4)
    expected = _twice(case, same_model(case))
    plan = sending(profile_of_stack())
    compiled._cache.clear()
    torch._dynamo.reset()
    with functorch_config.patch(donated_buffer=False), remat.apply(case.model, plan):
        assert_same(expected, _twice(case, case.model))
    compiled._cache.clear()
    torch._dynamo.reset()


def test_forwards_that_are_never_backwarded_leave_nothing_on_the_host() -> None:
    case = stack(layers=4)
    with remat.apply(case.model, sending(profile_of_stack())) as handle:
        for _ in range(3):
            loss = case.run()
            del loss
        gc.collect()
        assert handle.engine is not None
        assert handle.engine.counts.sent_bytes > 0
        assert handle.engine.counts.used_bytes == 0
        with torch.no_grad():
            before = handle.engine.counts.sent_bytes
            case.run()
            assert handle.engine.counts.sent_bytes == before


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_a_planned_model_give_the_same(how: Any) -> None:
    case = stack(layers=4)
    expected = step(case, same_model(case))
    with remat.apply(case.model, sending(profile_of_stack())):
        assert_same(expected, step(case, how(case.model)))


def test_another_length_is_sent_by_size() -> None:
    case = stack(layers=4)
    plain = same_model(case)
    with remat.apply(case.model, sending(profile_of_stack())) as handle:
        assert handle.engine is not None
        for length in (16, 24):
            other = Case(case.model, torch.randn(4, length, 8), squared)
            before = handle.engine.counts.sent_bytes
            case.model.zero_grad(set_to_none=True)
            plain.zero_grad(set_to_none=True)
            assert_same(step(other, plain), step(other, case.model))
            assert handle.engine.counts.sent_bytes > before
        assert not any(region.counts.fallbacks for region in handle.regions)


# --------------------------------------------------------------------------------------------- what is sent


def test_neither_parameters_nor_outputs_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    case = stack(layers=4)
    sent: list[Tensor] = []
    send = Engine._send
    monkeypatch.setattr(Engine, "_send", lambda self, group, t: sent.extend(t) or send(self, group, t))
    with remat.apply(case.model, sending(profile_of_stack())):
        output = case.model(case.batch)
    resident = storages_of([case.model])
    assert sent
    assert not any(storage_ref(tensor) in resident for tensor in sent)
    assert storage_ref(output) not in {storage_ref(tensor) for tensor in sent}


def test_what_a_graph_has_saved_is_looked_at_once_per_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later calls send the same places of its node, right to the bit; a region remembers few lengths."""
    looked: list[int] = []
    choose = sends._chosen
    monkeypatch.setattr(sends, "_chosen", lambda *given: looked.append(1) or choose(*given))
    monkeypatch.setattr(sends, "_LAYOUTS", 2)
    case = stack(layers=4)
    plain = same_model(case)
    with remat.apply(case.model, sending(profile_of_stack())) as handle:
        assert handle.engine is not None
        for length, expected_looks in ((32, 4), (32, 0), (16, 4), (32, 0), (16, 0), (24, 4), (32, 4)):
            looked.clear()
            other = Case(case.model, torch.randn(4, length, 8), squared)
            before = handle.engine.counts.sent_bytes
            case.model.zero_grad(set_to_none=True)
            plain.zero_grad(set_to_none=True)
            assert_same(step(other, plain), step(other, case.model))
            assert len(looked) == expected_looks
            assert handle.engine.counts.sent_bytes > before
            assert all(len(region.layouts) <= 2 for region in handle.regions)


def test_the_input_of_a_block_leaves_the_device() -> None:
    """The most frugal way: a block that holds nothing, and whose input waits on the host."""
    found = profile_of_stack()
    frugal = [e for e in found.kinds[0].menu if e.fetches_inputs == (0,) and not e.resident_bytes]
    assert frugal
    graph = found.kinds[0].graph
    assert graph is not None
    for entry in frugal:
        assert entry.recipe is not None
        assert not entry.holds_inputs
        roles = {graph.storages[s].role for s in entry.recipe.offloaded}
        assert Role.INPUT in roles


def test_moving_sends_about_what_the_link_carries() -> None:
    joint = price_joint(_joint(), CPU)
    most = 0.0
    for recipe in chosen_sets(joint):
        for hidden in (1, 5000, 50_000, 1 << 40):
            for one in moving(joint.graph, recipe, hidden):
                assert one.host_bytes <= 3 * hidden
                most = max(most, one.host_bytes / hidden)
                assert one.kept == recipe.kept
                assert one.host_bytes + one.resident_bytes == recipe.resident_bytes
                sent = outgoing(joint.graph, one)
                assert sent is not None
                assert sent.nbytes == one.host_bytes
                assert len(sent.inputs) + len(sent.ranks) == len(one.offloaded)
        assert outgoing(joint.graph, recipe) is None
    assert most > 2  # a small set goes as a whole


@pytest.mark.parametrize(("host_ms", "longer_ms"), [(3.0, 0.0), (4.0, 0.0), (5.5, 1.5)])
def test_sending_costs_what_the_host_takes_longer_than_the_device(
    monkeypatch: pytest.MonkeyPatch, host_ms: float, longer_ms: float
) -> None:
    """A block takes the device 4 ms and the host 2; with tensors sent the host takes `host_ms`."""
    kind = profile_of_stack().kinds[0]
    sets = [e for e in kind.menu if not e.host_bytes]
    kind = replace(kind, menu=tuple(sets))
    found: Any = [
        SimpleNamespace(recipe=e.recipe, bench=Bench(0, 0, 0, 4e-3, 2e-3)) for e in sets if e.recipe
    ]

    def bench(*given: Any, timed: bool) -> Bench:
        assert timed
        return Bench(0, 0, 0, 99.0, host_ms * 1e-3)

    monkeypatch.setattr(compiling, "_bench_moving", bench)
    species: Any = SimpleNamespace(example=SimpleNamespace(inputs=kind.graph and kind.graph.inputs))
    host: Any = None
    made = compiling._with_offload(
        kind, species, ((), {}), torch.device("cuda"), host, 50_000, found, menu_entry
    )
    stays = {e.recipe.kept: e.extra_seconds for e in sets if e.recipe}
    sent = [e for e in made.menu if e.recipe is not None and e.recipe.offloaded]
    assert sent
    for entry in sent:
        assert entry.recipe is not None
        longer = entry.extra_seconds - stays[entry.recipe.kept]
        assert longer == pytest.approx(longer_ms * 1e-3, abs=1e-9)


def test_what_lies_otherwise_than_planned_stays_and_the_rest_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a graph holds other bytes than its records say (padded strides), small tensors are left out."""
    real = compiling._bench_moving
    tried = []

    def refusing(kind: Any, *args: Any, **options: Any) -> Any:
        recipe = args[-1]
        tried.append(recipe)
        if any(kind.graph.storages[s].nbytes < 4000 for s in recipe.offloaded):
            raise CaptureError("it holds other bytes")
        return real(kind, *args, **options)

    monkeypatch.setattr("remat.compiling._bench_moving", refusing)
    case = stack(layers=2)
    found = profile(case, case.model, allow=ALL)
    sent = [e.recipe for e in found.kinds[0].menu if e.host_bytes]
    assert sent
    assert len(sent) < len(tried)
    assert "not all of it can wait on the host: it holds other bytes" in found.kinds[0].note


def test_with_the_host_a_faster_set_takes_the_place_of_the_smallest() -> None:
    """Where the last two sets can both wait on the host, the slower of them is lighter by next to nothing."""
    joint = _joint()
    corners = chosen_sets(joint, most=99)
    without = chosen_sets(joint)
    beside = chosen_sets(joint, hidden_bytes=corners[-2].resident_bytes)
    assert without[-1] == corners[-1]
    assert beside[-1] == corners[-2]
    assert corners[-1] not in beside
    assert len(beside) <= 4
    assert beside[-1].resident_bytes > without[-1].resident_bytes
    assert set_seconds(joint, beside[-1]) < set_seconds(joint, without[-1])


class Bent(nn.Module):
    """What comes before the first block holds its own result for backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.layers = nn.Linear(8, 32), inner.layers

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inner(x))
        for layer in self.layers:
            x = layer(x)
        return x


class Gated(Bent):
    """What comes after the last block holds the first one's input."""

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.inner(x)
        for layer in self.layers:
            x = layer(x)
        return x * first


class Shown(Bent):
    """The caller has it while backward runs."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = first = self.inner(x)
        for layer in self.layers:
            x = layer(x)
        return x, first


class Stored(Bent):
    def forward(self, x: Tensor) -> Tensor:
        x = self.last = self.inner(x)
        for layer in self.layers:
            x = layer(x)
        return x


def first_squared(output: Any, batch: Any) -> Tensor:
    return squared(output[0] if isinstance(output, tuple) else output, batch)


def test_the_first_blocks_input_goes_too_unless_somebody_else_holds_it() -> None:
    found = profile_of_stack()
    first = found.calls[0].inputs[0]
    assert found.passing == (first,)
    plan = sending(found)
    held = simulate(replace(found, passing=()), plan.choices)
    less = [
        before.peak_bytes - after.peak_bytes
        for before, after in zip(held.points, simulate(found, plan.choices).points, strict=True)
    ]
    assert set(less) == {0, found.boundary_bytes[first]}
    for make in (Bent, Gated, Shown, Stored):
        case = stack(layers=4)
        other = Case(make(case.model).train(), case.batch, first_squared)
        assert profile(other, other.model, allow=ALL).passing == (), make.__name__


# ------------------------------------------------------------------------------------------ things go wrong


def test_an_outer_hook_keeps_everything_and_is_said() -> None:
    case = stack(layers=4)
    expected = step(case, same_model(case))

    def outer() -> Any:
        return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)

    with remat.apply(case.model, sending(profile_of_stack())) as handle:
        assert_same(expected, step(case, case.model, context=outer))
        assert handle.engine is not None
        assert handle.engine.counts.sent_bytes == 0
        assert all("another saved-tensor hook" in region.counts.why for region in handle.regions)


def test_a_graph_that_holds_other_bytes_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    case = stack(layers=4)
    expected = step(case, same_model(case))
    with remat.apply(case.model, sending(profile_of_stack())) as handle:
        for region in handle.regions:
            for key, variant in region.variants.items():
                assert variant.outgoing is not None
                region.variants[key] = replace(variant, outgoing=replace(variant.outgoing, nbytes=1))
        for steps in (1, 2):  # nor is it taken for right the next time
            case.model.zero_grad(set_to_none=True)
            assert_same(expected, step(case, case.model))
            assert all("and not 1 as planned" in region.counts.why for region in handle.regions)
            assert all(region.counts.fallbacks == steps for region in handle.regions)


def test_a_host_without_memory_degrades_to_recompute_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, found = stack(layers=4), profile_of_stack()
    expected = step(case, same_model(case))
    monkeypatch.setattr("remat.run.offload.available_host_bytes", lambda: 1000)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handle = remat.apply(case.model, sending(found))
    assert [str(w.message) for w in caught if "the host refused" in str(w.message)]
    with handle:
        assert handle.engine is None
        assert not host_bytes(found, handle.plan.choices)
        assert_same(expected, step(case, case.model))


def test_copies_that_fail_keep_the_tensor() -> None:
    case, plan = stack(layers=4), sending(profile_of_stack())
    expected = step(case, same_model(case))
    with remat.apply(case.model, plan) as handle:
        link = SimulatedLink(fails=lambda direction, number: direction is Direction.OUT and number % 3 == 0)
        limit = window_bytes(plan.profile, plan.choices)
        engine = Engine("cpu", in_flight_limit_bytes=limit, link=link)
        for region in handle.regions:
            region.engine = engine
        assert_same(expected, step(case, case.model))
        assert engine.counts.failures > 0
        assert engine.counts.kept_bytes > 0


def test_many_steps_leak_nothing() -> None:
    case = stack(layers=4)
    with remat.apply(case.model, sending(profile_of_stack())) as handle:
        assert handle.engine is not None
        levels = set()
        for _ in range(6):
            case.model.zero_grad(set_to_none=True)
            case.run().backward()
            counts = handle.engine.counts
            levels.add((counts.pinned_bytes, counts.used_bytes, counts.in_flight_bytes, counts.inbound_bytes))
        assert len(levels) == 1
        assert next(iter(levels))[1] == 0


# ------------------------------------------------------------------------------------------------- inductor


def _same_sets(plan: Plan) -> list[int]:
    """The entries that keep what this plan's keep, and send nothing."""
    choices = []
    for number, call in enumerate(plan.profile.calls):
        menu, recipe = plan.profile.kinds[call.kind].menu, plan.entry(number).recipe
        assert recipe is not None
        same = (
            i for i, e in enumerate(menu) if not e.host_bytes and e.recipe and e.recipe.kept == recipe.kept
        )
        choices.append(next(same))
    return choices


@needs_compiler
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_inductor_gives_what_it_gives_without_the_host(dropout: float, monkeypatch: Any) -> None:
    """The same compiled code, so the same bits, masks included."""
    monkeypatch.setattr("remat.compiling._VARIANTS", 2)
    torch.manual_seed(0)
    case = Case(Mlps(4, dropout).train(), torch.randn(512, 16), squared)
    found = profile(case, case.model, allow=ALL, compile=True)
    plan = sending(found)
    without = make_plan(found, _same_sets(plan), 1 << 40, strategy="by hand")
    results = []
    for each in (without, plan):
        case.model.zero_grad(set_to_none=True)
        with remat.apply(case.model, each) as handle:
            results.append(step(case, case.model))
            assert not any(region.counts.fallbacks for region in handle.regions)
            sent = 0 if handle.engine is None else handle.engine.counts.sent_bytes
            assert sent == host_bytes(found, each.choices)
    assert_same(*results)


@needs_compiler
def test_inductor_writes_into_what_came_back_and_nothing_else() -> None:
    """Backward may use a saved tensor's memory for its own results. What others hold must stay as it is."""
    torch.manual_seed(SEED)
    block = MlpBlock(16, dropout=0.0).train()
    x = torch.randn(64, 16, requires_grad=True)
    given = x * 1.0
    before = given.detach().clone()
    output = torch.compile(block, fullgraph=True)(given)
    assert compiled_node(tensors(output), []) is not None
    output.square().sum().backward()
    assert torch.equal(given, before)
