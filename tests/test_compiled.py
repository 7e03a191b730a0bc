"""compile=True: blocks run by the compiler, each with the saved set that was planned for it.

Most tests use the backend "aot_eager": the same trace, joint graph and partition as "inductor", run operation
by operation, so that gradients can be compared bit for bit with the untouched model, and every byte counts.
"""

from __future__ import annotations

import copy
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.nn import functional as F

import remat
from models import Case, MlpBlock, own_loss, squared
from reference import SEED, assert_same, step
from remat import compiling
from remat._torch_private import compiler_problem
from remat.check.bench import Bench
from remat.check.live import LiveBytes
from remat.check.regions import gradient_gap, gradients_of, precise_gradients
from remat.check.step import tensors_of
from remat.compiling import chosen_sets, internal_bytes, set_seconds
from remat.errors import InputError, PlanError
from remat.planner.schedule import make_plan
from remat.records import Mode, Plan, Role
from remat.run import compiled
from remat.run.compiled import decompiled, is_compiled, probe, saved_bytes
from remat.run.wrap import wrapped
from remat.trace.discover import find_blocks
from remat.trace.fusion import compiled_share
from remat.trace.joint import price_joint
from remat.wholestep import as_in_steps

CPU = torch.device("cpu")
# The compiler looks at .grad of its inputs, which are not leaves, and of what it was given by torch itself.
COMPILES = [
    pytest.mark.usefixtures("forgets_compiled"),
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor:UserWarning",
        "ignore::DeprecationWarning:torch",
        "ignore::FutureWarning:torch",
    ),
]
pytestmark = COMPILES
needs_compiler = pytest.mark.skipif(
    bool(compiler_problem("cpu")), reason=f"no compiler for the host: {compiler_problem('cpu')}"
)


class Block(nn.Module):
    """Attention and MLP with residuals, as small as they come."""

    def __init__(self, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Stack(nn.Module):
    def __init__(self, layers: int = 3, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.layers = nn.ModuleList([Block(**options) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


def stack(layers: int = 3, **options: Any) -> Case:
    torch.manual_seed(0)
    return Case(Stack(layers, **options).train(), torch.randn(4, 32, 8), squared)


def fit(case: Case, model: nn.Module, **options: Any) -> remat.Handle:
    options.setdefault("compile", "aot_eager")
    return remat.fit(model, case.batch, loss=case.loss, **options)


def profile(case: Case, model: nn.Module, **options: Any) -> remat.Profile:
    options.setdefault("compile", "aot_eager")
    return remat.profile(model, case.batch, loss=case.loss, **options)


def counted_peak(case: Case, model: nn.Module) -> int:
    """Of forward and backward above the level before, by a counter of our own."""
    model.zero_grad(set_to_none=True)
    with LiveBytes() as live:
        live.watch(tensors_of(case.batch))
        start = live.current_bytes
        live.reset_peak()
        case.run(model).backward()
        return live.peak_bytes - start


def with_variants(case: Case, found: remat.Profile, count: int) -> Plan:
    """A plan in which so many saved sets alternate over the layers."""
    menu = found.kinds[0].menu
    entries = [i for i, entry in enumerate(menu) if entry.mode is Mode.COMPILED][:count]
    assert len(entries) == count
    choices = [entries[i % count] for i in range(len(found.calls))]
    return make_plan(found, choices, 1 << 40, strategy="by hand")


# ---------------------------------------------------------------------------------------------- families


# Heads are 16 wide: some CPUs multiply narrower matrices otherwise where one of them is transposed, and what
# the compiler makes of attention need not have the layout that attention has without it.
def _llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=80, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=64, max_position_embeddings=64,
    )  # fmt: skip
    ids = torch.randint(0, 64, (4, 32))
    return Case(LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}, own_loss)


def _qwen2() -> Case:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        hidden_size=32, intermediate_size=80, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=64, max_position_embeddings=64,
    )  # fmt: skip
    ids = torch.randint(0, 64, (4, 32))
    return Case(Qwen2ForCausalLM(config), {"input_ids": ids, "labels": ids}, own_loss)


def _gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=3, n_embd=32, n_head=2, vocab_size=64, n_positions=64, bos_token_id=0, eos_token_id=0,
        loss_type="ForCausalLM",
    )  # fmt: skip
    ids = torch.randint(0, 64, (4, 32))
    return Case(GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}, own_loss)


def _bert() -> Case:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=32, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4, vocab_size=64,
        max_position_embeddings=64, loss_type="ForMaskedLM",
    )  # fmt: skip
    ids = torch.randint(0, 64, (4, 32))
    return Case(BertForMaskedLM(config), {"input_ids": ids, "labels": ids}, own_loss)


def _vit() -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=80, image_size=32,
        patch_size=8, num_labels=4,
    )  # fmt: skip
    batch = {"pixel_values": torch.randn(6, 3, 32, 32), "labels": torch.randint(0, 4, (6,))}
    return Case(ViTForImageClassification(config), batch, own_loss)


