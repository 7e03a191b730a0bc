"""Values that pass between submodules, noted while a region whose recipe reads them is running."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from remat.trees import tensors

__all__ = ["NOTHING", "ModuleTap", "Passing", "open_taps"]


class Passing(dict[tuple[str, str, int], list[torch.Tensor]]):
    """(submodule, "module_input" or "module_output", number of the call) -> tensors, of one forward."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[ModuleTap, int] = {}

    def note(self, tap: ModuleTap, tree: Any) -> None:
        # Counted per tap: a submodule that several regions share has a tap of each, under the same name.
        call = self.calls.get(tap, 0)
        self.calls[tap] = call + 1
        self[tap.name, tap.kind, call] = [tensor.detach() for tensor in tensors(tree)]


NOTHING = Passing()  # of a region whose recipe reads nothing of the kind


class _Open(threading.local):
    def __init__(self) -> None:
        self.taps: list[Passing] = []


_OPEN = _Open()


def open_taps() -> list[Passing]:
    """Of the regions that are running in this thread, the innermost last."""
    return _OPEN.taps


class ModuleTap:
    """Notes what goes into a submodule, or what comes out, while a region that reads it is running."""

    __slots__ = ("kind", "name")

    def __init__(self, name: str, kind: str) -> None:
        self.name, self.kind = name, kind

    def put_on(self, module: nn.Module) -> RemovableHandle:
        if self.kind == "module_input":
            return module.register_forward_pre_hook(self._before, with_kwargs=True)
        return module.register_forward_hook(self._after)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        taps = _OPEN.taps
        if taps:
            taps[-1].note(self, (args, kwargs))

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        taps = _OPEN.taps
        if taps:
            taps[-1].note(self, output)
