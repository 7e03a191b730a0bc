"""One call of a region, written down: what a value is, what can be replayed, what is found again at run time;
and that capture leaves no trace."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models import ZOO, Case
from planning import (
    LEAST,
    assert_planned_equals_plain,
    fallbacks,
    recipe_at,
    regions_at,
    survey_of,
    train,
)
from remat.errors import CaptureError
from remat.records import RegionGraph, Role
from remat.run.quiet import quiet
from remat.run.recipe import compile_recipe
from remat.trace import fold
from remat.trace.capture import capture
from remat.trace.discover import find_blocks
from remat.trace.fake import faking, new_mode, without_memory
from remat.trace.price import price
from remat.trace.selfcheck import checked
from remat.trace.survey import difference, visiting
from test_recipe_families import FAMILIES


class Fn(nn.Module):
    def __init__(self, fn: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.fn = fn
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(self, *args, **kwargs)


def graph_of(fn: Callable[..., Any], *inputs: Tensor, **parts: Any) -> RegionGraph:
    module = Fn(fn, **parts)
    return capture(module.forward, tuple(t * 1 for t in inputs), {}, module).graph


def leaf(*shape: int) -> Tensor:
    torch.manual_seed(2)
    return torch.randn(*(shape or (4, 6)), requires_grad=True)


def names(graph: RegionGraph) -> list[str]:
    return [op.name.split(".")[1] for op in graph.ops]


# ------------------------------------------------------------------------------------------------- identity


def test_a_write_makes_a_new_value() -> None:
    graph = graph_of(lambda m, x: (x * 2).add_(1).tanh(), leaf())
    before, after = graph.ops[0].outputs[0], graph.ops[1].written[0][1]
    assert before != after
    assert graph.values[before].storage == graph.values[after].storage
    assert (graph.values[before].epoch, graph.values[after].epoch) == (0, 1)


def test_a_write_to_a_slice_makes_a_new_value_of_everything_in_the_storage() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = x * 2
        y[:, :2].add_(1)
        return y.sin()

    graph = graph_of(run, leaf())
    sin = next(op for op in graph.ops if op.name == "aten.sin.default")
    value = graph.values[sin.inputs[0]]
    assert value.epoch == 1
    assert value.producer is None, "no single operation gives the whole after a write to a part"


def test_only_the_last_epoch_is_held() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = x * 2
        z = y.sum()
        y.add_(1)
        return y.sin() * z

    graph = graph_of(run, leaf())
    held = {
        v.epoch: v.held for v in graph.values if v.storage == graph.values[graph.ops[0].outputs[0]].storage
    }
    assert held == {0: False, 1: True}


def test_freed_memory_that_is_used_again_is_another_storage() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        for _ in range(20):
            x = x + 1
        return x.sin()

    module = Fn(run)
    graph = capture(module.forward, (leaf() * 1,), {}, module, hold=False).graph
    assert len({graph.values[op.outputs[0]].storage for op in graph.ops}) == len(graph.ops) == 21


def test_detach_and_alias_are_the_same_value() -> None:
    graph = graph_of(lambda m, x: (x.sin().detach() * x).view(-1).view(4, 6).tanh(), leaf())
    assert "detach" not in names(graph)


def test_conjugated_and_plain_are_different_values() -> None:
    z = torch.randn(4, 4, dtype=torch.complex64, requires_grad=True)
    graph = graph_of(lambda m, z: (z.conj() * z).abs(), z)
    assert {value.bits for value in graph.values} >= {0, 1}


# ---------------------------------------------------------------------------------------- what is replayable


@pytest.mark.parametrize(
    ("run", "operation", "reason"),
    [
        (lambda m, x: F.dropout(x, 0.5), "bernoulli_", "random"),
        (lambda m, x: x * torch.rand(6), "rand", "random"),
        (lambda m, x: x * torch.empty(6), "empty", "uninitialised"),
        (lambda m, x: (x + 0).t_() * 2, "t_", "changes the shape"),
        (lambda m, x: x[x.detach().nonzero()[:, 0]] * 2, "nonzero", "depends on data"),
        (lambda m, x: x * torch.rand(6, generator=torch.Generator()), "rand", "Generator"),
        (lambda m, x: torch._foreach_add_([x + 0], 1.0) or x * 1, "_foreach_add_", "list of tensors"),
    ],
)
def test_not_replayable(run: Callable[..., Any], operation: str, reason: str) -> None:
    graph = graph_of(run, leaf())
    found = [op for op in graph.ops if op.name.split(".")[1] == operation]
    assert found, names(graph)
    assert not any(op.replayable for op in found)
    assert all(reason in op.reason for op in found)


def test_attention_is_replayable_only_without_dropout() -> None:
    def run(p: float) -> Callable[..., Any]:
        return lambda m, x: F.scaled_dot_product_attention(x, x, x, dropout_p=p)

    plain, random_ = graph_of(run(0.0), leaf(1, 2, 4, 8)), graph_of(run(0.5), leaf(1, 2, 4, 8))
    assert all(op.replayable for op in plain.ops)
    assert not all(op.replayable for op in random_.ops)


def test_the_self_check_finds_an_operation_that_does_not_repeat() -> None:
    """Custom operators need not say that they are random, or that they write."""
    state = [0]
    library = torch.library.Library("remat_test", "FRAGMENT")
    library.define("counts(Tensor x) -> Tensor")
    library.define("writes(Tensor x) -> Tensor")

    def counts(x: Tensor) -> Tensor:
        state[0] += 1
        return x + state[0]

    def writes(x: Tensor) -> Tensor:
        x.mul_(2)
        return x + 1

    library.impl("counts", counts, "CompositeExplicitAutograd")
    library.impl("writes", writes, "CompositeExplicitAutograd")

    def run(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            a = torch.ops.remat_test.counts(x)
            b = torch.ops.remat_test.writes(x * 3)
        return (x * a).sin() * b

    module = Fn(run)
    graph = checked(capture(module.forward, (leaf() * 1,), {}, module)).graph
    ops = {op.name: op for op in graph.ops}
    assert graph.values[ops["remat_test.counts.default"].outputs[0]].producer is None
    assert "without saying so" in ops["remat_test.writes.default"].reason


def test_batch_norm_is_replayed_without_its_statistics() -> None:
    graph = graph_of(lambda m, x: m.norm(x).sin(), leaf(), norm=nn.BatchNorm1d(6))
    (op,) = [op for op in graph.ops if op.name == "aten.native_batch_norm.default"]
    assert op.args[3:5] == (None, None)
    assert not any(v.free for v in graph.values if v.parameter in ("norm.running_mean", "norm.running_var"))


# ---------------------------------------------------------------------------- parameters, inputs, the outside


def test_parameters_are_free_in_any_view() -> None:
    w = nn.Parameter(torch.randn(6, 6))
    graph = graph_of(lambda m, x: x @ m.w.t() @ m.w[:, :3], leaf(), w=w)
    views = [v for v in graph.values if graph.storages[v.storage].role is Role.PARAMETER]
    assert len(views) == 3
    assert all(v.free for v in views)
    assert [v.parameter for v in views] == ["w", "", ""]


def test_a_view_of_a_parameter_made_outside_is_not_free() -> None:
    """Nobody can look it up by name, and after a swap of the parameter it is something else."""
    w = nn.Parameter(torch.randn(6))
    outside = w.detach()[1:5]
    graph = graph_of(lambda m, x: x * outside.sum() * outside[:2].sum(), leaf(), w=w)
    assert [v.free for v in graph.values if graph.storages[v.storage].role is Role.PARAMETER] == [
        True,
        False,
        False,
    ]


def test_a_buffer_that_the_region_replaces_is_not_free() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = x * m.state
        m.state = m.state + 1
        return y.sin()

    module = Fn(run, state=torch.ones(6))
    before = module.state
    graph = capture(module.forward, (leaf() * 1,), {}, module).graph
    assert not any(value.free for value in graph.values)
    assert module.state is before, "capture leaves no trace"
    assert torch.equal(before, torch.ones(6))


def test_foreign_tensors_are_barriers() -> None:
    table = torch.randn(6)
    graph = graph_of(lambda m, x: (x * table.exp()).sin() * torch.tensor(2.0), leaf())
    foreign = [i for i, v in enumerate(graph.values) if graph.storages[v.storage].role is Role.FOREIGN]
    assert foreign
    assert all(graph.values[i].producer is None for i in foreign)


def test_the_walk_stops_where_the_region_began() -> None:
    """A closure with a graph of its own: those nodes are not the region's."""
    outer = leaf(6)
    side = outer.sin().exp().tanh()
    graph = graph_of(lambda m, x: x * side, leaf())
    assert [name for name, _, _ in graph.nodes] == ["MulBackward0"]


