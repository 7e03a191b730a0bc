"""Test set-up. Some virtual machines report AMX but do not permit it: bf16 products would then crash."""

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
