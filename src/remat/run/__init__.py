"""Imported file by file."""

from remat._lazy import submodules

__getattr__ = submodules(__name__)
