"""What a planned region must not change: two forwards, retain_graph, double backward, threads, copies,
exceptions, other people's hooks, writes behind its back; and that it leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from models import ZOO, Case, MlpBlock, squared
from planning import LEAST, Planned, assert_equal, bits_of, fallbacks, on, regions_at, survey_of, train
from remat.errors import RecomputeError
from remat.records import Mode
from remat.run.holders import Frame
from remat.run.program import Program
from remat.run.wrap import bypass


class Block(nn.Module):
    """No dropout, so that one graph can be backwarded twice and replayed on other weights."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))).sin().exp())


def build(depth: int = 3) -> Case:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Case(nn.Sequential(*[Block() for _ in range(depth)]), torch.randn(5, 8), squared)


def planned_for(case: Case, level: float = LEAST, **options: Any) -> Planned:
    planned = regions_at(survey_of(case.model, case.run), level, **options)
    assert all(v.mode is Mode.RECIPE for r in planned.regions for v in r.variants.values()), planned.notes
    return planned


@pytest.fixture
def case() -> Case:
    return build()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        f"gradient of {name}": bits_of(p.grad) for name, p in model.named_parameters() if p.grad is not None
    }


# ------------------------------------------------------------------------------------------ ways to backward


def test_two_forwards_before_backward(case: Case) -> None:
    def run(model: nn.Module) -> dict[str, Tensor]:
        first, second = case.run(model), case.loss(model(case.batch * 2 + 1), None)
        first.backward()
        second.backward()
        return gradients(model)

    plain = run(copy.deepcopy(case.model))
    with on(case.model, planned := planned_for(case)):
        assert_equal(plain, run(case.model))
    assert not fallbacks(planned)


def test_backward_in_the_other_order(case: Case) -> None:
    def run(model: nn.Module) -> dict[str, Tensor]:
        first, second = case.run(model), case.loss(model(case.batch * 2 + 1), None)
        second.backward()
        first.backward()
        return gradients(model)

    plain = run(copy.deepcopy(case.model))
    with on(case.model, planned_for(case)):
        assert_equal(plain, run(case.model))


def test_retain_graph(case: Case) -> None:
    def run(model: nn.Module) -> dict[str, Tensor]:
        loss = case.run(model)
        loss.backward(retain_graph=True)
        once = gradients(model)
        model.zero_grad()
        loss.backward(retain_graph=True)
        assert_equal(once, gradients(model))
        loss.backward()
        return gradients(model)

    plain = run(copy.deepcopy(case.model))
    with on(case.model, planned_for(case)):
        assert_equal(plain, run(case.model))


def test_second_backward_of_a_freed_graph_raises_as_without_remat(case: Case) -> None:
    with on(case.model, planned_for(case)):
        loss = case.run()
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def test_double_backward(case: Case) -> None:
    def run(model: nn.Module) -> dict[str, Tensor]:
        x = case.batch.clone().requires_grad_()
        (slope,) = torch.autograd.grad(squared(model(x), None), x, create_graph=True)
        (slope.square().sum() + squared(model(x), None)).backward()
        return {**gradients(model), "gradient of x": bits_of(x.grad)}

    plain = run(copy.deepcopy(case.model))
    # the first block's input needs a gradient here: survey what will run
    x = case.batch.clone().requires_grad_()
    planned = regions_at(survey_of(case.model, lambda: squared(case.model(x), None)), LEAST)
    with on(case.model, planned):
        assert_equal(plain, run(case.model))
    assert not fallbacks(planned)


def test_gradient_of_the_input_alone(case: Case) -> None:
    case.model.requires_grad_(False)
    x = case.batch.clone().requires_grad_()

    def run(model: nn.Module) -> dict[str, Tensor]:
        return {"gradient of x": bits_of(torch.autograd.grad(squared(model(x), None), x)[0])}

    plain = run(copy.deepcopy(case.model))
    planned = regions_at(survey_of(case.model, lambda: squared(case.model(x), None)), LEAST)
    with on(case.model, planned):
        assert_equal(plain, run(case.model))
    assert not fallbacks(planned)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.trunk = nn.Linear(8, 8)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h = (self.trunk(pair[0]) + pair[1]).sin()
        return self.a(h).exp().tanh(), self.b(h).cos().sigmoid()


class TwoHeadStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TwoHeads() for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        pair = (x, x.flip(0))
        for layer in self.layers:
            pair = layer(pair)
        return pair


