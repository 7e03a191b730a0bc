"""The choice of one menu entry per region call as a linear program over the points of the timeline.

    minimise   sum of seconds of the chosen entries
    subject to level at segment k + what the chosen entry needs within it <= budget     for every segment k

The level at k is a sum over the calls that are then between their forward and their backward, minus the
boundary tensors that are let go. `chain.py` solves it fast where backward runs in the reverse order of
forward (nearly always); this module sets it up, relaxes it (a bound, and prices for memory), and hands the
rest to HiGHS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import coo_array, csr_array, hstack

from remat.errors import InputError
from remat.planner.link import pieces
from remat.planner.simulate import (
    Boundary,
    HeldOutput,
    Passing,
    Span,
    boundaries,
    call_label,
    extra_bytes,
    extra_seconds,
    held_outputs,
    passing_boundaries,
    returned_inputs,
    segment_peak,
    simulate,
    spans,
    unread_outputs,
)
from remat.planner.ties import tied_calls, ways
from remat.records import Action, Entry, Mode, Phase, Profile

__all__ = [
    "Call",
    "Option",
    "Program",
    "Window",
    "actions",
    "lagrangian_bound",
    "memory_prices",
    "program",
    "programs",
    "solve_milp",
    "window_sizes",
]

Floats = npt.NDArray[np.float64]

_TIME_LIMIT_S = 60.0
_MOST_ITERATIONS = 5_000  # of the simplex for prices: hundreds do, unless it goes round in circles
_WINDOW_SHARES = (1.0, 0.5, 0.25)
_MOST_PROGRAMS = 8  # three tensors that may or may not be held by the one region that reads them


@dataclass(frozen=True)
class Option:
    """An entry of a call's menu, in the terms of the timeline. `above` follows the call's own segments."""

    entry: int
    seconds: float
    held_bytes: int  # beyond what the reference entry holds
    above: tuple[int, ...]
    holds_inputs: frozenset[int]
    holds_outputs: frozenset[int]  # whatever the reader does: without those that are lent to one that sends
    keeps_outputs: frozenset[int] = frozenset()  # for its own backward, when nobody else has them
    host_bytes: int = 0

    def no_worse_than(self, other: Option) -> bool:
        return (
            self.seconds <= other.seconds
            and self.host_bytes <= other.host_bytes
            and self.held_bytes <= other.held_bytes
            and all(a <= b for a, b in zip(self.above, other.above, strict=True))
            and self.holds_inputs <= other.holds_inputs
            and self.holds_outputs <= other.holds_outputs
            and self.keeps_outputs <= other.keeps_outputs
        )


@dataclass(frozen=True)
class Window:
    """Room on the device for what is on its way to the host or back, and what a byte over the link costs.

    The simulator knows where that memory is taken and where compute waits; a program that is linear in the
    choices does not. So it leaves this room wherever something may be under way, leaves out entries that
    need more, and pays for every byte.
    """

    nbytes: int
    seconds_per_byte: float = 0.0
    caps: tuple[int, ...] = ()  # what each call may send, if that is limited

    def lets(self, call: int, nbytes: int) -> bool:
        return nbytes <= self.nbytes and (not self.caps or nbytes <= self.caps[call])


def window_sizes(profile: Profile) -> tuple[int, ...]:
    """Windows worth trying: as much as the largest entry sends, and about a half and a quarter of that."""
    sizes = [e.host_bytes for kind in profile.kinds for e in kind.menu if e.host_bytes]
    shares = (max((s for s in sizes if s <= max(sizes) * share), default=0) for share in _WINDOW_SHARES)
    return tuple(dict.fromkeys(size for size in shares if size))


@dataclass(frozen=True)
class Call:
    """A region call: when it holds memory, its own segments, and the options worth considering.

    `holds`: first and last of the points at which what it holds counts. That may be twice for one point: a
    call without a backward holds what it did in the last step, too, where a loop holds outputs.
    """

    span: Span | None
    holds: tuple[tuple[int, int], ...]
    segments: tuple[int, ...]
    options: tuple[Option, ...]


@dataclass(frozen=True)
class Program:
    """Everything the solvers need. `base_bytes[k]` is the absolute level at segment k with nothing chosen;
    after the last segment comes the optimizer's own step, if there is one.

    Calls of one of the `groups` are tied: option i of one goes with option i of the others.
    """

    base_bytes: tuple[int, ...]
    glue_above: tuple[int, ...]  # what segment k needs above its level, 0 in a region's own segments
    floor_bytes: int  # reached whatever is chosen: what is resident
    calls: tuple[Call, ...]
    boundaries: tuple[Boundary, ...]
    outputs: tuple[HeldOutput, ...]
    groups: tuple[tuple[int, ...], ...]  # every call is in one, most are alone

    @property
    def has_ties(self) -> bool:
        """Whether the choice for one call decides that for another."""
        return any(len(group) > 1 and len(self.calls[group[0]].options) > 1 for group in self.groups)


def held_by_consumer(boundary: Boundary, option: Option) -> bool:
    return boundary.input_position in option.holds_inputs


def held_by_producer(boundary: Boundary, option: Option) -> bool:
    return boundary.output_position in option.holds_outputs


def kept_by_producer(output: HeldOutput, option: Option) -> bool:
    return output.output_position in option.keeps_outputs


def actions(entry: Entry) -> frozenset[Action]:
    """What an entry does, beyond keeping: the actions that must be allowed for it."""
    if entry.mode is Mode.CHUNK:
        return frozenset({Action.CHUNK, Action.RECOMPUTE} if entry.again else {Action.CHUNK})
    needed = {Action.OFFLOAD} if entry.host_bytes else set()
    if entry.mode is Mode.KEEP or (entry.mode is Mode.COMPILED and entry.extra_seconds == 0):
        return frozenset(needed or {Action.KEEP})
    if entry.recipe is None or entry.recipe.dropped:
        needed.add(Action.RECOMPUTE)
    if entry.in_chunks:
        needed.add(Action.CHUNK)
    return frozenset(needed)


def program(profile: Profile, allow: Sequence[Action], window: Window | None = None) -> Program:
    """Set the program up, without entries that are not allowed or that another one beats in all respects.

    Without a window nothing is left for the link, and it is free: a bound on what any plan can do.
    """
    reference = simulate(profile, [profile.kinds[call.kind].reference for call in profile.calls])
    own: dict[int, list[int]] = {}
    for index, segment in enumerate(profile.segments):
        own.setdefault(segment.call, []).append(index)
    calls: list[Call] = []
    keys: list[tuple[object, ...]] = []  # calls with equal ones have equal options
    unread, returned = unread_outputs(profile), returned_inputs(profile)
    made, outputs = boundaries(profile), held_outputs(profile)
    lent = _positions(profile, [b for b in made if b.sent])
    read = _positions(profile, outputs)
    for index, (call, span) in enumerate(zip(profile.calls, spans(profile), strict=True)):
        mine = tuple(own.get(index, ()))
        measured = tuple(profile.segments[k].peak_bytes - profile.segments[k].start_bytes for k in mine)
        phases = tuple(profile.segments[k].phase for k in mine)
        calls.append(Call(span, _holds(profile, span, len(reference.points)), mine, ()))
        keys.append(
            (
                call.kind,
                len(call.inputs),
                measured,
                phases,
                span is None,
                span is not None and span.recorded,
                tuple(unread[index].items()),
                tuple(returned[index].items()),
                lent[index],
                read[index],
                window.caps[index] if window is not None and window.caps else None,
            )
        )
    groups = tied_calls(profile)
    shared: dict[tuple[object, ...], tuple[tuple[Option, ...], ...]] = {}
    for group in groups:
        key = tuple(keys[i] for i in group)
        if key not in shared:
            found = [
                _options(profile, i, calls[i], (unread[i], returned[i], lent[i], read[i]), allow, window)
                for i in group
            ]
            shared[key] = _worthwhile(found, ways(profile, group))
        for index, options in zip(group, shared[key], strict=True):
            if not options:
                allowed = ", ".join(action.name for action in allow) or "nothing"
                raise InputError(
                    f"no way to run {call_label(profile.calls[index])} is left with allow=({allowed}); add "
                    f"Action.KEEP or Action.RECOMPUTE to allow"
                )
            calls[index] = replace(calls[index], options=options)
    room = _room(calls, len(reference.points), window)
    return Program(
        base_bytes=tuple(p.start_bytes + more for p, more in zip(reference.points, room, strict=True)),
        glue_above=tuple(point.working if point.call < 0 else 0 for point in reference.points),
        floor_bytes=profile.step.resident,
        calls=tuple(calls),
        boundaries=made,
        outputs=outputs,
        groups=groups,
    )


def _positions(profile: Profile, tensors: Sequence[Boundary | HeldOutput]) -> list[frozenset[int]]:
    """Per call: which of its outputs are among these."""
    found: list[set[int]] = [set() for _ in profile.calls]
    for tensor in tensors:
        found[tensor.producer].add(tensor.output_position)
    return [frozenset(positions) for positions in found]


def programs(profile: Profile, allow: Sequence[Action], window: Window | None = None) -> tuple[Program, ...]:
    """The program, and a variant of it for each choice of passing tensors that nobody holds in backward.

    Such a tensor is counted in forward and not in backward, which one level per call cannot say. A variant
    has only the options that do not hold it, and its bytes taken off where it is gone. The best plan of all
    variants is the best there is. Past the limit, tensors are counted throughout: the safe side.
    """
    found = [program(profile, allow, window)]
    for passing in passing_boundaries(profile):
        holds = {passing.input_position in o.holds_inputs for o in found[0].calls[passing.consumer].options}
        if holds == {False}:
            found = [_let_go(problem, passing) for problem in found]
        elif holds == {True, False} and len(found) < _MOST_PROGRAMS:
            without = [_let_go(problem, passing) for problem in found]
            found += [problem for problem in without if problem.calls[passing.consumer].options]
    return tuple(found)


def _let_go(problem: Program, passing: Passing) -> Program:
    reader = problem.calls[passing.consumer]
    left = [i for i, o in enumerate(reader.options) if passing.input_position not in o.holds_inputs]
    tied = next(group for group in problem.groups if passing.consumer in group)
    return replace(
        problem,
        base_bytes=tuple(
            base - passing.nbytes if passing.first <= k <= passing.last else base
            for k, base in enumerate(problem.base_bytes)
        ),
        calls=tuple(
            replace(call, options=tuple(call.options[i] for i in left)) if index in tied else call
            for index, call in enumerate(problem.calls)
        ),
    )


def _holds(profile: Profile, span: Span | None, points: int) -> tuple[tuple[int, int], ...]:
    if span is None:
        return ()
    if span.recorded or not profile.step.outputs:
        return ((span.forward + 1, span.backward),)
    runs = groupby(range(len(profile.segments)), lambda k: profile.segments[k].phase)
    forward = [tuple(run) for phase, run in runs if phase is Phase.FORWARD]
    return ((span.forward + 1, points - 1), *((run[0], run[-1]) for run in forward))


def _room(calls: Sequence[Call], points: int, window: Window | None) -> list[int]:
    """Bytes to leave for the link at each point: from the first call that may send to its backward."""
    spans = [call.span for call in calls if call.span and any(o.host_bytes for o in call.options)]
    if window is None or not spans:
        return [0] * points
    first, last = min(span.forward for span in spans) + 1, max(span.backward for span in spans)
    return [window.nbytes if first <= k <= last else 0 for k in range(points)]


def _options(
    profile: Profile,
    index: int,
    call: Call,
    tensors: tuple[dict[int, int], dict[int, int], frozenset[int], frozenset[int]],
    allow: Sequence[Action],
    window: Window | None,
) -> dict[int, Option]:
    """The allowed entries of a call's menu. `tensors`: its unread, returned, lent and read ones."""
    unread, returned, lent, read = tensors
    span = call.span
    kind = profile.kinds[profile.calls[index].kind]
    reference = kind.menu[kind.reference]
    # Of a call without a backward nothing is let go: what it holds of its inputs makes no difference.
    inputs = len(profile.calls[index].inputs) if span is None or span.recorded else 0
    found: dict[int, Option] = {}
    for number, entry in enumerate(kind.menu):
        if not actions(entry) <= set(allow):
            continue
        if entry.host_bytes and (span is None or not span.recorded):
            continue  # it never comes back: nothing is gained
        if entry.mode is Mode.HOSTED and sum(pieces(profile, index, entry)) != entry.host_bytes:
            continue  # this call's input is a part of a larger tensor
        if window is not None and not window.lets(index, entry.host_bytes):
            continue
        found[number] = Option(
            entry=number,
            seconds=extra_seconds(span, entry)
            + (window.seconds_per_byte if window else 0) * entry.host_bytes,
            held_bytes=extra_bytes(span, entry, reference, unread),
            above=tuple(segment_peak(profile.segments[k], entry, reference, returned) for k in call.segments),
            holds_inputs=frozenset(
                range(inputs) if entry.mode is Mode.FULL or not inputs else entry.holds_inputs
            ),
            holds_outputs=frozenset(entry.holds_outputs) - (lent & {*entry.lends_outputs}),
            keeps_outputs=(read & {*entry.holds_outputs}) - {*reference.holds_outputs},
            host_bytes=entry.host_bytes,
        )
    return found