def _dit() -> Case:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, num_layers=3, sample_size=8,
        num_embeds_ada_norm=10,
    )  # fmt: skip
    batch = {
        "hidden_states": torch.randn(6, 4, 8, 8),
        "timestep": torch.arange(6),
        "class_labels": torch.arange(6),
    }
    return Case(model, batch, lambda output, _: output.sample.float().square().mean())


FAMILIES: dict[str, Callable[[], Case]] = {
    "llama": _llama, "qwen2": _qwen2, "gpt2": _gpt2, "bert": _bert, "vit": _vit, "dit": _dit,
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str) -> None:
    """Gradients equal those of the untouched model bit for bit, dropout and all; the saved bytes are those
    that were predicted; the budget is met by a count of our own."""
    torch.manual_seed(0)
    case = FAMILIES[name]()
    case.model.train()
    plain, model = copy.deepcopy(case.model), copy.deepcopy(case.model)
    peak = counted_peak(case, plain)
    share = 0.75 if name == "dit" else 0.5  # a DiT's blocks have more parameters than activations here
    with fit(case, model, activations=share) as handle:
        assert all(region.status().mode == "compiled" for region in handle.regions), str(handle.report())
        assert {call.name for call in handle.plan.profile.calls} == {r.name for r in handle.regions}
        held = _held_bytes(case, model, handle)
        assert held == _planned_bytes(handle.plan)
        # An allocation that serves the count itself (a loss, a scalar) does not matter.
        assert counted_peak(case, model) <= share * peak + 1024
        model.zero_grad(set_to_none=True)
        found = step(case, model)
        assert not any(region.counts.fallbacks for region in handle.regions)
    expected = step(case, _without_gradients(plain))
    assert_same(expected, found)


def _without_gradients(model: nn.Module) -> nn.Module:
    model.zero_grad(set_to_none=True)
    return model


def _held_bytes(case: Case, model: nn.Module, handle: remat.Handle) -> dict[str, int | None]:
    """What each block's compiled graph holds, seen from outside of it."""
    found: dict[str, int | None] = {}
    hooks = [
        model.get_submodule(region.name).register_forward_hook(
            lambda module, args, kwargs, output, name=region.name: found.__setitem__(
                name, saved_bytes(module, (args, kwargs), output)
            ),
            with_kwargs=True,
        )
        for region in handle.regions
    ]
    case.run(model)
    for hook in hooks:
        hook.remove()
    return found


def _planned_bytes(plan: Plan) -> dict[str, int]:
    planned = {}
    for index, call in enumerate(plan.profile.calls):
        graph, recipe = plan.profile.kinds[call.kind].graph, plan.entry(index).recipe
        assert graph is not None
        assert recipe is not None
        planned[call.name] = internal_bytes(graph, recipe)
    return planned


# ----------------------------------------------------------------------------------------- what is compiled


def test_three_saved_sets_over_twelve_layers_are_three_graphs() -> None:
    compiled._cache.clear()
    case = stack(layers=12)
    found = profile(case, case.model)
    plan = with_variants(case, found, 3)
    compiled._cache.clear()  # nothing of what was compiled while measuring
    with remat.apply(case.model, plan):
        case.run().backward()
        blocks = list(compiled._cache.values())
        assert len(blocks) == 3
        assert sum(block.graphs for block in blocks) == 3


def test_at_most_four_saved_sets_are_compiled() -> None:
    compiled._cache.clear()
    case = stack()
    found = profile(case, case.model)
    entries = [entry for entry in found.kinds[0].menu if entry.mode is Mode.COMPILED]
    assert 2 <= len(entries) <= 4
    assert len(compiled._cache) == len(entries)
    assert len({entry.resident_bytes for entry in entries}) == len(entries)
    assert min(entry.extra_seconds for entry in found.kinds[0].menu) == 0


def test_another_length_does_not_compile_again_and_again() -> None:
    case = stack()
    with fit(case, case.model, activations=0.5) as handle:
        blocks = {v.compiled for region in handle.regions for v in region.variants.values()}
        counts = []
        for length in (16, 24, 20, 28, 12, 8):
            batch = torch.randn(4, length, 8)
            expected = _gradients(copy.deepcopy(_plain(case)), batch)
            assert_same(expected, _gradients(case.model, batch))
            counts.append(sum(block.graphs for block in blocks if block is not None))
        assert len(set(counts[1:])) == 1  # one graph for all lengths, from the second on
        assert not any(region.counts.fallbacks for region in handle.regions)


def _plain(case: Case) -> nn.Module:
    model = Stack(len(case.model.layers))
    model.load_state_dict(case.model.state_dict())
    return model.train()


