"""Checkpointing by hand: `enable(model)`, `disable(model)`, `status(model)`.

Nothing but `forward` of the chosen blocks is wrapped. What a library's own switches would do on top (a second
checkpoint around the same block, a KV cache that grows on recomputation) is turned off and put back by
`disable`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from remat._torch_private import in_backward
from remat.errors import InputError
from remat.run.checkpoint import Options, run_checkpointed
from remat.run.functions import functions
from remat.run.hosted import release
from remat.run.select import Select, choose
from remat.run.status import Status
from remat.run.wrap import RegionStatus, WrappedForward, unwrap, wrap, wrapped
from remat.trace.discover import Selector

__all__ = ["disable", "enable", "status"]

_OWNER = "remat.enable"
_RECORD = "_remat_enabled"  # in the model's __dict__; removed by disable
_CACHES = ("past_key_values", "past_key_value", "layer_past")


def enable(
    model: nn.Module,
    every: int = 1,
    select: Select = "uniform",
    offload: bool = False,
    only: Selector | None = None,
    exclude: Selector | None = None,
    density: float | None = None,
    batch: Any = None,
) -> Status:
    """Checkpoint blocks of `model` until `disable(model)`. Calling it again replaces the choice.

    every:    one block in `every`, counted in each tower (vision tower, language model, ...) on its own.
    select:   "uniform"; "sqrt" (all but about the square root of each tower); "memory" (largest saved bytes
              first) or "compute" (fewest seconds of recomputation per byte first), both measured on `batch`;
              a callable Block -> bool; or module names, globs or classes, as in `only`.
    offload:  keep the blocks' inputs on the host between forward and backward, moved behind compute.
    only, exclude: module names, sub-models, globs ("*.self_attn") or classes.
    density:  the share of the blocks to checkpoint, in (0, 1].
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model is a {type(model).__name__}, not an nn.Module; wrap plain functions with remat.checkpoint"
        )
    if not isinstance(offload, bool):
        raise InputError(f"offload={offload!r}; say True or False")
    before = model.__dict__.get(_RECORD)
    blocks = choose(model, every, select, only, exclude, density, batch)
    for block in blocks:
        there = wrapped(block.module)
        if there is not None and there.around is not None and there.around.owner != _OWNER:
            raise InputError(
                f"{block.name} is planned by {there.around.owner}; take that off first (handle.remove()), "
                "then call enable"
            )
    if before is not None:
        disable(model)
    record = _Enabled({block.name: Checkpointed(block.name, block.tower, offload) for block in blocks})
    model.__dict__[_RECORD] = record
    for block in blocks:
        wrap(block.module, record.regions[block.name])
    record.switch_off(model, {id(block.module) for block in blocks})
    return status(model)


def disable(model: nn.Module) -> None:
    """Take off what `enable` put on, and restore every flag it changed. Nothing happens if nothing is on."""
    record = model.__dict__.pop(_RECORD, None)
    for module in model.modules():
        there = _find(module)
        if there is None or there.around is None or there.around.owner != _OWNER:
            continue
        if not unwrap(
            module
        ):  # somebody wrapped it once more: ours cannot be taken out, but it can stand still
            there.around = None
    if record is not None:
        record.switch_back(model)
        if any(region.offload for region in record.regions.values()):
            release()


