"""Plans that use the link to the host: proposed by the solvers, judged by the simulator.

The solvers know a plan's memory as a sum over calls. What is under way over the link is none: it depends on
which regions send one after the other. So a proposal is made for a fixed window (room for what is under way)
and a price per byte; the simulator then says what the plan really takes, and where it leaves room, or takes
too much, the solver is asked again with that much more or less.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from remat.errors import InputError
from remat.planner.bounds import all_hosted, entries, least_choices
from remat.planner.chain import Chain, chain, fastest
from remat.planner.link import hidden_seconds, host_bytes, shares_of_link
from remat.planner.program import Program, Window, memory_prices, program, solve_milp, window_sizes
from remat.planner.simulate import Simulator, Span, Timeline, spans
from remat.planner.tied import fastest_tied
from remat.records import Action, Entry, Profile

__all__ = ["Proposal", "exchanged", "polished", "proposals", "rank"]

# Seconds that a byte costs, in units of the time that the link takes for it. Copies that are hidden cost at
# least this, so that of plans that are as fast those that send less are proposed. Where the simulator sees
# waits, the link is scarce: then also plans in which regions send no more than it carries, and higher prices.
_HIDDEN_PRICE = 0.02
_WAITING_PRICES = (0.3, 1.0)
_SCARCE_PRICES = 8  # prices tried, up to one at which nothing is sent, where the host has too little memory
_ROUNDS = 4  # how often the solver is asked again with the room that the simulator saw
_WORTHWHILE = 1e-3  # of the budget: less room than this is not asked for
_MOST_TRIALS = 800  # simulations that climbing may take
_MOST_EXCHANGES = 600  # and trying two moves at a time
_PAIRS_TRIED = 300  # of those that look faster, before they are given up
_MOVES_PAIRED = 600  # with each other, at a time
_GAIN = 3e-5  # of the step: less is not worth a simulation


@dataclass(frozen=True)
class Proposal:
    choices: tuple[int, ...]
    timeline: Timeline
    host_bytes: int


def proposals(profile: Profile, budget_bytes: int, allow: Sequence[Action]) -> Iterator[Proposal]:
    """Plans within the budget, and for each window the least one, which may be over it."""
    without = tuple(action for action in allow if action is not Action.OFFLOAD)
    with suppress(InputError):  # nothing but offload is allowed
        yield from _of_window(profile, budget_bytes, without, None)
    seconds = 0.0 if profile.link is None else 1 / profile.link.d2h_bytes_per_second
    hidden = max(_HIDDEN_PRICE * seconds, hidden_seconds(profile, 1))
    for nbytes in window_sizes(profile):
        first = list(_of_window(profile, budget_bytes, allow, Window(nbytes, hidden)))
        yield from first
        others = []
        if any(map(_waits, first)):
            others += [Window(nbytes, hidden, caps) for caps in shares_of_link(profile)]
            others += [Window(nbytes, price * seconds) for price in _WAITING_PRICES]
        most = max((proposal.host_bytes for proposal in first), default=0)
        if profile.host_limit_bytes is not None and most > profile.host_limit_bytes:
            others += [Window(nbytes, price) for price in _scarce_prices(profile)]
        for window in others:
            with suppress(InputError):  # a call may do nothing but send, and not so much
                yield from _of_window(profile, budget_bytes, allow, window)
    simulator = Simulator(profile)
    for choices in all_hosted(profile, allow):
        yield _proposal(simulator, choices)


def _waits(proposal: Proposal) -> bool:
    return proposal.timeline.link is not None and proposal.timeline.link.waited_seconds > 0


def _scarce_prices(profile: Profile) -> list[float]:
    """Seconds per byte, from one that hardly matters to one that no entry is worth."""
    menus = [entry for kind in profile.kinds for entry in kind.menu]
    dearest = max((entry.extra_seconds for entry in menus), default=0.0)
    highest = dearest / min(entry.host_bytes for entry in menus if entry.host_bytes)
    return [highest / 4**step for step in range(_SCARCE_PRICES)]


def polished(profile: Profile, budget_bytes: int, allow: Sequence[Action], start: Proposal) -> Proposal:
    """What the simulator prefers among the neighbours of a plan, or among all plans where those are few."""
    search = _Search(profile, budget_bytes, program(profile, allow))
    if search.combinations <= _MOST_TRIALS:
        return min((start, *search.everything(start)), key=search.rank)
    return search.climbed(start)


def exchanged(
    profile: Profile, budget_bytes: int, allow: Sequence[Action], choices: tuple[int, ...]
) -> Proposal:
    """What the simulator prefers to a polished plan, among those in which regions trade memory with each
    other. It takes up to so many simulations as polishing and exchanges may take."""
    search = _Search(profile, budget_bytes, program(profile, allow))
    start = search.judged(choices)
    if search.combinations <= _MOST_TRIALS:  # all of them have been judged
        return start
    best, before = start, None
    while best is not before:
        before, best = best, search.climbed(search.exchanged(best))
    return best


_Move = tuple[tuple[int, int], ...]  # the entries that some calls change to, which have to change together


class _Search:
    """From a plan to a better one, as the simulator judges them."""

    def __init__(self, profile: Profile, budget_bytes: int, problem: Program) -> None:
        self._profile, self._budget_bytes = profile, budget_bytes
        self._simulator = Simulator(profile)
        self._spans = spans(profile)
        self._menus = [profile.kinds[call.kind].menu for call in profile.calls]
        self._groups: list[list[_Move]] = [
            [
                tuple((i, option.entry) for i, option in zip(group, options, strict=True))
                for options in zip(*(problem.calls[i].options for i in group), strict=True)
            ]
            for group in problem.groups
        ]
        self._trials, self._exchanges = _MOST_TRIALS, _MOST_EXCHANGES
        self._dice = np.random.default_rng(0)  # the same plan every time

    @property
    def combinations(self) -> int:
        return math.prod(map(len, self._groups))

    def rank(self, proposal: Proposal) -> tuple[float, ...]:
        return rank(self._profile, proposal, self._budget_bytes)

    def judged(self, choices: tuple[int, ...]) -> Proposal:
        return _proposal(self._simulator, choices)

    def everything(self, start: Proposal) -> Iterator[Proposal]:
        for moves in itertools.product(*self._groups):
            yield self._with(start, *moves)

    def climbed(self, best: Proposal) -> Proposal:
        """One move after the other that is faster, until there is none."""
        improved = True
        while improved and self._trials > 0:
            improved = False
            for move in itertools.chain(*self._groups):
                changes = [(self._spans[i], *self._change(best, i, entry)) for i, entry in move]
                if all(now is other for _, now, other in changes) or not self._may_be_faster(best, changes):
                    continue
                if not all(
                    _may_fit(best, span, now, other, self._budget_bytes) for span, now, other in changes
                ):
                    continue
                other = self._with(best, move)
                self._trials -= 1
                if self.rank(other) < self.rank(best):
                    best, improved = other, True
        return best

    def _may_be_faster(self, best: Proposal, changes: Sequence[tuple[Span | None, Entry, Entry]]) -> bool:
        """Even if nobody waited for the link any more. Much faster than to simulate it. Where a plan is over
        the budget and waits, whatever sends less may be better."""
        seconds = sum(other.extra_seconds - now.extra_seconds for _, now, other in changes)
        sent_bytes = sum(other.host_bytes - now.host_bytes for _, now, other in changes)
        waited = 0.0 if best.timeline.link is None else best.timeline.link.waited_seconds
        if waited and best.timeline.peak_bytes > self._budget_bytes:
            return True
        return seconds + hidden_seconds(self._profile, sent_bytes) < waited

    def exchanged(self, best: Proposal) -> Proposal:
        """Two moves at a time, of which one frees memory for the other, until none of those that are tried is
        faster. Where regions are alike, this is how they share the link: the solvers, which know a price for
        its bytes and no limit, would have all of them send as much, or as little."""
        better: Proposal | None = best
        while better is not None:
            best, better = better, None
            for frees, spends in self._pairs(best):
                if self._exchanges <= 0:
                    break
                self._exchanges -= 1
                other = self._with(best, frees, spends)
                if self.rank(other) < self.rank(best):
                    better = other
                    break
        return best

    def _pairs(self, best: Proposal) -> list[tuple[_Move, _Move]]:
        """Some that are faster and hold no more than there is room for, the link aside; rather those that are
        much faster."""
        room = self._budget_bytes - best.timeline.peak_bytes
        known = [(number, move) for number, moves in enumerate(self._groups) for move in moves]
        if room < 0 or not known:
            return []
        some = [known[i] for i in self._dice.permutation(len(known))[:_MOVES_PAIRED]]
        group = np.array([number for number, _ in some])
        changes = [[self._change(best, i, entry) for i, entry in move] for _, move in some]
        seconds = np.array([sum(b.extra_seconds - a.extra_seconds for a, b in one) for one in changes])
        held = np.array([sum(b.resident_bytes - a.resident_bytes for a, b in one) for one in changes])
        gain = -(seconds[:, None] + seconds[None, :])
        fits = (held[:, None] + held[None, :] <= room) & (held[:, None] <= 0) & (held[None, :] >= 0)
        worth = gain > _GAIN * best.timeline.seconds
        frees, spends = np.nonzero(fits & worth & (group[:, None] != group[None, :]))
        if not len(frees):
            return []
        weights = gain[frees, spends] ** 2
        number = min(len(frees), _PAIRS_TRIED)
        drawn = self._dice.choice(len(frees), number, replace=False, p=weights / weights.sum())
        return [(some[frees[i]][1], some[spends[i]][1]) for i in drawn]

    def _change(self, plan: Proposal, call: int, entry: int) -> tuple[Entry, Entry]:
        return self._menus[call][plan.choices[call]], self._menus[call][entry]

    def _with(self, plan: Proposal, *moves: _Move) -> Proposal:
        return self.judged(_moved(plan.choices, itertools.chain(*moves)))


def _moved(choices: tuple[int, ...], move: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    changed = dict(move)
    return tuple(changed.get(call, choice) for call, choice in enumerate(choices))


def _may_fit(best: Proposal, span: Span | None, now: Entry, other: Entry, budget_bytes: int) -> bool:
    """Whether a plan within the budget might stay so with this call in another entry: by what the call holds
    from its forward to its backward, whatever happens to the link. Much faster than to simulate it."""
    lets_go = set(now.holds_inputs) - set(other.holds_inputs) or set(now.holds_outputs) - set(
        other.holds_outputs
    )
    if span is None or not span.recorded or best.timeline.peak_bytes > budget_bytes or lets_go:
        return True
    between = best.timeline.points[span.forward + 1 : span.returns]
    more = other.resident_bytes - now.resident_bytes
    return all(point.peak_bytes - point.moving + more <= budget_bytes for point in between)


def rank(profile: Profile, proposal: Proposal, budget_bytes: int) -> tuple[float, ...]:
    """Smaller is better: within the host's memory and the budget, then faster, then less over the link."""
    timeline = proposal.timeline
    limit = proposal.host_bytes if profile.host_limit_bytes is None else profile.host_limit_bytes
    over_host, over = max(proposal.host_bytes - limit, 0), max(timeline.peak_bytes - budget_bytes, 0)
    return over_host, over, timeline.seconds, proposal.host_bytes, timeline.peak_bytes


