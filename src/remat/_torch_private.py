"""Every private interface of torch that remat uses, one function each.

tests/test_torch_private.py pins what each one does, so that a new torch version fails there first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils.checkpoint
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _python_dispatch, _pytree

__all__ = [
    "StopRecomputation",
    "active_saved_tensors_hooks",
    "any_length",
    "at_end_of_backward",
    "below_autograd",
    "below_torch_function",
    "flatten",
    "in_backward",
    "in_dispatch_mode",
    "in_functorch",
    "in_jit_trace",
    "keeps_graph",
    "label_allocations",
    "record_allocations",
    "run_backward",
    "save_allocations",
    "sequence_number",
    "storage_ref",
    "wrapper_tensor",
]

# torch.utils.checkpoint raises this in its pack hook when a recomputation has saved all that is needed.
StopRecomputation: type[Exception] = torch.utils.checkpoint._StopRecomputationError


def below_autograd() -> AbstractContextManager[None]:
    """Operations inside are not recorded by autograd, whatever the grad mode."""
    return torch._C._AutoDispatchBelowAutograd()


def below_torch_function() -> AbstractContextManager[None]:
    """Tensor subclasses are not asked (`__torch_function__`) about what is done to them inside."""
    return torch._C.DisableTorchFunctionSubclass()


def at_end_of_backward(callback: Callable[[], None]) -> bool:
    """Call `callback` when the running backward pass ends; an exception in it is raised by backward() itself.

    False (and nothing queued) outside of a backward pass.
    """
    try:
        torch.autograd.Variable._execution_engine.queue_callback(callback)
    except RuntimeError:
        return False
    return True


def in_functorch() -> bool:
    """Inside torch.func's vmap, grad, jvp: tensors are wrapped and graphs belong to a level."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def sequence_number(node: Any) -> int:
    """Autograd runs the node with the highest number first: backward reverses the order of making."""
    return int(node._sequence_nr())


def active_saved_tensors_hooks() -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
    """The (pack, unpack) pair that autograd would call now for a tensor it saves."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def in_backward() -> bool:
    """Whether this thread is inside a backward pass: a forward that runs here is somebody's recomputation."""
    return current_backward() != -1


def in_jit_trace() -> bool:
    return torch._C._get_tracing_state() is not None


def flatten(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Leaves of a pytree, and the function that builds the tree from such a list."""
    leaves, spec = _pytree.tree_flatten(tree)
    return leaves, lambda new: _pytree.tree_unflatten(new, spec)


def storage_ref(tensor: torch.Tensor) -> Hashable:
    """A weak key of a tensor's storage. While the key lives, no other storage has an equal one."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def current_backward() -> int:
    """A number for the backward pass that runs in this thread (also in its worker threads); -1: none."""
    return int(torch._C._current_graph_task_id())


def keeps_graph() -> bool:
    """Inside a backward pass: whether it was asked to keep the graph, so that it may run once more."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def wrapper_tensor(
    cls: type[torch.Tensor],
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    """A tensor subclass's instance that has these properties and no memory."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, strides=stride, dtype=dtype, device=device)


def in_dispatch_mode() -> bool:
    """Whether a TorchDispatchMode (a profiler, a counter, a fake-tensor mode) sees every operation now."""
    return _python_dispatch._get_current_dispatch_mode() is not None


def any_length(tensor: torch.Tensor) -> None:
    """Tell the compiler not to fix the first dimension of this tensor. Imports the compiler."""
    torch._dynamo.maybe_mark_dynamic(tensor, 0)


def run_backward(
    loss: torch.Tensor,
    gradient: torch.Tensor,
    *,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """loss.backward(gradient) that torch function modes do not handle: a mode is off while it handles a call,
    and would be off in all that backward runs."""
    torch.autograd.Variable._execution_engine.run_backward(
        (loss,),
        (gradient,),
        create_graph if retain_graph is None else retain_graph,
        create_graph,
        () if inputs is None else tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def record_allocations(on: bool) -> None:
    """From now on CUDA's allocator writes down what it gives and takes, with stack traces; or no longer."""
    torch.cuda.memory._record_memory_history("all" if on else None)


def label_allocations(label: str) -> None:
    """What the allocator writes down from now on carries this text."""
    torch.cuda.memory._set_memory_metadata(label)


def save_allocations(path: str) -> None:
    """What was written down, as the file that pytorch.org/memory_viz reads."""
    torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]
