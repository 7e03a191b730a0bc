"""Inputs of checkpointed regions on the host.

By hand, one engine per device serves the whole process: graphs of any model take turns. It keeps its pinned
memory for the next step, until `release` (remat.disable) or the end of the process. Plans have engines of
their own.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from remat._torch_private import storage_ref
from remat.run.offload import Engine, Group, Ticket

__all__ = ["Hosted", "release", "to_device", "to_host"]

_engines: dict[torch.device, Engine] = {}
_lock = threading.Lock()
_order = itertools.count()  # of groups: rising along every forward pass


@dataclass(frozen=True)
class _View:
    """How one tensor lies in its storage."""

    ticket: Ticket
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    requires_grad: bool


@dataclass(frozen=True)
class Hosted:
    """Tensors that left their device: each tensor's view of its storage, which was sent once."""

    views: tuple[_View, ...]

    @property
    def nbytes(self) -> int:
        return sum(ticket.nbytes for ticket in {id(view.ticket): view.ticket for view in self.views}.values())


def to_host(tensors: Sequence[Tensor], group: Group | None = None) -> Hosted:
    """Start to move the storages of `tensors` to the host, behind what is computed next: by the engine of
    `group`, if there is one."""
    storages: dict[Hashable, Tensor] = {}
    for tensor in tensors:
        storages.setdefault(storage_ref(tensor), tensor)
    by_device: dict[torch.device, dict[Hashable, Tensor]] = {}
    for key, tensor in storages.items():
        by_device.setdefault(tensor.device, {})[key] = tensor
    tickets: dict[Hashable, Ticket] = {}
    for device, sent in by_device.items():
        through = _group(device, sent.values()) if group is None else group
        with torch.no_grad():
            tickets.update(zip(sent, through.send_all(list(sent.values())), strict=True))
    return Hosted(
        tuple(
            _View(
                tickets[storage_ref(tensor)],
                tensor.dtype,
                int(tensor.storage_offset()),
                tensor.shape,
                tensor.stride(),
                tensor.requires_grad,
            )
            for tensor in tensors
        )
    )


def _group(device: torch.device, tensors: Iterable[Tensor]) -> Group:
    engine = _engine(device)
    if device.type == "cuda":  # as long as the next region runs, this one's copies may be under way
        engine.widen(sum(tensor.untyped_storage().nbytes() for tensor in tensors))
    return engine.group(next(_order))


def to_device(hosted: Hosted) -> list[Tensor]:
    """Bring them back as leaves: same values, strides and sharing, `requires_grad` as it was."""
    with torch.no_grad():
        tensors = [view.ticket.get(view.shape, view.stride, view.offset, view.dtype) for view in hosted.views]
    return [
        tensor.requires_grad_(view.requires_grad) for tensor, view in zip(tensors, hosted.views, strict=True)
    ]


def release() -> None:
    """Give the engines' host memory back; what live graphs still need goes with them."""
    with _lock:
        engines = list(_engines.values())
        _engines.clear()
    for engine in engines:
        engine.close()


def _engine(device: torch.device) -> Engine:
    with _lock:
        if device not in _engines:
            _engines[device] = Engine(device, in_flight_limit_bytes=0)
        return _engines[device]