def _worthwhile(
    found: Sequence[dict[int, Option]], alike: Sequence[dict[int, Any]]
) -> tuple[tuple[Option, ...], ...]:
    """Of tied calls: what they can all do, one option each, without what is beaten in all respects by
    something else for all of them."""
    by_way = [
        {way: options[entry] for entry, way in ways_of.items() if entry in options}
        for options, ways_of in zip(found, alike, strict=True)
    ]
    kept: list[tuple[Option, ...]] = []
    for way in by_way[0]:
        if not all(way in options for options in by_way):
            continue
        together = tuple(options[way] for options in by_way)
        if any(_no_worse(other, together) for other in kept):
            continue
        kept = [other for other in kept if not _no_worse(together, other)]
        kept.append(together)
    return tuple(zip(*kept, strict=True)) if kept else tuple(() for _ in found)


def _no_worse(ours: Sequence[Option], theirs: Sequence[Option]) -> bool:
    return all(one.no_worse_than(other) for one, other in zip(ours, theirs, strict=True))


# ------------------------------------------------------------------------------------------- in matrix form


@dataclass(frozen=True)
class _Matrix:
    """Columns: an option per group of tied calls, then the level at each segment, then the share let go of
    each boundary."""

    rows: csr_array
    lower: Floats
    upper: Floats  # of every row but the segments', where it depends on the budget
    first_segment_row: int
    cost: Floats
    options: int


