"""What runs before the first region waits on the host: found in the autograd graph behind that region's
inputs, sent when the region begins, gone from the device when it has returned.

Nothing is computed again and nothing captured: what comes back are the very bits that autograd saved, and the
engine refuses a tensor that was written to meanwhile. If the graph is not the one that was seen, nothing is
sent: more memory, never a wrong gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from remat._torch_private import active_saved_tensors_hooks, in_functorch, storage_ref
from remat.records import Stem
from remat.run.host import can_host
from remat.run.moved import Moved, send_all, unmove
from remat.run.offload import Engine
from remat.trace.graphwalk import GraphNode, saved_tensors, unpacked, walk
from remat.trees import tensors

__all__ = ["Candidate", "StemSender", "candidates", "graph_behind", "send", "sending", "sending_stem"]

_LEAST_BYTES = 1 << 20  # of a storage that is worth a copy


@dataclass(frozen=True)
class Candidate:
    """A saved tensor that could be sent: where it is, its storage, and how large that is."""

    place: tuple[int, str, int]
    storage: Any  # a weak key of it
    nbytes: int

    def is_gone(self) -> bool:
        return bool(self.storage.expired())


def graph_behind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[GraphNode]:
    """The nodes that made the tensors that a region is called with."""
    return walk([tensor for tensor in tensors((args, kwargs)) if tensor.grad_fn is not None], ())


def candidates(nodes: list[GraphNode], device: torch.device) -> list[Candidate]:
    """What these nodes saved that is large, and no parameter's."""
    found = []
    for saved in saved_tensors(nodes):
        tensor = saved.tensor
        nbytes = tensor.untyped_storage().nbytes() if can_host(tensor) and tensor.device == device else 0
        if nbytes >= _LEAST_BYTES:
            found.append(Candidate((saved.node, saved.attribute, saved.item), storage_ref(tensor), nbytes))
    return found


@dataclass
class StemSender:
    """Sends these saved tensors whenever the region begins. Copies of a model share the engine; one that was
    pickled has none, and sends nothing."""

    stem: Stem
    engine: Engine | None
    sent: int = 0  # forwards
    skipped: int = 0
    why: str = ""
    on_skip: Callable[[str, str, bool], None] | None = None  # told the region, why, that no recipe failed

    def __deepcopy__(self, memo: Any) -> StemSender:
        return StemSender(self.stem, self.engine)

    def __reduce__(self) -> tuple[Any, ...]:
        return StemSender, (self.stem, None)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.engine is None or not torch.is_grad_enabled() or in_functorch():
            return
        if active_saved_tensors_hooks() is not None:
            self._skip("another saved-tensor hook is active (an outer checkpoint, save_on_cpu)")
            return
        nodes = graph_behind(args, kwargs)
        if not nodes:  # nothing in front of the region trains
            return
        if tuple(node.name for node in nodes) != self.stem.nodes:
            self._skip("the graph in front of the first region is not the one that was profiled")
            return
        problem = send(self.stem.region, nodes, self.stem.saved, self.engine)
        if problem:
            self._skip(problem)
        else:
            self.sent += 1

    def _skip(self, why: str) -> None:
        self.skipped += 1
        self.why = why
        if self.on_skip is not None:
            self.on_skip(self.stem.region, why, False)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """The copies had the region's forward; from here on compute waits for them, and the memory goes."""
        if self.engine is not None:
            self.engine.settle()


def send(
    name: str, nodes: Sequence[GraphNode], places: Sequence[tuple[int, str, int]], engine: Engine
) -> str:
    """Have these saved tensors wait on the host. Returns why not, if not: then they stay."""
    for node, attribute, item in places:  # where there are hooks, autograd does not look at versions any more
        if item not in dict(unpacked(nodes[node].node, attribute)):
            return f"{attribute} of {nodes[node].name} is not there, or was written to since it was saved"
    moved: list[Moved] = []
    try:
        for node, attribute, item in places:
            raw = getattr(nodes[node].node, attribute)
            one = Moved(name)
            (raw if item < 0 else raw[item]).register_hooks(one.pack, unmove)
            moved.append(one)
    except (AttributeError, IndexError, RuntimeError) as error:
        for one in moved:
            one.keep()
        return f"a saved tensor cannot be replaced ({type(error).__name__}: {error})"
    send_all(moved, engine.group(0))
    return ""


@contextmanager
def sending(module: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> Iterator[None]:
    """Around every call of the module, inside of hooks that others have put on it."""
    handles = [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, prepend=True, always_call=True),  # also if it ran out of memory
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def sending_stem(module: nn.Module, sender: StemSender) -> AbstractContextManager[None]:
    """In the place of whoever sends it now: a copy of a planned model has hooks of its own."""
    hooks: tuple[Any, ...] = (module._forward_pre_hooks, module._forward_hooks)
    for table in hooks:
        for key in [key for key, hook in table.items() if _is_senders(hook)]:
            del table[key]
    return sending(module, sender.before, sender.after)


def _is_senders(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), StemSender)
