"""remat against every other way to train within less memory: time and activation peak, in one run.

    PYTHONPATH=src python benchmarks/frontier.py --workloads llama-1.3b --out benchmarks/results/frontier.json

Per workload, in one process: the plain step; remat at eight shares of its activation peak, eager and
compiled, planned from one profile each and confirmed by a run; torch's checkpoint on all blocks, every second
one, and reentrant; selective checkpointing; the chunked loss; the ways to offload; torch.compile of each
block and of the whole model with its own budgets. One of remat's plans also runs with its recipes replayed
operation by operation ("unfused"), to show what fused replay gains. Then remat once more right at the peak of
each peer that it has not beaten, and at half of the lowest peer's. Then the race: every method in every
round, in shuffled order, the plain step several times. Time is the median of CUDA events over that of the
round's plain steps; with --rest the device has been idle for so many seconds before each method. The peak is
the allocator's active bytes above what is resident (parameters and gradients are).

The file is written after every method; what fails is recorded with its error; --limit prepares nothing more
once that and the rounds to come would take longer. Times of different runs are never compared: a workload's
rows come from one process, and a second run of it takes the place of the first.

Without an accelerator the same code runs small shapes, with live bytes and counted operations.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import random
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from gauge import COST_UNIT, Reading, clean, read, relative_to, seconds_of, spread_of, synchronize
from peers import COMPILED, EAGER, Absent, Method, peers
from verdict import REACH, TARGETS, Row, Target, fastest_within, lines_of, rivals_of, share_of, table, verdict
from workloads import CUDA, LLAMA_1B, WORKLOADS, Job, Workload, llama

import remat
from remat.planner.link import host_bytes
from remat.records import Action, Entry, Mode, Plan, Profile

FORMAT = 1
SHARES = (0.9, 0.7, 0.5, 0.35, 0.25, 0.15, 0.10, 0.06)
EVERYTHING = (Action.KEEP, Action.RECOMPUTE, Action.OFFLOAD, Action.CHUNK)
EXACT = EVERYTHING[:3]  # to the bit
IN_ONE_GRAPH = (Action.KEEP, Action.RECOMPUTE, Action.CHUNK)
OURS = {
    "remat": EVERYTHING,
    "exact": EXACT,
    "unfused": EVERYTHING,
    "compiled": EVERYTHING,
    "one-graph": IN_ONE_GRAPH,
}
PREFIX = {
    "remat": "remat",
    "exact": "remat exact",
    "unfused": "remat unfused",
    "compiled": "remat compiled",
    "one-graph": "remat in one graph",
}
# Whose profile serves, if there is one.
OF_PROFILE = {"exact": "remat", "unfused": "remat", "one-graph": "compiled"}
OURS_COMPILED = ("compiled", "one-graph")
# In this order: what is cheap and what matters most first, for a run that is cut short.
GROUPS = ("plain", "remat", "exact", "unfused", *EAGER, "compiled", *COMPILED, "one-graph", "offload-all")
UNFUSED_SHARE = 0.25  # at which a plan runs without fused replay, too
TRIES = 3  # plans for one share, each by what the last one's peak was off
PIECES = 0.002 if CUDA else 0.0  # relative: the allocator's pieces, which no plan is made anew for
SPARE = 0.005 if CUDA else 0.0  # relative: so much may a plan made ahead leave unused, none is made anew
NEAR = 0.03  # a row of ours so little below a peer's peak stands for it
CLEARLY = 0.98  # of a peer's time: faster than any noise
PLAIN_EVERY = 5  # methods in a round
ROUND_SECONDS = 0.6  # of timed steps for one method in one round, about
# Relative, over all layers: sums in another order, and compiled code that rounds less often.
ROUNDING = {torch.float32: 1e-2, torch.bfloat16: 0.1, torch.float16: 0.1}
# Makes plans, without torch: python -c WORKER profile.json keep,recompute BYTES BYTES ...
# They go to standard output, and what a solver may have to say does not.
WORKER = """
import os, pickle, sys, time
from remat.errors import BudgetError
from remat.planner import schedule
from remat.records import Action, Profile

out = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)
path, allow, *budgets = sys.argv[1:]
profile, actions = Profile.load(path), [Action(name) for name in allow.split(",")]
for budget_bytes in map(int, budgets):
    begin = time.perf_counter()
    try:
        found = schedule(profile, budget_bytes, allow=actions)
    except BudgetError as error:
        found = (str(error), vars(error))
    pickle.dump((budget_bytes, found, time.perf_counter() - begin), out)
    out.flush()