def test_gradient_of_part_of_the_outputs_and_then_the_rest() -> None:
    torch.manual_seed(0)
    case = Case(TwoHeadStack(), torch.randn(5, 8), squared)

    def run(model: nn.Module) -> dict[str, Tensor]:
        a, b = model(case.batch)
        parameters = list(model.parameters())
        first = torch.autograd.grad(a.sum(), parameters, retain_graph=True, allow_unused=True)
        second = torch.autograd.grad(b.square().sum(), parameters, allow_unused=True)
        both = {f"gradient 0 {i}": bits_of(g) for i, g in enumerate(first) if g is not None}
        return {**both, **{f"gradient 1 {i}": bits_of(g) for i, g in enumerate(second) if g is not None}}

    plain = run(copy.deepcopy(case.model))
    with on(case.model, planned := planned_for(case)):
        assert_equal(plain, run(case.model))
    assert not fallbacks(planned)


def test_batched_gradients(case: Case) -> None:
    x = case.batch.clone().requires_grad_()

    def run(model: nn.Module) -> dict[str, Tensor]:
        y = model(x)
        rows = torch.eye(40).view(40, 5, 8)[:7]
        return {"gradient": bits_of(torch.autograd.grad(y, x, rows, is_grads_batched=True)[0])}

    plain = run(copy.deepcopy(case.model))
    planned = regions_at(survey_of(case.model, lambda: squared(case.model(x), None)), LEAST)
    with on(case.model, planned):
        assert_equal(plain, run(case.model))


def test_accumulation_over_two_steps(case: Case) -> None:
    plain = copy.deepcopy(case.model)
    for _ in range(2):
        case.run(plain).backward()
    with on(case.model, planned_for(case)):
        for _ in range(2):
            case.run().backward()
    assert_equal(gradients(plain), gradients(case.model))


