"""Lightning's Trainer, with any strategy that trains the module as it is or with DDP, and Fabric.

    trainer = Trainer(callbacks=[RematCallback(budget="16GiB")])

    model, optimizer = fabric.setup(model, optimizer)
    handle = remat.integrations.lightning.fit(model, batch, budget="16GiB", loss=...)

The plan is made before the first training batch, on that batch, by running the module's own `training_step`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from remat import api
from remat.check.step import Loss, call_model, loss_of
from remat.errors import InputError
from remat.handle import Handle
from remat.integrations.common import Settings, logged, missing, unchanged
from remat.records import Action
from remat.show.text import Report

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback
    except ImportError as error:
        raise ImportError(missing("lightning", "lightning")) from error

__all__ = ["RematCallback", "fit"]


class RematCallback(Callback):  # type: ignore[misc]
    """Train within a budget. The arguments are those of `remat.fit`, without `compile` and
    `on_event`; `adaptive`: batches of other lengths get
    plans of their own, where one submodule (self.model) is the model.

    After training the module is as before; `report` tells what was decided and what happened.
    """

    def __init__(
        self,
        budget: int | str | None = None,
        *,
        activations: float | None = None,
        allow: Sequence[Action | str] | None = None,
        check: bool = True,
        adaptive: bool = True,
    ) -> None:
        self._settings = Settings(budget, activations, allow, check, adaptive)
        self.handle: Handle | None = None
        self.report: Report | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.handle is None:
            self.handle = self._fit(trainer, pl_module, batch, batch_idx)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        if self.handle is not None and trainer.logger is not None:
            pl_module.log_dict(logged(self.handle), on_step=True, on_epoch=False)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._stop()

    def _fit(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> Handle:
        _refuse_strategies(trainer)
        if not pl_module.automatic_optimization:
            raise InputError(
                f"{type(pl_module).__name__} optimizes by itself (automatic_optimization=False), so that its "
                "training_step is more than forward and loss; call remat.fit(model, batch, ...) in "
                "on_train_start instead"
            )

        def forward(batch: Any) -> torch.Tensor:
            with trainer.precision_plugin.train_step_context():
                return loss_of(pl_module.training_step(batch, batch_idx), batch)

        optimizers, inner = trainer.optimizers, _inner(pl_module)
        settings = self._settings if inner is not None else replace(self._settings, adaptive=False)
        with _silent(pl_module), unchanged(*pl_module.modules()):
            return settings.fit(
                pl_module if inner is None else inner,
                batch,
                forward,
                optimizers[0] if len(optimizers) == 1 else None,
                trainer.accumulate_grad_batches,
            )

    def _stop(self) -> None:
        if self.handle is not None:
            self.report = self.handle.report()
            self.handle.remove()
            self.handle = None


def _refuse_strategies(trainer: Any) -> None:
    name = type(trainer.strategy).__name__
    if "DeepSpeed" in name or "DataParallel" in name:
        raise InputError(
            f"RematCallback cannot plan a step that {name} runs; use DDP or FSDP2, or leave it out"
        )


def _inner(pl_module: Any) -> nn.Module | None:
    """The model inside, where one submodule has all parameters: plans for other sizes need to see its inputs,
    and a training_step does not call the LightningModule itself."""
    total = len(list(pl_module.parameters()))
    for child in pl_module.children():
        if len(list(child.parameters())) == total and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            return child  # type: ignore[no-any-return]
    return None


@contextmanager
def _silent(pl_module: Any) -> Iterator[None]:
    """Steps that run while planning are not logged."""

    def log(*args: Any, **kwargs: Any) -> None:
        return None

    with ExitStack() as stack:
        for name in ("log", "log_dict"):
            stack.callback(vars(pl_module).pop, name, None)
            vars(pl_module)[name] = log
        yield


def fit(
    model: Any, batch: Any, budget: int | str | None = None, *, loss: Loss | None = None, **options: Any
) -> Handle:
    """`remat.fit` for a model that Fabric has set up: with Fabric's precision, and without its exchange of
    gradients between ranks."""
    precision, module = (
        getattr(getattr(model, "_strategy", None), "precision", None),
        getattr(model, "module", None),
    )
    if precision is None or module is None:
        raise InputError(
            f"{type(model).__name__} was not set up by Fabric; use remat.fit, or fabric.setup(model) first"
        )

    def forward(batch: Any) -> torch.Tensor:  # `adaptive=True` runs it with batches of other sizes, too
        given = precision.convert_input(batch)
        with precision.forward_context():
            output = call_model(module, given)
        return loss_of(precision.convert_output(output), batch, loss)

    return api.fit(module, batch, step=forward, budget=budget, **options)