"""
Result = dict[str, Any]


@dataclass
class Lane:
    """What is known of one method so far."""

    label: str
    group: str
    compiled: bool
    ours: bool
    why: str = ""
    reading: Reading | None = None
    rounds: list[list[float]] = field(default_factory=list)  # seconds of steps
    facts: Result = field(default_factory=dict)

    @property
    def seconds(self) -> list[float]:
        return [seconds for found in self.rounds for seconds in found]

    def cost(self) -> float | None:
        if self.reading is None:
            return None
        return statistics.median(self.seconds) if CUDA and self.seconds else self.reading.cost


@dataclass(frozen=True)
class Base:
    """What ratios are to: the plain step, or its prediction where it does not run."""

    peak_bytes: int
    cost: float
    measured: bool


class Race:
    def __init__(
        self, name: str, workload: Workload, options: argparse.Namespace, write: Callable[[Result], None]
    ) -> None:
        self.name, self.workload, self.options, self._write = name, workload, options, write
        self.begin = time.perf_counter()
        self.job: Job = (workload.small if options.small else workload.full)()
        self.lanes: dict[str, Lane] = {}
        self.methods: list[Method] = []
        self.predicted: Base | None = None
        self.plain_gradients: list[torch.Tensor] = []
        self.draws_random_numbers = False  # the plain step
        self.profiles: Result = {}
        self.planners: dict[str, Planner] = {}
        self.restore_gradients()

    # -- what is known

    @property
    def base(self) -> Base | None:
        plain = self.lanes.get("plain")
        if plain is None or plain.reading is None:
            return self.predicted
        cost = plain.cost()
        assert cost is not None
        return Base(plain.reading.peak_bytes, cost, measured=True)

    def row(self, lane: Lane) -> Row:
        share = time_ratio = None
        cost, base = lane.cost(), self.base
        if lane.reading is not None and cost is not None and base is not None:
            share = lane.reading.peak_bytes / base.peak_bytes
            time_ratio = cost / base.cost if base.cost else None
        relative = relative_to(self.lanes["plain"].rounds, lane.rounds) if "plain" in self.lanes else []
        if relative and CUDA:
            time_ratio = statistics.median(statistics.median(found) for found in relative)
        seconds = lane.seconds or ([lane.reading.cost] if CUDA and lane.reading is not None else [])
        return Row(
            lane.label, lane.group, lane.compiled, lane.ours, share, time_ratio,
            peak_bytes=None if lane.reading is None else lane.reading.peak_bytes,
            seconds=statistics.median(seconds) if seconds else None,
            spread=spread_of([ratio for found in relative for ratio in found] or lane.seconds),
            runs=len(lane.seconds), why=lane.why, facts=dict(lane.facts),
        )  # fmt: skip

    def rows(self) -> list[Row]:
        return [self.row(lane) for lane in self.lanes.values()]

    def result(self) -> Result:
        base = self.base
        return {
            "about": self.about,
            "size": "small" if self.options.small else "full",
            "cost_unit": COST_UNIT,
            "base": None if base is None else vars(base),
            "rows": [row.as_json() for row in self.rows()],
            "profiles": self.profiles,
            "verdict": verdict(self.rows(), self.targets()).as_json(),
            "rest_seconds": self.options.rest,
            "seconds": time.perf_counter() - self.begin,
        }

    @property
    def about(self) -> str:
        return f"small shapes of: {self.workload.about}" if self.options.small else self.workload.about

    def targets(self) -> tuple[Target, ...]:
        return () if self.options.small else TARGETS.get(self.name, ())

    def write(self) -> None:
        self._write(self.result())

    def say(self, text: str) -> None:
        print(f"{time.perf_counter() - self.begin:6.1f} s  {self.name}  {text}", flush=True)

    # -- one method

    def lane_of(self, method: Method | Absent) -> Lane:
        ours = isinstance(method, Method) and method.ours
        facts = dict(method.facts) if isinstance(method, Method) else {}
        return Lane(method.label, method.group, method.compiled, ours, facts=facts)

    def absent(self, method: Method | Absent, why: str) -> None:
        lane = self.lane_of(method)
        lane.why = why
        self.lanes[method.label] = lane
        self.say(f"{method.label}: {why}")
        self.write()

    def rounds_seconds(self) -> float:
        """How long the rounds will take, about."""
        steps, total = 1 + self.steps_per_round(), 0.0
        raced = with_plain([method for method in self.methods if not method.slow])
        for lane in (self.lanes[method.label] for method in raced):
            put_on = 0.0 if lane.compiled else min(lane.facts["first_step_seconds"], 3.0)
            total += steps * (lane.cost() or 0.0) + put_on + self.options.rest
        return float(self.options.rounds * total) if CUDA else 0.0

    def steps_per_round(self) -> int:
        base = self.base
        if self.options.steps is not None or base is None or not CUDA:
            return int(self.options.steps or 1)
        return max(2, min(10, round(ROUND_SECONDS / max(base.cost, 1e-3))))

    def late(self, group: str = "") -> bool:
        """Would the limit be passed with one more of this group, which takes as long as the last one did?"""
        if self.options.limit is None:
            return False
        group_lanes = [lane for lane in self.lanes.values() if lane.group == group]
        last = group_lanes[-1].facts.get("first_step_seconds", 0.0) if group_lanes else 0.0
        spent = time.perf_counter() - self.begin
        return bool(spent + self.rounds_seconds() + last > self.options.limit)

    def prepare(self, method: Method) -> Reading | None:
        """Compile, warm up, read peak and a first time. What fails is recorded and left out of the race."""
        if self.late(method.group):
            self.absent(method, f"not run: the limit of {self.options.limit:g} s")
            return None
        begin = time.perf_counter()
        lane = self.lane_of(method)
        try:
            with method.context():
                with method.compiling():
                    self.job.step()
                synchronize()
                if method.group == "plain":  # the device's clocks rise, its libraries load
                    self.job.step()
                lane.facts["first_step_seconds"] = round(time.perf_counter() - begin, 3)
                if method.compiled:  # what the first run has left to later ones
                    self.job.step()
                lane.reading = read(self.job.step)
                if self.options.gradients:
                    lane.facts["gradients"] = self.compare_gradients(method)
        except Exception as error:
            why = one_line(error)
        else:
            why = ""
        if why or method.slow:  # outside of the handler: its traceback holds the step's memory
            clean()
            self.restore_gradients()
        if why:
            self.absent(method, f"failed: {why}")
            return None
        if lane.reading is not None and lane.reading.operations is not None:
            lane.facts["operations"] = lane.reading.operations
        lane.facts |= method.facts  # with what was counted while it ran
        self.lanes[method.label] = lane
        self.methods.append(method)
        row = self.row(lane)
        if row.measured or row.fault:
            self.say(f"{method.label}: {row.reason or f'{row.time:.3f}x at {row.share:.3f}'}")
        self.write()
        return lane.reading

    def compare_gradients(self, method: Method) -> str:
        """Against the plain step's, random numbers seeded alike."""
        if method.group == "plain":
            self.plain_gradients = self.gradients(seed=1)
            otherwise = difference(self.plain_gradients, self.gradients(seed=2))
            self.draws_random_numbers = otherwise.startswith("different")
        if not self.plain_gradients:
            return "not compared: there is no plain step"
        if self.draws_random_numbers and method.compiled:
            return "not compared: compiled code draws other random numbers"
        found = self.gradients(seed=1)
        if len(found) != len(self.plain_gradients):
            return f"missing: {len(found)} of {len(self.plain_gradients)}"
        return difference(self.plain_gradients, found)

    def gradients(self, seed: int) -> list[torch.Tensor]:
        for parameter in self.job.trained:
            parameter.grad = None
        torch.manual_seed(seed)
        self.job.step()
        found = [p.grad.clone() for p in self.job.trained if p.grad is not None]
        self.restore_gradients()
        return found

    def restore_gradients(self) -> None:
        """Gradients are resident in every measurement."""
        for parameter in self.job.trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    # -- all of them

    def run(self, groups: Sequence[str]) -> Result:
        wanted = [group for group in GROUPS if group in groups]
        for place, group in enumerate(wanted):
            if group == "compiled" or (group in COMPILED and "compiled" not in wanted[:place]):
                self.prepare_at_peers()  # before what takes long: it is what eager peers are compared with
            try:
                self.prepare_group(group)
            except Exception as error:  # of making the methods: what each does when it runs is caught there
                why = one_line(error)
                self.absent(Absent(f"group {group}", group, why), f"failed: {why}")
        self.prepare_at_peers()
        self.prepare_reach()
        self.race()
        self.write()
        return self.result()

    def prepare_group(self, group: str) -> None:
        if group == "plain":
            self.prepare(Method("plain", group, nullcontext))
            return
        if group in OURS:
            self.prepare_ours(group)
            return
        for method in peers(self.job, group, self.options.backend, self.workload.attention):
            if isinstance(method, Absent):
                self.absent(method, method.why)
            else:
                self.prepare(method)

    def prepare_ours(self, group: str) -> None:
        made = Planner.of(self, group)
        if made is None:
            return
        self.planners[group] = made
        if group == "unfused":
            made.add_unfused(UNFUSED_SHARE)
            return
        if group == "one-graph":
            return  # a long compilation each: only where a peer is not beaten without
        how = "compiled" if group == "compiled" else "eager"
        asked = {target.share for target in self.targets() if target.how in (how, "any")}
        shares = sorted({*(self.workload.shares or SHARES), *asked}, reverse=True)
        with made.ahead(shares):
            for share in shares:
                made.add(share)

    def prepare_at_peers(self) -> None:
        """remat right at the peak of each peer that it does not clearly beat yet: that is the comparison."""
        for lane in [lane for lane in self.lanes.values() if not lane.ours and lane.group != "plain"]:
            peer = self.row(lane)
            for group in OURS_COMPILED if peer.compiled else ("remat",):
                made = self.planners.get(group)
                if made is None or not peer.measured or not self.unbeaten(peer, group):
                    continue
                assert peer.share is not None
                label = f"{made.prefix} {peer.share:.3f}, as {peer.label}"
                if peer.share >= made.least_share and label not in self.lanes:
                    made.add(peer.share, label)

    def prepare_reach(self) -> None:
        """remat at half of the lowest peer's peak, or the least that it can do: how far down it gets."""
        rows = [row for row in self.rows() if row.measured]
        peers = [row for row in rows if not row.ours and row.group != "plain"]
        lowest, made = min(peers, key=share_of, default=None), self.planners.get("remat")
        if lowest is None or made is None:
            return
        share = share_of(lowest) / REACH
        if share >= made.least_share and not any(row.ours and share_of(row) <= share for row in rows):
            made.add(share, f"{made.prefix} {share:.3f}, half of {lowest.label}")

    def unbeaten(self, peer: Row, group: str) -> bool:
        """Nothing of ours clearly beats it, and nothing of this group has been planned for its peak."""
        assert peer.share is not None
        assert peer.time is not None
        if not 0.02 <= peer.share <= 0.98:
            return False
        rivals = rivals_of(peer, self.rows())
        best = fastest_within(rivals, peer.share)
        if best is not None and best.time is not None and best.time <= CLEARLY * peer.time:
            return False
        near = (row.share for row in rivals if row.group == group and row.share is not None)
        return not any((1 - NEAR) * peer.share <= share <= peer.share for share in near)

    def race(self) -> None:
        """Every method in every round, in another order each time; compared within rounds."""
        order, raced = random.Random(0), [method for method in self.methods if not method.slow]
        steps = self.steps_per_round()
        for number in range(self.options.rounds):
            self.say(f"round {number + 1}: {len(raced)} methods, {steps} steps each")
            for method in raced:
                self.lanes[method.label].rounds.append([])
            for method in with_plain(order.sample(raced, len(raced))):
                lane = self.lanes[method.label]
                time.sleep(self.options.rest)
                try:
                    with method.context():
                        self.job.step()
                        lane.rounds[-1] += [seconds_of(self.job.step) for _ in range(steps)]
                except Exception as error:
                    lane.facts["failed_in_the_race"] = one_line(error)
                lane.facts |= method.facts
                if "failed_in_the_race" in lane.facts:
                    clean()
                    self.restore_gradients()
                self.write()


