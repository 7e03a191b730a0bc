"""Inputs of many sizes under one budget: every step within it, every gradient as without remat."""

import copy
import functools
import gc
import json
import logging
import pickle
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import remat
from remat.adaptive import AdaptiveHandle
from remat.check.live import LiveBytes
from remat.planner.simulate import simulate
from remat.records import Mode
from remat.run.monitor import Reading
from remat.run.recipe import compile_recipe
from remat.run.wrap import bypass, wrapped
from remat.sizing import Knot, Measured
from remat.stencil import Stencil, _merged, stencil

pytest.importorskip("transformers")

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def quick_collections():
    gc.freeze()
    yield
    gc.unfreeze()


def llama(layers=4, width=32, longest=2048):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=64, max_position_embeddings=longest, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def tokens(length, rows=1):
    ids = torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(length))
    return {"input_ids": ids, "labels": ids}


def lengths(steps, longest, seed=0):
    """Like real text: log-normal, a few long ones."""
    drawn = numpy.random.default_rng(seed).lognormal(numpy.log(longest / 6), 0.8, steps)
    return [int(n) for n in numpy.clip(drawn, 32, longest)]


def full_peak(profile):
    """With every region recomputed as a whole."""
    return simulate(profile, tuple(profile.kinds[c.kind].reference for c in profile.calls)).peak_bytes


@functools.cache
def fit_once(longest):
    """A budget that the longest batch needs full checkpointing for, or nearly."""
    model = llama(longest=longest)
    budget = int(1.03 * full_peak(remat.profile(model, tokens(longest))))
    handle = remat.fit(model, tokens(longest), budget, adaptive=True)
    assert isinstance(handle, AdaptiveHandle)
    knots = [Knot(*pair) for pair in zip(handle._chart.shapes, handle._family.profiles, strict=True)]
    return budget, handle._fitted, Measured(tuple(reversed(knots)))


def fitted(longest, **options):
    """A model of its own under plans that were made once."""
    model = llama(longest=longest)
    budget, plan, measured = fit_once(longest)
    return model, AdaptiveHandle(remat.apply(model, plan), measured, check=True, **options), budget


@pytest.fixture(scope="module")
def small():
    return fitted(256)


def gradients(model):
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def plain_gradients(model, batch):
    with bypass():
        model(**batch).loss.backward()
    return gradients(model)


def assert_equal(expected, found):
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert torch.equal(gradient, found[name]), name


def counted_peak(model, batch, run):
    """Live bytes over a step, counted without anything of the planner's."""
    with LiveBytes() as live:
        live.watch([*model.parameters(), *model.buffers(), batch["input_ids"], batch["labels"]])
        live.reset_peak()
        run()
    return live.peak_bytes


