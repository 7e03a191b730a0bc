"""Verification that needs no more memory than the plan: every region compares its own replay where it stands.

When a region's forward has returned, everything that it is about to drop is rebuilt from what it keeps and
compared bit for bit, and only then let go. If the rebuilt tensors are equal, so are the gradients: backward
reads nothing else that differs from the untouched step.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from remat._torch_private import storage_ref
from remat.check.untouched import backward, untouched
from remat.check.verify import Verification
from remat.records import Mode
from remat.run.region import PlannedRegion, Variant
from remat.trace.capture import entry_copies
from remat.trees import map_tensors, tensors

__all__ = ["GradientGap", "gradient_gap", "gradients_of", "precise_gradients", "verify_regions"]

_LOG = logging.getLogger(__name__)

_SEED = 20_011
# Largest norm of a difference, as a share of the gradient's own: kernels that add up in another order.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-3, torch.bfloat16: 0.08, torch.float16: 0.02}
_FARTHER = 2.0  # from what more digits give than the reference itself, at most, is only rounded otherwise


def verify_regions(
    model: nn.Module,
    run: Callable[[], torch.Tensor],
    regions: Sequence[PlannedRegion],
    compare: Collection[str],
    head: str | None = None,
) -> Verification:
    """One planned step in which the regions named in `compare` check themselves. The model stays as it is.

    `head` runs in chunks: its gradients are equal within rounding by construction, and not compared here.
    """
    chosen = [r for r in regions if r.name in compare and any(v.program for v in r.variants.values())]
    compiled = [v for r in regions for v in r.variants.values() if v.compiled is not None]
    chunked = [v for r in regions for v in r.variants.values() if v.chunk is not None or v.cut]
    before = {region.name: region.counts.fallbacks for region in regions}
    with untouched(model):
        try:
            for region in chosen:
                region.shadow = True
            backward(run())
        finally:
            for region in chosen:
                region.shadow = False
        untrained = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    failed = [region for region in regions if region.counts.fallbacks > before[region.name]]
    compared = sum(len(v.program.slots) for r in chosen for v in r.variants.values() if v.program)
    whole = sum(all(_is_whole(v) for v in region.variants.values()) for region in regions)
    how = f"rebuilt where they stand, in {len(chosen)} of {len(regions)} planned regions"
    if len(chosen) < len(regions) - whole - len(compiled) - len(chunked):
        how += " (the others have no room for both; each distinct region was compared alone)"
    if compiled:
        how += f", {len(compiled)} compiled (each saved set was compared with the block as it is)"
    if chunked:
        how += f", {len(chunked)} in chunks, or a part of them (each was compared with the region as it is)"
    if head is not None:
        how += f", {head} and the loss in chunks (equal within rounding: remat.verify compares them)"
    gap = max((variant.gradient_gap for variant in (*compiled, *chunked)), default=0.0)
    return Verification(
        bitwise=not failed and not gap and head is None,
        ok=not failed,
        max_abs_diff=gap if not failed else float("nan"),
        noise=0.0,
        compared=compared,
        worst=f"{failed[0].name}: {failed[0].counts.why}" if failed else "as a share of its norm" * bool(gap),
        untrained=tuple(untrained),
        how=how + (f", {whole} recompute as a whole" if whole else ""),
        within="rounding" if gap or head is not None else Verification.within,
    )


# -------------------------------------------------------------------------------------- one region alone


@dataclass(frozen=True)
class GradientGap:
    """How two lists of gradients differ: `worst` is the largest norm of a difference as a share of the
    reference's norm, `where` its position."""

    ok: bool
    exact: bool
    worst: float = 0.0
    where: int = -1

    def __str__(self) -> str:
        if self.where < 0:
            return "equal" if self.exact else "another number of tensors gets one"
        return f"tensor {self.where} is off by {self.worst:.2g} of its norm"


def _is_whole(variant: Variant) -> bool:
    return variant.mode in (Mode.FULL, Mode.HOSTED) and variant.chunk is None and not variant.cut


def gradients_of(
    call: Callable[..., Any],
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    modules: Sequence[nn.Module],
) -> list[torch.Tensor]:
    """What one region computes on copies of `inputs`: its outputs, and the gradients of its inputs and
    parameters for a made-up gradient of its outputs. The same random numbers every time."""
    outputs, gradients = _computed(call, inputs, modules)
    return [*outputs, *gradients]


