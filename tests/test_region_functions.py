"""Regions that are functions: found by name, planned like modules, and never for somebody else's model."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from models import ZOO, Case, JointModel, squared
from planning import LEAST, Planned, assert_equal, bits_of, fallbacks, on, regions_at, survey_of, train
from remat.errors import InputError
from remat.records import Mode
from remat.run.functions import functions


def joint() -> Case:
    """Vision tower, language model, action expert; layer i of both is one function."""
    case = ZOO["joint"]()
    marked(case.model)
    return case


def marked(model: JointModel) -> None:
    def region(fn: Any, index: int, *args: Any) -> Any:
        return remat.region(f"joint.{index}", fn)(index, *args)

    model.region = region


def planned_for(case: Case, level: float = LEAST, **options: Any) -> Planned:
    return regions_at(survey_of(case.model, case.run), level, **options)


@pytest.mark.parametrize("level", [0.6, 0.3, LEAST])
def test_functions_over_two_towers(level: float) -> None:
    case = joint()
    expected = train(copy.deepcopy(case.model), case.run)
    planned = planned_for(case, level)
    names = {region.name for region in planned.regions}
    assert {"joint.0", "joint.1", "joint.2"} <= names
    assert any(name.startswith("vision_tower") for name in names)
    with on(case.model, planned):
        assert set(functions(case.model)) == {"joint.0", "joint.1", "joint.2"}
        assert_equal(expected, train(case.model, case.run))
        assert {"joint.0", "joint.1", "joint.2"} <= {row.name for row in remat.status(case.model).rows}
    assert not fallbacks(planned)
    assert not planned.notes
    assert not functions(case.model)


class Shared(nn.Module):
    """Layers as functions: a bound method, a closure, a partial, a lambda that is given the layer."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def layer(self, index: int, x: Tensor) -> Tensor:
        return self.layers[index](x).sin().exp().tanh() + x

    def forward(self, x: Tensor) -> Tensor:
        for i, linear in enumerate(self.layers):
            if self.how == "method":
                x = remat.region(f"f.{i}", self.layer)(i, x)
            elif self.how == "closure":

                def run(x: Tensor, linear: nn.Module = linear, i: int = i) -> Tensor:
                    return self.layer(i, x)

                x = remat.region(f"f.{i}", run)(x)
            elif self.how == "partial":
                x = remat.region(f"f.{i}", functools.partial(self.layer, i))(x)
            else:
                x = remat.region(f"f.{i}", lambda m, x: m(x).sin().exp().tanh() + x)(linear, x)
        return x


HOWS = ["method", "closure", "partial", "argument"]


def shared(how: str) -> Case:
    torch.manual_seed(0)
    return Case(Shared(how), torch.randn(5, 8), squared)


def gradients(case: Case, model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    case.run(model).backward()
    return {f"gradient of {name}": bits_of(p.grad) for name, p in model.named_parameters()}


def function_plan(case: Case) -> Planned:
    found = survey_of(case.model, case.run, [])
    planned = regions_at(found, LEAST, shadow=False)
    assert [r.name for r in planned.regions] == ["f.0", "f.1", "f.2"]
    assert all(v.mode is Mode.RECIPE for r in planned.regions for v in r.variants.values()), planned.notes
    return planned


@pytest.mark.parametrize("how", HOWS)
def test_every_kind_of_function(how: str) -> None:
    case = shared(how)
    plain = gradients(case, copy.deepcopy(case.model))
    with on(case.model, planned := function_plan(case)):
        assert_equal(plain, gradients(case, case.model))
    assert not fallbacks(planned)
    assert all(region.counts.rebuilt for region in planned.regions)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("twin", ["a copy", "another of its class"])
def test_another_model_runs_its_own_weights(how: str, twin: str) -> None:
    """The name finds the plan, but the plan is for one model: any other runs plainly."""
    case = shared(how)
    with on(case.model, planned := function_plan(case)):
        other = copy.deepcopy(case.model) if twin == "a copy" else Shared(how)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.5)
        found = gradients(case, other)
        assert [region.counts.calls for region in planned.regions] == [0, 0, 0]
        assert not gradients(case, case.model).keys() ^ found.keys()
    assert_equal(gradients(case, other), found)


def test_a_layer_that_is_added_later_still_belongs() -> None:
    case = shared("argument")
    with on(case.model, planned := function_plan(case)):
        case.run().backward()
        case.model.layers[1] = nn.Linear(8, 8)
        plain = Shared("argument")
        plain.load_state_dict(case.model.state_dict())
        expected = gradients(case, plain)  # no plan: it is another model
        case.run().backward()
        found = gradients(case, case.model)
        assert all(region.counts.calls == 3 for region in planned.regions)
    assert_equal(expected, found)
    assert not fallbacks(planned)


def test_a_name_for_two_models_is_refused() -> None:
    first, second = shared("method"), shared("method")
    plans = function_plan(first), function_plan(second)
    with (
        on(first.model, plans[0]),
        pytest.raises(InputError, match="another model"),
        on(second.model, plans[1]),
    ):
        pass
    assert not functions(first.model)
    with on(second.model, plans[1]):
        second.run().backward()


def test_without_a_plan_it_is_the_function() -> None:
    assert remat.region("alone", lambda x: x + 1)(2) == 3
    with pytest.raises(InputError, match="region name"):
        remat.region("", lambda x: x)
    with pytest.raises(InputError, match="pass the function"):
        remat.region("alone", 3)  # type: ignore[arg-type]
