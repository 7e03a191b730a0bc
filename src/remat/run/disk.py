"""The disk tier: memory-mapped files, for what exceeds host memory.

Each file is unlinked as soon as it is open (deleted on close where the system does not allow that), so
nothing is left behind, not even by a process that is killed. Its blocks are allocated before it is mapped: a
full disk is an error here, not a bus error in the middle of a step.

The pages are not pinned: on CUDA the host thread takes part in every copy to or from them. This tier makes a
step possible that would not run otherwise; it does not make it fast.
"""

from __future__ import annotations

import mmap
import os
import tempfile

import torch
from torch import Tensor

__all__ = ["file_memory"]

_BLOCK = bytes(2**20)


def file_memory(nbytes: int, directory: str | None = None) -> Tensor:
    """Bytes in a nameless file in `directory` (the system's temporary one), gone with the tensor."""
    with tempfile.TemporaryFile(prefix="remat-offload-", dir=directory) as file:
        _fill(file.fileno(), nbytes)
        memory = mmap.mmap(file.fileno(), nbytes)  # holds the file open by itself
    if hasattr(mmap, "MADV_DONTFORK"):
        memory.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _fill(descriptor: int, nbytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, nbytes)
        return
    for start in range(0, nbytes, len(_BLOCK)):
        os.write(descriptor, _BLOCK[: nbytes - start])