def _gradients(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(SEED)
    squared(model(batch), batch).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class Scaled(Block):
    """Every layer has a number of its own in its code's way."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * F.silu(self.down(F.gelu(self.up(x))))


def test_blocks_that_differ_in_a_number_are_compiled_one_by_one() -> None:
    """More of them than graphs that the compiler makes of one function before it gives up."""
    case = stack(layers=0)
    case.model.layers.extend(Scaled(0.1 * i) for i in range(1, 11))
    plain = copy.deepcopy(case.model)
    found = profile(case, case.model)
    assert len(found.kinds) == 10
    choices = [_smallest_set(found, call.kind) for call in found.calls]
    with remat.apply(case.model, make_plan(found, choices, 1 << 40, strategy="by hand")) as handle:
        assert_same(_gradients(plain, case.batch), _gradients(case.model, case.batch))
        assert {row.mode for row in handle.status().rows} == {"compiled"}
        assert not any(region.counts.fallbacks for region in handle.regions)


def _smallest_set(found: remat.Profile, kind: int) -> int:
    menu = found.kinds[kind].menu
    return max(i for i, entry in enumerate(menu) if entry.mode is Mode.COMPILED)


def test_a_plan_for_a_device_that_is_not_there_is_not_compiled() -> None:
    case = stack()
    with pytest.raises(InputError, match="needs the device"):
        remat.profile(case.model, case.batch, loss=case.loss, compile=True, device="h100-80gb")


def test_what_was_compiled_while_measuring_runs_in_training() -> None:
    case = stack()
    found = profile(case, case.model)
    before = {key: block.graphs for key, block in compiled._cache.items()}
    with remat.apply(case.model, with_variants(case, found, 2)):
        case.run().backward()
    assert {key: block.graphs for key, block in compiled._cache.items()} == before


# ------------------------------------------------------------------------------------- taking it off, copies


def test_remove_restores_the_model() -> None:
    case = stack()
    before = [dict(vars(module)) for module in case.model.modules()]
    names = list(case.model.state_dict())
    handle = fit(case, case.model, activations=0.5)
    assert list(case.model.state_dict()) == names
    handle.remove()
    assert [dict(vars(module)) for module in case.model.modules()] == before


def test_copies_and_pickles_of_a_compiled_model_run_their_own_weights() -> None:
    case = stack()
    with fit(case, case.model, activations=0.5):
        stored = io.BytesIO()
        torch.save(case.model, stored)
        stored.seek(0)
        twins = [copy.deepcopy(case.model), torch.load(stored, weights_only=False)]
        for twin in twins:
            with torch.no_grad():
                twin.layers[0].up.weight.mul_(2)
            assert_same(
                _gradients(_plain(replace(case, model=twin)), case.batch), _gradients(twin, case.batch)
            )


def test_a_plan_is_saved_and_applied_from_its_file(tmp_path: Any) -> None:
    case = stack()
    expected = _gradients(_plain(case), case.batch)
    plan = remat.plan(profile(case, case.model), activations=0.5)
    loaded = Plan.load(plan.save(tmp_path / "plan.json"))
    assert loaded == plan
    with remat.apply(case.model, loaded) as handle:
        assert {region.status().mode for region in handle.regions} == {"compiled"}
        assert_same(expected, _gradients(case.model, case.batch))
    kinds = tuple(replace(kind, graph=None) for kind in plan.profile.kinds)
    with pytest.raises(PlanError, match="not its graph"):
        remat.apply(case.model, replace(plan, profile=replace(plan.profile, kinds=kinds)))


def test_without_gradients_nothing_is_compiled() -> None:
    case = stack()
    with fit(case, case.model, activations=0.5) as handle, torch.no_grad():
        calls = [region.counts.calls for region in handle.regions]
        case.run()
        assert [region.counts.calls for region in handle.regions] == calls


# --------------------------------------------------------------------------------------------- fallbacks


class BreaksGraph(Block):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


def test_a_block_that_breaks_the_graph_runs_eagerly_and_the_report_says_why() -> None:
    case = stack()
    case.model.layers[1] = BreaksGraph()
    plain = copy.deepcopy(case.model)
    with fit(case, case.model, activations=0.6) as handle:
        modes = {row.name: row.mode for row in handle.status().rows}
        assert modes["layers.0"] == modes["layers.2"] == "compiled"
        assert modes.get("layers.1", "keep") in ("keep", "recipe", "full")
        assert "layers.1" in str(handle.report())
        assert "layers.1: not compiled, it cannot be compiled as one graph" in str(handle.report())
        assert_same(_gradients(plain, case.batch), _gradients(case.model, case.batch))


def test_a_compiler_that_fails_later_falls_back_to_full_recompute(monkeypatch: Any) -> None:
    case = stack()
    expected = _gradients(_plain(case), case.batch)
    plan = with_variants(case, profile(case, case.model), 2)
    compiled._cache.clear()

    def fails(*_: Any) -> Any:
        raise AssertionError("no space left on the device")

    monkeypatch.setattr(compiled.private, "compile_joint", fails)
    with remat.apply(case.model, plan) as handle:
        assert_same(expected, _gradients(case.model, case.batch))
        assert [region.counts.fallbacks for region in handle.regions] == [1, 1, 1]
        assert "it cannot be compiled" in handle.status().rows[0].why
    compiled._cache.clear()


def test_an_error_of_the_model_stays_its_own() -> None:
    case = stack()
    with fit(case, case.model, activations=0.5), pytest.raises((RuntimeError, TypeError)):
        case.model(torch.randn(4, 32, 9))


def test_saved_sets_with_wrong_gradients_are_refused(monkeypatch: Any) -> None:
    """Every saved set is compared with the block as it is; the block then runs eagerly."""
    case = stack()
    compiled._cache.clear()
    honest = compiled.CompiledBlock.__call__
    monkeypatch.setattr(
        compiled.CompiledBlock, "__call__", lambda self, *call: honest(self, *call) * torch.tensor(1.01)
    )
    with fit(case, case.model, activations=0.7) as handle:
        assert "its compiled gradients are wrong" in str(handle.report())
        assert not any(row.mode == "compiled" for row in handle.status().rows)


def test_gradient_gap() -> None:
    a = torch.randn(100)
    assert gradient_gap([a], [a.clone()]).exact
    near = gradient_gap([a * (1 + 1e-5)], [a])
    assert near.ok
    assert not near.exact
    assert not gradient_gap([a * 1.01], [a]).ok
    assert not gradient_gap([a, a], [a]).ok
    assert not gradient_gap([a * float("nan")], [a]).ok
    assert gradient_gap([a.bfloat16()], [(a * 1.01).bfloat16()]).ok
    turned = torch.complex(a, a)
    assert not gradient_gap([turned.conj().resolve_conj()], [turned]).ok, "nothing but the imaginary part"


@torch.library.custom_op("remat_tests::noise", mutates_args=(), tags=[torch.Tag.nondeterministic_seeded])
def noise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Draws numbers by itself, as attention with dropout does on CUDA."""
    drawn = torch.rand_like(x) + 0.5
    return x * drawn, drawn


@noise.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


noise.register_autograd(
    lambda ctx, gradient, _: gradient * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)


class TwoKindsOfNoise(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(width), nn.Linear(width, width), nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(noise(self.first(self.norm(x)))[0], 0.1, self.training)
        return x + F.dropout(self.narrow(F.gelu(self.wide(self.second(x)))), 0.1, self.training)


@needs_compiler
@inductor_config.patch(fx_graph_cache=False)  # no graph that was compiled before
@functorch_config.patch(enable_autograd_cache=False)
def test_random_numbers_are_drawn_in_one_order_whatever_is_saved() -> None:
    """The compiler moves operations to where they hold least memory; those that draw must not be moved."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), *[TwoKindsOfNoise() for _ in range(2)]).train()  # of one kind
    batch = torch.randn(8, 32, 64)
    found = remat.profile(model, batch, loss=squared, compile="inductor", allow=["keep", "recompute"])
    assert "compiled gradients are wrong" not in " ".join(found.notes)
    (kind,) = found.kinds
    assert sum(entry.mode is Mode.COMPILED for entry in kind.menu) > 2


class BiasedKeys(nn.Module):
    """The bias of keys has no gradient but rounding; and LayerNorm's in bfloat16 is rounded much on the host,
    which the compiler does not do."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.after, self.keys = nn.LayerNorm(width), nn.LayerNorm(width), nn.Linear(width, width)
        self.queries, self.values = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (
            part(y).unflatten(-1, (4, -1)).transpose(1, 2) for part in (self.queries, self.keys, self.values)
        )
        x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + F.gelu(self.after(x)).sin()


def test_gradients_that_are_nothing_but_rounding() -> None:
    """A difference of all of their norm is none that counts: those of the block itself are as far off."""
    torch.manual_seed(0)
    block = BiasedKeys().bfloat16()
    inputs = ((torch.randn(8, 65, 64).bfloat16().requires_grad_(),), {})
    plain = gradients_of(block.forward, inputs, (block,))
    digits = precise_gradients(block, block.forward, inputs, plain)
    assert digits is not None
    assert all(t.dtype is torch.float32 for t in digits)
    key = 2 + [name for name, _ in block.named_parameters()].index("keys.bias")
    otherwise = [t.clone() for t in plain]
    otherwise[key] = plain[key].flip(0)
    assert not gradient_gap(otherwise, plain).ok
    assert gradient_gap(otherwise, plain, lambda: digits).ok
    assert not gradient_gap(otherwise, plain, lambda: None).ok
    for place in range(len(plain)):
        for factor in (0.0, -1.0, 0.5, 30.0):
            wrong = [t * factor if n == place else t for n, t in enumerate(plain)]
            right = place == key and factor in (0.0, -1.0, 0.5)
            assert gradient_gap(wrong, plain, lambda: digits).ok == right, (place, factor)
    assert not gradient_gap([t * float("nan") for t in plain], plain, lambda: digits).ok
    assert all(p.dtype is torch.bfloat16 and p.grad is None for p in block.parameters())


@needs_compiler
def test_a_block_with_such_gradients_is_compiled() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[BiasedKeys() for _ in range(3)]).bfloat16()
    found = remat.profile(
        model,
        torch.randn(8, 65, 64).bfloat16(),
        loss=squared,
        compile="inductor",
        allow=["keep", "recompute"],
    )
    assert "compiled gradients are wrong" not in " ".join(found.notes)
    assert any(entry.mode is Mode.COMPILED for entry in found.kinds[0].menu)


class Several(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(8, 8)
        if kind == "complex":
            self.register_buffer("turn", torch.polar(torch.ones(4), torch.arange(4.0)))

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        y = self.linear(x)
        if self.kind == "complex":
            y = torch.view_as_real(
                torch.view_as_complex(y.float().unflatten(-1, (4, 2))) * self.turn
            ).flatten(-2)
        if self.kind == "random":
            y = y * torch.rand_like(y)
        if self.kind == "strided" and y.dtype is torch.float64:
            y = y.t().contiguous().t()
        if self.kind == "complex output":
            return torch.view_as_complex(y.unflatten(-1, (4, 2)))
        return sum(others, y).sin()


@pytest.mark.parametrize(
    "kind", ["plain", "strided", "twice", "views", "complex", "complex output", "random"]
)
def test_more_digits_are_of_the_same_computation(kind: str) -> None:
    """Otherwise there are none: gradients of zero would be no farther from others than the right ones."""
    torch.manual_seed(0)
    block, x = Several(kind), torch.randn(6, 8, requires_grad=True)
    args = {"twice": (x, x, x), "views": (x[:, :8], x.detach()[:, :8])}.get(kind, (x,))
    plain = gradients_of(block.forward, (args, {}), (block,))
    digits = precise_gradients(block, block.forward, (args, {}), plain)
    assert (digits is None) == (kind in ("views", "complex", "complex output", "random"))
    for place in range(len(plain)):
        for factor in (0.0, 0.5, -1.0):
            wrong = [t * factor if n == place else t for n, t in enumerate(plain)]
            assert not gradient_gap(wrong, plain, lambda: digits).ok


def test_more_digits_where_there_are_none() -> None:
    linear = nn.Linear(4, 4)
    inputs = ((torch.randn(2, 4),), {})
    plain = gradients_of(linear.forward, inputs, (linear,))
    found = precise_gradients(linear, linear.forward, inputs, plain)
    assert found is not None
    assert found[0].dtype is torch.float64
    torch.testing.assert_close([t.float() for t in found], plain)
    assert precise_gradients(linear, lambda x: linear(x), inputs, plain) is None, "whose forward is it?"

    class Full(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype is torch.float64:
                raise torch.OutOfMemoryError("no memory")
            return super().forward(x)

    full = Full(4, 4)
    assert precise_gradients(full, full.forward, inputs, gradients_of(full.forward, inputs, (full,))) is None
    linear.other = threading.Lock()  # cannot be copied
    assert precise_gradients(linear, linear.forward, inputs, plain) is None


def test_without_a_partitioner_of_our_own_torch_is_told_by_selective_checkpointing(monkeypatch: Any) -> None:
    monkeypatch.setattr("remat.api.partitioner_problem", lambda: "this torch has none")
    case = stack()
    plain = copy.deepcopy(case.model)
    found = profile(case, case.model)
    kind = found.kinds[0]
    assert kind.compiler == "checkpoint+aot_eager_decomp_partition"
    sizes = [entry.resident_bytes for entry in kind.menu if entry.mode is Mode.COMPILED]
    assert len(sizes) == 3  # products and attention, attention, nothing
    assert sizes == sorted(set(sizes), reverse=True)
    with remat.apply(case.model, with_variants(case, found, 3)) as handle:
        expected, got = _gradients(plain, case.batch), _gradients(case.model, case.batch)
        for name, tensor in expected.items():
            torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-6)
        assert not any(region.counts.fallbacks for region in handle.regions)


# ------------------------------------------------------------------------------------ what users compiled


def _compile_in_place(model: Stack) -> None:
    for layer in model.layers:
        layer.compile(backend="aot_eager")


def _compile_wrapped(model: Stack) -> None:
    for i, layer in enumerate(model.layers):
        model.layers[i] = torch.compile(layer, backend="aot_eager")


@pytest.mark.parametrize("user_compiles", [_compile_in_place, _compile_wrapped])
def test_blocks_that_the_user_compiled_are_planned_as_compiled(user_compiles: Any, monkeypatch: Any) -> None:
    case = stack()
    expected = _gradients(_plain(case), case.batch)
    user_compiles(case.model)
    theirs = [layer._compiled_call_impl for layer in case.model.layers]
    forwards = [layer.__dict__.get("forward") for layer in case.model.layers]
    monkeypatch.setattr("remat.api.DEFAULT_BACKEND", "aot_eager")
    with fit(case, case.model, activations=0.5, compile=None) as handle:
        assert [row.mode for row in handle.status().rows] == ["compiled"] * 3
        found = _gradients(case.model, case.batch)
        assert [name.replace("_orig_mod.", "") for name in found] == list(expected)
        assert_same(expected, {name.replace("_orig_mod.", ""): grad for name, grad in found.items()})
    assert [layer._compiled_call_impl for layer in case.model.layers] == theirs
    assert [layer.__dict__.get("forward") for layer in case.model.layers] == forwards


def test_what_cannot_be_planned_as_compiled_is_refused_with_a_sentence() -> None:
    case = stack()
    with pytest.raises(InputError, match=r"pass the model as it was before torch\.compile"):
        fit(case, torch.compile(case.model, backend="aot_eager"), activations=0.5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="'inductor', 'aot_eager'"):
        fit(case, case.model, activations=0.5, compile="onnx")
    _compile_in_place(case.model)
    with pytest.raises(InputError, match=r"layers\.0 and 2 more blocks are compiled"):
        fit(case, case.model, activations=0.5, compile=False)


def test_decompiled_restores_after_an_error() -> None:
    case = stack()
    _compile_wrapped(case.model)
    layer = case.model.layers[0]
    layer._orig_mod.compile(backend="aot_eager")
    before = layer.__dict__["forward"], layer._orig_mod._compiled_call_impl

    def fails() -> None:
        with decompiled([layer]):
            assert layer._orig_mod._compiled_call_impl is None
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert (layer.__dict__["forward"], layer._orig_mod._compiled_call_impl) == before
    assert is_compiled(layer)


def _accelerate(model: Stack) -> Stack:
    from accelerate.utils import compile_regions

    return compile_regions(model, backend="aot_eager")


def _diffusers(model: Stack) -> Stack:
    from diffusers.models.modeling_utils import ModelMixin

    model._repeated_blocks = ["Block"]
    ModelMixin.compile_repeated_blocks(model, backend="aot_eager")
    return model


@pytest.mark.parametrize("library_compiles", [_accelerate, _diffusers])
def test_blocks_that_a_library_compiled_are_recognised(library_compiles: Any) -> None:
    model = library_compiles(stack().model)
    blocks = [block for block in find_blocks(model) if is_compiled(block.module)]
    assert [block.name for block in blocks] == ["layers.0", "layers.1", "layers.2"]


# ------------------------------------------------------------------------------------------------ verify


def test_verify_compares_with_the_same_compiled_blocks_without_a_plan() -> None:
    case = stack(dropout=0.2)
    plan = remat.plan(profile(case, case.model), activations=0.5)
    result = remat.verify(case.model, case.batch, plan, loss=case.loss)
    assert result.bitwise
    assert "same compiled blocks" in str(result)


def test_verify_beside_a_handle_leaves_its_compiled_blocks_at_work() -> None:
    case = stack()
    plan = remat.plan(profile(case, case.model), activations=0.5)
    with remat.apply(case.model, plan) as handle:
        there = handle.regions
        for given in (plan, None):
            assert "same compiled blocks" in str(remat.verify(case.model, case.batch, given, loss=case.loss))
        assert there
        assert handle.regions == there
        assert all(wrapped(case.model.get_submodule(region.name)).around is region for region in there)


def test_an_eager_report_says_that_compiling_would_be_faster(monkeypatch: Any) -> None:
    case = stack()
    for present in (True, False):
        monkeypatch.setattr("remat.compiling.has_compiler", lambda device, present=present: present)
        found = remat.profile(case.model, case.batch, loss=case.loss)
        assert any(note.startswith("compile=True is predicted to take") for note in found.notes) is present
    assert found.kinds[0].graph is not None
    assert 0.3 < compiled_share(found.kinds[0].graph) < 0.95
    products = [op for op in found.kinds[0].graph.ops if op.flops]
    assert compiled_share(replace(found.kinds[0].graph, ops=tuple(products))) == 1.0


# ------------------------------------------------------------------------------------------- chunked head


def test_head_and_loss_in_chunks_go_together_with_compiled_blocks() -> None:
    torch.manual_seed(0)
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=2048,
        max_position_embeddings=64,
    )  # fmt: skip
    ids = torch.randint(0, 2048, (4, 32))
    case = Case(LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids}, own_loss)
    plain = copy.deepcopy(case.model)
    allow = ("keep", "recompute", "chunk")
    with fit(case, case.model, activations=0.5, allow=allow) as handle:
        assert handle.plan.profile.chunked
        assert {row.mode for row in handle.status().rows if row.tower == "model.layers"} == {"compiled"}
        expected, found = step(case, plain), step(case, case.model)
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5)


