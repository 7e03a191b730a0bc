"""checkpoint() and its relatives against the same computation without them, bit for bit."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from models import ZOO, JointModel, MlpBlock, PreActivation, RReluLast
from reference import assert_same, assert_step_unchanged, step
from remat.errors import InputError, RecomputeError, RematError
from remat.run.checkpoint import (
    checkpoint,
    checkpoint_fn,
    checkpoint_sequential,
    gradient_checkpoint_forward,
)
from remat.run.state import ModuleState
from remat.trace.fake import without_memory


def run(fn: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, input gradient, parameter gradients, buffers and random state of one step."""
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(7)
    y = fn(x * 1)
    after = torch.rand(2)
    y.square().sum().backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(g is not None for g in gradients)
    return [y.detach(), after, torch.rand(2), x.grad, *gradients, *(b.clone() for b in model.buffers())]


def assert_equal(expected: list[Tensor], found: list[Tensor]) -> None:
    assert len(expected) == len(found)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


MODULES = {
    "dropout": lambda: MlpBlock(8, 0.5),
    "batch norm": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True)),
    "batch norm last": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)),
    "batch norm, cumulative": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None)),
    "batch norm, eval": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval(),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2, track_running_stats=True, affine=True)
    ),
    "rrelu last": lambda: RReluLast(8),
    "dropout last": lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)),
    "writes its input": lambda: PreActivation(8),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
    "running average that the output reads": lambda: RunningCentre(8),
    "no parameters": lambda: nn.Sequential(nn.Sigmoid(), nn.Tanh()),
}


