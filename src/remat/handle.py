"""Plan -> Handle: what runs on the model now, and the way back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from remat.check.peak import StepPeak
from remat.check.snapshot import snapshot
from remat.check.step import fingerprint
from remat.check.untouched import Outside, parameters_of
from remat.check.verify import Verification
from remat.compiling import internal_bytes
from remat.errors import BudgetError, InputError, PlanError, RecoveryError, RematError
from remat.offloading import engine_for, stem_engine_for
from remat.planner.schedule import least_of_all, schedule
from remat.planner.simulate import simulate
from remat.planner.ties import disagreement
from remat.records import Entry, Kind, Mode, Plan, Profile, Recipe, RegionCall, RegionGraph
from remat.run.byhand import status
from remat.run.compiled import WHOLE, block_for, compiled_block
from remat.run.install import Installation, install
from remat.run.journal import Event, Journal, Stats
from remat.run.offload import Engine
from remat.run.onegraph import KeptOf, below, kept_places
from remat.run.outgoing import outgoing
from remat.run.program import Program
from remat.run.ranks import Ranks
from remat.run.recipe import compile_recipe
from remat.run.recover import Failure, recovering, remembered_bytes, step_optimizer
from remat.run.region import PlannedRegion, Variant
from remat.run.status import Status
from remat.run.stem import StemSender, sending_stem
from remat.run.switch import Switchboard
from remat.show.facts import graph_notes, stem_notes
from remat.show.text import Report
from remat.units import format_bytes

__all__ = [
    "Handle",
    "Programs",
    "apply",
    "at_work",
    "chunked_head",
    "planned_regions",
    "tighter_limit",
]

_TRIES = 4  # runs of one step before it is given up
_TIGHTER = 0.9  # of the present limit, for the next plan after running out of memory
_UNSEEN_BYTES = 2**14  # that later steps may take above the one that `fit` has confirmed a plan with
_HAD = 0.95  # of what the device had to give when it ran out, for the same


def apply(model: nn.Module, plan: Plan, *, check: bool = True) -> Handle:
    """Run this model as planned from now on, until `handle.remove()`; also a context manager.

    `check` is the spot check of every replay: on by default, since what it costs is small.
    """
    _refuse_stranger(model, plan)
    _refuse_second(model)
    return Handle(model, *_installed(model, plan, check), check)


def at_work(model: nn.Module) -> Handle | None:
    """The handle whose plan this model runs now. A copy of the model has none, and neither has a model whose
    handle was let go of without `remove`."""
    found = _AT_WORK.get(model)
    return None if found is None else found()


# Weak on both sides: neither a model nor its handle lives longer for it.
_AT_WORK: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Handle]] = weakref.WeakKeyDictionary()


def _refuse_second(model: nn.Module) -> None:
    there = at_work(model)
    if there is not None and there._changes_model():
        raise InputError(
            f"this {type(model).__name__} runs a plan already, and two handles cannot share it: take the "
            "first off with handle.remove(), then apply the other plan"
        )


def _installed(
    model: nn.Module, plan: Plan, check: bool, again: Sequence[PlannedRegion] | None = None
) -> tuple[Plan, Installation]:
    """The plan that runs now (without offload, if the host has no memory for it), and what was put on.
    `again`: this plan's regions, which were on the model before."""
    asked = plan
    plan, engine = engine_for(plan)
    plan, stem_engine = stem_engine_for(plan)
    try:
        regions = _regions(plan, check) if again is None or plan is not asked else again
        for region in regions:
            region.engine = engine
        head = plan.profile.head
        columns = head is not None and head.columns
        installation = install(model, regions, head=chunked_head(plan), columns=columns)
    except BaseException:
        for one in filter(None, (engine, stem_engine)):
            one.close()
        raise
    if engine is not None:
        installation.engine = engine
        installation.defer(engine.close)
    stem = plan.profile.stem
    if stem_engine is not None and stem is not None:
        installation.defer(stem_engine.close)
        installation.stem = StemSender(stem, stem_engine)
        installation.enter(sending_stem(model.get_submodule(stem.region), installation.stem))
    return plan, installation


def _way(profile: Profile) -> tuple[bool, bool, bool]:
    """How the step runs outside of its regions."""
    by_classes = profile.chunked and profile.head is not None and profile.head.columns
    return profile.chunked, by_classes, profile.stem_sent


def chunked_head(plan: Plan) -> str | None:
    """The head that runs in chunks, if one does."""
    profile = plan.profile
    return profile.head.head if profile.chunked and profile.head is not None else None


def _note_fallback(journal: Journal, name: str, why: str, recipe_failed: bool) -> None:
    """A region could not run as planned: what it takes then is not in the budget."""
    text = f"{name}: {why}. The budget may not hold; remat.status(model) names all regions (said once)"
    journal.note_once("fell back", why, text)


