"""Keep tensors on the host between forward and backward: one copy per storage, never a parameter.

The copy is ordered on the current stream, so it needs no synchronisation of ours: the way back waits for
the way there. Overlapping copies with compute is another engine's job.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from remat._torch_private import storage_ref

__all__ = ["Hosted", "can_host", "to_device", "to_host"]


@dataclass(frozen=True)
class _View:
    """How one tensor lies in its storage."""

    copy: int
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    requires_grad: bool


@dataclass(frozen=True)
class Hosted:
    """Tensors that left their device: the bytes of each storage once, and each tensor's view of them."""

    copies: tuple[tuple[Tensor, torch.device], ...]
    views: tuple[_View, ...]

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for copy, _ in self.copies)


def can_host(tensor: Tensor) -> bool:
    """Plain tensors only: parameters (and their views) are resident anyway, subclasses have their ways."""
    base = tensor._base if tensor._is_view() else tensor
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type != "meta"
    return plain and not isinstance(base, nn.Parameter) and not tensor.is_conj() and not tensor.is_neg()


def to_host(tensors: Sequence[Tensor]) -> Hosted:
    """Copy the storages of `tensors` to the host; pinned where they come from an accelerator."""
    copies: list[tuple[Tensor, torch.device]] = []
    number: dict[Hashable, int] = {}
    views = []
    with torch.no_grad():
        for tensor in tensors:
            key = storage_ref(tensor)
            if key not in number:
                number[key] = len(copies)
                copies.append((_copy_bytes(tensor), tensor.device))
            views.append(
                _View(
                    number[key],
                    tensor.dtype,
                    int(tensor.storage_offset()),
                    tensor.shape,
                    tensor.stride(),
                    tensor.requires_grad,
                )
            )
    return Hosted(tuple(copies), tuple(views))


def to_device(hosted: Hosted) -> list[Tensor]:
    """Bring them back as leaves: same values, strides and sharing, `requires_grad` as it was."""
    with torch.no_grad():
        storages = [copy.to(device, non_blocking=True).untyped_storage() for copy, device in hosted.copies]
        tensors = [
            torch.empty(0, dtype=view.dtype, device=storages[view.copy].device).set_(
                storages[view.copy], view.offset, view.shape, view.stride
            )
            for view in hosted.views
        ]
    return [
        tensor.requires_grad_(view.requires_grad) for tensor, view in zip(tensors, hosted.views, strict=True)
    ]


def _copy_bytes(tensor: Tensor) -> Tensor:
    source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    pinned = source.device.type == "cuda"
    copy = torch.empty(source.shape, dtype=torch.uint8, pin_memory=pinned)
    return copy.copy_(source, non_blocking=pinned)
