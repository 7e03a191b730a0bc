"""The training steps that benchmarks measure: random weights, synthetic data, bfloat16 on an accelerator.

Each has a full shape and a small one, which runs on any machine in a second. Libraries are imported when a
workload is built: a machine needs only those of the workloads it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from remat.check.step import Loss, run_step
from remat.trace.discover import find_blocks

__all__ = [
    "CUDA",
    "DEVICE",
    "DTYPE",
    "LLAMA_1B",
    "WORKLOADS",
    "Job",
    "Workload",
    "gpt2",
    "llama",
    "on_device",
    "resnet152",
    "tokens",
    "vit",
]

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPE = torch.bfloat16 if CUDA else torch.float32


@dataclass(frozen=True)
class Job:
    """One model and one batch."""

    model: nn.Module
    batch: Any
    loss: Loss | None = None

    @property
    def blocks(self) -> list[nn.Module]:
        return [block.module for block in find_blocks(self.model)]

    @property
    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def step(self) -> None:
        run_step(self.model, self.batch, self.loss).backward()  # type: ignore[no-untyped-call]


# Which groups of methods a workload runs by default, in the order of main(): see frontier.py.
EAGER = ("plain", "remat", "checkpoint", "selective", "chunked-loss", "offload")
REGIONAL = (*EAGER, "compiled", "regional")
COMPILED_ON_CUDA = REGIONAL if CUDA else EAGER  # many kinds of blocks, or none that a host compiles
ALL = (*REGIONAL, "unfused", "offload-all", "whole", "one-graph")


@dataclass(frozen=True)
class Workload:
    """`shares`: the budgets remat is planned at, as shares of the plain activation peak; () for the usual."""

    about: str
    full: Callable[[], Job]
    small: Callable[[], Job]
    groups: tuple[str, ...] = REGIONAL
    shares: tuple[float, ...] = ()
    attention: bool = True


def on_device(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return make().to(DTYPE).train()


def tokens(vocab: int, batch: int, length: int) -> dict[str, Any]:
    ids = torch.randint(0, vocab, (batch, length), device=DEVICE)
    return {"input_ids": ids, "labels": ids}


def llama(layers: int, hidden: int, inner: int, heads: int, vocab: int, batch: int, length: int) -> Job:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, vocab_size=vocab, max_position_embeddings=max(8192, length),
        attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    return Job(on_device(lambda: LlamaForCausalLM(config)), tokens(vocab, batch, length))


class LowRank(nn.Module):
    """A frozen linear layer with a trained low-rank addition, as LoRA does it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x)) * self.scale
        return out


def lora(job: Job, rank: int) -> Job:
    """Every linear layer of every block gets a low-rank addition; all else is frozen."""
    job.model.requires_grad_(False)
    places = [
        (parent, name, child)
        for block in job.blocks
        for parent in block.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear)
    ]
    with torch.device(DEVICE):
        for parent, name, child in places:
            added = LowRank(child, rank)
            added.down.to(DTYPE), added.up.to(DTYPE)
            setattr(parent, name, added)
    return job


def gpt2(layers: int, hidden: int, heads: int, vocab: int, batch: int, length: int) -> Job:
    """Dropout 0.1 everywhere, the configuration's own."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers, n_embd=hidden, n_head=heads, vocab_size=vocab, n_positions=length, use_cache=False,
        bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM",
    )  # fmt: skip
    return Job(on_device(lambda: GPT2LMHeadModel(config)), tokens(vocab, batch, length))


def vit(layers: int, hidden: int, heads: int, image: int, patch: int, batch: int) -> Job:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, intermediate_size=4 * hidden,
        image_size=image, patch_size=patch, num_labels=1000,
    )  # fmt: skip
    return Job(on_device(lambda: ViTForImageClassification(config)), labelled_images(batch, image))


def labelled_images(batch: int, image: int) -> dict[str, Any]:
    images = torch.randn(batch, 3, image, image, device=DEVICE, dtype=DTYPE)
    labels = torch.randint(0, min(1000, 8 * batch), (batch,), device=DEVICE)
    return {"pixel_values": images, "labels": labels}


def resnet(depths: tuple[int, ...], widths: tuple[int, ...], batch: int, image: int) -> Job:
    """transformers' ResNet: with depths 3, 8, 36, 3 the network that torchvision calls resnet152."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        depths=list(depths), hidden_sizes=list(widths), layer_type="bottleneck", num_labels=1000,
        embedding_size=widths[0] // 4,
    )  # fmt: skip
    return Job(on_device(lambda: ResNetForImageClassification(config)), labelled_images(batch, image))