class Handle:
    """A plan at work on a model. `remove` takes everything off again; as a context it does so at exit.

    `on_event`: called with every Event (a tighter plan, a step that was recovered); the same go to the log
    "remat" and into `stats`.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, installation: Installation | Switchboard, check: bool = True
    ) -> None:
        self.model = model
        self.plan = plan
        self.verification: Verification | None = None
        self.measured: StepPeak | None = None
        self.outside: Outside | None = None  # what `fit` saw the step train beside the model
        self._installation = installation
        self._check = check
        self._journal = Journal()
        self._removed = False
        self._made_room = False  # for what `step` copies
        _AT_WORK[model] = weakref.ref(self)
        self._listen()

    def _listen(self) -> None:
        """Have what could not run as planned noted, also if nobody keeps us."""
        if isinstance(self._installation, Installation):
            for region in self._installation.regions:
                region.on_fallback = partial(_note_fallback, self._journal)
            if self._installation.stem is not None:
                self._installation.stem.on_skip = partial(_note_fallback, self._journal)

    @property
    def stats(self) -> Stats:
        """What happened since: steps, events."""
        return self._journal.stats

    @property
    def on_event(self) -> Callable[[Event], None] | None:
        return self._journal.on_event

    @on_event.setter
    def on_event(self, callback: Callable[[Event], None] | None) -> None:
        self._journal.on_event = callback

    @property
    def engine(self) -> Engine | None:
        """What moves tensors to the host and back; its `counts` say how much. None: nothing is offloaded."""
        return self._installation.engine if isinstance(self._installation, Installation) else None

    @property
    def regions(self) -> tuple[PlannedRegion, ...]:
        """The regions that are not simply kept."""
        return tuple(self._installation.regions)

    def status(self) -> Status:
        """What each planned region did, counted while it ran."""
        found = status(self.model)
        planned = (*graph_notes(self.plan.profile), *stem_notes(self.plan.profile), *self.plan.notes)
        return replace(found, notes=(*found.notes, *planned))

    def report(self) -> Report:
        """Everything that was decided and measured, for reading: print it, or save it."""
        events = [event.as_dict() for event in self.stats.events]
        return Report(self.plan, self.verification, self.measured, self.status().rows, events)

    def step(
        self,
        fn: Callable[[], torch.Tensor],
        *,
        backward: Callable[[torch.Tensor], Any] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        ddp: DistributedDataParallel | None = None,
        tries: int = _TRIES,
    ) -> torch.Tensor:
        """Run forward (`fn` gives the loss) and backward; gives the loss. A step that runs out of memory is
        put back to where it began and run again under a tighter plan: random state, buffers and gradients end
        up as if nothing had happened, also where gradients are being accumulated.

        `backward(loss)` for libraries that have their own (accelerator.backward). `optimizer`: step it too,
        again if it runs out of memory before it has written anything. `ddp`: the DistributedDataParallel
        model that fn calls, so that all ranks agree. After `tries` runs: RecoveryError.

        What fn trains beside the model (a head outside) is found in the loss's graph, or, where fn runs
        backward itself, if `fit` ran the same step or the optimizer has it. Buffers outside the model are not
        found: a step that ran twice has updated them twice.
        """
        if isinstance(tries, bool) or not isinstance(tries, int) or tries < 1:
            raise InputError(f"tries={tries!r}; say how often a step may run, an int of at least 1")
        ranks = Ranks(self.model, ddp)
        self._make_room()
        self._begin_step()
        run = backward if backward is not None else torch.Tensor.backward
        try:
            loss, tried = recovering(
                self.model, fn, run, self._next_plan, ranks, tries, self._trained_outside(optimizer)
            )
        except RecoveryError as error:
            error.needed = self._needed()
            error.args = (f"{error}; {format_bytes(error.needed)} are needed at least, as predicted",)
            raise
        if tried:
            self._journal.note("recovered", f"ran again {len(tried)} times: " + "; ".join(tried))
        if optimizer is not None:
            again = step_optimizer(optimizer, self.model, tries)
            if again:
                self._journal.note("recovered", f"the optimizer's step, which ran again {again} times")
        return loss

    def _trained_outside(self, optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
        return [*parameters_of(optimizer), *(self.outside.leaves if self.outside is not None else ())]

    def _make_room(self) -> None:
        """The copies that a step is put back from are within the budget, too: a plan that has no room for
        them gives way, once, to one that has. Where there is none, that is said."""
        if self._made_room or self._removed:
            return
        self._made_room, plan = True, self.plan
        copies = remembered_bytes(self.model, torch.device(plan.profile.environment.device))
        lacking = plan.predicted_peak_bytes + copies + _UNSEEN_BYTES - plan.budget_bytes
        if lacking <= 0 or not plan.budget_bytes:
            return
        simulated = simulate(plan.profile, plan.choices).peak_bytes
        try:
            made = schedule(plan.profile, simulated - lacking, allow=plan.allow)
        except BudgetError as error:  # the best there is
            made = schedule(plan.profile, error.needed, allow=plan.allow)
            over = format_bytes(error.needed - (simulated - lacking))
            text = f"handle.step copies {format_bytes(copies)} of buffers, and no plan leaves room for them: "
            self._journal.note("over budget", f"{text}{over} more than the budget are needed")
        above = plan.predicted_peak_bytes - simulated  # as `fit` has measured it
        made = replace(
            made,
            budget_bytes=plan.budget_bytes,
            predicted_peak_bytes=made.predicted_peak_bytes + above + copies,  # of steps that copy
        )
        self._go_over_to(made, f"to leave room for {format_bytes(copies)} of buffers that handle.step copies")

    def _begin_step(self) -> None:
        self.stats.steps += 1

    def _needed(self) -> int:
        return least_of_all(self.plan.profile, self.plan.allow)

    def _next_plan(self, failure: Failure) -> str | None:
        """As `_tighten`, but a model that was let go of is not planned again."""
        return None if self._removed else self._tighten(failure)

    def _tighten(self, failure: Failure) -> str | None:
        """Go over to the next tighter plan; what it is, or None if this is the tightest."""
        plan = self.plan
        least = self._needed()
        limit = max(least, tighter_limit(simulate(plan.profile, plan.choices).peak_bytes, failure))
        for target in (limit, least):
            made = schedule(plan.profile, target, allow=plan.allow)
            if made.choices != plan.choices or _way(made.profile) != _way(plan.profile):
                break
        else:
            return None
        text = f"a plan predicted to peak at {format_bytes(made.predicted_peak_bytes)}"
        self._go_over_to(made, text)
        return text

    def _go_over_to(self, plan: Plan, why: str) -> None:
        self._installation.remove()
        self.plan, self._installation = _installed(self.model, plan, self._check)
        self._listen()
        self._journal.note("plan changed", why)

    def snapshot(self, path: str | Path) -> AbstractContextManager[None]:
        """On CUDA: what is allocated inside this context is saved for pytorch.org/memory_viz, and beside each
        allocation the name of the region that was running. It costs time: take it of one step.
        """
        return snapshot(self.model, path)

    def remove(self) -> None:
        """Take everything off the model again. A second call does nothing."""
        self._removed = True
        if at_work(self.model) is self:
            del _AT_WORK[self.model]
        self._installation.remove()

    def _changes_model(self) -> bool:
        """Whether anything is on the model: a plan that keeps everything leaves it as it is."""
        if getattr(self._installation, "stem", None) is not None:
            return True
        return bool(self.regions) or chunked_head(self.plan) is not None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, the plan is off the model; afterwards its regions are on it again, and go on counting."""
        if self._removed:
            raise InputError("this handle was removed: there is nothing to pause; apply its plan again")
        put_back = self._take_off()
        del _AT_WORK[self.model]
        try:
            yield
        finally:
            put_back()
            _AT_WORK[self.model] = weakref.ref(self)

    def _take_off(self) -> Callable[[], None]:
        regions = self.regions
        self._installation.remove()

        def put_back() -> None:
            self.plan, self._installation = _installed(self.model, self.plan, self._check, regions)
            self._listen()

        return put_back

    def __reduce__(self) -> tuple[Any, ...]:
        raise RematError(
            "a handle belongs to one model in one process and cannot be copied or pickled; copy the model "
            "(the copy runs as planned, too), or save handle.plan and use remat.apply(model, plan)"
        )

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


