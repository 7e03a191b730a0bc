"""Calls over pieces of their inputs: same values and gradients within rounding, nothing lost that leaves them
on the side; and regions over pieces of the batch, as entries of the menu."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import remat
from models import Case, squared
from remat.check.live import LiveBytes
from remat.errors import RecomputeError, RematError
from remat.handle import Handle
from remat.planner.bounds import least_budget
from remat.planner.schedule import make_plan
from remat.records import Action, Entry, Mode, Profile
from remat.run.pieces import WholeOnlyError, in_pieces, length_along
from remat.show.decisions import region_rows

WIDTH = 8
EXACT = ("keep", "recompute")
CHUNK = (*EXACT, "chunk")
SENDING = (*EXACT, "offload")
HOST = (*CHUNK, "offload")


class Mixing(nn.Module):
    """Attention over the sequence: rows of the batch do not see each other, positions do."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: Any = 1.0) -> Tensor:
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, mask) * scale
        return x + self.down(F.gelu(self.up(x)))


def in_two_ways(
    module: nn.Module, cut: tuple[int, int], inputs: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Outputs and gradients of a call as it is, and in pieces."""

    def run(call: Callable[..., Any]) -> dict[str, Any]:
        module.zero_grad(set_to_none=True)
        args, kwargs = inputs()
        given = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.requires_grad]
        outputs = call(*args, **kwargs)
        tensors = [t for t in torch.utils._pytree.tree_leaves(outputs) if isinstance(t, Tensor)]
        sum(t.square().sum() for t in tensors if t.requires_grad).backward()  # type: ignore[union-attr]
        found = {f"input {n}": t.grad for n, t in enumerate(given)}
        found |= {name: p.grad for name, p in module.named_parameters()}
        return {**found, **{f"output {n}": t.detach() for n, t in enumerate(tensors)}, "nest": outputs}

    pieces = run(lambda *args, **kwargs: in_pieces("it", module, module.forward, args, kwargs, cut))
    return run(module), pieces


def assert_close(expected: dict[str, Any], found: dict[str, Any]) -> None:
    for name, value in expected.items():
        if name == "nest":
            continue
        assert (value is None) == (found[name] is None), name
        if value is not None:
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("size", [1, 2, 3, 6, 9])
def test_inputs_are_cut_shared_and_given_by_name(size: int) -> None:
    torch.manual_seed(0)
    module = Mixing().double()

    def inputs() -> tuple[tuple[Any, ...], dict[str, Any]]:
        torch.manual_seed(1)
        x, mask = torch.randn(6, 5, WIDTH).double().requires_grad_(), torch.randn(6, 5, 5).double()
        shared = torch.randn(1, 1, WIDTH).double().requires_grad_()  # every piece reads all of it
        return (x, mask), {"scale": shared}

    expected, found = in_two_ways(module, (0, size), inputs)
    assert_close(expected, found)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        a = torch.tanh(self.inner(x))
        return {"a": (a, None), "best": a.argmax(-1), "number": 3, "b": [a * y, x.detach()]}


def test_nests_numbers_and_what_has_no_gradient_come_back_as_they_are() -> None:
    torch.manual_seed(0)
    module = Nested().double()

    def inputs() -> tuple[tuple[Any, ...], dict[str, Any]]:
        torch.manual_seed(1)
        return (torch.randn(4, WIDTH).double(), torch.randn(4, WIDTH).double().requires_grad_()), {}

    expected, found = in_two_ways(module, (0, 3), inputs)
    assert_close(expected, found)
    assert found["unused.weight"] is None
    nest = found["nest"]
    assert (nest["a"][1], nest["number"], nest["best"].dtype) == (None, 3, torch.int64)
    assert torch.equal(nest["best"], expected["nest"]["best"])
    assert not nest["best"].requires_grad


def test_the_batch_may_be_second_and_outputs_lie_as_they_would() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0).double()  # (sequence, batch, width)
    expected, found = in_two_ways(layer, (1, 2), lambda: ((torch.ones(3, 4, WIDTH).double().cumsum(0),), {}))
    assert_close(expected, found)
    convolution = nn.Conv2d(3, 4, 3, padding=1).double().to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 6, 6).double().to(memory_format=torch.channels_last)
    expected, found = in_two_ways(convolution, (0, 2), lambda: ((x,), {}))
    assert_close(expected, found)
    assert found["output 0"].stride() == expected["output 0"].stride()


def test_length_along() -> None:
    sizes = [torch.empty(2, 3), torch.empty(7), torch.empty(5, 4)]
    assert [length_along(sizes, dim) for dim in range(3)] == [5, 4, 0]


def test_hooks_fire_once_the_graph_may_be_kept_and_has_no_second_derivative() -> None:
    module, x = Mixing(), torch.randn(4, 5, WIDTH)
    fired: list[str] = []
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    loss = in_pieces("it", module, module.forward, (x,), {}, (0, 1)).sum()
    loss.backward(retain_graph=True)
    assert sorted(fired) == sorted(name for name, _ in module.named_parameters())
    once = module.up.weight.grad.clone()
    loss.backward()
    assert torch.equal(module.up.weight.grad, 2 * once)
    loss = in_pieces("it", module, module.forward, (x,), {}, (0, 1)).sum()
    with pytest.raises(RematError, match="no second derivative"):
        torch.autograd.grad(loss, list(module.parameters()), create_graph=True)


def test_what_is_written_in_place_is_refused() -> None:
    module = nn.Linear(WIDTH, WIDTH)

    def writing(x: Tensor) -> Tensor:
        x[:, 0] = 1.0
        return module(x)

    with pytest.raises(RecomputeError, match="input 0 was written in place"):
        in_pieces("it", module, writing, (torch.randn(4, WIDTH),), {}, (0, 2))
    y = in_pieces("it", module, module.forward, (x := torch.randn(4, WIDTH),), {}, (0, 2))
    x.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_one_piece_lives_at_a_time_and_steps_leave_nothing() -> None:
    torch.manual_seed(0)
    module, x = Mixing(32), torch.randn(16, 64, 32)

    def peak(call: Callable[..., Tensor]) -> int:
        module.zero_grad(set_to_none=True)
        with LiveBytes("cpu") as live:
            call(x.clone().requires_grad_()).sum().backward()
            return live.peak_bytes

    pieces = lambda x: in_pieces("it", module, module.forward, (x,), {}, (0, 1))  # noqa: E731
    row = x[0].nbytes
    assert peak(module) > 200 * row
    assert peak(pieces) < 90 * row  # four tensors as large as x, and one row's share of the rest
    levels = []
    with LiveBytes("cpu") as live:
        for _ in range(5):
            module.zero_grad(set_to_none=True)
            pieces(x).sum().backward()
            levels.append(live.current_bytes)
    assert len(set(levels[1:])) == 1


# ------------------------------------------------------------------------------------ taken from the inside


class Telling(nn.Module):
    """Has a loss of its own beside its output, and leaves it where `keep` says."""

    def __init__(self, keep: str = "") -> None:
        super().__init__()
        self.up, self.down, self.keep = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), keep
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.up(x))
        if self.keep == "attribute":
            self.loss = hidden.square().mean()
        elif self.keep == "list":
            self.losses.append(hidden.mean())
        elif self.keep == "detached":
            self.loss = hidden.detach().mean()
        return self.down(hidden)


@pytest.mark.parametrize("keep", ["attribute", "list"])
def test_a_tensor_that_is_held_outside_is_noticed(keep: str) -> None:
    module = Telling(keep)
    with pytest.raises(WholeOnlyError, match="is held by something outside"):
        in_pieces("it", module, module.forward, (torch.randn(4, WIDTH),), {}, (0, 2))


def test_what_has_no_graph_is_of_one_piece_too_and_a_hook_may_look_on() -> None:
    module = Telling("detached")
    with pytest.raises(WholeOnlyError, match="changes attribute 'loss' of Telling"):
        in_pieces("it", module, module.forward, (torch.randn(4, WIDTH),), {}, (0, 2))
    assert not hasattr(module, "loss")
    module = Telling()
    seen = []
    module.up.register_forward_hook(lambda _, args, output: seen.append(float(output.detach().sum())))
    in_pieces("it", module, module.forward, (torch.randn(4, WIDTH),), {}, (0, 2)).sum().backward()
    assert len(seen) == 4
    taken: list[Tensor] = []
    module.up.register_forward_hook(lambda _, args, output: taken.append(output))
    with pytest.raises(WholeOnlyError):
        in_pieces("it", module, module.forward, (torch.randn(4, WIDTH),), {}, (0, 2))


class Circular(nn.Linear):
    """What its forward makes is in a cycle, and goes only when Python collects it."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        cycle: dict[str, Any] = {"y": y}
        cycle["itself"] = cycle
        return y * 2


def test_cycles_are_not_taken_for_holders_and_the_fence_raises_where_nobody_looked() -> None:
    module, x = Circular(WIDTH, WIDTH), torch.randn(4, WIDTH)
    gc.disable()  # it would go by chance otherwise
    try:
        in_pieces("it", module, module.forward, (x,), {}, (0, 2)).sum().backward()
    finally:
        gc.enable()
    taken: list[Tensor] = []
    module.register_forward_hook(lambda _, args, output: taken.append(output))
    y = in_pieces("it", module, module, (x,), {}, (0, 2))
    with pytest.raises(RecomputeError, match="a tensor from inside of it is used outside"):
        (y.sum() + taken[0].sum()).backward()


class Layer(nn.Module):
    """A block whose MLP could run in chunks of the sequence, and all of which in pieces of the batch."""

    def __init__(self, keep: str = "") -> None:
        super().__init__()
        self.mix, self.mlp = nn.Linear(64, 64), Telling(keep)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.mix(x.transpose(1, 2))).transpose(1, 2)
        return x + self.mlp(x)


