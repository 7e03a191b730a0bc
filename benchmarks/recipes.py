"""Recipes alone (no offload, no chunking) against torch's selective checkpointing and transformers' switch.

    PYTHONPATH=src python benchmarks/recipes.py --out benchmarks/results/recipes.json

One process, one run: every method in every round, in shuffled order. Time is the median of CUDA events after
warm-up; the activation peak is the allocator's peak above what is resident (parameters and gradients are).
On a machine without accelerator it runs small shapes and counts live bytes, so that it cannot rot.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gauge import peak_of, relative_to, seconds_of
from peers import selective, switch
from transformers import LlamaConfig, LlamaForCausalLM
from workloads import CUDA, DEVICE, DTYPE, Job

import remat
from remat.check.untouched import untouched
from remat.codec import to_json
from remat.planner.menu import recipes
from remat.trace.discover import find_blocks
from remat.trace.survey import survey

Row = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    inner: int
    heads: int
    vocab: int
    batch: int
    sequence: int


SHAPES = {
    "llama-1.3b": Shape(24, 2048, 5632, 16, 32000, 4, 4096),
    "launch-bound": Shape(12, 768, 2048, 12, 32000, 4, 256),
    "tiny": Shape(4, 64, 176, 4, 128, 2, 64),
}
ALONE = ("keep", "recompute")  # recipes alone: nothing is offloaded
SHARES = {"llama-1.3b": (0.6, 0.4, 0.3), "launch-bound": (0.594,), "tiny": (0.6, 0.4)}


def build(shape: Shape) -> tuple[LlamaForCausalLM, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=shape.hidden, intermediate_size=shape.inner, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.heads, vocab_size=shape.vocab,
        max_position_embeddings=8192, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    with torch.device(DEVICE):
        model = LlamaForCausalLM(config).to(DTYPE).train()
    ids = torch.randint(0, shape.vocab, (shape.batch, shape.sequence), device=DEVICE)
    return model, {"input_ids": ids, "labels": ids}


def race(
    methods: dict[str, Callable[[], Any]], step: Callable[[], None], rounds: int, runs: int
) -> dict[str, Row]:
    """Every method in every round, in another order each time, and compared within rounds: `time` is the
    median over rounds of a method's median over the plain step's."""
    times: dict[str, list[list[float]]] = {label: [] for label in methods}
    peaks: dict[str, int] = {}
    order = random.Random(0)
    for _ in range(rounds):
        for label in order.sample(list(methods), len(methods)):
            with methods[label]():
                step()
                if label not in peaks:
                    step()
                    peaks[label] = peak_of(step)
                times[label].append([seconds_of(step) for _ in range(runs)])

    def row(label: str) -> Row:
        every = [seconds for found in times[label] for seconds in found]
        ratios = [statistics.median(found) for found in relative_to(times["plain"], times[label])]
        return {
            "seconds": statistics.median(every),
            "quartiles": statistics.quantiles(every, n=4),
            "peak": peaks[label],
            "time": statistics.median(ratios),
            "time_by_round": ratios,
            "share": peaks[label] / peaks["plain"],
        }

    return {label: row(label) for label in methods}


# ------------------------------------------------------------------------------------------------- run


def workload(name: str, rounds: int, out: str | None) -> dict[str, Any]:
    model, batch = build(SHAPES[name])
    with torch.no_grad():
        model(**batch)
    begin = time.perf_counter()
    with untouched(model):
        found = survey(model, find_blocks(model), lambda: model(**batch).loss, lambda doing: None)
    captured = time.perf_counter() - begin
    begin = time.perf_counter()
    menu = recipes(found.species[0].graph, levels=[level / 16 for level in range(16, 0, -1)])
    solved = time.perf_counter() - begin
    distinct = len(found.species)
    print(
        f"{name}: captured in {captured:.2f} s ({distinct} distinct), {len(menu)} recipes in {solved:.2f} s"
    )
    del found
    begin = time.perf_counter()
    profile = remat.profile(model, batch, accumulate=True, allow=ALONE)
    seconds = time.perf_counter() - begin
    print(f"{name}: profile {seconds:.1f} s, {len(profile.kinds)} kinds, notes {profile.notes}", flush=True)
    if out:
        Path(out).with_name(f"profile-{name}.json").write_text(to_json(profile))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        model(**batch).loss.backward()

    job = Job(model, batch)
    methods: dict[str, Callable[[], Any]] = {
        "plain": nullcontext,
        "transformers checkpointing": partial(switch, job),
    }
    for mode in ("attention", "every 2nd matmul", "all matmuls"):
        methods[f"selective, {mode}"] = partial(selective, job, mode)
    plans = {}
    for share in SHARES[name]:
        try:
            plans[f"remat {share}"] = remat.plan(profile, activations=share, allow=ALONE)
        except remat.BudgetError as error:
            print(f"{name}: {share}: {error}")
    fallbacks: dict[str, int] = {}

    @contextmanager
    def planned(label: str, check: bool) -> Any:
        with remat.apply(model, plans[label], check=check) as handle:
            yield
            fallbacks[label] = sum(region.counts.fallbacks for region in handle.regions)

    for label in plans:
        methods[label] = partial(planned, label, True)
    first = next(iter(plans))
    methods[f"{first} without spot check"] = partial(planned, first, False)
    # A host's speed drifts: where it sets the pace, rounds are many and short.
    more, runs = (1, 3) if name == "llama-1.3b" else (4, 4)
    rows = race(methods, step, more * rounds, runs)
    resident = profile.step.resident + profile.step.gradients
    for label, row in rows.items():
        note = ""
        if label in plans:
            plan = plans[label]
            row["predicted_time"] = plan.predicted_seconds / plan.plain_seconds
            row["predicted_peak_ratio"] = (plan.predicted_peak_bytes - resident) / row["peak"]
            row["fallbacks"] = fallbacks[label]
            note = (
                f"predicted {row['predicted_time']:.3f}x, "
                f"predicted/measured peak {row['predicted_peak_ratio']:.4f}, fallbacks {fallbacks[label]}"
            )
        low, _, high = row["quartiles"]
        spread = (high - low) / row["seconds"]
        print(
            f"{name:<14}{label:<34}{row['time']:.3f}x  peak {row['share']:.3f}  "
            f"quartiles {spread:.3f}  {note}",
            flush=True,
        )
    for parameter in model.parameters():
        parameter.grad = None
    verification = remat.verify(model, batch, plans[first])
    print(f"{name}: {verification}", flush=True)
    return {
        "rows": rows,
        "capture_seconds": captured,
        "menu_seconds": solved,
        "profile_seconds": seconds,
        "verification": str(verification),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--workloads", default="llama-1.3b,launch-bound" if CUDA else "tiny")
    options = parser.parse_args()
    result = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if CUDA else "cpu",
        "workloads": {
            name: workload(name, options.rounds, options.out) for name in options.workloads.split(",")
        },
    }
    if options.out:
        with open(options.out, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