def test_backward_inside_autocast() -> None:
    case = ZOO["llama"]()

    def run(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return case.run(model)

    def step(model: nn.Module) -> dict[str, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            case.run(model).backward()
        return gradients(model)

    plain = step(copy.deepcopy(case.model))
    planned = regions_at(survey_of(case.model, lambda: run(case.model)), LEAST)
    with on(case.model, planned):
        assert_equal(plain, step(case.model))
    assert not fallbacks(planned)


# ------------------------------------------------------------------------------ functional transforms, copies


def test_functional_call_with_other_weights(case: Case) -> None:
    torch.manual_seed(1)
    other = {
        name: (p.detach() + torch.randn_like(p)).requires_grad_() for name, p in case.model.named_parameters()
    }

    def run(model: nn.Module) -> dict[str, Tensor]:
        loss = squared(torch.func.functional_call(model, other, (case.batch,)), None)
        found = torch.autograd.grad(loss, list(other.values()))
        return {f"gradient {i}": bits_of(g) for i, g in enumerate(found)}

    plain = run(copy.deepcopy(case.model))
    with on(case.model, planned := planned_for(case)):
        assert_equal(plain, run(case.model))
    assert not fallbacks(planned)


def test_weights_that_are_no_leaves(case: Case) -> None:
    """Meta-learning: the weights of this forward come out of a graph themselves."""

    def run(model: nn.Module) -> dict[str, Tensor]:
        fast = {name: p * 1.5 for name, p in model.named_parameters()}
        squared(torch.func.functional_call(model, fast, (case.batch,)), None).backward()
        return gradients(model)

    plain = run(copy.deepcopy(case.model))
    with on(case.model, planned_for(case)):
        assert_equal(plain, run(case.model))


def test_func_grad_and_vmap(case: Case) -> None:
    parameters = {name: p.detach() for name, p in case.model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return squared(torch.func.functional_call(case.model, weights, (x,)), None)

    def run() -> dict[str, Tensor]:
        whole = torch.func.grad(loss)(parameters, case.batch)
        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, case.batch)
        found = {f"gradient {k}": bits_of(g) for k, g in whole.items()}
        return {**found, **{f"gradient of each {k}": bits_of(g) for k, g in each.items()}}

    plain = run()
    with on(case.model, planned_for(case)):
        assert_equal(plain, run())


def twin_by_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def twin_by_torch_save(model: nn.Module) -> nn.Module:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


@pytest.mark.parametrize("twin", [copy.deepcopy, twin_by_pickle, twin_by_torch_save])
def test_a_copy_runs_its_own_weights(case: Case, twin: Any) -> None:
    def step(model: nn.Module) -> dict[str, Tensor]:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.25)
        case.run(model).backward()
        return gradients(model)

    plain = step(copy.deepcopy(case.model))
    before = {name: bits_of(p) for name, p in case.model.named_parameters()}
    with on(case.model, planned_for(case)):
        other = twin(case.model)
        found = step(other)
        assert_equal(plain, found)
        assert not gradients(case.model)
        assert all(torch.equal(bits_of(p), before[name]) for name, p in case.model.named_parameters())
        copied = [module.forward.around for module in other if hasattr(module.forward, "around")]
        assert [r.counts.calls for r in copied] == [1, 1, 1]
        assert not any(r.counts.fallbacks for r in copied)
        assert all(r.counts.rebuilt for r in copied)
        case.run().backward()


@pytest.mark.parametrize("what", ["submodule", "parameter", "buffer"])
def test_weights_replaced_after_planning(what: str) -> None:
    """Only where parameters are found is remembered, and that is looked after too."""
    torch.manual_seed(0)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
            self.register_buffer("scale", torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            return (self.inner(x) * self.scale).sin().exp()

    case = Case(nn.Sequential(Scaled(), Scaled()), torch.randn(5, 8), squared)
    with on(case.model, planned := planned_for(case, shadow=False)):
        case.run().backward()
        block = case.model[1]
        if what == "submodule":
            block.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        elif what == "parameter":
            block.inner[0].weight = nn.Parameter(torch.randn(8, 8))
        else:
            block.scale = torch.randn(8)
        plain = nn.Sequential(Scaled(), Scaled())
        plain.load_state_dict(case.model.state_dict())
        case.run(plain).backward()
        case.model.zero_grad()
        case.run().backward()
    assert_equal(gradients(plain), gradients(case.model))
    assert not fallbacks(planned)


def test_no_grad_and_eval_are_untouched(case: Case) -> None:
    expected = case.output()
    with on(case.model, planned := planned_for(case)):
        with torch.no_grad():
            assert torch.equal(case.output(), expected)
        with torch.inference_mode():
            assert torch.equal(case.output(), expected)
        assert [r.counts.calls for r in planned.regions] == [0, 0, 0]
        case.model.eval()
        assert torch.equal(case.output(), expected)


def test_a_frozen_model_runs_without_a_fallback(case: Case) -> None:
    with on(case.model, planned := planned_for(case)):
        case.model.requires_grad_(False)
        assert case.output().grad_fn is None
        assert not fallbacks(planned)


def test_an_unplanned_signature_recomputes_as_a_whole(case: Case) -> None:
    def step(model: nn.Module) -> dict[str, Tensor]:
        squared(model(torch.ones(2, 8)), None).backward()
        return gradients(model)

    plain = step(copy.deepcopy(case.model))
    with on(case.model, planned := planned_for(case)):
        assert_equal(plain, step(case.model))
    assert set(fallbacks(planned).values()) == {"an input signature that was not planned"}


# -------------------------------------------------------------------------- inputs that alias in another way


class Joins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.a(x).sin().exp() * self.b(y).cos().tanh()).sigmoid()


class JoinsStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Joins() for _ in range(2))
        self.same = True

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, x if self.same else x.flip(0))
        return x


@pytest.mark.parametrize("same", [True, False])
def test_one_tensor_twice_at_capture_and_two_tensors_later(same: bool) -> None:
    torch.manual_seed(0)
    case = Case(JoinsStack(), torch.randn(5, 8), squared)
    case.model.same = same
    planned = planned_for(case, shadow=False)
    case.model.same = not same
    plain = copy.deepcopy(case.model)
    case.run(plain).backward()
    with on(case.model, planned):
        case.run().backward()
    assert_equal(gradients(plain), gradients(case.model))
    assert set(fallbacks(planned).values()) == (
        {"inputs 0 and 1 do not share memory as captured"} if same else set()
    )


