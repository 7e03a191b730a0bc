"""Every private interface of torch that remat uses, one function each.

tests/test_torch_private.py pins what each one does, so that a new torch version fails there first.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

__all__ = ["at_end_of_backward", "below_autograd", "in_functorch", "sequence_number"]


def below_autograd() -> AbstractContextManager[None]:
    """Operations inside are not recorded by autograd, whatever the grad mode."""
    return torch._C._AutoDispatchBelowAutograd()  # type: ignore[no-any-return, attr-defined]


def at_end_of_backward(callback: Callable[[], None]) -> bool:
    """Call `callback` when the running backward pass ends; an exception in it is raised by backward() itself.

    False (and nothing queued) outside of a backward pass.
    """
    try:
        torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]
    except RuntimeError:
        return False
    return True


def in_functorch() -> bool:
    """Inside torch.func's vmap, grad, jvp: tensors are wrapped and graphs belong to a level."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def sequence_number(node: Any) -> int:
    """Autograd runs the node with the highest number first: backward is the reverse of the order of making."""
    return int(node._sequence_nr())
