"""Recipes alone (no offload, no chunking) against torch's selective checkpointing and transformers' switch.

    PYTHONPATH=src python benchmarks/recipes.py --out benchmarks/results/recipes.json

One process, one run: the plain step first, then every method. Time is the median of CUDA events after warm-up;
the activation peak is the allocator's peak above what is resident (parameters and gradients are).
On a machine without accelerator it runs small shapes and counts live bytes, so that it cannot rot.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import LlamaConfig, LlamaForCausalLM

import remat
from remat.check.live import Meter

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


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
SHARES = {"llama-1.3b": (0.6, 0.4, 0.3, 0.2), "launch-bound": (0.6, 0.4), "tiny": (0.6, 0.4)}


def build(shape: Shape) -> tuple[LlamaForCausalLM, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=shape.hidden, intermediate_size=shape.inner, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.heads, vocab_size=shape.vocab,
        max_position_embeddings=8192, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    with torch.device(DEVICE):
        model = LlamaForCausalLM(config).to(torch.bfloat16 if CUDA else torch.float32).train()
    ids = torch.randint(0, shape.vocab, (shape.batch, shape.sequence), device=DEVICE)
    return model, {"input_ids": ids, "labels": ids}


def measure(model: torch.nn.Module, batch: dict[str, torch.Tensor], runs: int) -> dict[str, float]:
    """Seconds (median, spread) and activation peak of forward and backward with gradients resident."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        model(**batch).loss.backward()

    for _ in range(3):
        step()
    gc.collect()
    with Meter(DEVICE) as meter:
        meter.synchronize()
        start = meter.current_bytes()
        meter.reset_peak()
        step()
        meter.synchronize()
        peak = meter.peak_bytes() - start
    times = [_seconds(step) for _ in range(runs)]
    for parameter in model.parameters():
        parameter.grad = None
    return {"seconds": statistics.median(times), "spread": max(times) - min(times), "peak": peak}


def _seconds(step: Callable[[], None]) -> float:
    if not CUDA:
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


# ------------------------------------------------------------------------------------------------ peers


def sac_policy(mode: str) -> Callable[[], Any]:
    def contexts() -> Any:
        seen = {"mm": 0}

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            name = str(op)
            if "scaled_dot_product" in name:
                return CheckpointPolicy.MUST_SAVE
            if name in ("aten.mm.default", "aten.addmm.default") and mode != "attention":
                key = "recompute" if ctx.is_recompute else "mm"
                seen[key] = seen.get(key, 0) + 1
                if mode == "all matmuls" or seen[key] % 2 == 0:
                    return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return contexts


@contextmanager
def selective(model: LlamaForCausalLM, mode: str) -> Any:
    for layer in model.model.layers:
        run = layer.forward
        layer.forward = partial(checkpoint, run, use_reentrant=False, context_fn=sac_policy(mode))
    try:
        yield
    finally:
        for layer in model.model.layers:
            del layer.forward


@contextmanager
def switch(model: LlamaForCausalLM) -> Any:
    model.gradient_checkpointing_enable()
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()


# ------------------------------------------------------------------------------------------------- run


def workload(name: str, runs: int) -> dict[str, Any]:
    model, batch = build(SHAPES[name])
    rows: dict[str, dict[str, Any]] = {}
    runs = runs if name != "launch-bound" else 5 * runs  # the host is noisy

    def add(label: str, context: Any, **extra: Any) -> None:
        with context:
            rows[label] = {**measure(model, batch, runs), **extra}
        base = rows["plain"]
        row = rows[label]
        row |= {"time": row["seconds"] / base["seconds"], "share": row["peak"] / base["peak"]}
        print(f"{name:<14}{label:<34}{row['time']:.3f}x  peak {row['share']:.3f}  {extra}", flush=True)

    with torch.no_grad():
        model(**batch)
    add("plain", _nothing())
    add("transformers checkpointing", switch(model))
    for mode in ("attention", "every 2nd matmul", "all matmuls"):
        add(f"selective, {mode}", selective(model, mode))
    begin = time.perf_counter()
    profile = remat.profile(model, batch, accumulate=True)
    seconds = time.perf_counter() - begin
    print(f"{name}: profile {seconds:.1f} s, {len(profile.kinds)} kinds, notes {profile.notes}", flush=True)
    for entry in profile.kinds[0].menu:
        print(
            f"   {entry.mode.value:<8}resident {entry.resident_bytes / 2**20:8.1f} MiB  backward "
            f"{entry.backward_peak_bytes / 2**20:8.1f} MiB  extra {entry.extra_seconds * 1e3:.3f} ms  "
            f"replay {entry.recipe.replay_seconds * 1e3 if entry.recipe else 0:.3f} ms"
        )
    for share in SHARES[name]:
        try:
            plan = remat.plan(profile, activations=share)
        except remat.BudgetError as error:
            print(f"{name}: {share}: {error}")
            continue
        predicted = plan.predicted_seconds / plan.plain_seconds
        for check in (True, False) if share == SHARES[name][0] else (True,):
            handle = remat.apply(model, plan, check=check)
            label = f"remat {share}" + ("" if check else " without spot check")
            add(label, handle, predicted_time=round(predicted, 3))
            fallbacks = sum(region.counts.fallbacks for region in handle.regions)
            resident = profile.step.resident + profile.step.gradients
            rows[label] |= {
                "fallbacks": fallbacks,
                "predicted_peak_ratio": (plan.predicted_peak_bytes - resident) / rows[label]["peak"],
            }
            print(f"      fallbacks {fallbacks}, predicted/measured peak {rows[label]['predicted_peak_ratio']:.4f}")
    verification = remat.verify(model, batch, remat.plan(profile, activations=SHARES[name][0]))
    print(f"{name}: {verification}", flush=True)
    return {"rows": rows, "profile_seconds": seconds, "verification": str(verification)}


@contextmanager
def _nothing() -> Any:
    yield


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--workloads", default="llama-1.3b,launch-bound" if CUDA else "tiny")
    options = parser.parse_args()
    result = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if CUDA else "cpu",
        "workloads": {name: workload(name, options.runs) for name in options.workloads.split(",")},
    }
    if options.out:
        with open(options.out, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
