"""DistributedDataParallel within a budget per device: every rank calls fit, all of them get the same plan.

python examples/ddp.py               # starts two processes on the CPU
torchrun --nproc-per-node 8 examples/ddp.py
"""

import os

import torch
from torch import distributed, nn
from transformers import LlamaConfig, LlamaForCausalLM

import remat


def train() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    rank = distributed.get_rank()
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4, vocab_size=256
    )
    model = nn.parallel.DistributedDataParallel(LlamaForCausalLM(config).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(rank)
    tokens = torch.randint(0, 256, (4, 64), device=device)

    batch = {"input_ids": tokens, "labels": tokens}
    handle = remat.fit(model, batch, activations=0.6, optimizer=optimizer)
    if rank == 0:
        print(handle.report())
    for _ in range(5):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    recomputed = sum(row.recomputed for row in handle.status().rows)
    print(f"rank {rank}: loss {loss.item():.4f}, {recomputed} tensors rebuilt per step", flush=True)
    distributed.destroy_process_group()


def spawned(rank: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    train()


if __name__ == "__main__":
    if "RANK" in os.environ:  # started by torchrun
        train()
    else:
        os.environ.update(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29531")
        torch.multiprocessing.spawn(spawned, nprocs=2)
