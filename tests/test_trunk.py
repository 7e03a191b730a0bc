"""compile="whole" with the head in chunks: the trunk below the head is the one graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import remat
from models import Case, own_loss
from reference import assert_same, step
from remat import fitting
from remat.check.live import LiveBytes
from remat.errors import BudgetError
from remat.planner.schedule import keep_everything, make_plan, with_chunks
from remat.planner.simulate import simulate
from remat.records import Action, Mode, Plan, Profile
from remat.run import compiled
from remat.run.chunk_loss import no_row_ignored
from remat.run.onegraph import below, trunks_of
from remat.run.wrap import wrapped
from test_compiled import COMPILES, Block, counted_peak

pytestmark = COMPILES
WHOLE = "whole+aot_eager"
WORDS = 384
CHUNK = ("keep", "recompute", "chunk")


class Tower(nn.Module):
    def __init__(self, layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 32)
        self.layers = nn.ModuleList([Block(dropout=dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Talks(nn.Module):
    """A head on whatever `hidden` gives."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, WORDS)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def hidden(self, ids: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.hidden(ids)).flatten(0, 1), ids.flatten())


class OneTower(Talks):
    def __init__(self, layers: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.trunk = Tower(layers, dropout)

    def hidden(self, ids: Tensor) -> Tensor:
        return self.trunk(ids)


class TwoTowers(Talks):
    """Their blocks have the same names, as each tower knows them."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Tower(2), Tower(2)

    def hidden(self, ids: Tensor) -> Tensor:
        return self.left(ids) * self.right(ids).tanh()


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Tower(2), Tower(2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.left(ids) * self.right(ids).tanh()


class TowersInOne(Talks):
    def __init__(self) -> None:
        super().__init__()
        self.both = Pair()

    def hidden(self, ids: Tensor) -> Tensor:
        return self.both(ids)


class Flat(Talks):
    """Blocks and head hang on the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 32)
        self.layers = nn.ModuleList([Block() for _ in range(3)])

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def case_of(make: Callable[[], nn.Module]) -> Case:
    torch.manual_seed(0)
    return Case(make().double().train(), torch.randint(0, WORDS, (4, 32)), lambda output, batch: output)


def profile(case: Case, **options: Any) -> Profile:
    return remat.profile(case.model, case.batch, loss=case.loss, compile=WHOLE, allow=CHUNK, **options)


def chunked_plan(found: Profile, sets: list[int], budget_bytes: int = 1 << 40) -> Plan:
    """The head in chunks; layer i runs with saved set `sets[i]`, 0 being the largest."""
    chunks = with_chunks(found)
    assert chunks is not None
    entries = [i for i, entry in enumerate(found.kinds[0].menu) if entry.mode is Mode.COMPILED]
    return make_plan(chunks, [entries[i] for i in sets], budget_bytes, strategy="by hand")


def assert_close(expected: dict[str, Tensor], found: dict[str, Tensor], share: float = 1e-9) -> None:
    """In float64, where another order of summation is far below this."""
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=share, atol=share * 1e-2, msg=name)


def test_the_trunk_is_one_graph() -> None:
    case = case_of(OneTower)
    plain = copy.deepcopy(case.model)
    with remat.fit(case.model, case.batch, activations=0.45, loss=case.loss, compile=WHOLE, allow=CHUNK) as h:
        assert h.plan.profile.one_graph, h.plan.profile.notes
        assert h.plan.profile.chunked
        assert [region.name for region in h.regions] == ["trunk"]
        assert "the trunk trunk is compiled as one graph; head and the loss run eagerly" in str(h.status())
        assert "the trunk trunk is compiled as one graph" in str(h.report())
        assert h.verification is not None
        assert h.verification.ok
        assert not h.verification.bitwise
        assert "head and the loss in chunks" in h.verification.how
        assert_close(step(case, plain), step(case, case.model))
        by_name = {row.name: row for row in h.status().rows}
        assert (by_name["trunk"].mode, by_name["trunk"].fallbacks) == ("compiled", 0)
        assert (by_name["head"].mode, by_name["head"].active) == ("chunk", True)
        assert counted_peak(case, case.model) <= h.plan.budget_bytes
        assert counted_peak(case, plain) > h.plan.budget_bytes
    assert not any(wrapped(module) for module in case.model.modules())
    assert not any("forward" in module.__dict__ for module in case.model.modules())
    for model in (plain, case.model):
        model.zero_grad(set_to_none=True)
    assert_same(step(case, plain), step(case, case.model))


