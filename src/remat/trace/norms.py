"""Find the norms beside the blocks that are written out in operations, such as the last one of a Llama.

Each keeps several tensors of full width for backward, some of them in float32, where what comes next needs
one at most: as much as a tenth of what is left at small budgets. They are planned as regions of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from remat.run.compiled import is_compiled
from remat.trace.discover import Block

__all__ = ["with_norms"]


def with_norms(model: nn.Module, blocks: Sequence[Block]) -> tuple[Block, ...]:
    """These blocks and such norms outside of them. A norm that its user has compiled, alone or with what is
    around it, is not touched; a model without blocks has no regions that nobody marked."""
    if not blocks:
        return ()
    inside = {id(module) for block in blocks for module in block.module.modules()}
    compiled = {id(part) for module in model.modules() if is_compiled(module) for part in module.modules()}
    found = [
        Block(name, module, name.rpartition(".")[0])
        for name, module in model.named_modules()
        if name and id(module) not in inside | compiled and _is_written_out(module)
    ]
    return (*blocks, *found)


def _is_written_out(module: nn.Module) -> bool:
    """Not torch's own, which is one operation; no submodules, and vectors alone for parameters."""
    own = not type(module).__module__.startswith("torch.")
    sizes = [parameter.dim() for parameter in module.parameters()]
    return own and bool(sizes) and max(sizes) <= 1 and next(module.children(), None) is None
