"""The inputs of a checkpointed call, from its forward until its last recomputation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from remat.errors import RecomputeError
from remat.run.host import can_host
from remat.run.hosted import Hosted, to_device, to_host
from remat.run.offload import Group
from remat.run.state import habits

__all__ = ["Inputs", "Leaving"]


@dataclass(frozen=True)
class Leaving:
    """Inputs that are to wait on the host, and by whom they are sent."""

    tensors: Sequence[Tensor]
    group: Group

    def takes(self, tensor: Tensor) -> bool:
        return tensor.device == self.group.engine.device and any(tensor is one for one in self.tensors)


class Inputs:
    """Holds the leaves of (args, kwargs), in whichever way backward will need them.

    During forward: as they are. Afterwards tensors go where autograd keeps its own saved tensors, so that
    outer hooks apply to them (an outer checkpoint drops and rebuilds them, `save_on_cpu` moves them) and
    torch's version check guards them; or to the host. An input that the region writes in place is held as a
    copy of its value at entry.
    """

    def __init__(
        self, leaves: list[Any], build: Callable[[list[Any]], Any], modules: Sequence[nn.Module]
    ) -> None:
        self._leaves = leaves
        self._build = build
        self._module = modules[0] if modules else None
        self._versions = {i: leaf._version for i, leaf in self._items() if not leaf.is_inference()}
        self._copies = self._copy_what_may_be_written()
        self._stash: tuple[tuple[int, ...], Any] = ((), None)
        self._hosted: tuple[tuple[int, ...], Hosted | None] = ((), None)

    def _items(self) -> Iterator[tuple[int, Tensor]]:
        return ((i, leaf) for i, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor))

    def tensors(self) -> list[Tensor]:
        return [tensor for _, tensor in self._items()]

    def _copy_what_may_be_written(self) -> dict[int, Tensor]:
        """Nothing for a plain function; for a module what it is known to write, on its first call all."""
        if self._module is None:
            return {}
        known = habits(self._module)
        with torch.no_grad():
            return {
                i: leaf.clone().requires_grad_(leaf.requires_grad)
                for i, leaf in self._items()
                if (not known.seen or i in known.inputs)
                and i in self._versions
                and not (leaf.is_leaf and leaf.requires_grad)  # torch itself forbids writing to those
            }

    def settle(self, region: str, *, offload: bool | Leaving) -> list[Tensor]:
        """After forward: find what was written, let go of the rest; returns what stays on the device.
        `offload`: whether all that can goes to the host, or what of it."""
        written = [
            i for i, tensor in self._items() if i in self._versions and tensor._version != self._versions[i]
        ]
        if written and self._module is not None:
            habits(self._module).inputs |= frozenset(written)
        lost = [i for i in written if i not in self._copies]
        if lost:
            raise RecomputeError(
                f"{region}: input {lost[0]} was written in place inside the region, so its value at entry is "
                "gone and the region cannot be recomputed; clone it first, or use the operation that is not "
                "in-place (nn.ReLU(inplace=False))"
            )
        self._copies = {i: self._copies[i] for i in written}
        rest = {i: tensor for i, tensor in self._items() if i not in self._copies and i in self._versions}
        leaving = offload if isinstance(offload, Leaving) else None
        away = {
            i: tensor
            for i, tensor in rest.items()
            if offload and can_host(tensor) and (leaving is None or leaving.takes(tensor))
        }
        stay = {i: tensor for i, tensor in rest.items() if i not in away}
        group = None if leaving is None else leaving.group
        self._hosted = (tuple(away), to_host(list(away.values()), group) if away else None)
        self._stash = (tuple(stay), _stash(list(stay.values())) if stay else None)
        gone = {*self._copies, *away, *stay}
        self._leaves = [None if i in gone else leaf for i, leaf in enumerate(self._leaves)]
        return [*self._copies.values(), *stay.values(), *self.tensors()]

    def again(self, region: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with their values at entry, for one recomputation."""
        leaves = list(self._leaves)
        positions, keeper = self._stash
        if keeper is not None:
            _fill(leaves, positions, _saved(keeper.grad_fn, region))
        positions, hosted = self._hosted
        if hosted is not None:
            _fill(leaves, positions, to_device(hosted))
        for i, copy in self._copies.items():
            leaves[i] = copy.clone()  # with grad mode on: not a leaf, so the region may write to it
        args, kwargs = self._build(leaves)
        return args, kwargs


def _fill(leaves: list[Any], positions: Sequence[int], values: Sequence[Tensor]) -> None:
    for i, value in zip(positions, values, strict=True):
        leaves[i] = value


class _Keep(torch.autograd.Function):
    """A node that exists only to hold tensors in autograd's own way."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("nobody runs this node")


def _stash(tensors: list[Tensor]) -> Tensor:
    """A tensor whose node holds these. The node is not enough: torch 2.11 empties it with its tensor."""
    anchor = torch.empty(0, requires_grad=True)
    with torch.enable_grad():
        return _Keep.apply(anchor, *tensors)  # type: ignore[no-any-return, no-untyped-call]


def _saved(node: Any, region: str) -> Sequence[Tensor]:
    try:
        return node.saved_tensors  # type: ignore[no-any-return]
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise RecomputeError(
            f"{region}: an input was written in place after the region had read it, so that it cannot be "
            f"recomputed from it; use an operation that is not in-place there, or clone the input ({error})"
        ) from error
