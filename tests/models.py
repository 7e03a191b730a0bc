"""A zoo of tiny models that everybody tests with: `ZOO[name]()` gives a fresh `Case(model, batch, loss)`.

`batch`: dict -> keyword arguments, tuple -> positional, tensor -> the one argument. `loss(output, batch)`.
Every model is built from the same seed, so two calls of the same builder give equal weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Case:
    model: nn.Module
    batch: Any
    loss: Callable[[Any, Any], Tensor]

    def output(self, model: nn.Module | None = None) -> Any:
        model = self.model if model is None else model
        if isinstance(self.batch, dict):
            return model(**self.batch)
        if isinstance(self.batch, (tuple, list)):
            return model(*self.batch)
        return model(self.batch)

    def run(self, model: nn.Module | None = None) -> Tensor:
        """The loss of one forward."""
        return self.loss(self.output(model), self.batch)


def squared(output: Any, batch: Any) -> Tensor:
    """Every tensor of the output takes part, so that a lost gradient shows."""
    from remat.trees import tensors

    return sum((t.float().square().mean() for t in tensors(output) if t.is_floating_point()), torch.zeros(()))


def own_loss(output: Any, batch: Any) -> Tensor:
    return output.loss


ZOO: dict[str, Callable[[], Case]] = {}


def zoo(build: Callable[[], Case]) -> Callable[[], Case]:
    def seeded() -> Case:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            case = build()
            case.model.train()
            return case

    ZOO[build.__name__] = seeded
    return seeded


# ---------------------------------------------------------------------------------------- written by hand


class InARow(nn.Module):
    """Blocks, and a loss of its own."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class MlpBlock(nn.Module):
    def __init__(self, width: int, dropout: float = 0.2) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


@zoo
def mlp() -> Case:
    """Dropout in every block."""
    return Case(nn.Sequential(*[MlpBlock(16) for _ in range(4)]), torch.randn(8, 16), squared)


class Bottleneck(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.conv1, self.bn1 = nn.Conv2d(width, half, 1, bias=False), nn.BatchNorm2d(half)
        self.conv2, self.bn2 = nn.Conv2d(half, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x
        return self.relu(y)


class TinyResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.layer1 = nn.Sequential(Bottleneck(8), Bottleneck(8))
        self.layer2 = nn.Sequential(Bottleneck(8), Bottleneck(8), Bottleneck(8))
        self.head = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layer2(self.layer1(self.stem(images))).mean((2, 3)))


@zoo
def resnet() -> Case:
    """BatchNorm and in-place ReLU."""
    return Case(TinyResNet(), torch.randn(4, 3, 8, 8), squared)


class PreActivation(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.act, self.linear = nn.ELU(inplace=True), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.act(x))


@zoo
def writes_input() -> Case:
    """Every block writes its input in place before it reads it."""
    return Case(
        nn.Sequential(nn.Linear(8, 8), *[PreActivation(8) for _ in range(3)]), torch.randn(4, 8), squared
    )


class RReluLast(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(width, width), nn.RReLU(0.1, 0.9)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x))


@zoo
def rrelu_last() -> Case:
    """The last operation of each block is random and saves its own noise (pytorch/pytorch#193671)."""
    return Case(nn.Sequential(*[RReluLast(16) for _ in range(3)]), torch.randn(8, 16), squared)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.blocks = nn.ModuleList(MlpBlock(16) for _ in range(3))
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@zoo
def tied() -> Case:
    """Head tied to the embedding, and one weight shared by two blocks."""
    return Case(Tied(), torch.randint(11, (4, 6)), squared)


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = MlpBlock(16)
        self.blocks = nn.ModuleList([shared, MlpBlock(16), shared])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@zoo
def shared_block() -> Case:
    """One block object listed and called twice."""
    return Case(CalledTwice(), torch.randn(8, 16), squared)


