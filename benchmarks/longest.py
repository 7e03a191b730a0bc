"""The longest context that trains within a card's memory: remat against checkpointing, with what others add.

    PYTHONPATH=src python benchmarks/frontier.py --longest --cap 16GiB --limit 300 --out longest.json

One sequence of the 1.3B Llama shape, parameters and gradients resident. A length counts if forward and
backward ran, and is too long if memory ran out; whatever else goes wrong says nothing about lengths, and the
method then has none. Lengths are doubled, guessed by the line through the bytes of the last two, and
bracketed to a tenth. `--cap` gives the process less than the whole card: longer contexts take minutes per
step. Without an accelerator a small model runs against a limit on live bytes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from gauge import clean, seconds_of
from peers import Context, checkpointing_on_host, switch, trl_offloading, with_chunked_loss, with_liger
from workloads import CUDA, DEVICE, Job, tokens

import remat
from remat.check.live import LiveBytes
from remat.check.step import tensors_of
from remat.records import Action
from remat.run.recover import is_out_of_memory
from remat.units import format_bytes, parse_bytes

__all__ = ["Found", "Trial", "longest", "search"]

TOLERANCE = 0.1  # between the longest that trains and the shortest that does not
START, UNIT = 8192, 1024  # tokens
SMALL_START, SMALL_UNIT = 64, 16
ROOM = 0.03  # of the memory, left to the allocator's pieces
ACTIONS = (Action.KEEP, Action.RECOMPUTE, Action.OFFLOAD, Action.CHUNK)
Result = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """`needed_bytes`: the peak, or for remat the least it can do; None where that is not known. `broken`: the
    step failed for another reason than memory, `why`."""

    length: int
    fits: bool
    needed_bytes: int | None = None
    seconds: float | None = None
    why: str = ""
    broken: bool = False


@dataclass(frozen=True)
class Found:
    """`below`: the shortest length that did not train; None if none was seen (then `length` is a bound).
    `why`: what else than memory stopped the search; there is no length then."""

    length: int | None
    below: int | None
    trials: tuple[Trial, ...]
    why: str = ""


def search(
    trial: Callable[[int], Trial],
    capacity_bytes: int,
    late: Callable[[], bool],
    start: int = START,
    unit: int = UNIT,
) -> Found:
    """The longest length that fits, to within a tenth, with few trials: long ones are slow."""
    trials: list[Trial] = []
    low, high = 0, None
    length = start
    while not late():
        trials.append(trial(length))
        if trials[-1].broken:
            return Found(None, None, tuple(trials), f"failed at {length} tokens: {trials[-1].why}")
        if trials[-1].fits:
            low = max(low, length)
        else:
            high = length if high is None else min(high, length)
        following = _next(trials, low, high, capacity_bytes, unit)
        if following is None or any(each.length == following for each in trials):
            break
        length = following
    return Found(low, high, tuple(trials))


def _next(trials: Sequence[Trial], low: int, high: int | None, capacity_bytes: int, unit: int) -> int | None:
    if low == 0:  # not even the first
        assert high is not None
        return _rounded(high / 2, unit) if high > unit else None
    if high is not None and high <= max(low * (1 + TOLERANCE), low + unit):
        return None
    guess = _crossing([each for each in trials if each.needed_bytes is not None], capacity_bytes)
    middle = math.sqrt(low * high) if high is not None else 2.0 * low
    if guess is None:
        return _rounded(middle, unit)
    near = low * (1 + TOLERANCE)  # a guess that has come true is confirmed by the next step failing
    wanted = guess if guess > near else near
    if high is None:
        return _rounded(wanted, unit)
    return _rounded(wanted if wanted < high / (1 + TOLERANCE / 2) else middle, unit)


def _crossing(known: Sequence[Trial], capacity_bytes: int) -> float | None:
    """Where the line through the two longest known lengths meets the capacity."""
    by_length = sorted({each.length: each.needed_bytes or 0 for each in known}.items())
    if len(by_length) < 2:
        return None
    (a, bytes_a), (b, bytes_b) = by_length[-2:]
    slope = (bytes_b - bytes_a) / (b - a)
    return b + (capacity_bytes - bytes_b) / slope if slope > 0 else None


def _rounded(length: float, unit: int) -> int:
    return max(unit, int(length) // unit * unit)


# ---------------------------------------------------------------------------------------------- one trial


@dataclass(frozen=True)
class Card:
    """How much memory the process has, and which lengths are short on it."""

    capacity_bytes: int
    start: int
    unit: int

    @contextmanager
    def limited(self, job: Job) -> Iterator[Callable[[], int]]:
        """Inside, more than the capacity raises OutOfMemoryError; yields what tells the peak."""
        if CUDA:  # `longest` has told the allocator
            torch.cuda.reset_peak_memory_stats()
            yield lambda: int(torch.cuda.memory_stats(DEVICE)["active_bytes.all.peak"])
            return
        with LiveBytes(DEVICE, limit_bytes=self.capacity_bytes) as live:
            held = [*job.model.parameters(), *job.model.buffers(), *tensors_of(job.batch)]
            live.watch([*held, *(p.grad for p in job.trained if p.grad is not None)])
            live.reset_peak()
            yield lambda: live.peak_bytes


def step_once(job: Job, card: Card, context: AbstractContextManager[Any]) -> tuple[int, float]:
    """Bytes at the peak, and seconds."""
    with context, card.limited(job) as peak:
        seconds = seconds_of(job.step)
        return peak(), seconds


def peer_trial(
    job: Job, card: Card, method: Callable[[Job], AbstractContextManager[Any]], length: int
) -> Trial:
    here = at_length(job, length)
    try:
        peak, seconds = step_once(here, card, method(here))
    except Exception as error:
        found = failed(length, error, is_out_of_memory(error))
    else:
        found = Trial(length, True, peak, seconds)
    settle(here)
    return found


def remat_trial(job: Job, card: Card, compiler: str | bool, length: int) -> Trial:
    """Profile, plan for the capacity, run a step."""
    here, needed = at_length(job, length), None
    budget = int(card.capacity_bytes * (1 - ROOM))
    for parameter in here.trained:  # planned before the first step: gradients that are there are put aside
        parameter.grad = None
    try:
        profile = remat.profile(here.model, here.batch, accumulate=True, allow=ACTIONS, compile=compiler)
        needed = least_of(profile)
        plan = remat.plan(profile, budget, allow=ACTIONS)
        settle(here)
        _, seconds = step_once(here, card, remat.apply(here.model, plan))
        found = Trial(length, True, needed, seconds)
    except Exception as error:
        too_long = isinstance(error, remat.BudgetError) or is_out_of_memory(error)
        found = replace(failed(length, error, too_long), needed_bytes=needed)
    settle(here)
    return found


def least_of(profile: remat.Profile) -> int:
    """The least bytes that any plan needs."""
    try:
        return remat.plan(profile, 1, allow=ACTIONS).predicted_peak_bytes
    except remat.BudgetError as error:
        return error.needed


def failed(length: int, error: Exception, too_long: bool) -> Trial:
    text = " ".join(str(error).split())
    return Trial(length, False, why=f"{type(error).__name__}: {text}"[:200], broken=not too_long)


def at_length(job: Job, length: int) -> Job:
    vocabulary: int = job.model.config.vocab_size  # type: ignore[union-attr, assignment]
    return replace(job, batch=tokens(vocabulary, 1, length))


def settle(job: Job) -> None:
    """After a step that may have broken off: gradients are resident again, all else is free."""
    clean()
    for parameter in job.trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


# -------------------------------------------------------------------------------------------------- all


def methods_of(backend: str) -> dict[str, Callable[[Job, Card, int], Trial] | str]:
    """In the order in which they are run; a text says why one is not. The strongest first, for a run that is
    cut short."""

    def peer(method: Callable[[Job], AbstractContextManager[Any]]) -> Callable[[Job, Card, int], Trial]:
        return lambda job, card, length: peer_trial(job, card, method, length)

    def ours(compiler: str | bool) -> Callable[[Job, Card, int], Trial]:
        return lambda job, card, length: remat_trial(job, card, compiler, length)

    def around(wrapper: Callable[[Job, Context], Any], inner: Callable[[Job], Any]) -> Callable[[Job], Any]:
        return lambda job: wrapper(job, partial(inner, job))

    no_host = "needs an accelerator"
    methods: dict[str, Callable[[Job, Card, int], Trial] | str] = {
        "checkpointing + offload + chunked loss": (
            peer(around(with_chunked_loss, checkpointing_on_host)) if CUDA else no_host
        ),
        "remat": ours(False),
        "checkpointing": peer(switch),
        "checkpointing + chunked loss": peer(around(with_chunked_loss, switch)),
        "checkpointing + offload": peer(checkpointing_on_host) if CUDA else no_host,
        "plain": peer(lambda job: nullcontext()),
        "remat compiled": ours(backend),
    }
    with_trl = CUDA and find_spec("trl") is not None
    methods["TRL offloading + checkpointing"] = (
        peer(around(trl_offloading, switch)) if with_trl else "trl is not installed, or no accelerator"
    )
    with_kernels = CUDA and find_spec("liger_kernel") is not None
    methods["Liger fused loss + checkpointing"] = (
        peer(around(with_liger, switch))
        if with_kernels
        else "liger-kernel is not installed, or no accelerator"
    )
    return methods


def longest(
    make: Callable[[], Job],
    cap: str | None,
    limit_seconds: float | None,
    backend: str,
    only: Sequence[str],
    small: bool,
    put: Callable[[Result], None],
) -> Result:
    """Each method's longest length; `put` is called after each."""
    begin = time.perf_counter()
    job = make()
    for parameter in job.trained:
        parameter.grad = torch.zeros_like(parameter)
    total = torch.cuda.get_device_properties(DEVICE).total_memory if CUDA else None
    capacity = parse_bytes(cap, total=total) if cap else total or default_capacity(job)
    card = Card(capacity, *((SMALL_START, SMALL_UNIT) if small else (START, UNIT)))
    if CUDA and total is not None:
        torch.cuda.set_per_process_memory_fraction(min(1.0, card.capacity_bytes / total))
    result: Result = {"capacity_bytes": card.capacity_bytes, "methods": {}}
    print(f"longest context in {format_bytes(card.capacity_bytes)}", flush=True)

    def late() -> bool:
        return limit_seconds is not None and time.perf_counter() - begin > limit_seconds

    for name, trial in methods_of(backend).items():
        if only and name not in only:
            continue
        if isinstance(trial, str) or late():
            why = trial if isinstance(trial, str) else f"not run: the limit of {limit_seconds:g} s"
            result["methods"][name] = {"why": why}
        else:
            found = search(partial(trial, job, card), card.capacity_bytes, late, card.start, card.unit)
            result["methods"][name] = asdict(found)
        result["seconds"] = time.perf_counter() - begin
        print(f"{result['seconds']:6.1f} s  {line_of(name, result)}", flush=True)
        put(result)
    if CUDA:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return result


def default_capacity(job: Job) -> int:
    """Of a machine without accelerator: parameters and gradients, and a few MiB."""
    return 2 * sum(p.numel() * p.element_size() for p in job.model.parameters()) + (4 << 20)


def line_of(name: str, result: Result) -> str:
    found = result["methods"][name]
    if found.get("why"):
        return f"{name}: {found['why']}"
    above = f", {found['below']} does not train" if found["below"] else ", no length failed"
    return f"{name}: {found['length']} tokens{above} ({len(found['trials'])} trials)"