def resnet152(batch: int, image: int) -> Job:
    if find_spec("torchvision") is None:
        return resnet((3, 8, 36, 3), (256, 512, 1024, 2048), batch, image)
    torchvision_resnet152 = import_module("torchvision.models").resnet152
    given = labelled_images(batch, image)

    def loss(output: torch.Tensor, images: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(output.float(), given["labels"])

    return Job(on_device(torchvision_resnet152), given["pixel_values"], loss)


def moe(layers: int, hidden: int, inner: int, experts: int, vocab: int, batch: int, length: int) -> Job:
    """Qwen3's mixture of experts, eight of them per token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    heads = max(hidden // 128, 2)
    config = Qwen3MoeConfig(
        hidden_size=hidden, intermediate_size=4 * inner, moe_intermediate_size=inner, num_experts=experts,
        num_experts_per_tok=min(8, experts // 2), num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, head_dim=hidden // heads, vocab_size=vocab,
        max_position_embeddings=max(8192, length), attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    return Job(on_device(lambda: Qwen3MoeForCausalLM(config)), tokens(vocab, batch, length))


def video(layers: int, hidden: int, inner: int, heads: int, text: int, batch: int, patches: int) -> Job:
    from video_dit import Shape, VideoTransformer

    shape = Shape(layers, hidden, inner, heads, channels=64, text_tokens=text)
    model = on_device(lambda: VideoTransformer(shape))

    def noise(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=DEVICE, dtype=DTYPE)

    return Job(model, {
        "patches": noise(batch, patches, 64), "text": noise(batch, text, hidden),
        "time": torch.rand(batch, device=DEVICE), "velocity": noise(batch, patches, 64),
    })  # fmt: skip


LLAMA_1B = (24, 2048, 5632, 16, 32000)
_LLAMA_7B = (32, 4096, 11008, 32, 32000)
_SMALL_LLAMA = partial(llama, 4, 64, 176, 4, 128, 2, 64)

WORKLOADS: dict[str, Workload] = {
    "llama-1.3b": Workload(
        "Llama-shaped, 24 layers of 2048, batch 4 x 4096",
        partial(llama, *LLAMA_1B, 4, 4096), _SMALL_LLAMA, ALL,
    ),
    "launch-bound": Workload(
        "Llama-shaped, 12 layers of 768, batch 4 x 256",
        partial(llama, 12, 768, 2048, 12, 32000, 4, 256), _SMALL_LLAMA,
        (*REGIONAL, "unfused", "whole", "one-graph"),
    ),
    "gpt2-774m": Workload(
        "GPT-2 with dropout, 36 layers of 1280, batch 8 x 1024",
        partial(gpt2, 36, 1280, 20, 50257, 8, 1024), partial(gpt2, 3, 64, 4, 128, 2, 64), ALL,
    ),
    "vit-l16": Workload(
        "ViT-L/16, 24 layers of 1024, batch 128",
        partial(vit, 24, 1024, 16, 224, 16, 128), partial(vit, 3, 64, 4, 32, 4, 4), ALL,
    ),
    "vit-b16": Workload(
        "ViT-B/16, 12 layers of 768, batch 128",
        partial(vit, 12, 768, 12, 224, 16, 128), partial(vit, 3, 48, 4, 32, 4, 4),
    ),
    "resnet-152": Workload(
        "ResNet-152, batch 256", partial(resnet152, 256, 224),
        partial(resnet, (2, 2, 2), (32, 64, 128), 4, 32), COMPILED_ON_CUDA, attention=False,
    ),
    "llama-7b-lora": Workload(
        "LLaMA-7B, LoRA of rank 16 on every linear layer, batch 2 x 4096",
        lambda: lora(llama(*_LLAMA_7B, 2, 4096), 16), lambda: lora(_SMALL_LLAMA(), 4),
    ),
    "llama-7b": Workload(
        "LLaMA-7B, all parameters, batch 2 x 4096", partial(llama, *_LLAMA_7B, 2, 4096), _SMALL_LLAMA
    ),
    "video-dit": Workload(
        "video diffusion transformer, 16 layers of 1536, batch 1 x 15600 patches",
        partial(video, 16, 1536, 8960, 12, 512, 1, 15600), partial(video, 3, 64, 256, 4, 8, 1, 96),
    ),
    "moe": Workload(
        "Qwen3-MoE, 12 layers of 2048, 64 experts of 768, 8 per token, batch 4 x 2048",
        partial(moe, 12, 2048, 768, 64, 32000, 4, 2048), partial(moe, 3, 64, 32, 4, 128, 2, 64),
        COMPILED_ON_CUDA,
    ),
    "long-context": Workload(
        "Llama-shaped, 24 layers of 2048, batch 1 x 65536",
        partial(llama, *LLAMA_1B, 1, 65536), partial(llama, 4, 64, 176, 4, 128, 1, 128),
        ("plain", "remat", "checkpoint", "chunked-loss", "offload"), (0.35, 0.15, 0.06),
    ),
}  # fmt: skip