class Pair(nn.Module):
    """Tuples in, a dict with a tuple and non-tensors out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, pair: tuple[Tensor, Tensor], scale: float = 1.0) -> dict[str, Any]:
        a, b = pair
        a, b = torch.tanh(self.left(a) + b), torch.sigmoid(self.right(b) * a) * scale
        return {"pair": (a, b), "nothing": None, "name": "pair"}


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Pair(8) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = {"pair": (x, x.flip(0))}
        for layer in self.layers:
            state = layer(state["pair"], scale=0.5)
        return state


@zoo
def pytrees() -> Case:
    return Case(Pairs(), torch.randn(4, 8), squared)


class KeywordOnly(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = MlpBlock(width)

    def forward(self, *, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        out = self.inner(hidden)
        return out if mask is None else out * mask


class KeywordOnlyStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(KeywordOnly(8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(hidden=x, mask=None if i == 0 else (x.detach() > 0).float())
        return x


@zoo
def keyword_only() -> Case:
    return Case(KeywordOnlyStack(), torch.randn(4, 8), squared)


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = (
            nn.Linear(base.in_features, rank, bias=False),
            nn.Linear(rank, base.out_features, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


@zoo
def lora() -> Case:
    """Frozen base, trained adapters; the input needs no gradient and the last block is frozen altogether."""
    model = nn.Sequential(*[MlpBlock(16) for _ in range(4)]).requires_grad_(False)
    for block in model[1:3]:
        block.up = LoraLinear(block.up)
    return Case(model, torch.randn(8, 16), squared)


class LstmStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(8, 8, batch_first=True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return x


@zoo
def lstm() -> Case:
    return Case(LstmStack(), torch.randn(2, 5, 8), squared)


# ----------------------------------------------------------------------------- two towers, openpi's manner


class AdaNorm(nn.Module):
    """RMS norm whose scale and gate come from a condition (the diffusion time), if there is one."""

    def __init__(self, width: int, condition: int | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width)) if condition is None else None
        self.dense = None if condition is None else nn.Linear(condition, 2 * width)

    def forward(self, x: Tensor, condition: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        if self.dense is None or condition is None:
            return y * (1 + self.weight), None
        scale, gate = self.dense(condition)[:, None].chunk(2, dim=-1)
        return y * (1 + scale), gate


class ExpertLayer(nn.Module):
    def __init__(self, width: int, inner: int, condition: int | None) -> None:
        super().__init__()
        self.norm1, self.norm2 = AdaNorm(width, condition), AdaNorm(width, condition)
        self.q, self.k, self.v = (nn.Linear(width, inner, bias=False) for _ in range(3))
        self.o = nn.Linear(inner, width, bias=False)
        self.gate, self.up, self.down = nn.Linear(width, 32), nn.Linear(width, 32), nn.Linear(32, width)

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.gate(x), approximate="tanh") * self.up(x))


class Tower(nn.Module):
    def __init__(self, width: int, inner: int, condition: int | None, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ExpertLayer(width, inner, condition) for _ in range(depth))


def plain_call(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(*args)


class JointModel(nn.Module):
    """Vision tower -> language model and action expert, layer i of both run by one function over a list.

    The layers' own `forward` is never called (as in openpi): what repeats is the function `joint_layer`, so
    it is `region` that may be replaced by a checkpoint function.
    """

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.vision_tower = nn.Sequential(nn.Linear(12, 16), *[MlpBlock(16, 0.0) for _ in range(3)])
        self.language_model = Tower(16, 8, None, depth)
        self.action_expert = Tower(8, 8, 4, depth)
        self.embed_action, self.embed_time = nn.Linear(3, 8), nn.Linear(1, 4)
        self.head = nn.Linear(8, 3)
        self.region: Callable[..., Any] = plain_call

    def joint_layer(
        self, index: int, hidden: list[Tensor], conditions: list[Tensor | None], mask: Tensor
    ) -> list[Tensor]:
        layers = [self.language_model.layers[index], self.action_expert.layers[index]]
        normed = [layer.norm1(x, c) for layer, x, c in zip(layers, hidden, conditions, strict=True)]
        q, k, v = (
            torch.cat([getattr(layer, name)(x) for layer, (x, _) in zip(layers, normed, strict=True)], dim=1)
            for name in "qkv"
        )
        attended = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], attn_mask=mask)[:, 0]
        parts = attended.split([x.shape[1] for x in hidden], dim=1)
        out = []
        for layer, x, c, (_, gate), part in zip(layers, hidden, conditions, normed, parts, strict=True):
            y = layer.o(part)
            x = x + (y if gate is None else y * gate)
            z, gate = layer.norm2(x, c)
            z = layer.mlp(z)
            out.append(x + (z if gate is None else z * gate))
        return out

    def forward(self, images: Tensor, actions: Tensor, time: Tensor) -> Tensor:
        hidden = [self.vision_tower(images), self.embed_action(actions)]
        conditions = [None, torch.tanh(self.embed_time(time[:, None]))]
        total = images.shape[1] + actions.shape[1]
        mask = torch.ones(total, total, dtype=torch.bool).tril()
        for index in range(len(self.language_model.layers)):
            hidden = self.region(self.joint_layer, index, hidden, conditions, mask)
        # the prefix takes part in the loss too: without it the last language layer would have no gradient
        return self.head(hidden[1]) + hidden[0].mean()


@zoo
def joint() -> Case:
    batch = {"images": torch.randn(2, 5, 12), "actions": torch.randn(2, 4, 3), "time": torch.rand(2)}
    return Case(JointModel(), batch, squared)


# -------------------------------------------------------------------------------------------- transformers


def _tokens(vocabulary: int = 64, shape: tuple[int, int] = (2, 8)) -> Tensor:
    return torch.randint(3, vocabulary, shape)


def _llama_sizes() -> dict[str, Any]:
    return {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 32,
    }


@zoo
def llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens = _tokens()
    return Case(
        LlamaForCausalLM(LlamaConfig(**_llama_sizes())), {"input_ids": tokens, "labels": tokens}, own_loss
    )


@zoo
def gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=3, n_head=2)  # dropout 0.1
    config.use_cache = False  # as in any training; multiplied with a cache's copy, some CPUs round otherwise
    config.bos_token_id = config.eos_token_id = 1
    tokens = _tokens()
    return Case(GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}, own_loss)


@zoo
def bert() -> Case:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )  # dropout 0.1
    tokens = _tokens()
    return Case(BertForMaskedLM(config), {"input_ids": tokens, "labels": tokens}, own_loss)


@zoo
def t5() -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=64,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_decoder_layers=3,
        num_heads=2,
        dropout_rate=0.1,
    )
    config.decoder_start_token_id = config.pad_token_id = 0
    return Case(
        T5ForConditionalGeneration(config),
        {"input_ids": _tokens(), "labels": _tokens(shape=(2, 5))},
        own_loss,
    )


@zoo
def vit() -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=8,
        num_labels=4,
        hidden_dropout_prob=0.1,
    )
    batch = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 3])}
    return Case(ViTForImageClassification(config), batch, own_loss)


@zoo
def paligemma() -> Case:
    from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

    config = PaliGemmaConfig(
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 8,
            "projection_dim": 16,
            "vision_use_head": False,
        },
        text_config={"model_type": "gemma", **_llama_sizes()},
        image_token_id=63,
        projection_dim=16,
        hidden_size=16,
        vocab_size=64,
        pad_token_id=0,
    )
    tokens = torch.cat([torch.full((2, 4), 63), _tokens(60, (2, 6))], dim=1)
    labels = tokens.masked_fill(tokens == 63, -100)
    batch = {
        "input_ids": tokens,
        "labels": labels,
        "pixel_values": torch.randn(2, 3, 16, 16),
        "token_type_ids": torch.zeros_like(tokens),
        "attention_mask": torch.ones_like(tokens),
    }
    return Case(PaliGemmaForConditionalGeneration(config), batch, own_loss)
