"""Compiled blocks with planned saved sets against torch.compile's own ways to save memory.

    PYTHONPATH=src python benchmarks/compiled.py --workloads llama-1.3b --out benchmarks/results/compiled.json

Per workload, in one process: the plain eager step; torch.compile of the whole model and of each block
("regional"), each with activation_memory_budget 1.0, 0.5, 0.25 and 0.0; compiled blocks inside torch's
checkpoint; and remat with compile=True at several shares of the plain step's activation peak, and, fitted
with compile="whole" at some (--one-graph), as one graph ("remat-whole"). On the launch-bound model that is at
0.6 of the plain step's peak and at 0.6 of torch.compile's own, which is lower.

Times are CUDA events after warm-up, every method in every round in shuffled order and compared with plain
steps right before it: compiled steps take the device to the limit of its power, where its clock slows down,
and what follows them, too. With --rest it has been idle for so many seconds before each method and before the
plain steps that a round's methods are compared with. `time_as_prepared` is the median of eight steps right
after a method was prepared, over the plain step's, timed in the same way: while the compiler works, the
device is idle. `seconds_by_round` has every step, those eight first. The peak is the allocator's above what
is resident (parameters and gradients are). The file is written after every method, so that a run that is cut
short loses nothing; a method that fails is recorded with its error; with --limit no further method is
prepared after so many seconds, and the rest is recorded as not run.

Compiling whole models takes most of a run. Several processes at once can do that before, each with
`--methods whole --stock-budgets 0.5 --rounds 0`: the compiler's cache is on disk, and only the first step's
seconds of those methods are then none of a fresh compilation.

On a machine without accelerator it runs small shapes, so that it cannot rot.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gauge import bytes_in_use, clean, peak_of, relative_to, seconds_of, spread_of, synchronize
from peers import compiled_alone, forwards, stock_budget
from torch import nn
from torch.utils.checkpoint import checkpoint
from workloads import CUDA, DEVICE, LLAMA_1B, Job, gpt2, llama, vit

import remat
from remat.codec import to_json
from remat.profiling import storage_bytes
from remat.trace.discover import find_blocks
from remat.trees import tensors

STOCK_BUDGETS = (1.0, 0.5, 0.25, 0.0)
SHARES = (0.99, 0.45, 0.25, 0.10, 0.04)
WHOLE_SHARE = 0.45
FIRST_STEPS = 8  # timed right after a method was prepared
SHOWN = (
    "time_as_prepared", "predicted_time", "predicted_share", "first_step_seconds", "fallbacks", "one_graph"
)  # fmt: skip
GROUPS = ("plain", "remat", "remat-whole", "regional", "checkpoint", "whole")


# ------------------------------------------------------------------------------------------- workloads


WORKLOADS: dict[str, Callable[[], Job]] = {
    "llama-1.3b": lambda: llama(*LLAMA_1B, 4, 4096),
    "launch-bound": lambda: llama(12, 768, 2048, 12, 32000, 4, 256),
    "vit-l16": lambda: vit(24, 1024, 16, 224, 16, 128),
    "gpt2-774m": lambda: gpt2(36, 1280, 20, 50257, 8, 1024),
    "tiny-llama": lambda: llama(3, 64, 176, 4, 256, 4, 64),
    "tiny-vit": lambda: vit(3, 64, 4, 32, 8, 8),
    "tiny-gpt2": lambda: gpt2(3, 64, 4, 256, 4, 64),
}
LAUNCH_BOUND_SHARE = 0.6  # of the plain step's peak, and of torch.compile's own


# ---------------------------------------------------------------------------------------------- the race


@dataclass
class Method:
    """`context` puts it on the model; `compiling` surrounds its first step."""

    label: str
    group: str
    context: Callable[[], Any]
    compiling: Callable[[], Any] = nullcontext
    facts: dict[str, Any] = field(default_factory=dict)


class Race:
    def __init__(
        self, name: str, options: argparse.Namespace, write: Callable[[dict[str, Any]], None]
    ) -> None:
        self.name, self.options, self._write = name, options, write
        self.begin = time.perf_counter()
        job = WORKLOADS[name]()
        self.model, self.batch = job.model, job.batch
        self.blocks = [block.module for block in find_blocks(self.model)]
        self.methods: list[Method] = []
        self.times: dict[str, list[list[float]]] = {}  # by round, the first of which is preparation
        self.beside: dict[str, list[list[float]]] = {}  # the plain steps before them, by round
        self.result: dict[str, Any] = {"methods": {}}
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def step(self) -> None:
        self.model(**self.batch).loss.backward()

    def late(self) -> bool:
        return self.options.limit is not None and time.perf_counter() - self.begin > self.options.limit

    def record(self, label: str, **facts: Any) -> None:
        self.result["methods"].setdefault(label, {}).update(facts)
        self._write(self.result)

    def add(self, method: Method) -> bool:
        """Compile, warm up, read the peak and a first time. What fails is recorded and left out."""
        if self.late():
            self.record(method.label, not_run=f"after {self.options.limit} s")
            return False
        begin = time.perf_counter()
        try:
            with method.context():
                with method.compiling():
                    self.step()
                synchronize()
                first = time.perf_counter() - begin
                self.step()
                clean()
                peak = peak_of(self.step)
                self.times[method.label] = [[seconds_of(self.step) for _ in range(FIRST_STEPS)]]
                plain = self.times.get("plain", [])
                self.beside[method.label] = plain if method.label == "plain" else plain[:1]
        except Exception as error:
            self.record(method.label, failed=f"{type(error).__name__}: {str(error)[:300]}")
            print(
                f"{self.name}: {method.label} failed: {type(error).__name__}: {str(error)[:300]}", flush=True
            )
            clean()
            return False
        self.methods.append(method)
        self.record(method.label, first_step_seconds=first, peak_bytes=peak, **method.facts)
        self._show(method.label)
        return True

    def rounds(self) -> None:
        order = random.Random(0)
        for _ in range(self.options.rounds):
            rested = self._rested() if self.options.rest and "plain" in self.times else None
            for method in order.sample(self.methods, len(self.methods)):
                if self.beside[method.label] and method.label != "plain":
                    self.beside[method.label].append(rested or self._steps(2, self.options.runs))
                time.sleep(self.options.rest)
                with method.context():
                    self.times[method.label].append(self._steps(2, self.options.runs))
                self._summarise(method.label)
        for method in self.methods:
            self._show(method.label)

    def _rested(self) -> list[float]:
        """Plain steps of a device that has been idle, as it is before every method."""
        time.sleep(self.options.rest)
        return self._steps(2, self.options.runs)

    def _steps(self, untimed: int, timed: int) -> list[float]:
        for _ in range(untimed):
            self.step()
        return [seconds_of(self.step) for _ in range(timed)]

    def _summarise(self, label: str) -> None:
        rounds, plain = self.times[label], self.beside[label]
        row = self.result["methods"][label]
        every = [seconds for found in rounds[1:] or rounds for seconds in found]
        facts: dict[str, Any] = {"seconds": statistics.median(every), "runs": len(every)}
        facts["seconds_by_round"] = [[round(seconds, 5) for seconds in found] for found in rounds]
        facts["spread"] = spread_of(every)
        if plain:
            raced = relative_to(plain[1:], rounds[1:]) or relative_to(plain, rounds)
            facts["time"] = statistics.median(statistics.median(found) for found in raced)
            facts["time_by_round"] = [statistics.median(found) for found in raced]
            facts["spread"] = spread_of([ratio for found in raced for ratio in found])
            facts["time_as_prepared"] = statistics.median(rounds[0]) / statistics.median(plain[0])
            facts["share"] = row["peak_bytes"] / self.result["methods"]["plain"]["peak_bytes"]
        self.record(label, **facts)

    def _show(self, label: str) -> None:
        self._summarise(label)
        row = self.result["methods"][label]
        extra = ", ".join(
            f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}"
            for key, value in row.items()
            if key in SHOWN
        )
        print(
            f"{self.name:<13}{label:<30}{row.get('time', 1):.3f}x  peak {row.get('share', 1):.3f}  "
            f"{row['seconds'] * 1e3:8.2f} ms  spread {row['spread']:.3f}  {extra}",
            flush=True,
        )

    # -- peers

    def add_plain(self) -> None:
        self.add(Method("plain", "plain", nullcontext))

    def add_regional(self, budgets: tuple[float, ...]) -> None:
        for budget in budgets:
            label = f"regional {budget}"
            run = compiled_alone(f"{self.name} {label}", self.options.stock_backend, fullgraph=True)
            self.add(Method(label, "regional", partial(self._regional, run), partial(stock_budget, budget)))

    def _regional(self, run: Callable[..., Any]) -> Any:
        return forwards(self.blocks, lambda module: partial(run, type(module).forward, module))

    def add_checkpoint(self) -> None:
        run = compiled_alone(f"{self.name} checkpoint", self.options.stock_backend, fullgraph=True)

        def around(module: nn.Module) -> Callable[..., Any]:
            inner = partial(run, type(module).forward, module)
            return partial(checkpoint, inner, use_reentrant=False)

        self.add(Method("regional in checkpoint", "checkpoint", lambda: forwards(self.blocks, around)))

    def add_whole(self, budgets: tuple[float, ...]) -> None:
        for budget in budgets:
            label = f"whole {budget}"
            run = compiled_alone(f"{self.name} {label}", self.options.stock_backend)
            context = partial(forwards, [self.model], partial(self._whole, run))
            self.add(Method(label, "whole", context, partial(stock_budget, budget)))

    def _whole(self, run: Callable[..., Any], model: nn.Module) -> Callable[..., Any]:
        return partial(run, type(model).forward, model)

    # -- remat

    def add_remat(self) -> None:
        wanted = self.options.methods.split(",")
        in_one_graph = {share: float(share) for share in self.options.one_graph.split(",")}
        if self.name == "launch-bound":
            in_one_graph = {f"{LAUNCH_BOUND_SHARE}": LAUNCH_BOUND_SHARE} | self._below_stock()
        if "remat" in wanted:
            shares = {f"{share}": share for share in SHARES}
            self._add_shares(shares | (in_one_graph if self.name == "launch-bound" else {}))
        if "remat-whole" in wanted:
            for label, share in in_one_graph.items():
                self._add_one_graph(share, f"remat whole {label}")

    def _add_shares(self, shares: dict[str, float]) -> None:
        begin = time.perf_counter()
        allow = ["keep", "recompute", "chunk", *(["offload"] if self.options.offload else [])]
        try:
            profile = remat.profile(
                self.model, self.batch, accumulate=True, compile=self.options.backend, allow=allow
            )
        except Exception as error:
            self.record("remat profile", failed=f"{type(error).__name__}: {str(error)[:300]}")
            print(f"{self.name}: remat.profile failed: {type(error).__name__}: {error}", flush=True)
            return
        seconds = time.perf_counter() - begin
        self.result["profile"] = {
            "seconds": seconds,
            "notes": list(profile.notes),
            "compiler": profile.kinds[0].compiler,
            "menu": [
                {
                    "mode": entry.mode.value,
                    "resident_bytes": entry.resident_bytes,
                    "forward_peak_bytes": entry.forward_peak_bytes,
                    "backward_peak_bytes": entry.backward_peak_bytes,
                    "extra_seconds": entry.extra_seconds,
                    "host_bytes": entry.host_bytes,
                    "gradient_gap": entry.gradient_gap,
                }
                for entry in profile.kinds[0].menu
            ],
        }
        self._write(self.result)
        print(f"{self.name}: profile {seconds:.1f} s; {'; '.join(profile.notes)}", flush=True)
        if self.options.out:
            path = Path(self.options.out).with_name(f"compiled-profile-{self.name}.json")
            path.write_text(to_json(profile), encoding="utf-8")
        for label, share in shares.items():
            self._add_share(profile, share, allow, f"remat {label}")

    def _below_stock(self) -> dict[str, float]:
        """0.6 of torch.compile's own peak, as a share of the plain step's; nothing if that did not run."""
        peaks = {label: row.get("peak_bytes") for label, row in self.result["methods"].items()}
        stock, plain = peaks.get("whole 1.0") or peaks.get("regional 1.0"), peaks.get("plain")
        if stock is None or plain is None:
            return {}
        return {f"{LAUNCH_BOUND_SHARE} of torch.compile's peak": LAUNCH_BOUND_SHARE * stock / plain}

    def _add_share(self, profile: remat.Profile, share: float, allow: list[str], label: str) -> None:
        """Plan for a share of the plain peak; where the measured peak is above it, once more with less."""
        plain = self.result["methods"].get("plain", {}).get("peak_bytes")
        wanted = share
        for attempt in range(3):
            try:
                plan = remat.plan(profile, activations=wanted, allow=allow)
            except remat.BudgetError as error:
                self._refused(label, error)
                return
            if not self.add(self._planned(label, plan, wanted)) or plain is None:
                return
            over = self.result["methods"][label]["peak_bytes"] / plain - share
            if attempt == 2 or over <= 0.002 * share:
                return
            self.methods.pop()
            wanted = min(max(wanted - 1.05 * over, 0.001), 1.0)

    def _add_one_graph(self, share: float, label: str) -> None:
        """As `fit` finds it, which measures what the compiled head takes: with the head in the graph, or the
        trunk as one graph with head and loss in chunks."""
        plain = self.result["methods"].get("plain", {}).get("peak_bytes")
        if self.late() or plain is None:
            why = "without the plain step's peak" if plain is None else f"after {self.options.limit} s"
            self.record(label, not_run=why)
            return
        # The peak is measured above what is there before a step: workspaces of libraries, too.
        budget = max(self._held_bytes(), bytes_in_use()) + int(share * plain)
        allow = ["keep", "recompute", "chunk"]
        begin = time.perf_counter()
        try:
            handle = remat.fit(
                self.model, self.batch, budget, compile=f"whole+{self.options.backend}", allow=allow
            )
        except remat.RematError as error:
            self._refused(label, error)
            return
        plan = handle.plan
        handle.remove()
        method = self._planned(label, plan, share)
        method.facts |= {
            "fit_seconds": time.perf_counter() - begin,
            "one_graph": [root or "the model" for root in plan.profile.graph_roots],
            "notes": list(plan.profile.notes),
        }
        self.add(method)

    def _held_bytes(self) -> int:
        parameters = list(self.model.parameters())
        gradients = (p.grad for p in parameters if p.grad is not None)
        held = (*parameters, *self.model.buffers(), *gradients, *tensors(self.batch))
        return storage_bytes(held, torch.device(DEVICE))

    def _refused(self, label: str, error: remat.RematError) -> None:
        self.record(label, failed=f"{type(error).__name__}: {str(error)[:300]}")
        print(f"{self.name}: {label}: {error}", flush=True)

    def _planned(self, label: str, plan: remat.Plan, wanted: float) -> Method:
        ways = {}
        for index in range(len(plan.choices)):
            entry = plan.entry(index)
            way = f"{entry.mode.value} {entry.resident_bytes / 2**20:.0f} MiB"
            way += f" + {entry.host_bytes / 2**20:.0f} on the host" if entry.host_bytes else ""
            ways[way] = ways.get(way, 0) + 1
        resident = plan.profile.step.resident + plan.profile.step.gradients
        facts = {
            "planned_share": wanted,
            "predicted_time": plan.predicted_seconds / plan.plain_seconds,
            "predicted_share": (plan.predicted_peak_bytes - resident) / (plan.plain_peak_bytes - resident),
            "chunked": plan.profile.chunked,
            "regions": ways,
        }

        @contextmanager
        def applied() -> Iterator[None]:
            with remat.apply(self.model, plan) as handle:
                yield
                self.record(label, fallbacks=sum(region.counts.fallbacks for region in handle.regions))

        return Method(label, "remat", applied, facts=facts)

    def run(self) -> dict[str, Any]:
        wanted = self.options.methods.split(",")
        budgets = tuple(map(float, self.options.stock_budgets.split(",")))
        some = tuple(budget for budget in budgets if budget == STOCK_BUDGETS[0])
        more = tuple(budget for budget in budgets if budget not in some)
        if "plain" in wanted:
            self.add_plain()
        if "whole" in wanted and self.name == "launch-bound":  # what remat is compared with there
            self.add_whole(some)
        if "regional" in wanted:
            self.add_regional(some)
        if {"remat", "remat-whole"} & set(wanted):
            self.add_remat()
        if "regional" in wanted:
            self.add_regional(more)
        if "checkpoint" in wanted:
            self.add_checkpoint()
        if "whole" in wanted:
            self.add_whole(more if self.name == "launch-bound" else budgets)
        self.rounds()
        self.result |= {"seconds": time.perf_counter() - self.begin, "rest_seconds": self.options.rest}
        self._write(self.result)
        return self.result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--workloads", default="llama-1.3b,launch-bound" if CUDA else "tiny-llama")
    parser.add_argument("--methods", default=",".join(GROUPS), help=f"of {', '.join(GROUPS)}")
    parser.add_argument(
        "--stock-budgets",
        default=",".join(map(str, STOCK_BUDGETS)),
        help="torch's activation_memory_budget, of torch.compile alone",
    )
    parser.add_argument(
        "--one-graph", default=f"{WHOLE_SHARE}", help="shares for remat-whole, but for the launch-bound model"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rest", type=float, default=0.0, help="idle seconds before any method is timed")
    parser.add_argument("--runs", type=int, default=3, help="timed steps of a method in one round")
    parser.add_argument(
        "--limit", type=float, help="seconds per workload after which nothing more is prepared"
    )
    parser.add_argument(
        "--offload",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let remat move saved tensors to the host",
    )
    parser.add_argument("--backend", default="inductor", help="of remat's compiled blocks")
    parser.add_argument("--stock-backend", default="inductor", help="of torch.compile alone")
    options = parser.parse_args()
    unknown = set(options.methods.split(",")) - set(GROUPS)
    if unknown:
        parser.error(f"--methods {', '.join(sorted(unknown))}: known are {', '.join(GROUPS)}")
    whole: dict[str, Any] = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if CUDA else "cpu",
        "workloads": {},
    }
    if options.out and Path(options.out).exists():  # another workload's, from a call before
        whole["workloads"] = json.loads(Path(options.out).read_text(encoding="utf-8"))["workloads"]
    for name in options.workloads.split(","):

        def write(result: dict[str, Any], name: str = name) -> None:
            whole["workloads"][name] = result
            if options.out:
                Path(options.out).write_text(json.dumps(whole, indent=1), encoding="utf-8")

        Race(name, options, write).run()
        clean()


if __name__ == "__main__":
    main()
