"""enable, disable and status on the whole zoo: equal gradients, exact restoration, honest counting."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import ZOO, Bottleneck, Case, MlpBlock
from reference import assert_same, assert_step_unchanged, step
from remat.errors import InputError, RecomputeError
from remat.run.byhand import disable, enable, status
from remat.run.checkpoint import checkpoint
from remat.run.wrap import RegionStatus, wrap, wrapped


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("name", ZOO)
def test_zoo_is_bit_equal(name: str, offload: bool) -> None:
    """Two accumulated passes: loss, every gradient, buffers (statistics once) and the random stream."""
    model = assert_step_unchanged(ZOO[name](), lambda model: enable(model, offload=offload), passes=2)
    assert status(model).active


@pytest.mark.parametrize("name", ["mlp", "resnet", "llama", "gpt2"])
def test_autocast(name: str) -> None:
    assert_step_unchanged(ZOO[name](), enable, context=lambda: torch.autocast("cpu", dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "options",
    [
        {"every": 2},
        {"select": "sqrt"},
        {"density": 0.5},
        {"select": "*.self_attn"},
        {"select": ["*.mlp"]},
        {"only": "model.vision_tower"},
        {"exclude": "model.vision_tower"},
        {"select": lambda block: block.name.endswith("1")},
    ],
)
def test_every_choice_is_bit_equal(options: dict[str, Any]) -> None:
    assert_step_unchanged(ZOO["paligemma"](), lambda model: enable(model, **options))


def names(model: nn.Module, **options: Any) -> list[str]:
    chosen = [row.name for row in enable(model, **options).rows]
    disable(model)
    return chosen


def test_towers_are_counted_on_their_own() -> None:
    model = ZOO["t5"]().model  # two encoder and three decoder blocks
    assert names(model, every=2) == ["encoder.block.0", "decoder.block.0", "decoder.block.2"]
    assert names(model, select="sqrt") == ["encoder.block.0", "decoder.block.0"]
    assert len(names(model, density=0.5)) == 3


def test_choice_by_measured_size() -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(*[MlpBlock(8), Wide(8, 4), MlpBlock(8), Wide(8, 16)]), torch.randn(4, 8)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert names(model, select="memory", density=0.5, batch=batch) == ["1", "3"]
    assert names(model, select="memory", density=0.25, batch=batch) == ["3"]
    assert len(names(model, select="compute", density=0.5, batch=batch)) == 2
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, before[key]) for key, a in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


class Wide(MlpBlock):
    def __init__(self, width: int, factor: int) -> None:
        super().__init__(width)
        self.up, self.down = nn.Linear(width, factor * width), nn.Linear(factor * width, width)
        self.norm = nn.BatchNorm1d(width)  # type: ignore[assignment]


def snapshot(model: nn.Module) -> list[Any]:
    """Everything that enable could have left behind, by identity."""
    return [
        [(name, type(m), {k: id(v) for k, v in m.__dict__.items()}) for name, m in model.named_modules()],
        list(model.state_dict()),
        [getattr(getattr(m, "config", None), "use_cache", None) for m in model.modules()],
        [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()],
    ]


@pytest.mark.parametrize("name", ["mlp", "resnet", "gpt2", "paligemma"])
def test_disable_restores_the_model_exactly_and_both_are_idempotent(name: str) -> None:
    case = ZOO[name]()
    before = snapshot(case.model)
    disable(case.model)
    assert snapshot(case.model) == before
    for _ in range(2):
        enable(case.model)
        enable(case.model, every=2)
        disable(case.model)
        disable(case.model)
    assert snapshot(case.model) == before
    assert not status(case.model).rows


def test_status_counts_what_ran() -> None:
    case = ZOO["shared_block"]()
    enable(case.model)
    assert [row.active for row in status(case.model).rows] == [False, False]
    case.run().backward()
    first, second = status(case.model).rows
    assert (first.calls, first.recomputed) == (2, 2)  # the shared block is called twice
    assert (second.calls, second.recomputed) == (1, 1)
    case.run()
    assert [row.recomputed for row in status(case.model).rows] == [0, 0]  # no backward yet in this step
    text = str(status(case.model))
    assert all(
        word in text for word in ("region", "active", "recomputed", "saved before", "saved after", "why")
    )
    assert status(case.model).as_dict()["regions"][0]["name"] == "blocks.0"


def test_saved_bytes_are_those_of_autograd() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*[MlpBlock(8, 0.0) for _ in range(2)]), torch.randn(4, 8)
    seen: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        seen[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = model[0](x)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    expected = sum(t.untyped_storage().nbytes() for p, t in seen.items() if p not in weights)
    assert output is not None
    enable(model)
    model(x).sum().backward()
    row = status(model).rows[0]
    assert row.saved_bytes_before == expected
    assert row.saved_bytes_after == x.nbytes
    enable(model, offload=True)
    model(x).sum().backward()
    assert status(model).rows[0].saved_bytes_after == 0


def test_openpi_layers_that_are_never_called_are_reported() -> None:
    case = ZOO["joint"]()
    enable(case.model)
    case.run().backward()
    rows = {row.name: row for row in status(case.model).rows}
    assert rows["vision_tower.1"].active
    assert not rows["language_model.layers.0"].active
    assert "remat.checkpoint" in rows["language_model.layers.0"].why


def test_inactive_without_gradients_and_active_in_a_frozen_eval_model() -> None:
    case = ZOO["mlp"]()
    expected = {}
    case.model.eval().requires_grad_(False)
    x = case.batch.clone().requires_grad_()
    case.model(x).sum().backward()
    expected["x"], x.grad = x.grad, None
    enable(case.model)
    with torch.no_grad():
        case.model(x)
    case.model(x.detach())
    assert not status(case.model).active
    assert "needs a gradient" in status(case.model).rows[0].why
    case.model(x).sum().backward()
    assert status(case.model).active
    assert torch.equal(x.grad, expected["x"])


def test_a_cleared_or_covered_forward_is_noticed() -> None:
    case = ZOO["mlp"]()
    enable(case.model)
    case.run().backward()
    del case.model[1].forward
    rows = status(case.model).rows
    assert [row.active for row in rows] == [True, False, True, True]
    assert "replaced or removed" in rows[1].why
    ours = case.model[2].forward

    def theirs(x: Tensor) -> Tensor:
        return ours(x)

    theirs.__wrapped__ = ours  # type: ignore[attr-defined]
    case.model[2].forward = theirs
    assert status(case.model).rows[2].active
    disable(case.model)
    case.run().backward()
    assert case.model[2].forward is theirs
    assert ours.around is None  # it cannot be taken out, so it stands still


# ------------------------------------------------------------------------------- others' checkpointing


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5", "vit", "paligemma"])
def test_transformers_own_checkpointing_is_not_doubled(name: str) -> None:
    case = ZOO[name]()
    case.model.gradient_checkpointing_enable()
    assert case.model.is_gradient_checkpointing
    before = snapshot(case.model)
    enable(case.model)
    case.run().backward()
    assert all(row.recomputed == 1 for row in status(case.model).rows)
    assert any("off while remat is on" in note for note in status(case.model).notes)
    disable(case.model)
    assert snapshot(case.model) == before
    assert case.model.is_gradient_checkpointing


def test_checkpointing_switched_on_later_is_reported_as_nested() -> None:
    case = ZOO["llama"]()
    plain = copy.deepcopy(case.model)
    enable(case.model)
    case.model.gradient_checkpointing_enable()
    assert_same(step(case, plain), step(case, case.model))
    found = status(case.model)
    assert any("nested checkpointing" in note for note in found.notes)
    assert all("inside another checkpoint" in row.why for row in found.rows)
    disable(case.model)


def test_diffusers_flag_on_the_parent() -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=4,
        in_channels=2,
        out_channels=2,
        num_layers=2,
        sample_size=4,
    )
    model.train().enable_gradient_checkpointing()
    batch = {
        "hidden_states": torch.randn(1, 2, 4, 4),
        "timestep": torch.tensor([1]),
        "class_labels": torch.tensor([0]),
    }
    case = Case(model, batch, lambda output, _: output.sample.square().mean())
    plain = copy.deepcopy(model)
    plain.disable_gradient_checkpointing()
    enable(model)
    assert_same(step(case, plain), step(case, model))
    assert [row.recomputed for row in status(model).rows] == [1, 1]
    disable(model)
    assert model.is_gradient_checkpointing


def test_kv_cache_is_off_in_training_and_restored() -> None:
    case = ZOO["llama"]()
    assert case.model.config.use_cache
    enable(case.model)
    assert not case.model.config.use_cache
    forced = Case(case.model, {**case.batch, "use_cache": True}, case.loss)  # a caller that insists
    plain = copy.deepcopy(case.model)
    disable(plain)
    assert_same(step(forced, plain), step(forced, case.model))
    disable(case.model)
    assert case.model.config.use_cache


def test_other_owners_are_listed_and_not_overridden() -> None:
    class Planned:
        owner = "remat.apply"

        def __call__(self, module: Any, forward: Any, args: Any, kwargs: Any) -> Any:
            return forward(*args, **kwargs)

        def status(self) -> RegionStatus:
            return RegionStatus("1", "", "recipe", True)

    case = ZOO["mlp"]()
    wrap(case.model[1], Planned())
    with pytest.raises(InputError, match=r"1 is planned by remat\.apply"):
        enable(case.model)
    assert all(wrapped(block) is None for block in (case.model[0], case.model[2]))
    enable(case.model, exclude="1")
    assert {row.mode for row in status(case.model).rows} == {"checkpoint", "recipe"}
    disable(case.model)
    assert [row.mode for row in status(case.model).rows] == ["recipe"]


# ------------------------------------------------------------------------------------- copies and leaks


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_enabled_on_its_own(duplicate: Any) -> None:
    case = ZOO["resnet"]()
    plain = copy.deepcopy(case.model)
    enable(case.model)
    case.run().backward()
    twin = duplicate(case.model)
    twin.zero_grad(set_to_none=True)
    twin.load_state_dict(plain.state_dict())
    assert not status(twin).active
    assert_same(step(case, plain), step(case, twin))
    assert all(row.recomputed == 1 for row in status(twin).rows)
    disable(twin)
    assert len(status(case.model).rows) == 5


def test_exceptions_in_the_middle_leave_no_state() -> None:
    case = ZOO["resnet"]()
    plain = copy.deepcopy(case.model)
    start = copy.deepcopy(case.model.state_dict())
    enable(case.model)
    hook = case.model.layer2[1].conv1.register_forward_pre_hook(_raise)
    with pytest.raises(ZeroDivisionError):
        case.run()
    hook.remove()
    loss = case.run()
    hook = case.model.layer2[1].conv1.register_forward_pre_hook(_raise)
    with pytest.raises(ZeroDivisionError) as error:
        loss.backward()
    assert any("layer2.1" in note for note in getattr(error.value, "__notes__", ["layer2.1"]))
    hook.remove()
    case.model.zero_grad(set_to_none=True)
    case.model.load_state_dict(start)
    assert_same(step(case, plain), step(case, case.model))


def _raise(module: nn.Module, args: Any) -> None:
    raise ZeroDivisionError


def test_two_forwards_before_a_backward() -> None:
    case = ZOO["mlp"]()

    def gradients(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(5)
        losses = [case.run(model), case.run(model)]
        case.run(model)  # never backwarded
        losses[0].backward()
        losses[1].backward()
        return [p.grad for p in model.parameters()]

    plain = copy.deepcopy(case.model)
    enable(case.model)
    assert all(torch.equal(a, b) for a, b in zip(gradients(plain), gradients(case.model), strict=True))


def test_disable_between_forward_and_backward() -> None:
    case = ZOO["mlp"]()
    plain = copy.deepcopy(case.model)
    expected = step(case, plain)
    enable(case.model)
    torch.manual_seed(1234)
    loss = case.run()
    disable(case.model)
    loss.backward()
    for name, parameter in case.model.named_parameters():
        assert torch.equal(parameter.grad, expected[f"gradient of {name}"])


def test_an_optimizer_step_before_backward_is_refused() -> None:
    case = ZOO["mlp"]()
    enable(case.model)
    loss = case.run()
    with torch.no_grad():
        case.model[0].up.weight.add_(1)
    with pytest.raises(RecomputeError, match=r"0: parameter 'weight'"):
        loss.backward()


def test_500_steps_leak_nothing() -> None:
    case = ZOO["mlp"]()
    enable(case.model, offload=True)

    def live() -> tuple[int, int]:
        gc.collect()
        found = [o for o in gc.get_objects() if type(o) in (Tensor, nn.Parameter)]
        return len(found), sum(t.nbytes for t in found)

    def one_step() -> None:
        case.run().backward()
        case.model.zero_grad(set_to_none=True)

    for _ in range(3):
        one_step()
    before = live()
    for _ in range(500):
        one_step()
    assert live() == before


def test_offload_by_hand_gives_its_host_memory_back() -> None:
    from remat.run import hosted

    hosted.release()
    case = ZOO["mlp"]()
    enable(case.model, offload=True)
    case.run().backward()
    (engine,) = hosted._engines.values()
    assert engine.counts.sent_bytes > 0
    assert engine.counts.fetched_bytes > 0  # nothing stayed on the device
    assert engine.counts.pinned_bytes > 0
    disable(case.model)
    assert engine.counts.pinned_bytes == 0
    assert not hosted._engines


# ------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every=0"),
        ({"every": "2"}, "every='2'"),
        ({"every": True}, "every=True"),
        ({"density": 0}, "density=0"),
        ({"density": 1.5}, r"density=1\.5"),
        ({"density": "all"}, "density='all'"),
        ({"density": 0.5, "every": 2}, "give one of them"),
        ({"only": "layer9"}, "did you mean"),
        ({"only": "zzz"}, "it has 'stem'"),
        ({"exclude": "layer9"}, "did you mean"),
        ({"only": nn.LSTM}, "LSTM"),
        ({"select": "unifrom"}, "not one of uniform"),
        ({"select": 3}, "select=3"),
        ({"select": "memory"}, "pass batch="),
        ({"select": "compute"}, "pass batch="),
        ({"select": "layer1", "only": "layer2"}, "give one of them"),
        ({"select": lambda block: False}, "chose none of 5 blocks"),
        ({"exclude": Bottleneck}, "no repeated blocks"),
        ({"offload": "yes"}, "offload='yes'"),
    ],
)
def test_bad_input_changes_nothing(options: dict[str, Any], message: str) -> None:
    model = ZOO["resnet"]().model
    before = snapshot(model)
    with pytest.raises(InputError, match=message):
        enable(model, **options)
    assert snapshot(model) == before


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU())])
def test_a_model_without_repeated_blocks(model: nn.Module) -> None:
    with pytest.raises(InputError, match=r"no repeated blocks.*only=.*remat\.checkpoint"):
        enable(model)


@pytest.mark.parametrize("function", [enable, status])
def test_not_a_module(function: Any) -> None:
    with pytest.raises(InputError, match="function"):
        function(lambda x: x)


def test_enable_inside_a_checkpoint_of_the_users_own() -> None:
    case = ZOO["mlp"]()
    plain = copy.deepcopy(case.model)
    enable(case.model)
    outer = Case(case.model, case.batch, case.loss)
    expected = step(outer, plain)
    torch.manual_seed(1234)
    x = case.batch.clone()
    loss = case.loss(checkpoint(case.model, x), None)
    loss.backward()
    for name, parameter in case.model.named_parameters():
        assert torch.equal(parameter.grad, expected[f"gradient of {name}"])
    assert all("inside another checkpoint" in row.why for row in status(case.model).rows)


def test_python_and_numpy_chance_is_the_same_when_a_block_runs_again() -> None:
    """Stochastic depth by Python's generator: a recomputation that drew anew would take other branches."""
    import random

    import numpy

    class Chancy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x).tanh() * (1 + random.random())
            return x + y if numpy.random.rand() < 0.5 else x - y

    def gradients(model: nn.Module) -> list[Tensor]:
        random.seed(7)
        numpy.random.seed(7)
        model(x).square().sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    torch.manual_seed(0)
    model, x = nn.Sequential(*(Chancy() for _ in range(8))), torch.randn(4, 8)
    expected = gradients(copy.deepcopy(model))
    after = random.random()
    enable(model)
    assert all(torch.equal(a, b) for a, b in zip(expected, gradients(model), strict=True))
    assert random.random() == after
