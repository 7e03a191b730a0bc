"""Recipes for one region: which storages stay, and which operations rebuild the rest.

A small mixed-integer program per region, after the idea of Checkmate (Jain et al., 2020) but
per saved tensor and per storage instead of per layer, and without a schedule of its own: a replay runs once,
on demand, in backward. `keep_s` and `offload_s <= keep_s` for a storage, `replay_o` for an operation; a value
is at hand if it is free, if its storage is kept and still shows it (`held`), or if its producer is replayed.

The solver only proposes the kept set. `finish` derives everything else from it by walking the graph, in exact
integers, and `check_recipe` confirms the result without knowing how it was found.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, csr_array

from remat.errors import InputError
from remat.records import Recipe, RegionGraph, Role

__all__ = [
    "SMALLEST_SENT",
    "check_recipe",
    "finish",
    "least_resident_bytes",
    "most_useful",
    "recipes",
    "solve",
    "working_set_bytes",
]

Floats = npt.NDArray[np.float64]

_LEVELS = 10
_TIME_LIMIT_S = 10.0
_PRICES = tuple(2.0 ** (exponent / 2) for exponent in range(-8, 13))  # of a byte on the device
_LINK_PRICES = (0.0, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9)  # of a byte on the link, as a share of that
_SOLVERS = 4  # levels solved side by side
SMALLEST_SENT = 0.005  # of what is saved: a smaller storage is not worth a copy of its own

# The objective is scaled so that replaying everything costs _SECONDS_SCALE, and bytes so that keeping
# everything costs _BYTES_SCALE: far above HiGHS's absolute tolerance of 1e-6, far below what floats carry.
# The tie-breakers then move the optimum by no more than about a hundred-thousandth of the region's seconds.
_SECONDS_SCALE = 1e3
_BYTES_SCALE = 1e3
_TIE_PER_OP = 1e-4
_TIE_ALL_BYTES = 1e-3
_TIE_PER_OFFLOAD = 1e-4


def recipes(
    graph: RegionGraph,
    *,
    levels: Sequence[float] | None = None,
    link_bytes: int | Sequence[int] = 0,
    slot_seconds: float = 0.0,
    moved_seconds: float = 0.0,
    keep_seconds: Sequence[float] = (),
    time_limit_s: float = _TIME_LIMIT_S,
) -> tuple[Recipe, ...]:
    """The Pareto list of recipes for one region, from most to least resident bytes.

    `levels` are shares of the region's saved bytes; by default ten steps of equal size down to the least that
    is possible, which is always the last level. With `link_bytes` every second level is also solved with up
    to that many bytes moved to the host, or with each of several amounts; small storages are not moved: the
    host works as long for a copy of them as for one of large ones. `slot_seconds` is what dropping one
    saved tensor costs beside the replay, `moved_seconds` what moving one storage costs beside the link's
    time, `keep_seconds`, per storage, what keeping it costs beside its bytes.
    Keeping everything is not a recipe and not in the list.
    """
    links = sorted({0, *((link_bytes,) if isinstance(link_bytes, int) else link_bytes)})
    model = _Model(
        graph,
        offload=links[-1] > 0,
        slot_seconds=slot_seconds,
        moved_seconds=moved_seconds,
        keep_seconds=keep_seconds,
        smallest_sent_bytes=int(SMALLEST_SENT * graph.saved_bytes),
    )
    with ThreadPoolExecutor(min(_SOLVERS, os.cpu_count() or 1)) as solvers:  # HiGHS lets Python go on

        def seek(link: int, least: Recipe, limit: int) -> Recipe:
            return _solve(model, limit, link, time_limit_s) or least

        floor = list(solvers.map(partial(_least, model, time_limit_s=time_limit_s), links))
        sought = [
            (link, least, limit)
            for link, least in zip(links, floor, strict=True)
            for limit in _limits(graph.saved_bytes, least.resident_bytes, levels)[:: 2 if link else 1]
        ]
        found = list(solvers.map(seek, *zip(*sought, strict=True)))
    return _pareto([*found, *floor])


def most_useful(graph: RegionGraph, found: Sequence[Recipe], count: int) -> tuple[Recipe, ...]:
    """At most so many of the recipes that send something: first those that cost least at some price of a byte
    on the device and of one on the link, whether a region's inputs are its own to let go or not."""
    moving = [recipe for recipe in found if recipe.host_bytes]
    if len(moving) <= count:
        return tuple(moving)
    seconds = np.array([recipe.replay_seconds for recipe in found])
    host = np.array([float(recipe.host_bytes) for recipe in found])
    resident = np.array([float(recipe.resident_bytes) for recipe in found])
    inputs = {graph.values[value].storage for value in graph.inputs}
    sent_inputs = np.array(
        [sum(graph.storages[s].charge_bytes for s in inputs & {*recipe.offloaded}) for recipe in found]
    )
    typical = max(seconds.max(), 1e-9) / max(resident.max(), 1.0)  # seconds for a byte
    wins = [0] * len(found)
    for held in (0.0, 1.0):
        for price, share in itertools.product(_PRICES, _LINK_PRICES):
            costs = seconds + typical * price * (resident + held * sent_inputs + share * host)
            wins[int(costs.argmin())] += 1
    order = sorted(range(len(found)), key=lambda i: -wins[i])  # those that never win: from the largest down
    chosen = [i for i in order if found[i].host_bytes][:count]
    return tuple(found[i] for i in sorted(chosen))


