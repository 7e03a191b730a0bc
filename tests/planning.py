"""Recipes below `fit`, so that a test says exactly how much of each block stays.

survey -> menu.solve(level) -> compile_recipe -> PlannedRegion -> install. What `fit` adds (budget, schedule,
measuring) is left out: here the level is the test's, and the first step compares every rebuilt tensor.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from remat.check.untouched import untouched
from remat.errors import CaptureError
from remat.planner import menu
from remat.records import Mode, Recipe, RegionGraph
from remat.run.install import Installation, install
from remat.run.quiet import quiet
from remat.run.recipe import compile_recipe
from remat.run.region import PlannedRegion, Variant
from remat.trace.discover import Block, find_blocks
from remat.trace.survey import Survey, survey

CPU = torch.device("cpu")
LEAST = 0.0  # the level that keeps as little as possible


def survey_of(model: nn.Module, run: Callable[[], Tensor], blocks: Sequence[Block] | None = None) -> Survey:
    """Every region of one forward, captured, checked and priced; the model is left as it was."""
    with untouched(model), quiet(model), torch.enable_grad():
        return survey(model, find_blocks(model) if blocks is None else blocks, run, lambda _: None)


def recipe_at(graph: RegionGraph, level: float) -> Recipe:
    """The fastest recipe that keeps at most this share of the saved bytes; the least one below that."""
    limit = max(int(level * graph.saved_bytes), menu.least_resident_bytes(graph))
    recipe = menu.solve(graph, limit)
    assert recipe is not None
    menu.check_recipe(graph, recipe)
    return recipe


@dataclass
class Planned:
    """Regions ready to be put on a model (or on a copy of it: they hold no tensor of it)."""

    regions: list[PlannedRegion]
    notes: dict[str, str] = field(default_factory=dict)  # region -> why it has no recipe
    kept: dict[str, float] = field(default_factory=dict)  # region -> share of its saved bytes that stays


def regions_at(
    found: Survey, level: float, *, shadow: bool = True, check: bool = True, fused: bool = False
) -> Planned:
    planned = Planned([])
    variants: dict[int, Variant] = {}
    by_name: dict[str, PlannedRegion] = {}
    for sighting in found.sightings:
        species = found.species[sighting.species]
        if sighting.species not in variants:
            variants[sighting.species], note, share = _variant(species.graph, species.note, level, fused)
            if note:
                planned.notes[sighting.name] = note
            planned.kept[sighting.name] = share
        region = by_name.get(sighting.name)
        if region is None:
            region = PlannedRegion(sighting.name, sighting.tower, {}, check=check, shadow=shadow)
            by_name[sighting.name] = region
            planned.regions.append(region)
        region.variants[species.signature] = variants[sighting.species]
    for turn, region in enumerate(planned.regions):
        region.turn, region.turns = turn, len(planned.regions)
    return planned


def _variant(graph: RegionGraph | None, note: str, level: float, fused: bool) -> tuple[Variant, str, float]:
    if graph is None:
        return Variant(Mode.FULL), note or "no graph and no reason", 0.0
    recipe = replace(recipe_at(graph, level), fused=fused)
    share = recipe.resident_bytes / max(graph.saved_bytes, 1)
    if not recipe.dropped:
        return Variant(Mode.KEEP), "", share
    try:
        program = compile_recipe(graph, recipe, CPU)
    except CaptureError as error:
        return Variant(Mode.FULL), str(error), 0.0
    return Variant(Mode.RECIPE, program, graph.saved_bytes, recipe.resident_bytes), "", share


@contextmanager
def on(model: nn.Module, planned: Planned) -> Iterator[Installation]:
    installation = install(model, planned.regions)
    try:
        yield installation
    finally:
        installation.remove()


# ----------------------------------------------------------------------------------------- steps to compare


def bits_of(tensor: Tensor) -> Tensor:
    """Comparable by torch.equal, NaN included."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return (
        tensor.clone()
        if tensor.dtype is torch.bool
        else tensor.contiguous().view(words[tensor.element_size()]).clone()
    )


def train(
    model: nn.Module,
    run: Callable[[nn.Module], Tensor],
    *,
    steps: int = 2,
    after: Callable[[int], None] | None = None,
    lr: float = 0.05,
) -> dict[str, Tensor]:
    """Steps of SGD; loss, gradients, buffers and random state of each, as bits."""
    found: dict[str, Tensor] = {}
    for index in range(steps):
        torch.manual_seed(100 + index)
        model.zero_grad(set_to_none=True)
        loss = run(model)
        loss.backward()
        found[f"{index} loss"] = bits_of(loss)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[f"{index} gradient of {name}"] = bits_of(parameter.grad)
        for name, buffer in model.named_buffers():
            found[f"{index} buffer {name}"] = bits_of(buffer)
        found[f"{index} random"] = torch.rand(2)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= lr * parameter.grad
        if after is not None:
            after(index)
    return found


def assert_equal(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    """Bit for bit; a gradient that is missing on either side is a failure."""
    assert any("gradient" in name for name in expected), "the plain model has no gradient: nothing is tested"
    assert expected.keys() == found.keys(), f"only on one side: {sorted(expected.keys() ^ found.keys())}"
    different = [name for name in expected if not torch.equal(expected[name], found[name])]
    assert not different, f"differ: {different}"


def assert_planned_equals_plain(
    model: nn.Module,
    run: Callable[[nn.Module], Tensor],
    planned: Planned,
    expected: dict[str, Tensor],
    **options: Any,
) -> None:
    """Two steps with a weight update in between: the first with every rebuilt tensor compared."""
    model = copy.deepcopy(model)

    def no_more_shadow(_: int) -> None:
        for region in planned.regions:
            region.shadow = False

    with on(model, planned):
        assert_equal(expected, train(model, run, after=no_more_shadow, **options))


def fallbacks(planned: Planned) -> dict[str, str]:
    return {region.name: region.counts.why for region in planned.regions if region.counts.fallbacks}


# ------------------------------------------------------------------------------------------------- one block


class Host(nn.Module):
    """A block in the middle of a model: its inputs are not leaves, every output takes part in the loss."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        from remat.trees import map_tensors, tensors

        def enter(tensor: Tensor) -> Tensor:
            return (
                tensor * self.gain.to(tensor.dtype)
                if tensor.is_floating_point() or tensor.is_complex()
                else tensor
            )

        args, kwargs = map_tensors(enter, (args, kwargs))
        output = self.block(*args, **kwargs)
        parts = [t for t in tensors(output) if t.is_floating_point() or t.is_complex()]
        weights = [1.0 + 0.5 * place for place in range(len(parts))]  # or swapped outputs would not show
        return sum((w * magnitude(t) for w, t in zip(weights, parts, strict=True)), torch.zeros(()))


def magnitude(tensor: Tensor) -> Tensor:
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32)).square().mean().to(torch.float32)


def plan_block(
    host: Host, run: Callable[[nn.Module], Tensor], level: float, **options: Any
) -> tuple[Planned, RegionGraph | None]:
    found = survey_of(host, functools.partial(run, host), [Block("block", host.block, "")])
    assert found.sightings, "the block was not called"
    return regions_at(found, level, **options), found.species[0].graph
