"""Submodules that are imported when they are first named, so that `import remat` stays light."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

__all__ = ["submodules"]


def submodules(package: str) -> Callable[[str], ModuleType]:
    """A package's `__getattr__`: `remat.ranks.alone()` works after `import remat` alone."""

    def find(name: str) -> ModuleType:
        full = f"{package}.{name}"
        if name.startswith("_") or find_spec(full) is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return import_module(full)

    return find