@pytest.mark.parametrize("sets", [[0, 0, 0], [1, 0, 1]])
def test_the_predicted_peak_is_the_measured_one(sets: list[int]) -> None:
    case = case_of(OneTower)
    plan = chunked_plan(profile(case), sets, budget_bytes=0)
    with remat.apply(case.model, plan):
        case.run(case.model).backward()  # compiled
        with no_row_ignored():  # the most that any labels take
            above = counted_peak(case, case.model)
    predicted = plan.predicted_peak_bytes - plan.profile.step.resident
    assert above <= predicted <= 1.02 * above


def test_gradients_that_wait_for_the_end_of_the_graph_are_counted() -> None:
    """Where they are accumulated, a graph's new gradients exist beside the old ones until it has ended."""
    case = case_of(lambda: OneTower(layers=6))
    last = sum(entry.mode is Mode.COMPILED for entry in profile(case).kinds[0].menu) - 1
    found = replace(profile(case), accumulate=True)
    plan = chunked_plan(found, [last] * 6, budget_bytes=0)
    alone = simulate(replace(plan.profile, one_graph=False), plan.choices)
    trunk_bytes = sum(p.nbytes for p in case.model.trunk.parameters())
    with remat.apply(case.model, plan):
        for parameter in case.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        case.run(case.model).backward()
        with LiveBytes() as live:
            live.watch([case.batch, *(p.grad for p in case.model.parameters() if p.grad is not None)])
            start = live.current_bytes
            live.reset_peak()
            case.run(case.model).backward()
            above = live.peak_bytes - start
    predicted = plan.predicted_peak_bytes - plan.profile.step.resident - plan.profile.step.gradients
    assert above > trunk_bytes
    assert above <= 1.001 * predicted <= 1.1 * above
    assert alone.peak_bytes < plan.predicted_peak_bytes
    assert "compile blocks one by one" in _refused(plan.profile)


def _refused(found: Profile) -> str:
    with pytest.raises(BudgetError) as caught:
        remat.plan(found, found.step.resident + 1, allow=CHUNK)
    return str(caught.value)


@pytest.mark.parametrize(
    ("saves", "out_of_reach", "tried", "chosen"),
    [
        (0.02, "", ["head"], "head"),
        (0.02, "head", ["head", "chunks"], "chunks"),
        (0.2, "", ["chunks"], "chunks"),  # logits that are slow to multiply
        (0.2, "chunks", ["chunks", "head"], "head"),
    ],
)
def test_chunks_come_first_where_they_save_more_than_fusing_could(
    saves: float, out_of_reach: str, tried: list[str], chosen: str
) -> None:
    found = profile(case_of(OneTower))
    assert found.head is not None
    found = replace(found, head=replace(found.head, step_seconds=(1 - saves) * found.step_seconds))
    seen = []

    def search(profile: Profile, allowed: Any) -> Any:
        seen.append("chunks" if profile.chunked else "head")
        assert Action.CHUNK not in allowed
        if seen[-1] == out_of_reach:
            raise BudgetError("too small", needed=1)
        plan = make_plan(profile, keep_everything(profile), 1 << 40, strategy="", allow=allowed)
        return fitting._Confirmed(plan, None, None)

    good = fitting._searched_in_one_graph(found, (Action.KEEP, Action.RECOMPUTE, Action.CHUNK), search)
    assert seen == tried
    assert not isinstance(good, str)
    assert ("chunks" if good.plan.profile.chunked else "head") == chosen


