"""Which of the tensors that a recipe drops the spot check looks at: such that none of the others is wrong if
these are right."""

from __future__ import annotations

import collections

import torch

from remat.records import Saved
from remat.run.reach import Reach

__all__ = ["looked_at"]

# Operations whose result is wrong wherever their operand is. Not among them: sums, where a large term hides
# the error of a small one, and products with another tensor, which may be zero: weights often begin so.
_TELLING = frozenset({
    "mul", "div", "neg", "silu", "gelu", "native_dropout", "clone", "copy", "_to_copy", "view",
    "_unsafe_view", "reshape", "t", "transpose", "permute", "unsqueeze", "squeeze", "expand",
})  # fmt: skip


def looked_at(at: Reach, dropped: list[Saved]) -> set[int]:
    """Slots to look at, such that none of the others is wrong if they are right."""
    wholes = {at.base(saved.value) for saved in dropped if at.is_whole(saved.value)}
    told: set[int] = set()
    chosen = set()
    for number, saved in enumerate(dropped):  # backward asks for the end of a chain first
        base, whole = at.base(saved.value), at.is_whole(saved.value)
        if whole and base in told and not at.is_of_input(saved.value):
            continue
        chosen.add(number)
        if whole and not at.is_tap(base):
            told |= _told_by(at, base, wholes)
    return chosen


def _told_by(at: Reach, value: int, wholes: set[int]) -> set[int]:
    """Values that are right if this one is: down the chain of operations that let every error of an
    operand through, as long as nothing else that may be wrong could make up for it. A comparison hides
    most errors, a norm those that all elements share; so does a value that is read twice on the way."""
    below = at.ops_below(value)
    readers = collections.Counter(at.base(read) for op in below for read in at.graph.ops[op].inputs)
    told = {value}
    while True:
        op = at.graph.ops[at.op_of(value)]
        lets_through = op.name.split(".")[1] in _TELLING and len(op.inputs) == 1
        if not lets_through or not _is_number(at.graph.values[value].dtype):
            return told
        reads = [read for read in op.inputs if not at.is_tap(at.base(read))]
        follow = [r for r in reads if at.is_whole(r) and readers[at.base(r)] == 1]
        if not follow or any(at.base(r) not in wholes for r in reads if r != follow[0]):
            return told
        value = at.base(follow[0])
        told.add(value)


def _is_number(dtype: str) -> bool:
    found: torch.dtype = getattr(torch, dtype)
    return found.is_floating_point or found.is_complex
