"""Accelerators by name, for planning without them: how much memory they have, how fast they move and compute.

    device("h100-80gb")                                  a preset
    Device("mine", 24 * 2**30, 0.9e12, 150e12, 40e12)    or your own numbers

Peak figures come from the vendors' datasheets (dense, without sparsity) and are multiplied by the share that
large matrix products and copies reach in practice; the H200's were measured. `note` says which.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from remat.errors import InputError

__all__ = ["DEVICES", "Device", "device"]

_HALF = frozenset({"bfloat16", "float16"})


@dataclass(frozen=True)
class Device:
    """What planning needs to know of a device. Rates are what real kernels reach, not peak figures.

    `total_bytes` is what torch reports as total_memory, below the advertised size. `workspace_bytes` is what
    libraries (matrix products) take once from torch's allocator. `type` is torch's device type.
    """

    name: str
    total_bytes: int
    bytes_per_second: float  # of the device's own memory
    half_flops_per_second: float  # bfloat16 and float16 matrix products
    single_flops_per_second: (
        float  # float32 ones (in TF32 where the device has it and torch is told to use it)
    )
    launch_seconds: float = 5e-6  # the least that one eager operation takes
    link_bytes_per_second: float = 0.0  # to the host, one way; 0: not known
    workspace_bytes: int = 0
    type: str = "cuda"
    note: str = "numbers given by the user"

    def __post_init__(self) -> None:
        for field in ("total_bytes", "bytes_per_second", "half_flops_per_second", "single_flops_per_second"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
                raise InputError(f"device {self.name!r}: {field}={value!r} must be a number above 0")
        for field in ("launch_seconds", "link_bytes_per_second", "workspace_bytes"):
            if getattr(self, field) < 0:
                raise InputError(
                    f"device {self.name!r}: {field}={getattr(self, field)!r} must not be negative"
                )

    def flops_per_second(self, dtype: str) -> float:
        """Of matrix products in this dtype ("bfloat16"); what is neither half nor single counts as single."""
        return self.half_flops_per_second if dtype in _HALF else self.single_flops_per_second


_MATMUL_SHARE = 0.70  # of the dense peak that large matrix products reach
_MEMORY_SHARE = 0.85  # of the peak bandwidth that a copy reaches
_LINK_SHARE = 0.80  # of the link's nominal rate that pinned copies reach
_GEN4_LINK, _GEN5_LINK, _GEN3_LINK = 32e9, 64e9, 16e9  # PCI Express x16, one way


def _published(
    name: str,
    gib: float,
    memory: float,
    half: float,
    single: float,
    link: float,
    workspace_mib: float,
    sheet: str,
) -> Device:
    return Device(
        name=name,
        total_bytes=int(gib * 2**30),
        bytes_per_second=memory * _MEMORY_SHARE,
        half_flops_per_second=half * _MATMUL_SHARE,
        single_flops_per_second=single * _MATMUL_SHARE,
        link_bytes_per_second=link * _LINK_SHARE,
        workspace_bytes=int(workspace_mib * 2**20),
        note=f"{sheet}; assumed: {_MATMUL_SHARE:.0%} of dense matrix rate, {_MEMORY_SHARE:.0%} of bandwidth",
    )


# Single precision without TF32: that is torch's default for matrix products.
DEVICES: dict[str, Device] = {
    found.name: found
    for found in (
        _published("h100-80gb", 79.1, 3.35e12, 989e12, 67e12, _GEN5_LINK, 32, "NVIDIA H100 SXM datasheet"),
        Device(
            name="h200",
            total_bytes=int(139.7 * 2**30),
            bytes_per_second=4.3e12,
            half_flops_per_second=788e12,
            single_flops_per_second=67e12 * _MATMUL_SHARE,
            link_bytes_per_second=55e9,
            workspace_bytes=32 * 2**20,
            note="measured on one H200: copy 4.3 TB/s, bfloat16 matrix product 788 TFLOP/s, link 55 GB/s; "
            f"float32 assumed: {_MATMUL_SHARE:.0%} of the datasheet's rate",
        ),
        _published(
            "a100-40gb", 39.4, 1.555e12, 312e12, 19.5e12, _GEN4_LINK, 8.2, "NVIDIA A100 40GB datasheet"
        ),
        _published(
            "a100-80gb", 79.1, 2.039e12, 312e12, 19.5e12, _GEN4_LINK, 8.2, "NVIDIA A100 80GB SXM datasheet"
        ),
        _published("l40s", 44.4, 0.864e12, 362e12, 91.6e12, _GEN4_LINK, 8.2, "NVIDIA L40S datasheet"),
        _published(
            "rtx4090", 23.6, 1.008e12, 165e12, 82.6e12, _GEN4_LINK, 8.2, "NVIDIA Ada architecture paper"
        ),
        _published(
            "t4", 14.6, 0.320e12, 65e12, 8.1e12, _GEN3_LINK, 8.2, "NVIDIA T4 datasheet (float16 only)"
        ),
    )
}


def device(given: str | Device) -> Device:
    """The preset of this name, or the user's own record as it is."""
    if isinstance(given, Device):
        return given
    if not isinstance(given, str):
        raise InputError(
            f"device={given!r} is a {type(given).__name__}; say a name ({', '.join(DEVICES)}), or give your "
            "own numbers as a remat.devices.Device"
        )
    name = given.strip().lower().replace("_", "-").replace(" ", "-")
    if name in DEVICES:
        return DEVICES[name]
    near = [known for known in DEVICES if name and known.startswith(name)]
    near += [
        known for known in difflib.get_close_matches(name, DEVICES, n=2, cutoff=0.5) if known not in near
    ]
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known are {', '.join(DEVICES)}"
    raise InputError(
        f"device={given!r} is not known; {hint} Or give your own numbers as a remat.devices.Device"
    )
