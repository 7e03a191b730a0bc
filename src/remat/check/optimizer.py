"""What an optimizer will hold and what its step takes for a moment, before it has ever run.

Asked of the optimizer itself: twins with small parameters of their own take a step under the meter, and what
they allocate per byte of parameter is scaled up to the real ones.
"""

from __future__ import annotations

import collections
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from remat.check.live import Meter, local_bytes, storages_of
from remat.errors import InputError
from remat.trees import tensors

__all__ = ["OptimizerBytes", "optimizer_bytes"]

_SIDE = 512  # a twin's parameters are 512 x 512
_MOST_ELEMENTS = 2**18  # of one that stands for a parameter of another shape
_MOST_SHAPES = 12  # that temporaries are looked at for: the largest parameters'


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
        trained = [p for p in trained if p.numel()]
        alike = {dtype: [p for p in trained if p.dtype == dtype] for dtype in {p.dtype for p in trained}}
        if alike:
            state += sum(_state_of(optimizer, group, some, device) for some in alike.values())
            rates = {dtype: _rates_of(optimizer, group, some, device) for dtype, some in alike.items()}
            temporary = max(temporary, _temporary_of(trained, rates))
    return OptimizerBytes(present, max(state, present), temporary)


def _state_of(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], alike: list[nn.Parameter], device: torch.device
) -> int:
    """By shape: factored state (Adafactor's) is next to nothing for a matrix, and much for small kernels."""
    shapes = list(dict.fromkeys(_small(p.shape) for p in alike))
    made = [torch.zeros(shape, dtype=alike[0].dtype, device=device) for shape in shapes]
    twin = _twin(optimizer, group, made)
    _step(twin)
    parameters = twin.param_groups[0]["params"]
    held = [_bytes_on(device, twin.state.get(parameter, {})) for parameter in parameters]
    # What it keeps elsewhere than under a parameter is shared out over all.
    rest = (_state_bytes(twin, device) - sum(held)) / sum(parameter.nbytes for parameter in parameters)
    share = {s: own / p.nbytes + rest for s, own, p in zip(shapes, held, parameters, strict=True)}
    state: float = sum(share[_small(p.shape)] * local_bytes(p) for p in alike)
    return math.ceil(state)


def _small(shape: torch.Size) -> tuple[int, ...]:
    """A shape like this one, its longest sides cut."""
    sides = list(shape)
    while math.prod(sides) > _MOST_ELEMENTS:
        longest = sides.index(max(sides))
        sides[longest] = -(-sides[longest] // 2)
    return tuple(sides)


@dataclass(frozen=True)
class _Rates:
    """Temporary bytes per byte of a parameter of one dtype: `each` is there for all parameters at once
    (foreach); `alone` for one after the other, by shape; and of the latter `left_over` is still there when
    the next one's turn comes (a loop's variables)."""

    each: float
    left_over: float
    alone: dict[tuple[int, ...], float]
    alone_else: float  # of shapes that were not tried

    def in_turn(self, parameter: nn.Parameter) -> float:
        return self.alone.get(_small(parameter.shape), self.alone_else) * local_bytes(parameter)


def _rates_of(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], alike: list[nn.Parameter], device: torch.device
) -> _Rates:
    def share(*shapes: tuple[int, ...]) -> float:
        """Temporary bytes of a step of parameters of these shapes, per byte of one of them."""
        made = [torch.zeros(shape, dtype=alike[0].dtype, device=device) for shape in shapes]
        return _temporary(_twin(optimizer, group, made), device) / made[0].nbytes

    square = (_SIDE, _SIDE)
    one, two, four = (share(*[square] * count) for count in (1, 2, 4))
    each = max((four - two) / 2, 0.0)
    largest = {_small(p.shape): p for p in sorted(alike, key=local_bytes)}  # of each shape
    shapes = sorted(largest, key=lambda shape: local_bytes(largest[shape]))[-_MOST_SHAPES:]
    return _Rates(
        each=each,
        left_over=max(two - one - each, 0.0),
        alone={shape: max(share(shape) - each, 0.0) for shape in shapes},
        alone_else=max(one - each, 0.0),
    )


def _temporary_of(trained: list[nn.Parameter], rates: dict[torch.dtype, _Rates]) -> int:
    """Of the parameters of one group, in its order. Those of all dtypes are added up: where dtypes take turns
    (foreach), variables of one are still there while the next one's are made."""
    at_once = sum(rates[p.dtype].each * local_bytes(p) for p in trained)
    left_over = [rates[p.dtype].left_over * local_bytes(p) for p in trained]
    in_turn = [
        rates[p.dtype].in_turn(p) + before for p, before in zip(trained, [0.0, *left_over], strict=False)
    ]
    return round(at_once + max(in_turn))


def _state_bytes(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    return sum(_bytes_on(device, state) for state in optimizer.state.values())


def _bytes_on(device: torch.device, state: Any) -> int:
    pairs = (pair for tensor in tensors(state) for pair in storages_of(tensor))
    return sum(storage.nbytes() for storage, place in pairs if place.type == device.type)


def _temporary(twin: torch.optim.Optimizer, device: torch.device) -> int:
    """Bytes that a step takes for a moment."""
    with Meter(device) as meter:
        _step(twin)
        start = meter.current_bytes()
        meter.reset_peak()
        _step(twin)
        return meter.peak_bytes() - start


def _twin(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], values: list[torch.Tensor]
) -> torch.optim.Optimizer:
    """The same with parameters of its own, which have gradients, and no state yet."""
    parameters = [nn.Parameter(value) for value in values]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    twin = type(optimizer).__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)  # Optimizer's own copy leaves out what others add
    twin.state = collections.defaultdict(dict)
    twin.param_groups = [{**group, "params": parameters}]
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(twin, hooks, collections.OrderedDict())  # the user's hooks are not for a twin
    return twin


def _step(twin: torch.optim.Optimizer) -> None:
    try:
        twin.step()
    except TypeError as error:
        raise InputError(
            f"{type(twin).__name__}.step() cannot be tried by itself ({error}): what it holds is not known. "
            "Leave optimizer= out, and leave room for it in the budget"
        ) from error
