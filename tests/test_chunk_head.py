"""The chunked head on whole models, the lazy logits in a user's hands, and no trace after removal."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import remat
from models import ZOO, Case, LoraLinear, own_loss
from reference import step
from remat._torch_private import below_torch_function
from remat.errors import InputError, RecomputeError, RematError
from remat.run.byhand import enable, status
from remat.run.chunk import chunk_head, find_head
from remat.run.chunk_logits import LazyLogits
from remat.run.wrap import bypass

HEADS = {
    "llama": "lm_head",
    "gpt2": "lm_head",
    "bert": "cls.predictions.decoder",
    "t5": "lm_head",
    "paligemma": "lm_head",
}


def gemma2() -> Case:
    """Softcapped logits, tied to the embedding."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, final_logit_softcapping=3.0, attn_implementation="eager",
    )  # fmt: skip
    tokens = torch.randint(3, 64, (2, 8))
    return Case(Gemma2ForCausalLM(config), {"input_ids": tokens, "labels": tokens}, own_loss)


def peft_head(modules: dict[str, Any]) -> Case:
    from peft import LoraConfig, get_peft_model

    case = ZOO["llama"]()
    torch.manual_seed(0)
    model = get_peft_model(case.model, LoraConfig(r=2, init_lora_weights=False, **modules))
    return Case(model, case.batch, case.loss)


