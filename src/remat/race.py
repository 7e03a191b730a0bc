"""Several ways to run the same training step, measured one after the other: what `remat bench` shows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch

import remat
from remat.check.peak import release_cached
from remat.check.step import run_step
from remat.errors import BudgetError
from remat.jobs import Made
from remat.request import device_of
from remat.units import format_bytes

__all__ = ["Lap", "race"]

Way = Callable[[ExitStack], "remat.Handle | None"]


@dataclass(frozen=True)
class Lap:
    """One way. `failed` says why there are no figures; `prepare_seconds` is what fit took."""

    way: str
    peak_bytes: int | None = None
    activation_bytes: int | None = None
    seconds: float | None = None
    prepare_seconds: float = 0.0
    predicted_peak_bytes: int | None = None
    bitwise: bool | None = None
    failed: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def race(
    made: Made,
    *,
    budgets: Sequence[str | int] = (),
    activations: Sequence[float] = (),
    allow: Sequence[str] | None = None,
    compile: bool | str | None = None,
    repeats: int = 5,
    progress: Callable[[str], None] = lambda doing: None,
) -> list[Lap]:
    """The plain step, every block checkpointed, and fit at each budget and share; the model is not trained.

    A way that does not fit into memory, or a budget out of reach, has a row that says so.
    """
    model, batch = made.model, made.batch

    def fitted(**limit: Any) -> Way:
        def prepare(undo: ExitStack) -> remat.Handle:
            options: dict[str, Any] = {
                "loss": made.loss,
                "optimizer": made.optimizer,
                "allow": allow,
                "compile": compile,
            }
            return undo.enter_context(remat.fit(model, batch, **options, **limit))

        return prepare

    def enabled(undo: ExitStack) -> None:
        remat.enable(model)
        undo.callback(remat.disable, model)

    ways: dict[str, Way] = {"plain": lambda undo: None, "every block recomputed": enabled}
    for budget in budgets:
        ways[f"fit {budget if isinstance(budget, str) else format_bytes(budget)}"] = fitted(budget=budget)
    for share in activations:
        ways[f"fit {share:.0%} of activations"] = fitted(activations=share)
    laps = []
    for name, way in ways.items():
        progress(name)
        laps.append(_lap(name, way, made, repeats))
        release_cached(device_of(model))
    return laps


def _lap(name: str, way: Way, made: Made, repeats: int) -> Lap:
    model = made.model

    def step() -> None:
        run_step(model, made.batch, made.loss).backward()  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            parameter.grad = None

    with ExitStack() as undo:
        try:
            start = time.perf_counter()
            handle = way(undo)
            prepared = time.perf_counter() - start
            found = remat.measure(step, model=model, optimizer=made.optimizer, repeats=repeats)
        except torch.OutOfMemoryError:
            return Lap(name, failed="out of memory")
        except BudgetError as error:
            return Lap(name, failed=f"out of reach: {format_bytes(error.needed)} is the least")
        verification = None if handle is None else handle.verification
        return Lap(
            way=name,
            peak_bytes=found.peak_bytes,
            activation_bytes=found.activation_bytes,
            seconds=found.seconds,
            prepare_seconds=0.0 if name == "plain" else prepared,
            predicted_peak_bytes=None if handle is None else handle.plan.predicted_peak_bytes,
            bitwise=None if verification is None else verification.bitwise,
        )
