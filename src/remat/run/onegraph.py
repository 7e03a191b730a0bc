"""A whole model as one compiled graph, in which each block has the saved set that was planned for it.

Blocks that are compiled one by one cost the host a call each, and nothing is fused across them: where the
device waits for the host, that is most of the time. In the graph of the whole model a block is known by the
modules that its operations come from. What leaves a block for another is saved, as it is between blocks that
are compiled alone; what lies outside of all blocks is left to the compiler.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from torch import fx

from remat.records import Recipe, RegionGraph
from remat.trace.joint import Joint, kept_labels, labels, readers

__all__ = ["blocks_in", "blocks_of", "kept_places", "placed_decisions"]

_PLACE = "|"  # between the name of a block and the label of one of its operations
# How the compiler writes where a module is: L['bound'][0].model.layers.slice(None, 12, None)._modules['0']
_INDEX = re.compile(r"\[['\"]?(\w+)['\"]?\]")
_SLICE = re.compile(r"\.slice\([^)]*\)")
_ROOTS = ("L.bound.0.", "L.self.")  # what run/compiled.py calls the model, and what a module calls itself


def kept_places(sets: Mapping[str, tuple[RegionGraph, Recipe | None]]) -> frozenset[str]:
    """What is kept of each block, by name; without a recipe nothing but what leaves it."""
    found = set()
    for name, (graph, recipe) in sets.items():
        found.add(name + _PLACE)
        if recipe is not None:
            found |= {name + _PLACE + label for label in kept_labels(graph, recipe, placed=True)}
    return frozenset(found)


def blocks_of(keep: Collection[str]) -> frozenset[str]:
    """The names of the blocks that something was decided for."""
    return frozenset(place.partition(_PLACE)[0] for place in keep)


def blocks_in(joint: Joint, keep: Collection[str]) -> frozenset[str]:
    """Those of them that are in this graph."""
    blocks = blocks_of(keep)
    return frozenset(filter(None, (_block_of(node, blocks) for node in joint.nodes)))


def placed_decisions(joint: Joint, keep: Collection[str]) -> dict[fx.Node, bool]:
    """For every node of forward that makes tensors inside of a block: is it saved? Those that cannot be
    computed again always are; for all others any decision gives right gradients."""
    blocks = blocks_of(keep)
    home = {node: _block_of(node, blocks) for node in joint.nodes}
    found = {node: False for node in joint.backward if _block_of(node, blocks)}
    pairs = list(zip(joint.graph.ops, joint.nodes, strict=True))
    for name in blocks:
        inside = [(op, node) for op, node in pairs if home[node] == name]
        named = labels((op for op, _ in inside), placed=True)
        for (op, node), label in zip(inside, named, strict=True):
            found[node] = not op.view and (name + _PLACE + label in keep or _leaves(node, home))
    return {**found, **{node: True for op, node in pairs if not op.replayable}}


def _leaves(node: fx.Node, home: Mapping[fx.Node, str]) -> bool:
    """Whether another part of forward reads it."""
    return any(home.get(reader, home[node]) != home[node] for reader in readers(node))


def _block_of(node: fx.Node, blocks: Collection[str]) -> str:
    """The innermost block that made this node; "": none."""
    stack = node.meta.get("nn_module_stack") or {}
    found = (_named(_module_path(str(entry[0])), blocks) for entry in reversed(stack.values()))
    return next(filter(None, found), "")


def _named(path: str, blocks: Collection[str]) -> str:
    """The one block with this path. Where a graph breaks, it begins below the model, and its paths, too."""
    found = [name for name in blocks if path and (name == path or name.endswith(f".{path}"))]
    return found[0] if len(found) == 1 else ""


def _module_path(text: str) -> str:
    """The path of a module, from where the compiler found it."""
    path = _INDEX.sub(r".\1", _SLICE.sub("", text))
    path = path.replace(".__dict__._modules", "").replace("._modules", "")
    root = next((root for root in _ROOTS if path.startswith(root)), None)
    return "" if root is None else path.removeprefix(root)
