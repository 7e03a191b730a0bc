"""Is the budget met, and was the peak predicted? fit at several budgets and models, measured by training.

    PYTHONPATH=src python benchmarks/budgets.py --out benchmarks/results/budgets.json

Per model and budget: fit, then two optimizer-free steps with gradients cleared in between; the allocator's
peak (live bytes without accelerator) over the budget and over the prediction. Also: a loop with AdamW and
accumulation under one budget, a device that is capped below the plain peak, and the time that planning a 7B
model takes, which is that of users only in a process of its own:

    PYTHONPATH=src python benchmarks/budgets.py --parts planning --out benchmarks/results/budgets.json
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import nn
from workloads import CUDA, DEVICE, LLAMA_1B, Job, gpt2, llama, resnet152, vit

import remat
from remat.check.live import Meter
from remat.check.step import run_step, tensors_of
from remat.codec import to_json

SHARES = (0.9, 0.75, 0.6, 0.5, 0.4)


MODELS: dict[str, Callable[[], Job]] = (
    {
        "llama-1.3b": lambda: llama(*LLAMA_1B, 4, 4096),
        "vit-l16": lambda: vit(24, 1024, 16, 224, 16, 128),
        "resnet-152": lambda: resnet152(128, 224),
        "gpt2-774m": lambda: gpt2(36, 1280, 20, 50257, 8, 1024),
    }
    if CUDA
    else {
        "llama": lambda: llama(6, 64, 176, 4, 128, 4, 64),
        "gpt2": lambda: gpt2(4, 64, 4, 128, 4, 64),
        "vit": lambda: vit(4, 64, 4, 32, 4, 4),
    }
)


def peak_of(model: nn.Module, batch: Any, loss: Any) -> int:
    """The whole step's peak: everything on the device counts."""
    for parameter in model.parameters():
        parameter.grad = None
    with Meter(DEVICE) as meter:
        meter.watch([*model.parameters(), *model.buffers(), *tensors_of(batch)])
        meter.reset_peak()
        run_step(model, batch, loss).backward()
        meter.synchronize()
        return meter.peak_bytes()


def clean(model: nn.Module | None = None) -> None:
    if model is not None:  # gradients that are there when fit is called mean accumulation
        for parameter in model.parameters():
            parameter.grad = None
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def seconds_of(run: Callable[[], Any]) -> float:
    times = []
    for _ in range(4):
        if CUDA:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        if CUDA:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return sorted(times)[1]


def budgets(name: str, out: str | None) -> dict[str, Any]:
    job = MODELS[name]()
    model, batch, loss = job.model, job.batch, job.loss
    peak_of(model, batch, loss)
    plain = peak_of(model, batch, loss)
    plain_seconds = seconds_of(lambda: run_step(model, batch, loss).backward())
    rows: list[dict[str, Any]] = []
    for share in SHARES:
        clean(model)
        begin = time.perf_counter()
        try:
            handle = remat.fit(model, batch, activations=share, loss=loss)
        except remat.BudgetError as error:
            rows.append({"share": share, "error": str(error)})
            print(f"{name:<12} {share}: {error}", flush=True)
            continue
        fit_seconds = time.perf_counter() - begin
        plan = handle.plan
        if out:  # what predictions rest on
            Path(out).with_name(f"profile-{name}.json").write_text(to_json(plan.profile), encoding="utf-8")
        peak = max(peak_of(model, batch, loss) for _ in range(2))
        took = seconds_of(lambda: run_step(model, batch, loss).backward())
        row = {
            "share": share,
            "budget": plan.budget_bytes,
            "peak": peak,
            "peak_over_budget": peak / plan.budget_bytes,
            "predicted_over_peak": plan.predicted_peak_bytes / peak,
            "predicted_plain_over_plain": plan.plain_peak_bytes / plain,
            "time": took / plain_seconds,
            "predicted_time": plan.predicted_seconds / plan.plain_seconds,
            "fit_seconds": fit_seconds,
            "kinds": len(plan.profile.kinds),
            "fallbacks": sum(region.counts.fallbacks for region in handle.regions),
            "verification": str(handle.verification),
            "notes": list(plan.profile.notes),
        }
        rows.append(row)
        print(
            f"{name:<12} {share}: peak/budget {row['peak_over_budget']:.4f}  predicted/peak "
            f"{row['predicted_over_peak']:.4f}  plain {row['predicted_plain_over_plain']:.4f}  "
            f"time {row['time']:.3f} ({row['predicted_time']:.3f})  fit {fit_seconds:.1f} s  "
            f"kinds {row['kinds']}  fb {row['fallbacks']}  "
            f"{row['verification']} {row['notes']}",
            flush=True,
        )
        handle.remove()
    return {"plain": plain, "plain_seconds": plain_seconds, "rows": rows}


