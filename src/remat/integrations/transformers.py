"""transformers' Trainer, and trainers made from it (TRL's SFTTrainer and others).

    trainer = Trainer(model, arguments, train_dataset=..., callbacks=[RematCallback(budget="16GiB")])

The plan is made at the first training step, on the batch that the step was given: no batch is taken out of
the dataloader, and the training sees the data and the random numbers that it would see without remat.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from remat.errors import InputError, RematError
from remat.handle import Handle
from remat.integrations.common import Settings, logged, missing, unchanged
from remat.records import Action
from remat.show.text import Report

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise ImportError(missing("transformers", "hf")) from error

__all__ = ["RematCallback"]


class RematCallback(TrainerCallback):  # type: ignore[misc]
    """Train within a budget. The arguments are those of `remat.fit`, without `compile` and
    `on_event`; `adaptive`: batches of other lengths get
    plans of their own. A step that runs out of memory is run again under a tighter plan.

    `gradient_checkpointing=True` in the TrainingArguments does no harm: it is off while the plan runs. After
    training the model is as before; `report` tells what was decided and what happened.
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
        self._trainer: Any = None
        self.handle: Handle | None = None
        self.report: Report | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stop()  # an earlier training may have been interrupted
        trainer = _calling_trainer()
        _refuse_strategies(trainer)
        self._trainer = trainer
        trainer.training_step = self._around_step(trainer.training_step)
        trainer.log = self._around_log(trainer.log)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stop()

    def _around_step(self, training_step: Callable[..., Any]) -> Callable[..., Any]:
        def step(model: Any, inputs: Any, num_items_in_batch: Any = None, **more: Any) -> Any:
            if self.handle is None:
                self.handle = self._fit(model, inputs, num_items_in_batch)

            def forward_and_backward() -> torch.Tensor:
                return training_step(model, inputs, num_items_in_batch, **more)  # type: ignore[no-any-return]

            ddp = model if isinstance(model, nn.parallel.DistributedDataParallel) else None
            return self.handle.step(forward_and_backward, backward=lambda loss: None, ddp=ddp)

        return step

    def _around_log(self, log: Callable[..., None]) -> Callable[..., None]:
        def with_scalars(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            if self.handle is not None and "loss" in logs:  # of training, not of an evaluation
                logs.update(logged(self.handle))
            log(logs, *args, **kwargs)

        return with_scalars

    def _fit(self, wrapped: nn.Module, inputs: Any, num_items_in_batch: Any) -> Handle:
        trainer = self._trainer
        model = trainer.accelerator.unwrap_model(wrapped)

        def forward(batch: Any) -> torch.Tensor:
            model.train()
            prepared = trainer._prepare_inputs(batch)  # a new dictionary: losses take entries out of it
            with trainer.compute_loss_context_manager():
                return trainer.compute_loss(model, prepared, num_items_in_batch=num_items_in_batch)  # type: ignore[no-any-return]

        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # accelerate wraps it
        with unchanged(trainer):
            return self._settings.fit(
                model, inputs, forward, optimizer, trainer.args.gradient_accumulation_steps
            )

    def _stop(self) -> None:
        if self.handle is not None:
            self.report = self.handle.report()
            self.handle.remove()
            self.handle = None
        if self._trainer is not None:
            for name in ("training_step", "log"):
                vars(self._trainer).pop(name, None)
            self._trainer = None


def _calling_trainer() -> Any:
    """The trainer that is calling this callback: callbacks are given everything but the trainer itself."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    raise RematError(
        "RematCallback was called by no transformers.Trainer; use remat.fit(model, batch, ...) instead"
    )


def _refuse_strategies(trainer: Any) -> None:
    if trainer.is_deepspeed_enabled:
        raise InputError(
            "RematCallback cannot plan a step that DeepSpeed runs; use DDP or FSDP2, or leave it out"
        )
    if trainer.args.n_gpu > 1:
        raise InputError(
            "RematCallback cannot plan for DataParallel (several GPUs in one process); start one process per "
            "GPU with torchrun or accelerate launch"
        )
