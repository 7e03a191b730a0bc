"""Can a 1B Llama train on 32k tokens on one 24 GB card? Asked without the card, on the command line:

    remat plan examples/long_context.py:build --budget 22GiB --device rtx4090 --dtype bf16 --html plan.html

or from Python, for several budgets at once:

    python examples/long_context.py

Model and batch are given as functions, so that neither needs memory.
"""

import functools

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import remat
from remat.units import format_bytes

BUDGET = "22GiB"


def make_model() -> torch.nn.Module:
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000,
        max_position_embeddings=131072,
    )
    return LlamaForCausalLM(config)


def make_batch(length: int) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(1, length, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


def build(length: int = 32768) -> dict[str, object]:
    """What `remat plan` calls: functions that make model and batch."""
    return {"model": make_model, "batch": functools.partial(make_batch, length)}


def main() -> None:
    job = build()
    profile = remat.profile(job["model"], job["batch"], device="rtx4090", dtype=torch.bfloat16)
    print("1B Llama, one sequence of 32768 tokens, on one rtx4090")
    print(f"{'budget':>8}{'plain peak':>12}{'planned':>12}{'slowdown':>10}")
    for budget in (BUDGET, "20GiB", "18GiB", "8GiB"):
        try:
            plan = remat.plan(profile, budget)
        except remat.BudgetError as error:
            print(f"{budget:>8}  out of reach: {format_bytes(error.needed)} is the least")
            continue
        slowdown = plan.predicted_seconds / plan.plain_seconds
        plain, peak = format_bytes(plan.plain_peak_bytes), format_bytes(plan.predicted_peak_bytes)
        print(f"{budget:>8}{plain:>12}{peak:>12}{slowdown:>9.3f}x")


if __name__ == "__main__":
    main()