class WritesOne(nn.Module):
    """Reads `y`, then writes `x`: a replay after the write reads another `y`, if they are one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = (y + 1).sin().exp()
        x.mul_(2)
        return self.a(x).tanh() * z


class WritesOneStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(WritesOne() for _ in range(2))
        self.same = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0
            x = layer(x, x.detach() if self.same else x.detach().clone())
        return x


def test_inputs_that_share_written_memory_later() -> None:
    torch.manual_seed(0)
    case = Case(WritesOneStack(), torch.randn(5, 8).requires_grad_(), squared)
    planned = planned_for(case, shadow=False)
    case.model.same = True
    plain = copy.deepcopy(case.model)
    case.run(plain).backward()
    with on(case.model, planned):
        case.run().backward()
    assert_equal(gradients(plain), gradients(case.model))
    assert set(fallbacks(planned).values()) == {"inputs share memory that is written"}


class SharesActivation(nn.Module):
    """Calls a submodule twice that all blocks share: two regions watch it."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.a, self.b, self.act = nn.Linear(8, 8), nn.Linear(8, 8), act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.b(self.act(self.a(x)) + 1)) * 2


class Doubled(nn.Module):
    """Its output is not saved by anything: only a module hook sees it."""

    def forward(self, x: Tensor) -> Tensor:
        return (torch.sin(x) + 2).cos() + x


def test_a_submodule_shared_by_regions_and_called_twice() -> None:
    torch.manual_seed(0)
    act = Doubled()
    case = Case(nn.Sequential(*[SharesActivation(act) for _ in range(3)]), torch.randn(5, 8), squared)
    found = survey_of(case.model, case.run)
    for level in (0.7, 0.5, 0.3, LEAST):
        planned = regions_at(found, level, shadow=False)
        model = copy.deepcopy(case.model)
        plain = copy.deepcopy(case.model)
        case.run(plain).backward()
        with on(model, planned):
            case.run(model).backward()
        assert_equal(gradients(plain), gradients(model))
        assert not fallbacks(planned)


# ------------------------------------------------------------------------- leaves as outputs, symmetric paths


class PassesThrough(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, self.a(x).sin().exp().tanh(), self.b(x).sin().exp().tanh()


class PassesThroughStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PassesThrough() for _ in range(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        outputs: list[Tensor] = []
        for layer in self.layers:
            outputs += layer(x)
        return outputs


def test_an_output_that_is_a_leaf_does_not_shift_the_others() -> None:
    """At capture the input stands in the graph, at run time it is a leaf: the others keep their places."""
    torch.manual_seed(0)
    x = torch.randn(5, 8, requires_grad=True)
    case = Case(PassesThroughStack(), x, squared)
    plain = copy.deepcopy(case.model)
    case.run(plain).backward()
    x.grad = None
    with on(case.model, planned := planned_for(case, shadow=False)):
        case.run().backward()
    assert_equal(gradients(plain), gradients(case.model))
    assert not fallbacks(planned)


# ------------------------------------------------------------------------------------- other people's hooks


def test_an_outer_checkpoint(case: Case) -> None:
    def step(model: nn.Module) -> dict[str, Tensor]:
        x = case.batch.clone().requires_grad_()
        y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        squared(y, None).backward()
        return {**gradients(model), "gradient of x": bits_of(x.grad)}

    plain = step(copy.deepcopy(case.model))
    runs = []
    case.model.register_forward_pre_hook(lambda *_: runs.append(1))
    planned = planned_for(Case(case.model, case.batch.clone().requires_grad_(), squared))
    with on(case.model, planned):
        runs.clear()
        for _ in range(4):  # more often than a region may fall back before it recomputes as a whole
            case.model.zero_grad()
            found = step(case.model)
            assert_equal(plain, found)
        assert len(runs) == 8, "forward and one recomputation each"
        assert all("another saved-tensor hook" in why for why in fallbacks(planned).values())
        assert all(v.mode is Mode.RECIPE for r in planned.regions for v in r.variants.values())


def test_a_reentrant_outer_checkpoint(case: Case) -> None:
    def step(model: nn.Module) -> dict[str, Tensor]:
        x = case.batch.clone().requires_grad_()
        squared(torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True), None).backward()
        return {**gradients(model), "gradient of x": bits_of(x.grad)}

    plain = step(copy.deepcopy(case.model))
    with on(case.model, planned_for(case)):
        assert_equal(plain, step(case.model))


def test_outer_save_on_cpu(case: Case) -> None:
    def step(model: nn.Module) -> dict[str, Tensor]:
        with torch.autograd.graph.save_on_cpu():
            loss = case.run(model)
        loss.backward()
        return gradients(model)

    plain = step(copy.deepcopy(case.model))
    with on(case.model, planned := planned_for(case)):
        assert_equal(plain, step(case.model))
        assert all("another saved-tensor hook" in why for why in fallbacks(planned).values())
        case.model.zero_grad()
        case.run().backward()  # and recipes work again without them
        assert_equal(plain, gradients(case.model))
        assert all(r.counts.rebuilt for r in planned.regions)


def test_tensor_and_module_hooks_of_the_user(case: Case) -> None:
    def step(model: nn.Module) -> dict[str, Tensor]:
        seen: list[Tensor] = []
        handles = [
            block.register_full_backward_hook(
                lambda m, gi, go: seen.extend(g for g in (*gi, *go) if g is not None)
            )
            for block in model
        ]
        y = model(case.batch.clone().requires_grad_())
        y.register_hook(lambda g: g * 1.5)
        squared(y, None).backward()
        for handle in handles:
            handle.remove()
        return {**gradients(model), **{f"seen {i}": bits_of(g) for i, g in enumerate(seen)}}

    plain = step(copy.deepcopy(case.model))
    with on(case.model, planned_for(case)):
        assert_equal(plain, step(case.model))


# ------------------------------------------------------------------------------------- writes and exceptions


def test_a_source_written_after_forward_is_named(case: Case) -> None:
    with on(case.model, planned_for(case)):
        x = (case.batch * 1).requires_grad_()
        h = x * 1
        y = case.model[1](h)
        with torch.no_grad():
            h.mul_(2)
        with pytest.raises(RuntimeError, match=r"modified (in place|by an inplace)"):
            squared(y, None).backward()


def test_the_error_names_region_source_and_tensor() -> None:
    case = build()
    x = case.batch.clone().requires_grad_()
    planned = regions_at(survey_of(case.model, lambda: squared(case.model(x), None)), LEAST)
    with on(case.model, planned):
        loss = squared(case.model(x), None)
        with torch.no_grad():
            case.model[2].norm.weight.add_(1)
        with pytest.raises(
            RecomputeError, match=r"region 2: parameter norm\.weight, from which .*test_recipes\.py:\d+"
        ):
            loss.backward()


def test_an_optimizer_step_between_forward_and_backward(case: Case) -> None:
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
    with on(case.model, planned_for(case)):
        loss = case.run()
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"modified (in place|by an inplace)"):
            loss.backward()
        case.model.zero_grad()
        case.run().backward()  # and the next step is right again