class Beside(nn.Module):
    """Adds what its blocks leave on the side to the loss."""

    def __init__(self, keep: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer("attribute" if keep == "attribute" else "") for _ in range(3))
        self.keep = keep

    def forward(self, x: Tensor) -> Tensor:
        taken: list[Tensor] = []
        hooks = []
        if self.keep == "hook":  # as models do that give their hidden states on demand
            take = lambda _, args, output: taken.append(output)  # noqa: E731
            hooks = [layer.mlp.up.register_forward_hook(take) for layer in self.layers]
        for layer in self.layers:
            x = layer(x)
            if self.keep == "attribute":
                taken.append(layer.mlp.loss)
        for hook in hooks:
            hook.remove()
        return x.square().mean() + sum(tensor.square().mean() for tensor in taken)


@pytest.mark.parametrize("keep", ["attribute", "hook"])
def test_no_way_in_chunks_is_offered_where_something_is_taken_out(keep: str) -> None:
    """Their gradients were lost: chunks ran where nothing is recorded."""
    torch.manual_seed(0)
    model, x = Beside(keep), torch.randn(4, 64, WIDTH)
    assert not [e for k in remat.profile(model, x, allow=CHUNK).kinds for e in k.menu if e.in_chunks]
    model.keep = ""
    model.layers = nn.ModuleList(Layer() for _ in range(3))
    found = remat.profile(model, x, allow=CHUNK)
    assert {bool(e.part) for k in found.kinds for e in k.menu if e.in_chunks} == {True, False}