MODELS: dict[str, Callable[[], Case]] = {
    **{name: ZOO[name] for name in HEADS},
    "gemma2": gemma2,
    "peft": lambda: peft_head({"target_modules": ["q_proj", "lm_head"]}),
    "peft, head saved": lambda: peft_head({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
}


def assert_steps_close(expected: dict[str, Tensor], found: dict[str, Tensor], rounding: float = 1e-5) -> None:
    assert expected.keys() == found.keys(), f"only on one side: {sorted(expected.keys() ^ found.keys())}"
    for name, value in expected.items():
        slack = rounding * max(1e-2, float(value.abs().max())) if value.numel() else 0.0
        torch.testing.assert_close(found[name], value, rtol=0, atol=slack, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", HEADS)
def test_the_head_is_found(name: str) -> None:
    case = ZOO[name]()
    found = find_head(case.model)
    assert found == (HEADS[name], case.model.get_submodule(HEADS[name]))


@pytest.mark.parametrize("name", MODELS)
def test_transformers_models_with_their_own_loss(name: str) -> None:
    case = MODELS[name]()
    plain, own = copy.deepcopy(case.model), copy.deepcopy(case.model)
    expected = step(case, plain, passes=2)
    with chunk_head(own, rows=3) as handle:
        found = step(case, own, passes=2)
    assert_steps_close(expected, found)
    assert (handle.counts.losses, handle.counts.materialised, handle.counts.plain) == (2, 0, 0)
    assert handle.counts.chunks >= 8


def test_num_items_in_batch_through_transformers() -> None:
    case = ZOO["llama"]()
    case = Case(case.model, {**case.batch, "num_items_in_batch": 37}, case.loss)
    own = copy.deepcopy(case.model)
    expected = step(case, case.model)
    with chunk_head(own, rows=3) as handle:
        assert_steps_close(expected, step(case, own))
    assert handle.counts.losses == 1


def test_a_step_that_needs_the_logits_as_a_whole_says_so_in_a_note() -> None:
    case = ZOO["llama"]()

    def loss(output: Any, batch: Any) -> Tensor:
        return output.logits.softmax(-1).square().sum()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = remat.profile(case.model, case.batch, loss=loss, allow=["keep", "recompute", "chunk"])
    assert found.head is None
    assert any("lm_head: Tensor.softmax" in note for note in found.notes), found.notes


def test_beside_checkpointed_blocks() -> None:
    case = ZOO["llama"]()
    own = copy.deepcopy(case.model)
    expected = step(case, case.model)
    enable(own)
    with chunk_head(own, rows=3):
        assert_steps_close(expected, step(case, own))
        row = next(row for row in status(own).rows if row.name == "lm_head")
    assert (row.mode, row.active, row.calls, row.fallbacks) == ("chunk", True, 1, 0)
    assert "1 losses in" in row.why


# --------------------------------------------------------------------------------- in a user's hands


class Model(nn.Module):
    def __init__(self, head: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 13) if head is None else head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 5, 6, generator=generator), torch.randint(13, (2, 5), generator=generator)


USES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "argmax": lambda x, y: x.argmax(-1),
    "accuracy": lambda x, y: (x.detach().argmax(-1) == y).float().mean(),
    "softmax": lambda x, y: x.softmax(-1),
    "log_softmax and gather": lambda x, y: F.log_softmax(x, -1).gather(-1, y[..., None]),
    "nll of float": lambda x, y: F.nll_loss(F.log_softmax(x.float(), -1).view(-1, 13), y.view(-1)),
    "topk": lambda x, y: x.topk(3).values,
    "some classes": lambda x, y: x[..., :4],
    "one class": lambda x, y: x[..., 2] * 2,
    "transposed": lambda x, y: x.transpose(0, 1),
    "the last two axes": lambda x, y: x.transpose(1, 2) @ x,
    "added to": lambda x, y: x + 1,
    "a tensor as scale": lambda x, y: x * torch.tensor(2.0),
    "from the other side": lambda x, y: torch.ones(13) * x,
    "stacked": lambda x, y: torch.stack([x, x]),
    "in place": lambda x, y: x.mul_(2.0) + x,
    "view after write": lambda x, y: _write_then_read(x),
    "set": lambda x, y: _set(x),
    "iterated": lambda x, y: [row.sum() for row in x],
    "reshaped rows": lambda x, y: x.view(2, -1),
    "numpy": lambda x, y: torch.from_numpy(x.detach().numpy()),
    "probabilities as target": lambda x, y: F.cross_entropy(x.view(-1, 13), torch.full((10, 13), 1 / 13)),
    "classes in dim 1": lambda x, y: F.cross_entropy(x, torch.zeros(2, 13, dtype=torch.long)),
    "one dimension": lambda x, y: F.cross_entropy(x[0, 0], y[0, 0]),
    "legacy arguments": lambda x, y: F.cross_entropy(x.view(-1, 13), y.view(-1), size_average=False),
    "no_grad": lambda x, y: torch.no_grad()(lambda: F.cross_entropy(x.view(-1, 13), y.view(-1)))(),
    "double": lambda x, y: x.double().sum(),
    "an integer": lambda x, y: x.to(torch.long),
    "norm of a slice": lambda x, y: x[:, 1:].norm(),
}  # fmt: skip


def _write_then_read(x: Tensor) -> Tensor:
    view = x[..., :-1, :]
    x.mul_(2.0)
    return view.sum(-1)


def _set(x: Tensor) -> Tensor:
    flat = x.view(-1, 13)
    x[0, :, 3] = 0.5
    return flat.exp()


def outcome(model: Model, use: Callable[[Tensor, Tensor], Any]) -> list[Tensor]:
    """What a use gives, and the gradients it causes."""
    from remat.trees import tensors

    x, y = inputs()
    found = tensors([use(model(x), y)])
    scalars = [t.square().sum() for t in found if t.requires_grad]
    if scalars:
        sum(scalars).backward()
    return [*(t.detach() for t in found), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.filterwarnings("ignore:size_average")
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_anything_else_gets_the_plain_logits_to_the_bit(use: Callable[[Tensor, Tensor], Any]) -> None:
    model = Model()
    expected = outcome(copy.deepcopy(model), use)
    handle = chunk_head(model, head="head", rows=3)
    with pytest.warns(UserWarning, match="needs the logits of 'head' as a whole"):
        found = outcome(model, use)
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) and type(b) is Tensor for a, b in zip(expected, found, strict=True))
    assert handle.counts.materialised >= 1
    assert handle.counts.losses == 0
    assert handle.counts.reason


def test_one_warning_per_head() -> None:
    model = Model()
    handle = chunk_head(model, head="head")
    x, y = inputs()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            assert model(x).argmax(-1).shape == y.shape
    assert len(seen) == 1
    assert "argmax" in str(seen[0].message)
    assert seen[0].filename == __file__
    assert handle.counts.materialised == 3


def test_accuracy_from_the_logits_of_a_chunked_loss() -> None:
    case = ZOO["llama"]()
    expected = case.model(**case.batch)
    handle = chunk_head(case.model, rows=3)
    output = case.output()
    assert type(output.logits) is LazyLogits
    assert handle.counts.materialised == 0
    output.loss.backward()
    with pytest.warns(UserWarning, match="argmax"):
        assert torch.equal(output.logits.argmax(-1), expected.logits.argmax(-1))
    assert torch.equal(output.logits.detach(), expected.logits.detach())
    assert (handle.counts.losses, handle.counts.materialised) == (1, 1)