def solve(
    graph: RegionGraph,
    resident_limit_bytes: int,
    link_limit_bytes: int = 0,
    *,
    time_limit_s: float = _TIME_LIMIT_S,
) -> Recipe | None:
    """The recipe with the least replay seconds that keeps at most so many bytes; None if there is none."""
    model = _Model(graph, offload=link_limit_bytes > 0)
    recipe = _solve(model, resident_limit_bytes, link_limit_bytes, time_limit_s)
    if recipe is not None:
        return recipe
    # The limit may be met exactly while the solver, in floats, says it is not: the least recipe decides.
    least = _least(model, link_limit_bytes, time_limit_s)
    return least if least.resident_bytes <= resident_limit_bytes else None


def least_resident_bytes(
    graph: RegionGraph, link_limit_bytes: int = 0, *, time_limit_s: float = _TIME_LIMIT_S
) -> int:
    """The fewest bytes that any recipe for this region keeps on the device."""
    return _least(_Model(graph, offload=link_limit_bytes > 0), link_limit_bytes, time_limit_s).resident_bytes


# ------------------------------------------------------------------------------------ the integer program


def _keepable(graph: RegionGraph) -> list[int]:
    """Storages that can be kept: one of their values can be had at run time, or autograd itself holds one."""
    storages = {value.storage for value in graph.values if value.held}
    storages.update(graph.values[saved.value].storage for saved in graph.saved)
    return sorted(s for s in storages if graph.storages[s].role is not Role.PARAMETER)


def _stays_anyway(graph: RegionGraph, storage: int) -> bool:
    return graph.storages[storage].role in (Role.OUTPUT, Role.FOREIGN)


