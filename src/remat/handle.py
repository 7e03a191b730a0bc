"""Plan -> Handle: what runs on the model now, and the way back."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from remat.check.peak import StepPeak
from remat.check.snapshot import snapshot
from remat.check.step import fingerprint
from remat.check.verify import Verification
from remat.errors import PlanError
from remat.records import Mode, Plan, RegionCall
from remat.run.byhand import status
from remat.run.compiled import block_for
from remat.run.install import Installation, install
from remat.run.recipe import compile_recipe
from remat.run.region import PlannedRegion, Variant
from remat.run.status import Status
from remat.show.text import Report

__all__ = ["Handle", "apply"]


def apply(model: nn.Module, plan: Plan, *, check: bool = True) -> Handle:
    """Run this model as planned from now on, until `handle.remove()`; also a context manager.

    `check` is the spot check of every replay: on by default, since what it costs is small.
    """
    _refuse_stranger(model, plan)
    regions = _regions(plan, check)
    head = plan.profile.head.head if plan.profile.chunked and plan.profile.head is not None else None
    return Handle(model, plan, install(model, regions, head=head))


class Handle:
    """A plan at work on a model. `remove` takes everything off again; as a context it does so at exit."""

    def __init__(self, model: nn.Module, plan: Plan, installation: Installation) -> None:
        self.model = model
        self.plan = plan
        self.verification: Verification | None = None
        self.measured: StepPeak | None = None
        self._installation = installation

    @property
    def regions(self) -> tuple[PlannedRegion, ...]:
        """The regions that are not simply kept."""
        return tuple(self._installation.regions)

    def status(self) -> Status:
        """What each planned region did, counted while it ran."""
        return status(self.model)

    def report(self) -> Report:
        """Everything that was decided and measured, for reading: print it, or save it."""
        return Report(self.plan, self.verification, self.measured, self.status().rows)

    def snapshot(self, path: str | Path) -> AbstractContextManager[None]:
        """On CUDA: what is allocated inside this context is saved for pytorch.org/memory_viz, and beside each
        allocation the name of the region that was running. It costs time: take it of one step.
        """
        return snapshot(self.model, path)

    def remove(self) -> None:
        """Take everything off the model again. A second call does nothing."""
        self._installation.remove()

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<remat.Handle of {self.plan.profile.model}: {len(self.regions)} regions planned>"


def _refuse_stranger(model: nn.Module, plan: Plan) -> None:
    profile = plan.profile
    if profile.environment.estimated:
        raise PlanError(
            f"this plan is an estimate for {profile.environment.device_name}, made without the device: "
            "nothing of it has run yet. It can be read, compared and saved, but not applied; on the device, "
            f"remat.fit(model, batch, budget={plan.budget_bytes}) measures and confirms a plan"
        )
    if fingerprint(model) != profile.fingerprint:
        raise PlanError(
            f"this plan was made for a {profile.model} with other parameters (fingerprint "
            f"{profile.fingerprint}, this {type(model).__name__} has {fingerprint(model)}); "
            "make a plan for this model"
        )
    ours, theirs = _release(torch.__version__), _release(profile.environment.torch_version)
    if ours != theirs:
        raise PlanError(
            f"this plan was made with torch {theirs}, this is torch {ours}: operations and what autograd "
            "saves may differ; make the plan again"
        )


def _release(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def _regions(plan: Plan, check: bool) -> list[PlannedRegion]:
    """One region per name; a region that only keeps is left alone."""
    calls: dict[str, list[int]] = {}
    for index, call in enumerate(plan.profile.calls):
        calls.setdefault(call.name, []).append(index)
    device = torch.device(plan.profile.environment.device)
    programs: dict[Any, Variant] = {}
    regions = []
    for name, indices in calls.items():
        if all(plan.entry(index).mode is Mode.KEEP for index in indices):
            continue
        variants = {}
        for index in indices:
            call = plan.profile.calls[index]
            choice = _frugal_choice(plan, indices, call)
            key = (call.kind, choice)
            if key not in programs:
                programs[key] = _variant(plan, call, choice, device)
            variants[plan.profile.kinds[call.kind].signature] = programs[key]
        regions.append(PlannedRegion(name, plan.profile.calls[indices[0]].tower, variants, check))
    for turn, region in enumerate(regions):
        region.turn, region.turns = turn, len(regions)
    return regions


def _frugal_choice(plan: Plan, indices: list[int], call: RegionCall) -> int:
    """A module that one step calls several times with equal inputs runs them all alike."""
    alike = [plan.choices[i] for i in indices if plan.profile.calls[i].kind == call.kind]
    menu = plan.profile.kinds[call.kind].menu
    return min(alike, key=lambda choice: menu[choice].resident_bytes)


def _variant(plan: Plan, call: RegionCall, choice: int, device: torch.device) -> Variant:
    kind = plan.profile.kinds[call.kind]
    entry = kind.menu[choice]
    program = compiled = None
    if entry.recipe is not None:
        if kind.graph is None:
            raise PlanError(f"the plan has a recipe for {call.name} but not its graph; make the plan again")
        if entry.mode is Mode.COMPILED:
            compiled = block_for(kind.signature, kind.graph, entry.recipe, kind.compiler)
        else:
            program = compile_recipe(kind.graph, entry.recipe, device)
    return Variant(entry.mode, program, kind.saved_bytes, entry.resident_bytes, compiled, entry.gradient_gap)