def test_an_input_that_is_written_does_not_hide_the_nodes_below_it() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = x * 2
        x.add_(1)
        return y * x.cos()

    graph = graph_of(run, leaf())
    assert sorted(name for name, _, _ in graph.nodes) == [
        "AddBackward0",
        "CosBackward0",
        "MulBackward0",
        "MulBackward0",
    ]


def test_outputs_are_known_by_their_place() -> None:
    graph = graph_of(lambda m, x: (x.argmax(), x.sin(), None, x.detach(), x.cos()), leaf())
    assert [(name, parent) for name, parent, _ in graph.nodes] == [("SinBackward0", -2), ("CosBackward0", -4)]


def test_a_submodule_called_twice_is_two_calls() -> None:
    graph = graph_of(lambda m, x: m.act(m.act(x) + 1) + 1, leaf(), act=Fn(lambda m, x: x + 2))
    outputs = [s for s in graph.sources if s.module == "act" and s.kind == "module_output"]
    assert sorted(s.call for s in outputs) == [0, 1]


# ------------------------------------------------------------------------------------------ refusals, numbers


def test_sparse_inputs_are_refused() -> None:
    module = Fn(lambda m, s, x: torch.sparse.mm(s, x))
    with pytest.raises(CaptureError, match="sparse"):
        capture(module.forward, (torch.eye(4).to_sparse(), leaf()), {}, module)


