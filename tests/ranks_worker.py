"""One of two processes that train together on the CPU (gloo): `python ranks_worker.py SCENARIOS OUT`, with
RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set. Started by test_distributed.py, which looks at what is
written to OUT/SCENARIO.RANK.pt."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

import remat
from remat import ranks
from remat.check.live import LiveBytes

STEPS = 20
SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {}


def scenario(run: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    SCENARIOS[run.__name__] = run
    return run


def llama(vocabulary: int = 64, layers: int = 4) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=vocabulary, max_position_embeddings=64, attention_dropout=0.1,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def batches(length: int = 48) -> list[dict[str, Tensor]]:
    """Other data on every rank."""
    generator = torch.Generator().manual_seed(10 + distributed.get_rank())
    made = [torch.randint(0, 64, (4, length), generator=generator) for _ in range(STEPS)]
    return [{"input_ids": ids, "labels": ids} for ids in made]


def train(
    model: nn.Module, data: list[dict[str, Tensor]], backward: Any = None, optimizer: Any = None
) -> Any:
    """Losses, the peak of the first step, and the weights afterwards."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2) if optimizer is None else optimizer
    losses, peak = [], 0
    torch.manual_seed(20 + distributed.get_rank())  # for dropout
    for number, batch in enumerate(data):
        if number == 0:
            with LiveBytes() as live:
                live.watch([*model.parameters(), *model.buffers(), *batch.values()])
                live.reset_peak()
                loss = model(**batch).loss
                backward(loss) if backward else loss.backward()
                peak = live.peak_bytes
        else:
            loss = model(**batch).loss
            backward(loss) if backward else loss.backward()
        losses.append(loss.item())
        del loss
        optimizer.step()
        optimizer.zero_grad()
    return losses, peak, {name: whole(value) for name, value in model.state_dict().items()}


def whole(tensor: Tensor) -> Tensor:
    gather = getattr(tensor, "full_tensor", None)
    return (tensor if gather is None else gather()).detach().clone()


def compared(plain: Any, fitted: Any, handle: remat.Handle) -> dict[str, Any]:
    return {
        "losses equal": plain[0] == fitted[0],
        "losses differ from step to step": len(set(plain[0])) == len(plain[0]),
        "keys equal": list(plain[2]) == list(fitted[2]),
        "weights equal": all(torch.equal(plain[2][name], fitted[2][name]) for name in plain[2]),
        "plain peak": plain[1],
        "peak": fitted[1],
        "budget": handle.plan.budget_bytes,
        "regions": len(handle.regions),
        "recomputed": sum(row.recomputed for row in handle.status().rows),
        "fallbacks": [row.why for row in handle.status().rows if row.fallbacks],
        "plan": hashlib.sha256(repr(handle.plan).encode()).hexdigest(),
    }


def ddp_of(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


@scenario
def ddp() -> dict[str, Any]:
    data = batches()
    plain = train(ddp_of(llama()), data)
    model = ddp_of(llama())
    handle = remat.fit(model, data[0], activations=0.6)
    return compared(plain, train(model, data), handle)


@scenario
def fsdp2() -> dict[str, Any]:
    data = batches()
    plain = train(sharded(llama()), data)
    model = sharded(llama())
    handle = remat.fit(model, data[0], activations=0.6)
    found = compared(plain, train(model, data), handle)
    parameter = next(model.parameters())
    return {**found, "still sharded": parameter.to_local().numel() < parameter.numel()}


@scenario
def shapes_that_differ() -> dict[str, Any]:
    """The plan is made for the larger batch; the other rank's shape recomputes as a whole."""
    data = batches(32 + 16 * distributed.get_rank())
    plain = train(ddp_of(llama()), data)
    model = ddp_of(llama())
    handle = remat.fit(model, data[0], activations=0.6)
    return {**compared(plain, train(model, data), handle), "signature": handle.plan.profile.signature}


@scenario
def strangers() -> dict[str, Any]:
    rank = distributed.get_rank()
    model, batch = llama(layers=3 + rank), batches()[0]
    try:
        remat.fit(model, batch, activations=0.6)
    except remat.InputError as error:
        message = str(error)
    else:
        message = "accepted"
    with ranks.alone():
        handle = remat.fit(model, batch, activations=0.7)
    return {"message": message, "calls alone": len(handle.plan.profile.calls)}


@scenario
def accelerate_plain() -> dict[str, Any]:
    from accelerate import Accelerator

    data = batches()

    def prepared() -> tuple[Any, nn.Module, Any]:
        accelerator = Accelerator(cpu=True)
        model = llama()
        return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    accelerator, model, optimizer = prepared()
    plain = train(model, data, accelerator.backward, optimizer)
    accelerator, model, optimizer = prepared()
    handle = remat.fit(model, data[0], activations=0.6)
    return compared(plain, train(model, data, accelerator.backward, optimizer), handle)


@scenario
def accelerate_fsdp2() -> dict[str, Any]:
    """accelerate shards on accelerators only; told that this is one, it shards on the CPU, too."""
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState

    data = batches()

    def prepared() -> tuple[Any, nn.Module, Any]:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            cpu_ram_efficient_loading=False,
        )
        AcceleratorState._reset_state()
        accelerator = Accelerator(cpu=True)
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
        model = llama()
        return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    accelerator, model, optimizer = prepared()
    plain = train(model, data, accelerator.backward, optimizer)
    accelerator, model, optimizer = prepared()
    handle = remat.fit(model, data[0], activations=0.6)
    found = compared(plain, train(model, data, accelerator.backward, optimizer), handle)
    AcceleratorState._reset_state()
    return {**found, "still sharded": any(hasattr(p, "to_local") for p in model.parameters())}


@scenario
def trainer() -> dict[str, Any]:
    """transformers' Trainer under DDP, whose batches differ in length from rank to rank and step to step."""
    from transformers import Trainer, TrainingArguments

    from remat.integrations.transformers import RematCallback

    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 64, (48,), generator=generator) for _ in range(64)]

    def run(callbacks: list[Any]) -> tuple[list[float], dict[str, Tensor]]:
        arguments = TrainingArguments(
            str(Path(sys.argv[2]) / "out"), per_device_train_batch_size=4, max_steps=STEPS, logging_steps=1,
            report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, ddp_backend="gloo",
        )  # fmt: skip
        model = llama()
        trainer = Trainer(
            model, arguments, train_dataset=[{"input_ids": r, "labels": r} for r in rows], callbacks=callbacks
        )
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return losses, {name: value.clone() for name, value in model.state_dict().items()}

    plain = run([])
    callback = RematCallback(activations=0.6)
    fitted = run([callback])
    return {
        "losses equal": plain[0] == fitted[0],
        "steps": len(plain[0]),
        "weights equal": all(torch.equal(plain[1][name], fitted[1][name]) for name in plain[1]),
        "regions": sum(row.recomputed > 0 for row in callback.report.rows),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    for name in sys.argv[1].split(","):
        found = SCENARIOS[name]()
        torch.save(found, Path(sys.argv[2]) / f"{name}.{distributed.get_rank()}.pt")
    distributed.barrier()
    distributed.destroy_process_group()
