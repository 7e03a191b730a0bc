"""Running one recorded operation again, from plain values.

Replays happen below autograd and with autocast off: exactly where the operation was recorded. An operation
that writes to an argument runs on a copy of it (its functional twin), so kept memory is never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from remat._torch_private import below_autograd
from remat.errors import PlanError
from remat.records import Arg, Const, Op, Ref, RegionGraph, Value

__all__ = ["constant", "decode", "dtype_of", "overload", "replay", "replaying", "twin", "without_autocast"]

# These write their target without reading it.
OVERWRITES = {
    "aten.add.out", "aten.copy_.default", "aten.div.out", "aten.fill_.Scalar", "aten.fill_.Tensor",
    "aten.mul.out", "aten.sub.out", "aten.zero_.default",
}  # fmt: skip


@cache
def overload(name: str) -> Any:
    """ "aten.mm.default" -> the operator."""
    namespace, packet, variant = name.split(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), variant)
    except AttributeError:
        raise PlanError(
            f"operator {name} is not known to torch {torch.__version__}; make the plan again"
        ) from None


def decode(arg: Arg, get: Callable[[int], Any]) -> Any:
    """An argument as torch wants it; `get` gives the tensor of a value."""
    if isinstance(arg, Ref):
        return get(arg.value)
    if isinstance(arg, tuple):
        return [decode(item, get) for item in arg]
    if isinstance(arg, Const):
        return constant(arg)
    return arg


@cache
def constant(const: Const) -> Any:
    if const.kind == "device":
        return torch.device(const.text)
    if const.kind == "complex":
        return complex(const.text)
    return getattr(torch, const.text)  # dtype, layout, memory_format


@contextmanager
def without_autocast() -> Iterator[None]:
    active = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    for device in active:
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        for device in active:
            torch.set_autocast_enabled(device, True)


@contextmanager
def replaying() -> Iterator[None]:
    """The state in which operations were recorded: below autograd, autocast off."""
    with below_autograd(), without_autocast():
        yield


def dtype_of(name: str) -> torch.dtype:
    return getattr(torch, name)  # type: ignore[no-any-return]


def twin(value: Value, tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Fresh memory in the layout of `value`, holding what `tensor` holds (nothing if None)."""
    fresh = torch.empty_strided(value.shape, value.stride, dtype=dtype_of(value.dtype), device=device)
    return fresh if tensor is None else fresh.copy_(tensor)


def replay(
    graph: RegionGraph, op: Op, get: Callable[[int], torch.Tensor], device: torch.device
) -> dict[int, Any]:
    """Run the operation; the values it gives, by number."""
    function = overload(op.name)
    names = [argument.name for argument in function._schema.arguments]
    given: dict[int, Arg] = dict(enumerate(op.args))
    given |= {names.index(name): arg for name, arg in op.kwargs}
    result: dict[int, Any] = {}
    ready: dict[int, Any] = {}
    for place, value in op.written:
        before = None if op.name in OVERWRITES else decode(given[place], get)
        ready[place] = result[value] = twin(graph.values[value], before, device)
    for place, arg in given.items():
        if place not in ready:
            ready[place] = decode(arg, get)
    args = [ready[place] for place in range(len(op.args))]
    output = function(*args, **{name: ready[names.index(name)] for name, _ in op.kwargs})
    outputs = output if isinstance(output, (tuple, list)) else (output,)
    for value, tensor in zip(op.outputs, outputs, strict=True):
        if value >= 0:
            result.setdefault(value, tensor)
    return result
