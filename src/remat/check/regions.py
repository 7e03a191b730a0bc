"""Verification that needs no more memory than the plan: every region compares its own replay where it stands.

When a region's forward has returned, everything that it is about to drop is rebuilt from what it keeps and
compared bit for bit, and only then let go. If the rebuilt tensors are equal, so are the gradients: backward
reads nothing else that differs from the untouched step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

from remat.check.untouched import untouched
from remat.check.verify import Verification
from remat.records import Mode
from remat.run.region import PlannedRegion

__all__ = ["verify_regions"]


def verify_regions(
    model: nn.Module,
    run: Callable[[], torch.Tensor],
    regions: Sequence[PlannedRegion],
    compare: Collection[str],
) -> Verification:
    """One planned step in which the regions named in `compare` check themselves. The model stays as it is."""
    chosen = [r for r in regions if r.name in compare and any(v.program for v in r.variants.values())]
    before = {region.name: region.counts.fallbacks for region in regions}
    with untouched(model):
        try:
            for region in chosen:
                region.shadow = True
            run().backward()  # type: ignore[no-untyped-call]
        finally:
            for region in chosen:
                region.shadow = False
        untrained = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    failed = [region for region in regions if region.counts.fallbacks > before[region.name]]
    compared = sum(len(v.program.slots) for r in chosen for v in r.variants.values() if v.program)
    whole = sum(all(v.mode is Mode.FULL for v in region.variants.values()) for region in regions)
    how = f"rebuilt where they stand, in {len(chosen)} of {len(regions)} planned regions"
    if len(chosen) < len(regions) - whole:
        how += " (the others have no room for both; each distinct region was compared alone)"
    return Verification(
        bitwise=not failed,
        ok=not failed,
        max_abs_diff=0.0 if not failed else float("nan"),
        noise=0.0,
        compared=compared,
        worst=f"{failed[0].name}: {failed[0].counts.why}" if failed else "",
        untrained=tuple(untrained),
        how=how + (f", {whole} recompute as a whole" if whole else ""),
    )
