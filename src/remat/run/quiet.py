"""What would fight with remat is off while remat is on: KV caches and the libraries' own checkpointing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["SWITCHES", "quiet"]

SWITCHES = ("gradient_checkpointing",)  # attributes of modules that `quiet` turns off and on


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """A cache would be filled again by a recomputation, and a second checkpoint would recompute twice."""
    configs = _cache_users(model)
    checkpointing = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False) is True]
    for config in configs:
        config.use_cache = False
    for module in checkpointing:
        module.gradient_checkpointing = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for config in configs:
            config.use_cache = True
        for module in checkpointing:
            module.gradient_checkpointing = True  # type: ignore[assignment]


def _cache_users(model: nn.Module) -> list[Any]:
    configs = [getattr(module, "config", None) for module in model.modules()]
    found = {id(config): config for config in configs if getattr(config, "use_cache", False) is True}
    return list(found.values())
