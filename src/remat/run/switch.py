"""Regions on a model that change from one plan to another between two steps, at the cost of microseconds.

A region that only keeps is not wrapped at all, as in any installation: a plan that keeps everything leaves
the model as it is. A change touches only what differs. Graphs that were built before stay as they are: what
they need lives in their own nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from remat.records import Mode
from remat.run.chunk import chunk_head
from remat.run.functions import install_function, remove_function
from remat.run.install import Installation, tap
from remat.run.offload import Engine
from remat.run.quiet import quiet
from remat.run.region import Owners, PlannedRegion, Variant, trained_count
from remat.run.wrap import unwrap, wrap

__all__ = ["Switchboard", "Table"]

_FULL = Variant(Mode.FULL)


@dataclass
class Table:
    """How one region runs under one plan. What it remembers of calls is of its own programs only."""

    tower: str
    variants: dict[str, Variant]
    otherwise: Variant | None = None
    shadow: bool = False
    known: dict[Any, Variant] = field(default_factory=dict)
    owners: dict[int, Owners] = field(default_factory=dict)

    @classmethod
    def whole(cls, tower: str) -> Table:
        """Recomputes as a whole, whatever comes in."""
        return cls(tower, {}, _FULL)


class Switchboard:
    """`show` makes the model run as the tables say, region by region; a region without a table keeps."""

    def __init__(
        self, model: nn.Module, check: bool, on_fallback: Callable[[str, str, bool], None] | None = None
    ) -> None:
        self._model, self._check, self._on_fallback = model, check, on_fallback
        self.engine: Engine | None = None  # moves what regions send to the host
        self._modules = dict(model.named_modules())
        self._known: dict[str, PlannedRegion] = {}  # every region that was ever shown: it goes on counting
        self._shown: dict[str, dict[str, Variant]] = {}
        self._taps: dict[str, tuple[frozenset[tuple[str, str]], Installation]] = {}
        self._off: set[str] = set()  # replay went wrong: recomputes as a whole from then on
        self._gave_up = False  # `recompute_all` was called
        self._head: tuple[str | None, ExitStack] = (None, ExitStack())
        self._always = ExitStack()
        self._always.enter_context(quiet(model))

    @property
    def regions(self) -> list[PlannedRegion]:
        """Those that do not simply keep."""
        return [self._known[name] for name in self._shown]

    @property
    def counts(self) -> dict[str, PlannedRegion]:
        """Every region that was ever shown."""
        return dict(self._known)

    def show(self, tables: Mapping[str, Table], head: str | None = None) -> None:
        self._note_switched_off()
        self._gave_up = False
        for name in [name for name in self._shown if name not in tables]:
            self._take_off(name)
        for turn, (name, table) in enumerate(tables.items()):
            self._put_on(name, Table.whole(table.tower) if name in self._off else table, turn, len(tables))
        self._chunk(head)

    def recompute_all(self) -> None:
        """From here on, in the middle of a forward: every region that is shown recomputes as a whole."""
        self._gave_up = True
        for region in self.regions:
            region.variants, region.otherwise, region.known = {}, _FULL, {}

    def end_shadow(self) -> None:
        for region in self.regions:
            region.shadow = False

    def remove(self) -> None:
        for name in list(self._shown):
            self._take_off(name)
        self._chunk(None)
        self._always.close()

    def _note_switched_off(self) -> None:
        if not self._gave_up:
            self._off |= {name for name, put in self._shown.items() if self._known[name].variants is not put}

    def _put_on(self, name: str, table: Table, turn: int, turns: int) -> None:
        region = self._known.get(name)
        if region is None:
            region = PlannedRegion(name, table.tower, {}, self._check, on_fallback=self._on_fallback)
            self._known[name] = region
        region.variants, region.otherwise, region.shadow = table.variants, table.otherwise, table.shadow
        region.known, region.owners = table.known, table.owners
        region.turn, region.turns = turn, turns
        region.engine, region.place = self.engine, turn
        if name not in self._shown:
            if self._is_function(region):
                install_function(name, region, self._model)
            else:
                wrap(self._modules[name], region)
                region.trained = trained_count(self._modules[name])
        self._shown[name] = table.variants
        self._tap(region, table)

    def _take_off(self, name: str) -> None:
        region = self._known[name]
        del self._shown[name]
        if self._is_function(region):
            remove_function(name)
        else:
            unwrap(self._modules[name])
        if name in self._taps:
            self._taps.pop(name)[1].remove()

    def _is_function(self, region: PlannedRegion) -> bool:
        return region.tower == "functions" or region.name not in self._modules

    def _tap(self, region: PlannedRegion, table: Table) -> None:
        programs = [variant.program for variant in table.variants.values() if variant.program is not None]
        wanted = frozenset(passed for program in programs for passed in program.passed)
        there, hooks = self._taps.get(region.name, (frozenset(), None))
        if wanted <= there:
            return
        if hooks is not None:
            hooks.remove()
        made = Installation()
        owner = self._model if self._is_function(region) else self._modules[region.name]
        for module, kind in sorted(wanted | there):
            tap(made, owner, module, kind)
        self._taps[region.name] = (wanted | there, made)

    def _chunk(self, head: str | None) -> None:
        now, stack = self._head
        if head == now:
            return
        stack.close()
        stack = ExitStack()
        if head is not None:
            stack.enter_context(chunk_head(self._model, head=head))
        self._head = (head, stack)
