"""How much memory does a step need on an H100, and how slow is it with less? Answered without an H100.

    python examples/plan_without_gpu.py

Nothing is allocated but a few integers: model and batch are given as functions, and run on tensors without
memory. The plan is an estimate; on the device itself, remat.fit measures and confirms one.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import remat
from remat.units import format_bytes

BATCH, LENGTH = 8, 1024


def make_model() -> torch.nn.Module:
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        vocab_size=8192,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config)


def make_batch() -> dict[str, torch.Tensor]:
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    profile = remat.profile(
        make_model, make_batch, device="h100-80gb", dtype=torch.bfloat16, optimizer="adamw"
    )
    print(f"{profile.model} on {profile.environment.device_name}, without the device")
    print(f"{'activations':>12}{'budget':>12}{'peak':>12}{'slowdown':>10}")
    for share in (1.0, 0.8, 0.6, 0.4):
        try:
            plan = remat.plan(profile, activations=share)
        except remat.BudgetError as error:
            print(f"{share:>12}  out of reach: {format_bytes(error.needed)} is the least")
            continue
        slowdown = plan.predicted_seconds / plan.plain_seconds
        budget, peak = format_bytes(plan.budget_bytes), format_bytes(plan.predicted_peak_bytes)
        print(f"{share:>12}{budget:>12}{peak:>12}{slowdown:>9.3f}x")


if __name__ == "__main__":
    main()
