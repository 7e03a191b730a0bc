"""Putting planned regions on a model and taking them off: the only code that does.

A region that is a module gets its forward wrapped; a region that is a function is found by name. Where a
recipe reads a value that only passes between submodules, those submodules get a hook. Caches and other
checkpointing that would fight with ours are switched off meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

from remat.run.chunk import chunk_head
from remat.run.chunk_mlp import ChunkedModule
from remat.run.compiled import decompiled
from remat.run.functions import install_function, remove_function
from remat.run.offload import Engine
from remat.run.quiet import quiet
from remat.run.region import PlannedRegion, trained_count
from remat.run.stem import StemSender
from remat.run.taps import ModuleTap
from remat.run.wrap import unwrap, wrap

__all__ = ["Installation", "install", "installed_region", "tap"]


class Installation:
    """What was put on a model. `remove` takes all of it off again, once."""

    def __init__(self) -> None:
        self._undo = ExitStack()
        self.regions: list[PlannedRegion] = []
        self.engine: Engine | None = None  # moves what these regions keep on the host
        self.stem: StemSender | None = None  # and this what runs before them

    def defer(self, undo: Callable[[], Any]) -> None:
        self._undo.callback(undo)

    def enter(self, context: Any) -> None:
        self._undo.enter_context(context)

    def remove(self) -> None:
        self._undo.close()


def install(
    model: nn.Module, regions: Sequence[PlannedRegion], *, head: str | None = None, columns: bool = False
) -> Installation:
    """Put these regions on the model, and that head in chunks, of rows or of columns; on an error nothing
    stays behind."""
    installation = Installation()
    try:
        installation.enter(quiet(model))
        if head is not None:
            installation.enter(chunk_head(model, head=head, columns=columns))
        modules = dict(model.named_modules())
        for planned in regions:
            if planned.name in modules and planned.tower != "functions":
                owner = modules[planned.name]
                installation.enter(decompiled([owner]))
                wrap(owner, planned)
                planned.trained = trained_count(owner)
                installation.defer(partial(unwrap, owner))
            else:
                owner = model
                install_function(planned.name, planned, model)
                installation.defer(partial(remove_function, planned.name))
            _tap(installation, owner, planned)
            _chunk_parts(installation, owner, planned)
            installation.regions.append(planned)
    except BaseException:
        installation.remove()
        raise
    return installation


def _tap(installation: Installation, owner: nn.Module, planned: PlannedRegion) -> None:
    programs = [variant.program for variant in planned.variants.values() if variant.program is not None]
    for name, kind in sorted({passed for program in programs for passed in program.passed}):
        tap(installation, owner, name, kind)


def tap(installation: Installation, owner: nn.Module, name: str, kind: str) -> None:
    """Note what goes into this submodule of a region, or what comes out."""
    installation.defer(ModuleTap(name, kind).put_on(owner.get_submodule(name)).remove)


def _chunk_parts(installation: Installation, owner: nn.Module, planned: PlannedRegion) -> None:
    """Parts that run in chunks, for whichever of the region's inputs it was planned."""
    parts = dict(variant.chunk for variant in planned.variants.values() if variant.chunk is not None)
    for name, size in parts.items():
        module = owner.get_submodule(name)
        wrap(module, ChunkedModule(f"{planned.name}.{name}", size))
        installation.defer(partial(unwrap, module))


@contextmanager
def installed_region(
    owner: nn.Module, forward: Callable[..., Any], planned: PlannedRegion
) -> Iterator[Callable[..., Any]]:
    """The region alone, without wrapping anything: a function that runs it as planned."""
    installation = Installation()
    try:
        _tap(installation, owner, planned)
        yield lambda *args, **kwargs: planned(owner, forward, args, kwargs)
    finally:
        installation.remove()