def _matrix(problem: Program) -> _Matrix:
    """Levels are columns of their own, chained from segment to segment, so that the rows stay short.

    All bytes are relative to the largest that occurs, all seconds to the dearest choice.
    """
    offsets, options = _columns(problem)
    segments = len(problem.base_bytes)
    scale = byte_scale(problem)
    entries: list[tuple[int, int, float]] = []
    lower: list[float] = []
    upper: list[float] = []

    def row(terms: list[tuple[int, float]], low: float, high: float) -> None:
        entries.extend((len(lower), column, weight) for column, weight in terms)
        lower.append(low)
        upper.append(high)

    changes: list[list[tuple[int, float]]] = [[] for _ in range(segments + 1)]
    needs: list[list[tuple[int, float]]] = [[] for _ in range(segments)]
    seconds = np.zeros(options)
    for group in problem.groups:
        first = offsets[group[0]]
        row([(first + i, 1.0) for i in range(len(problem.calls[group[0]].options))], 1.0, 1.0)
    for call, first in zip(problem.calls, offsets, strict=True):
        for i, option in enumerate(call.options):
            column = first + i
            seconds[column] += option.seconds
            for begin, end in call.holds if option.held_bytes else ():
                _between(changes, begin, end, column, option.held_bytes / scale)
            for segment, above in zip(call.segments, option.above, strict=True):
                needs[segment].append((column, above / scale))
    for output in problem.outputs:
        for i, option in enumerate(problem.calls[output.producer].options):
            if kept_by_producer(output, option):
                column = offsets[output.producer] + i
                _between(changes, output.first, output.last, column, output.nbytes / scale)
    for number, boundary in enumerate(problem.boundaries):
        let_go = options + segments + number
        span = problem.calls[boundary.consumer].span
        assert span is not None  # or it would not be among the boundaries
        _between(changes, span.forward + 1, boundary.last_gone(span), let_go, -boundary.nbytes / scale)
        for index, holds in ((boundary.producer, held_by_producer), (boundary.consumer, held_by_consumer)):
            first = offsets[index]
            holders = [
                (first + i, 1.0) for i, o in enumerate(problem.calls[index].options) if holds(boundary, o)
            ]
            row([(let_go, 1.0), *holders], -np.inf, 1.0)
    for k in range(segments):
        before = [(options + k - 1, -1.0)] if k else []
        row([(options + k, 1.0), *before, *((c, -w) for c, w in changes[k])], 0.0, 0.0)
    first_segment_row = len(lower)
    for k in range(segments):
        row([(options + k, 1.0), *needs[k]], -np.inf, 0.0)
    cost = np.concatenate([seconds / second_scale(problem), np.zeros(segments + len(problem.boundaries))])
    rows = csr_array(
        coo_array(
            (
                np.array([weight for _, _, weight in entries], dtype=np.float64),
                (
                    np.array([where for where, _, _ in entries], dtype=np.int64),
                    np.array([column for _, column, _ in entries], dtype=np.int64),
                ),
            ),
            shape=(len(lower), len(cost)),
        )
    )
    return _Matrix(rows, np.array(lower), np.array(upper), first_segment_row, cost, options)


