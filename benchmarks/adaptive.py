"""Text of many lengths under one budget: a plan per length against checkpointing that is always on.

    PYTHONPATH=src python benchmarks/adaptive.py --out benchmarks/results/adaptive.json

A Llama of 1.1 billion weights (a tiny one without accelerator), lengths log-normal between 32 and 2,048. The
budget is the peak of transformers' gradient_checkpointing_enable() on the longest batch, or the least that
plans can do with where that is more (without offload: 2 % more, which remat leaves to the allocator's
pieces). Both train on the same
batches in one run, step by step, in changing order, each step timed by itself, plans for new lengths
included; the untouched model too, for comparison. The first pass meets every length for the first time, the
second knows them. Then the memory of the process is really cut below what a step takes, and the step has to
recover. On an accelerator plans offload where that is faster (--no-offload: nowhere): what went to the host,
and how much of it was pinned, is recorded.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import random
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from typing import Any

import numpy
import torch
import transformers
from gauge import clean, synchronize
from torch import nn
from workloads import CUDA, DEVICE, DTYPE

import remat
from remat.check.live import LiveBytes, Meter
from remat.planner.link import host_bytes
from remat.run.wrap import bypass

ROWS = 8 if CUDA else 1
LONGEST = 2048 if CUDA else 256
VOCABULARY = 32000 if CUDA else 64


def llama() -> nn.Module:
    sizes = (
        {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32}
        if CUDA
        else {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    )
    config = transformers.LlamaConfig(
        **sizes,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=LONGEST,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return transformers.LlamaForCausalLM(config).to(DTYPE).train()


def tokens(length: int) -> dict[str, torch.Tensor]:
    made = torch.randint(0, VOCABULARY, (ROWS, length), generator=torch.Generator().manual_seed(length))
    ids = made.to(DEVICE)
    return {"input_ids": ids, "labels": ids}


def lengths(steps: int) -> list[int]:
    """The longest first; then like real text: most are short."""
    drawn = numpy.random.default_rng(0).lognormal(numpy.log(LONGEST / 6), 0.8, steps - 1)
    return [LONGEST, *(int(n) for n in numpy.clip(drawn, 32, LONGEST))]


class Way:
    """One way to train: its steps are timed, and their peak is read (without accelerator: in a run apart)."""

    def __init__(self, name: str, model: nn.Module, step: Callable[[dict[str, torch.Tensor]], Any]) -> None:
        self.name, self.model, self._step = name, model, step
        self._optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        self.seconds: list[float] = []
        self.peak = 0

    def run(self, batch: dict[str, torch.Tensor]) -> None:
        synchronize()
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        self._step(batch)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        synchronize()
        self.seconds.append(time.perf_counter() - begin)
        if CUDA:
            self.peak = max(self.peak, torch.cuda.max_memory_allocated())
        else:
            self.peak = max(self.peak, self.counted(batch))

    def counted(self, batch: dict[str, torch.Tensor]) -> int:
        """Everything on the device: the other model is there for all ways alike."""
        with Meter(DEVICE) as meter:
            meter.watch([*self.model.parameters(), *self.model.buffers(), *batch.values()])
            meter.reset_peak()
            self._step(batch)
            meter.synchronize()
        self._optimizer.zero_grad(set_to_none=True)
        return meter.peak_bytes()


def hosted(handle: Any) -> dict[str, Any]:
    """What went to the host, and how much each plan sends there in a step (bytes, by size)."""
    by_plan = {size: host_bytes(plan.profile, plan.choices) for size, plan in handle.plans.items()}
    counts = None if handle.engine is None else asdict(handle.engine.counts)
    return {"counts": counts, "host_bytes_by_size": by_plan}


def fitted(model: nn.Module, budget: int, allow: tuple[str, ...] | None) -> tuple[Any, int]:
    """At this budget, or the least there is; and at which."""
    try:
        return remat.fit(model, tokens(LONGEST), budget, adaptive=True, allow=allow), budget
    except remat.BudgetError as error:
        print(f"{error}; taking what is needed", flush=True)
        needed = error.needed
    return remat.fit(model, tokens(LONGEST), needed, adaptive=True, allow=allow), needed


def stream(steps: int, passes: int, offload: bool) -> tuple[dict[str, Any], nn.Module, Any]:
    planned = llama()
    checkpointed = copy.deepcopy(planned)
    checkpointed.gradient_checkpointing_enable()
    drawn = lengths(steps)
    always = Way("always on", checkpointed, lambda batch: checkpointed(**batch).loss.backward())
    for _ in range(2):
        always.run(tokens(LONGEST))
    always_on_peak = always.peak
    always.peak, always.seconds = 0, []
    clean()
    begin = time.perf_counter()
    handle, budget = fitted(planned, always_on_peak, None if offload else ("keep", "recompute"))
    fit_seconds = time.perf_counter() - begin
    print(handle.report(), flush=True)

    def untouched(batch: dict[str, torch.Tensor]) -> None:
        with bypass():
            planned(**batch).loss.backward()

    adaptive = Way("adaptive", planned, lambda batch: handle.step(lambda: planned(**batch).loss))
    plain = Way("plain", planned, untouched)
    ways = [always, adaptive, plain]
    for length in (64, LONGEST // 2):  # kernels are loaded, for all ways alike
        for way in (always, plain):
            way.run(tokens(length))
    for way in ways:
        way.seconds, way.peak = [], 0
    order = random.Random(0)
    rows = []
    for number in range(passes):
        before = {way.name: len(way.seconds) for way in ways}
        planning = handle.stats.planning_seconds
        sent = 0 if handle.engine is None else handle.engine.counts.sent_bytes
        order.shuffle(drawn)
        for length in drawn:
            batch = tokens(length)
            for way in order.sample(ways, len(ways)):
                way.run(batch)
        spent = {way.name: sum(way.seconds[before[way.name] :]) for way in ways}
        total = ROWS * sum(drawn)
        row = {
            "pass": number + 1,
            "tokens_per_second": {name: total / seconds for name, seconds in spent.items()},
            "adaptive_over_always_on": spent["always on"] / spent["adaptive"],
            "adaptive_over_plain": spent["plain"] / spent["adaptive"],
            "planning_share": (handle.stats.planning_seconds - planning) / spent["adaptive"],
            "sent_bytes": 0 if handle.engine is None else handle.engine.counts.sent_bytes - sent,
            "pinned_bytes": 0 if handle.engine is None else handle.engine.counts.pinned_bytes,
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    peaks = {way.name: way.peak for way in ways}
    stats = handle.stats
    print(
        f"peaks: always on {always.peak / budget:.4f} of the budget, adaptive {adaptive.peak / budget:.4f}, "
        f"plain {plain.peak / budget:.4f}; {len(set(drawn))} lengths; fell back {stats.fell_back}; "
        f"fit {fit_seconds:.1f} s",
        flush=True,
    )
    checkpointed.gradient_checkpointing_disable()
    return (
        {
            "budget": budget,
            "budget_over_always_on": budget / always_on_peak,
            "peaks": peaks,
            "within_budget": adaptive.peak <= budget,
            "passes": rows,
            "steps": steps,
            "distinct_lengths": len(set(drawn)),
            "fit_seconds": fit_seconds,
            "plans": stats.counts["planned"],
            "fell_back": stats.fell_back,
            "host": hosted(handle),
            "events": [str(e) for e in stats.events if e.kind not in ("planned", "plan changed")][:20],
        },
        planned,
        handle,
    )


def shortage(model: nn.Module, handle: Any, share: float = 0.85) -> dict[str, Any]:
    """Cut the memory of this process to a share of what a step takes: it runs out, and recovers."""
    batch = tokens(LONGEST // 2)

    def gradients() -> dict[str, torch.Tensor]:
        found = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        return found

    def step() -> None:
        handle.step(lambda: model(**batch).loss)

    step()
    expected = gradients()
    step()
    again = gradients()
    noise = max(float((expected[n] - again[n]).abs().max()) for n in expected)
    del again
    clean()
    peak = Way("adaptive", model, lambda batch: step()).counted(batch)
    recovered = handle.stats.recovered
    clean()
    cap = int(share * peak)
    if CUDA:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(cap / total)
        step()
        torch.cuda.set_per_process_memory_fraction(1.0)
    else:
        with LiveBytes(limit_bytes=cap) as live:
            live.watch([*model.parameters(), *model.buffers(), *batch.values()])
            step()
    found = gradients()
    worst = max(float((expected[n] - found[n]).abs().max()) for n in expected)
    result = {
        "peak": peak,
        "cap": cap,
        "recovered": handle.stats.recovered - recovered,
        "gradients_equal": all(torch.equal(expected[n], found[n]) for n in expected),
        "max_abs_diff": worst,
        "noise_of_two_plain_runs": noise,
        "events": [str(event) for event in handle.stats.events][-3:],
    }
    print(json.dumps(result), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--steps", type=int, default=100 if CUDA else 12)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--no-offload", action="store_true", help="plans keep and recompute only")
    options = parser.parse_args()
    begin = time.perf_counter()
    measured, model, handle = stream(options.steps, options.passes, not options.no_offload)
    clean()
    result = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if CUDA else "cpu",
        "stream": measured,
        "shortage": shortage(model, handle),
        "seconds": time.perf_counter() - begin,
    }
    if options.out:
        with open(options.out, "w") as file:
            json.dump(result, file, indent=1)
    print(f"{result['seconds']:.0f} s in all")


if __name__ == "__main__":
    main()
