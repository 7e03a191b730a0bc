"""What to profile, and where."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from remat.check.step import Output
from remat.errors import InputError
from remat.records import Profile

__all__ = ["Request", "device_of", "refuse_several"]


@dataclass(frozen=True)
class Request:
    """What to profile: `run` does forward and gives the loss; `signature` describes its input."""

    model: nn.Module
    run: Callable[[], torch.Tensor]
    signature: str
    batch_bytes: int
    optimizer: torch.optim.Optimizer | None = None
    output: Output | None = None  # what the model gives in `run`, where the training loop may hold it
    accumulate: bool = False
    chunk: bool = False  # measure the step with head and loss in chunks, too
    compiler: str = ""  # compile blocks with this backend; "": not at all
    one_graph: bool = False  # and run them as parts of one graph of the whole model
    like: Profile | None = None  # the same step at another size: measure the recipes that it has, seek none
    offload: bool = False  # measure the link to the host, and entries that use it
    parts: bool = False  # measure entries that run a part of a region in chunks

    def holding(self) -> AbstractContextManager[None]:
        """Inside, what the model gives in `run` is held as the training loop holds it."""
        return nullcontext() if self.output is None else self.output.held()


def device_of(model: nn.Module) -> torch.device:
    """Where the model lives: the device of most of its parameters."""
    sizes: dict[torch.device, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        sizes[tensor.device] = sizes.get(tensor.device, 0) + tensor.numel()
    if not sizes:
        raise InputError(f"{type(model).__name__} has no parameters; there is nothing to train")
    return max(sizes, key=lambda device: sizes[device])


def refuse_several(model: nn.Module) -> None:
    found = {tensor.device for tensor in model.parameters() if tensor.device.type == "cuda"}
    if len(found) > 1:
        names = ", ".join(sorted(map(str, found)))
        raise InputError(
            f"{type(model).__name__} is spread over {names}; a budget is for one device. Put it on one of "
            "them, or shard it with FSDP2 (fully_shard), one process per device"
        )