def loop() -> dict[str, Any]:
    """AdamW, accumulation 2, five optimizer steps, as they are written everywhere: `output`, logits and all,
    lives until the next step has its own. Every moment under the budget."""
    job = llama(12, 1024, 2816, 16, 32000, 4, 2048) if CUDA else MODELS["llama"]()
    model, batch = job.model, job.batch
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    plain = remat.profile(model, batch, optimizer=optimizer, accumulate=2)
    budget = int(remat.plan(plain, activations=0.6).budget_bytes)
    clean()
    handle = remat.fit(model, batch, budget, optimizer=optimizer, accumulate=2)
    with Meter(DEVICE) as meter:
        meter.watch([*model.parameters(), *model.buffers(), *tensors_of(batch)])
        meter.reset_peak()
        for _ in range(5):
            for _ in range(2):
                output = model(**batch)
                (output.loss / 2).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        meter.synchronize()
        peak = meter.peak_bytes()
    handle.remove()
    predicted = handle.plan.predicted_peak_bytes
    print(f"loop: peak/budget {peak / budget:.4f}, predicted/peak {predicted / peak:.4f}", flush=True)
    return {"budget": budget, "peak": peak, "predicted": predicted}


def capped() -> dict[str, Any]:
    """A device capped below the plain peak: the plain step runs out of memory, fit and training do not."""
    if not CUDA:
        return {}
    job = llama(*LLAMA_1B, 4, 4096)
    model, batch, loss = job.model, job.batch, job.loss
    clean()
    total = torch.cuda.get_device_properties(0).total_memory
    cap = int(24e9)
    torch.cuda.set_per_process_memory_fraction(cap / total)
    try:
        run_step(model, batch, loss).backward()
        plain = "ran"
    except torch.OutOfMemoryError:
        plain = "out of memory"
    for parameter in model.parameters():
        parameter.grad = None
    clean()
    begin = time.perf_counter()
    handle = remat.fit(model, batch, cap)
    took = time.perf_counter() - begin
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(3):
        run_step(model, batch, loss).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    reserved = torch.cuda.max_memory_reserved()
    handle.remove()
    torch.cuda.set_per_process_memory_fraction(1.0)
    print(
        f"capped at {cap / 2**30:.1f} GiB: plain {plain}; fit in {took:.1f} s and trained; "
        f"reserved {reserved / cap:.3f} of the cap"
    )
    return {"cap": cap, "plain": plain, "fit_seconds": took, "reserved": reserved}


def planning_time() -> dict[str, Any]:
    if not CUDA:
        return {}
    job = llama(32, 4096, 11008, 32, 32000, 2, 4096)
    model, batch = job.model, job.batch
    clean()
    begin = time.perf_counter()
    handle = remat.fit(model, batch, "60GiB")
    took = time.perf_counter() - begin
    print(f"llama-7b: fit at 60 GiB in {took:.1f} s; {handle.verification}")
    print(handle.report(), flush=True)
    handle.remove()
    return {"fit_seconds": took}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--parts", default="budgets,loop,capped", help="and planning")
    parser.add_argument("--models", default=",".join(MODELS))
    options = parser.parse_args()
    result: dict[str, Any] = {}
    if options.out and Path(options.out).exists():  # other parts, from a call before
        result = json.loads(Path(options.out).read_text(encoding="utf-8"))
    result |= {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if CUDA else "cpu",
    }

    def write() -> None:  # after each part: a run that is cut short loses nothing
        clean()
        if options.out:
            Path(options.out).write_text(json.dumps(result, indent=1), encoding="utf-8")

    parts = options.parts.split(",")
    if "budgets" in parts:
        result["budgets"] = {}
        for name in options.models.split(","):
            result["budgets"][name] = budgets(name, options.out)
            write()
    for part, run in (("loop", loop), ("capped", capped), ("planning", planning_time)):
        if part in parts:
            result[part] = run()
            write()


if __name__ == "__main__":
    main()