def test_a_kept_tensor_is_still_watched_after_a_fallback(case: Case) -> None:
    """Hooks switch autograd's own version check off: whoever puts them there has to look."""
    planned = planned_for(case)
    with on(case.model, planned):
        for region in planned.regions:
            region._shadow = lambda program, rows, dropped: "made to fall back"  # type: ignore[method-assign]
        kept: list[Tensor] = []
        case.model[1].up.register_forward_hook(lambda m, i, o: kept.append(o))
        loss = case.run()
        assert fallbacks(planned)
        with torch.no_grad():
            kept[0].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_hooks_that_break_off_keep_every_tensor(case: Case) -> None:
    """Those that were put in already give back what they replaced."""
    plain = copy.deepcopy(case.model)
    planned = planned_for(case, shadow=False)
    for region in planned.regions:
        (key,) = region.variants
        program = region.variants[key].program
        assert program is not None
        assert len(program.slots) > 2

        def hook(nodes: Any, rows: Any, pack: Any, program: Program = program) -> None:
            program.hook(nodes, rows[:2], pack)  # the third is missing

        region.variants[key] = replace(region.variants[key], program=replace(program, hook=hook))
    with on(case.model, planned):
        case.run().backward()
        assert all("cannot be replaced (IndexError" in why for why in fallbacks(planned).values())
        assert not sum(region.counts.rebuilt for region in planned.regions)
    case.run(plain).backward()
    assert_equal(gradients(plain), gradients(case.model))


class ReadThrice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = x.sin()
        return sum((linear(y) for linear in self.linears), x)


def test_the_view_that_all_readers_want_is_made_once() -> None:
    x = torch.randn(3, 5, 8, requires_grad=True)
    case = Case(nn.Sequential(ReadThrice(), ReadThrice()), x, squared)
    plain = train(copy.deepcopy(case.model), case.run)
    planned = planned_for(case)
    for region in planned.regions:
        for variant in region.variants.values():
            assert variant.program is not None
            made = [
                line for line in variant.program.text.splitlines() if "as_strided((15, 8), (8, 1))" in line
            ]
            assert len(variant.program.slots) >= 3
            assert len(made) == 1, made
    with on(case.model, planned):
        assert_equal(plain, train(case.model, case.run))
    assert not fallbacks(planned)


