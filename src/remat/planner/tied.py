"""The exact solver where one choice decides for several calls: a module that one step calls more than once.

Such a choice takes memory at many points of the timeline, and the sum of bytes (`chain.py`) does not say what
may follow. So a state is what is taken at every point, and beats another that takes more of everything and is
slower. Few numbers tell that:

- points at which the choices so far take the same (all that lie ahead of the first round) are one number;
- points at which the choices to come will take the same (all that a round has passed) are one number, too:
  the tightest of them counts.

As in the chain, states that cannot lead to a better plan are cut off by the bound that the memory prices
give, lists are short at first, and a pass in which nothing that matters was left out is a proof. In which
order backward runs does not matter here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from remat.planner.program import Program, held_by_consumer, held_by_producer, kept_by_producer

__all__ = ["Tied", "fastest_tied"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_PICO = 1e12
_WIDTHS = (64, 512, 4096)
_PRICE_SCALES = np.array((0.0, 0.5, 0.8, 0.9, 1.0, 1.1, 1.25, 2.0))
_COMPARED_AT_ONCE = 256  # states


@dataclass(frozen=True)
class Tied:
    """An option per call, and by how many seconds at most a better choice could undercut them."""

    options: tuple[int, ...]
    gap_seconds: float


def fastest_tied(
    problem: Program, budget_bytes: int, prices: Floats, known: Sequence[int] | None = None
) -> Tied | None:
    """The fastest options within the budget; `known` are within it. None: there are none, or none was found.

    Exact to the picosecond (gap 0), unless even the longest list of states overflows.
    """
    search = _Search(problem, budget_bytes, prices)
    best: tuple[int, ...] | None = None
    if known is not None:
        best = tuple(known[group[0]] for group in problem.groups)
    unexplored = np.inf
    for width in _WIDTHS:
        found, unexplored = search.run(width, None if best is None else search.pico(best))
        best = best if found is None else found
        if best is None and not np.isfinite(unexplored):
            return None
        if best is not None and unexplored > search.pico(best) - 1:
            unexplored = np.inf
            break
    if best is None:
        return None
    options = {call: option for group, option in zip(problem.groups, best, strict=True) for call in group}
    gap = max(search.pico(best) - unexplored, 0.0) / _PICO
    return Tied(tuple(options[call] for call in range(len(problem.calls))), gap)


@dataclass(frozen=True)
class _Pair:
    """Two groups, and the points at which a boundary tensor between them is held though the one that reads
    it lets it go: because the one that made it holds it. The first sets a mark where it may come to that."""

    first: int
    second: int
    marks: Bools  # per option of the first group
    holds: Bools  # per option of the second: with the mark it is held
    bytes_at: Ints  # per point


@dataclass
class _States:
    pico: Ints
    bought: Floats  # what the bytes taken so far cost, beyond what the budget has
    taken: Ints  # per state and column: bytes beyond the budget, with nothing chosen of what is to come
    marks: Bools  # per state and open pair

    def only(self, which: npt.NDArray[np.intp] | Bools) -> _States:
        return _States(self.pico[which], self.bought[which], self.taken[which], self.marks[which])


class _Search:
    def __init__(self, problem: Program, budget_bytes: int, prices: Floats) -> None:
        points = len(problem.base_bytes)
        sizes = [len(problem.calls[group[0]].options) for group in problem.groups]
        self._prices = prices * _PICO
        self._start = np.array(problem.base_bytes) + np.array(problem.glue_above) - budget_bytes
        self._picos = [np.zeros(size, dtype=np.int64) for size in sizes]
        self._takes = [np.zeros((size, points), dtype=np.int64) for size in sizes]
        self._count(problem)
        self._pairs = list(self._boundaries(problem, points))
        self._look_ahead()

    def pico(self, options: Sequence[int]) -> int:
        return sum(int(picos[option]) for picos, option in zip(self._picos, options, strict=True))

    def _count(self, problem: Program) -> None:
        for number, group in enumerate(problem.groups):
            for index in group:
                call = problem.calls[index]
                for i, option in enumerate(call.options):
                    self._picos[number][i] += round(option.seconds * _PICO)
                    takes = self._takes[number][i]
                    for first, last in call.holds:
                        takes[first : last + 1] += option.held_bytes
                    for point, above in zip(call.segments, option.above, strict=True):
                        takes[point] += above
        group_of = _group_of(problem)
        for output in problem.outputs:
            options = problem.calls[output.producer].options
            kept = np.array([kept_by_producer(output, option) for option in options])
            self._takes[group_of[output.producer]][kept, output.first : output.last + 1] += output.nbytes

    def _boundaries(self, problem: Program, points: int) -> list[_Pair]:
        """What a reader lets go is taken off at once; that the maker holds it comes on top again."""
        group_of = _group_of(problem)
        pairs = []
        for boundary in problem.boundaries:
            span = problem.calls[boundary.consumer].span
            assert span is not None  # or it would not be among the boundaries
            bytes_at = np.zeros(points, dtype=np.int64)
            bytes_at[span.forward + 1 : boundary.last_gone(span) + 1] = boundary.nbytes
            reader, maker = group_of[boundary.consumer], group_of[boundary.producer]
            reads = problem.calls[boundary.consumer].options
            makes = problem.calls[boundary.producer].options
            lets_go = np.array([not held_by_consumer(boundary, option) for option in reads])
            holds = np.array([held_by_producer(boundary, option) for option in makes])
            self._takes[reader][lets_go] -= bytes_at
            if reader == maker:
                self._takes[reader][lets_go & holds] += bytes_at
            elif lets_go.any() and holds.any():
                sides = sorted([(reader, lets_go), (maker, holds)], key=lambda side: side[0])
                pairs.append(_Pair(sides[0][0], sides[1][0], sides[0][1], sides[1][1], bytes_at))
        return pairs

    def _look_ahead(self) -> None:
        """After each group: the least that the rest takes at each point, the least that it costs at each
        scale of prices, and a number for each point, equal where all that is to come takes the same."""
        points = len(self._start)
        self._least = [np.zeros(points, dtype=np.int64)]
        self._rest = [np.zeros(len(_PRICE_SCALES))]
        self._alike = [np.zeros(points, dtype=np.int64)]
        magnitude = 1.0 + float(np.abs(self._prices * self._start).sum())
        for number in range(len(self._takes) - 1, -1, -1):
            takes, pico = self._takes[number], self._picos[number].astype(np.float64)
            bought = takes @ self._prices
            closing = [pair.bytes_at for pair in self._pairs if pair.second == number]
            rows = np.vstack([self._alike[-1][None], takes, *(extra[None] for extra in closing)])
            self._least.append(self._least[-1] + takes.min(axis=0))
            self._rest.append(self._rest[-1] + (pico[:, None] + bought[:, None] * _PRICE_SCALES).min(axis=0))
            same = np.unique(rows, axis=1, return_inverse=True)[1].reshape(-1)
            # Zero is for points at which nothing more will be taken.
            idle = ~rows.any(axis=0)
            self._alike.append(np.where(idle, 0, same + 1))
            magnitude += float(pico.max() + np.abs(bought).max() * _PRICE_SCALES.max())
        self._slack = 1e-12 * magnitude
        for ahead in (self._least, self._rest, self._alike):
            ahead.reverse()

    def run(self, width: int, beat_pico: int | None) -> tuple[tuple[int, ...] | None, float]:
        """Options per group, if any are better than what is known, and the least bound of what was left
        out."""
        points = len(self._start)
        columns = [np.arange(points)] if points else []  # points that so far differ by constants only
        offsets = self._start.copy()
        states = _States(
            np.zeros(1, dtype=np.int64),
            np.array([float(self._prices @ self._start)]),
            np.zeros((1, len(columns)), dtype=np.int64),
            np.zeros((1, 0), dtype=np.bool_),
        )
        if points and bool((offsets + self._least[0] > 0).any()):
            return None, np.inf
        history: list[tuple[Ints, Ints]] = []
        unexplored = np.inf
        open_pairs: list[_Pair] = []
        for number in range(len(self._takes)):
            states, parents, chosen, columns, open_pairs = self._grown(
                number, states, columns, offsets, open_pairs, beat_pico
            )
            states, columns = self._merged(number + 1, states, columns, offsets)
            kept, left_out = _shortened(states, self._bounds(number + 1, states), width)
            unexplored = min(unexplored, left_out)
            states = states.only(kept)
            history.append((parents[kept], chosen[kept]))
            if not len(states.pico):
                return None, unexplored
        at = int(np.argmin(states.pico))
        options: list[int] = []
        for parents, chosen in reversed(history):
            options.append(int(chosen[at]))
            at = int(parents[at])
        return tuple(reversed(options)), unexplored

    def _bounds(self, position: int, states: _States) -> Floats:
        """What the best completion of each state takes at least."""
        scaled = states.bought[:, None] * _PRICE_SCALES + self._rest[position]
        bounds: Floats = scaled.max(axis=1) + states.pico - self._slack
        return bounds

    def _grown(
        self,
        number: int,
        states: _States,
        columns: list[Ints],
        offsets: Ints,
        open_pairs: list[_Pair],
        beat_pico: int | None,
    ) -> tuple[_States, Ints, Ints, list[Ints], list[_Pair]]:
        """Every state with every option of the next group, as far as that can lead to something better."""
        takes = self._takes[number]
        closing = [pair for pair in open_pairs if pair.second == number]
        rows = np.vstack([takes, *(pair.bytes_at[None] for pair in closing)])
        source: list[int] = []
        split: list[Ints] = []
        for place, column in enumerate(columns):
            parts = np.unique(rows[:, column], axis=1, return_inverse=True)[1].reshape(-1)
            for part in range(int(parts.max()) + 1):
                source.append(place)
                split.append(column[parts == part])
        firsts = np.array([column[0] for column in split], dtype=np.int64)
        ahead = offsets + self._least[number + 1]
        needs = np.array([ahead[column].max() for column in split], dtype=np.int64)
        stay = [place for place, pair in enumerate(open_pairs) if pair.second != number]
        opening = [pair for pair in self._pairs if pair.first == number]
        grown: list[_States] = []
        parents: list[Ints] = []
        chosen: list[Ints] = []
        for option in range(len(takes)):
            taken = states.taken[:, source] + takes[option, firsts]
            bought = states.bought + float(takes[option] @ self._prices)
            for place, pair in enumerate(open_pairs):
                if pair.second == number and pair.holds[option]:
                    marked = states.marks[:, place]
                    taken = taken + marked[:, None] * pair.bytes_at[firsts]
                    bought = bought + marked * float(pair.bytes_at @ self._prices)
            marks = np.column_stack(
                [states.marks[:, stay], *(np.full(len(taken), pair.marks[option]) for pair in opening)]
            )
            made = _States(states.pico + self._picos[number][option], bought, taken, marks)
            promising = (taken + needs <= 0).all(axis=1)
            if beat_pico is not None:
                promising &= self._bounds(number + 1, made) <= beat_pico - 1
            where = np.flatnonzero(promising)
            grown.append(made.only(where))
            parents.append(where)
            chosen.append(np.full(len(where), option, dtype=np.int64))
        together = _States(
            *(np.concatenate([getattr(part, name) for part in grown]) for name in _States.__annotations__)
        )
        pairs = [open_pairs[place] for place in stay] + opening
        return together, np.concatenate(parents), np.concatenate(chosen), split, pairs

    def _merged(
        self, position: int, states: _States, columns: list[Ints], offsets: Ints
    ) -> tuple[_States, list[Ints]]:
        """Of points at which all that is to come takes the same, only the tightest is left."""
        alike = self._alike[position]
        left: list[tuple[int, Ints]] = []  # column, and the points of it that still count
        for place, column in enumerate(columns):
            tightest: dict[int, int] = {}
            for point in column[np.argsort(offsets[column], kind="stable")]:
                tightest[int(alike[point])] = int(point)
            tightest.pop(0, None)
            if tightest:
                left.append((place, np.array(sorted(tightest.values()), dtype=np.int64)))
        single: dict[int, list[tuple[int, int]]] = {}
        taken: list[Ints] = []
        kept: list[Ints] = []
        for place, points in left:
            if len(points) == 1:
                single.setdefault(int(alike[points[0]]), []).append((place, int(points[0])))
            else:
                taken.append(states.taken[:, place])
                kept.append(points)
        for same in single.values():
            point = same[0][1]
            levels = [states.taken[:, place] + offsets[other] - offsets[point] for place, other in same]
            taken.append(np.max(levels, axis=0))
            kept.append(np.array([point], dtype=np.int64))
        table = np.column_stack(taken) if taken else np.zeros((len(states.pico), 0), dtype=np.int64)
        return _States(states.pico, states.bought, table, states.marks), kept


def _group_of(problem: Program) -> dict[int, int]:
    return {call: number for number, group in enumerate(problem.groups) for call in group}


def _shortened(states: _States, bounds: Floats, width: int) -> tuple[Ints, float]:
    """The `width` most promising states that no other beats, and the least bound of those left out."""
    order = np.argsort(bounds, kind="stable")
    table = np.column_stack([states.pico, states.taken, states.marks])
    kept: list[Ints] = []
    count = 0
    for first in range(0, len(order), _COMPARED_AT_ONCE):
        some = order[first : first + _COMPARED_AT_ONCE]
        alive = np.ones(len(some), dtype=np.bool_)
        for rivals in kept:
            alive &= ~_beaten(table[some], table[rivals], ties_count=True)
        some = some[alive]
        some = some[~_beaten(table[some], table[some], ties_count=False)]
        if count + len(some) > width:
            some = some[: width - count]
            kept.append(some)
            rest = order[first:]
            out = np.setdiff1d(rest, some)
            return np.concatenate(kept), float(bounds[out].min(initial=np.inf))
        kept.append(some)
        count += len(some)
    return np.concatenate(kept) if kept else order, np.inf


def _beaten(table: Ints, by: Ints, *, ties_count: bool) -> Bools:
    """Which rows have one in `by` that is nowhere larger. Without `ties_count` the two are the same table,
    and of equal rows the first stays."""
    below = (by[:, None, :] <= table[None, :, :]).all(axis=2)
    if not ties_count:
        equal = below & below.T
        below &= ~equal | np.triu(equal, 1)
    return np.asarray(below.any(axis=0), dtype=np.bool_)