class _Model:
    """The program of one region; only the two limits change from solve to solve.

    Columns: keep per keepable storage, then replay per operation, then offload per keepable storage.
    """

    def __init__(
        self,
        graph: RegionGraph,
        *,
        offload: bool,
        slot_seconds: float = 0.0,
        moved_seconds: float = 0.0,
        keep_seconds: Sequence[float] = (),
        smallest_sent_bytes: int = 0,
    ) -> None:
        self.graph = graph
        self.moved_seconds = moved_seconds
        self.keepable = _keepable(graph)
        slots = [graph.values[saved.value].storage for saved in graph.saved]
        dropping = np.array([slot_seconds * slots.count(s) for s in self.keepable], dtype=np.float64)
        keeping = np.array([keep_seconds[s] if keep_seconds else 0.0 for s in self.keepable])
        self.keep_seconds = keeping - dropping  # kept: none of its slots is dropped
        self.keeps = len(self.keepable)
        self.ops = len(graph.ops)
        self.charges = np.array([graph.storages[s].charge_bytes for s in self.keepable], dtype=np.float64)
        self.total_bytes = max(float(self.charges.sum()), 1.0)
        self.width = self.keeps + self.ops + self.keeps
        self.needs, self.needs_lower = self._requirements()
        self.limits = self._limit_rows()
        self.bounds = self._bounds(offload, smallest_sent_bytes)

    def _requirements(self) -> tuple[csr_array, Floats]:
        """One row per need: a saved tensor (>= 1), an input of a replayed operation, a kept offload."""
        graph = self.graph
        column = {storage: i for i, storage in enumerate(self.keepable)}
        rows: list[int] = []
        columns: list[int] = []
        weights: list[float] = []
        lower: list[float] = []

        def row(terms: Iterable[tuple[int, float]], at_least: float) -> None:
            for where, weight in terms:
                rows.append(len(lower))
                columns.append(where)
                weights.append(weight)
            lower.append(at_least)

        def ways(value: int, *, for_autograd: bool) -> list[tuple[int, float]]:
            """How the value can be at hand. Autograd needs no `held`: what stays saved, it finds itself."""
            record = graph.values[value]
            terms = []
            if record.storage in column and (record.held or for_autograd):
                terms.append((column[record.storage], 1.0))
            if record.producer is not None:
                terms.append((self.keeps + record.producer, 1.0))
            return terms

        for value in sorted({saved.value for saved in graph.saved}):
            record = graph.values[value]
            if graph.storages[record.storage].role is not Role.PARAMETER and not record.free:
                row(ways(value, for_autograd=True), 1.0)
        for index, op in enumerate(graph.ops):
            if op.replayable:
                for value in sorted(set(op.inputs)):
                    if not graph.values[value].free:
                        row([*ways(value, for_autograd=False), (self.keeps + index, -1.0)], 0.0)
        for i in range(self.keeps):
            row([(i, 1.0), (self.keeps + self.ops + i, -1.0)], 0.0)
        matrix = coo_array((weights, (rows, columns)), shape=(len(lower), self.width))
        return matrix.tocsr(), np.array(lower)

    def _limit_rows(self) -> csr_array:
        """Row 0: bytes that stay on the device. Row 1: bytes that cross the link."""
        scaled = self.charges * (_BYTES_SCALE / self.total_bytes)
        keep = np.arange(self.keeps)
        offload = keep + self.keeps + self.ops
        columns = np.concatenate([keep, offload, offload])
        rows = np.concatenate([np.zeros(2 * self.keeps, dtype=np.intp), np.ones(self.keeps, dtype=np.intp)])
        weights = np.concatenate([scaled, -scaled, scaled])
        return coo_array((weights, (rows, columns)), shape=(2, self.width)).tocsr()

    def _bounds(self, offload: bool, smallest_sent_bytes: int) -> Bounds:
        stays = np.array([_stays_anyway(self.graph, s) for s in self.keepable], dtype=np.float64)
        replayable = np.array([op.replayable for op in self.graph.ops], dtype=np.float64)
        written = {v.storage for saved in self.graph.saved if not (v := self.graph.values[saved.value]).held}
        movable = np.array(
            [
                offload and charge > 0 and charge >= smallest_sent_bytes and s not in written
                for s, charge in zip(self.keepable, self.charges, strict=True)
            ],
            dtype=np.float64,
        )
        lower = np.concatenate([stays, np.zeros(self.ops + self.keeps)])
        upper = np.concatenate([np.ones(self.keeps), replayable, movable])
        return Bounds(lower, upper)

    def fastest(self) -> Floats:
        """Seconds of replay, of dropping and of moving; among equals fewer operations, fewer transfers, fewer
        bytes."""
        seconds = np.array([op.seconds for op in self.graph.ops], dtype=np.float64)
        scale = _SECONDS_SCALE / max(float(seconds.sum()), 1e-12)
        share = self.charges / self.total_bytes
        return np.concatenate(
            [
                _TIE_ALL_BYTES * share + self.keep_seconds * scale,
                seconds * scale + _TIE_PER_OP,
                _TIE_ALL_BYTES * share + (_TIE_PER_OFFLOAD + self.moved_seconds * scale),
            ]
        )

    def smallest(self) -> Floats:
        """Objective: resident bytes; the other terms only break ties."""
        share = self.charges * (_BYTES_SCALE * 1e3 / self.total_bytes)
        return np.concatenate([share, np.full(self.ops, 1e-6), -share + 1e-6])

    def run(
        self, objective: Floats, resident_limit: float, link_limit: float, time_limit_s: float
    ) -> Recipe | None:
        limits = np.array([resident_limit, link_limit]) * (_BYTES_SCALE / self.total_bytes)
        result = milp(
            objective,
            constraints=[
                LinearConstraint(self.needs, self.needs_lower, np.inf),
                LinearConstraint(self.limits, -np.inf, limits),
            ],
            integrality=np.ones(self.width, dtype=np.int64),
            bounds=self.bounds,
            options={"time_limit": time_limit_s, "mip_rel_gap": 1e-7},
        )
        if result.x is None:
            return None
        chosen = np.asarray(result.x) > 0.5
        kept = [s for s, keep in zip(self.keepable, chosen[: self.keeps], strict=True) if keep]
        moved = [s for s, move in zip(self.keepable, chosen[self.keeps + self.ops :], strict=True) if move]
        return finish(self.graph, kept, moved)