def with_plain(methods: Sequence[Method]) -> list[Method]:
    """The plain step before every few methods, instead of once: a device that grows hot on the way through a
    round, and slower, does so for it as for them."""
    plain = [method for method in methods if method.group == "plain"]
    others = [method for method in methods if method.group != "plain"]
    starts = range(0, max(len(others), 1), PLAIN_EVERY)
    return [method for start in starts for method in (*plain, *others[start : start + PLAIN_EVERY])]


@dataclass(frozen=True)
class Made:
    """What planning for a budget gave, and how long it took."""

    budget_bytes: int
    found: Plan | remat.BudgetError
    seconds: float

    def serves(self, budget_bytes: int, spare_bytes: int) -> bool:
        """Whether planning for another budget would give the same, but for bytes that may stay unused."""
        if budget_bytes == self.budget_bytes:
            return True
        if isinstance(self.found, remat.BudgetError):
            return self.found.needed > budget_bytes
        return self.found.predicted_peak_bytes <= budget_bytes <= self.budget_bytes + spare_bytes


class Workers:
    """Processes that plan for many budgets, each for some of them, one after another."""

    def __init__(self, of_budget: dict[int, subprocess.Popen[bytes]]) -> None:
        self.of_budget = of_budget
        self.made: dict[int, Made] = {}

    @staticmethod
    @contextmanager
    def planning(
        profile: Profile, allow: Sequence[Action], budgets: Sequence[int], count: int
    ) -> Iterator[Workers]:
        """They end with the context. Each is an interpreter of its own: CUDA does not survive a fork, and
        multiprocessing's spawn would import this file anew, with torch, which takes as long as a plan."""
        # Given at their start: libraries look when they are imported.
        environment = os.environ | {
            "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path),
        }  # fmt: skip
        actions = ",".join(action.value for action in allow)
        of_budget: dict[int, subprocess.Popen[bytes]] = {}
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            path = str(profile.save(Path(folder) / "profile.json"))
            for given in (budgets[first::count] for first in range(count)):
                command = [sys.executable, "-c", WORKER, path, actions, *map(str, given)]
                try:
                    worker = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
                except OSError:  # no room for one more
                    break
                stack.enter_context(worker)  # waits for it, once this has ended it
                stack.callback(worker.kill)
                of_budget |= dict.fromkeys(given, worker)
            yield Workers(of_budget)

    def nearest(self, budget_bytes: int) -> Made | None:
        """What was made for the budget nearest to this one; None if whoever was to make it has died."""
        asked = min(self.of_budget, key=lambda given: abs(given - budget_bytes), default=None)
        if asked is None:
            return None
        while asked not in self.made:
            pipe = self.of_budget[asked].stdout
            assert pipe is not None
            try:
                given, found, seconds = pickle.load(pipe)
            except Exception:  # half a plan may be any error
                return None
            if isinstance(found, tuple):
                message, fields = found
                found = remat.BudgetError(message, **fields)
            self.made[given] = Made(given, found, seconds)
        return self.made[asked]


