"""Which blocks `enable` checkpoints: choices over the blocks found, with sizes measured where needed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from remat.errors import InputError
from remat.run.checkpoint import Options, run_checkpointed
from remat.run.rng import RandomState, restored
from remat.run.state import ModuleState
from remat.run.wrap import RegionStatus, unwrap, wrap, wrapped
from remat.trace.discover import Block, Selector, resolve

__all__ = ["Select", "Size", "choose", "measure_blocks"]

Select: TypeAlias = "str | Callable[[Block], bool] | Selector"

_RULES = ("uniform", "sqrt", "memory", "compute")
_MEASURED_DENSITY = 0.5


@dataclass(frozen=True)
class Size:
    """What one forward of a block costs."""

    saved_bytes: int
    forward_seconds: float


def choose(
    model: nn.Module,
    every: int,
    select: Any,
    only: Selector | None,
    exclude: Selector | None,
    density: float | None,
    batch: Any,
) -> tuple[Block, ...]:
    """The blocks to checkpoint, in the model's order. Nothing is changed; bad arguments raise InputError."""
    _check(every, density)
    rule = select if isinstance(select, str) and select in _RULES else None
    if rule is None and isinstance(select, (str, type, list, tuple)):
        only, select = _as_only(model, only, select), "uniform"
        rule = "uniform"
    elif rule is None and not callable(select):
        raise InputError(
            f"select={select!r}; say one of {', '.join(_RULES)}, a function of a block, or module names"
        )
    blocks = resolve(model, only, exclude)
    if not blocks:
        raise InputError(
            f"{type(model).__name__} has no repeated blocks to checkpoint; name modules with only=[...], "
            "or checkpoint a function with remat.checkpoint"
        )
    if rule is None:
        chosen = [block for block in blocks if select(block)]
    elif rule in ("memory", "compute"):
        chosen = _by_size(rule, blocks, _measured(model, blocks, batch, rule), density or _MEASURED_DENSITY)
    else:
        chosen = [
            b
            for tower in _towers(blocks)
            for b in _spread(tower, _keep_mask(rule, len(tower), every, density))
        ]
    if not chosen:
        raise InputError(
            f"select={select!r} chose none of {len(blocks)} blocks; widen it, or call remat.disable"
        )
    return tuple(chosen)


def _check(every: object, density: object) -> None:
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise InputError(f"every={every!r}; say an int of at least 1: 1 is every block, 2 every second one")
    if density is None:
        return
    if isinstance(density, bool) or not isinstance(density, (int, float)) or not 0 < density <= 1:
        raise InputError(
            f"density={density!r}; say the share of blocks to checkpoint, more than 0 and at most 1"
        )
    if every != 1:
        raise InputError(f"every={every} and density={density} both say how many blocks; give one of them")


def _as_only(model: nn.Module, only: Selector | None, select: Any) -> Selector:
    if only is not None:
        raise InputError(f"select={select!r} names modules, and so does only={only!r}; give one of them")
    if isinstance(select, str):
        try:
            resolve(model, select)
        except InputError as error:
            raise InputError(
                f"select={select!r} is not one of {', '.join(_RULES)}, and as a name: {error}"
            ) from None
    return select  # type: ignore[no-any-return]


def _towers(blocks: Iterable[Block]) -> list[list[Block]]:
    towers: dict[str, list[Block]] = {}
    for block in blocks:
        towers.setdefault(block.tower, []).append(block)
    return list(towers.values())


def _keep_mask(rule: str, n: int, every: int, density: float | None) -> list[bool]:
    """Which of a tower's n blocks are checkpointed."""
    if rule == "sqrt":
        kept = _evenly(n, min(round(math.sqrt(n)), n - 1)) if n > 1 else [False]
        return [not keep for keep in kept]
    if density is not None:
        return _evenly(n, max(1, round(density * n)))
    return [i % every == 0 for i in range(n)]


def _evenly(n: int, count: int) -> list[bool]:
    """`count` of n, as evenly spread as can be."""
    return [i * count // n != (i + 1) * count // n for i in range(n)]


def _spread(tower: Sequence[Block], mask: Sequence[bool]) -> list[Block]:
    return [block for block, chosen in zip(tower, mask, strict=True) if chosen]


def _by_size(rule: str, blocks: Sequence[Block], sizes: Sequence[Size], density: float) -> list[Block]:
    def order(i: int) -> float:
        size = sizes[i]
        return -size.saved_bytes if rule == "memory" else size.forward_seconds / max(size.saved_bytes, 1)

    best = sorted(range(len(blocks)), key=order)[: max(1, round(density * len(blocks)))]
    return [blocks[i] for i in sorted(best)]


# ----------------------------------------------------------------------------------------- measuring


def _measured(model: nn.Module, blocks: Sequence[Block], batch: Any, rule: str) -> list[Size]:
    if batch is None:
        raise InputError(f'select="{rule}" needs sizes: pass batch=, an example batch to run one forward on')
    sizes = measure_blocks(model, blocks, batch)
    return [sizes.get(block.name, Size(0, math.inf)) for block in blocks]


def measure_blocks(model: nn.Module, blocks: Sequence[Block], batch: Any) -> dict[str, Size]:
    """Saved bytes and forward seconds of each block, from two forwards in which every block is checkpointed.

    The plain step's memory is never needed, there is no backward, and the model is left as it was.
    """
    probes = {block.name: _Probe(block.name) for block in blocks}
    devices = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    before = {block.name: wrapped(block.module) for block in blocks}
    try:
        for block in blocks:
            unwrap(block.module)
            wrap(block.module, probes[block.name])
        for _ in range(2):  # the first one warms up
            with restored(RandomState(devices)), ModuleState(model).as_at_entry(), torch.enable_grad():
                _forward(model, batch)
    finally:
        for block in blocks:
            unwrap(block.module)
            there = before[block.name]
            if there is not None:
                block.module.forward = there
    return {name: Size(probe.saved_bytes, probe.seconds) for name, probe in probes.items() if probe.calls}


def _forward(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


class _Probe:
    """Measures a region while it runs checkpointed."""

    owner = "remat.enable"

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = self.saved_bytes = 0
        self.seconds = 0.0

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.saved_bytes, self.seconds = 0, 0.0
        start = _now(module)
        output = run_checkpointed(forward, args, kwargs, Options(name=self.name), (module,), self)
        self.seconds = _now(module) - start
        return output

    def entered(self) -> None:
        self.calls += 1

    def counting(self) -> bool:
        return True

    def counted(self, before: int, after: int) -> None:
        self.saved_bytes = before

    def recomputed(self) -> None: ...

    def status(self) -> RegionStatus:
        return RegionStatus(self.name, "", "measuring", True, self.calls)


def _now(module: nn.Module) -> float:
    parameter = next(module.parameters(), None)
    if parameter is not None and parameter.device.type == "cuda":
        torch.cuda.synchronize(parameter.device)
    return time.perf_counter()