@pytest.mark.parametrize(
    "run",
    [
        lambda m, x, n: x * m.w.norm().item(),
        lambda m, x, n: x * float(m.w.detach().sum()),
        lambda m, x, n: x[: int(n.max())] * 2,
        lambda m, x, n: x * m.scale.item(),
    ],
)
def test_numbers_of_weights_and_integers_are_refused(run: Callable[..., Any]) -> None:
    module = Fn(run, w=nn.Parameter(torch.randn(6)), scale=torch.ones(()))
    with pytest.raises(
        CaptureError, match=r"number from the weights or from integers .* test_capture\.py:\d+"
    ):
        capture(module.forward, (leaf() * 1, torch.tensor([2, 3])), {}, module)


@pytest.mark.parametrize(
    ("run", "differ"),
    [
        (lambda m, x: x * x.detach().max().item(), True),
        (lambda m, x: x * x.detach().norm().item(), True),
        (lambda m, x: x * torch.rand(()).item(), True),
        (lambda m, x: x * 2 if bool((x > 99).any()) else x * 3, False),
        (lambda m, x: x[x.detach() > 0.5] * 2, True),
    ],
)
def test_a_second_capture_on_other_data(run: Callable[..., Any], differ: bool) -> None:
    module, x = Fn(run), leaf()
    first = capture(module.forward, (x * 1,), {}, module).graph
    second = capture(module.forward, (x * 1,), {}, module, hold=False, reseed=1).graph
    assert (first != second) is differ
    if differ:
        assert re.search(r"test_capture\.py:\d+|the autograd graph changes", difference(first, second))


# ------------------------------------------------------------------------------------------------- no trace