def _columns(problem: Program) -> tuple[list[int], int]:
    """The column of each call's first option, and how many there are. Tied calls have theirs in common."""
    offsets, count = [0] * len(problem.calls), 0
    for group in problem.groups:
        for index in group:
            offsets[index] = count
        count += len(problem.calls[group[0]].options)
    return offsets, count


def _between(
    changes: list[list[tuple[int, float]]], first: int, last: int, column: int, weight: float
) -> None:
    if first <= last:
        changes[first].append((column, weight))
        changes[last + 1].append((column, -weight))


def byte_scale(problem: Program) -> float:
    """Bytes per unit of the matrix: one unit is a thousandth of the largest amount in it."""
    amounts = [o.held_bytes + max(o.above, default=0) for c in problem.calls for o in c.options]
    return max(max(amounts, default=0), max((b.nbytes for b in problem.boundaries), default=0), 1) / 1e3


def second_scale(problem: Program) -> float:
    dearest = max((abs(o.seconds) for call in problem.calls for o in call.options), default=0.0)
    return dearest / 1e3 or 1.0


def _segment_caps(problem: Program, budget_bytes: int) -> Floats:
    pairs = zip(problem.base_bytes, problem.glue_above, strict=True)
    return np.array([budget_bytes - base - above for base, above in pairs], dtype=np.float64)


