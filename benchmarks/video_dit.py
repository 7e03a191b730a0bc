"""A video diffusion transformer in the manner of Wan: a long sequence of patches, text by cross-attention.

Written here because the machines that benchmarks run on need not have diffusers. What matters for memory is
kept: normalised queries and keys, rotary positions, modulation by the timestep in float32, a gated residual.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Shape", "VideoTransformer"]


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    inner: int
    heads: int
    channels: int  # of a latent patch
    text_tokens: int


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.value, self.out = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.query_norm, self.key_norm = nn.RMSNorm(hidden, eps=1e-6), nn.RMSNorm(hidden, eps=1e-6)

    def forward(self, x: Tensor, context: Tensor, rotary: tuple[Tensor, Tensor] | None = None) -> Tensor:
        def split(t: Tensor) -> Tensor:
            return t.reshape(*t.shape[:2], self.heads, -1).transpose(1, 2)

        query, key = split(self.query_norm(self.query(x))), split(self.key_norm(self.key(context)))
        if rotary is not None:
            query, key = _rotated(query, *rotary), _rotated(key, *rotary)
        mixed = functional.scaled_dot_product_attention(query, key, split(self.value(context)))
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden = shape.hidden
        self.norm_self = nn.LayerNorm(hidden, eps=1e-6, elementwise_affine=False)
        self.norm_text = nn.LayerNorm(hidden, eps=1e-6)
        self.norm_mlp = nn.LayerNorm(hidden, eps=1e-6, elementwise_affine=False)
        self.self_attention = Attention(hidden, shape.heads)
        self.text_attention = Attention(hidden, shape.heads)
        self.up, self.down = nn.Linear(hidden, shape.inner), nn.Linear(shape.inner, hidden)
        self.modulation = nn.Parameter(torch.randn(1, 6, hidden) / hidden**0.5)

    def forward(self, x: Tensor, text: Tensor, time: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        parts = (self.modulation.float() + time.float()).chunk(6, dim=1)
        shift_self, scale_self, gate_self, shift_mlp, scale_mlp, gate_mlp = parts
        inner = (self.norm_self(x.float()) * (1 + scale_self) + shift_self).to(x.dtype)
        x = (x.float() + self.self_attention(inner, inner, rotary) * gate_self).to(x.dtype)
        x = x + self.text_attention(self.norm_text(x), text)
        inner = (self.norm_mlp(x.float()) * (1 + scale_mlp) + shift_mlp).to(x.dtype)
        outer: Tensor = self.down(functional.gelu(self.up(inner), approximate="tanh"))
        return (x.float() + outer.float() * gate_mlp).to(x.dtype)


class VideoTransformer(nn.Module):
    """Predicts the velocity of noisy latent patches; returns the loss of flow matching."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.patch_in, self.patch_out = (
            nn.Linear(shape.channels, shape.hidden),
            nn.Linear(shape.hidden, shape.channels),
        )
        self.time_in = nn.Sequential(
            nn.Linear(256, shape.hidden), nn.SiLU(), nn.Linear(shape.hidden, 6 * shape.hidden)
        )
        self.norm_out = nn.LayerNorm(shape.hidden, eps=1e-6)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))

    def forward(self, patches: Tensor, text: Tensor, time: Tensor, velocity: Tensor) -> Tensor:
        x = self.patch_in(patches)
        modulation = self.time_in(_waves(time, 256).to(x.dtype)).reshape(len(x), 6, -1)
        rotary = _rotary(x.shape[1], self.shape.hidden // self.shape.heads, x)
        for block in self.blocks:
            x = block(x, text, modulation, rotary)
        return functional.mse_loss(self.patch_out(self.norm_out(x)).float(), velocity.float())


def _waves(time: Tensor, size: int) -> Tensor:
    rates = torch.exp(-9.21 * torch.arange(size // 2, device=time.device) / (size // 2))
    angles = time.float()[:, None] * rates
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _rotary(length: int, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    rates = 10000.0 ** (-torch.arange(0, size, 2, device=like.device) / size)
    angles = torch.arange(length, device=like.device)[:, None] * rates
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)