def test_a_refused_budget_names_the_trunk() -> None:
    case = case_of(OneTower)
    found = profile(case)
    with pytest.raises(BudgetError, match=r"in chunks, the rest as one graph"):
        remat.plan(found, found.step.resident + 1)
    with pytest.raises(BudgetError):
        remat.fit(case.model, case.batch, found.step.resident + 1, loss=case.loss, compile=WHOLE, allow=CHUNK)
    assert not any(wrapped(module) for module in case.model.modules())


@pytest.mark.parametrize(("make", "trunks"), [(TwoTowers, ("left", "right")), (TowersInOne, ("both",))])
def test_towers_with_blocks_of_the_same_names(make: Callable[[], nn.Module], trunks: tuple[str, ...]) -> None:
    case = case_of(make)
    plain = copy.deepcopy(case.model)
    found = profile(case)
    assert found.head is not None
    assert found.head.trunks == trunks
    last = sum(entry.mode is Mode.COMPILED for entry in found.kinds[0].menu) - 1
    for sets in ([0, last, last, last], [last, last, 0, last]):
        with remat.apply(case.model, chunked_plan(found, sets, budget_bytes=0)) as handle:
            for model in (plain, case.model):
                model.zero_grad(set_to_none=True)
            assert_close(step(case, plain), step(case, case.model))
            assert [region.counts.fallbacks for region in handle.regions] == [0] * len(trunks)
            lost = [v.compiled.lost for r in handle.regions for v in r.variants.values() if v.compiled]
            assert lost == [frozenset()] * len(trunks)


def test_without_a_module_around_the_blocks_alone_the_report_says_so() -> None:
    case = case_of(Flat)
    plain = copy.deepcopy(case.model)
    found = profile(case)
    assert found.head is not None
    assert found.head.trunks == ()
    assert with_chunks(found) is None
    with remat.fit(case.model, case.batch, activations=0.45, loss=case.loss, compile=WHOLE, allow=CHUNK) as h:
        assert not h.plan.profile.one_graph
        assert h.plan.profile.chunked
        note = next(note for note in h.report().as_dict()["notes"] if "one by one" in note)
        assert "holds the blocks without the head" in note
        assert_close(step(case, plain), step(case, case.model))


def test_a_saved_plan_and_code_that_is_compiled_anew(tmp_path: Any) -> None:
    case = case_of(OneTower)
    plain = copy.deepcopy(case.model)
    path = chunked_plan(profile(case), [1, 0, 1]).save(tmp_path / "plan.json")
    compiled._cache.clear()
    torch._dynamo.reset()
    with remat.apply(case.model, remat.Plan.load(path)) as handle:
        assert handle.plan.profile.graph_roots == ("trunk",)
        assert_close(step(case, plain), step(case, case.model))
        assert [region.counts.fallbacks for region in handle.regions] == [0]


def test_dropout_other_lengths_and_evaluation() -> None:
    case = case_of(lambda: OneTower(dropout=0.3))
    found = profile(case)
    last = sum(entry.mode is Mode.COMPILED for entry in found.kinds[0].menu) - 1
    one, other, plain = (copy.deepcopy(case.model) for _ in range(3))
    with remat.apply(one, chunked_plan(found, [0] * 3)), remat.apply(other, chunked_plan(found, [last] * 3)):
        expected = step(case, one)
        assert_same(expected, step(case, other))
        assert_close(step(case, plain), expected)
        short = replace(case, batch=case.batch[:2, :17])
        for model in (plain, other):
            model.zero_grad(set_to_none=True)
        assert_close(step(short, plain), step(short, other))
        for model in (plain, other):
            model.eval()
        with torch.no_grad():
            assert torch.equal(plain(case.batch), other(case.batch))


