"""Find the repeated blocks of a model: what `enable` checkpoints and what `fit` plans as regions.

A block is the outermost module of which its container holds at least two of a class. Every tower of a
composite model (vision tower, language model, action expert) has a container of its own, and each is
counted on its own. No class name is known here: the structure alone decides.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

from remat.errors import InputError

__all__ = ["Block", "Selector", "find_blocks", "is_composite", "outermost", "resolve"]

Selector: TypeAlias = "str | type[nn.Module] | Sequence[str | type[nn.Module]]"

_STAGE_SHARE = 0.7  # of a stage's parameters lie in its stacks of blocks
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True)
class Block:
    """One repeated block. `tower` is the path of the container that repeats it ("" for the model itself)."""

    name: str
    module: nn.Module
    tower: str


def find_blocks(model: nn.Module) -> tuple[Block, ...]:
    """The repeated blocks of `model` in the order of registration; () if it has none.

    Lists of composite modules first; where a model has none, blocks written as attributes (block1, block2);
    then plain layers (a stack of Linear).
    """
    for counts, lists_only in ((is_composite, True), (is_composite, False), (_has_parameters, False)):
        found = _search(model, "", set(), counts, lists_only)
        if found:
            return tuple(found)
    return ()


def _search(
    parent: nn.Module,
    path: str,
    seen: set[int],
    counts: Callable[[nn.Module], bool],
    lists_only: bool,
    inside_stage: bool = False,
) -> list[Block]:
    """Blocks below `parent`. `counts` says which modules are large enough to be one."""
    children = [(name, child) for name, child in parent.named_children() if id(child) not in seen]
    kinds = Counter(type(child) for _, child in children if counts(child))
    listed = isinstance(parent, _CONTAINERS)
    # A list that repeats one class is a stack: its odd ones out (a dense layer before MoE layers) belong too.
    stack = isinstance(parent, nn.ModuleList) and any(n > 1 for n in kinds.values())
    stages = listed and (inside_stage or _unlike([child for _, child in children if counts(child)]))
    found = []
    for name, child in children:
        if id(child) in seen:  # shared: listed under two names
            continue
        seen.add(id(child))
        full = f"{path}.{name}" if path else name
        repeated = counts(child) and (kinds[type(child)] > 1 or stack)
        if listed and repeated and not isinstance(child, _CONTAINERS):
            if stages and _is_stage(child, counts, inside_stage):
                found += _search(child, full, seen, counts, lists_only, inside_stage=True)
            else:
                found.append(Block(full, child, path))
            continue
        # Stages written as plain containers (ResNet's) are looked into before they count as blocks.
        inner = _search(child, full, seen, counts, lists_only, inside_stage)
        callable_whole = not isinstance(child, (nn.ModuleList, nn.ModuleDict))
        if not inner and repeated and callable_whole and (listed or not lists_only):
            inner = [Block(full, child, path)]
        found += inner
    return found


def _unlike(siblings: Sequence[nn.Module]) -> bool:
    """Do modules of one class differ in width or depth, as stages do? Layers with experts in them do not."""
    looks = {(type(module), tuple(p.shape for p in module.parameters())) for module in siblings}
    return len(looks) > len({type(module) for module in siblings})


def _is_stage(module: nn.Module, counts: Callable[[nn.Module], bool], inside_stage: bool) -> bool:
    """Is this little more than stacks of blocks (a stage of Swin or ConvNeXt, a down block of a U-Net)? Then
    the blocks are the units: as a whole a stage is too large to be recomputed at once.

    Inside a stage only a ModuleList is a stack: a Sequential there is a block written as a chain (ResNet's).
    """
    lists = (nn.ModuleList,) if inside_stage else (nn.ModuleList, nn.Sequential)
    stacked = 0
    for child in module.children():
        kinds = Counter(type(item) for item in child.children() if counts(item))
        if isinstance(child, lists) and any(n > 1 for n in kinds.values()):
            stacked += sum(p.numel() for p in child.parameters())
    return stacked > _STAGE_SHARE * sum(p.numel() for p in module.parameters())


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def is_composite(module: nn.Module) -> bool:
    """More than a plain layer."""
    recurrent = isinstance(module, nn.RNNBase)  # as large as a block, though it has no submodules
    return (recurrent or next(module.children(), None) is not None) and _has_parameters(module)


# ------------------------------------------------------------------------------------- choosing by name


def resolve(
    model: nn.Module, only: Selector | None = None, exclude: Selector | None = None
) -> tuple[Block, ...]:
    """The blocks that `only` names, or all that repeat, without those that `exclude` names.

    A selector is a module name ("model.layers.3"), a sub-model's name ("vision_tower": the blocks in it), a
    glob ("*.self_attn"), a module class, or a list of these.
    """
    blocks = find_blocks(model)
    if only is not None:
        chosen: dict[int, Block] = {}
        for selector in _listed(only):
            for block in _select(model, blocks, selector, "only"):
                chosen.setdefault(id(block.module), block)
        blocks = tuple(outermost(chosen.values()))
    if exclude is not None:
        dropped = {id(b.module) for s in _listed(exclude) for b in _select(model, blocks, s, "exclude")}
        blocks = tuple(block for block in blocks if id(block.module) not in dropped)
    return blocks


def _listed(selector: Selector) -> list[str | type[nn.Module]]:
    return [selector] if isinstance(selector, (str, type)) else list(selector)


def _select(model: nn.Module, blocks: Sequence[Block], selector: object, what: str) -> list[Block]:
    modules = {name: module for name, module in model.named_modules() if name}
    known = {block.name: block for block in blocks}
    if isinstance(selector, type) and issubclass(selector, nn.Module):
        names = [name for name, module in modules.items() if isinstance(module, selector)]
        if not names:
            raise InputError(
                f"{what}={selector.__name__}: the model has no module of this class; {_some(modules)}"
            )
    elif isinstance(selector, str):
        names = [selector] if selector in modules else fnmatch.filter(modules, selector)
        if not names:
            raise InputError(
                f"{what}={selector!r}: the model has no module of this name; {_near(selector, modules)}"
            )
        below = [name for name in known if selector in modules and name.startswith(selector + ".")]
        names = below or names
    else:
        raise InputError(f"{what}={selector!r}: say module names, glob patterns or nn.Module classes")
    return [known.get(name) or Block(name, modules[name], _tower(name)) for name in names]


def _tower(name: str) -> str:
    """layers.3.self_attn -> layers.*.self_attn: what stands in the same place of every layer is one tower."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def outermost(blocks: Iterable[Block]) -> list[Block]:
    """Without those that lie inside another one: checkpointing twice would recompute twice."""
    blocks = list(blocks)
    inner = {id(m) for block in blocks for m in block.module.modules() if m is not block.module}
    return [block for block in blocks if id(block.module) not in inner]


def _near(name: str, modules: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(modules), n=3, cutoff=0.5)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else _some(modules)


def _some(modules: Iterable[str]) -> str:
    names = list(modules)
    return f"it has {', '.join(map(repr, names[:5]))}{', ...' if len(names) > 5 else ''}"
