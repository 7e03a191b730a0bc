"""The parameters of a module as they were at one call, and stand-ins for them.

What runs a module in pieces needs the gradient of each parameter once, as a sum over the pieces. It runs the
module on stand-ins (detached, sharing memory), so that hooks of the real parameters (a user's, DDP's, FSDP's)
see one gradient and not one per piece, and hands the sum to autograd as the parameter's gradient.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from remat.errors import RecomputeError

__all__ = ["Autocast", "GradientSum", "Parameters", "foreign_leaves"]

_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()


class Parameters:
    """A module's parameters when this was made. `trained`: those that need a gradient, each once."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._slots = [
            (owner, name, p, p._version)
            for owner in module.modules()
            for name, p in owner._parameters.items()
            if p is not None and not p.is_inference()
        ]
        self.trained: tuple[Tensor, ...] = tuple(
            {id(p): p for _, _, p, _ in self._slots if p.requires_grad}.values()
        )

    def check(self, when: str) -> None:
        """What runs now must read what the module's call would have read."""
        for owner, name, parameter, version in self._slots:
            now = owner._parameters.get(name)
            if now is not parameter:
                what = "was replaced"
            elif parameter._version != version:
                what = f"was written (version {version} -> {parameter._version})"
            else:
                continue
            raise RecomputeError(
                f"parameter {name!r} of {type(owner).__name__} {what} after the module was called; {when} "
                "would now read other values than the plain model; do that before optimizer.step() or any "
                "other update, or take remat off first (handle.remove())"
            )

    def stand_ins(self) -> list[Tensor]:
        """One leaf per trained parameter, sharing its memory."""
        return [p.detach().requires_grad_() for p in self.trained]

    @contextmanager
    def replaced(self, stand_ins: Sequence[Tensor]) -> Iterator[None]:
        """Inside, the module runs on the stand-ins. One thread at a time; what is there always comes back: by
        the time of backward these are not those of the call, if functional_call lent it others."""
        twin = {id(p): s for p, s in zip(self.trained, stand_ins, strict=True)}
        before: list[tuple[dict[str, Any], str, Any]] = []
        with _lock(self._module):
            try:
                for owner, name, parameter, _ in self._slots:
                    if id(parameter) in twin:
                        table: dict[str, Any] = owner._parameters
                        before.append((table, name, table.get(name)))
                        table[name] = twin[id(parameter)]
                yield
            finally:
                for table, name, parameter in before:
                    table[name] = parameter

    @contextmanager
    def shaken(self) -> Iterator[None]:
        """Inside, the module runs on other weights. What it does by its structure it does then, too; what is
        hidden by a weight that is zero shows."""
        before = [(owner._parameters, name, parameter) for owner, name, parameter, _ in self._slots]
        with _lock(self._module):
            try:
                for number, (place, name, parameter) in enumerate(before):
                    if parameter.is_floating_point():
                        place[name] = _shaken(parameter, number)  # type: ignore[assignment]
                yield
            finally:
                for place, name, parameter in before:
                    place[name] = parameter


def _shaken(weight: Tensor, seed: int) -> Tensor:
    """By as much as matters: a matrix so that what it is given keeps its size, a gain or a gate by a half."""
    own = torch.Generator(weight.device).manual_seed(seed)  # the model's generators are not touched
    size = weight[0].numel() ** -0.5 if weight.dim() > 1 and weight.numel() else 0.5
    noise = torch.randn(weight.shape, generator=own, device=weight.device) * size
    return (weight.detach().float() + noise).to(weight.dtype)


def _lock(module: nn.Module) -> Any:
    with _LOCKS_LOCK:
        return _LOCKS.setdefault(module, threading.RLock())


@dataclass(frozen=True)
class Autocast:
    """The autocast state of one device type at one time."""

    device: str
    enabled: bool
    dtype: torch.dtype | None

    @classmethod
    def now(cls, device: str) -> Autocast:
        if not torch.amp.is_autocast_available(device):
            return cls(device, False, None)
        enabled = torch.is_autocast_enabled(device)
        return cls(device, enabled, torch.get_autocast_dtype(device) if enabled else None)

    def again(self) -> AbstractContextManager[Any]:
        if not torch.amp.is_autocast_available(self.device):
            return nullcontext()
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.enabled)

    def off(self) -> AbstractContextManager[Any]:
        if not torch.amp.is_autocast_available(self.device):
            return nullcontext()
        return torch.autocast(self.device, enabled=False)


def foreign_leaves(outputs: Iterable[Tensor], known: Iterable[Tensor]) -> bool:
    """Whether the graph of these ends in tensors that need gradients and are not known: those would be lost.

    So it is with a weight that is no registered parameter: one borrowed from another module by a closure, or
    a view that a wrapper (FSDP1's flat parameter, weight_norm's hook) puts in the parameter's place.
    """
    allowed = {id(tensor) for tensor in known}
    seen: set[Any] = set()
    nodes = [output.grad_fn for output in outputs]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in allowed:
            return True
        nodes += [following for following, _ in node.next_functions]
    return False


class GradientSum:
    """Adds up one parameter's gradient over pieces: in fp32 where the parameter has less precision.

    A single piece is taken as it is: that is the product that the plain step would have formed (of logits
    that are no wider).
    """

    def __init__(self, dtype: torch.dtype, pieces: int) -> None:
        low = dtype in (torch.bfloat16, torch.float16) and pieces > 1
        self.dtype = torch.float32 if low else dtype
        self.total: Tensor | None = None

    def add(self, piece: Tensor | None) -> None:
        if piece is None:
            return
        if self.total is None:
            self.total = piece.to(self.dtype)
        else:
            self.total.add_(piece)

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """Add `a.T @ b`; where the device can, in fp32 without writing the product in between."""
        wider = self.dtype == torch.float32 and a.dtype != torch.float32
        if wider and _wide_products(a.device, a.dtype):
            self.total = _wide_product(self.total, a.t(), b)
        else:
            self.add(a.t() @ b)


def _wide_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """`total + a @ b` in fp32, written over `total`; `a` and `b` have less precision."""
    if total is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, out=total)  # type: ignore[no-any-return]


_WIDE: dict[tuple[torch.device, torch.dtype], bool] = {}


def _wide_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this device has products with an fp32 result. Tried once, on numbers whose result is known."""
    key = (device, dtype)
    if key not in _WIDE:
        _WIDE[key] = device.type == "cuda" and _try_wide_product(device, dtype)
    return _WIDE[key]


def _try_wide_product(device: torch.device, dtype: torch.dtype) -> bool:
    a = torch.eye(32, device=device, dtype=dtype)
    b = torch.arange(32 * 64, device=device, dtype=torch.float32).reshape(32, 64).remainder(64)
    try:
        once = _wide_product(None, a.t(), b.to(dtype))
        twice = _wide_product(once.clone(), a.t(), b.to(dtype))
    except (RuntimeError, TypeError, AttributeError, NotImplementedError):
        return False
    return torch.equal(once, b) and torch.equal(twice, 2 * b)
