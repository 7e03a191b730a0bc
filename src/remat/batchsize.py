"""The largest batch that fits a budget, and the one that trains the most samples per second.

Sizes are found by profiling a few of them: the least bytes that a step needs grow nearly along a line with
its size, so the next size to try is where the line through two known ones meets the budget, and bisection
takes over where that does not help. The answers are confirmed by `fit`, which runs them for real.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from remat.api import allowed_actions, fit, plan, profile
from remat.check.step import Loss
from remat.errors import BudgetError, InputError, RematError
from remat.planner.schedule import keep_everything, least_of_all
from remat.planner.simulate import simulate
from remat.records import Action, Plan, Profile
from remat.show.progress import showing
from remat.units import format_bytes, format_seconds

__all__ = ["Candidate", "Largest", "largest", "search"]

_NEVER = 2**62  # more bytes than any device has
_UNTOUCHED_TRIES = 2
_GROWTH = 4  # how many times larger than the largest known to fit the next size may be


@dataclass(frozen=True)
class Candidate:
    """One batch size with its fastest plan. `confirmed`: the plan was run, and bytes and seconds measured."""

    size: int
    plan: Plan
    peak_bytes: int
    seconds: float
    confirmed: bool = False

    @property
    def samples_per_second(self) -> float:
        return self.size / self.seconds if self.seconds else math.inf

    @property
    def slowdown(self) -> float:
        """Against the untouched step of the same size, as predicted."""
        return self.plan.predicted_seconds / self.plan.plain_seconds if self.plan.plain_seconds else 1.0


@dataclass(frozen=True)
class Largest:
    """`largest` is the largest size within the budget, `fastest` the one with the most samples per second
    (the same where more is faster). `tried` are all sizes that were planned, from small to large."""

    budget_bytes: int
    largest: Candidate
    fastest: Candidate
    tried: tuple[Candidate, ...]

    @property
    def size(self) -> int:
        return self.largest.size

    def __str__(self) -> str:
        head = f"{'size':>8} {'peak':>10} {'step':>10} {'samples/s':>11}"
        return "\n".join([f"within {format_bytes(self.budget_bytes)}:", head, *map(self._line, self.tried)])

    def _line(self, candidate: Candidate) -> str:
        marks = ["measured" if candidate.confirmed else "predicted"]
        marks += ["largest"] if candidate.size == self.largest.size else []
        marks += ["fastest"] if candidate.size == self.fastest.size else []
        peak, step = format_bytes(candidate.peak_bytes), format_seconds(candidate.seconds)
        rate = f"{candidate.samples_per_second:.1f}"
        return f"{candidate.size:>8} {peak:>10} {step:>10} {rate:>11}  {', '.join(marks)}"


def largest(
    model: nn.Module,
    batch_fn: Callable[[int], Any],
    budget: int | str,
    *,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    accumulate: bool | int = False,
    allow: Sequence[Action | str] | None = None,
    start: int = 1,
    limit: int = 65536,
) -> Largest:
    """The largest `n` for which a step on `batch_fn(n)` fits into `budget` bytes, and the `n` with the most
    samples per second. The model is left as it was: pass the answer's batch to `fit`.

    `n` may be anything that a step's memory grows with: a batch size, or a sequence length. Sizes from
    `start` to `limit` are considered. `allow` is that of `fit`. Raises BudgetError if even `start` does not
    fit.
    """
    _check_sizes(start, limit)
    allowed = allowed_actions(model, allow)
    with showing(f"remat: largest batch of {type(model).__name__}") as progress:
        options = {"loss": loss, "optimizer": optimizer, "accumulate": accumulate}
        return _Finder(model, batch_fn, budget, options, allowed, progress).find(start, limit)


def _check_sizes(start: int, limit: int) -> None:
    for name, value in (("start", start), ("limit", limit)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name}={value!r} must be an int of at least 1")
    if start > limit:
        raise InputError(f"start={start} is above limit={limit}; nothing is left to try")


@dataclass
class _Finder:
    model: nn.Module
    batch_fn: Callable[[int], Any]
    budget: int | str
    options: dict[str, Any]
    allow: tuple[Action, ...]
    progress: Callable[[str], None]
    profiles: dict[int, Profile] = field(default_factory=dict)
    candidates: dict[int, Candidate] = field(default_factory=dict)

    def find(self, start: int, limit: int) -> Largest:
        budget_bytes = self._planned(start).plan.budget_bytes  # raises BudgetError if not even this fits
        while limit >= start:
            size = search(self._needed, budget_bytes, start, limit)
            found = self._confirmed(size)
            if found is not None:
                break
            limit = size - 1  # planned within the budget, but not met when it ran
        else:
            raise BudgetError(
                f"size {start} was planned within {format_bytes(budget_bytes)}, but took more when it ran; "
                "raise the budget, or try a smaller start",
                needed=max(self._needed(start), budget_bytes + 1),
            )
        self._try_untouched(budget_bytes, start, size)
        fastest = self._fastest(found)
        tried = tuple(self.candidates[n] for n in sorted(self.candidates))
        return Largest(budget_bytes, self.candidates[size], fastest, tried)

    def _profile(self, size: int) -> Profile:
        if size not in self.profiles:
            self.progress(f"profiling size {size}")
            self.profiles[size] = profile(self.model, self.batch_fn(size), allow=self.allow, **self.options)
        return self.profiles[size]

    def _planned(self, size: int) -> Candidate:
        if size not in self.candidates:
            made = plan(self._profile(size), self.budget, allow=self.allow)
            self.candidates[size] = Candidate(size, made, made.predicted_peak_bytes, made.predicted_seconds)
        return self.candidates[size]

    def _needed(self, size: int) -> int:
        """The least bytes that a step of this size can run in."""
        try:
            found = self._profile(size)
        except torch.OutOfMemoryError:  # not even one region, or the frugal step, fits the device itself
            return _NEVER
        return least_of_all(found, self.allow)

    def _confirmed(self, size: int) -> Candidate | None:
        """Run it; None if it does not stay within the budget."""
        self.progress(f"confirming size {size}")
        try:
            handle = fit(self.model, self.batch_fn(size), self.budget, allow=self.allow, **self.options)
        except torch.OutOfMemoryError:
            handle = None
        except RematError as error:
            if type(error) not in (RematError, BudgetError):  # anything else is no matter of size
                raise
            handle = None
        if handle is None:
            self.candidates.pop(size, None)
            return None
        with handle:
            assert handle.measured is not None
            made, seconds = handle.plan, handle.measured.seconds
        self.candidates[size] = Candidate(size, made, made.predicted_peak_bytes, seconds, confirmed=True)
        return self.candidates[size]

    def _try_untouched(self, budget_bytes: int, start: int, size: int) -> None:
        """Plan for sizes up to which nothing needs to be recomputed: often those train fastest. Between two
        known sizes the peaks lie on or below a line: where it meets the budget is safe, and twice is near."""
        for _ in range(_UNTOUCHED_TRIES):
            peaks = {n: _untouched_peak(found) for n, found in self.profiles.items()}
            within = [n for n, peak in peaks.items() if peak <= budget_bytes]
            above = [n for n, peak in peaks.items() if peak > budget_bytes]
            if not within or not above:
                return
            low, high = max(within), min(above)
            guess = _crossing(low, peaks[low], high, peaks[high], budget_bytes)
            if guess is None or not start <= guess < size:
                return
            self._planned(guess)

    def _fastest(self, found: Candidate) -> Candidate:
        """Measured figures decide: of the largest size, and of those that were predicted to be faster."""
        best = found
        while True:
            promising = [c for c in self.candidates.values() if not c.confirmed]
            promising = [c for c in promising if c.samples_per_second > best.samples_per_second]
            if not promising:
                return best
            chosen = max(promising, key=lambda c: c.samples_per_second)
            ran = self._confirmed(chosen.size)
            if ran is not None and ran.samples_per_second > best.samples_per_second:
                best = ran


# ---------------------------------------------------------------------------------------------- the search


def search(needed: Callable[[int], int], budget_bytes: int, start: int, limit: int) -> int:
    """The largest size from `start` to `limit` whose need is within the budget; `start` itself must be.

    `needed` grows with the size and is asked about few sizes: those where a line through two known ones meets
    the budget, and the middle of what is left where the line does not halve it.
    """
    low, high = start, limit + 1  # low fits; high does not, or is out of bounds
    known = {start: needed(start)}
    bisect = False
    while high - low > 1:
        size = min(max(_next(known, budget_bytes, low, high, bisect), low + 1), high - 1, _GROWTH * low)
        known[size] = needed(size)
        left = high - low
        low, high = (size, high) if known[size] <= budget_bytes else (low, size)
        bisect = high in known and 2 * (high - low) > left
    return low


def _next(known: dict[int, int], budget_bytes: int, low: int, high: int, bisect: bool) -> int:
    if bisect:
        return (low + high) // 2
    below = [size for size in known if size < low]
    if known.get(high, _NEVER) < _NEVER:
        other = high
    elif below:
        other = max(below)
    else:
        return 2 * low if high not in known else (low + high) // 2
    crossing = _crossing(low, known[low], other, known[other], budget_bytes)
    return (low + high) // 2 if crossing is None else crossing


def _crossing(a: int, bytes_a: int, b: int, bytes_b: int, budget_bytes: int) -> int | None:
    """The last size at which the line through two points is within the budget; None if it does not rise."""
    slope = (bytes_b - bytes_a) / (b - a)
    return math.floor(a + (budget_bytes - bytes_a) / slope) if slope > 0 else None


def _untouched_peak(found: Profile) -> int:
    return simulate(found, keep_everything(found)).peak_bytes