class Planner:
    """Plans of one profile, each confirmed by a run, as `fit` does it."""

    def __init__(self, race: Race, group: str, profile: Profile) -> None:
        self.race, self.group, self.profile = race, group, profile
        self.prefix = PREFIX[group]
        self.resident = profile.step.resident + profile.step.gradients
        self.least_share = 0.0  # below it no plan was found
        self.excess = 0  # what measured peaks are above their predictions
        self.seen: dict[tuple[Any, ...], str] = {}
        self.plans: dict[str, Plan] = {}  # as they ran, by label
        self.workers: Workers | None = None

    @staticmethod
    def of(race: Race, group: str) -> Planner | None:
        """With the profile, which is made once; what fails is recorded."""
        compiler = race.options.backend if group in OURS_COMPILED else False
        begin = time.perf_counter()
        if race.late():
            race.absent(
                Absent(f"{group} profile", group, ""), f"not run: the limit of {race.options.limit:g} s"
            )
            return None
        there = race.planners.get(OF_PROFILE.get(group, ""))
        try:
            profile = there.profile if there is not None else remat.profile(
                race.job.model, race.job.batch, loss=race.job.loss, accumulate=True, allow=OURS[group],
                compile=compiler,
            )  # fmt: skip
            profile = replace(profile, one_graph=group == "one-graph")
            anything = remat.plan(profile, 1 << 60, allow=OURS[group])
        except Exception as error:
            why = one_line(error)
        else:
            why = ""
        if why:
            clean()
            race.absent(Absent(f"{group} profile", group, "", group in OURS_COMPILED), f"failed: {why}")
            return None
        clean()
        made = Planner(race, group, profile)
        race.profiles[group] = {
            "seconds": time.perf_counter() - begin,
            "kinds": len(profile.kinds),
            "compiler": [kind.compiler for kind in profile.kinds],
            "menus": [len(kind.menu) for kind in profile.kinds],
            "link": None if profile.link is None else vars(profile.link),
            "notes": list(profile.notes),
        }
        if race.options.profiles and there is None:
            folder = Path(race.options.profiles)
            folder.mkdir(parents=True, exist_ok=True)
            profile.save(folder / f"profile-{race.name}-{group}.json")
        if race.base is None:  # the plain step does not run here
            race.predicted = Base(
                anything.plain_peak_bytes - made.resident, anything.plain_seconds, measured=False
            )
        race.say(
            f"{made.prefix}: profile in {race.profiles[group]['seconds']:.1f} s; {'; '.join(profile.notes)}"
        )
        return made

    @contextmanager
    def ahead(self, shares: Sequence[float]) -> Iterator[None]:
        """Within it plans for these shares are made beside each other, with the excess that is known now."""
        base = self.race.base
        peak_bytes = 0 if base is None else base.peak_bytes
        budgets = list(dict.fromkeys(self.budget_bytes(int(share * peak_bytes)) for share in shares))
        count = min(len(budgets), self.race.options.planners)
        if count < 2:
            yield
            return
        try:
            with Workers.planning(self.profile, OURS[self.group], budgets, count) as self.workers:
                yield
        finally:
            self.workers = None

    def budget_bytes(self, limit_bytes: int) -> int:
        return self.resident + limit_bytes - self.excess

    def plan(self, budget_bytes: int) -> Plan:
        return remat.plan(self.profile, budget_bytes, allow=OURS[self.group])

    def planned(self, budget_bytes: int, label: str) -> Plan:
        """The plan that was made ahead, if it is as good as one made now."""
        spare_bytes = int(SPARE * (budget_bytes - self.resident))
        made = None if self.workers is None else self.workers.nearest(budget_bytes)
        if made is None and self.workers is not None:
            self.race.say(f"{label}: planned here, since who was to do it has died")
        if made is None or not made.serves(budget_bytes, spare_bytes):
            made = self.made_now(budget_bytes)
        if made.seconds > 1:
            self.race.say(f"{label}: planned in {made.seconds:.1f} s")
        if isinstance(made.found, remat.BudgetError):
            raise made.found
        return made.found

    def made_now(self, budget_bytes: int) -> Made:
        begin = time.perf_counter()
        found: Plan | remat.BudgetError
        try:
            found = self.plan(budget_bytes)
        except remat.BudgetError as error:
            found = error
        return Made(budget_bytes, found, time.perf_counter() - begin)

    def add(self, share: float, label: str = "") -> None:
        """A plan whose measured peak is at most this share of the plain one; tighter until it is so. What the
        last plan's peak was off is taken into account from the start."""
        race, label = self.race, label or f"{self.prefix} {share:g}"
        base = race.base
        if base is None:
            return
        limit_bytes = int(share * base.peak_bytes)
        if race.late(self.group):  # planning takes seconds, too
            race.absent(self.method(label, None, share), f"not run: the limit of {race.options.limit:g} s")
            return
        for attempt in range(TRIES):
            try:
                plan = self.planned(self.budget_bytes(limit_bytes), label)
            except remat.BudgetError as error:
                if attempt == 0:
                    least = (error.needed - self.resident) / base.peak_bytes
                    self.least_share = max(self.least_share, share)
                    race.absent(self.method(label, None, share), f"out of reach: {least:.3f} is the least")
                    self.add_least(error.needed)
                return
            twin = self.seen.get(self.key(plan))
            if attempt > 0 and (twin is not None or race.late(self.group)):
                return  # what was measured stays, over its budget as it is
            if twin is not None:
                race.absent(self.method(label, plan, share), f"not run: the same plan as {twin}")
                return
            race.methods = [method for method in race.methods if method.label != label]
            reading = race.prepare(self.method(label, plan, share))
            if reading is None:
                return
            self.seen[self.key(plan)] = label
            self.plans[label] = plan
            self.excess = reading.peak_bytes - (plan.predicted_peak_bytes - self.resident)
            within = reading.peak_bytes <= limit_bytes * (1 + PIECES)
            race.lanes[label].facts["within"] = within
            if within:
                return

    def add_least(self, needed_bytes: int) -> None:
        """The lowest that it can do, once."""
        label = f"{self.prefix} least"
        if label in self.race.lanes or self.race.late():
            return
        plan = self.planned(needed_bytes, label)
        if self.key(plan) in self.seen:
            return
        self.seen[self.key(plan)] = label
        self.race.prepare(self.method(label, plan, None))

    def add_unfused(self, share: float) -> None:
        """The plan of the row for this share once more, every operation of its recipes a kernel of its own:
        the difference is what fused replay gains."""
        label, row = f"{self.prefix} {share:g}", f"{PREFIX['remat']} {share:g}"
        there = self.race.planners.get("remat")
        fused = None if there is None else there.plans.get(row)
        chosen = [] if fused is None else [fused.entry(call).recipe for call in range(len(fused.choices))]
        if fused is None:
            why = f"not run: there is no row {row}"
        elif not any(recipe.fused for recipe in chosen if recipe is not None):
            why = "not run: nothing is fused in that plan"
        else:
            self.race.prepare(self.method(label, one_by_one(fused), share))
            return
        self.race.absent(self.method(label, None, share), why)

    @staticmethod
    def key(plan: Plan) -> tuple[Any, ...]:
        profile = plan.profile
        by_classes = profile.chunked and profile.head is not None and profile.head.columns
        return plan.choices, profile.chunked, by_classes, profile.stem_sent, len(profile.kinds)

    def method(self, label: str, plan: Plan | None, share: float | None) -> Method:
        compiled = self.group in OURS_COMPILED
        if plan is None:
            return Method(label, self.group, nullcontext, compiled, ours=True)
        ways: dict[str, int] = {}
        for call in range(len(plan.choices)):
            entry = plan.entry(call)
            way = f"{how(entry)}{' + host' if entry.host_bytes else ''}"
            ways[way] = ways.get(way, 0) + 1
        facts: Result = {
            "budget_share": share,
            "predicted_time": plan.predicted_seconds / plan.plain_seconds,
            "predicted_peak_bytes": plan.predicted_peak_bytes - self.resident,
            "regions": ways,
            "chunked": plan.profile.chunked,
            "host_bytes": host_bytes(plan.profile, plan.choices),
            "stem_sent": plan.profile.stem_sent,
        }

        @contextmanager
        def applied() -> Iterator[None]:
            with remat.apply(self.race.job.model, plan) as handle:
                yield
                fallbacks = sum(region.counts.fallbacks for region in handle.regions)
                facts["fallbacks"] = max(fallbacks, facts.get("fallbacks", 0))  # of any round
                if handle.engine is not None:
                    facts["pinned_bytes"] = handle.engine.counts.pinned_bytes
                    facts["late_fetches"] = handle.engine.counts.late_fetches

        return Method(label, self.group, applied, compiled, ours=True, facts=facts)


