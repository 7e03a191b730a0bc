"""What the callbacks of all trainers share: the settings of `fit`, kept until the first batch is there."""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from remat import api
from remat.handle import Handle
from remat.records import Action
from remat.run.quiet import SWITCHES
from remat.show.scalars import scalars_of
from remat.units import parse_bytes

__all__ = ["Settings", "logged", "missing", "unchanged"]


def missing(library: str, extra: str) -> str:
    """What an import error says."""
    return f"{library} is not installed; this integration needs it: pip install 'remat[{extra}]'"


@dataclass(frozen=True)
class Settings:
    """The arguments of `fit` that a user gives to a callback. Checked at once, used at the first batch."""

    budget: int | str | None = None
    activations: float | None = None
    allow: Sequence[Action | str] | None = None
    check: bool = True
    adaptive: bool = True

    def __post_init__(self) -> None:
        api.check_budget_arguments(self.budget, self.activations)
        if self.budget is not None:
            parse_bytes(self.budget, total=1 << 40)  # whether it can be read; the device is not known yet

    def fit(
        self,
        model: nn.Module,
        batch: Any,
        step: Callable[[Any], torch.Tensor],
        optimizer: torch.optim.Optimizer | None,
        accumulate: int,
    ) -> Handle:
        return api.fit(
            model,
            batch,
            step=step,
            budget=self.budget,
            activations=self.activations,
            optimizer=optimizer,
            accumulate=accumulate,
            allow=self.allow,
            check=self.check,
            adaptive=self.adaptive,
        )


# What belongs beside the loss in a training log; the report has the rest.
_LOGGED = (
    "budget_bytes",
    "predicted_peak_bytes",
    "measured_peak_bytes",
    "slowdown",
    "recomputed_calls",
    "fallbacks",
)


def logged(handle: Handle) -> dict[str, float]:
    """A few of the handle's scalars, under names that start with "remat/"."""
    found = scalars_of(handle, prefix="")
    return {f"remat/{name}": found[name] for name in _LOGGED if name in found}


# ------------------------------------------------------------------------------- what a trainer counts

_NUMBERS = (bool, int, float, str, type(None))


@contextmanager
def unchanged(*owners: Any) -> Iterator[None]:
    """Steps that run inside are no steps of training: what the owners count in their attributes (numbers,
    tensors, lists and dictionaries of them, such as metrics that a loss function collects) is afterwards as
    it was. Parameters and buffers of modules are left to `untouched`, and what the plan switches off to
    `quiet`: it stays off when `fit` has returned."""
    before = [
        (owner, name, value, copy.deepcopy(value))
        for owner in owners
        for name, value in vars(owner).items()
        if name not in (*_MODULE_TABLES, *SWITCHES) and _is_plain(value)
    ]
    try:
        yield
    finally:
        for owner, name, value, twin in before:
            # A tensor stays the same object where it can; what changes its length is replaced.
            vars(owner)[name] = value if _restored(value, twin) else twin


_MODULE_TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple, deque, set):
        return all(map(_is_plain, value))
    if type(value) in (dict, defaultdict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, torch.Tensor):
        return value.grad_fn is None and not isinstance(value, nn.Parameter)
    return isinstance(value, _NUMBERS)


def _restored(value: Any, twin: Any) -> bool:
    if isinstance(value, torch.Tensor):
        if not torch.equal(value, twin):
            value.data.copy_(twin)
        return True
    return False