def _solve(model: _Model, resident_limit: int, link_limit: int, time_limit_s: float) -> Recipe | None:
    resident, link = float(resident_limit), float(link_limit)
    for _ in range(3):
        recipe = model.run(model.fastest(), resident, link, time_limit_s)
        if recipe is None:
            return None
        over, over_link = recipe.resident_bytes - resident_limit, recipe.host_bytes - link_limit
        if over <= 0 and over_link <= 0:
            return recipe
        # The solver's tolerance (about a billionth of the region's bytes) let the limit slip: pull it in.
        resident, link = resident - 2 * max(over, 0), link - 2 * max(over_link, 0)
    return None


def _least(model: _Model, link_limit: int, time_limit_s: float) -> Recipe:
    recipe = model.run(model.smallest(), np.inf, float(link_limit), time_limit_s)
    if recipe is None or recipe.host_bytes > link_limit:  # keeping what autograd saves is always possible
        return finish(model.graph, model.graph.saved_storages)
    return recipe


def _limits(saved_bytes: int, least_bytes: int, levels: Sequence[float] | None) -> list[int]:
    if levels is None:
        step = (saved_bytes - least_bytes) / _LEVELS
        limits = [least_bytes + int(step * (_LEVELS - i)) for i in range(1, _LEVELS)]
    else:
        if any(not 0 <= level <= 1 for level in levels):
            raise InputError(f"levels={tuple(levels)}: each must be a share of the saved bytes, from 0 to 1")
        limits = [int(saved_bytes * level) for level in levels]
    return sorted({max(limit, least_bytes) for limit in limits} | {least_bytes}, reverse=True)


def _pareto(found: Iterable[Recipe]) -> tuple[Recipe, ...]:
    """Every recipe once, without those that another one beats or equals in bytes, host bytes and seconds."""
    order = sorted(
        {recipe for recipe in found if recipe.dropped or recipe.offloaded},
        key=lambda r: (r.resident_bytes, r.host_bytes, r.replay_seconds, r.replayed, r.kept, r.offloaded),
    )
    front: list[Recipe] = []
    for recipe in order:  # whatever beats it comes before it
        if not any(
            other.host_bytes <= recipe.host_bytes and other.replay_seconds <= recipe.replay_seconds
            for other in front
        ):
            front.append(recipe)
    return tuple(reversed(front))