def test_what_is_known_needs_no_logits() -> None:
    model = Model()
    handle = chunk_head(model, head="head")
    x, _ = inputs()
    logits = model(x)
    assert (logits.shape, logits.dtype, logits.device, logits.ndim) == ((2, 5, 13), x.dtype, x.device, 3)
    assert (logits.size(-1), logits.dim(), logits.numel(), len(logits)) == (13, 3, 130, 2)
    assert logits.requires_grad
    assert logits.grad_fn is not None
    assert not logits.is_leaf
    assert logits.is_contiguous()
    assert torch.is_floating_point(logits)
    assert isinstance(logits, Tensor)
    assert torch.is_tensor(logits)
    assert not logits[:, :-1].is_contiguous()
    assert logits[:, :-1].contiguous().is_contiguous()
    assert logits.float() is logits
    assert logits.to(x.device, x.dtype) is logits
    assert logits[..., :-1, :].stride() == torch.empty(2, 5, 13)[..., :-1, :].stride()
    assert handle.counts.materialised == 0


def test_read_after_the_optimizer_step_is_an_error_not_other_values() -> None:
    model = Model()
    chunk_head(model, head="head", rows=3)
    x, y = inputs()
    logits = model(x)
    F.cross_entropy(logits.view(-1, 13), y.view(-1)).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    with pytest.raises(RecomputeError, match=r"was written .* before optimizer.step"):
        logits.argmax(-1)


class Halved(torch.autograd.Function):
    """A custom loss that never asks __torch_function__: as fused kernels of other libraries do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * 0.5).square().sum()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x * (0.5 * g)


@pytest.mark.filterwarnings("ignore:remat")
@pytest.mark.parametrize(
    "change", [lambda x: x, lambda x: (x[:, :-1] / 2).tanh() * 2, lambda x: x.transpose(1, 2)]
)
def test_an_autograd_function_gets_values_and_gives_gradients(change: Callable[[Tensor], Tensor]) -> None:
    def run(model: Model) -> dict[str, Tensor]:
        loss = Halved.apply(change(model(inputs()[0])))
        loss.backward()
        return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters()}}

    model = Model(LoraLinear(nn.Linear(6, 13)))
    model.head.base.requires_grad_(True)
    expected = run(copy.deepcopy(model))
    chunk_head(model, head="head")
    assert_steps_close(expected, run(model))


@pytest.mark.filterwarnings("ignore:remat")
def test_below_torch_function() -> None:
    model = Model()
    x, _ = inputs()
    expected = model(x)
    chunk_head(model, head="head")
    logits = model(x)
    with below_torch_function():
        assert torch.equal(torch.relu(logits).detach(), torch.relu(expected).detach())
        with pytest.raises(RematError, match="writes to lazy logits"):
            logits.mul_(2.0)


@pytest.mark.filterwarnings("ignore:remat")
def test_retain_grad_and_hooks_before_the_loss_see_the_gradient() -> None:
    def run(model: Model) -> list[Tensor]:
        x, y = inputs()
        logits = model(x)
        logits.retain_grad()
        seen: list[Tensor] = []
        logits.register_hook(seen.append)
        F.cross_entropy(logits.view(-1, 13), y.view(-1)).backward()
        return [logits.grad, *seen]

    model = Model()
    expected = run(copy.deepcopy(model))
    chunk_head(model, head="head")
    found = run(model)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_after_the_loss_a_hook_costs_nothing_and_retain_grad_is_refused() -> None:
    model = Model()
    handle = chunk_head(model, head="head", rows=3)
    x, y = inputs()
    logits = model(x)
    loss = F.cross_entropy(logits.view(-1, 13), y.view(-1))
    logits.register_hook(lambda g: g)  # as FSDP does on every output
    with pytest.raises(RematError, match="retain_grad"):
        logits.retain_grad()
    loss.backward()
    assert handle.counts.materialised == 0


def test_saved_to_a_file() -> None:
    model = Model()
    x, _ = inputs()
    expected = model(x)
    chunk_head(model, head="head")
    buffer = io.BytesIO()
    with pytest.warns(UserWarning, match="as a whole"):
        torch.save(model(x).detach(), buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer), expected.detach())


@pytest.mark.filterwarnings("ignore")
def test_given_to_a_compiled_function() -> None:
    model = Model()
    x, y = inputs()
    expected = model(x)
    chunk_head(model, head="head")
    loss = torch.compile(lambda x, y: F.cross_entropy(x.view(-1, 13), y.view(-1)), backend="eager")
    assert torch.allclose(loss(model(x), y), F.cross_entropy(expected.view(-1, 13), y.view(-1)))


# ------------------------------------------------------------------------------------------ distributed


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*find_unused_parameters")
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
@pytest.mark.usefixtures("one_process")
def test_ddp(options: dict[str, bool]) -> None:
    case = ZOO["llama"]()
    expected = step(case, copy.deepcopy(case.model), passes=3)
    model = nn.parallel.DistributedDataParallel(case.model, **options)
    with chunk_head(model, rows=3) as handle:
        found = step(case, model, passes=3)
    assert_steps_close(expected, {name.replace("module.", ""): value for name, value in found.items()})
    assert (handle.counts.losses, handle.counts.materialised, handle.counts.plain) == (3, 0, 0)


@pytest.mark.filterwarnings("ignore:remat")
@pytest.mark.usefixtures("one_process")
def test_ddp_with_the_loss_outside() -> None:
    """DDP passes the logits through a Function of its own, which the gradient must not go around."""

    def run(model: nn.Module) -> dict[str, Tensor]:
        x, y = inputs()
        for _ in range(3):
            F.cross_entropy(model(x).view(-1, 13), y.view(-1)).backward()
        return {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}

    expected, model = run(Model()), nn.parallel.DistributedDataParallel(Model(), static_graph=True)
    with chunk_head(model, head="module.head"):
        assert_steps_close(expected, run(model))


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.usefixtures("one_process")
def test_fsdp2(alone: bool) -> None:
    """The head belongs to the root's unit; as a unit of its own it runs plainly."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    case = ZOO["llama"]()
    expected = step(case, copy.deepcopy(case.model), passes=2)
    mesh = init_device_mesh("cpu", (1,))
    for layer in case.model.model.layers:
        fully_shard(layer, mesh=mesh)
    if alone:
        fully_shard(case.model.lm_head, mesh=mesh)
    fully_shard(case.model, mesh=mesh)
    with chunk_head(case.model, rows=3) as handle:
        found = step(case, case.model, passes=2)
    whole = {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in found.items()}
    assert_steps_close(expected, whole)
    assert (handle.counts.losses, handle.counts.materialised) == ((0, 0) if alone else (2, 0))