def memory_prices(problem: Program, budget_bytes: int) -> Floats:
    """Seconds that one more byte would save at each segment: the duals of the relaxed program (all >= 0)."""
    matrix = _matrix(problem)
    segments, let_go = len(problem.base_bytes), len(problem.boundaries)
    upper = matrix.upper.copy()
    upper[matrix.first_segment_row :] = _segment_caps(problem, budget_bytes) / byte_scale(problem)
    equal = matrix.lower == matrix.upper
    equal[matrix.first_segment_row :] = False
    lowest = np.concatenate([np.zeros(matrix.options), np.full(segments, -np.inf), np.zeros(let_go)])
    highest = np.concatenate([np.full(matrix.options + segments, np.inf), np.ones(let_go)])
    result = linprog(
        matrix.cost,
        A_ub=matrix.rows[~equal],
        b_ub=upper[~equal],
        A_eq=matrix.rows[equal],
        b_eq=matrix.lower[equal],
        bounds=list(zip(lowest.tolist(), highest.tolist(), strict=True)),
        method="highs",
        options={"maxiter": _MOST_ITERATIONS},
    )
    if result.status != 0:  # prices only speed the search up and tighten the bound; zero is a valid one
        return np.zeros(segments)
    duals = np.asarray(result.ineqlin.marginals, dtype=np.float64)[int((~equal).sum()) - segments :]
    prices: Floats = np.maximum(-duals, 0.0) * (second_scale(problem) / byte_scale(problem))
    return prices