# ------------------------------------------------------------------------- from a kept set to a recipe


@dataclass(frozen=True)
class _Rebuild:
    """What it takes to have some values again: operations to run and storages to read from."""

    ops: frozenset[int]
    sources: frozenset[int]


def _rebuild(graph: RegionGraph, wanted: Iterable[int], kept: frozenset[int]) -> _Rebuild:
    """Walk back from the wanted values; a value at hand is always preferred to a replay."""
    ops: set[int] = set()
    sources: set[int] = set()
    seen: set[int] = set()
    stack = list(wanted)
    while stack:
        index = stack.pop()
        if index in seen:
            continue
        seen.add(index)
        value = graph.values[index]
        if value.free:
            continue
        if value.held and value.storage in kept:
            sources.add(value.storage)
            continue
        producer = value.producer
        if producer is None or not graph.ops[producer].replayable:
            raise ValueError(f"value {index} is neither kept nor free, and no replayable operation gives it")
        if producer not in ops:
            ops.add(producer)
            stack.extend(graph.ops[producer].inputs)
    return _Rebuild(frozenset(ops), frozenset(sources))


def finish(graph: RegionGraph, kept: Iterable[int], offloaded: Iterable[int] = ()) -> Recipe:
    """The recipe that a kept set implies: the fewest replays, and no storage kept that nothing uses.

    Raises ValueError if the kept set cannot give every saved tensor.
    """
    keep = frozenset(kept)
    storage_of = [graph.values[saved.value].storage for saved in graph.saved]
    dropped = tuple(
        i
        for i, storage in enumerate(storage_of)
        if storage not in keep and graph.storages[storage].role is not Role.PARAMETER
    )
    rebuild = _rebuild(graph, (graph.saved[i].value for i in dropped), keep)
    used = sorted(keep & (rebuild.sources | set(storage_of)))
    moved = sorted(set(offloaded) & set(used))
    replayed = tuple(sorted(rebuild.ops))
    return Recipe(
        kept=tuple(used),
        dropped=dropped,
        replayed=replayed,
        offloaded=tuple(moved),
        resident_bytes=sum(graph.storages[s].charge_bytes for s in used if s not in moved),
        host_bytes=sum(graph.storages[s].charge_bytes for s in moved),
        replay_seconds=float(sum(graph.ops[o].seconds for o in replayed)),
    )


def check_recipe(graph: RegionGraph, recipe: Recipe) -> None:
    """Raise ValueError, naming the violation, unless the recipe rebuilds exactly what it drops."""
    for name, chosen, size in (
        ("kept", recipe.kept, len(graph.storages)),
        ("dropped", recipe.dropped, len(graph.saved)),
        ("replayed", recipe.replayed, len(graph.ops)),
        ("offloaded", recipe.offloaded, len(graph.storages)),
    ):
        if list(chosen) != sorted(set(chosen)):
            raise ValueError(f"{name} {chosen} is not in order, or names something twice")
        if any(not 0 <= index < size for index in chosen):
            raise ValueError(f"{name} {chosen} names something beyond the graph's {size}")
    if not set(recipe.offloaded) <= set(recipe.kept):
        raise ValueError(f"offloaded storages {set(recipe.offloaded) - set(recipe.kept)} are not kept")

    kept = set(recipe.kept)
    at_hand = {
        i for i, value in enumerate(graph.values) if value.free or (value.held and value.storage in kept)
    }
    for index in recipe.replayed:
        op = graph.ops[index]
        if not op.replayable:
            raise ValueError(f"operation {index} ({op.name}) is replayed, but is not replayable: {op.reason}")
        missing = sorted(set(op.inputs) - at_hand)
        if missing:
            raise ValueError(f"operation {index} ({op.name}) is replayed without its inputs {missing}")
        at_hand.update(i for i, value in enumerate(graph.values) if value.producer == index)

    for i, saved in enumerate(graph.saved):
        storage = graph.values[saved.value].storage
        role = graph.storages[storage].role
        if i in recipe.dropped:
            if role is Role.PARAMETER or storage in kept:
                raise ValueError(f"saved tensor {i} is dropped, but its storage {storage} stays")
            if saved.value not in at_hand:
                raise ValueError(f"saved tensor {i} is dropped and nothing rebuilds its value {saved.value}")
        elif role is not Role.PARAMETER and storage not in kept:
            raise ValueError(f"saved tensor {i} is not dropped, but its storage {storage} is not kept")

    resident = sum(graph.storages[s].charge_bytes for s in recipe.kept if s not in recipe.offloaded)
    host = sum(graph.storages[s].charge_bytes for s in recipe.offloaded)
    seconds = sum(graph.ops[o].seconds for o in recipe.replayed)
    if (resident, host) != (recipe.resident_bytes, recipe.host_bytes):
        raise ValueError(
            f"the recipe says {recipe.resident_bytes} resident and {recipe.host_bytes} host bytes, "
            f"its storages add up to {resident} and {host}"
        )
    if abs(seconds - recipe.replay_seconds) > 1e-9 * max(seconds, 1e-9):
        raise ValueError(f"the recipe says {recipe.replay_seconds} s, its operations add up to {seconds} s")