# ---------------------------------------------------------------------------------- when it stands aside


def assert_plain(model: Model, run: Callable[[Model], Tensor], reason: str) -> None:
    handle = chunk_head(model, head="head", rows=3)
    assert type(run(model)) is Tensor
    assert handle.counts.plain == 1
    assert reason in handle.counts.reason


def test_no_gradients_no_lazy_logits() -> None:
    model = Model()
    handle = chunk_head(model, head="head")
    x, _ = inputs()
    with torch.no_grad():
        assert type(model(x)) is Tensor
    with bypass():
        assert type(model(x)) is Tensor
    assert handle.counts.calls == 0
    model.requires_grad_(False)
    assert type(model(x)) is Tensor
    assert handle.counts.reason == "nothing needs a gradient"


def test_dropout_in_the_head_runs_plainly_in_training_only() -> None:
    model = Model(nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 13)))
    assert_plain(model, lambda m: m(inputs()[0]), "random numbers")
    assert type(model.eval()(inputs()[0])) is LazyLogits


def test_a_head_that_mixes_rows_runs_plainly() -> None:
    class Mixing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(-2, keepdim=True))

    assert_plain(Model(Mixing(6, 13)), lambda m: m(inputs()[0]), "depend on other rows")


def test_a_head_that_returns_something_else_runs_plainly() -> None:
    class Pair(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, int]:  # type: ignore[override]
            return super().forward(x), 1

    model = Model(Pair(6, 13))
    assert_plain(model, lambda m: m(inputs()[0])[0], "not one row of logits")


def test_a_head_with_a_borrowed_weight_runs_plainly_and_loses_no_gradient() -> None:
    class Borrowing(nn.Module):
        def __init__(self, lender: nn.Embedding) -> None:
            super().__init__()
            self._lender = [lender]  # in a list: not registered as a submodule

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self._lender[0].weight)

    lender = nn.Embedding(13, 6)
    assert_plain(Model(Borrowing(lender)), lambda m: m(inputs()[0]), "not its parameters")


@pytest.mark.filterwarnings("ignore")
def test_a_weight_made_by_a_hook_runs_plainly() -> None:
    head = torch.nn.utils.weight_norm(nn.Linear(6, 13))
    assert_plain(Model(head), lambda m: m(inputs()[0]), "not its parameters")