@pytest.mark.parametrize("wanted", [lambda e: e.part and not e.again, lambda e: e.cut], ids=["part", "all"])
@pytest.mark.parametrize("keep", ["attribute", "hook"])
def test_what_is_taken_out_later_is_seen_to_when_it_runs(keep: str, wanted: Callable[[Entry], Any]) -> None:
    torch.manual_seed(0)
    model, x = Beside(""), torch.randn(4, 64, WIDTH)
    plan = plan_with(remat.profile(model, x, allow=CHUNK), wanted)
    model.keep = keep
    for layer in model.layers:
        layer.mlp.keep = keep
    plain = copy.deepcopy(model)
    plain(x).backward()
    with remat.apply(model, plan) as handle:
        if keep == "hook":  # it has collected a piece's tensor before anybody could know
            with pytest.raises(RecomputeError, match="a tensor from inside of it is used outside"):
                model(x).backward()
            model.zero_grad(set_to_none=True)
        model(x).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        assert "is held by something outside of it" in str(handle.status())


# ------------------------------------------------------------------------------------------ on the menu


def plan_with(profile: Profile, wanted: Callable[[Entry], Any], allow: tuple[str, ...] = HOST) -> remat.Plan:
    """Every region in the first entry of its menu that is wanted."""
    menus = [profile.kinds[call.kind].menu for call in profile.calls]
    choices = [next(i for i, entry in enumerate(menu) if wanted(entry)) for menu in menus]
    return make_plan(profile, choices, 1 << 40, strategy="optimal", allow=list(map(Action, allow)))