def tighter_limit(peak_bytes: int, failure: Failure) -> int:
    """What the next plan may take: a step less than this one, and no more than the device had to give."""
    limit = int(_TIGHTER * peak_bytes)
    return min(limit, int(_HAD * failure.reserved_bytes)) if failure.reserved_bytes else limit


def _release(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def _regions(plan: Plan, check: bool) -> list[PlannedRegion]:
    if not plan.profile.one_graph:
        return planned_regions(plan, check)
    return [_in_one_graph(plan, root, check) for root in plan.profile.graph_roots]


def _in_one_graph(plan: Plan, root: str, check: bool) -> PlannedRegion:
    """The model, or a part of it, as one region, whose compiled graph keeps of each block what is planned for
    it. What is not a compiled block is left to the compiler."""
    profile = plan.profile
    sets: dict[str, KeptOf] = {}
    entries: dict[str, Entry] = {}
    saved_bytes = 0
    spare_bytes = max(plan.budget_bytes - simulate(profile, plan.choices).peak_bytes, 0)
    for index, call in enumerate(profile.calls):
        name, kind = below(root, call.name), profile.kinds[call.kind]
        if name is None:
            continue
        saved_bytes += kind.saved_bytes
        if kind.compiler and kind.graph is not None:
            entry = _compiled_entry(kind, plan.entry(index))
            before = entries.get(name)
            if before is None or entry.resident_bytes < before.resident_bytes:
                entries[name] = entry
                sets[name] = _kept_of(kind, kind.graph, entry, spare_bytes // len(profile.calls))
    backends = {kind.compiler for kind in profile.kinds if kind.compiler}
    made_of = f"{profile.fingerprint} {root}".rstrip()
    block = compiled_block(made_of, kept_places(sets), WHOLE + min(backends))
    variant = Variant(
        Mode.COMPILED,
        saved_bytes=saved_bytes,
        resident_bytes=sum(entry.resident_bytes for entry in entries.values()),
        compiled=block,
        gradient_gap=max((entry.gradient_gap for entry in entries.values()), default=0.0),
        inside=tuple(sorted(entries)),
    )
    return PlannedRegion(root, profile.model, {"every signature": variant}, check)


def _kept_of(kind: Kind, graph: RegionGraph, entry: Entry, spare_bytes: int) -> KeptOf:
    """Where the largest saved set is planned, the compiler may choose its own, within what is planned and
    what the budget leaves to each block: no set is faster."""
    if entry.recipe is None or entry is not _largest_set(kind):
        return KeptOf(graph, entry.recipe)
    return KeptOf(graph, entry.recipe, internal_bytes(graph, entry.recipe) + spare_bytes)


def _compiled_entry(kind: Kind, entry: Entry) -> Entry:
    """An eager entry's place is taken by the largest saved set where everything is kept."""
    return entry if entry.mode is not Mode.KEEP else _largest_set(kind)


def _largest_set(kind: Kind) -> Entry:
    sets = (other for other in kind.menu if other.mode is Mode.COMPILED and not other.host_bytes)
    return max(sets, key=lambda other: other.resident_bytes)


Programs = Callable[[int, Recipe], Program]  # number of a kind, recipe -> program


def planned_regions(plan: Plan, check: bool, programs: Programs | None = None) -> list[PlannedRegion]:
    """One region per name; a region that only keeps is left alone. `programs`: where to get compiled recipes
    from, if not from the plan's own graphs."""
    name = disagreement(plan.profile, plan.choices)
    if name is not None:
        raise PlanError(
            f"the plan has different entries for calls of {name} whose inputs are alike; a region cannot "
            "tell such calls apart, so they need the same one: make the plan again"
        )
    calls: dict[str, list[int]] = {}
    for index, call in enumerate(plan.profile.calls):
        calls.setdefault(call.name, []).append(index)
    device = torch.device(plan.profile.environment.device)
    made: dict[Any, Variant] = {}
    regions = []
    for name, indices in calls.items():
        if all(plan.entry(index).mode is Mode.KEEP for index in indices):
            continue
        variants = {}
        for index in indices:
            call = plan.profile.calls[index]
            key = (call.kind, plan.choices[index])
            if key not in made:
                made[key] = _variant(plan, call, plan.choices[index], device, programs)
            variants[plan.profile.kinds[call.kind].signature] = made[key]
        regions.append(PlannedRegion(name, plan.profile.calls[indices[0]].tower, variants, check))
    for turn, region in enumerate(regions):
        region.turn = region.place = turn
        region.turns = len(regions)
    return regions


def _variant(
    plan: Plan, call: RegionCall, choice: int, device: torch.device, programs: Programs | None
) -> Variant:
    kind = plan.profile.kinds[call.kind]
    entry = kind.menu[choice]
    program = compiled = sent = None
    if entry.recipe is not None and programs is not None:
        program = programs(call.kind, entry.recipe)
    elif entry.recipe is not None:
        if kind.graph is None:
            raise PlanError(f"the plan has a recipe for {call.name} but not its graph; make the plan again")
        if entry.mode is Mode.COMPILED:
            compiled = block_for(kind.signature, kind.graph, entry.recipe, kind.compiler)
            sent = outgoing(kind.graph, entry.recipe)
        else:
            program = compile_recipe(kind.graph, entry.recipe, device)
    return Variant(
        entry.mode,
        program,
        kind.saved_bytes,
        entry.resident_bytes,
        compiled,
        entry.gradient_gap,
        entry.host_bytes,
        (entry.part, entry.chunk_size) if entry.part else None,
        entry.again,
        sent,
        sends=entry.fetches_inputs if entry.mode is Mode.HOSTED else (),
        cut=entry.cut,
    )
