"""`remat demo`: a small GPT learns to write remat's own source, with and without checkpointing.

Nothing is downloaded: the model is initialised at random, the text is this package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import remat
from remat.check.measure import Measurement
from remat.check.verify import Verification, verify
from remat.compiling import compile_hint
from remat.show.progress import showing
from remat.units import format_bytes, format_seconds

__all__ = ["GPT", "Config", "Row", "compare_ways", "demo"]


@dataclass(frozen=True)
class Config:
    """About 11 million parameters; bytes are the vocabulary. Smaller ones show what Python costs."""

    vocabulary: int = 256
    width: int = 384
    heads: int = 6
    layers: int = 6
    context: int = 256
    batch: int = 4
    dropout: float = 0.1
    steps: int = 6
    seed: int = 0


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        mixed: Tensor = x + self.dropout(self.mlp(self.norm2(x)))
        return mixed


class GPT(nn.Module):
    """Tokens in, mean cross-entropy of the next token out."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def build() -> tuple[GPT, dict[str, Tensor]]:
    """A smaller one of the demo's models and a batch, for `remat plan remat.demo:build`."""
    torch.manual_seed(0)
    config = Config(width=256, heads=4, context=128)
    return GPT(config), _batches(config, torch.device("cpu"))[0]


@dataclass(frozen=True)
class Row:
    """One way to run the same training."""

    name: str
    measurement: Measurement
    losses: tuple[float, ...]
    verification: Verification | None  # None: this is the untouched step itself
    hint: str = ""  # what compile=True is predicted to take, if less, where there is a compiler

    def as_dict(self) -> dict[str, Any]:
        verified = self.verification
        return {
            "step": self.name,
            "peak_bytes": self.measurement.peak_bytes,
            "activation_bytes": self.measurement.activation_bytes,
            "seconds": self.measurement.seconds,
            "bitwise": None if verified is None else verified.bitwise,
            "losses": list(self.losses),
        }


def compare_ways(
    config: Config, device: str | torch.device, progress: Callable[[str], None] = lambda _: None
) -> list[Row]:
    """Train the same model from the same seed in each way, then measure and verify one more step."""
    ways: dict[str, Callable[[nn.Module, dict[str, Tensor]], object]] = {
        "plain": lambda model, batch: None,
        "remat.enable": lambda model, batch: remat.enable(model),
        "remat.fit 0.5": lambda model, batch: remat.fit(model, batch, activations=0.5),
    }
    batches = _batches(config, torch.device(device))
    rows = []
    for name, prepare in ways.items():
        progress(name)
        rows.append(_train(name, prepare, config, batches))
    return rows


def _train(
    name: str,
    prepare: Callable[[nn.Module, dict[str, Tensor]], object],
    config: Config,
    batches: list[dict[str, Tensor]],
) -> Row:
    torch.manual_seed(config.seed)
    model = GPT(config).to(batches[0]["tokens"].device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    prepared = prepare(model, batches[0])

    def train(batch: dict[str, Tensor]) -> float:
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()  # last, so that a step starts without gradients and those it makes are counted
        return float(loss.detach())

    losses = tuple(train(batch) for batch in batches)
    verification = None if name == "plain" else verify(model, batches[0])
    last = batches[-1]
    measurement = remat.measure(lambda: train(last), model=model, optimizer=optimizer, warmup=1, repeats=3)
    return Row(name, measurement, losses, verification, _hint(prepared, last["tokens"].device))


def _hint(prepared: object, device: torch.device) -> str:
    """What a report says where that is worth more: here however little it is."""
    if not isinstance(prepared, remat.Handle):
        return ""
    profile = prepared.plan.profile
    return " ".join(compile_hint(profile.calls, profile.kinds, profile.step_seconds, device, worth=0.0))


def _batches(config: Config, device: torch.device) -> list[dict[str, Tensor]]:
    """Pieces of the package's own source, chosen by the seed."""
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(config.seed)
    starts = torch.randint(len(text) - config.context - 1, (config.steps, config.batch), generator=generator)
    pieces = torch.stack([text[start : start + config.context + 1] for start in starts.flatten().tolist()])
    pieces = pieces.long().to(device).unflatten(0, (config.steps, config.batch))  # type: ignore[no-untyped-call]
    return [
        {"tokens": piece[:, :-1].contiguous(), "labels": piece[:, 1:].contiguous()}
        for piece in pieces.unbind()
    ]


def demo(
    device: str | None = None, config: Config | None = None, console: Console | None = None
) -> list[Row]:
    """Run every way and print the table."""
    config, console = config or Config(), console or Console()
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    rows = train(place, config)
    console.print(headline(config, place), highlight=False)
    console.print(table(rows))
    return rows


def train(place: str, config: Config) -> list[Row]:
    """Every way, with progress on standard error."""
    with showing("remat: training") as progress:
        return compare_ways(config, place, progress)


def headline(config: Config, place: str) -> str:
    parameters = sum(p.numel() for p in GPT(config).parameters())
    return (
        f"GPT, {config.layers} blocks, {parameters / 1e6:.1f} M parameters, "
        f"batch {config.batch} x {config.context}, {config.steps} AdamW steps on {place}"
    )


def table(rows: list[Row]) -> Table:
    plain = rows[0]
    first, last = plain.losses[0], plain.losses[-1]
    alike = "in every row" if all(row.losses == plain.losses for row in rows) else "in the first row only"
    meaning = "activations: peak above what was resident before the step"
    hints = "".join(f"\n{row.hint}" for row in rows if row.hint)
    shown = Table(caption=f"{meaning}\nloss {first:.3f} -> {last:.3f} {alike}{hints}")
    shown.add_column("step")
    for title in ("peak", "activations", "time per step", "gradients\nbit-equal"):
        shown.add_column(title, justify="right")
    for row in rows:
        now, before = row.measurement, plain.measurement
        shown.add_row(
            row.name,
            format_bytes(now.peak_bytes),
            f"{format_bytes(now.activation_bytes)} ({now.activation_bytes / before.activation_bytes:.2f})",
            f"{format_seconds(now.seconds)} ({now.seconds / before.seconds:.2f})",
            "-" if row.verification is None else "yes" if row.verification.bitwise else "no",
        )
    return shown