def status(model: nn.Module) -> Status:
    """What is wrapped in `model` and what it did in its last step, counted while it ran."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}, not an nn.Module")
    record: _Enabled | None = model.__dict__.get(_RECORD)
    rows: list[RegionStatus] = []
    shown: set[int] = set()
    for name, around in ({} if record is None else record.regions).items():
        there = _find(_submodule(model, name))
        in_place = there is not None and there.around is around
        rows.append(around.status() if in_place else around.displaced())
        shown.add(id(around))
    for module in model.modules():
        there = wrapped(module)
        if there is not None and there.around is not None and id(there.around) not in shown:
            rows.append(there.around.status())
    rows += [around.status() for around in functions(model).values()]
    return Status(tuple(rows), () if record is None else tuple(record.notes(model)))


# ---------------------------------------------------------------------------------------- one region


class Checkpointed:
    """Runs a module's forward checkpointed, and counts what happens. Copies start counting anew."""

    owner = _OWNER

    def __init__(self, name: str, tower: str, offload: bool) -> None:
        self.name, self.tower, self.offload = name, tower, offload
        self._options = Options(offload=offload, name=name)
        self._reset()

    def _reset(self) -> None:
        self._calls = self._recomputed = self._inside = self._idle = 0
        self._bytes: tuple[int, int] | None = None

    def __getstate__(self) -> tuple[str, str, bool]:
        return self.name, self.tower, self.offload

    def __setstate__(self, state: tuple[str, str, bool]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._idle += 1
        kwargs = _without_empty_cache(module, kwargs)
        return run_checkpointed(forward, args, kwargs, self._options, (module,), self)

    # What the region tells of itself (run.checkpoint.Observer).

    def entered(self) -> None:
        self._idle -= 1
        if in_backward():  # somebody else's recomputation runs us once more
            self._inside += 1
            return
        if self._recomputed:  # the first forward after a backward: a new step
            self._recomputed = self._inside = 0
        self._calls += 1

    def counting(self) -> bool:
        return self._bytes is None

    def counted(self, before: int, after: int) -> None:
        self._bytes = before, after

    def recomputed(self) -> None:
        self._recomputed += 1

    def status(self) -> RegionStatus:
        return self._row(self._calls > 0, self._why())

    def displaced(self) -> RegionStatus:
        why = "something replaced or removed this module's forward after enable(); call enable() again"
        return self._row(False, why)

    def _row(self, active: bool, why: str) -> RegionStatus:
        before, after = self._bytes or (None, None)
        return RegionStatus(
            name=self.name,
            tower=self.tower,
            mode="checkpoint+offload" if self.offload else "checkpoint",
            active=active,
            calls=self._calls,
            recomputed=self._recomputed,
            saved_bytes_before=before,
            saved_bytes_after=after,
            fallbacks=self._idle,
            why=why,
        )

    def _why(self) -> str:
        if self._inside:
            return (
                f"inside another checkpoint: its forward ran {self._inside} extra times in the last backward"
            )
        if self._calls:
            return "recomputed in backward" if self._recomputed else "no backward has asked for it"
        if self._idle:
            return "nothing that goes into it needs a gradient"
        return (
            "its forward was not called while gradients were recorded; if its parent calls its parts "
            "instead, use remat.checkpoint on that function"
        )


def _without_empty_cache(module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """A cache that is filled by forward would be filled again by recomputation. An empty one is not needed in
    training; one that holds something (a learned prefix) is part of the model, and stays."""
    if not module.training or getattr(module, "_can_checkpoint_with_cache", False):
        return kwargs
    empty = [key for key in _CACHES if kwargs.get(key) is not None and _is_empty(kwargs[key])]
    changed: dict[str, Any] = dict.fromkeys(empty)
    if empty and kwargs.get("use_cache"):
        changed["use_cache"] = False
    return {**kwargs, **changed} if changed else kwargs


def _is_empty(cache: Any) -> bool:
    length = getattr(cache, "get_seq_length", None)
    return callable(length) and not length()


# ---------------------------------------------------------------------------------------- the model


@dataclass
class _Enabled:
    """What enable() did to a model, by name, so that a copy of the model has a record that fits."""

    regions: dict[str, Checkpointed]
    checkpointing: list[str] = field(default_factory=list)  # modules whose own checkpointing was on
    caches: list[str] = field(default_factory=list)  # modules whose config had use_cache on

    def switch_off(self, model: nn.Module, chosen: set[int]) -> None:
        for name, module in model.named_modules():
            if _own_checkpointing(module) and _overlaps(module, chosen, model):
                module.gradient_checkpointing = False
                self.checkpointing.append(name)
            config: Any = getattr(module, "config", None)
            if getattr(config, "use_cache", False) is True:
                config.use_cache = False
                self.caches.append(name)

    def switch_back(self, model: nn.Module) -> None:
        for name in self.checkpointing:
            _submodule(model, name).gradient_checkpointing = True  # type: ignore[assignment]
        for name in self.caches:
            getattr(_submodule(model, name), "config").use_cache = True  # noqa: B009

    def notes(self, model: nn.Module) -> list[str]:
        found = []
        if self.checkpointing:
            found.append(
                f"the library's own gradient_checkpointing was on in {len(self.checkpointing)} modules over "
                "the same blocks; it is off while remat is on, and disable() turns it on again"
            )
        chosen = {id(_submodule(model, name)) for name in self.regions}
        flagged = [(name, m) for name, m in model.named_modules() if _own_checkpointing(m)]
        nested = [name for name, m in flagged if _overlaps(m, chosen, model)]
        if nested:
            found.append(
                f"nested checkpointing: gradient_checkpointing was switched on in {len(nested)} modules "
                f"({nested[0] or 'the model itself'}) after enable(), so blocks are recomputed twice; "
                "call enable() again, or switch it off"
            )
        if self.caches:
            found.append("config.use_cache is off while remat is on; disable() restores it")
        return found


def _own_checkpointing(module: nn.Module) -> bool:
    """transformers and diffusers mark modules with this flag."""
    return getattr(module, "gradient_checkpointing", False) is True


def _overlaps(module: nn.Module, chosen: set[int], model: nn.Module) -> bool:
    """Whether `module` is, holds or lies in a chosen block."""
    if any(id(inner) in chosen for inner in module.modules()):
        return True
    return any(id(m) in chosen and any(inner is module for inner in m.modules()) for m in model.modules())


def _submodule(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name)


def _find(module: nn.Module) -> WrappedForward | None:
    """Our wrapper, also below one that somebody else put on top and marked with __wrapped__."""
    forward: Any = module.__dict__.get("forward")
    for _ in range(8):
        if forward is None or isinstance(forward, WrappedForward):
            return forward
        forward = getattr(forward, "__wrapped__", None)
    return None