# ------------------------------------------------------------------------------------- the working set


@dataclass(frozen=True)
class _Event:
    """A step of backward, as seen by the replay: memory that comes into being, and memory that is read."""

    made: tuple[tuple[int, int], ...]
    read: tuple[tuple[int, int], ...]


def working_set_bytes(graph: RegionGraph, recipe: Recipe) -> int:
    """Peak of the rebuilt bytes alive at once in backward, for planning where nothing can be measured.

    Backward asks for the saved tensors in their `order`; each dropped one is rebuilt when it is asked for,
    every operation runs once, and memory goes after its last reader. All that a node of the autograd graph
    unpacks is alive together. What was offloaded is counted from the start, as it is fetched ahead.
    """
    events = _backward_events(graph, recipe)
    last_read = {memory: step for step, event in enumerate(events) for memory in (*event.made, *event.read)}
    alive: set[tuple[int, int]] = set()
    peak = 0
    for step, event in enumerate(events):
        alive.update(event.made)
        peak = max(peak, sum(graph.storages[storage].nbytes for storage, _ in alive))
        alive = {memory for memory in alive if last_read[memory] > step}
    return peak + recipe.host_bytes


def _backward_events(graph: RegionGraph, recipe: Recipe) -> list[_Event]:
    made_by: dict[int, list[int]] = {op: [] for op in recipe.replayed}
    for index, value in enumerate(graph.values):
        if value.producer in made_by:
            made_by[value.producer].append(index)
    kept = frozenset(recipe.kept)

    def memory(values: Iterable[int]) -> tuple[tuple[int, int], ...]:
        """The pieces of rebuilt memory behind values; a write makes a new piece (functional twin)."""
        records = (graph.values[i] for i in values)
        return tuple(
            sorted(
                {
                    (v.storage, v.epoch)
                    for v in records
                    if not (v.free or (v.held and v.storage in kept))
                    and graph.storages[v.storage].role is not Role.PARAMETER
                }
            )
        )

    events: list[_Event] = []
    done: set[int] = set()
    dropped = sorted((graph.saved[i] for i in recipe.dropped), key=lambda saved: saved.order)
    node_reads: list[int] = []
    for position, saved in enumerate(dropped):
        for index in sorted(_rebuild(graph, [saved.value], kept).ops - done):
            op = graph.ops[index]
            outputs = () if op.view else memory(made_by[index])
            events.append(_Event(outputs, memory((*op.inputs, *made_by[index]))))
            done.add(index)
        node_reads.append(saved.value)
        if position + 1 == len(dropped) or dropped[position + 1].node != saved.node:
            events.append(_Event((), memory(node_reads)))
            node_reads = []
    return events
