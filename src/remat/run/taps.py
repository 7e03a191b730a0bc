"""Values that pass between submodules, noted while a region whose recipe reads them is running."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from remat.trees import tensors

__all__ = ["NOTHING", "ModuleTap", "Passing", "open_taps"]

_open = threading.local()


class Passing(dict[tuple[str, str, int], list[torch.Tensor]]):
    """(submodule, "module_input" or "module_output", number of the call) -> tensors, of one forward."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[tuple[ModuleTap, str], int] = {}

    def note(self, tap: ModuleTap, kind: str, tree: Any) -> None:
        # Counted per tap: a submodule that several regions share has a tap of each, under the same name.
        call = self.calls.get((tap, kind), 0)
        self.calls[tap, kind] = call + 1
        self[tap.name, kind, call] = [tensor.detach() for tensor in tensors(tree)]


NOTHING = Passing()  # of a region whose recipe reads nothing of the kind


def open_taps() -> list[Passing]:
    if not hasattr(_open, "taps"):
        _open.taps = []
    return _open.taps  # type: ignore[no-any-return]


class ModuleTap:
    """Notes what goes in and out of a submodule while a region that reads it is running."""

    def __init__(self, name: str) -> None:
        self.name = name

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        for seen in open_taps()[-1:]:
            seen.note(self, "module_input", (args, kwargs))

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        for seen in open_taps()[-1:]:
            seen.note(self, "module_output", output)