def _computed(
    call: Callable[..., Any],
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    modules: Sequence[nn.Module],
    rounded: Sequence[torch.dtype] = (),
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs and gradients. What is made up is `rounded` to these dtypes, where the outputs have others."""
    parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
    devices = {p.device.index or 0 for p in parameters if p.device.type == "cuda"}
    with torch.random.fork_rng(sorted(devices)), torch.enable_grad():
        torch.manual_seed(_SEED)
        args, kwargs = entry_copies(*inputs)
        wanted = [t for t in tensors((args, kwargs)) if t.requires_grad] + parameters
        outputs = [t for t in tensors(call(*args, **kwargs)) if t.requires_grad]
        torch.manual_seed(_SEED + 1)
        made = [_made_up(t, rounded[place] if rounded else t.dtype) for place, t in enumerate(outputs)]
        found = torch.autograd.grad(outputs, wanted, made, allow_unused=True)
    return [t.detach() for t in outputs], [t.detach() for t in found if t is not None]


def _made_up(output: torch.Tensor, rounded: torch.dtype) -> torch.Tensor:
    """The same numbers whatever the output's dtype and layout."""
    if output.is_complex():
        return torch.randn_like(output)
    plain = torch.randn_like(output, dtype=torch.float32, memory_format=torch.contiguous_format)
    return plain.to(rounded).to(output.dtype)


def precise_gradients(
    module: nn.Module,
    forward: Callable[..., Any],
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    expected: Sequence[torch.Tensor],
) -> list[torch.Tensor] | None:
    """What `expected`, the `gradients_of` this module, would be with twice as many digits; None if that
    cannot be told. Some gradients are nothing but rounding (a key's bias shifts all scores of a query alike,
    so it has none), and some kernels round far more than others."""
    code = getattr(forward, "__func__", None)
    if code is None or getattr(forward, "__self__", None) is not module:
        return None
    held = [*module.parameters(), *module.buffers()]
    given = {id(tensor): tensor for tensor in tensors(inputs)}
    if any(t.is_complex() for t in expected) or not _can_be_widened(held, list(given.values())):
        return None
    floats = [t for t in (*given.values(), *held) if t.is_floating_point()]
    wide = torch.float32 if any(t.element_size() < 4 for t in floats) else torch.float64

    def widened(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.element_size() >= wide.itemsize:
            return tensor
        return tensor.detach().to(wide).requires_grad_(tensor.requires_grad)

    wider = {key: widened(tensor) for key, tensor in given.items()}  # one that is given twice stays one
    try:
        twin = copy.deepcopy(module)
        twin._apply(lambda t: t.to(wide) if t.is_floating_point() and t.element_size() < wide.itemsize else t)
        with torch.autocast(floats[0].device.type, enabled=False):
            outputs, gradients = _computed(
                code.__get__(twin),
                map_tensors(lambda tensor: wider[id(tensor)], inputs),
                (twin,),
                [t.dtype for t in expected],
            )
    except Exception as error:  # no memory for it; or what the model says to another dtype, or to a copy
        _LOG.info("no gradients with more digits: %s", error)
        return None
    found = [*outputs, *gradients]
    if [t.shape for t in found] != [t.shape for t in expected]:
        return None
    # Another computation (it draws random numbers, or remembers) says nothing about this one.
    return found if gradient_gap(expected[: len(outputs)], _like(outputs, expected)).ok else None


def _can_be_widened(held: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> bool:
    """Plain tensors of real numbers, no two inputs in the same memory."""
    if any(type(t) not in (torch.Tensor, nn.Parameter) or t.is_complex() for t in (*held, *given)):
        return False
    if not any(t.is_floating_point() for t in (*held, *given)):
        return False
    return len({storage_ref(t) for t in given}) == len(given)


def _like(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [a.to(b.dtype) for a, b in zip(ours, theirs, strict=False)]


def gradient_gap(
    ours: Sequence[torch.Tensor],
    theirs: Sequence[torch.Tensor],
    precise: Callable[[], Sequence[torch.Tensor] | None] | None = None,
) -> GradientGap:
    """`theirs` is the reference. Another number of gradients is never ok. `precise`: the same with more
    digits, asked for where one is off by more than rounding explains: then it must not be much farther from
    those than the reference is itself, and counts as off by as much as is allowed."""
    if len(ours) != len(theirs):
        return GradientGap(ok=False, exact=False, worst=float("inf"))
    exact, ok, worst, where = True, True, 0.0, -1
    digits: Sequence[torch.Tensor] | None = None
    for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if torch.equal(a, b):
            continue
        exact, tolerance = False, _TOLERANCE.get(b.dtype, 2e-3)
        norm = float(_wide(b).norm())
        gap = _distance(a, b) / max(norm, 1e-30)
        finite = math.isfinite(gap) or not math.isfinite(norm)
        if finite and gap > tolerance and precise is not None:
            digits, precise = precise(), None
        if finite and gap > tolerance and digits is not None:
            ours_off, theirs_off = _distance(a, digits[place]), _distance(b, digits[place])
            if ours_off <= _FARTHER * theirs_off < math.inf:
                gap = tolerance
        if gap > worst or not finite:
            worst, where = gap, place
        ok = ok and finite and not gap > tolerance
    return GradientGap(ok, exact, worst, where)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((_wide(a) - _wide(b)).norm())


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
