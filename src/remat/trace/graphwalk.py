"""The autograd graph that a region built: its nodes, and the tensors that each one saved.

The graph is walked from the region's outputs. A node is named by the node (or output) it was first reached
from and the edge taken, so the same walk finds the same nodes in every later call: decided by position,
verified by the node's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from remat._torch_private import sequence_number

__all__ = ["GraphNode", "SavedTensor", "next_sequence_number", "saved_tensors", "unpacked", "walk"]

_RAW = "_raw_saved_"


@dataclass(frozen=True)
class GraphNode:
    node: Any  # torch.autograd.graph.Node
    name: str
    parent: int  # index of an earlier node; below 0: output -parent-1
    edge: int


@dataclass(frozen=True)
class SavedTensor:
    node: int
    attribute: str  # "_raw_saved_self"
    item: int  # -1, or the place in a list of saved tensors
    tensor: torch.Tensor


def next_sequence_number() -> int:
    """Every node that autograd makes from now on (on this thread) has a higher one."""
    with torch.enable_grad():
        return sequence_number(torch.empty(0, requires_grad=True).view(0).grad_fn)


def walk(outputs: list[torch.Tensor], entries: Iterable[Any], since: int = 0) -> list[GraphNode]:
    """All nodes from the outputs down to the nodes of `entries` (which made the region's inputs).

    Nodes with a sequence number below `since` were made before the region began: by a tensor that it did not
    get as an input (a closure, an attribute) it can reach into the graph of the rest of the model.
    """
    stop = set(entries)
    found: list[GraphNode] = []
    seen: set[Any] = set()
    pending: list[tuple[Any, int, int]] = [
        (output.grad_fn, -1 - place, 0) for place, output in reversed(list(enumerate(outputs)))
    ]
    while pending:
        node, parent, edge = pending.pop()
        if node is None or node in stop or node in seen:
            continue
        seen.add(node)
        name = node.name()
        if name == "torch::autograd::AccumulateGrad" or sequence_number(node) < since:
            continue
        index = len(found)
        found.append(GraphNode(node, name, parent, edge))
        pending.extend(
            (child, index, place) for place, (child, _) in reversed(list(enumerate(node.next_functions)))
        )
    return found


def saved_tensors(nodes: list[GraphNode]) -> Iterator[SavedTensor]:
    """Every tensor that autograd holds for these nodes."""
    for index, entry in enumerate(nodes):
        for attribute in sorted(name for name in dir(entry.node) if name.startswith(_RAW)):
            for item, tensor in unpacked(entry.node, attribute):
                yield SavedTensor(index, attribute, item, tensor)


def unpacked(node: Any, attribute: str) -> Iterator[tuple[int, torch.Tensor]]:
    """What a node holds there, with its place in a list; nothing, if it was written to since."""
    try:
        # A Python function's node keeps its tensors under another public name than the C++ nodes do.
        name = (
            "saved_tensors" if attribute == "_raw_saved_tensors" else "_saved_" + attribute.removeprefix(_RAW)
        )
        if not hasattr(node, name):
            name = "_saved_tensors"
        content = getattr(node, name)
    except RuntimeError:  # changed in place since it was saved: autograd itself will refuse it
        return
    if isinstance(content, torch.Tensor):
        yield -1, content
    elif isinstance(content, (tuple, list)):
        for item, tensor in enumerate(content):
            if isinstance(tensor, torch.Tensor):
                yield item, tensor