@pytest.mark.parametrize("name", sorted(ZOO))
def test_capture_leaves_no_trace(name: str) -> None:
    case = ZOO[name]()
    before = copy.deepcopy(case.model.state_dict())
    flags = [module.training for module in case.model.modules()]
    hooks = [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in case.model.modules()]
    torch.manual_seed(5)
    random.seed(5)
    expected = torch.rand(3), random.random()
    torch.manual_seed(5)
    random.seed(5)
    survey_of(case.model, case.run)
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]
    after = case.model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert all(parameter.grad is None for parameter in case.model.parameters())
    assert [module.training for module in case.model.modules()] == flags
    assert [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in case.model.modules()] == hooks
    assert not any("forward" in module.__dict__ for module in case.model.modules())


# ------------------------------------------------------------------------------------------- compiling it


def test_equal_blocks_share_one_capture() -> None:
    case = ZOO["llama"]()
    found = survey_of(case.model, case.run)
    assert [s.species for s in found.sightings] == [0, 0, 0]


def test_a_program_says_what_it_keeps() -> None:
    case = ZOO["llama"]()
    (species,) = survey_of(case.model, case.run).species
    assert species.graph is not None
    program = compile_recipe(species.graph, recipe_at(species.graph, LEAST), torch.device("cpu"))
    kinds = ("parameter", "input", "module_input", "module_output", "_raw_saved")
    assert all(text.startswith(kinds) for text in program.kept)
    assert all(slot.source.startswith("modeling_llama.py:") or slot.source for slot in program.slots)
    covered = [slot for slot in program.slots if slot.checked]
    assert 0 < len(covered) < len(program.slots), "the end of a chain answers for the chain"


# ------------------------------------------------------------------------------ fake tensors, real tensors

# Families whose capture differs between fake and real tensors, and in what.
_ONE_HEAD = "stride of a dimension of size one"  # one key-value head: real and fake kernels disagree
DIFFERS_ON_FAKE: dict[str, str] = {
    **dict.fromkeys(["llama", "paligemma", "gemma", "gemma2", "lora_peft", "autocast"], _ONE_HEAD),
    "lstm": "storage of",  # the workspace of the fused kernel has no size
    "wan": "aten.mul.Tensor or aten.slice.Tensor",  # views are made again after a write to a view
}
CANNOT_BE_FAKED: dict[str, str] = {
    "mixtral": "Expected inputs of BF16 type",  # the grouped product has no fake kernel for fp32
    "whisper": "_local_scalar_dense",  # layer drop reads a random number in Python, outside of the blocks
}