def test_functorch_runs_plainly() -> None:
    model = Model()
    x, y = inputs()
    handle = chunk_head(model, head="head")
    parameters = {n: p.detach() for n, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        logits = torch.func.functional_call(model, parameters, (x,))
        return F.cross_entropy(logits.view(-1, 13), y.view(-1))

    found = torch.func.grad(loss)(parameters)
    handle.remove()
    expected = torch.func.grad(loss)(parameters)
    assert all(torch.equal(found[n], expected[n]) for n in expected)


def test_functional_call_gets_gradients_of_what_it_was_given() -> None:
    model = Model()
    x, y = inputs()
    mine = {n: (p.detach() * 2).requires_grad_() for n, p in model.named_parameters()}

    def run() -> list[Tensor]:
        logits = torch.func.functional_call(model, mine, (x,))
        return list(
            torch.autograd.grad(F.cross_entropy(logits.view(-1, 13), y.view(-1)), list(mine.values()))
        )

    expected = run()
    chunk_head(model, head="head", rows=3)
    with pytest.raises(RecomputeError, match="was replaced"):
        run()  # the loss is outside of the call: the parameters are gone by then, and that is said
    assert len(expected) == 4


# ------------------------------------------------------------------------------------- on and off again


def test_removal_restores_the_model_exactly() -> None:
    case = ZOO["llama"]()
    before = {name: dict(m.__dict__) for name, m in case.model.named_modules()}
    handle = chunk_head(case.model)
    handle.remove()
    handle.remove()
    after = {name: dict(m.__dict__) for name, m in case.model.named_modules()}
    assert before.keys() == after.keys()
    for name, old in before.items():
        assert old.keys() == after[name].keys()
        assert all(after[name][key] is value for key, value in old.items())
    assert type(case.output().logits) is Tensor


def test_calling_it_again_replaces_the_options() -> None:
    model = Model()
    first = chunk_head(model, head="head", rows=3)
    second = chunk_head(model, head="head", rows=10)
    x, y = inputs()
    F.cross_entropy(model(x).view(-1, 13), y.view(-1)).backward()
    assert (first.counts.chunks, second.counts.chunks) == (0, 1)
    first.remove()
    assert type(model(x)) is LazyLogits
    second.remove()
    assert "forward" not in model.head.__dict__


def test_removal_below_somebody_elses_wrapper() -> None:
    model = Model()
    handle = chunk_head(model, head="head")
    below = model.head.forward
    model.head.forward = lambda x: below(x)
    handle.remove()
    assert type(model(inputs()[0])) is Tensor


def test_an_exception_removes_it_at_the_end_of_the_block() -> None:
    model = Model()
    with pytest.raises(ZeroDivisionError), chunk_head(model, head="head"):
        raise ZeroDivisionError
    assert "forward" not in model.head.__dict__


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_runs_chunked_on_its_own_weights(copied: Callable[[Model], Model]) -> None:
    model = Model()
    handle = chunk_head(model, head="head", rows=3)
    twin = copied(model)
    with torch.no_grad():
        twin.head.weight.add_(1.0)
    x, y = inputs()
    loss = F.cross_entropy(twin(x).view(-1, 13), y.view(-1))
    loss.backward()
    assert handle.counts.calls == 0
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in twin.parameters())
    handle.remove()
    with bypass():
        torch.testing.assert_close(loss, F.cross_entropy(twin(x).view(-1, 13), y.view(-1)))
    assert twin.head.forward.around.counts.losses == 1


def test_the_model_is_freed() -> None:
    model = Model()
    handle = chunk_head(model, head="head", rows=3)
    x, y = inputs()
    loss = F.cross_entropy(model(x).view(-1, 13), y.view(-1))
    loss.backward()
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model, handle, loss
        assert gone() is None
    finally:
        gc.enable()


def test_lazy_logits_make_no_cycle() -> None:
    model = Model()
    chunk_head(model, head="head", rows=3)
    x, y = inputs()
    gc.collect()
    gc.disable()
    try:
        logits = model(x)
        hidden = weakref.ref(logits._recipe.call.hidden)
        F.cross_entropy(logits[:, 1:].float().reshape(-1, 13), y[:, 1:].reshape(-1)).backward()
        del logits
        assert hidden() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "does not name its head"),
        ({"head": "nothing"}, "has no such module"),
        ({"head": "head", "rows": 0}, "rows=0"),
        ({"head": "head", "rows": True}, "rows=True"),
        ({"head": "head", "chunk_bytes": -1}, "chunk_bytes=-1"),
        ({"head": "head", "fuse": "maybe"}, "fuse='maybe'"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    model = Model()
    with pytest.raises(InputError, match=message):
        chunk_head(model, **options)
    assert "forward" not in model.head.__dict__


def test_a_region_is_not_a_head() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    enable(model, only=["3"])
    with pytest.raises(InputError, match="wrapped as a region"):
        chunk_head(model, head="3")
    with pytest.raises(InputError, match=r"not an nn\.Module"):
        chunk_head("model")  # type: ignore[arg-type]
