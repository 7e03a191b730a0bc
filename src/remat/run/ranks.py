"""Several processes that train one model: they agree whether a step has succeeded before any of them uses it.

DistributedDataParallel averages gradients in the middle of backward. A rank that runs out of memory there
would leave the others waiting for ever. So a step that may be run again keeps to itself (`no_sync`), the
ranks tell each other how it went, and only when all have succeeded are gradients averaged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from remat.errors import InputError, RecoveryError

__all__ = ["Ranks"]

_BUCKET_BYTES = 25 * 2**20
_groups: dict[Any, Any] = {}  # of a device's process group, the one for messages between hosts


class Ranks:
    """The processes around a step. Without `ddp` this one is alone."""

    def __init__(self, model: nn.Module, ddp: DistributedDataParallel | None = None) -> None:
        if ddp is not None and not isinstance(ddp, DistributedDataParallel):
            raise InputError(
                f"ddp is a {type(ddp).__name__}; pass the DistributedDataParallel model that the step runs"
            )
        if ddp is None and isinstance(model, DistributedDataParallel):
            ddp = model
        self._model, self._ddp = model, ddp
        self._average = ddp is not None and bool(ddp.require_backward_grad_sync)
        self._shares_buffers = ddp is not None and bool(ddp.require_forward_param_sync)
        self._some: list[bool] = []  # per parameter: some rank has a gradient of it
        if ddp is not None and self._average and getattr(ddp, "_comm_hooks", None):
            raise InputError(
                "this DistributedDataParallel has a communication hook, which handle.step does not run: call "
                "forward and backward yourself, without recovery, or take the hook away"
            )

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, backward leaves gradients to this process."""
        if self._ddp is None:
            yield
            return
        # Buffers go from rank 0 to all in the forward after a step that averaged: this flag says so, and
        # every forward sets it anew. All ranks begin each run of the step as they began the first.
        self._ddp.require_forward_param_sync = self._shares_buffers
        with self._ddp.no_sync():
            yield

    def agree(self, well: bool) -> bool:
        """Whether all ranks have fared well. Waits for all of them."""
        if self._ddp is None:
            return well
        parameters = self._parameters()
        message = torch.tensor([not well, *(p.grad is not None for p in parameters)], dtype=torch.int32)
        dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self._messages())
        failed, *some = message.tolist()
        self._some = [bool(there) for there in some]
        return not failed

    def refuse_alone(self, failure: Any) -> None:
        """Under other parallelism a rank that tries again by itself would leave the others waiting."""
        if self._ddp is not None or not (dist.is_available() and dist.is_initialized()):
            return
        if dist.get_world_size() == 1:
            return
        how = "handle.step(fn, ddp=model), with the DistributedDataParallel model, lets all ranks try again"
        if any(_is_sharded(module) for module in self._model.modules()):
            how = (
                "under FSDP the ranks exchange parameters inside forward and backward, so that no rank can "
                "try again by itself: leave more room (a lower budget), or let a checkpoint restart the job"
            )
        raise RecoveryError(
            f"one of {dist.get_world_size()} ranks ran out of memory ({failure.text}), and it is not known "
            f"how the others fared; {how}"
        )

    def average_gradients(self) -> None:
        """What DDP would have done in backward, with the same arithmetic: divide, then sum."""
        if self._ddp is None or not self._average:
            return
        self._ddp.require_forward_param_sync = True
        buckets: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for parameter, some in zip(self._parameters(), self._some, strict=True):
            if some:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                buckets.setdefault((parameter.grad.dtype, parameter.grad.device), []).append(parameter)
        for parameters in buckets.values():
            for bucket in _in_buckets(parameters):
                self._average_bucket([p.grad for p in bucket if p.grad is not None])

    def _average_bucket(self, gradients: list[Tensor]) -> None:
        assert self._ddp is not None
        group = self._ddp.process_group
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        flat.mul_(1.0 / dist.get_world_size(group))
        dist.all_reduce(flat, group=group)
        for gradient, part in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def _parameters(self) -> list[nn.Parameter]:
        assert self._ddp is not None
        return [p for p in self._ddp.parameters() if p.requires_grad]

    def _messages(self) -> Any:
        """A group that passes messages between hosts: reading an answer from a device would wait for it."""
        assert self._ddp is not None
        group = self._ddp.process_group
        if group not in _groups:
            alike = dist.get_backend(group) == "gloo" or not dist.is_gloo_available()
            ranks = dist.get_process_group_ranks(group)
            # Ranks outside of this group are not here, and would be waited for.
            _groups[group] = (
                group if alike else dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
            )
        return _groups[group]


def _in_buckets(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        bucket.append(parameter)
        size += parameter.numel() * parameter.element_size()
        if size >= _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def _is_sharded(module: nn.Module) -> bool:
    return any(kind.__name__ in ("FSDPModule", "FullyShardedDataParallel") for kind in type(module).__mro__)
