"""The exact, fast solver for the usual step: backward runs through the regions in reverse order of forward.

Then what is held at any point is what the first m calls hold, for some m. After the first j calls nothing
matters but the sum L of the bytes they hold (and which of them hold an output that a later call reads): a
smaller L is never worse. That gives

- the least budget by one pass from the back, in exact integers;
- the fastest plan by dynamic programming over (L, seconds), which also merges the many equivalent plans of a
  model whose blocks are alike: the symmetry that makes the integer program slow (20 s, where this takes 0.3).

States that cannot lead to a better plan are cut off by the bound that the relaxed program's memory prices
give. The list of states is first kept short, for a good plan early; a pass in which nothing that could still
matter was left out is a proof of optimality. Seconds are counted in whole picoseconds, so that their sums do
not depend on the order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from remat.planner.program import (
    Call,
    Program,
    held_by_consumer,
    held_by_producer,
    kept_by_producer,
)
from remat.planner.simulate import Boundary, HeldOutput

__all__ = ["Chain", "Fastest", "bound_seconds", "chain", "fastest", "least_peak"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_PICO = 1e12
_WIDTHS = (128, 4096, 65536, 1 << 20)
_MOST_OPEN = 6
# A bound is valid at any prices. Those of the whole step fit a state on the way to the optimum; a state that
# has used more or less of the budget than others is judged better at higher or lower prices.
_PRICE_SCALES = (0.0, 0.5, 0.8, 0.9, 1.0, 1.1, 1.25, 2.0)


@dataclass(frozen=True)
class Move:
    """One option of a link, given which outputs are held by the calls that made them (`mask`)."""

    option: int
    pico: int
    later: int  # bytes held, for all calls after it: less the boundaries that are let go
    forward: int  # absolute peaks of its own segments, besides what the calls before it hold
    backward: int  # also of segments between it and the call after it, where outputs are held there
    mask: int  # after it


@dataclass(frozen=True)
class Link:
    """One call of the chain: its moves for each mask that can come before it, and its own two segments."""

    moves: dict[int, tuple[Move, ...]]
    forward_segment: int
    backward_segment: int


@dataclass(frozen=True)
class Chain:
    """The program as a chain. `between[m]`: bytes reached, besides L, while just the first m calls hold."""

    floor_bytes: int
    links: tuple[Link, ...]
    calls: tuple[int, ...]  # of the program, one per link; the others have one option only
    between: tuple[int, ...]
    between_segments: tuple[tuple[int, ...], ...]
    needs: tuple[int, ...]  # absolute bytes reached in each segment, besides L and the link's own


def chain(problem: Program) -> Chain | None:
    """The program as a chain, or None if its regions are not nested, or if a choice decides others: then the
    sum of bytes alone does not say what may follow."""
    if problem.has_ties:
        return None
    links = [i for i, call in enumerate(problem.calls) if call.span is not None and call.span.recorded]
    if not _nested([problem.calls[i] for i in links]):
        return None
    others = [call for i, call in enumerate(problem.calls) if i not in set(links)]
    if any(len(call.options) > 1 for call in others):
        return None
    needs = [base + above for base, above in zip(problem.base_bytes, problem.glue_above, strict=True)]
    for call in others:
        _settle(call, needs)
    between, where = _between(problem, links, needs)
    asked = _asked(problem, links, where)
    slots = _slots(links, asked)
    if slots is None:
        return None
    return Chain(
        floor_bytes=problem.floor_bytes,
        links=tuple(_links(problem, links, needs, asked, slots)),
        calls=tuple(links),
        between=between,
        between_segments=where,
        needs=tuple(needs),
    )


def _nested(calls: list[Call]) -> bool:
    last_forward, first_backward = -1, None
    for call in calls:
        span = call.span
        assert span is not None
        if len(call.segments) != 2 or span.returns != span.backward or span.forward <= last_forward:
            return False
        if first_backward is not None and span.backward >= first_backward:
            return False
        last_forward, first_backward = span.forward, span.backward
    return first_backward is None or last_forward < first_backward


def _settle(call: Call, needs: list[int]) -> None:
    """A call with one option and no backward is a fixed part of the timeline."""
    option = call.options[0]
    for segment, above in zip(call.segments, option.above, strict=True):
        needs[segment] += above
    for first, last in call.holds:
        for segment in range(first, last + 1):
            needs[segment] += option.held_bytes


def _between(
    problem: Program, links: list[int], needs: list[int]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    own = {segment for i in links for segment in problem.calls[i].segments}
    opens: dict[int, int] = {}
    for i in links:
        span = problem.calls[i].span
        assert span is not None
        opens[span.forward], opens[span.backward] = 1, -1
    where: list[list[int]] = [[] for _ in range(len(links) + 1)]
    count = 0
    for segment in range(len(needs)):
        if segment not in own:
            where[count].append(segment)
        count += opens.get(segment, 0)
    reached = tuple(max((needs[k] for k in segments), default=0) for segments in where)
    return reached, tuple(tuple(segments) for segments in where)


_Holds = tuple[int, tuple[bool, ...]]  # a call, and which of its options hold a certain output


@dataclass(frozen=True)
class _Asked:
    """What a link has to know of the choices of others: whether boundary tensors that it reads are held, and
    outputs in its segments (its own, and those after its forward and before its backward)."""

    reads: list[tuple[Boundary, _Holds]]
    outputs: dict[int, list[tuple[HeldOutput, _Holds]]]

    @property
    def holds(self) -> Iterator[_Holds]:
        yield from (holds for _, holds in self.reads)
        for there in self.outputs.values():
            yield from (holds for _, holds in there)


def _asked(problem: Program, links: list[int], between: tuple[tuple[int, ...], ...]) -> list[_Asked]:
    found = [_Asked([], {}) for _ in links]
    order = {call: position for position, call in enumerate(links)}
    for boundary in problem.boundaries:
        if any(not held_by_consumer(boundary, o) for o in problem.calls[boundary.consumer].options):
            makes = problem.calls[boundary.producer].options
            holds = boundary.producer, tuple(held_by_producer(boundary, option) for option in makes)
            found[order[boundary.consumer]].reads.append((boundary, holds))
    link_of = {
        segment: position
        for position, index in enumerate(links)
        for segment in (*problem.calls[index].segments, *between[position + 1])
    }
    for output in problem.outputs:
        makes = problem.calls[output.producer].options
        holds = output.producer, tuple(kept_by_producer(output, option) for option in makes)
        for segment in range(output.first, output.last + 1) if any(holds[1]) else ():
            found[link_of[segment]].outputs.setdefault(segment, []).append((output, holds))
    return found


@dataclass(frozen=True)
class _Slot:
    bit: int
    until: int  # the last link that asks


def _slots(links: list[int], asked: list[_Asked]) -> dict[_Holds, _Slot] | None:
    """A bit for whatever links have to know of an earlier choice, reused when none asks any more."""
    order = {call: position for position, call in enumerate(links)}
    until: dict[_Holds, int] = {}
    for position, asks in enumerate(asked):
        for producer, holds in asks.holds:
            if len(set(holds)) == 1 or order.get(producer) == position:
                continue
            if producer not in order or order[producer] > position:
                return None
            until[producer, holds] = position
    slots: dict[_Holds, _Slot] = {}
    busy: dict[int, int] = {}  # bit -> link that frees it
    for key in sorted(until, key=lambda key: (order[key[0]], until[key])):
        free = [bit for bit in range(_MOST_OPEN) if busy.get(bit, -1) <= order[key[0]]]
        if not free:
            return None
        slots[key], busy[free[0]] = _Slot(1 << free[0], until[key]), until[key]
    return slots


def _links(
    problem: Program, links: list[int], needs: list[int], asked: list[_Asked], slots: dict[_Holds, _Slot]
) -> Iterator[Link]:
    masks = {0}
    for position, index in enumerate(links):
        call = problem.calls[index]
        closes = sum(slot.bit for slot in slots.values() if slot.until == position)
        opens = [(holds, slot.bit) for (producer, holds), slot in slots.items() if producer == index]
        after = [sum(bit for holds, bit in opens if holds[option]) for option in range(len(call.options))]
        moves = {
            mask: tuple(
                _move(
                    call,
                    number,
                    asked[position],
                    needs,
                    _Told(index, number, mask, slots),
                    mask & ~closes | more,
                )
                for number, more in enumerate(after)
            )
            for mask in sorted(masks)
        }
        assert call.span is not None
        yield Link(moves, call.span.forward, call.span.backward)
        masks = {move.mask for options in moves.values() for move in options}


@dataclass(frozen=True)
class _Told:
    """What a link knows: its own option, and the mask."""

    call: int
    option: int
    mask: int
    slots: dict[_Holds, _Slot]

    def held(self, holds: _Holds) -> bool:
        producer, options = holds
        if producer == self.call:
            return options[self.option]
        return bool(self.mask & self.slots[holds].bit) if holds in self.slots else options[0]  # all agree


def _move(call: Call, number: int, asked: _Asked, needs: list[int], told: _Told, mask: int) -> Move:
    option, span = call.options[number], call.span
    assert span is not None
    later, gone = option.held_bytes, 0
    for boundary, holds in asked.reads:
        if not held_by_consumer(boundary, option) and not told.held(holds):
            later -= boundary.nbytes
            gone += boundary.nbytes if boundary.sent else 0
    above = dict(zip(call.segments, option.above, strict=True))
    more = {
        segment: sum(output.nbytes for output, holds in there if told.held(holds))
        for segment, there in asked.outputs.items()
    }
    own = needs[span.backward] + above[span.backward] + option.held_bytes - gone
    around = [needs[segment] + later + extra for segment, extra in more.items() if segment not in above]
    return Move(
        option=number,
        pico=round(option.seconds * _PICO),
        later=later,
        forward=needs[span.forward] + above[span.forward] + more.get(span.forward, 0),
        backward=max([own + more.get(span.backward, 0), *around]),
        mask=mask,
    )


# ---------------------------------------------------------------------------------------- the least budget


def _last_masks(problem: Chain) -> set[int]:
    if not problem.links:
        return {0}
    return {move.mask for moves in problem.links[-1].moves.values() for move in moves}


def _needed_from(problem: Chain) -> list[dict[int, int]]:
    """For each position and mask: the bytes needed besides L, by the best choice of all that follows."""
    last = len(problem.links)
    needed = [dict.fromkeys(_last_masks(problem), problem.between[last])]
    for position in range(last - 1, -1, -1):
        after = needed[-1]
        needed.append(
            {
                mask: max(
                    problem.between[position],
                    min(max(m.forward, m.backward, after[m.mask] + m.later) for m in moves),
                )
                for mask, moves in problem.links[position].moves.items()
            }
        )
    return needed[::-1]


def least_peak(problem: Chain) -> tuple[int, dict[int, int]]:
    """The least peak of any choice, in exact bytes, and a choice (call -> option) that has it."""
    needed = _needed_from(problem)
    peak = max(problem.floor_bytes, needed[0][0])
    level, mask, chosen = 0, 0, {}
    for position, link in enumerate(problem.links):
        after = needed[position + 1]
        move = min(
            link.moves[mask],
            key=lambda m: (level + max(m.forward, m.backward, after[m.mask] + m.later) > peak, m.pico),
        )
        chosen[problem.calls[position]] = move.option
        level, mask = level + move.later, move.mask
    return peak, chosen


# ---------------------------------------------------------------------------------------- the fastest plan


@dataclass(frozen=True)
class _Bound:
    """After j calls no completion takes less than per_byte[j] * L + rest[j][mask] picoseconds more.

    Each is an array, one bound per scale of prices; the largest counts.
    """

    per_byte: tuple[Floats, ...]
    rest: tuple[dict[int, Floats], ...]  # what floating-point sums may be off by is already taken off

    def least_pico(self, position: int, mask: int, level: Ints, pico: Ints) -> Floats:
        """What the best completion of each state takes at least."""
        bounds = self.per_byte[position][:, None] * level + self.rest[position][mask][:, None]
        least: Floats = bounds.max(axis=0) + pico
        return least


def _bound(problem: Chain, budget_bytes: int, prices: Floats) -> _Bound:
    """Memory is bought at its price instead of being limited: the best moves then follow from the masks."""
    scales = np.array(_PRICE_SCALES)
    price = prices * _PICO
    cap = budget_bytes - np.array(problem.needs, dtype=np.float64)
    per_byte = [0.0]
    rest = [{mask: np.zeros(len(scales)) for mask in _last_masks(problem)}]
    magnitude = 1.0
    for position in range(len(problem.links) - 1, -1, -1):
        link = problem.links[position]
        forward, backward = link.forward_segment, link.backward_segment
        between = list(problem.between_segments[position + 1])
        later = per_byte[-1] + float(price[between].sum())
        own_forward, own_backward = float(price[forward]), float(price[backward])
        budgeted = own_forward * float(cap[forward]) + own_backward * float(cap[backward])
        budgeted += float(price[between] @ cap[between])
        after, here = rest[-1], {}
        for mask, moves in link.moves.items():
            pico = np.array([m.pico for m in moves], dtype=np.float64)
            bought = np.array(
                [
                    later * m.later
                    + own_forward * (m.forward - problem.needs[forward])
                    + own_backward * (m.backward - problem.needs[backward])
                    - budgeted
                    for m in moves
                ]
            )
            onward = np.array([after[m.mask] for m in moves])
            here[mask] = (pico[:, None] + bought[:, None] * scales + onward).min(axis=0)
            magnitude += float(pico.max() + np.abs(bought).max() * scales.max()) + abs(budgeted)
        per_byte.append(later + own_forward + own_backward)
        rest.append(here)
    slack = 1e-12 * magnitude
    return _Bound(
        tuple(total * scales for total in reversed(per_byte)),
        tuple({mask: value - slack for mask, value in at.items()} for at in reversed(rest)),
    )


def bound_seconds(problem: Chain, budget_bytes: int, prices: Floats) -> float:
    """Seconds that no choice within the budget can undercut (to half a picosecond per call)."""
    pico = float(_bound(problem, budget_bytes, prices).rest[0][0].max())
    return (pico - len(problem.links)) / _PICO


@dataclass(frozen=True)
class Fastest:
    """A choice (call -> option), and by how many seconds at most a better one could undercut it."""

    options: dict[int, int]
    gap_seconds: float


def fastest(problem: Chain, budget_bytes: int, prices: Floats) -> Fastest | None:
    """The fastest choice within the budget, None if there is none.

    Exact to the picosecond (gap 0), unless even the longest list of states overflows.
    """
    needed = _needed_from(problem)
    if max(problem.floor_bytes, needed[0][0]) > budget_bytes:
        return None
    bound = _bound(problem, budget_bytes, prices)
    best: _Pass | None = None
    unexplored = np.inf
    for width in _WIDTHS:
        found = _search(problem, budget_bytes, needed, bound, width, None if best is None else best.pico)
        unexplored = found.unexplored
        if found.moves is not None:
            best = found
        assert best is not None  # every state that the first pass keeps can be completed
        if unexplored > best.pico - 1:
            unexplored = best.pico
            break
    assert best is not None
    assert best.moves is not None
    return Fastest(dict(zip(problem.calls, best.moves, strict=True)), max(best.pico - unexplored, 0) / _PICO)


@dataclass(frozen=True)
class _Pass:
    """What one pass found: better moves than known before, or None; and the least bound of what it left."""

    pico: int
    moves: tuple[int, ...] | None
    unexplored: float


@dataclass(frozen=True)
class _States:
    """States after some calls that agree in their mask; sorted by level, and by falling seconds."""

    level: Ints
    pico: Ints
    parent: Ints  # index among the states before the last call
    move: Ints


def _search(
    problem: Chain,
    budget_bytes: int,
    needed: list[dict[int, int]],
    bound: _Bound,
    width: int,
    beat_pico: int | None,
) -> _Pass:
    zero = np.zeros(1, dtype=np.int64)
    groups = {0: _States(zero, zero, zero, zero)}
    history: list[dict[int, _States]] = []
    unexplored = np.inf
    for position, link in enumerate(problem.links):
        after = needed[position + 1]
        grown: dict[int, list[_States]] = {}
        first = 0
        for mask, states in groups.items():
            for move in link.moves[mask]:
                most = budget_bytes - max(move.forward, move.backward, after[move.mask] + move.later)
                fits = int(np.searchsorted(states.level, most, side="right"))  # levels are sorted
                level = states.level[:fits] + move.later
                pico = states.pico[:fits] + move.pico
                parent = np.arange(first, first + fits)
                if beat_pico is not None:
                    promising = bound.least_pico(position + 1, move.mask, level, pico) <= beat_pico - 1
                    level, pico, parent = level[promising], pico[promising], parent[promising]
                if len(level):
                    moves = np.full(len(level), move.option, dtype=np.int64)
                    grown.setdefault(move.mask, []).append(_States(level, pico, parent, moves))
            first += len(states.level)
        groups = {mask: _front(parts) for mask, parts in grown.items()}
        groups, left_out = _shorten(groups, width, position + 1, bound)
        unexplored = min(unexplored, left_out)
        history.append(groups)
    ends = [
        (int(s.pico[-1]), mask) for mask, s in groups.items() if len(s.pico)
    ]  # seconds fall with the level
    if not ends:
        return _Pass(0, None, unexplored)
    best, mask = min(ends)
    return _Pass(best, _trace_back(history, mask), unexplored)


def _front(parts: list[_States]) -> _States:
    """Without the states that another one beats in both bytes and seconds."""
    level, pico, parent, move = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("level", "pico", "parent", "move")
    )
    order = np.lexsort((pico, level))
    least = np.minimum.accumulate(pico[order])
    better = np.ones(len(order), dtype=np.bool_)
    better[1:] = least[1:] < least[:-1]
    kept = order[better]
    return _States(level[kept], pico[kept], parent[kept], move[kept])


def _shorten(
    groups: dict[int, _States], width: int, position: int, bound: _Bound
) -> tuple[dict[int, _States], float]:
    """Keep the `width` most promising states; also the bound of the best that is left out."""
    if sum(len(states.level) for states in groups.values()) <= width:
        return groups, np.inf
    least = {mask: bound.least_pico(position, mask, s.level, s.pico) for mask, s in groups.items()}
    together = np.concatenate(list(least.values()))
    limit = float(np.partition(together, width - 1)[width - 1])
    kept = {
        mask: _States(*(part[least[mask] <= limit] for part in (s.level, s.pico, s.parent, s.move)))
        for mask, s in groups.items()
    }
    return kept, float(together[together > limit].min(initial=np.inf))


def _trace_back(history: list[dict[int, _States]], mask: int) -> tuple[int, ...]:
    moves: list[int] = []
    at = len(history[-1][mask].pico) - 1 if history else 0
    for position in range(len(history) - 1, -1, -1):
        states = history[position][mask]
        moves.append(int(states.move[at]))
        at = int(states.parent[at])
        if position:
            mask, at = _locate(history[position - 1], at)
    return tuple(reversed(moves))


def _locate(groups: dict[int, _States], at: int) -> tuple[int, int]:
    """From an index among all states to a mask and an index among those that share it."""
    for mask, states in groups.items():
        if at < len(states.level):
            return mask, at
        at -= len(states.level)
    raise IndexError(at)