def lagrangian_bound(problem: Program, budget_bytes: int, prices: Floats) -> float:
    """Seconds that no choice within the budget can undercut, whatever the prices (>= 0) are.

    Memory is bought at its price instead of being limited; then every call chooses alone, or with those it
    is tied to. Valid for any prices; with those of `memory_prices` it is the relaxed optimum, or a little
    less where producers hold boundary tensors.
    """
    running = np.concatenate([[0.0], np.cumsum(prices)])
    refund: dict[int, list[tuple[Boundary, float]]] = {}
    for boundary in problem.boundaries:
        span = problem.calls[boundary.consumer].span
        if span is not None:
            price = float(running[boundary.last_gone(span) + 1] - running[span.forward + 1]) * boundary.nbytes
            refund.setdefault(boundary.consumer, []).append((boundary, max(price, 0.0)))
    kept: dict[int, list[tuple[HeldOutput, float]]] = {}
    for output in problem.outputs:
        price = float(running[output.last + 1] - running[output.first]) * output.nbytes
        kept.setdefault(output.producer, []).append((output, price))
    total = -float(prices @ _segment_caps(problem, budget_bytes)) if len(prices) else 0.0
    bought: list[list[float]] = []  # what each option of each call costs then
    for index, call in enumerate(problem.calls):
        held = sum(float(running[end + 1] - running[begin]) for begin, end in call.holds)
        bought.append(
            [
                option.seconds
                + held * option.held_bytes
                + sum(float(prices[k]) * above for k, above in zip(call.segments, option.above, strict=True))
                - sum(price for b, price in refund.get(index, ()) if not held_by_consumer(b, option))
                + sum(price for o, price in kept.get(index, ()) if kept_by_producer(o, option))
                for option in call.options
            ]
        )
    for group in problem.groups:
        total += min(map(sum, zip(*(bought[index] for index in group), strict=True)))
    return total


def solve_milp(problem: Program, budget_bytes: int | None, *, gap: float = 1e-6) -> tuple[int, ...] | None:
    """One option per call by HiGHS: the fastest within the budget, or without one the least peak."""
    matrix = _matrix(problem)
    segments, let_go = len(problem.base_bytes), len(problem.boundaries)
    # The last column is how far the peak is above the limit: 0 with a budget, minimised without one.
    limit = problem.floor_bytes if budget_bytes is None else budget_bytes
    upper = matrix.upper.copy()
    upper[matrix.first_segment_row :] = _segment_caps(problem, limit) / byte_scale(problem)
    column = np.zeros((len(upper), 1))
    column[matrix.first_segment_row :] = -1.0
    over = csr_array(column)
    lowest = np.concatenate([np.zeros(matrix.options), np.full(segments, -np.inf), np.zeros(let_go + 1)])
    most_over = np.inf if budget_bytes is None else 0.0
    highest = np.concatenate(
        [np.ones(matrix.options), np.full(segments, np.inf), np.ones(let_go), [most_over]]
    )
    if budget_bytes is None:
        cost = np.append(np.zeros(len(matrix.cost)), 1.0)
    else:
        cost = np.append(matrix.cost, 0.0)
    whole = np.zeros(len(cost), dtype=np.int64)
    whole[: matrix.options] = 1
    result = milp(
        cost,
        constraints=LinearConstraint(csr_array(hstack([matrix.rows, over])), matrix.lower, upper),
        integrality=whole,
        bounds=Bounds(lowest, highest),
        options={"time_limit": _TIME_LIMIT_S, "mip_rel_gap": gap},
    )
    if result.x is None:
        return None
    chosen = []
    for call, first in zip(problem.calls, _columns(problem)[0], strict=True):
        share = np.asarray(result.x)[first : first + len(call.options)]
        chosen.append(int(np.argmax(share)))
    return tuple(chosen)
