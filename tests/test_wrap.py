"""A wrapper must be invisible to everything but the call, follow copies, and come off without a trace."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat.errors import InputError
from remat.run.wrap import RegionStatus, unwrap, wrap, wrapped


class Doubling:
    """Doubles the output and counts: a change that shows."""

    def __init__(self, owner: str = "remat.enable") -> None:
        self.owner = owner
        self.calls = 0

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.calls += 1
        return 2 * forward(*args, **kwargs)

    def status(self) -> RegionStatus:
        return RegionStatus("x", "", "doubling", True, calls=self.calls)

    def __getstate__(self) -> str:
        return self.owner

    def __setstate__(self, owner: str) -> None:
        self.__init__(owner)  # type: ignore[misc]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


X = torch.linspace(-1, 1, 8).reshape(2, 4)


def test_wrap_runs_the_around_and_unwrap_restores_the_dict_exactly() -> None:
    model = build()
    layer = model[0]
    before, plain, keys = dict(layer.__dict__), layer(X), list(model.state_dict())
    wrap(layer, Doubling())
    assert torch.equal(layer(X), 2 * plain)
    assert list(model.state_dict()) == keys
    assert type(layer) is nn.Linear
    assert unwrap(layer)
    assert list(layer.__dict__) == list(before)
    assert all(layer.__dict__[key] is value for key, value in before.items())
    assert torch.equal(layer(X), plain)
    assert not unwrap(layer)


def test_a_forward_that_somebody_else_put_there_is_called_and_put_back() -> None:
    layer = build()[0]
    theirs = functools.partial(lambda module, x: type(module).forward(module, x) + 1, layer)
    layer.forward = theirs  # what accelerate does
    plain = layer(X)
    wrap(layer, Doubling())
    assert torch.equal(layer(X), 2 * plain)
    unwrap(layer)
    assert layer.forward is theirs


def test_signature_is_the_modules_own() -> None:
    model = build()
    expected = inspect.signature(model[0].forward)
    wrap(model[0], Doubling())
    assert inspect.signature(model[0].forward) == expected


def test_gradients_off_and_compilers_see_the_original() -> None:
    model = build()
    plain = model(X)
    around = Doubling()
    wrap(model[0], around)
    with torch.no_grad():
        assert torch.equal(model(X), plain)
    with torch.inference_mode():
        assert torch.equal(model(X), plain)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(X), plain)
    assert around.calls == 0


def _deepcopied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def _pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [_deepcopied, _pickled, _saved])
def test_a_copy_runs_its_own_weights_with_fresh_counters(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    model = build()
    wrap(model[0], Doubling())
    expected = model[0](X)
    twin = duplicate(model)
    there = wrapped(twin[0])
    assert there is not None
    assert there.module is twin[0]
    assert there.around is not wrapped(model[0]).around
    assert there.around.status().calls == 0
    assert torch.equal(twin[0](X), expected)
    nn.init.zeros_(twin[0].weight)
    nn.init.zeros_(twin[0].bias)
    assert twin[0](X).abs().sum() == 0
    assert torch.equal(model[0](X), expected)
    unwrap(twin[0])
    assert wrapped(model[0]) is not None


def test_a_copy_of_a_module_with_a_foreign_forward_calls_the_copy() -> None:
    layer = build()[0]
    layer.forward = functools.partial(_plus_one, layer)
    wrap(layer, Doubling())
    twin = copy.deepcopy(layer)
    nn.init.zeros_(twin.weight)
    nn.init.zeros_(twin.bias)
    assert torch.equal(twin(X), torch.full((2, 4), 2.0))


def _plus_one(module: nn.Module, x: Tensor) -> Tensor:
    return type(module).forward(module, x) + 1


def test_copying_the_forward_alone_copies_the_module_as_a_bound_method_would() -> None:
    layer = build()[0]
    wrap(layer, Doubling())
    forward = copy.deepcopy(layer.forward)
    assert forward._module() is not layer


@pytest.mark.parametrize("change", [lambda m: m.double(), lambda m: m.to("cpu"), lambda m: m.bfloat16()])
def test_moves_and_casts_apply(change: Callable[[nn.Module], nn.Module]) -> None:
    model = build()
    wrap(model[0], Doubling())
    change(model)
    x = X.to(model[0].weight.dtype)
    assert torch.equal(model[0](x), 2 * nn.functional.linear(x, model[0].weight, model[0].bias))


def test_two_owners_cannot_share_a_module() -> None:
    layer = build()[0]
    wrap(layer, Doubling("remat.apply"))
    with pytest.raises(InputError, match=r"remat\.apply already: remat\.enable") as error:
        wrap(layer, Doubling("remat.enable"))
    assert "handle.remove()" in str(error.value)
    assert wrapped(layer).around.owner == "remat.apply"


def test_the_same_owner_replaces_its_wrapper() -> None:
    layer = build()[0]
    before = dict(layer.__dict__)
    wrap(layer, Doubling())
    wrap(layer, Doubling())
    unwrap(layer)
    assert layer.__dict__ == before


def test_a_wrapped_model_is_freed_without_the_garbage_collector() -> None:
    model = build()
    wrap(model[0], Doubling())
    gone = weakref.ref(model[0])
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()
