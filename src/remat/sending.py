"""What plans of many sizes send to the host: one engine for all of them, with host memory had before a step.

A plan for a larger size also runs at smaller ones. Three things keep such a step within the budget:

- it is predicted without graphs, which counts what is under way in whatever pieces (planner.link);
- the engine holds at most what the largest region sends at exactly the size that runs;
- host memory for all that a step sends is there before it starts: what finds none stays on the device. A size
  for which the host refuses is planned without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from remat.errors import BudgetError, HostMemoryError
from remat.planner.bounds import least_budget
from remat.planner.link import host_bytes, pieces, window_bytes
from remat.planner.schedule import schedule
from remat.records import Action, Plan, Profile, RegionGraph
from remat.run.offload import Engine
from remat.run.slabs import aligned

__all__ = [
    "NOTHING",
    "HostRoom",
    "Load",
    "least_plan",
    "load_of",
    "window_gap_bytes",
    "without_graphs",
    "without_offload",
]


@dataclass(frozen=True)
class Load:
    """What one step sends: storages in the order of sending, and how much the largest region sends."""

    sizes: tuple[int, ...] = ()
    window_bytes: int = 0

    @property
    def host_bytes(self) -> int:
        """Host memory that it takes."""
        return sum(map(aligned, self.sizes))


NOTHING = Load()


def load_of(plan: Plan, graph: Callable[[int], RegionGraph] | None = None) -> Load:
    """Of this plan at one size: `graph` gives a kind's graph there; None: the plan has its own."""
    profile = plan.profile
    if not host_bytes(profile, plan.choices):
        return NOTHING
    if graph is not None:
        used = {c.kind for i, c in enumerate(profile.calls) if plan.entry(i).host_bytes}
        kinds = (replace(k, graph=graph(n)) if n in used else k for n, k in enumerate(profile.kinds))
        plan = replace(plan, profile=replace(profile, kinds=tuple(kinds)))
    sent = [pieces(plan.profile, call, plan.entry(call)) for call in range(len(profile.calls))]
    return Load(tuple(size for one in sent for size in one), max(map(sum, sent)))


class HostRoom:
    """The engine, made when the first plan that sends anything is prepared."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.engine: Engine | None = None

    def reserve(self, load: Load) -> None:
        """HostMemoryError: the host has no memory for that."""
        if not load.sizes:
            return
        if self.engine is None:
            self.engine = Engine(self._device, in_flight_limit_bytes=0)
        self.engine.make_room(load.sizes)

    def reserve_most(
        self, loads: Sequence[tuple[Load, int]]
    ) -> tuple[tuple[int, ...], HostMemoryError | None]:
        """Host memory for the largest of these loads for which it can be had; sizes of larger ones, and why
        not for them."""
        refused: dict[int, HostMemoryError] = {}
        for load, size in sorted(loads, key=lambda pair: -pair[0].host_bytes):
            try:
                self.reserve(load)
                break
            except HostMemoryError as error:
                refused[size] = error
        return tuple(refused), next(reversed(refused.values()), None)

    def begin(self, load: Load) -> None:
        """A forward that sends this begins."""
        if self.engine is not None:
            self.engine.begin(load.window_bytes)

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()


# ------------------------------------------------------------------------------------------------- planning


def without_graphs(profile: Profile) -> Profile:
    """For plans that have to hold at smaller sizes, too: what they send may come in any pieces there."""
    return replace(profile, kinds=tuple(replace(kind, graph=None) for kind in profile.kinds))


def without_offload(allow: Sequence[Action]) -> tuple[Action, ...]:
    return tuple(action for action in allow if action is not Action.OFFLOAD)


def least_plan(found: Profile, allow: tuple[Action, ...], needed: int) -> Plan:
    """The plan with the least peak, where none is within the limit. `needed`: what `schedule` said of it."""
    if Action.OFFLOAD not in allow:
        return schedule(found, least_budget(found, allow), allow=allow)
    try:
        return schedule(found, needed, allow=allow, polish=False)
    except BudgetError:  # with offload the search is no proof, and may end elsewhere for another budget
        return least_plan(found, without_offload(allow), needed)


def window_gap_bytes(plan: Plan, choices: Sequence[int]) -> int:
    """How much more than these choices expect the engine holds on the device, if the plan's window is set."""
    if not host_bytes(plan.profile, choices):
        return 0
    return max(window_bytes(plan.profile, plan.choices) - window_bytes(plan.profile, choices), 0)