class Stack(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], count: int = 4) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(4, WIDTH), nn.ModuleList(make() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.inner(x).transpose(1, 2)).transpose(1, 2)


class Counting(Mixing):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        self.calls += 1
        return super().forward(x) * (1 + 0 * self.calls)


class AcrossRows(Mixing):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) - x.mean(0, keepdim=True)


class AcrossRowsFromZero(Mixing):
    """Rows see each other by way of a weight that begins as zero."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) - self.gate * x.mean(0, keepdim=True)


class MostlyAlone(Mixing):
    """One element of thousands depends on another row."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y = super().forward(x).clone()
        y[0, 0, 0] = y[0, 0, 0] + x[-1, 0, 0]
        return y


class WithState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


@pytest.mark.parametrize(
    ("make", "sizes"),
    [
        (Mixing, {(0, 4), (0, 2), (0, 1)}),
        (lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0), {(1, 4), (1, 2), (1, 1)}),
        (lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1), set()),
        (Normed, set()),
        (Counting, set()),
        (AcrossRows, set()),
        (AcrossRowsFromZero, set()),
        (MostlyAlone, set()),
        (WithState, set()),
    ],
    ids=["rows", "second", "dropout", "batch norm", "counts", "across", "from zero", "mostly", "state"],
)
def test_regions_whose_rows_are_independent_may_run_in_pieces(
    make: Callable[[], nn.Module], sizes: set[tuple[int, int]]
) -> None:
    torch.manual_seed(0)
    shape = (6, 8, 4) if (1, 1) in sizes else (8, 6, 4)  # some have the batch second
    profile = remat.profile(Stack(make), torch.randn(shape), loss=squared, allow=CHUNK)
    assert {entry.cut for kind in profile.kinds for entry in kind.menu if entry.cut} == sizes
    entries = [entry for kind in profile.kinds for entry in kind.menu if entry.cut]
    assert all(entry.gradient_gap < 1e-4 and entry.again for entry in entries)


def case_of(count: int = 6) -> Case:
    torch.manual_seed(0)
    model = Stack(Mixing, count)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return Case(model, torch.randn(32, 24, 4), squared)


def gradients(case: Case) -> dict[str, Tensor]:
    for parameter in case.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    case.run().backward()
    return {name: p.grad.clone() for name, p in case.model.named_parameters()}


def peak_bytes(case: Case) -> int:
    with LiveBytes() as live:
        live.watch([*case.model.parameters(), *(p.grad for p in case.model.parameters()), case.batch])
        there = live.current_bytes
        case.run().backward()
        return live.peak_bytes - there


