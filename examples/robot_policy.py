"""A robot policy in openpi's manner: a vision tower, a language model and an action expert whose layers
attend jointly over a list of streams, with norms that follow the diffusion time. One fit covers all three.

    python examples/robot_policy.py

Layer i of both models runs in one function, so the function is what is planned: it is marked by a name. No
layer is checkpointed twice, as happens where the function and the layers in it both are.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import remat

DEPTH, HEADS = 4, 4


class Norm(nn.Module):
    def __init__(self, width: int, condition: int) -> None:
        super().__init__()
        self.scale = nn.Linear(condition, 2 * width) if condition else None

    def forward(self, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor | float]:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        scale, gate = self.scale(time)[:, None].chunk(2, -1) if self.scale else (0.0, 1.0)
        return y * (1 + scale), gate


class Layer(nn.Module):
    def __init__(self, width: int, inner: int, condition: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(width, condition), Norm(width, condition)
        self.qkv, self.out = nn.Linear(width, 3 * inner), nn.Linear(inner, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        vision = nn.TransformerEncoderLayer(64, HEADS, 256, dropout=0.0, batch_first=True, norm_first=True)
        self.vision_tower = nn.TransformerEncoder(vision, DEPTH, enable_nested_tensor=False)
        self.language_model = nn.ModuleList(Layer(64, 64, 0) for _ in range(DEPTH))
        self.action_expert = nn.ModuleList(Layer(32, 64, 16) for _ in range(DEPTH))
        self.embed_action, self.embed_time, self.head = nn.Linear(7, 32), nn.Linear(1, 16), nn.Linear(32, 7)

    def joint_layer(self, index: int, streams: list[Tensor], time: Tensor) -> list[Tensor]:
        layers = [self.language_model[index], self.action_expert[index]]
        normed = [layer.norm1(x, time) for layer, x in zip(layers, streams, strict=True)]
        qkv = torch.cat([layer.qkv(x) for layer, (x, _) in zip(layers, normed, strict=True)], 1)
        q, k, v = qkv.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        parts, made = mixed.split([x.shape[1] for x in streams], 1), []
        for layer, x, (_, gate), part in zip(layers, streams, normed, parts, strict=True):
            x = x + layer.out(part) * gate
            y, gate = layer.norm2(x, time)
            made.append(x + layer.mlp(y) * gate)
        return made

    def forward(self, images: Tensor, actions: Tensor, time: Tensor) -> Tensor:
        streams = [self.vision_tower(images), self.embed_action(actions)]
        embedded = torch.tanh(self.embed_time(time[:, None]))
        for index in range(DEPTH):
            streams = remat.region(f"joint layer {index}", self.joint_layer)(index, streams, embedded)
        return F.mse_loss(self.head(streams[1]), actions) + 0.01 * streams[0].square().mean()


def main() -> None:
    torch.manual_seed(0)
    model = Policy()
    batch = {"images": torch.randn(8, 64, 64), "actions": torch.randn(8, 16, 7), "time": torch.rand(8)}
    handle = remat.fit(model, batch, activations=0.5)
    model(**batch).backward()
    print(handle.report())
    print(handle.status())


if __name__ == "__main__":
    main()
