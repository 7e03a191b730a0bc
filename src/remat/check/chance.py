"""A step that makes the same random choices every time it is run, so that its runs can be compared.

Some models decide by chance which blocks they call (LayerDrop). Every run of a profile must then call the
same ones, and as many as possible: a block that is called only later would not be planned.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy
import torch

__all__ = ["SeededRun"]


class SeededRun:
    """`run`, each time from the same seed. To be called where random state is put back afterwards."""

    def __init__(self, run: Callable[[], torch.Tensor], seed: int = 0) -> None:
        self._run = run
        self.seed = seed

    def __call__(self) -> torch.Tensor:
        torch.manual_seed(self.seed)
        random.seed(self.seed)
        numpy.random.seed(self.seed)
        return self._run()
