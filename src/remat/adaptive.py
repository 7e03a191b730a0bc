"""Inputs of many sizes under one budget: each size has its own plan.

`fit(..., adaptive=True)` measures the step at a few sizes. The plan of any other is made from what those say
of it (planner.sizes), for the next larger of a row of sizes, so that a stream of lengths needs few plans. No
step takes more than the budget because its size was new:

- bytes between measured sizes are never estimated too low, and a plan for a larger size holds for a smaller;
- a recipe at a size where it has not run yet is compared with what is really there before anything is let
  go. Where it does not fit, its region keeps everything and all later ones recompute as a whole: a plan with
  recipes is used at such a size only if the budget holds that as well. Where nothing but recipes is within
  the budget there is no room to compare, and the spot check alone answers for them;
- host memory for what a plan offloads is there before the step, or that size does without it (remat.sending);
- a batch too large for any plan is refused before it runs. Inputs unlike all that were measured recompute
  everything; where they are larger in anything, memory is taken to grow with the square of that.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from remat.check.peak import release_cached
from remat.errors import BudgetError, HostMemoryError
from remat.fitting import MARGIN
from remat.handle import Handle, Programs, chunked_head, planned_regions, tighter_limit
from remat.planner.bounds import least_budget
from remat.planner.link import host_bytes
from remat.planner.schedule import refusal, schedule
from remat.planner.simulate import Point, simulate
from remat.planner.sizes import MisfitError, with_rows, without_recipes
from remat.planner.ties import disagreement
from remat.records import Action, Kind, Mode, Phase, Plan, Profile, Recipe
from remat.request import device_of
from remat.run.journal import Event
from remat.run.monitor import Monitor, fragmentation_advice, read_device
from remat.run.offload import Engine
from remat.run.program import Program
from remat.run.recipe import compile_recipe
from remat.run.recover import Failure, remembered_bytes
from remat.run.region import PlannedRegion
from remat.run.switch import Switchboard, Table
from remat.run.wrap import bypassed
from remat.sending import (
    NOTHING,
    HostRoom,
    Load,
    least_plan,
    load_of,
    window_gap_bytes,
    without_graphs,
    without_offload,
)
from remat.show.text import Report
from remat.sizing import Measured, chart_and_family
from remat.stencil import Stencil, stencil
from remat.trace.sizes import Place, Shapes, elements, growth_between, shapes_of, text
from remat.units import format_bytes

__all__ = ["FIRST_STEP_BYTES", "AdaptiveHandle"]

FIRST_STEP_BYTES = 2**14  # of the budget, for what the first step of a size makes: tables of the spot check
_PER_OCTAVE = 8  # plans from one size to its double
_REMEMBERED = 256  # shapes whose regions are ready
_RESERVE = 0.003  # of the budget, for what lies between two measured sizes
_RESERVE_CUDA = 0.01  # the same on CUDA
_PIECE_BYTES = 2**19  # of each tensor's piece, that the allocator leaves unused on the average, and counts
_NOTCH = 0.9  # of the limit, for each tightening
_FAILURES = 3  # sizes at which recipes did not fit, before they are tried at no other
_OFTEN = 8  # times that a shape has come before its recipes are compiled for it alone
_ELEMENT_BYTES = 8  # of a batch, at the most
_LOOK_EVERY = 8  # steps between two looks at the device


@dataclass
class _Ready:
    """The regions for inputs of one shape."""

    tables: dict[str, Table]
    plan: Plan | None  # None: recomputes everything
    head: str | None = None
    load: Load = NOTHING  # what goes to the host
    fresh: bool = False  # recipes that have not run at this size yet
    ran: bool = False  # a forward has begun under it
    hits: int = 0
    again: Callable[[], _Ready] | None = None  # the same with fused kernels, where there are any


@dataclass(frozen=True)
class _Planned:
    """A plan for one of the row of sizes. `may_fail`: see there."""

    size: int
    plan: Plan
    may_fail: bool


class _Watch:
    """The hook on the model. It keeps the handle, as whoever calls `fit` may not; `remove` lets it go. Copies
    of the model are not watched: the handle belongs to this one."""

    def __init__(self, handle: AdaptiveHandle | None) -> None:
        self._handle = handle

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        handle = self._handle
        if handle is not None and not handle._paused and not bypassed():
            handle._before_forward(args, kwargs)

    def __deepcopy__(self, memo: Any) -> _Watch:
        return _Watch(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Watch, (None,)


class AdaptiveHandle(Handle):
    """Plans at work on a model, one for each size of its inputs, all within one budget.

    `plan` is the one of the last step. `sizes` are those that were measured.
    """

    def __init__(
        self,
        fitted: Handle,
        measured: Measured,
        check: bool,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        fitted.remove()
        board = Switchboard(fitted.model, check, self._fell_back)
        super().__init__(fitted.model, fitted.plan, board, check)
        self.verification, self.measured, self.on_event = fitted.verification, fitted.measured, on_event
        self.outside = fitted.outside
        self._board = board
        self._paused = False
        self._device = device_of(self.model)
        self._host = HostRoom(self._device)
        self._hostless: set[int] = set()  # sizes that are planned without it, which was refused
        self._fitted = fitted.plan
        self._budget = fitted.plan.budget_bytes
        self._chart, self._family, notes = chart_and_family(measured, fitted.plan)
        self._fitted_size = self._place_of(measured.knots[0].shapes)
        predicted = simulate(fitted.plan.profile, fitted.plan.choices).peak_bytes
        self._over = max(fitted.plan.predicted_peak_bytes - predicted, 0)  # what `fit` saw beyond that
        self._reserve = self._reserve_bytes()
        self._notch = 0
        self._limit: int | None = None  # below the notch, after a real shortage
        self._ready: OrderedDict[tuple[Shapes, int], _Ready] = OrderedDict()
        self._plans: OrderedDict[tuple[int, bool, int, float], _Planned] = OrderedDict()
        self._stencils: dict[Any, Stencil] = {}
        self._confirmed: set[Shapes] = {measured.knots[0].shapes}  # recipes have run at these
        self._refused: set[Shapes] = set()  # and did not fit at these
        self._longest = self._family.sizes[-1]  # that was measured or has run: its output may still be held
        self._held = 0  # the same of batches with more rows, in bytes
        self._now: tuple[Shapes, int] | None = None
        self._read = shapes_of(self.model)
        self._monitor = Monitor(self._budget)
        self._advised = False
        self._names = {call.name: call.tower for call in fitted.plan.profile.calls}
        self._hook = self.model.register_forward_pre_hook(_Watch(self), with_kwargs=True)
        try:
            for note in (*measured.notes, *notes):
                self._journal.note("advice", note)
        except BaseException:  # of `on_event`: nobody has the handle yet
            self.remove()
            raise

    def plan_ahead(self) -> None:
        """Plan for the whole row of sizes, compile what those plans use, and take the host memory that they
        need: a new size then takes milliseconds in training."""
        self._plan_the_row()
        self._reserve_ahead()

    def _plan_the_row(self) -> None:
        largest = size = self._family.sizes[-1]
        while size >= self._family.sizes[0]:
            with suppress(BudgetError):  # at that size only other plans are within the budget
                planned = self._plan(size, True)
                for index, call in enumerate(planned.plan.profile.calls):
                    recipe = planned.plan.entry(index).recipe
                    if recipe is not None and len(self._family.sizes) > 1:
                        with suppress(MisfitError):
                            self._stencil(call.kind, replace(recipe, fused=False))
                if not planned.may_fail:
                    self._plan(size, False)
            if size == self._family.sizes[0]:
                return
            steps = round(_PER_OCTAVE * math.log2(largest / size)) + 1
            size = max(int(largest / 2 ** (steps / _PER_OCTAVE)), self._family.sizes[0])

    def _reserve_ahead(self) -> None:
        """Host memory for the plan that takes the most, in one piece: all others fit into that."""
        loads: list[tuple[Load, int]] = []
        if self._fitted_size is not None:
            loads.append((load_of(self._fitted), self._fitted_size.size))
        for planned in self._plans.values():
            with suppress(MisfitError):
                loads.append((self._load(planned.plan, planned.size), planned.size))
        refused, error = self._host.reserve_most(loads)
        if error is not None:
            self._do_without_host(refused, error)
        for size in refused:
            with suppress(BudgetError):
                self._plan(size, True)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self._family.sizes

    @property
    def plans(self) -> dict[int, Plan]:
        """Those that are ready, by the size that they were made for; smaller inputs run under them, too."""
        with_recipes_last = sorted((key for key in self._plans if key[3] == 1), key=lambda key: key[1])
        return {key[0]: self._plans[key].plan for key in with_recipes_last}

    @property
    def engine(self) -> Engine | None:
        """What moves tensors to the host and back, for all plans; None: none of them has had to yet."""
        return self._host.engine

    @property
    def regions(self) -> tuple[PlannedRegion, ...]:
        return tuple(self._board.regions)

    def report(self) -> Report:
        """The plan of the size that was fitted, and everything that happened since."""
        events = [event.as_dict() for event in self.stats.events]
        return Report(self._fitted, self.verification, self.measured, self.status().rows, events)

    def remove(self) -> None:
        self._hook.remove()
        super().remove()
        self._host.close()

    def _changes_model(self) -> bool:
        """The next batch decides."""
        return True

    def _take_off(self) -> Callable[[], None]:
        self._settle()
        self._paused = True
        self._board.show({})

        def put_back() -> None:
            self._paused = False
            ready = None if self._now is None else self._ready.get(self._now)
            if ready is not None:
                self._board.show(ready.tables, ready.head)

        return put_back

    def __repr__(self) -> str:
        return f"<remat.Handle of {self._fitted.profile.model}: a plan for each of {len(self._ready)} shapes>"

    # -- before every forward

    def _begin_step(self) -> None:
        """Steps are counted by forwards: one step may have several."""

    def _before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._settle()
        self.stats.steps += 1
        if self.stats.steps % _LOOK_EVERY == 0:
            self._look_at_device()
        shapes = self._read(args, kwargs)
        key = (shapes, self._notch)
        ready = self._ready.get(key)
        if ready is None:
            self.stats.misses += 1
            begin = time.perf_counter()
            ready = self._prepare(shapes)
            self.stats.planning_seconds += time.perf_counter() - begin
            self._ready[key] = ready
            self._grow(key, ready)
            while len(self._ready) > _REMEMBERED:
                self._ready.popitem(last=False)
        else:
            self.stats.hits += 1
            self._ready.move_to_end(key)
            ready.hits += 1
            if ready.hits == _OFTEN and ready.again is not None:
                ready = self._ready[key] = ready.again()
                self._now = None
        if key != self._now or ready.fresh:
            self._go_over(key, ready)
        self._host.begin(ready.load)
        ready.ran = True

    def _grow(self, key: tuple[Shapes, int], ready: _Ready) -> None:
        """The output of the longest batch so far is there in the next forward: plans that do not know of it
        are made again."""
        place = self._place_of(key[0])
        if place is None or ready.plan is None:
            return
        if place.rows > 1:
            held = self._outputs(ready.plan.profile)
            if held <= self._held:
                return
            self._held = held
        elif place.size <= self._longest:
            return
        else:
            self._longest = place.size
        self._ready.clear()
        self._plans.clear()
        self._ready[key] = ready

    def _settle(self) -> None:
        """The forward before this one is over: recipes that ran in it for the first time have fitted."""
        ready = None if self._now is None else self._ready.get(self._now)
        if ready is not None and ready.fresh and ready.ran:
            assert self._now is not None
            self._confirmed.add(self._now[0])
            ready.fresh = False
            for table in ready.tables.values():
                table.shadow = False
            self._board.end_shadow()

    def _go_over(self, key: tuple[Shapes, int], ready: _Ready) -> None:
        changed = self._now is None or ready.plan is not self.plan
        self._now = key
        self._board.engine = self._host.engine
        self._board.show(ready.tables, ready.head)
        if ready.plan is None:
            self._journal.note("plan changed", "every region recomputes as a whole")
        elif changed:
            self.plan = ready.plan
            self._journal.note("plan changed", _describe(ready.plan))

    def _fell_back(self, name: str, why: str, recipe_failed: bool) -> None:
        """A region could not run as planned. The rest of this forward recomputes as a whole; at this size
        recipes are not used again if one failed, but they are if only the call was unusual (eval mode, a
        saved-tensor hook around it)."""
        self._journal.note("fell back", f"{name}: {why}")
        if self._now is None:
            return
        if recipe_failed:
            self._ready.pop(self._now, None)
            self._refused.add(self._now[0])
            self._confirmed.discard(self._now[0])
        self._board.recompute_all()
        self._now = None

    # -- plans

    def _place_of(self, shapes: Shapes) -> Place | None:
        return self._chart.place(shapes)

    def _prepare(self, shapes: Shapes) -> _Ready:
        place = self._place_of(shapes)
        if place is None:
            self._refuse_beyond(shapes)
            self._journal.note("fell back", f"no measured size is like {text(shapes)}: recomputes everything")
            return _Ready({name: Table.whole(tower) for name, tower in self._names.items()}, None)
        recipes = place.exact and shapes not in self._refused and self._trusts(place.size)
        if place == self._fitted_size and recipes and not self._is_tightened() and self._fitted_holds():
            load = load_of(self._fitted)
            if place.size not in self._hostless and self._has_room(load, place.size):
                return self._with_recipes(self._fitted, self._fitted, None, load, fresh=False)
        if recipes:
            ready, holds = self._prepare_recipes(place.size, shapes)
            if ready is not None and holds:
                return ready
            needed = None if ready is None else self._needed_by_whole_regions(place.size)
            if ready is not None and needed is not None:
                if not self._check:
                    raise self._unchecked(place.size, needed)
                return ready
        made = self._plan(place.size, False, place.rows).plan
        tables = {
            call.name: Table.whole(call.tower)
            for index, call in enumerate(made.profile.calls)
            if made.entry(index).mode is not Mode.KEEP
        }
        return _Ready(tables, made, chunked_head(made))

    def _fitted_holds(self) -> bool:
        """Whether the fitted plan is within the budget after the longest batch so far, too."""
        profile = self._fitted.profile
        longest = self._family.profile_at(self._longest)
        outputs = longest.step.outputs
        if profile.chunked and longest.head is not None:
            outputs = longest.head.output_bytes
        outputs = max(outputs, self._held)
        if outputs <= profile.step.outputs:
            return True
        after = replace(profile, step=replace(profile.step, outputs=outputs))
        return simulate(after, self._fitted.choices).peak_bytes + self._over <= self._budget

    def _unchecked(self, size: int, needed: int) -> BudgetError:
        """At this size only recipes are within the budget, and nothing would answer for them."""
        return BudgetError(
            f"at size {size} only recipes fit the budget of {format_bytes(self._budget)}; they have not run "
            "at this size, and there is neither room to compare them first nor a spot check (check=False): "
            f"raise the budget by {format_bytes(needed - self._budget)}, or fit with check=True",
            needed=needed,
            hints=("fit with check=True",),
        )

    def _refuse_beyond(self, shapes: Shapes) -> None:
        """Raise if inputs that are not on the chart may not fit even when everything is recomputed.

        Nothing of their kind was measured. A step grows at most with its rows and with the square of all
        else (attention, a bias for each pair of positions), whether or not there are more elements."""
        largest = self._chart.shapes[-1]
        growth = growth_between(largest, shapes)
        if growth <= 1:
            return
        profile = self._family.profiles[-1]
        whole = tuple(profile.kinds[call.kind].reference for call in profile.calls)
        needed = self._over + max(
            point.parameters + point.gradients + point.optimizer + math.ceil(growth * _activations(point))
            for point in simulate(profile, whole).points
        )
        if needed <= self._budget:
            return
        remedy = "fit with the largest batch of this kind (adaptive=[...] takes others to measure)"
        raise BudgetError(
            f"no measured size is like {text(shapes)}, which may take {growth:.3g} times the memory of the "
            f"largest that was measured ({text(largest)}): recomputing everything may take "
            f"{format_bytes(needed)}, and the budget is {format_bytes(self._budget)}; {remedy}, or raise the "
            f"budget by {format_bytes(needed - self._budget)}",
            needed=needed,
            hints=(remedy,),
        )

    def _trusts(self, size: int) -> bool:
        """Whether recipes may be tried here: not if they mostly failed at sizes that were not measured."""
        if self._family.stepped:  # graphs go in steps, too
            return size in self._family.sizes
        failed = len(self._refused)
        return size in self._family.sizes or failed < _FAILURES or len(self._confirmed) > failed

    def _prepare_recipes(self, size: int, shapes: Shapes) -> tuple[_Ready | None, bool]:
        """(regions with recipes, whether the budget holds even if these do not fit here)."""
        planned = self._plan(size, True)
        exact = self._at_exactly(planned.plan, size)
        if exact is None:
            return None, False
        known = shapes in self._confirmed
        try:
            load = self._load(planned.plan, size)
            if not self._has_room(load, planned.size, size):
                return self._prepare_recipes(size, shapes)  # now without the host
            fresh = not known and planned.may_fail  # comparing takes memory that must be there
            ready = self._with_recipes(planned.plan, exact, size, load, fresh=fresh)
            return ready, known or planned.may_fail
        except MisfitError:
            return None, False

    def _load(self, plan: Plan, size: int) -> Load:
        """What it sends at exactly this size; raises MisfitError where that cannot be told."""
        return load_of(plan, lambda number: self._family.graph_at(number, size))

    def _has_room(self, load: Load, *sizes: int) -> bool:
        """Have host memory for that; where it is refused, plans for these sizes do without from now on."""
        try:
            self._host.reserve(load)
        except HostMemoryError as error:
            self._do_without_host(sizes, error)
            return False
        return True

    def _do_without_host(self, sizes: tuple[int, ...], error: HostMemoryError) -> None:
        self._hostless.update(sizes)
        for key in [key for key in self._plans if key[0] in self._hostless]:
            del self._plans[key]
        named = ", ".join(str(size) for size in sorted(set(sizes)))
        self._journal.note("fell back", f"no offload at size {named}: {error}")

    def _needed_by_whole_regions(self, size: int) -> int | None:
        """The budget that recomputing whole regions takes at this size; None: no more than there is."""
        try:
            self._plan(size, False)
        except BudgetError as error:
            return error.needed
        return None

    def _with_recipes(
        self, plan: Plan, exact: Plan, size: int | None, load: Load, *, fresh: bool, alone: bool = False
    ) -> _Ready:
        """`exact` is `plan` with what holds at `size` only; None: the plan has its own graphs. `alone`: see
        `_programs`."""
        programs = None if size is None else self._programs(size, alone)
        regions = planned_regions(exact, self._check, programs)
        tables = {region.name: Table(region.tower, region.variants) for region in regions}
        has_recipes = any(v.program is not None for r in regions for v in r.variants.values())
        if fresh and has_recipes:
            for name in self._first_of_each_kind(exact):
                tables[name].shadow = True
        again = None
        if size is not None and not alone and size not in self._family.sizes and _has_fused(plan):
            again = partial(self._with_recipes, plan, exact, size, load, fresh=False, alone=True)
        return _Ready(tables, plan, chunked_head(exact), load, fresh and has_recipes, again=again)

    def _at_exactly(self, plan: Plan, size: int) -> Plan | None:
        """The plan with the signatures of this size; None if those cannot be told, or if calls that differ
        elsewhere are alike at just this size."""
        used = {call.kind for i, call in enumerate(plan.profile.calls) if plan.entry(i).recipe is not None}
        try:
            kinds = tuple(
                replace(kind, signature=self._family.signature_at(number, size))
                if self._needs_signature(plan, number, used)
                else kind
                for number, kind in enumerate(plan.profile.kinds)
            )
        except MisfitError:
            return None
        exact = replace(plan.profile, kinds=kinds)
        return None if disagreement(exact, plan.choices) else replace(plan, profile=exact)

    def _programs(self, size: int, alone: bool = False) -> Programs:
        """Recipes for exactly this size; raises MisfitError where that cannot be.

        Where nothing was measured they come from a stencil, within a millisecond, and run unfused: the same
        bits. `alone`: compiled for this size alone, with fused kernels as far as other sizes have them.
        """
        measured = size in self._family.sizes

        def program(number: int, recipe: Recipe) -> Program:
            if measured or alone:
                graph = self._family.graph_at(number, size)
                return compile_recipe(graph, recipe, self._device, compile_kernels=measured)
            return self._stencil(number, replace(recipe, fused=False)).at(size)

        return program

    def _stencil(self, number: int, recipe: Recipe) -> Stencil:
        key = (number, recipe.kept, recipe.dropped, recipe.replayed, recipe.offloaded)
        found = self._stencils.get(key)
        if found is None:
            graph = partial(self._family.graph_at, number)
            graphs = [graph(size) for size in self._family.sizes]
            found = self._stencils[key] = stencil(self._family.sizes, graphs, graph, recipe, self._device)
        return found

    def _needs_signature(self, plan: Plan, number: int, used: set[int]) -> bool:
        """A region called several times needs the signatures of all its kinds to tell them apart."""
        names = {call.name for call in plan.profile.calls if call.kind == number}
        busy = {c.name for i, c in enumerate(plan.profile.calls) if plan.entry(i).mode is not Mode.KEEP}
        return number in used or bool(names & busy)

    def _first_of_each_kind(self, plan: Plan) -> list[str]:
        first: dict[int, str] = {}
        for index, call in enumerate(plan.profile.calls):
            if plan.entry(index).recipe is not None:
                first.setdefault(call.kind, call.name)
        return list(first.values())

    def _may_fail(self, plan: Plan) -> bool:
        """Whether the budget also holds a step in which the first recipe of a kind does not fit: its region
        keeps everything, and has the replay beside it, and all regions after it recompute as a whole."""
        profile = plan.profile
        for name in self._first_of_each_kind(plan):
            first = next(i for i, call in enumerate(profile.calls) if call.name == name)
            choices = tuple(
                choice if i < first else 0 if i == first else profile.kinds[call.kind].reference
                for i, (call, choice) in enumerate(zip(profile.calls, plan.choices, strict=True))
            )
            timeline = simulate(profile, choices)
            replay = plan.entry(first).backward_peak_bytes
            beside = max(
                point.peak_bytes + replay
                for point in timeline.points
                if point.call == first and point.phase is Phase.FORWARD
            )
            if max(timeline.peak_bytes, beside) + window_gap_bytes(plan, choices) > self._limit_bytes():
                return False
        return True

    def _plan(self, size: int, recipes: bool, rows: float = 1.0) -> _Planned:
        """The plan for the next larger of a row of sizes, or for this one if that is out of reach."""
        edge = self._edge(size)
        for target in (edge, size) if edge != size else (size,):
            key = (target, recipes, self._notch, rows)
            if key not in self._plans:
                try:
                    made = self._made(target, recipes, rows)
                except BudgetError:
                    if target == size:
                        raise
                    continue
                self._plans[key] = _Planned(target, made, recipes and self._may_fail(made))
                self._journal.note("planned", f"size {target}: {_describe(made)}")
                while len(self._plans) > _REMEMBERED:
                    self._plans.popitem(last=False)
            return self._plans[key]
        raise AssertionError("unreachable: the last target raises")

    def _edge(self, size: int) -> int:
        largest = self._family.sizes[-1]
        if size <= self._family.sizes[0]:
            return self._family.sizes[0]
        octaves = _floor_log2(largest / size * (1 + 1e-9), _PER_OCTAVE)
        return max(int(largest / 2 ** (octaves / _PER_OCTAVE)), size)

    def _made(self, size: int, recipes: bool, rows: float) -> Plan:
        self._refuse_another_step(size)
        found = self._family.profile_at(size, self._longest)
        if rows > 1:
            batch_bytes = math.ceil(_ELEMENT_BYTES * (rows - 1) * elements(self._chart.shapes[-1]))
            found = with_rows(found, rows, batch_bytes)
        if self._held > self._outputs(found):
            head = found.head and replace(found.head, output_bytes=self._held)
            found = replace(found, step=replace(found.step, outputs=self._held), head=head)
        found = found if recipes else without_recipes(found)
        limit, allow = self._limit_bytes(), self._fitted.allow
        if Action.OFFLOAD in allow:
            found = without_graphs(found)
            allow = allow if recipes and size not in self._hostless else without_offload(allow)
        try:
            made = schedule(found, limit, allow=allow, polish=False)
        except BudgetError as error:
            made = least_plan(found, allow, error.needed)
            least = made.predicted_peak_bytes + self._over
            # Nothing beyond the measured sizes was ever run: half of the margin is for what it shows then,
            # the other half for a fit at what is said to be needed, which may see a little more.
            margin = MARGIN if size > self._family.sizes[-1] else 0.0
            if least * (1 + margin / 2) > self._budget and not self._is_tightened():
                times = f", with {rows:.3g} times the rows" if rows > 1 else ""
                where = f"This batch is of size {size}{times}; what was measured: {list(self.sizes)}. "
                where += error.where
                if size < self._longest and self._longest > self._family.sizes[-1]:
                    where += f", after a batch of size {self._longest} whose output may still be held"
                hints = error.hints
                if size in self._hostless:
                    hints = ("free host memory", *(hint for hint in hints if hint != "allow offload"))
                raise refusal(self._budget, math.ceil(least * (1 + margin)), hints, where) from None
        return replace(made, budget_bytes=self._budget)

    def _refuse_another_step(self, size: int) -> None:
        """Where memory grows in steps, what lies beyond the largest size is not known."""
        largest = self._family.sizes[-1]
        if not self._family.stepped or size <= largest:
            return
        needed = least_budget(self._family.profile_at(2 * size), self._fitted.allow)
        raise BudgetError(
            f"this batch is of size {size}, the largest that was measured of {largest}, and memory of this "
            "model grows in steps, of which the next may be anywhere: fit with the largest batch; a budget "
            f"of {format_bytes(needed)} may do for it",
            needed=needed,
            hints=("fit with the largest batch",),
        )

    @staticmethod
    def _outputs(profile: Profile) -> int:
        head = 0 if profile.head is None else profile.head.output_bytes
        return max(profile.step.outputs, head)

    def _is_tightened(self) -> bool:
        return self._notch > 0 or self._limit is not None

    def _limit_bytes(self) -> int:
        limit = int((self._budget - self._reserve) * _NOTCH**self._notch)
        return limit if self._limit is None else min(limit, self._limit)

    def _make_room(self) -> None:
        """There is room: `_reserve_bytes`."""

    def _reserve_bytes(self) -> int:
        """Beside the plans: how much the fitted step exceeded its prediction, the copies of buffers that
        `step` makes, what the first step of a size makes, and what may lie between the measured sizes. On
        CUDA that is about half a MiB for each tensor that is held: so much of a piece the allocator leaves
        unused, at one size if not at another."""
        profile = self._fitted.profile
        between = int(_RESERVE * self._budget)
        if profile.environment.device.startswith("cuda"):
            held = sum(_saved_storages(profile.kinds[call.kind]) for call in profile.calls)
            between = int(_RESERVE_CUDA * self._budget) + held * _PIECE_BYTES
        copies = remembered_bytes(self.model, self._device)
        return self._over + copies + FIRST_STEP_BYTES + between

    # -- less memory, more memory

    def _needed(self) -> int:
        return least_budget(self.plan.profile, self.plan.allow)

    def _tighten(self, failure: Failure) -> str | None:
        self._monitor.ran_out()
        peak = simulate(self.plan.profile, self.plan.choices).peak_bytes
        why = f"after running out of memory: {failure.text}"
        return self._set_limit("tightened", self._notch + 1, tighter_limit(peak, failure), why)

    def _set_limit(self, kind: str, notch: int, limit: int | None, why: str) -> str | None:
        """Plan for the present inputs under another limit; None, and nothing is changed, if that makes no
        difference to them."""
        before = self._notch, self._limit, self.plan
        self._notch, self._limit = notch, limit
        self._ready.clear()
        self._plans.clear()
        text = f"to {format_bytes(self._limit_bytes())}"
        if self._now is not None:
            shapes = self._now[0]
            ready = self._ready[shapes, notch] = self._prepare(shapes)
            if ready.plan is not None and _does_the_same(ready.plan, before[2]) and kind == "tightened":
                self._notch, self._limit = before[:2]
                self._ready.clear()
                self._plans.clear()
                return None
            self._go_over((shapes, notch), ready)
            text += "" if ready.plan is None else f", {_describe(ready.plan)}"
        self._journal.note(kind, f"{text} {why}")
        release_cached(self._device)
        return text

    def _look_at_device(self) -> None:
        reading = read_device(self._device)
        if reading is None:
            return
        advice = None if self._advised else fragmentation_advice(reading)
        if advice is not None:
            self._advised = True
            self._journal.note("advice", advice)
        limit = self._limit_bytes()
        more = 0 if self._notch == 0 else int(limit / _NOTCH) - limit
        change = self._monitor.observe(reading, limit, more)
        if not change or (change < 0 and not self._notch):
            return
        used = format_bytes(reading.reserved + reading.others)
        why = f"with {used} of {format_bytes(reading.total)} taken on the device"
        if change > 0:
            self._set_limit("tightened", self._notch + 1, self._limit, why)
        else:
            wider = None if self._notch == 1 or self._limit is None else int(self._limit / _NOTCH)
            self._set_limit("loosened", self._notch - 1, wider, why)


def _activations(point: Point) -> int:
    return point.kept + point.working + point.moving


def _floor_log2(ratio: float, steps: int) -> int:
    """floor(steps * log2(ratio)), also of ratios below 1."""
    return math.floor(steps * math.log2(ratio))


def _saved_storages(kind: Kind) -> int:
    if kind.graph is None:
        return 0
    return len({kind.graph.values[saved.value].storage for saved in kind.graph.saved})


def _has_fused(plan: Plan) -> bool:
    recipes = (plan.entry(i).recipe for i in range(len(plan.choices)))
    return any(recipe is not None and recipe.fused for recipe in recipes)


def _does_the_same(a: Plan, b: Plan) -> bool:
    return a.predicted_peak_bytes == b.predicted_peak_bytes and a.choices == b.choices


def _describe(plan: Plan) -> str:
    modes = [plan.entry(i).mode for i in range(len(plan.choices))]
    counts = [f"{modes.count(mode)} {word}" for mode, word in _WORDS.items() if mode in modes]
    sent = host_bytes(plan.profile, plan.choices)
    counts += [f"{format_bytes(sent)} to the host"] if sent else []
    return f"{', '.join(counts)}; peak {format_bytes(plan.predicted_peak_bytes)} predicted"


_WORDS = {
    Mode.KEEP: "keep",
    Mode.RECIPE: "by recipe",
    Mode.FULL: "recompute",
    Mode.HOSTED: "recompute from the host",
}
