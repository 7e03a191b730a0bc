"""Test set-up. Some virtual machines report AMX but do not permit it: bf16 products would then crash."""

import gc
import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def forgets_compiled() -> Iterator[None]:
    """What the compiler keeps is large: other tests in this process count objects and bytes."""
    yield
    import torch

    from remat.run import compiled

    compiled._cache.clear()
    torch._dynamo.reset()
    gc.collect()