# ------------------------------------------------------------------------------------------ the joint graph


def _joint(dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    block = Block(dropout=dropout).train()
    x = torch.randn(2, 16, 32, requires_grad=True)
    return price_joint(probe(block, block.forward, (x,), {}, "aot_eager"), CPU)


def test_the_joint_graph_names_what_backward_reads() -> None:
    joint = _joint()
    graph = joint.graph
    names = [op.name for op in graph.ops]
    assert names.count("aten.addmm.default") == 4
    assert sum("scaled_dot" in name for name in names) == 1
    assert graph.storages[graph.values[graph.inputs[0]].storage].role is Role.INPUT
    parameters = [storage for storage in graph.storages if storage.role is Role.PARAMETER]
    assert len(parameters) == len(list(Block().parameters()))
    hidden = 2 * 16 * 32 * 4
    # qkv, attention, the sum before the MLP, up and its gelu, two norms, and what they are made of
    assert graph.saved_bytes >= 12 * hidden
    assert all(op.seconds > 0 for op in graph.ops if op.flops)
    assert not joint.random


def test_random_operations_are_always_saved() -> None:
    joint = _joint(dropout=0.5)
    assert joint.random
    for recipe in chosen_sets(joint):
        kept = {joint.graph.values[v].producer for v in range(len(joint.graph.values))}
        assert kept
        assert not any(joint.graph.ops[index].reason for index in recipe.replayed)
    decisions = compiled.decisions(joint, frozenset())
    saved = [str(node.target) for node, keep in decisions.items() if keep]
    assert saved
    assert set(saved) == {op.name for op in joint.graph.ops if op.reason}


def test_chosen_sets_lie_on_the_lower_hull() -> None:
    joint = _joint()
    many, few = chosen_sets(joint, 100), chosen_sets(joint, 3)
    assert len(few) == 3
    assert set(few) <= set(many)
    assert (few[0], few[-1]) == (many[0], many[-1])
    points = [(recipe.resident_bytes, set_seconds(joint, recipe)) for recipe in many]
    assert points == sorted(points, reverse=True, key=lambda point: point[0])
    for (x0, y0), (x1, y1), (x2, y2) in zip(points, points[1:], points[2:], strict=False):
        assert (y1 - y0) * (x2 - x0) >= (y2 - y0) * (x1 - x0) - 1e-12 * abs(x2 - x0)


@pytest.mark.parametrize("launch_bound", [False, True])
def test_where_the_device_waits_for_the_host_saved_sets_are_not_told_apart_by_their_timings(
    launch_bound: bool,
) -> None:
    joint = _joint()
    sets = chosen_sets(joint, 3)
    noise = [0.003, 0.002, 0.001]  # as if the smallest set were the fastest
    host = [seconds if launch_bound else 0.1 * seconds for seconds in noise]
    found: list[Any] = [
        SimpleNamespace(recipe=recipe, bench=Bench(0, 0, 0, seconds, by_host))
        for recipe, seconds, by_host in zip(sets, noise, host, strict=True)
    ]
    plain: Any = SimpleNamespace(keep=Bench(0, 0, 0, 0.004), full=Bench(0, 0, 0, 0.005))
    keep, full, *ours = compiling._seconds(joint, found, plain, torch.device("cuda"))
    assert (keep, full) == pytest.approx((0.003, 0.004))
    estimates = [set_seconds(joint, recipe) - set_seconds(joint, sets[0]) for recipe in sets]
    assert ours == pytest.approx(estimates if launch_bound else [0.002, 0.001, 0.0], abs=1e-12)


def test_a_block_without_backward_is_not_compiled() -> None:
    block = Block().requires_grad_(False)
    with pytest.raises(remat.CaptureError, match="no backward"):
        probe(block, block.forward, (torch.randn(2, 16, 32),), {}, "aot_eager")


# ----------------------------------------------------------------------------------------------- inductor


class Mlps(nn.Module):
    """Few operations: compiling takes seconds."""

    def __init__(self, layers: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MlpBlock(16, dropout) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@needs_compiler
def test_inductor_dropout_is_that_of_the_same_compiled_block_without_a_plan() -> None:
    """Bit for bit, though nearly all of forward, the mask included, is computed again in backward."""
    torch.manual_seed(0)
    block = MlpBlock(16, dropout=0.3).train()
    x = torch.randn(64, 16, requires_grad=True)
    joint = price_joint(probe(block, block.forward, (x,), {}), CPU)
    smallest = chosen_sets(joint)[-1]
    ours = compiled.block_for("test", joint.graph, smallest, "inductor")
    stock = torch.compile(block, fullgraph=True)

    def gradients(call: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(SEED)
        output = call(x)
        return [output, *torch.autograd.grad(output.square().sum(), (x, *block.parameters()))]

    expected = gradients(stock)
    found = gradients(lambda x: ours(block, block.forward, (x,), {}))
    assert len(expected) == len(found)
    different = [i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if not torch.equal(a, b)]
    assert not different
    assert not torch.equal(expected[0], block(x))  # there is a mask
    output = ours(block, block.forward, (x,), {})
    assert saved_bytes(block, (x,), output) == internal_bytes(joint.graph, smallest)
    assert internal_bytes(joint.graph, smallest) < 64  # a seed: no mask, nothing of the MLP


_IN_ANOTHER_PROCESS = """
import sys
sys.path[:0] = {path!r}
import torch, warnings
warnings.simplefilter("ignore")
from torch._dynamo.utils import counters
from models import MlpBlock
from remat.run.compiled import compiled_block
torch.manual_seed(0)
block, x = MlpBlock(16, 0.0).train(), torch.randn(8, 16, requires_grad=True)
compiled_block("test", ["aten.addmm.default#0"])(block, block.forward, (x,), {{}}).sum().backward()
print(sum(counters["aot_autograd"][name] for name in ("autograd_cache_hit", "autograd_cache_miss")),
      counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"])
"""


@needs_compiler
@pytest.mark.slow
def test_a_second_process_takes_compiled_code_from_the_cache(tmp_path: Any) -> None:
    code = _IN_ANOTHER_PROCESS.format(path=[str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    hits = []
    for _ in range(2):
        ran = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        hits.append(int(ran.stdout.split()[-1]))
    assert hits[0] == 0
    assert hits[1] > 0


@needs_compiler
def test_inductor_fit(monkeypatch: Any) -> None:
    monkeypatch.setattr("remat.compiling._VARIANTS", 2)
    torch.manual_seed(0)
    case = Case(Mlps(4, dropout=0.0).train(), torch.randn(512, 16), squared)
    plain = copy.deepcopy(case.model)
    with fit(case, case.model, activations=0.6, compile=True) as handle:
        assert [row.mode for row in handle.status().rows] == ["compiled"] * 4
        assert handle.measured is not None
        assert "compiled with 2 saved sets in" in str(handle.report())
        expected, found = _gradients(plain, case.batch), _gradients(case.model, case.batch)
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5)
        assert _held_bytes(case, case.model, handle) == _planned_bytes(handle.plan)


def test_eager_entries_cost_what_whole_steps_say() -> None:
    """What steps with eager blocks take longer than their menu says goes to the eager entries, so that all
    predictions are those of steps that ran."""
    case = stack(layers=4)
    found = profile(case, case.model)
    more = {Mode.FULL: 0.1, Mode.KEEP: 0.2}
    shifted = as_in_steps(found.kinds, more)
    seconds = found.kinds[0].forward_seconds + found.kinds[0].backward_seconds
    for before, after in zip(found.kinds[0].menu, shifted[0].menu, strict=True):
        longer = more.get(before.mode, 0.0) * seconds
        assert after.extra_seconds == pytest.approx(before.extra_seconds + longer, rel=1e-9)
    least = as_in_steps(found.kinds, dict.fromkeys(more, -1e9))
    assert min(entry.extra_seconds for entry in least[0].menu) == 0


# ------------------------------------------------------------------------------------------ the benchmark


@pytest.mark.slow
def test_the_benchmark_records_what_runs_and_what_fails(tmp_path: Any) -> None:
    script = Path(__file__).parents[1] / "benchmarks" / "compiled.py"
    out = tmp_path / "compiled.json"
    options = ["--backend", "aot_eager", "--stock-backend", "none_such", "--rounds", "1", "--runs", "2"]
    methods = [
        "--methods",
        "plain,regional,remat,remat-whole",
        "--workloads",
        "tiny-llama",
        "--out",
        str(out),
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(remat.__file__).parents[1])}
    subprocess.run([sys.executable, str(script), *options, *methods], env=environment, check=True)
    found = json.loads(out.read_text())["workloads"]["tiny-llama"]["methods"]
    assert found["plain"]["time"] == pytest.approx(1.0)
    assert found["plain"]["share"] == 1.0
    assert "none_such" in found["regional 1.0"]["failed"]
    assert found["remat 0.45"]["share"] <= 0.451
    assert found["remat 0.45"]["fallbacks"] == 0
    assert len(found["remat 0.45"]["time_by_round"]) == 1
    assert "BudgetError" in found["remat 0.04"]["failed"]
    assert found["remat whole 0.45"]["share"] <= 0.451
    assert found["remat whole 0.45"]["fallbacks"] == 0


class Tempered(Block):
    """A number that the compiler takes for a constant."""

    number = 0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.number / 64)


@dynamo_config.patch(recompile_limit=4)
def test_a_block_that_is_compiled_too_often_recomputes() -> None:
    torch.manual_seed(0)
    case = Case(nn.Sequential(*(Tempered() for _ in range(3))).train(), torch.randn(4, 32, 32), squared)
    plain = copy.deepcopy(case.model)
    with fit(case, case.model, activations=0.5) as handle:
        for number in range(1, 7):
            for model in (plain, case.model):
                model.zero_grad()
                for block in model:
                    block.number = number
            assert_same(step(case, plain), step(case, case.model))
        assert {row.why for row in handle.status().rows} == {
            "it was compiled too often, see torch._dynamo.config.recompile_limit"
        }
