"""What an optimizer will hold and what its step takes for a moment, before it has ever run.

Asked of the optimizer itself: a twin with two small parameters of its own takes one step under the meter, and
what it allocates per byte of parameter is scaled up to the real ones.
"""

from __future__ import annotations

import collections
import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from remat.check.live import Meter, local_bytes, storages_of
from remat.trees import tensors

__all__ = ["OptimizerBytes", "optimizer_bytes"]

_SIDE = 512  # the twin's parameters are 512 x 512


@dataclass(frozen=True)
class OptimizerBytes:
    """`present` is there already, `state` will be after the first step, `temporary` only during a step."""

    present: int
    state: int
    temporary: int


def optimizer_bytes(optimizer: torch.optim.Optimizer, device: torch.device) -> OptimizerBytes:
    """The optimizer's bytes on the device once it has stepped."""
    present = _state_bytes(optimizer, device)
    state = temporary = 0
    for group in optimizer.param_groups:
        trained = [p for p in group["params"] if p.requires_grad and p.device.type == device.type]
        for dtype in {p.dtype for p in trained}:
            sizes = [local_bytes(p) for p in trained if p.dtype == dtype]
            one, two = _probe(optimizer, group, dtype, device, 1), _probe(optimizer, group, dtype, device, 2)
            each = _SIDE * _SIDE * dtype.itemsize
            state += round(one[0] / each * sum(sizes))
            # Twice as much for two parameters: all at once (foreach); the same: one after the other.
            together = two[1] > 1.5 * one[1]
            temporary = max(temporary, round(one[1] / each * (sum(sizes) if together else max(sizes))))
    return OptimizerBytes(present, max(state, present), temporary)


def _state_bytes(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    found = [tensor for state in optimizer.state.values() for tensor in tensors(state)]
    pairs = (pair for tensor in found for pair in storages_of(tensor))
    return sum(storage.nbytes() for storage, place in pairs if place.type == device.type)


def _probe(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    count: int,
) -> tuple[int, int]:
    """(state, temporary) bytes of one step of a twin that has `count` parameters."""
    parameters = [nn.Parameter(torch.zeros(_SIDE, _SIDE, dtype=dtype, device=device)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    twin = copy.copy(optimizer)
    twin.state = collections.defaultdict(dict)
    twin.param_groups = [{**group, "params": parameters}]
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(twin, hooks, collections.OrderedDict())  # the user's hooks are not for a twin
    with Meter(device) as meter:
        twin.step()
        start = meter.current_bytes()
        meter.reset_peak()
        twin.step()
        temporary = meter.peak_bytes() - start
    return _state_bytes(twin, device), temporary
