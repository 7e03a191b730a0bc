"""compile="whole": the model as one compiled graph, in which each block has the saved set planned for it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo import config as dynamo_config

import remat
from models import Case, squared
from reference import assert_same, step
from remat.check.bench import Bench
from remat.check.regions import GradientGap
from remat.compiling import _Measured, _note, internal_bytes
from remat.errors import InputError
from remat.planner.schedule import make_plan
from remat.records import Mode, Plan
from remat.run import onegraph
from remat.run.compiled import saved_bytes
from remat.run.wrap import wrapped
from test_compiled import (
    COMPILES,
    Stack,
    _bert,
    _gpt2,
    _llama,
    _qwen2,
    _vit,
    counted_peak,
    needs_compiler,
    stack,
)

pytestmark = COMPILES
WHOLE = "whole+aot_eager"


def profile(case: Case, model: nn.Module) -> remat.Profile:
    return remat.profile(model, case.batch, loss=case.loss, compile=WHOLE)


def plan_of(found: remat.Profile, sets: list[int]) -> Plan:
    """Layer i runs with saved set `sets[i]`, 0 being the largest."""
    menu = found.kinds[0].menu
    entries = [i for i, entry in enumerate(menu) if entry.mode is Mode.COMPILED]
    return make_plan(found, [entries[i] for i in sets], 1 << 40, strategy="by hand")


def held(case: Case, model: nn.Module) -> int:
    output = model(**case.batch) if isinstance(case.batch, dict) else model(case.batch)
    found = saved_bytes(model, case.batch, output)
    assert found is not None, "the graph of the whole model did not run"
    return found


@pytest.mark.parametrize(
    "make",
    [
        _llama,
        _gpt2,
        pytest.param(_bert, marks=pytest.mark.slow),
        pytest.param(_qwen2, marks=pytest.mark.slow),
        pytest.param(_vit, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_the_untouched_model(make: Callable[[], Case]) -> None:
    """To the bit, with dropout in GPT-2 and BERT."""
    case = make()
    case.model.train()
    plain = copy.deepcopy(case.model)
    with remat.fit(case.model, case.batch, loss=case.loss, activations=0.6, compile=WHOLE) as handle:
        assert handle.plan.profile.one_graph
        (row,) = handle.status().rows
        assert (row.name, row.mode, row.fallbacks) == ("(the whole model)", "compiled", 0)
        assert handle.verification is not None
        assert handle.verification.ok
        random = any(op.reason for kind in handle.plan.profile.kinds for op in kind.graph.ops)
        assert ("compiled one by one" in handle.verification.how) != random
        assert ("was not compared" in str(handle.verification)) == random
        assert handle.verification.bitwise != random
        assert handle.measured is not None
        assert handle.measured.above_bytes <= handle.plan.budget_bytes
        assert_same(step(case, plain), step(case, case.model))
    assert wrapped(case.model) is None
    assert "forward" not in case.model.__dict__


def test_what_is_saved_differs_by_what_the_sets_differ() -> None:
    """Byte for byte: so the blocks, and their operations, are found in the graph of the model."""
    case = stack(layers=4)
    found = profile(case, case.model)
    kind = found.kinds[0]
    assert kind.graph is not None
    sizes = [internal_bytes(kind.graph, e.recipe) for e in kind.menu if e.mode is Mode.COMPILED and e.recipe]
    assert sizes[0] > sizes[-1]

    def whole(sets: list[int]) -> int:
        planned = replace(plan_of(found, sets), budget_bytes=0)  # to spare, for the compiler's own choice
        with remat.apply(case.model, planned):
            return held(case, case.model)

    last = len(sizes) - 1
    least = whole([last] * 4)
    for sets in ([0, last, last, last], [last, 0, 1, last], [1, 1, 0, last]):
        assert whole(sets) - least == sum(sizes[i] - sizes[last] for i in sets), sets


def test_dropout_is_that_of_the_same_graph_with_other_sets() -> None:
    case = stack(layers=3, dropout=0.3)
    found = profile(case, case.model)
    last = sum(entry.mode is Mode.COMPILED for entry in found.kinds[0].menu) - 1
    models = [copy.deepcopy(case.model) for _ in range(3)]
    with remat.apply(models[0], plan_of(found, [0, 0, 0])):
        expected = step(case, models[0])
    with remat.apply(models[1], plan_of(found, [last, 0, last])):
        assert_same(expected, step(case, models[1]))
    assert_same(step(case, models[2]), expected)


class Breaks(nn.Module):
    """The compiler cannot follow what happens after the blocks; the model lies below another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Stack(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        torch._dynamo.graph_break()
        return y * y.detach().mean()


def test_a_graph_that_breaks_behind_the_blocks() -> None:
    torch.manual_seed(0)
    case = Case(Breaks().train(), torch.randn(4, 32, 8), squared)
    plain = copy.deepcopy(case.model)
    with remat.fit(case.model, case.batch, loss=squared, activations=0.5, compile=WHOLE) as handle:
        assert handle.plan.profile.one_graph, handle.plan.profile.notes
        assert_same(step(case, plain), step(case, case.model))


def test_blocks_that_are_not_found_are_compiled_one_by_one(monkeypatch: Any) -> None:
    monkeypatch.setattr(onegraph, "_module_path", lambda text: ("", False))
    case = stack(layers=4)
    plain = copy.deepcopy(case.model)
    with remat.fit(case.model, case.batch, loss=squared, activations=0.5, compile=WHOLE) as handle:
        assert not handle.plan.profile.one_graph
        assert any("one by one and not in one graph: layers.0" in note for note in handle.plan.profile.notes)
        assert len(handle.status().rows) == 4
        assert_same(step(case, plain), step(case, case.model))


def test_blocks_are_sought_anew_in_the_forward_of_another_model_of_this_kind() -> None:
    """The graph of a model whose forward was replaced is not that of its class."""
    case = stack(layers=5)
    other = copy.deepcopy(case.model)
    with remat.fit(case.model, case.batch, loss=squared, activations=0.5, compile=WHOLE) as handle:
        assert handle.plan.profile.one_graph
    own = other.forward
    other.forward = lambda x: own(x)
    with remat.fit(other, case.batch, loss=squared, activations=0.5, compile=WHOLE) as handle:
        assert any("one by one" in note for note in handle.plan.profile.notes)


class Normed(nn.Module):
    """Its running statistics are written to in forward: backward cannot compute again what reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.norm(self.up(x))))


@pytest.mark.parametrize(("share", "whole"), [(0.8, True), (0.6, False)])
def test_what_reads_a_tensor_that_forward_writes_to_is_saved(share: float, whole: bool) -> None:
    """Where that is over the budget, blocks are compiled one by one."""
    torch.manual_seed(0)
    case = Case(nn.Sequential(*(Normed() for _ in range(4))).train(), torch.randn(256, 32), squared)
    plain = copy.deepcopy(case.model)
    found = profile(case, case.model)
    full = next(i for i, entry in enumerate(found.kinds[0].menu) if entry.mode is Mode.FULL)
    with remat.apply(case.model, make_plan(found, [full] * 4, 1 << 40, strategy="by hand")):
        assert_same(step(case, plain), step(case, case.model))
    with remat.fit(case.model, case.batch, loss=squared, activations=share, compile=WHOLE) as handle:
        assert handle.plan.profile.one_graph is whole, handle.plan.profile.notes
        for model in (plain, case.model):
            model.zero_grad()
        assert_same(step(case, plain), step(case, case.model))


def test_a_saved_plan_and_a_copy_of_the_model(tmp_path: Any) -> None:
    case = stack(layers=3)
    plain = copy.deepcopy(case.model)
    path = plan_of(profile(case, case.model), [1, 0, 1]).save(tmp_path / "plan.json")
    with remat.apply(case.model, remat.Plan.load(path)):
        twin = copy.deepcopy(case.model)
        expected = step(case, plain)
        assert_same(expected, step(case, case.model))
        assert_same(expected, step(case, twin))


def test_other_lengths_and_evaluation() -> None:
    case = stack(layers=3)
    plain = copy.deepcopy(case.model)
    with remat.apply(case.model, plan_of(profile(case, case.model), [1, 1, 0])):
        for length in (32, 17, 21):
            other = Case(case.model, torch.randn(2, length, 8), squared)
            models = plain, case.model
            for model in models:
                model.zero_grad()
            assert_same(step(other, plain), step(other, case.model))
        with torch.no_grad():
            assert torch.equal(plain(case.batch), case.model(case.batch))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allow": ("keep", "recompute", "offload")}, "one graph, where offload cannot be"),
        ({"compile": "whole+magic"}, "one of 'inductor', 'aot_eager', 'whole'"),
        ({"compile": "whole+whole"}, "one of 'inductor', 'aot_eager', 'whole'"),
        ({"compile": 3}, "one of 'inductor', 'aot_eager', 'whole'"),
        ({"adaptive": True}, "adaptive plans do not compile"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    case = stack()
    with pytest.raises(InputError, match=message):
        remat.fit(case.model, case.batch, loss=squared, activations=0.5, **{"compile": WHOLE, **options})
    assert wrapped(case.model) is None


def test_where_the_device_waits_the_report_names_it() -> None:
    case = stack(layers=3)
    kind = profile(case, case.model).kinds[0]
    recipe = next(entry.recipe for entry in kind.menu if entry.mode is Mode.COMPILED)
    assert kind.graph is not None
    assert recipe is not None
    for eager, host_seconds, device, said in (
        (0.9, 0.9, "cuda", True), (0.5, 0.9, "cuda", False),
        (0.9, 0.5, "cuda", False), (0.9, 0.9, "cpu", False),
    ):  # fmt: skip
        keep = Bench(0, 0, 0, seconds=1.0, host_seconds=eager)
        alone = Bench(0, 0, 0, seconds=1.0, host_seconds=host_seconds)
        measured = _Measured(recipe, alone, 2.0, GradientGap(True, True), [], 0)
        note = _note(kind.graph, [measured], keep, [], torch.device(device))
        assert ('compile="whole" may be faster' in note) == said


@pytest.mark.parametrize(
    ("text", "path", "rooted"),
    [
        ("L['bound'][0].model.layers.3.mlp", "model.layers.3.mlp", True),
        ("L['bound'][0].model.layers.slice(None, 12, None)._modules['3']", "model.layers.3", True),
        ("L['bound'][0]._modules['model']._modules['layers']._modules['3']", "model.layers.3", True),
        (
            "L['bound'][0].__dict__['_modules']['inner'].h.3",
            "inner.h.3",
            True,
        ),  # its attributes are written to
        ("getattr(L['bound'][0].model.layers, '3').mlp", "model.layers.3.mlp", True),
        ("getattr(getattr(L['bound'][0].stages, '1').layers, '3')", "stages.1.layers.3", True),
        ("dict.__getitem__(L['bound'][0]._modules, 'h')[3]", "h.3", True),
        ("list.__getitem__(L['self'].layers, 3)", "layers.3", False),
        ("L['self'].h[3]", "h.3", False),
        ('L["self"].h["3"].mlp', "h.3.mlp", False),
        ("L['fn'].__self__.h.3", "h.3", False),
        ("L['args'][0].h.3", "h.3", False),
        ("L['self']", "", False),
        ("L['bound'][0]", "", False),
        ("G['other'].h.3", "", False),
        ("L['x'].h.3", "", False),
        (
            "L__self___model_layers_3",
            "",
            False,
        ),  # the compiler's own name of it, from which no path can be had
        ("list(dict.values(L['self']._modules))[3].mlp", "", False),
    ],
)
def test_where_the_compiler_found_a_module(text: str, path: str, rooted: bool) -> None:
    assert onegraph._module_path(text) == (path, rooted)


def test_a_path_that_several_blocks_end_with_names_none() -> None:
    assert onegraph._named("h.0", False, {"a.h.0", "a.h.1"}) == "a.h.0"
    assert onegraph._named("h.0", False, {"a.h.0", "b.h.0"}) == ""
    assert onegraph._named("h.0", False, {"h.0", "b.h.0"}) == ""
    assert onegraph._named("", False, {"a.h.0"}) == ""


def test_a_path_from_the_root_names_the_block_with_just_that_name() -> None:
    assert onegraph._named("h.0", True, {"h.0", "b.h.0"}) == "h.0"
    assert onegraph._named("h.0", True, {"a.h.0", "a.h.1"}) == ""


def test_entries_of_the_stack_of_modules_that_are_no_pairs_name_none() -> None:
    node = fx.Graph().placeholder("x")
    for stack_of in ({"k": ("L['bound'][0].h.0", nn.Linear)}, {"k": ["L['bound'][0].h.0"]}):
        node.meta["nn_module_stack"] = stack_of
        assert onegraph._block_of(node, {"h.0"}) == "h.0"
    for stack_of in ({"k": ()}, {"k": 3}, {"k": "L__self___h_0"}, {}, None):
        node.meta["nn_module_stack"] = stack_of
        assert onegraph._block_of(node, {"h.0"}) == ""


def stock_bytes(case: Case) -> int:
    """What torch.compile, splitting by its own choice, holds for backward."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition as split

    backend = aot_autograd(fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=split)
    model = copy.deepcopy(case.model)
    output = torch.compile(model, backend=backend)(case.batch)
    found = saved_bytes(model, case.batch, output)
    assert found is not None
    return found


def test_with_budget_to_spare_the_graph_is_the_compilers_own() -> None:
    """And without, it holds no more than planned."""
    case = stack(layers=4)
    found = profile(case, case.model)
    stock = stock_bytes(case)
    sizes = {}
    for budget in (1 << 40, 0):
        plan = replace(plan_of(found, [0] * 4), budget_bytes=budget)
        with remat.apply(case.model, plan):
            sizes[budget] = held(case, case.model)
    assert sizes[1 << 40] == stock
    assert sizes[0] <= stock
    plain = copy.deepcopy(case.model)
    with remat.apply(case.model, plan_of(found, [0, 1, 0, 1])):
        assert_same(step(case, plain), step(case, case.model))


@needs_compiler
def test_inductor() -> None:
    torch.manual_seed(0)
    case = Case(Stack(2).train(), torch.randn(4, 32, 8), squared)
    plain = copy.deepcopy(case.model)
    found = profile(case, case.model)
    kinds = tuple(replace(kind, compiler="inductor") for kind in found.kinds)  # its sets are not measured
    expected = step(case, plain)
    with remat.apply(case.model, plan_of(replace(found, kinds=kinds), [1, 0])):
        got = step(case, case.model)
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-3, atol=1e-5)