def test_what_a_compiled_head_needs_is_learned_from_runs(monkeypatch: Any) -> None:
    """A head measured eagerly may need less in the graph: plans are tried from the fastest on. `head_bytes`
    is what it then really needs, as a device's allocator would tell (the meter of the host cannot)."""
    case = case_of(OneTower)
    plain = copy.deepcopy(case.model)
    found = profile(case)
    with pytest.raises(BudgetError) as caught:
        remat.plan(found, found.step.resident + 1, allow=CHUNK[:2])
    eager = fitting._working_outside(found)
    head_bytes, blocks_bytes, tried, really = 0, 0, [], fitting._measured_excess

    def measured(request: Any, handle: remat.Handle, before: int) -> int:
        excess = really(request, handle, before)
        if handle.plan.profile.graph_roots != ("",):
            return excess
        tried.append(handle.plan.choices)
        outside = [
            replace(s, peak_bytes=min(s.peak_bytes, fitting._stays(s) + head_bytes)) if s.call < 0 else s
            for s in found.segments
        ]
        truth = replace(handle.plan.profile, segments=tuple(outside))
        peak = simulate(truth, handle.plan.choices).peak_bytes + blocks_bytes
        return peak - handle.plan.predicted_peak_bytes

    monkeypatch.setattr(fitting, "_measured_excess", measured)
    monkeypatch.setattr(fitting, "_sees_compiled", lambda profile: True)
    below = caught.value.needed - eager // 4
    for head_bytes, blocks_bytes in ((0, 0), (eager // 2, 0), (0, 200_000)):
        tried.clear()
        with remat.fit(case.model, case.batch, below, loss=case.loss, compile=WHOLE) as handle:
            assert handle.plan.profile.graph_roots == ("",)
            assert handle.plan.predicted_peak_bytes <= below
            assert handle.plan.plain_peak_bytes == remat.plan(found, activations=1.0).plain_peak_bytes
            assert_close(step(case, plain), step(case, case.model))
        for model in (plain, case.model):
            model.zero_grad(set_to_none=True)
        assert len(tried) == 1 + bool(head_bytes or blocks_bytes), tried
    head_bytes, blocks_bytes = eager, 0
    with remat.fit(case.model, case.batch, below, loss=case.loss, compile=WHOLE, allow=CHUNK) as handle:
        assert handle.plan.profile.graph_roots == ("trunk",)
        assert remat.Action.CHUNK in handle.plan.allow
        assert handle.plan.plain_peak_bytes == remat.plan(found, activations=1.0).plain_peak_bytes
    with pytest.raises(BudgetError):
        remat.fit(case.model, case.batch, below, loss=case.loss, compile=WHOLE)
    assert not any(wrapped(module) for module in case.model.modules())


@pytest.mark.parametrize(
    ("blocks", "head", "called", "trunks"),
    [
        (["model.layers.0", "model.layers.1"], "lm_head", {"model"}, ("model",)),
        (["bert.encoder.layer.0"], "cls.predictions.decoder", {"bert", "bert.encoder"}, ("bert",)),
        (["bert.encoder.layer.0"], "cls.predictions.decoder", {"bert.encoder"}, ("bert.encoder",)),
        (["encoder.block.0", "decoder.block.0"], "lm_head", {"encoder", "decoder"}, ("encoder", "decoder")),
        (["model.layers.0"], "model.head", {"model"}, ()),
        (["model.body.layers.0"], "model.head", {"model", "model.body"}, ("model.body",)),
        (["layers.0"], "head", set(), ()),
        (["model.layers.0", "extra.0"], "head", {"model"}, ()),
        (["model.layers.0"], "model_head", {"model"}, ("model",)),
    ],
)
def test_which_modules_are_trunks(
    blocks: list[str], head: str, called: set[str], trunks: tuple[str, ...]
) -> None:
    assert trunks_of(blocks, head, called) == trunks


def test_names_below_a_root() -> None:
    assert below("", "a.b") == "a.b"
    assert below("a", "a.b.c") == "b.c"
    assert below("a", "a") == ""
    assert below("a", "ab.c") is None


def test_a_transformers_model() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=WORDS, max_position_embeddings=64,
    )  # fmt: skip
    ids = torch.randint(0, WORDS, (4, 32))
    model = LlamaForCausalLM(config).double().train()
    case = Case(model, {"input_ids": ids, "labels": ids}, own_loss)
    plain = copy.deepcopy(model)
    with remat.apply(model, chunked_plan(profile(case), [1, 0])) as handle:
        assert [region.name for region in handle.regions] == ["model"]
        assert_close(step(case, plain), step(case, model), 1e-4)  # its loss is in float32
        assert [region.counts.fallbacks for region in handle.regions] == [0]
