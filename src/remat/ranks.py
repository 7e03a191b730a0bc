"""One plan for all ranks of torch.distributed.

Every rank calls `fit`. What one rank measures, all ranks believe: timings differ from device to device, and a
plan that differed from rank to rank would let ranks wait for each other, or, where their steps communicate
(FSDP2), wait for ever. Bytes are the most that any rank measured. Without torch.distributed, with one rank,
or inside `alone()`, everything here returns what it is given.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

from torch import distributed, nn

from remat.errors import InputError
from remat.trees import map_tensors, tensors

__all__ = [
    "agree",
    "all_equal",
    "all_of",
    "alone",
    "gathered",
    "largest",
    "least",
    "most",
    "refuse_strangers",
    "several",
    "unwrap",
]

T = TypeVar("T")


class _Local(threading.local):
    alone = False


_LOCAL = _Local()


@contextmanager
def alone() -> Iterator[None]:
    """Inside, this rank plans for itself: for ranks that run different models, or where one rank calls."""
    before = _LOCAL.alone
    _LOCAL.alone = True
    try:
        yield
    finally:
        _LOCAL.alone = before


def several() -> bool:
    """Are there other ranks to agree with?"""
    if _LOCAL.alone or not distributed.is_available() or not distributed.is_initialized():
        return False
    return distributed.get_world_size() > 1


def agree(value: T) -> T:
    """Rank 0's value, on every rank."""
    if not several():
        return value
    box = [value]
    distributed.broadcast_object_list(box, src=0)
    return box[0]


def gathered(value: T) -> list[T]:
    """What every rank has, in the order of ranks."""
    if not several():
        return [value]
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return found


def most(number: int) -> int:
    """The largest number that any rank has."""
    return max(gathered(number))


def least(number: int) -> int:
    """The smallest number that any rank has."""
    return min(gathered(number))


def all_of(fact: bool) -> bool:
    """Does it hold on every rank?"""
    return all(gathered(fact))


def all_equal(value: Any) -> bool:
    """Is it the same on every rank?"""
    if not several():
        return True
    return len(set(gathered(hashlib.sha256(repr(value).encode()).hexdigest()))) == 1


def largest(batch: T, signature: str) -> T:
    """Where ranks have batches of different shapes: the one with the most bytes, on every rank's own device.

    A plan is for one shape; a smaller one takes less memory.
    """
    if not several() or all_equal(signature):
        return batch
    sizes = gathered(sum(t.numel() * t.element_size() for t in tensors(batch)))
    devices = [t.device for t in tensors(batch)]
    box = [map_tensors(lambda t: t.cpu(), batch)]
    distributed.broadcast_object_list(box, src=sizes.index(max(sizes)))
    return map_tensors(lambda t: t.to(devices[0]), box[0])  # type: ignore[no-any-return]


def refuse_strangers(fingerprint: str) -> None:
    """One plan needs one model."""
    if not all_equal(fingerprint):
        raise InputError(
            "the ranks of this job have different models, and a plan is for all ranks; where that is meant "
            "(pipeline stages), let each plan for itself: with remat.ranks.alone(): remat.fit(...)"
        )


# --------------------------------------------------------------------------------------- wrapped models


def unwrap(model: nn.Module) -> tuple[nn.Module, Callable[[], AbstractContextManager[None]]]:
    """The model inside DistributedDataParallel, and a context in which the wrapper exchanges no gradients:
    planning runs regions more often than once per step, which the exchange would take for an error."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.module, model.no_sync
    return model, nullcontext
