"""A model, or its trunk, as one compiled graph, in which each block has the saved set planned for it.

Blocks that are compiled one by one cost the host a call each, and nothing is fused across them: where the
device waits for the host, that is most of the time. In the graph of the whole model a block is known by the
modules that its operations come from. What leaves a block for another is saved, as it is between blocks that
are compiled alone; what lies outside of all blocks is left to the compiler.

A head in chunks is not for the compiler. The graph then is that of the trunk, the module around all blocks
and without the head; blocks are known by their paths below it.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from remat.records import Recipe, RegionGraph
from remat.trace.joint import Joint, is_view, kept_labels, labels, made_bytes, readers

__all__ = [
    "KeptOf",
    "below",
    "blocks_in",
    "blocks_of",
    "calls_of",
    "kept_places",
    "placed_decisions",
    "trunks_of",
]

_PLACE = "|"  # between the name of a block and the label of one of its operations
_OWN = (
    "own choice up to "  # a label: the compiler may choose what it saves of this block, up to so many bytes
)
_PADDING = 0.03  # by which the compiler's own choice may be larger than planned
_NOTHING = 1 / 128  # of a block's largest value: smaller ones that the compiler would save are saved


# ---------------------------------------------------------------------------------------------- the trunk


@contextmanager
def calls_of(model: nn.Module, blocks: Iterable[str]) -> Iterator[set[str]]:
    """The names of those modules around these blocks that are called inside of this context."""
    called: set[str] = set()
    hooks = []
    modules = dict(model.named_modules())
    for name in {around for block in blocks for around in _around(block) if around in modules}:

        def note(module: nn.Module, args: Any, name: str = name) -> None:
            called.add(name)

        hooks.append(modules[name].register_forward_pre_hook(note))
    try:
        yield called
    finally:
        for hook in hooks:
            hook.remove()


def trunks_of(blocks: Iterable[str], head: str, called: Collection[str]) -> tuple[str, ...]:
    """The outermost modules that the step calls and that hold blocks, but not the head: one, as a rule, or an
    encoder and a decoder. None, if there is a block without such a module around it."""
    found: dict[str, None] = {}
    for block in blocks:
        outside = (name for name in _around(block) if below(name, head) is None and name in called)
        trunk = next(outside, None)
        if trunk is None:
            return ()
        found[trunk] = None
    return tuple(found)


def _around(block: str) -> list[str]:
    """The names of the modules that a block lies in, the model itself aside, from the outermost on."""
    steps = block.split(".")
    return [".".join(steps[:depth]) for depth in range(1, len(steps))]


def below(root: str, name: str) -> str | None:
    """The name of a module as `root`, which it lies in, or is, knows it; "" is the model. None: elsewhere."""
    if not root or name == root:
        return name if not root else ""
    return name.removeprefix(f"{root}.") if name.startswith(f"{root}.") else None


# ------------------------------------------------------------------------------------------ what is kept


@dataclass(frozen=True)
class KeptOf:
    """What a plan keeps of one block. `recipe`: None keeps nothing but what leaves it. `own_bytes`: what the
    compiler may save of it by its own choice, which is faster than any other; None: it has no choice."""

    graph: RegionGraph
    recipe: Recipe | None
    own_bytes: int | None = None


def kept_places(sets: Mapping[str, KeptOf]) -> frozenset[str]:
    """What is kept of each block, by name."""
    found = set()
    for name, kept in sets.items():
        found.add(name + _PLACE)
        if kept.own_bytes is not None:
            found.add(f"{name}{_PLACE}{_OWN}{kept.own_bytes}")
        if kept.recipe is not None:
            found |= {name + _PLACE + label for label in kept_labels(kept.graph, kept.recipe, placed=True)}
    return frozenset(found)


def blocks_of(keep: Collection[str]) -> frozenset[str]:
    """The names of the blocks that something was decided for."""
    return frozenset(place.partition(_PLACE)[0] for place in keep)


def blocks_in(joint: Joint, keep: Collection[str]) -> frozenset[str]:
    """Those of them that are in this graph."""
    blocks = blocks_of(keep)
    return frozenset(filter(None, (_block_of(node, blocks) for node in joint.nodes)))


def placed_decisions(
    joint: Joint, keep: Collection[str], stock: Callable[[Mapping[fx.Node, bool]], Collection[fx.Node]]
) -> dict[fx.Node, bool]:
    """For nodes of forward that make tensors inside of a block: is it saved? Those that cannot be computed
    again always are; for all others any decision gives right gradients. Nothing is decided for blocks that
    are left to the compiler: those for which its own choice, `stock` of what is decided anyway, is no larger
    than planned. And what it would save of the others and is as good as nothing (statistics of a norm) is
    saved: to compute it again takes a kernel."""
    blocks = blocks_of(keep)
    home = {node: _block_of(node, blocks) for node in joint.nodes}
    always = {node: True for op, node in zip(joint.graph.ops, joint.nodes, strict=True) if not op.replayable}
    saved = {_shown(node) for node in stock(always)}
    chosen = {_maker(node) for node in saved}
    left = _left_to_compiler(keep, home, saved)
    found = {node: False for node in joint.backward if _block_of(node, blocks) not in ("", *left)}
    pairs = list(zip(joint.graph.ops, joint.nodes, strict=True))
    for name in blocks:
        inside = [(op, node) for op, node in pairs if home[node] == name]
        named = labels((op for op, _ in inside), placed=True)
        small = max((made_bytes(node) for _, node in inside), default=0) * _NOTHING
        for (op, node), label in zip(inside, named, strict=True):
            leaves = _leaves(node, home)
            if name in left:
                if leaves - left and not op.view:  # a block that is planned begins with it
                    found[node] = True
                continue
            statistic = node in chosen and made_bytes(node) <= small
            found[node] = not op.view and (name + _PLACE + label in keep or bool(leaves) or statistic)
    return {**found, **always}


def _left_to_compiler(
    keep: Collection[str], home: Mapping[fx.Node, str], saved: Iterable[fx.Node]
) -> frozenset[str]:
    """The blocks that the compiler may choose for, if it would save no more of them than it may. What leaves
    a block is saved in any case."""
    most: dict[str, int] = {}
    for place in keep:
        name, _, label = place.partition(_PLACE)
        if label.startswith(_OWN):
            most[name] = int(label.removeprefix(_OWN))
    inside = (node for node in saved if home.get(_maker(node)) in most and not _leaves(node, home))
    return (
        frozenset(most)
        if sum(map(made_bytes, inside)) <= (1 + _PADDING) * sum(most.values())
        else frozenset()
    )


def _leaves(node: fx.Node, home: Mapping[fx.Node, str]) -> set[str]:
    """The other parts of forward that read it."""
    here = home[_maker(node)]
    return {home.get(reader, here) for reader in readers(node)} - {here}


def _shown(node: fx.Node) -> fx.Node:
    """What a view shows."""
    while node.op == "call_function" and is_view(_maker(node).target):
        node = next(iter(_maker(node).all_input_nodes))
    return node


def _maker(node: fx.Node) -> fx.Node:
    """The operation that gives this item among others."""
    return node.args[0] if node.target is operator.getitem else node  # type: ignore[return-value]


# --------------------------------------------------------------------------------------- which block it is

# How the compiler writes where it found a module, in torch 2.11 to 2.13: its local variable, then attributes
# and items, some as calls: L['bound'][0].model.layers.slice(None, 12, None)._modules['0']
_CALLED = re.compile(
    r"(?:getattr|object\.__getattribute__|(?:dict|list|tuple)\.__getitem__)"
    r"\(([^(),]+), ['\"]?(\w+)['\"]?\)"
)
_SLICE = re.compile(r"\.slice\([^)]*\)")
_INDEX = re.compile(r"\[['\"]?(\w+)['\"]?\]")
_TABLES = re.compile(r"(?:\.__dict__)?\._modules\b")
_OURS = "L.bound.0."  # what run/compiled.py calls the root of the graph
# Behind a break, the compiler goes on in a function of some module's, or of a wrapper around it.
_SOMEBODY = re.compile(r"L\.(?:self|module|mod|args\.0|\w+\.__self__)\.")


def _block_of(node: fx.Node, blocks: Collection[str]) -> str:
    """The innermost block that made this node; "": none."""
    stack = node.meta.get("nn_module_stack") or {}
    found = (_named(*_module_path(_text(entry)), blocks) for entry in reversed(stack.values()))
    return next(filter(None, found), "")


def _text(entry: Any) -> str:
    """Entries are (where the module is, its class)."""
    return str(entry[0]) if isinstance(entry, (tuple, list)) and entry else str(entry)


def _named(path: str, rooted: bool, blocks: Collection[str]) -> str:
    """The one block with this path. Where a graph breaks, it begins below its root, and its paths, too."""
    if rooted:
        return path if path in blocks else ""
    found = [name for name in blocks if path and (name == path or name.endswith(f".{path}"))]
    return found[0] if len(found) == 1 else ""


@functools.lru_cache(maxsize=4096)  # every operation of a module has the same
def _module_path(text: str) -> tuple[str, bool]:
    """The path of a module, from where the compiler found it, and whether it begins at the root of the graph;
    ("", False) where that is not understood."""
    path, before = text, ""
    while path != before:
        before, path = path, _CALLED.sub(r"\1.\2", path)
    path = _TABLES.sub("", _INDEX.sub(r".\1", _SLICE.sub("", path)))
    if path.startswith(_OURS):
        return path.removeprefix(_OURS), True
    root = _SOMEBODY.match(path)
    return (path[root.end() :], False) if root else ("", False)