def _of_window(
    profile: Profile, budget_bytes: int, allow: Sequence[Action], window: Window | None
) -> Iterator[Proposal]:
    problem = program(profile, allow, window)
    nested = chain(problem)
    simulator = Simulator(profile)
    least = _proposal(simulator, least_choices(problem, nested))
    yield least
    limit = budget_bytes
    seen = {least.choices}
    for _ in range(_ROUNDS if window is not None else 1):
        options = _options(problem, nested, limit)
        if options is None:
            return
        proposal = _proposal(simulator, entries(problem, options))
        yield proposal
        room = budget_bytes - proposal.timeline.peak_bytes
        if proposal.choices in seen or 0 <= room < _WORTHWHILE * budget_bytes:
            return
        seen.add(proposal.choices)
        limit += room


def _options(problem: Program, nested: Chain | None, limit_bytes: int) -> Sequence[int] | None:
    if problem.has_ties:
        tied = fastest_tied(problem, limit_bytes, memory_prices(problem, limit_bytes))
        return None if tied is None else tied.options
    if nested is None:
        return solve_milp(problem, limit_bytes)
    found = fastest(nested, limit_bytes, memory_prices(problem, limit_bytes))
    return None if found is None else [found.options.get(i, 0) for i in range(len(problem.calls))]


def _proposal(simulator: Simulator, choices: tuple[int, ...]) -> Proposal:
    return Proposal(choices, simulator.run(choices), host_bytes(simulator.profile, choices))