def test_only_what_a_recipe_reads_of_a_submodule_is_noted() -> None:
    """What goes into Llama's second norm is saved by nobody: it saves a copy in single precision."""
    case = ZOO["llama"]()
    case.model.to(torch.bfloat16)
    plain = train(copy.deepcopy(case.model), case.run)
    found = survey_of(case.model, case.run)
    for level in (0.8, 0.7, 0.6, 0.5, 0.4):
        planned = regions_at(found, level)
        programs = [v.program for r in planned.regions for v in r.variants.values() if v.program]
        if {("post_attention_layernorm", "module_input")} in [program.passed for program in programs]:
            break
    else:
        pytest.fail("no recipe reads it")
    norms = [m for name, m in case.model.named_modules() if name.endswith("post_attention_layernorm")]
    with on(case.model, planned):
        hooks = {(len(norm._forward_hooks), len(norm._forward_pre_hooks)) for norm in norms}
        assert hooks <= {(0, 1), (0, 0)}
        assert (0, 1) in hooks
        assert_equal(plain, train(case.model, case.run))
    assert not fallbacks(planned)
    assert not any(norm._forward_pre_hooks for norm in norms)


class ReturnsWhatItReads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)  # saved by nobody, but a module hook would see it
        return y, (y * 2).sin().exp()


class WritesOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ReturnsWhatItReads() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for block in self.blocks:
            x, more = block(x)
            x += 1
            total = total + more
        return total + x


def test_the_parent_may_write_to_an_output() -> None:
    torch.manual_seed(0)
    case = Case(WritesOutputs(), torch.randn(5, 8), squared)
    plain = train(copy.deepcopy(case.model), case.run)
    with on(case.model, planned := planned_for(case)):
        assert_equal(plain, train(case.model, case.run))
    assert not fallbacks(planned)


def test_an_exception_in_forward_leaves_nothing_open(case: Case) -> None:
    plain = train(copy.deepcopy(case.model), case.run)
    with on(case.model, planned := planned_for(case)):
        handle = case.model[1].down.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            case.run()
        handle.remove()
        assert_equal(plain, train(case.model, case.run))
    assert not fallbacks(planned)


