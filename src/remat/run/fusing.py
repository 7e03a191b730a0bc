"""Which operations of a recipe run as one kernel: elementwise ones, with what lies behind their operands."""

from __future__ import annotations

import collections
import logging
import math

import torch

from remat.records import Value
from remat.run import fused
from remat.run.reach import Reach

__all__ = ["Fusing"]

_LOG = logging.getLogger(__name__)

_LARGEST_TREE = 24  # operations in one fused kernel


class Fusing:
    """`kernels`: by the value that they make, with what they compute. `compile_new`: those that are not
    compiled yet, too."""

    def __init__(self, at: Reach, device: torch.device, compile_new: bool) -> None:
        self.at, self.graph = at, at.graph
        self.device, self.compile_new = device, compile_new
        self.kernels: dict[int, tuple[fused.Node, fused.Kernel]] = {}
        self._trees: dict[int, fused.Node | None] = {}  # by value

    def fuse(self, value: int, readers: collections.Counter[int]) -> None:
        tree = self._tree(value, readers)
        if tree is None or not self._is_worth_it(tree, value):
            return
        try:
            made = self.graph.values[value]
            kernel = fused.kernel(tree, made, self.device, compile_new=self.compile_new)
            self.kernels[value] = (tree, kernel)
        except fused.NotCompiledError:
            pass
        except Exception as error:  # a compiler's errors are its own; operation by operation always works
            _LOG.warning("a chain of operations runs unfused, its kernel does not compile: %s", error)

    def give(self, value: int, view: Value) -> None:
        """Let the kernel of a value give this view of it."""
        tree, _ = self.kernels[value]
        made = self.graph.values[value]
        self.kernels[value] = tree, fused.kernel(tree, made, self.device, given=view, compile_new=False)

    def _is_worth_it(self, tree: fused.Node, value: int) -> bool:
        """More than one operation, or one that torch's kernels are slow at: a cast, a broadcast."""
        made = self.graph.values[value]
        simple = all(
            leaf.dtype == made.dtype and leaf.shape == made.shape and leaf.stride == made.stride
            for leaf in fused.leaves(tree)
        )
        return fused.size_of(tree) > 1 or not simple

    def _tree(self, value: int, readers: collections.Counter[int]) -> fused.Node | None:
        if value not in self._trees:
            self._trees[value] = self._new_tree(value, readers)
        return self._trees[value]

    def _new_tree(self, value: int, readers: collections.Counter[int]) -> fused.Node | None:
        op = self.graph.ops[self.at.op_of(value)]
        if not fused.is_fusible(self.graph, op):
            return None
        types = {self.graph.values[v].dtype for v in op.inputs}
        if not all(fused.is_exact(op, dtype, self.device) for dtype in types):
            return None
        inner = tuple(
            self._operand(operand, readers) if isinstance(operand, int) else operand
            for operand in fused.operands(op) or ()
        )
        return fused.node(self.graph, op, inner)

    def _operand(self, value: int, readers: collections.Counter[int]) -> fused.Node | fused.Leaf:
        """The operations behind an operand too, if nobody else wants it or it costs no more to compute it
        again than to load it."""
        if self.at.base(value) == value and not self.at.is_tap(value):
            tree = self._tree(value, readers)
            if tree is not None and fused.size_of(tree) < _LARGEST_TREE:
                loads = sum(_nbytes(self.graph.values[leaf.value]) for leaf in fused.leaves(tree))
                if readers[value] == 1 or loads <= _nbytes(self.graph.values[value]):
                    return tree
        meta = self.graph.values[value]
        shift = meta.offset - self.graph.values[self.at.holder(value)].offset
        return fused.Leaf(value, meta.shape, meta.stride, shift, meta.dtype)


def _nbytes(value: Value) -> int:
    return math.prod(value.shape) * int(getattr(torch, value.dtype).itemsize)