class Scaled(nn.Module):
    """The compiler takes an attribute of a module for a constant: each value is a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.times = Stack(4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.times += 1
        return self.inner(x) * (1 + self.times / 64)


@dynamo_config.patch(recompile_limit=4)
def test_a_model_that_is_compiled_too_often_recomputes_its_blocks() -> None:
    """Without fullgraph the compiler would run it as it is, which keeps everything."""
    torch.manual_seed(0)
    case = Case(Scaled().train(), torch.randn(4, 32, 8), squared)
    plain = copy.deepcopy(case.model)
    with remat.fit(case.model, case.batch, loss=squared, activations=0.5, compile=WHOLE) as handle:
        assert handle.plan.profile.one_graph, handle.plan.profile.notes
        case.model.times = 0
        for _ in range(7):
            for model in (plain, case.model):
                model.zero_grad()
            assert_same(step(case, plain), step(case, case.model))
        (row,) = handle.status().rows
        assert row.fallbacks == 1, row
        assert "compiled too often" in row.why
        assert counted_peak(case, case.model) <= handle.plan.budget_bytes
        assert counted_peak(case, plain) > handle.plan.budget_bytes
        assert wrapped(case.model.inner.layers[0]) is None
    assert not any(wrapped(module) for module in case.model.modules())


def test_a_step_that_never_calls_the_model_itself() -> None:
    torch.manual_seed(0)
    model, x = Breaks().train(), torch.randn(4, 32, 8)
    step_of_inner = lambda: model.inner(x).square().mean()  # noqa: E731
    with remat.fit(model, step=step_of_inner, activations=0.5, compile=WHOLE) as handle:
        assert any("does not call the model itself" in note for note in handle.plan.profile.notes)
        assert len(handle.status().rows) == 4