def how(entry: Entry) -> str:
    """Chunks of a part, or pieces of all of the region, by whose size they differ much."""
    if entry.cut:
        return f"pieces of {entry.cut[1]}"
    return (Mode.CHUNK if entry.in_chunks else Mode.FULL if entry.mode is Mode.HOSTED else entry.mode).value


def one_by_one(plan: Plan) -> Plan:
    """The same plan without fused replay."""

    def unfused(entry: Entry) -> Entry:
        return replace(entry, recipe=entry.recipe and replace(entry.recipe, fused=False))

    kinds = tuple(replace(kind, menu=tuple(map(unfused, kind.menu))) for kind in plan.profile.kinds)
    return replace(plan, profile=replace(plan.profile, kinds=kinds))


def difference(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> str:
    """Bits, or the largest relative difference of any gradient: "within" rounding, or "different"."""
    if all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)):
        return "equal to the bit"
    # A gradient that is zero but for rounding (of attention's key bias) has no scale of its own.
    least = 1e-3 * max(float(a.float().norm()) for a in expected)
    worst = 0.0
    for a, b in zip(expected, found, strict=True):
        off = float((a.float() - b.float()).norm()) / max(float(a.float().norm()), least)
        worst = max(worst, off if math.isfinite(off) else math.inf)
    rounding = max(ROUNDING.get(a.dtype, 0.0) for a in expected)
    return f"{'within' if worst <= rounding else 'different:'} {worst:.1e}"


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