def assert_fitted(case: Case, expected: dict[str, Tensor], handle: Handle, most_bytes: int) -> None:
    found = gradients(case)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-5)
    assert peak_bytes(case) <= most_bytes
    assert not [row for row in handle.status().rows if row.fallbacks]


@pytest.mark.parametrize("hosted", [False, True])
def test_gradients_are_those_of_the_untouched_model_and_the_peak_is_predicted(hosted: bool) -> None:
    case = case_of()
    expected = gradients(case)
    profile = remat.profile(case.model, case.batch, loss=squared, accumulate=True, allow=HOST)
    mode = Mode.HOSTED if hosted else Mode.CHUNK
    plan = plan_with(profile, lambda e: e.mode is mode and e.cut == (0, 2))
    there = profile.step.resident + profile.step.gradients
    with remat.apply(case.model, plan) as handle:
        assert_fitted(case, expected, handle, plan.predicted_peak_bytes - there)
        assert plan.predicted_peak_bytes - there <= 1.05 * peak_bytes(case)
        if hosted:
            assert handle.engine is not None
            assert handle.engine.counts.kept_bytes == 0
            assert handle.engine.counts.sent_bytes > 0
    again = gradients(case)
    assert all(torch.equal(again[name], expected[name]) for name in expected)  # nothing stays behind
    verified = remat.verify(case.model, case.batch, plan, loss=squared)
    assert verified.ok
    assert not verified.bitwise


def test_budgets_reach_further_down_with_it() -> None:
    case = case_of()
    expected = gradients(case)
    profile = remat.profile(case.model, case.batch, loss=squared, accumulate=True, allow=HOST)
    there = profile.step.resident + profile.step.gradients
    least = {
        allow: least_budget(profile, list(map(Action, allow))) - there
        for allow in (EXACT, SENDING, CHUNK, HOST)
    }
    assert least[CHUNK] < 0.6 * least[EXACT]
    assert least[HOST] < 0.5 * least[SENDING]
    handle = remat.fit(
        case.model, case.batch, least[HOST] + there + 20_000, loss=squared, accumulate=True, allow=HOST
    )
    assert any(handle.plan.entry(call).cut for call in range(len(profile.calls)))
    assert handle.verification is not None
    assert "in chunks, or a part of them" in handle.verification.how
    assert_fitted(case, expected, handle, least[HOST] + 20_000)
    handle.remove()
    without = remat.plan(profile, least[SENDING] + there, allow=SENDING)
    assert not any(without.entry(call).in_chunks for call in range(len(profile.calls)))


def test_a_plan_with_pieces_is_saved_and_explained(tmp_path: Path) -> None:
    case = case_of()
    profile = remat.profile(case.model, case.batch, loss=squared, accumulate=True, allow=HOST)
    plan = plan_with(profile, lambda e: e.mode is Mode.HOSTED and e.cut == (0, 2))
    plan.save(tmp_path / "plan.json")
    assert remat.Plan.load(tmp_path / "plan.json") == plan
    row = region_rows(plan)[0]
    assert row.way == "chunk+full+offload"
    assert "runs 2 rows at a time, and again so in backward, its inputs wait on the host" in row.reason
    assert "over pieces of the batch: equal within rounding" in str(plan.report())


def test_another_batch_recomputes_as_a_whole_and_evaluation_is_plain() -> None:
    case = case_of()
    profile = remat.profile(case.model, case.batch, loss=squared, accumulate=True, allow=CHUNK)
    plan = plan_with(profile, lambda e: e.cut == (0, 8), CHUNK)
    other = Case(case.model, torch.randn(5, 24, 4), squared)
    expected = gradients(other)
    with remat.apply(case.model, plan) as handle:
        found = gradients(other)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert "not planned" in str(handle.status())
        with torch.no_grad():
            ours = case.model(case.batch)
    assert torch.equal(ours, case.model(case.batch))
