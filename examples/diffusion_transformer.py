"""A video diffusion transformer trained in DiffSynth's manner: the forward is a `model_fn` outside the model,
and the model's code knows nothing of checkpointing.

    python examples/diffusion_transformer.py

By hand, `gradient_checkpoint_forward` takes the place of DiffSynth's function of that name: whole blocks are
recomputed, and with offload their inputs wait on the host. With a budget, no function is needed: `fit` finds
the blocks that model_fn calls. On a GPU its plans offload, too, as much as the link moves beside the compute.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import remat

FRAMES, SIDE, WIDTH, DEPTH = 4, 8, 64, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.modulation = nn.Linear(WIDTH, 4 * WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU("tanh"), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift1, gate1, shift2, gate2 = self.modulation(time)[:, None].chunk(4, -1)
        q, k, v = self.qkv(self.norm1(x) + shift1).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + gate1 * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + gate2 * self.mlp(self.norm2(x) + shift2)


class VideoTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.time, self.head = nn.Linear(4, WIDTH), nn.Linear(1, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))


def model_fn(dit: VideoTransformer, latents: Tensor, time: Tensor, way: str) -> Tensor:
    x, embedded = dit.patches(latents), F.silu(dit.time(time[:, None]))
    for block in dit.blocks:
        x = remat.gradient_checkpoint_forward(block, way == "recompute", way == "offload", x=x, time=embedded)
    return dit.head(x)


def flow_loss(dit: VideoTransformer, latents: Tensor, noise: Tensor, time: Tensor, way: str = "") -> Tensor:
    mixed = torch.lerp(latents, noise, time[:, None, None])
    return F.mse_loss(model_fn(dit, mixed, time, way), noise - latents)


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dit = VideoTransformer().to(device)
    latents, noise = torch.randn(2, 2, FRAMES * SIDE * SIDE, 4, device=device)
    time = torch.rand(2, device=device)

    for way in ("plain", "recompute", "offload"):
        measured = remat.measure(
            lambda way=way: flow_loss(dit, latents, noise, time, way).backward(), model=dit
        )
        print(f"{way}: activation peak {measured.activation_bytes / 2**20:.1f} MiB")

    handle = remat.fit(dit, step=lambda: flow_loss(dit, latents, noise, time), activations=0.5)
    print(handle.report())
    optimizer = torch.optim.AdamW(dit.parameters(), lr=1e-3)
    for _ in range(4):
        loss = flow_loss(dit, latents, noise, time)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