# ------------------------------------------------------------------------------------------------ files


def environment() -> Result:
    def of(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    names = ("transformers", "triton", "torchvision", "trl", "liger-kernel", "peft", "diffusers")
    return {
        "run": uuid.uuid4().hex[:12],
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if CUDA else "cpu",
        "versions": {name: of(name) for name in names},
        "commit": commit(),
    }


def commit() -> str:
    """Of the working tree; with FRONTIER_COMMIT on a machine to which it was copied without its history."""
    given = os.environ.get("FRONTIER_COMMIT")
    if given:
        return given
    folder = Path(__file__).parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=folder, capture_output=True, text=True
        )
        changed = subprocess.run(["git", "status", "--porcelain"], cwd=folder, capture_output=True, text=True)
    except OSError:
        return "unknown"
    if head.returncode:
        return "unknown"
    return head.stdout.strip() + (" with changes" if changed.stdout.strip() else "")


class Out:
    """The results file: a workload's rows are those of one run. Other workloads' stay, each with the
    environment of its own run; an earlier run of the same workload is set aside."""

    def __init__(self, path: str | None) -> None:
        self.path = None if path is None else Path(path)
        self.environment = environment()
        self.content: Result = {"format": FORMAT, "workloads": {}, "superseded": []}
        if self.path is not None and self.path.exists():
            found = json.loads(self.path.read_text(encoding="utf-8"))
            if found.get("format") != FORMAT:
                raise SystemExit(
                    f"{self.path} has format {found.get('format')!r}, not {FORMAT}; write elsewhere"
                )
            self.content = found

    def put(self, name: str, result: Result) -> None:
        earlier = self.content["workloads"].get(name)
        if earlier is not None and earlier["environment"]["run"] != self.environment["run"]:
            self.content["superseded"].append({"workload": name, **earlier})
        self.content["workloads"][name] = {"environment": self.environment, **result}
        self.write()

    def put_longest(self, result: Result) -> None:
        self.content["longest"] = {"environment": self.environment, **result}
        self.write()

    def write(self) -> None:
        if self.path is not None:  # whole or not at all: the process may be killed at any time
            self.path.parent.mkdir(parents=True, exist_ok=True)
            beside = self.path.with_suffix(".writing")
            beside.write_text(json.dumps(self.content, indent=1), encoding="utf-8")
            beside.replace(self.path)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", default="llama-1.3b", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--methods", help=f"groups, instead of the workload's own: of {', '.join(GROUPS)}")
    parser.add_argument("--rounds", type=int, default=2 if CUDA else 0)
    parser.add_argument(
        "--steps", type=int,
        help=f"timed steps of a method in one round; {ROUND_SECONDS:g} seconds' by default, about",
    )  # fmt: skip
    parser.add_argument("--rest", type=float, default=0.0, help="idle seconds before a method is timed")
    parser.add_argument("--limit", type=float, help="seconds for one workload, the rounds included, about")
    parser.add_argument("--out", help="JSON, written after every method")
    parser.add_argument(
        "--small", action="store_true", default=not CUDA, help="small shapes, for any machine"
    )
    parser.add_argument(
        "--gradients", action="store_true", default=not CUDA, help="compare each method's gradients"
    )
    parser.add_argument(
        "--backend", default="inductor" if CUDA else "aot_eager",
        help="of torch.compile, remat's and the peers'; what inductor's code allocates is not seen on a host",
    )  # fmt: skip
    parser.add_argument("--profiles", help="a folder for remat's profiles, to plan again without the device")
    parser.add_argument(
        "--planners", type=int, default=min(8, (os.cpu_count() or 1) - 1) if CUDA else 0,
        help="processes that make remat's plans for all shares at once; with 0 or 1 this one makes each when "
        "it is needed (%(default)s here)",
    )  # fmt: skip
    parser.add_argument("--longest", action="store_true", help="instead: the longest context that trains")
    parser.add_argument("--cap", help="with --longest: the memory of a smaller card, as 16GiB")
    options = parser.parse_args(arguments)
    methods = "plain" if options.longest or not options.methods else options.methods
    for given, known in ((options.workloads, WORKLOADS), (methods, GROUPS)):
        unknown = [name for name in given.split(",") if name not in known]
        if unknown:
            parser.error(f"{', '.join(unknown)}: known are {', '.join(known)}")
    return options