def graphs_of(case: Case, model: nn.Module, batch: Any) -> list[Any]:
    """Every region's graph in the order of the calls, or why there is none."""
    graphs: list[Any] = []

    def visit(name: str, tower: str, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        try:
            graphs.append(capture(forward, args, kwargs, module, hold=False).graph)
        except CaptureError as error:
            graphs.append(str(error))
        return forward(*args, **kwargs)

    with quiet(model), visiting(model, find_blocks(model), visit):
        Case(model, batch, case.loss).run()
    return graphs


def first_difference(a: Any, b: Any) -> str:
    if isinstance(a, str) or isinstance(b, str):
        return f"{a} | {b}"
    if a.ops != b.ops:
        return difference(a, b)
    for ours, theirs in zip(a.values, b.values, strict=False):
        if ours != theirs and replace(ours, stride=theirs.stride) == theirs:
            sizes = {n for n, s, t in zip(ours.shape, ours.stride, theirs.stride, strict=True) if s != t}
            return "stride of a dimension of size one" if sizes == {1} else f"stride {ours} or {theirs}"
    for ours, theirs in zip(a.storages, b.storages, strict=False):
        if ours != theirs:
            return f"storage of {ours.nbytes} or {theirs.nbytes} bytes"
    return difference(a, b)


@pytest.mark.parametrize("name", FAMILIES)
def test_fake_tensors_give_the_same_capture(name: str) -> None:
    case = FAMILIES[name]()
    torch.manual_seed(1)
    real = graphs_of(case, copy.deepcopy(case.model), case.batch)
    mode = new_mode()
    with without_memory(case.model, mode), faking(mode, accelerator=False):
        if name in CANNOT_BE_FAKED:
            with pytest.raises(Exception, match=CANNOT_BE_FAKED[name]):
                graphs_of(case, case.model, case.batch)
            return
        fake = graphs_of(case, case.model, case.batch)
    assert len(real) == len(fake)
    different = [
        f"region {i}: {first_difference(a, b)}"
        for i, (a, b) in enumerate(zip(real, fake, strict=True))
        if a != b
    ]
    if name in DIFFERS_ON_FAKE:
        assert different
        assert all(DIFFERS_ON_FAKE[name] in text for text in different), different
    else:
        assert not different, different


# ---------------------------------------------------------------------------------------------------- folds


def test_folds_follow_those_of_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which form is faster changes with the size, and with the noise of the clock; a recipe holds for all."""
    monkeypatch.setattr(fold, "_is_on_accelerator", lambda _: True)

    def norm(module: Any, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * wide.pow(2).mean(-1, keepdim=True).rsqrt()).to(torch.bfloat16) * 2

    def graph(rows: int, seconds: float, like: RegionGraph | None = None) -> RegionGraph:
        monkeypatch.setattr(fold, "seconds_of", lambda capture, op: seconds)
        module = Fn(norm)
        x = torch.randn(rows, 8, dtype=torch.bfloat16, requires_grad=True)
        return fold.folded(price(checked(capture(module.forward, (x,), {}, module))), like).graph

    plain, every = graph(4, 1e9), graph(4, 0.0)
    assert "aten.mul.out" not in [op.name for op in plain.ops]
    assert [op.name for op in every.ops].count("aten.mul.out") == 2
    for like in (plain, every):
        for seconds in (0.0, 1e9):
            found = graph(6, seconds, like)
            assert [(op.name, op.inputs) for op in found.ops] == [(op.name, op.inputs) for op in like.ops]


@pytest.mark.parametrize("off_by", [0.0, 1e-3])
def test_a_batch_norm_is_folded_onto_its_statistics_only_where_that_gives_its_bits(
    off_by: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host has no such operation: it is lent one, right or slightly wrong. What the norm gave is written
    over by the relu, so that it is compared with the norm run again."""
    given: list[Tensor] = []

    def from_statistics(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, invstd: Tensor, eps: float) -> Tensor:
        made, *found = torch.native_batch_norm(x, w, b, None, None, True, 0.0, eps)
        assert all(map(torch.equal, found, (mean, invstd)))
        given.append(mean)
        return made + off_by

    library = torch.library.Library("aten", "IMPL")
    library.impl("batch_norm_elemt", from_statistics, "CPU")
    try:
        monkeypatch.setattr(fold, "_is_on_accelerator", lambda _: True)
        monkeypatch.setattr(fold, "seconds_of", lambda capture, op: 1e-7)
        module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Linear(6, 6))
        x = torch.randn(4, 6, requires_grad=True)
        plain = price(checked(capture(module.forward, (x,), {}, module)))
        graph = fold.folded(plain).graph
        assert given
        if off_by:
            assert graph == plain.graph
            return
        index = names(graph).index("batch_norm_elemt")
        assert graph.forward_seconds == pytest.approx(plain.graph.forward_seconds)
        assert graph.ops[index].seconds == 1e-7
        statistics = plain.graph.ops[index].outputs[1:]
        assert [graph.values[v].producer for v in statistics] == [None, None]
        recipe = recipe_at(graph, LEAST)
        assert index in recipe.replayed
        assert {graph.values[v].storage for v in statistics} <= set(recipe.kept), "nothing finds them again"
        given.clear()
        case = ZOO["resnet"]()
        expected = train(copy.deepcopy(case.model), case.run)
        planned = regions_at(survey_of(case.model, case.run), LEAST)
        given.clear()
        assert_planned_equals_plain(case.model, case.run, planned, expected)
        assert given, "replays took them"
        assert not fallbacks(planned)
    finally:
        library._destroy()
