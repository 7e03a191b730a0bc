"""The plain loss against the chunked one, fused and not: step time and activation peak by vocabulary.

    PYTHONPATH=src python benchmarks/chunked_loss.py --out benchmarks/results/chunked_loss.json

One process; for each vocabulary a fresh small Llama, the plain step first, then each way of chunking. Time is
the median of CUDA events after warm-up (which includes compiling); the peak is the allocator's, above what is
resident (parameters and gradients are). A method that runs out of memory is reported as such.
On a machine without accelerator it runs tiny shapes and counts live bytes, so that it cannot rot.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from remat.check.live import Meter
from remat.run.chunk import chunk_head

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    inner: int
    heads: int
    batch: int
    sequence: int


SHAPE = Shape(4, 2048, 5632, 16, 4, 4096) if CUDA else Shape(2, 32, 64, 2, 2, 64)
VOCABULARIES = (32000, 131072, 262144) if CUDA else (256, 1024)
ROWS = (1024, 2048, 4096) if CUDA else (32,)


@dataclass(frozen=True)
class Row:
    vocabulary: int
    method: str
    seconds: float | None  # None: out of memory
    peak_bytes: int | None
    loss: float | None
    warmup_seconds: float | None
    note: str = ""


def build(vocabulary: int) -> tuple[LlamaForCausalLM, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=SHAPE.hidden, intermediate_size=SHAPE.inner, num_hidden_layers=SHAPE.layers,
        num_attention_heads=SHAPE.heads, num_key_value_heads=SHAPE.heads, vocab_size=vocabulary,
        max_position_embeddings=8192, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    with DEVICE:
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
        tokens = torch.randint(0, vocabulary, (SHAPE.batch, SHAPE.sequence))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model, {"input_ids": tokens, "labels": tokens}


def methods(model: LlamaForCausalLM, rows: tuple[int, ...]) -> dict[str, Callable[[], Any]]:
    """Each a context in which a step is run."""
    found: dict[str, Callable[[], Any]] = {"plain": nullcontext}
    for fuse, name in ((True, "fused"), (False, "unfused")):
        found[f"chunked, {name}"] = lambda fuse=fuse: chunk_head(model, fuse=fuse)
        for count in rows:
            found[f"chunked, {name}, {count} rows"] = lambda fuse=fuse, count=count: chunk_head(
                model, fuse=fuse, rows=count
            )
    return found


def timed(step: Callable[[], torch.Tensor], repeats: int) -> tuple[float, float]:
    """Median seconds of a step, and its loss."""
    seconds, loss = [], 0.0
    for _ in range(repeats):
        if CUDA:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            value = step()
            end.record()
            torch.cuda.synchronize()
            seconds.append(start.elapsed_time(end) / 1000)
        else:
            began = time.perf_counter()
            value = step()
            seconds.append(time.perf_counter() - began)
        loss = float(value)
    return statistics.median(seconds), loss


def measure(
    vocabulary: int,
    name: str,
    context: Callable[[], AbstractContextManager[Any]],
    model: LlamaForCausalLM,
    batch: dict[str, torch.Tensor],
    repeats: int,
) -> Row:
    def step() -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        return loss.detach()

    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
    try:
        with context() as handle:
            began = time.perf_counter()
            timed(step, 3)
            warmup = time.perf_counter() - began
            with Meter(DEVICE) as meter:
                before = meter.current_bytes()
                step()
                peak = meter.peak_bytes() - before
            seconds, loss = timed(step, repeats)
            counts = getattr(handle, "counts", None)
            note = "" if counts is None else f"{counts.chunks // counts.losses} chunks"
            if counts is not None and (counts.materialised or counts.plain):
                note += f"; NOT CHUNKED: {counts.reason}"
    except torch.OutOfMemoryError as error:
        return Row(vocabulary, name, None, None, None, None, f"out of memory: {str(error)[:80]}")
    return Row(vocabulary, name, seconds, peak, loss, warmup, note)


def table(rows: list[Row]) -> str:
    lines = [
        f"{'vocabulary':>10}  {'method':28}  {'step':>10}  {'ratio':>6}  {'peak':>10}  {'loss':>9}  note"
    ]
    plain: dict[int, float | None] = {row.vocabulary: row.seconds for row in rows if row.method == "plain"}
    for row in rows:
        if row.seconds is None or row.peak_bytes is None or row.loss is None:
            lines.append(f"{row.vocabulary:>10}  {row.method:28}  {row.note}")
            continue
        base = plain.get(row.vocabulary)
        ratio = f"{row.seconds / base:6.3f}" if base else "     -"
        lines.append(
            f"{row.vocabulary:>10}  {row.method:28}  {row.seconds * 1e3:7.2f} ms  {ratio}  "
            f"{row.peak_bytes / 2**20:6.0f} MiB  {row.loss:9.5f}  {row.note}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", help="write the rows as JSON to this file")
    parser.add_argument("--repeats", type=int, default=10 if CUDA else 2)
    parser.add_argument("--vocabulary", type=int, nargs="*", default=list(VOCABULARIES))
    parser.add_argument(
        "--rows", type=int, nargs="*", default=list(ROWS), help="chunk sizes besides the default"
    )
    parser.add_argument("--fuse", choices=["both", "fused", "unfused"], default="both" if CUDA else "unfused")
    options = parser.parse_args()
    rows: list[Row] = []
    for vocabulary in options.vocabulary:
        model, batch = build(vocabulary)
        for name, context in methods(model, tuple(options.rows)).items():
            if options.fuse != "both" and name != "plain" and f", {options.fuse}" not in name:
                continue
            rows.append(measure(vocabulary, name, context, model, batch, options.repeats))
            print(table(rows).splitlines()[-1], flush=True)
        del model, batch
        gc.collect()
    print()
    print(table(rows))
    if options.out:
        where = torch.cuda.get_device_name() if CUDA else "cpu"
        record = {
            "date": date.today().isoformat(),
            "device": where,
            "torch": torch.__version__,
            "shape": asdict(SHAPE),
            "rows": [asdict(row) for row in rows],
        }
        with open(options.out, "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
