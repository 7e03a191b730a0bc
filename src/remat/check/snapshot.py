"""torch's memory snapshot of a step, with region names: which block did this allocation belong to?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from remat import trees
from remat._torch_private import in_backward, label_allocations, record_allocations, save_allocations
from remat.errors import InputError
from remat.trace.discover import find_blocks

__all__ = ["named_allocations", "snapshot"]

_BETWEEN = "between regions"


@contextmanager
def snapshot(model: nn.Module, path: str | Path) -> Iterator[None]:
    """Everything that is allocated inside is written to `path`, also if the step fails: out of memory is when
    one wants to see it. The file opens in pytorch.org/memory_viz; allocations carry their region's name."""
    path = Path(path)
    if not torch.cuda.is_available():
        raise InputError(
            "a memory snapshot is made by CUDA's allocator, and there is no CUDA device here; "
            "report().save('fit.html') shows the memory of the step anywhere"
        )
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {path.parent} to write {path.name} into; make it first")
    record_allocations(True)
    try:
        with named_allocations(model):
            yield
    finally:
        save_allocations(str(path))
        record_allocations(False)


@contextmanager
def named_allocations(model: nn.Module) -> Iterator[None]:
    """Allocations are labelled "layers.3 forward", "layers.3 backward", or "layers.3 again" where it is run
    again in backward. Only module hooks and hooks on gradients are used: the graph stays as it is."""
    running: list[str] = []

    def enter(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            running.append(f"{name} {'again' if in_backward() else 'forward'}")
            label_allocations(running[-1])

        return hook

    def leave(name: str) -> Callable[..., None]:
        def arrived(gradient: Tensor) -> None:
            label_allocations(f"{name} backward")

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if running:
                running.pop()
            label_allocations(running[-1] if running else f"{name} backward" if in_backward() else _BETWEEN)
            for tensor in trees.tensors(output):
                if tensor.requires_grad and not in_backward():
                    tensor.register_hook(arrived)  # type: ignore[no-untyped-call]

        return hook

    with ExitStack() as undo:
        label_allocations(_BETWEEN)
        undo.callback(label_allocations, "")
        for block in find_blocks(model):
            before = block.module.register_forward_pre_hook(enter(block.name))
            after = block.module.register_forward_hook(leave(block.name), always_call=True)
            undo.callback(before.remove)
            undo.callback(after.remove)
        yield
