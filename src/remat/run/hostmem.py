"""Host memory from the system: how much there is to take, and how it is taken."""

from __future__ import annotations

import importlib
import mmap
import sys
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from remat.errors import HostMemoryError

__all__ = ["anonymous_memory", "available_host_bytes"]


def anonymous_memory(nbytes: int) -> Tensor:
    """Bytes straight from the system, to which they return as soon as the tensor dies."""
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    memory = mmap.mmap(-1, nbytes, **flags)
    # A worker process must not share pages that a device writes to; large pages are pinned faster.
    for name in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        if hasattr(mmap, name):
            with suppress(OSError):
                memory.madvise(getattr(mmap, name))
    return torch.frombuffer(memory, dtype=torch.uint8)


def available_host_bytes() -> int:
    """Memory that this process can still take without swapping, inside its container if it is in one."""
    return max(0, min(_system_bytes(), _container_bytes()))


def _system_bytes() -> int:
    try:
        return int(importlib.import_module("psutil").virtual_memory().available)
    except ImportError:
        pass
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise HostMemoryError(
        "the available host memory cannot be read here; pip install psutil, or give host_limit_bytes"
    )


def _container_bytes() -> int:
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # no such file, or "max"
        return int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    return sys.maxsize