class RunningCentre(nn.Module):
    """Its output depends on a buffer that it writes: recomputation must start from the value at entry."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("centre", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        self.centre.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.linear(torch.tanh(x - self.centre.clone()))


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str, offload: bool) -> None:
    torch.manual_seed(0)
    model, x = MODULES[name](), torch.randn(6, 8)
    plain, planned = copy.deepcopy(model), copy.deepcopy(model)
    expected = run(plain, plain, x)
    for _ in range(2):  # the second call knows the module's habits
        planned.load_state_dict(model.state_dict())
        planned.zero_grad(set_to_none=True)
        assert_equal(expected, run(partial(checkpoint, planned, offload=offload), planned, x))


# ------------------------------------------------------------- buffers that only some calls write

SMALL, LARGE = 8, 8192  # a buffer of LARGE floats is not copied unless it is known to be written


class Sometimes(nn.Module):
    """Its output reads a buffer, which `write` changes before in the calls that `when` names."""

    when: Callable[[int], bool] = staticmethod(lambda call: call % 3 == 2)

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.width = width
        self.call = 0  # set by the test: a recomputation belongs to the same call
        self.prepare()
        self.register_buffer("last", torch.zeros(()))  # the order of buffers is to stay

    def prepare(self) -> None:
        self.register_buffer("centre", torch.zeros(self.width))

    def write(self, mean: Tensor) -> None:
        self.centre.mul_(0.9).add_(mean, alpha=0.1)

    def forward(self, x: Tensor) -> Tensor:
        if self.when(self.call):
            with torch.no_grad():
                self.write(x.detach().mean(0).repeat(self.width // 8))
        return self.linear(torch.tanh(x - self.centre.clone()[:8]))


class ThroughData(Sometimes):
    def write(self, mean: Tensor) -> None:
        self.centre.data.mul_(0.9).add_(mean, alpha=0.1)


class Assigned(Sometimes):
    def write(self, mean: Tensor) -> None:
        self.centre = self.centre * 0.9 + mean * 0.1


class RegisteredLate(Sometimes):
    when = staticmethod(lambda call: True)

    def prepare(self) -> None: ...

    def write(self, mean: Tensor) -> None:
        if "centre" not in self._buffers:
            self.register_buffer("centre", torch.zeros_like(mean))
        super().write(mean)


class RegisteredLateThroughData(RegisteredLate):
    def write(self, mean: Tensor) -> None:
        if "centre" not in self._buffers:
            self.register_buffer("centre", torch.zeros_like(mean))
        self.centre.data.mul_(0.9).add_(mean, alpha=0.1)


class FilledLate(RegisteredLate):
    def prepare(self) -> None:
        self.register_buffer("centre", None)

    def write(self, mean: Tensor) -> None:
        if self.centre is None:
            self.centre = mean.clone()
        else:
            self.centre.mul_(0.9).add_(mean, alpha=0.1)


class UnderTwoNames(Sometimes):
    when = staticmethod(lambda call: True)

    def prepare(self) -> None:
        super().prepare()
        self.register_buffer("alias", self.centre)

    def write(self, mean: Tensor) -> None:
        self.alias.mul_(0.9).add_(mean, alpha=0.1)


class ThawedNorm(Sometimes):
    """A normalisation layer that is frozen at first; its kernels write without counting."""

    thaws_itself = False

    def prepare(self) -> None:
        self.norm = nn.BatchNorm1d(self.width, affine=False).eval()

    def forward(self, x: Tensor) -> Tensor:
        if self.thaws_itself:
            self.norm.train()
        self.norm(x.detach().repeat(1, self.width // 8))
        return self.linear(torch.tanh(x - self.norm.running_mean.clone()[:8]))


def assert_calls_equal(plain: Sometimes, planned: Sometimes, calls: range) -> None:
    for call in calls:
        x = torch.randn(6, 8)
        plain.call = planned.call = call
        if isinstance(plain, ThawedNorm):
            plain.norm.train(plain.when(call))
            planned.norm.train(planned.when(call))
        plain.zero_grad()
        planned.zero_grad()
        assert_equal(run(plain, plain, x), run(partial(checkpoint, planned), planned, x))
        assert list(plain.state_dict()) == list(planned.state_dict())


@pytest.mark.parametrize(
    ("module", "width"),
    [
        (Sometimes, SMALL),
        (ThroughData, SMALL),
        *((module, width) for module in (Assigned, RegisteredLate) for width in (SMALL, LARGE)),
        *((module, width) for module in (RegisteredLateThroughData, FilledLate) for width in (SMALL, LARGE)),
        *((module, width) for module in (UnderTwoNames, ThawedNorm) for width in (SMALL, LARGE)),
    ],
)
def test_buffers_that_the_first_call_does_not_write(module: type[Sometimes], width: int) -> None:
    torch.manual_seed(0)
    plain = module(width)
    assert_calls_equal(plain, copy.deepcopy(plain), range(7))


def test_a_large_buffer_written_unexpectedly_is_an_error_once() -> None:
    torch.manual_seed(0)
    plain = Sometimes(LARGE)
    planned = copy.deepcopy(plain)
    assert_calls_equal(plain, planned, range(2))
    plain.call = planned.call = 2
    x = torch.randn(6, 8)
    plain(x)
    with pytest.raises(RecomputeError, match=r"'centre' of Sometimes \(32,768 bytes\).*next call is right"):
        checkpoint(planned, x)
    assert_calls_equal(plain, planned, range(3, 9))


def test_a_norm_that_its_region_thaws_is_an_error_once() -> None:
    torch.manual_seed(0)
    plain = ThawedNorm(SMALL)
    planned = copy.deepcopy(plain)
    assert_calls_equal(plain, planned, range(2))
    plain.thaws_itself = planned.thaws_itself = True
    x = torch.randn(6, 8)
    plain(x)
    with pytest.raises(RecomputeError, match=r"of BatchNorm1d .*next call is right"):
        checkpoint(planned, x)
    assert_calls_equal(plain, planned, range(4))


@pytest.mark.parametrize("module", [Sometimes, ThawedNorm])
def test_large_buffers_and_frozen_norms_are_not_copied(module: type[Sometimes]) -> None:
    model = module(LARGE)
    checkpoint(model, torch.randn(6, 8, requires_grad=True)).sum().backward()
    assert ModuleState(model).nbytes == model.last.nbytes


@pytest.mark.parametrize("width", [SMALL, LARGE])
def test_a_buffer_written_between_forward_and_backward(width: int) -> None:
    """A small one is put back; of a large one nobody has the values that forward read."""
    torch.manual_seed(0)
    plain, x = Sometimes(width), torch.randn(6, 8)
    planned = copy.deepcopy(plain)
    plain(x).sum().backward()
    out = checkpoint(planned, x)
    planned.centre.add_(1)
    if width == LARGE:
        with pytest.raises(RecomputeError, match=r"'centre' of Sometimes was written between forward and"):
            out.sum().backward()
        return
    out.sum().backward()
    assert_equal([p.grad for p in plain.parameters()], [p.grad for p in planned.parameters()])
    assert torch.equal(planned.centre, torch.ones(width))


def test_habits_seen_without_values_are_not_trusted_with_values() -> None:
    """An estimate runs on fake tensors, whose contents cannot be compared."""
    torch.manual_seed(0)
    plain = ThroughData(LARGE)
    plain.when = lambda call: True
    planned = copy.deepcopy(plain)
    mode = FakeTensorMode()
    with without_memory(planned, mode), mode:
        checkpoint(planned, torch.randn(6, 8))
    assert_calls_equal(plain, planned, range(2))


@pytest.mark.parametrize("name", ["dropout", "batch norm", "rrelu last"])
@pytest.mark.parametrize("form", ["lambda", "argument", "method", "list in a closure"])
def test_functions_that_reach_a_module(name: str, form: str) -> None:
    torch.manual_seed(0)
    model, x = MODULES[name](), torch.randn(6, 8)
    plain = copy.deepcopy(model)
    layers = [model]
    forms: dict[str, Callable[[Tensor], Any]] = {
        "lambda": lambda x: checkpoint(lambda y: model(y), x),
        "argument": lambda x: checkpoint(lambda module, y: module(y), model, x),
        "method": lambda x: checkpoint(model.forward, x),
        "list in a closure": lambda x: checkpoint(lambda y: layers[0](y), x),
    }
    assert_equal(run(plain, plain, x), run(forms[form], model, x))


def test_statistics_are_counted_once() -> None:
    norm = nn.BatchNorm1d(4)
    checkpoint(norm, torch.randn(5, 4, requires_grad=True)).sum().backward()
    assert norm.num_batches_tracked == 1


def test_random_state_is_touched_only_if_the_region_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    from remat.run import rng

    sets = []
    original = rng.RandomState.set
    monkeypatch.setattr(rng.RandomState, "set", lambda self: (sets.append(1), original(self))[1])
    x = torch.randn(4, 8, requires_grad=True)
    checkpoint(MlpBlock(8, 0.0), x).sum().backward()
    assert not sets
    checkpoint(MlpBlock(8, 0.5), x).sum().backward()
    assert len(sets) == 2  # to the state at entry, and back


def test_nests_of_anything() -> None:
    def fn(pair: list[Tensor], *, extra: dict[str, Any], flag: bool, nothing: None = None) -> dict[str, Any]:
        a, b = pair
        pair[0] = b  # a caller's list that the region writes to
        assert flag
        assert nothing is None
        return {"out": (torch.sin(a) * b, [extra["c"].exp()]), "n": 3, "none": None}

    leaves = [torch.randn(3, requires_grad=True) for _ in range(3)]

    def loss(call: Callable[..., Any]) -> Tensor:
        out = call(fn, [leaves[0], leaves[1]], extra={"c": leaves[2], "text": "t"}, flag=True)
        assert (out["n"], out["none"]) == (3, None)
        return out["out"][0].square().sum() + out["out"][1][0].sum()

    expected = torch.autograd.grad(loss(lambda fn, *a, **k: fn(*a, **k)), leaves)
    for offload in (False, True):
        found = torch.autograd.grad(
            loss(lambda fn, *a, _o=offload, **k: checkpoint(fn, *a, offload=_o, **k)), leaves
        )
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_autocast_is_replayed() -> None:
    torch.manual_seed(0)
    model = MlpBlock(8, 0.3)
    plain, x = copy.deepcopy(model), torch.randn(6, 8)

    def cast(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def inside(x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return fn(x)

        return inside

    assert_equal(run(cast(plain), plain, x), run(cast(lambda x: checkpoint(model, x)), model, x))


@pytest.mark.parametrize("offload", [False, True])
def test_double_backward_retain_graph_and_nesting(offload: bool) -> None:
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid()).double(),
        torch.randn(2, 4),
    )
    x = x.double().requires_grad_()

    def twice(y: Tensor) -> list[Tensor]:
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return [
            first,
            *torch.autograd.grad(first.square().sum(), [x, *model.parameters()], allow_unused=False),
        ]

    def nested(x: Tensor) -> Tensor:
        return checkpoint(lambda y: checkpoint(model[2:], checkpoint(model[:2], y, offload=offload)), x)

    expected = twice(model(x))
    for planned in (lambda: checkpoint(model, x, offload=offload), lambda: nested(x)):
        for a, b in zip(expected, twice(planned()), strict=True):
            assert torch.equal(a, b)
        y = planned().sum()
        first = torch.autograd.grad(y, x, retain_graph=True)[0]
        assert torch.equal(first, torch.autograd.grad(y, x)[0])


def test_inner_inputs_of_nested_checkpoints_are_not_held() -> None:
    """An outer checkpoint drops what an inner one would keep: else nesting would free nothing."""
    refs: list[weakref.ref[Any]] = []

    def outer(x: Tensor) -> Tensor:
        h = torch.sin(x)
        refs.append(weakref.ref(h.untyped_storage()))
        return checkpoint(torch.exp, h)

    x = torch.randn(4, requires_grad=True)
    y = checkpoint(outer, x)
    gc.collect()
    assert refs[0]() is None
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.sin(x).exp() * torch.cos(x))


def test_a_backward_inside_the_region() -> None:
    def energy(x: Tensor) -> Tensor:
        y = x * 1
        return torch.autograd.grad(y.pow(3).sum(), y, create_graph=True)[0]

    x = torch.randn(4, requires_grad=True)
    (expected,) = torch.autograd.grad(energy(x).square().sum(), x)
    (found,) = torch.autograd.grad(checkpoint(energy, x).square().sum(), x)
    assert torch.equal(expected, found)


def test_untouched_when_nothing_needs_a_gradient() -> None:
    calls = []

    class Probe(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(torch._C._autograd._top_saved_tensors_default_hooks(False) is not None)
            return super().forward(x)

    module = Probe(3, 3)
    x = torch.randn(2, 3)
    with torch.no_grad():
        checkpoint(module, x)
    frozen = copy.deepcopy(module).requires_grad_(False)
    checkpoint(frozen, x)
    assert calls == [False, False]
    frozen.eval()
    checkpoint(
        frozen, x.requires_grad_()
    ).sum().backward()  # a frozen model in eval mode that needs input gradients
    assert calls == [False, False, True, True]


def test_torch_func_runs_the_plain_function() -> None:
    x = torch.randn(3)
    found = torch.func.grad(lambda x: checkpoint(torch.sin, x).sum())(x)
    assert torch.equal(found, torch.cos(x))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)),
        lambda: Sometimes(SMALL),
        lambda: Sometimes(LARGE),
    ],
)
def test_functional_call_is_recomputed_with_what_it_was_given(make: Callable[[], nn.Module]) -> None:
    """Parameters and buffers, the latter with gradients as well."""
    torch.manual_seed(0)
    module, x = make(), torch.randn(2, 8)
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    given = {name: torch.randn_like(tensor).requires_grad_() for name, tensor in named.items()}

    class Wrapped(nn.Module):
        def __init__(self, planned: bool) -> None:
            super().__init__()
            self.inner, self.planned = module, planned

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x) if self.planned else self.inner(x)

    def gradients(planned: bool) -> tuple[Tensor | None, ...]:
        state = {f"inner.{name}": value for name, value in given.items()}
        y = torch.func.functional_call(Wrapped(planned), state, (x,))
        return torch.autograd.grad(y.square().sum(), list(given.values()), allow_unused=True)

    expected = gradients(False)
    for _ in range(2):  # the second call knows the module's habits
        for a, b, name in zip(expected, gradients(True), given, strict=True):
            assert a is b is None if name == "last" else torch.equal(a, b)


# ------------------------------------------------------------------------------------------- host copies


def test_offload_copies_each_storage_once_and_never_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    from remat.run import inputs

    hosted = []
    original = inputs.to_host
    monkeypatch.setattr(inputs, "to_host", lambda *given: hosted.append(original(*given)) or hosted[-1])
    base = torch.randn(4, 6, requires_grad=True)
    x, weight = base * 1, nn.Parameter(torch.randn(6, 6))

    def fn(x: Tensor, views: list[Tensor], weight: Tensor, weight_view: Tensor, *, wide: Tensor) -> Tensor:
        return x @ weight + views[0].t() @ weight_view + views[1].sum() + wide

    args = (x, [x.t(), x[:2]], weight, weight.t())
    kwargs = {"wide": torch.ones(1, 6).expand(4, 6)}
    leaves = [base, weight]
    expected = torch.autograd.grad(fn(*args, **kwargs).square().sum(), leaves, retain_graph=True)
    found = torch.autograd.grad(checkpoint(fn, *args, offload=True, **kwargs).square().sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert hosted[0].nbytes == x.nbytes + 6 * 4  # x once for its three views; `wide` is stored as one row


def test_offload_lets_go_of_the_input() -> None:
    x = torch.randn(8, requires_grad=True)
    hidden = torch.sin(x)
    gone = weakref.ref(hidden.untyped_storage())
    out = checkpoint(lambda h: torch.exp(h * 1).cos(), hidden, offload=True)
    del hidden
    gc.collect()
    still_held = gone() is not None  # sin saves its input, not its output
    out.sum().backward()
    assert not still_held
    assert x.grad is not None


# ------------------------------------------------------------------------------------------------ errors


def test_a_mismatch_names_the_region_and_the_causes() -> None:
    cache: list[Tensor] = []

    def attend(x: Tensor) -> Tensor:
        cache.append(x.detach())
        return torch.sin(torch.cat(cache) * x.sum()).square()

    with pytest.raises(RecomputeError, match="attend") as error:
        checkpoint(attend, torch.randn(3, requires_grad=True)).sum().backward()
    text = str(error.value)
    assert "shape" in text
    assert "[3]" in text
    assert "[6]" in text
    assert "KV cache" in text
    assert "MoE routing" in text
    assert "in-place" in text
    assert isinstance(error.value, RematError)


@pytest.mark.parametrize("more", [False, True])
def test_another_number_of_saved_tensors(more: bool) -> None:
    """With early stop nothing after the last saved tensor is looked at: it cannot change a gradient."""
    runs = []

    def flips(x: Tensor) -> Tensor:
        runs.append(1)
        y = torch.sin(torch.rand(()) * x)
        return torch.cos(y) if (len(runs) == 1) != more else y

    with pytest.raises(RecomputeError, match="flips"):
        checkpoint_fn(early_stop=not more)(flips, torch.randn(3, requires_grad=True)).sum().backward()


def test_an_input_written_inside_a_function_is_refused_at_once() -> None:
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(RecomputeError, match="written in place inside"):
        checkpoint(lambda h: torch.sin(h.mul_(2)), x * 1)


def test_an_input_written_later_is_refused() -> None:
    hidden = torch.randn(3, requires_grad=True) * 1
    out = checkpoint(lambda h: torch.sin(h) * 2, hidden)
    hidden.add_(1)
    with pytest.raises(RecomputeError, match="written in place after"):
        out.sum().backward()


def test_a_parameter_written_before_backward_is_refused() -> None:
    module = nn.Linear(3, 3)
    out = checkpoint(module, torch.randn(2, 3))
    with torch.no_grad():
        module.weight.add_(1)
    with pytest.raises(RecomputeError, match=r"parameter 'weight'.*optimizer\.step"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: checkpoint("fn"), "not a callable"),
        (lambda: checkpoint(torch.ones(1)), "not a callable"),
        (lambda: checkpoint_fn(use_reentrant=True), "never checkpoints reentrantly"),
        (lambda: checkpoint_fn(offlaod=True), "no option 'offlaod'"),
        (lambda: checkpoint_sequential([torch.sin], 0, torch.ones(1)), "segments=0"),
        (lambda: checkpoint_sequential([torch.sin], "2", torch.ones(1)), "segments='2'"),
        (lambda: checkpoint_sequential([], 1, torch.ones(1)), "empty"),
        (lambda: checkpoint_sequential([torch.sin, 3], 1, torch.ones(1)), r"functions\[1\] is a int"),
        (lambda: gradient_checkpoint_forward(None, True, False), "not a callable"),
    ],
)
def test_bad_input(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


class PlannedError(Exception):
    pass


def test_exceptions_leave_no_state_behind() -> None:
    class Sometimes(nn.Module):
        fail = ""

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            y = nn.functional.dropout(self.norm(self.linear(x)), 0.5)
            if self.fail == ("backward" if torch._C._current_graph_task_id() != -1 else "forward"):
                raise PlannedError
            return torch.tanh(y)

    module = Sometimes()
    objects = dict(module.norm._buffers)
    x = torch.randn(3, 4)
    module.fail = "forward"
    with pytest.raises(PlannedError):
        checkpoint(module, x)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    module.fail = "backward"
    out = checkpoint(module, x)
    state, statistics = torch.get_rng_state(), module.norm.running_mean.clone()
    with pytest.raises(PlannedError):
        out.sum().backward()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert all(module.norm._buffers[name] is value for name, value in objects.items())
    assert torch.equal(module.norm.running_mean, statistics)
    assert torch.equal(torch.get_rng_state(), state)
    module.fail = ""
    checkpoint(module, x).sum().backward()


# --------------------------------------------------------------------------------------------- relatives


@pytest.mark.parametrize("segments", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("listed", [False, True])
def test_sequential(segments: int, listed: bool) -> None:
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(*[m for _ in range(5) for m in (MlpBlock(8), nn.BatchNorm1d(8))]),
        torch.randn(4, 8),
    )
    plain = copy.deepcopy(model)
    functions = list(model) if listed else model
    assert_equal(run(plain, plain, x), run(lambda x: checkpoint_sequential(functions, segments, x), model, x))


def test_sequential_with_several_inputs() -> None:
    functions = [lambda a, b: (a * b, a + b), lambda a, b: (torch.sin(a), b), lambda a, b: a @ b]
    a, b = (torch.randn(4, requires_grad=True) for _ in range(2))
    expected = torch.autograd.grad(torch.sin(a * b) @ (a + b), (a, b))
    for segments in (1, 2, 3):
        found = torch.autograd.grad(checkpoint_sequential(functions, segments, (a, b)), (a, b))
        assert all(torch.equal(p, q) for p, q in zip(expected, found, strict=True))


@pytest.mark.parametrize(("on", "offload"), [(False, False), (True, False), (False, True), (True, True)])
def test_diffsynth_modes(on: bool, offload: bool) -> None:
    torch.manual_seed(0)
    model, x = MlpBlock(8, 0.5), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    assert_equal(
        run(plain, plain, x), run(lambda x: gradient_checkpoint_forward(model, on, offload, x=x), model, x)
    )


@pytest.mark.parametrize("options", [{}, {"offload": True}, {"use_reentrant": False}, {"early_stop": False}])
def test_configured_function(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = RReluLast(8), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    assert_equal(run(plain, plain, x), run(lambda x: checkpoint_fn(**options)(model, x), model, x))


@pytest.mark.parametrize("options", [{}, {"offload": True}])
def test_it_fits_into_transformers(options: dict[str, Any]) -> None:
    case = ZOO["gpt2"]()

    def prepare(model: Any) -> None:
        model.gradient_checkpointing_enable()
        for layer in model.transformer.h:
            layer._gradient_checkpointing_func = checkpoint_fn(**options)
        model.config.use_cache = False

    assert_step_unchanged(case, prepare)


@pytest.mark.parametrize("offload", [False, True])
def test_joint_layers_over_a_list_of_hidden_states(offload: bool) -> None:
    """openpi's manner: the layer is a function over [prefix, suffix]."""
    case = ZOO["joint"]()
    plain, planned = copy.deepcopy(case.model), copy.deepcopy(case.model)
    assert isinstance(planned, JointModel)
    planned.region = checkpoint_fn(offload=offload)
    assert_same(step(case, plain, passes=2), step(case, planned, passes=2))


def live_tensors() -> tuple[int, int]:
    gc.collect()
    found = {id(o): o for o in gc.get_objects() if type(o) in (Tensor, nn.Parameter)}
    return len(found), sum(t.nbytes for t in found.values())


def test_500_steps_leak_nothing() -> None:
    torch.manual_seed(0)
    blocks, x = nn.ModuleList(MlpBlock(8, 0.1) for _ in range(2)), torch.randn(2, 8)

    def one_step() -> None:
        h = x
        for i, block in enumerate(blocks):
            h = checkpoint(block, h, offload=i == 1)
        h.sum().backward()
        checkpoint(blocks[0], x)  # a forward that is never backwarded
        blocks.zero_grad(set_to_none=True)

    for _ in range(3):
        one_step()
    before = live_tensors()
    for _ in range(500):
        one_step()
    assert live_tensors() == before