def longest(options: argparse.Namespace, out: Out) -> None:
    """See longest.py. One sequence of the 1.3B shape, whatever its length."""
    from longest import longest as find

    workload = WORKLOADS["long-context"]
    only = options.methods.split(",") if options.methods else ()
    result = find(
        workload.small if options.small else partial(llama, *LLAMA_1B, 1, 128), options.cap, options.limit,
        options.backend, only, options.small, out.put_longest,
    )  # fmt: skip
    out.put_longest(result)


def main(arguments: Sequence[str] | None = None) -> Result:
    options = parsed(arguments)
    out = Out(options.out)
    if options.longest:
        longest(options, out)
        return out.content
    for name in options.workloads.split(","):
        workload = WORKLOADS[name]
        groups = options.methods.split(",") if options.methods else workload.groups
        try:
            race = Race(name, workload, options, partial(out.put, name))
        except Exception as error:
            out.put(name, {"about": workload.about, "rows": [], "failed": one_line(error)})
            print(f"{name}: {one_line(error)}", flush=True)
            continue
        race.run(groups)
        print(f"\n{name}: {race.about}\n{table(race.rows())}\n", flush=True)
        print(lines_of(verdict(race.rows(), race.targets())) + "\n", flush=True)
        del race
        clean()
    return out.content


if __name__ == "__main__":
    main()