class Flops(TorchDispatchMode):
    """Counts, and holds nothing: torch's FlopCounterMode keeps tensors alive through its hooks."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            rows, heads, length, width = args[0].shape
            self.total += 4 * rows * heads * length * args[1].shape[2] * width
        elif func._overloadpacket in flop_registry:
            self.total += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


def flops(run):
    with Flops() as counter:
        run()
    return counter.total


def checkpoint_everything_flops(layers, longest):
    """Of forwards that run again when every block is checkpointed, by length: exactly quadratic."""
    model = llama(layers, longest=longest)
    counts = {}
    for n in (32, 64, 96, 128):
        plain = flops(lambda n=n: model(**tokens(n)).loss.backward())
        remat.enable(model)
        counts[n] = flops(lambda n=n: model(**tokens(n)).loss.backward()) - plain
        remat.disable(model)
    curve = numpy.polyfit(list(counts)[:3], list(counts.values())[:3], 2)
    assert numpy.polyval(curve, 128) == pytest.approx(counts[128], rel=1e-6)
    return lambda length: float(numpy.polyval(curve, length))


@pytest.mark.parametrize(("longest", "steps"), [(256, 30), pytest.param(2048, 300, marks=pytest.mark.slow)])
def test_a_stream_of_lengths(longest, steps):
    """Every step under the budget by independent counting, every gradient equal, most work not repeated."""
    model, handle, budget = fitted(longest)
    everything = checkpoint_everything_flops(4, longest)
    again = base = 0
    with handle:
        for length in [longest, *lengths(steps - 1, longest)]:
            batch = tokens(length)
            with bypass():
                plain = flops(lambda batch=batch: model(**batch).loss.backward())
            expected = gradients(model)
            total = []

            def step(batch=batch, total=total):
                total.append(flops(lambda: handle.step(lambda: model(**batch).loss)))

            peak = counted_peak(model, batch, step)
            assert peak <= budget, (length, peak / budget)
            assert_equal(expected, gradients(model))
            again += total[0] - plain
            base += everything(length)
        stats = handle.stats
        assert stats.steps == steps
        assert stats.hits + stats.misses == steps
        assert not stats.fell_back
        print(f"recomputed {again / base:.3f} of checkpointing everything; {stats.misses} sizes planned")
        assert again <= 0.35 * base
    assert not any(wrapped(module) for module in model.modules())


def test_a_short_batch_is_left_alone_and_a_long_one_is_not(small):
    model, handle, _ = small
    model(**tokens(256))
    assert len(handle.regions) == 4
    model(**tokens(40))
    assert not handle.regions
    assert not any(wrapped(module) for module in model.modules())
    assert all(handle.plan.entry(i).mode is Mode.KEEP for i in range(4))


def test_recipes_run_at_sizes_where_nothing_was_captured(small):
    """Their graphs are worked out from the measured sizes, and fit: nothing falls back."""
    model, handle, budget = small
    before = handle.stats.fell_back
    ran = 0
    for length in (117, 131, 150):
        expected = plain_gradients(model, tokens(length))
        for _ in range(2):
            assert (
                counted_peak(model, tokens(length), lambda n=length: model(**tokens(n)).loss.backward())
                <= budget
            )
            assert_equal(expected, gradients(model))
        ran += sum(v.program is not None for r in handle.regions for v in r.variants.values())
    assert length not in handle.sizes
    assert ran
    assert handle.stats.fell_back == before


@pytest.mark.parametrize(("rows", "length"), [(2, 64), (2, 120), (3, 40), (5, 50)])
def test_more_rows_of_shorter_length(small, rows, length):
    model, _, budget = small
    batch = tokens(length, rows)
    expected = plain_gradients(model, batch)
    assert counted_peak(model, batch, lambda: model(**batch).loss.backward()) <= budget
    assert_equal(expected, gradients(model))


def test_a_batch_that_no_plan_holds_is_refused_before_it_runs(small):
    model, _, budget = small
    with pytest.raises(remat.BudgetError, match="size 1024") as error:
        model(**tokens(1024))
    assert error.value.needed > budget
    assert all(p.grad is None for p in model.parameters())
    model(**tokens(100)).loss.backward()  # and training goes on
    model.zero_grad()


def test_a_batch_somewhat_larger_than_the_largest_measured():
    model = llama(longest=512)
    profile = remat.profile(model, tokens(192))
    budget = int(2 * full_peak(profile))
    with remat.fit(model, tokens(192), budget, adaptive=True) as handle:
        batch = tokens(280)
        expected = plain_gradients(model, batch)
        assert counted_peak(model, batch, lambda: model(**batch).loss.backward()) <= budget
        assert_equal(expected, gradients(model))
        assert max(handle.sizes) == 192
        assert not handle._family.stepped  # an ordinary model is taken for one
        assert handle._chart.rows_as_length


def test_a_graph_that_does_not_fit_is_found_out_within_the_budget(small, monkeypatch):
    """The region keeps everything, later ones recompute as a whole, and that size uses no recipes again."""
    model, handle, budget = small
    at = Stencil.at
    monkeypatch.setattr(Stencil, "at", lambda self, size: at(self, size + 8))
    length = 141
    expected = plain_gradients(model, tokens(length))
    before = handle.stats.fell_back
    for _ in range(2):
        peak = counted_peak(model, tokens(length), lambda: model(**tokens(length)).loss.backward())
        assert peak <= budget
        assert_equal(expected, gradients(model))
    assert handle.stats.fell_back > before
    assert all(region.otherwise is not None for region in handle.regions)


def test_recipes_that_never_fit_are_not_tried_for_ever(monkeypatch):
    model, handle, _ = fitted(256)
    at = Stencil.at
    monkeypatch.setattr(Stencil, "at", lambda self, size: at(self, size + 8))
    for length in range(120, 136):
        model(**tokens(length)).loss.backward()
    assert handle.stats.fell_back == 3
    handle.remove()


def test_a_size_is_confirmed_only_by_a_forward(monkeypatch):
    """Running out of memory before the first region has run confirms nothing."""
    model, handle, _ = fitted(256)
    fault = Fault(model, layer=0)
    fault.left = 1
    handle.step(lambda: model(**tokens(125)).loss)
    key = handle._now[0]
    assert handle._ready[handle._now].fresh
    assert key not in handle._confirmed
    model(**tokens(125))
    assert key in handle._confirmed
    handle.remove()


def test_a_stencil_is_what_compiling_would_give(small):
    """Function by function: the same code with numbers in the places that were left open."""
    _, handle, _ = small
    family = handle._family
    recipes = [entry.recipe for entry in family.profiles[-1].kinds[0].menu if entry.recipe]
    graphs = [profile.kinds[0].graph for profile in family.profiles]
    for recipe in recipes[:: len(recipes) // 3]:
        made = stencil(family.sizes, graphs, functools.partial(family.graph_at, 0), recipe, CPU).at(100)
        expected = compile_recipe(family.graph_at(0, 100), recipe, CPU)
        assert [(s.shape, s.stride, s.label) for s in made.slots] == [
            (s.shape, s.stride, s.label) for s in expected.slots
        ]
        assert made.probes.places == expected.probes.places
        again = pickle.loads(pickle.dumps(made))
        assert again.text == expected.text
        code = _text_of(family, graphs, recipe)
        for place, number in enumerate(made.find.__globals__["K"]):
            code = code.replace(f"K[{place}]", str(number))
        assert code == expected.text


def _text_of(family, graphs, recipe):
    return _merged(family.sizes, [compile_recipe(graph, recipe, CPU).text for graph in graphs])[0]


def test_recipes_at_sizes_that_were_not_measured_run_unfused(small):
    _, handle, _ = small
    recipe = next(e.recipe for e in handle._family.profiles[-1].kinds[0].menu if e.recipe)
    assert not handle._programs(100)(0, replace(recipe, fused=True)).recipe.fused


def test_a_size_that_comes_often_is_compiled_for_itself(small, monkeypatch):
    model, handle, _ = small
    monkeypatch.setattr("remat.adaptive._has_fused", lambda plan: True)
    handle._ready.clear()
    expected = plain_gradients(model, tokens(123))
    kinds = []
    for _ in range(10):
        model(**tokens(123)).loss.backward()
        assert_equal(expected, gradients(model))
        programs = [v.program for r in handle.regions for v in r.variants.values() if v.program]
        kinds.append({type(program).__name__ for program in programs})
    assert kinds[0] == {"_Sized"}
    assert kinds[-1] == {"Program"}


def test_plans_are_remembered_and_forgotten(small, monkeypatch):
    model, handle, _ = small
    monkeypatch.setattr("remat.adaptive._REMEMBERED", 4)
    for length in range(40, 60):
        model(**tokens(length))
    assert len(handle._ready) <= 5
    hits = handle.stats.hits
    model(**tokens(59))
    model(**tokens(59))
    assert handle.stats.hits >= hits + 1


def test_one_plan_serves_many_lengths(small):
    model, handle, _ = small
    handle._ready.clear()
    handle._plans.clear()
    for length in range(96, 256, 4):
        model(**tokens(length))
    assert len(handle._plans) <= 2 * 13  # an octave and a half, eight to the octave, with and without recipes


def test_events_go_to_the_log_to_a_callback_and_into_stats(caplog):
    seen = []
    with caplog.at_level(logging.DEBUG, logger="remat"):
        model, handle, _ = fitted(256, on_event=seen.append)
        with handle:
            for length in (256, 40, 256):
                handle.step(lambda n=length: model(**tokens(n)).loss)
            assert [e.kind for e in seen].count("plan changed") == 3
            assert list(handle.stats.events) == seen
            assert handle.stats.plan_changes == 3
            text = str(handle.report())
            assert "plan changed" in text
            assert handle.stats.as_dict()["counts"]["plan changed"] == 3
    assert any("plan changed" in record.message for record in caplog.records)


class Fault:
    def __init__(self, model, layer=2):
        self.left = 0
        model.model.layers[layer].register_forward_pre_hook(self.strike)

    def strike(self, module, args):
        if self.left:
            self.left -= 1
            raise torch.OutOfMemoryError("injected")


def test_running_out_of_memory_tightens_and_room_loosens(monkeypatch):
    model, handle, budget = fitted(256)
    fault = Fault(model)
    batch = tokens(130)
    expected = plain_gradients(model, batch)
    handle.step(lambda: model(**batch).loss)
    first = handle.plan.predicted_peak_bytes
    model.zero_grad()
    fault.left = 1
    handle.step(lambda: model(**batch).loss)
    assert_equal(expected, gradients(model))
    assert handle.plan.predicted_peak_bytes < first
    assert handle.stats.recovered == 1
    assert handle.stats.counts["tightened"] == 1
    tight = handle.plan.predicted_peak_bytes
    monkeypatch.setattr("remat.adaptive.read_device", lambda device: Reading(4 * budget, budget, budget))
    for _ in range(8 * 20):
        model(**batch)
    assert handle.stats.counts["loosened"] == 1
    assert handle.plan.predicted_peak_bytes > tight
    monkeypatch.setattr(
        "remat.adaptive.read_device", lambda device: Reading(4 * budget, budget, budget, 3 * budget)
    )
    for _ in range(8 * 8):
        model(**batch)
    assert handle.stats.counts["tightened"] >= 2
    handle.remove()


def test_never_an_endless_loop_here_either():
    model, handle, _ = fitted(256)
    fault = Fault(model)
    fault.left = 10**9
    with pytest.raises(remat.RecoveryError) as error:
        handle.step(lambda: model(**tokens(180)).loss)
    assert fault.left == 10**9 - 4
    assert error.value.needed
    fault.left = 0
    handle.step(lambda: model(**tokens(180)).loss)
    handle.remove()


def test_the_model_is_as_before_afterwards():
    model = llama(longest=128)
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    budget = 10**9
    with remat.fit(model, tokens(128), budget, adaptive=True) as handle:
        model(**tokens(100)).loss.backward()
        handle.remove()
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks
    for name, module in model.named_modules():
        assert ("forward" in module.__dict__) == ("forward" in before[name])


def test_plans_stay_on_where_nobody_keeps_the_handle():
    """The model does, until it is removed."""
    model = Rows()
    kept = weakref.ref(remat.fit(model, torch.randn(256, 32), activations=0.5, adaptive=True))
    gc.collect()
    model(torch.randn(256, 32)).backward()
    assert kept().stats.steps == 1
    assert any(wrapped(module) for module in model.modules())
    kept().remove()
    gc.collect()
    assert kept() is None
    assert not any(wrapped(module) for module in model.modules())


@pytest.mark.parametrize("kind", ["planned", "advice"])
def test_nothing_stays_on_the_model_if_planning_ahead_raises(kind):
    def stop(event):
        if event.kind == kind:
            raise KeyboardInterrupt

    model = Rows()
    batch = torch.randn(256 if kind == "planned" else 1, 32)  # one row: no other size can be measured
    with pytest.raises(KeyboardInterrupt):
        remat.fit(model, batch, 10**9, adaptive=True, on_event=stop)
    assert not model._forward_pre_hooks
    assert not any(wrapped(module) for module in model.modules())


def test_copies_are_not_watched(small):
    model, handle, _ = small
    model(**tokens(200))
    steps = handle.stats.steps
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        expected = plain_gradients(model, tokens(200))
        other(**tokens(200)).loss.backward()
        assert_equal(expected, gradients(other))
    assert handle.stats.steps == steps


def test_evaluation_changes_no_plan(small):
    model, handle, _ = small
    steps = handle.stats.steps
    with torch.no_grad():
        model(**tokens(77))
    assert handle.stats.steps == steps


def _in_eval(model, batch):
    model.eval()
    model(**batch).loss.backward()
    model.train()


def _under_a_hook(model, batch):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        model(**batch).loss.backward()


@pytest.mark.parametrize("unusual", [_in_eval, _under_a_hook])
@pytest.mark.parametrize("length", [256, 143])
def test_one_unusual_forward_does_not_turn_recipes_off(unusual, length):
    model, handle, _ = fitted(256)
    batch = tokens(length)
    expected = plain_gradients(model, batch)

    def recipes():
        return sum(v.program is not None for r in handle.regions for v in r.variants.values())

    model(**batch)
    before = recipes()
    assert before
    unusual(model, batch)
    assert handle.stats.fell_back == 1
    assert not recipes()
    assert_equal(expected, gradients(model))
    model(**batch).loss.backward()
    assert recipes() == before
    assert handle.stats.fell_back == 1
    assert_equal(expected, gradients(model))
    handle.remove()


def test_other_inputs_than_were_measured_recompute_everything(small):
    model, handle, _ = small
    batch = {**tokens(64), "attention_mask": torch.ones(1, 64, dtype=torch.long)}
    expected = plain_gradients(model, batch)
    before = handle.stats.fell_back
    model(**batch).loss.backward()
    assert_equal(expected, gradients(model))
    assert handle.stats.fell_back == before + 1
    assert len(handle.regions) == 4


def test_inputs_off_the_chart_that_may_not_fit_are_refused_before_they_run(small):
    """An argument that was not measured, in a batch with more elements than any that was."""
    model, handle, budget = small
    batch = {**tokens(256), "attention_mask": torch.ones(1, 256, dtype=torch.long)}
    before = handle.stats.fell_back
    with pytest.raises(remat.BudgetError, match=r"attention_mask \[1, 256\].*2.25 times.*adaptive=") as error:
        model(**batch)
    assert error.value.needed > budget
    assert handle.stats.fell_back == before
    model(**tokens(100)).loss.backward()  # and training goes on
    model.zero_grad()


def test_a_dimension_that_did_not_vary_is_within_the_budget_or_refused():
    model, batch = Rows(), torch.randn(64, 8, 32)
    budget = 2 * full_peak(remat.profile(model, batch))
    with remat.fit(model, batch, budget, adaptive=[batch[:32].clone()]):
        assert counted(model, torch.randn(64, 10, 32)) <= budget
        with pytest.raises(remat.BudgetError, match="no measured size is like"):
            model(torch.randn(64, 72, 32))
        assert all(p.grad is None for p in model.parameters())


def bert():
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8, vocab_size=64,
        max_position_embeddings=600, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(config).train()


def padded(length, rows):
    batch = tokens(length, rows)
    mask = torch.ones_like(batch["input_ids"])
    mask[1:, length - length // 3 :] = 0
    return {**batch, "attention_mask": mask}


def test_padding_stays_in_smaller_batches_and_short_ones_keep_everything():
    """Without any the model builds no mask: another step, which would say nothing of this one."""
    model = bert()
    budget = int(1.15 * full_peak(remat.profile(model, padded(96, 8))))
    with remat.fit(model, padded(96, 8), budget, adaptive=True) as handle:
        assert handle.sizes == (8, 32, 96)
        for length in (96, 24, 61):
            batch = padded(length, 8)
            expected = plain_gradients(model, batch)
            assert counted_peak(model, batch, lambda b=batch: model(**b).loss.backward()) <= budget
            assert_equal(expected, gradients(model))
            assert handle.regions or length == 24
        assert not handle.stats.fell_back


def test_fewer_rows_of_a_longer_length_off_the_chart():
    """No more elements, and attention takes more: within the budget, or refused before it runs."""
    model, batch = bert(), padded(96, 4)
    budget = int(1.15 * full_peak(remat.profile(model, batch)))
    with remat.fit(model, batch, budget, adaptive=[batch]) as handle:
        assert handle.sizes == (1,)
        expected = plain_gradients(model, batch)
        assert counted_peak(model, batch, lambda: model(**batch).loss.backward()) <= budget
        assert_equal(expected, gradients(model))
        for rows, length in ((2, 192), (1, 256)):
            with pytest.raises(remat.BudgetError, match=r"may take .* times the memory.*adaptive="):
                model(**padded(length, rows))


def counted(model, x):
    with LiveBytes() as live:
        live.watch([*model.parameters(), x])
        live.reset_peak()
        model(x).backward()
    model.zero_grad()
    return live.peak_bytes


@pytest.mark.parametrize("rows", [[256, 64, 64], [256, 256]])
def test_a_size_that_is_given_twice_is_one_size(rows):
    model = Rows()
    others = [torch.randn(n, 32) for n in rows]
    with remat.fit(model, torch.randn(256, 32), 10**9, adaptive=others) as handle:
        assert handle.sizes == ((64, 256) if 64 in rows else (1,))
        assert not any("one line" in event.text for event in handle.stats.events)


class Rows(nn.Module):
    """No sequence: the number of rows is what varies."""

    def __init__(self, width=32, depth=4):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
            )
            for _ in range(depth)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class Tower(nn.Module):
    """Text, with an image beside each row, or padded inside to whole windows."""

    def __init__(self, window=1, image=0, width=32, depth=2):
        super().__init__()
        self.window, self.image = window, image
        self.embed, self.head = nn.Embedding(64, width), nn.Linear(width, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )

    def forward(self, input_ids, labels, pixels=None):
        x = self.embed(input_ids)
        x = nn.functional.pad(x, (0, 0, 0, -x.shape[1] % self.window))
        x = x if pixels is None else torch.cat([pixels, x], 1)
        for block in self.blocks:
            x = x + block(x)
        start = 0 if pixels is None else pixels.shape[1]
        logits = self.head(x[:, start : start + labels.shape[1]])
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def batch(self, length, rows=1):
        pixels = torch.randn(rows, self.image, 32, generator=torch.Generator().manual_seed(rows))
        return tokens(length, rows) | ({"pixels": pixels} if self.image else {})


def within_or_refused(model, batch, budget):
    """Whether it ran: then within the budget, with the gradients of the untouched model."""
    with bypass():
        model(**batch).backward()
    expected = gradients(model)
    with LiveBytes() as live:
        live.watch([*model.parameters(), *batch.values()])
        live.reset_peak()
        try:
            model(**batch).backward()
        except remat.BudgetError:
            assert all(p.grad is None for p in model.parameters())
            return False
    assert live.peak_bytes <= budget, (live.peak_bytes / budget, batch["input_ids"].shape)
    assert_equal(expected, gradients(model))
    return True


def test_more_rows_of_a_shorter_length_with_an_image_beside_each():
    """Twice the rows and half the length are twice the images."""
    torch.manual_seed(0)
    model = Tower(image=64)
    budget = int(1.3 * full_peak(remat.profile(model, model.batch(240, 2))))
    with remat.fit(model, model.batch(240, 2), budget, adaptive=True) as handle:
        assert not handle._chart.rows_as_length
        shapes = [(2, 240), (3, 160), (3, 100), (16, 30), (20, 24), (2, 240)]
        ran = [within_or_refused(model, model.batch(length, rows), budget) for rows, length in shapes]
    assert ran == [True, True, True, False, False, True]


def test_a_model_that_pads_inside():
    """Just above a step no chord holds; beyond the largest length nothing is known."""
    torch.manual_seed(0)
    model = Tower(window=64)
    budget = int(1.05 * full_peak(remat.profile(model, model.batch(256))))
    with remat.fit(model, model.batch(256), budget, adaptive=True) as handle:
        assert handle._family.stepped
        assert any("in steps" in event.text for event in handle.stats.events)
        for length in (256, 193, 129, 100, 65, 20):
            assert within_or_refused(model, model.batch(length), budget)
        with pytest.raises(remat.BudgetError, match=r"grows in steps.*fit with the largest batch"):
            model(**model.batch(257))


def test_rows_vary_where_there_is_no_sequence():
    torch.manual_seed(0)
    model = Rows()
    batch = torch.randn(256, 32)
    with remat.fit(model, batch, activations=0.6, adaptive=True) as handle:
        assert handle.sizes == (64, 128, 256)
        for rows in (256, 255, 90, 7):
            x = torch.randn(rows, 32)
            torch.manual_seed(rows)
            with bypass():
                model(x).backward()
            expected = gradients(model)
            torch.manual_seed(rows)
            model(x).backward()
            assert_equal(expected, gradients(model))


def test_batches_of_ones_own_choice():
    model = llama(longest=128)
    others = [tokens(32), tokens(64)]
    with remat.fit(model, tokens(128), 10**9, adaptive=others) as handle:
        assert handle.sizes == (32, 64, 128)
        model(**tokens(100)).loss.backward()


def test_sizes_that_cannot_be_measured_are_named():
    class Fixed(Rows):
        def forward(self, x):
            if x.shape[0] != 256:
                raise ValueError("256 rows, please")
            return super().forward(x)

    model = Fixed()
    with remat.fit(model, torch.randn(256, 32), activations=0.6, adaptive=True) as handle:
        assert any("256 rows, please" in event.text for event in handle.stats.events)
        model(torch.randn(256, 32)).backward()


@pytest.mark.parametrize("adaptive", ["yes", 1.5, {"input_ids": 1}])
def test_adaptive_must_be_true_or_batches(adaptive):
    model = Rows()
    with pytest.raises(remat.InputError, match="adaptive="):
        remat.fit(model, torch.randn(64, 32), activations=0.6, adaptive=adaptive)


def test_a_step_that_does_not_call_the_model_is_refused():
    model = Rows()
    x = torch.randn(64, 32)

    def step():
        y = x
        for block in model.blocks:
            y = y + block(y)
        return y.square().mean()

    with pytest.raises(remat.InputError, match="does not call"):
        remat.fit(model, step=step, activations=0.6, adaptive=True)


@pytest.mark.parametrize("rows", [(64, 32), (64, 64)])
def test_a_step_of_two_calls_is_refused_before_anything_is_changed(rows):
    """Each call would get the whole budget, and what the other holds would come on top."""
    model, batch = Rows(), [torch.randn(n, 32) for n in rows]
    flags = {name: module.training for name, module in model.named_modules()}
    with pytest.raises(remat.InputError, match=r"calls Rows 2 times \(x \[64, 32\]; .*adaptive=False"):
        remat.fit(model, batch, step=lambda b: model(b[0]) * model(b[1]), activations=0.6, adaptive=True)
    assert not model._forward_pre_hooks
    assert not any(wrapped(module) for module in model.modules())
    assert {name: module.training for name, module in model.named_modules()} == flags


def test_a_call_without_gradients_is_no_step():
    """A reference pass before the one that trains, of another size: the plans are for the latter."""
    torch.manual_seed(0)
    model, x = Rows(), torch.randn(128, 32)

    def step(x):
        with torch.no_grad():
            target = model(x[:16])
        return model(x) - target

    def gradients_of_a_step():
        torch.manual_seed(1)
        step(x).backward()
        return gradients(model)

    expected = gradients_of_a_step()
    with remat.fit(model, x, step=step, activations=0.6, adaptive=True) as handle:
        assert handle.sizes == (32, 64, 128)
        assert_equal(expected, gradients_of_a_step())
        assert handle.stats.steps == 1


@pytest.mark.slow
def test_the_benchmark_runs_without_an_accelerator(tmp_path):
    script = Path(__file__).parent.parent / "benchmarks" / "adaptive.py"
    out = tmp_path / "adaptive.json"
    command = [sys.executable, str(script), "--steps", "4", "--passes", "1", "--out", str(out)]
    subprocess.run(command, check=True, timeout=600, capture_output=True)
    found = json.loads(out.read_text())
    assert found["stream"]["within_budget"]
    assert not found["stream"]["fell_back"]
    assert found["shortage"]["recovered"] == 1
    assert found["shortage"]["gradients_equal"]