def test_an_exception_in_backward_leaves_nothing_open(case: Case) -> None:
    plain = train(copy.deepcopy(case.model), case.run)
    with on(case.model, planned := planned_for(case)):
        y = case.model[0](case.batch)
        y.register_hook(lambda g: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            squared(case.model[2](case.model[1](y)), None).backward()
        assert_equal(plain, train(case.model, case.run))
    assert not fallbacks(planned)


# --------------------------------------------------------------------------------------------------- threads


def test_two_threads_on_two_models() -> None:
    cases = [build(), build(), build()]  # the last one without a plan
    planned = [planned_for(case, shadow=False) for case in cases[:2]]
    found: list[Any] = [None, None, None]

    def work(index: int) -> None:
        model, run = cases[index].model, cases[index].run
        losses = {}
        for step in range(10):
            model.zero_grad()
            loss = run(model)
            loss.backward()
            losses[f"{step} loss"] = bits_of(loss)
            losses |= {f"{step} {name}": tensor for name, tensor in gradients(model).items()}
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.05 * parameter.grad
        found[index] = losses

    with on(cases[0].model, planned[0]), on(cases[1].model, planned[1]):
        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for losses in found[:2]:
        assert_equal(found[2], losses)
    assert not fallbacks(planned[0])
    assert not fallbacks(planned[1])


def test_two_threads_on_one_model(case: Case) -> None:
    """Forward in two threads at once, then both backwards: state belongs to the graph."""
    plain = copy.deepcopy(case.model)
    case.run(plain).backward()
    case.loss(plain(case.batch * 2), None).backward()
    with on(case.model, planned_for(case)):
        losses: list[Any] = [None, None]

        def work(index: int) -> None:
            losses[index] = case.loss(case.model(case.batch * (index + 1)), None)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for loss in losses:
            loss.backward()
    assert_equal(gradients(plain), gradients(case.model))


# ----------------------------------------------------------------------------------------------------- leaks


def storages() -> int:
    """Bytes of all tensors that Python can see, without those that the compiler imagines."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and not issubclass(type(thing), FakeTensor):
            storage = thing.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def test_a_forward_that_is_never_backwarded_leaves_nothing(case: Case) -> None:
    with on(case.model, planned_for(case)):
        inner: list[Any] = []
        handle = case.model[1].up.register_forward_hook(lambda m, i, o: inner.append(weakref.ref(o)))
        loss = case.run()
        del loss
        assert [ref() for ref in inner] == [None]
        handle.remove()


def test_what_is_dropped_is_gone_before_backward(case: Case) -> None:
    inner: list[Any] = []
    with on(case.model, planned_for(case, shadow=False)):
        case.model[1].up.register_forward_hook(lambda m, i, o: inner.append(weakref.ref(o.untyped_storage())))
        loss = case.run()
        assert [ref() for ref in inner] == [None]
        loss.backward()


def alive() -> list[Any]:
    return [thing for thing in gc.get_objects() if type(thing) is Frame]


@pytest.mark.parametrize("name", ["mlp", "resnet", "writes_input", "tied"])
def test_no_cycle_keeps_a_graph_alive(name: str) -> None:
    """Without the collector: a node that holds a tensor that knows the node would live for ever."""
    case = ZOO[name]()
    planned = regions_at(survey_of(case.model, case.run), LEAST, shadow=False)
    with on(case.model, planned):
        gc.collect()
        gc.disable()
        try:
            loss = case.run()
            assert bool(alive()) == any(v.program for r in planned.regions for v in r.variants.values())
            del loss
            assert not alive()
            loss = case.run()
            loss.backward(retain_graph=True)
            loss.backward()
            del loss
            assert not alive()
        finally:
            gc.enable()


def test_three_hundred_steps_leak_nothing() -> None:
    case = Case(nn.Sequential(*[MlpBlock(8) for _ in range(3)]), torch.randn(4, 8), squared)
    planned = regions_at(survey_of(case.model, case.run), LEAST, shadow=False)

    def steps(count: int) -> None:
        for _ in range(count):
            case.model.zero_grad()
            case.run().backward()
        case.model.zero_grad()

    def growth() -> int:
        gc.collect()
        before, bytes_before = len(gc.get_objects()), storages()
        steps(150)
        assert storages() == bytes_before
        gc.collect()
        return len(gc.get_objects()) - before

    with on(case.model, planned):
        steps(5)
        # What a test before left running (threads of a compiler) may grow once, a leak grows always.
        assert min(growth(), growth()) < 50
    assert not fallbacks(planned)


def test_removal_restores_the_model_exactly(case: Case) -> None:
    before = [
        (dict(m.__dict__), dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in case.model.modules()
    ]
    with on(case.model, planned_for(case)):
        case.run().backward()
    case.model.zero_grad()
    after = [
        (dict(m.__dict__), dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in case.model.modules()
    ]
    assert [sorted(a[0]) for a in before] == [sorted(a[0]) for a in after]
    assert [a[1:] for a in before] == [a[1:] for a in after]


class Skipping(nn.Module):
    """Hands its input on as it is when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.skip = nn.Linear(8, 16), nn.Linear(16, 8), False

    def forward(self, x: Tensor) -> Tensor:
        return x if self.skip else x + self.down(torch.tanh(self.up(x)))


@pytest.mark.parametrize("check", [True, False])
def test_a_block_that_hands_its_input_on_does_not_touch_the_block_before(check: bool) -> None:
    """Their graphs are alike: a walk that began at its output would find the other's tensors."""
    torch.manual_seed(0)
    case = Case(nn.Sequential(*(Skipping() for _ in range(3))), torch.randn(5, 8), squared)
    planned = regions_at(survey_of(case.model, case.run), LEAST, shadow=False, check=check)
    planned.regions[:] = planned.regions[1:]  # the first keeps everything
    with on(case.model, planned):
        for skips in ([], [1], [1, 2], [2], [1]):
            for number, block in enumerate(case.model):
                block.skip = number in skips
            case.model.zero_grad()
            case.run().backward()
            found = [p.grad.clone() for p in case.model.parameters() if p.grad is not None]
            with bypass():
                case.model.zero_grad()
                case.run().backward()
            expected = [p.grad for p in case.model.parameters() if p.grad is not None]
            assert len(found) == len(expected)
            assert all(map(torch.equal, found, expected))
        assert not fallbacks(planned)
