"""Find the blocks of a model that repeats no module: one block that a step runs again and again.

ALBERT has one layer and runs it twelve times; a recurrent cell runs once per position. No structure shows
that. So, only where the structure of a model leaves room for such a block, one forward runs without gradients
(which keeps nothing for backward) and the data is followed: a block that reads what it has made before is
looped. One that merely runs twice, on two views, is not.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from remat import ranks
from remat.check.live import storages_of
from remat.run.functions import called_functions
from remat.trace.discover import Block, is_composite, outermost
from remat.trees import tensors

__all__ = ["with_loops"]


def with_loops(
    model: nn.Module, blocks: Sequence[Block], run: Callable[[], torch.Tensor]
) -> tuple[Block, ...]:
    """These blocks, as `find_blocks` gives them, and those that this step loops. A looped one takes the place
    of plain layers: of all that are in it, or in no list. A step that cannot run so has no loops."""
    candidates = _candidates(model, [block for block in blocks if not _is_plain(block.module)])
    if not candidates:
        return tuple(blocks)
    names = ranks.agree(_looped(candidates, run))
    looped = [block for block in candidates if block.name in names]
    if not looped:
        return tuple(blocks)
    stay = [block for block in blocks if not _is_plain(block.module) or _in_list(model, block)]
    return tuple(outermost((*stay, *looped)))


def _is_plain(module: nn.Module) -> bool:
    """A layer of torch's; what its users write without submodules may be a block all the same."""
    return type(module).__module__.startswith("torch.") and not is_composite(module)


def _in_list(model: nn.Module, block: Block) -> bool:
    around = model.get_submodule(block.name.rpartition(".")[0])
    return isinstance(around, (nn.ModuleList, nn.Sequential))


def _candidates(model: nn.Module, blocks: Sequence[Block]) -> list[Block]:
    """Modules outside of these blocks that may be looped. In a model with repeated blocks a module beside
    them counts only if it stands where blocks stand: alone in a list."""
    inside = {id(module) for block in blocks for module in block.module.modules()}
    found = []
    modules = dict(model.named_modules())
    for name, module in modules.items():
        tower = name.rpartition(".")[0]
        alone = isinstance(modules[tower], nn.ModuleList) and len(list(modules[tower].children())) == 1
        if not name or isinstance(module, (nn.ModuleList, nn.ModuleDict)) or not is_composite(module):
            continue
        if (alone or not blocks) and inside.isdisjoint(map(id, module.modules())):
            found.append(Block(name, module, tower))
    return found


def _looped(candidates: Sequence[Block], run: Callable[[], torch.Tensor]) -> set[str]:
    found: set[str] = set()
    descent = _Descent()
    hooks = []
    for number, block in enumerate(candidates):
        mark = 1 << number

        def before(_: nn.Module, args: Any, kwargs: Any, mark: int = mark, name: str = block.name) -> None:
            if descent.marks((args, kwargs)) & mark:
                found.add(name)

        def after(_: nn.Module, args: Any, output: Any, mark: int = mark) -> None:
            descent.add(output, mark)

        hooks.append(block.module.register_forward_pre_hook(before, with_kwargs=True))
        hooks.append(block.module.register_forward_hook(after))
    try:
        with torch.no_grad(), called_functions() as marked, descent:
            run()
    except Exception:  # a step that computes gradients itself, or does not let its operations be seen
        return set()
    finally:
        for hook in hooks:
            hook.remove()
    return set() if marked else found  # who marks functions as regions has said what the regions are


class _Descent(TorchDispatchMode):
    """Whatever is computed from a marked tensor has its marks (bits of a number), too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._marks: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def marks(self, tree: Any) -> int:
        return functools.reduce(int.__or__, map(self._of, _storages(tree)), 0)

    def add(self, tree: Any, marks: int) -> None:
        for storage in _storages(tree):
            self._marks[id(storage)] = (weakref.ref(storage), marks | self._of(storage))

    def _of(self, storage: torch.UntypedStorage) -> int:
        known = self._marks.get(id(storage))
        return known[1] if known is not None and known[0]() is storage else 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        marks = self.marks((args, kwargs))
        if marks:
            self.add(out, marks)
        return out


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [storage for tensor in tensors(tree) for storage, _ in storages_of(tensor)]
