"""Host memory for offload: slabs cut into extents, files without a name, and how much there is to take."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.errors import HostMemoryError
from remat.run import hostmem
from remat.run.disk import file_memory
from remat.run.hostmem import anonymous_memory, available_host_bytes
from remat.run.link import Direction, Mark
from remat.run.slabs import Slabs

KB = 1024


def slabs(limit=64 * KB, slab=16 * KB, release=lambda memory: None):
    return Slabs(lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8), release, limit, slab)


# ------------------------------------------------------------------------------------------------- slabs


def test_first_fit_fills_one_slab_before_another_is_taken():
    pool = slabs()
    extents = [pool.take(4 * KB) for _ in range(4)]
    assert [extent.offset for extent in extents] == [0, 4 * KB, 8 * KB, 12 * KB]
    assert pool.total_bytes == 16 * KB
    pool.take(1)
    assert pool.total_bytes == 32 * KB


def test_neighbouring_gaps_become_one_whatever_the_order():
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [0, 2, 1, 3], [1, 3, 0, 2]):
        pool = slabs()
        extents = [pool.take(4 * KB) for _ in range(4)]
        for number in order:
            pool.give(extents[number], None)
        assert pool.slabs[0].is_empty
        assert pool.used_bytes == 0
        assert pool.take(16 * KB).offset == 0


def test_a_step_that_repeats_needs_no_more_memory():
    pool = slabs()
    sizes = [700, 5000, 30, 12000, 4096]
    for _ in range(50):
        extents = [pool.take(size) for size in sizes]
        for extent in reversed(extents):
            pool.give(extent, None)
    assert pool.total_bytes == 32 * KB
    assert pool.peak_used_bytes == sum(sizes)


def test_what_is_larger_than_a_slab_gets_its_own_without_rounding_to_a_power_of_two():
    pool = slabs(limit=200 * KB)
    pool.take(70 * KB)
    assert pool.total_bytes == 80 * KB


def test_the_last_slab_is_cut_to_the_limit():
    pool = slabs(limit=20 * KB)
    assert pool.take(16 * KB) is not None
    assert pool.take(4 * KB) is not None
    assert pool.total_bytes == 20 * KB
    assert pool.take(1) is None


def test_an_extent_remembers_the_last_read_of_its_bytes():
    pool = slabs()
    one, two = pool.take(8 * KB), pool.take(8 * KB)
    early, late = (Mark(number, Direction.BACK, None) for number in (1, 2))
    pool.give(two, late)
    pool.give(one, early)
    assert pool.take(16 * KB).read_until is late


def test_refused_memory_is_an_error_when_reserved_and_none_when_taken():
    def refuse(nbytes):
        raise MemoryError("no")

    pool = Slabs(refuse, lambda memory: None, 64 * KB, 16 * KB)
    with pytest.raises(HostMemoryError, match=r"16.0 KiB more of pinned host memory were refused \(no\)"):
        pool.reserve(1)
    assert pool.take(1) is None
    assert pool.total_bytes == 0


def test_close_releases_empty_slabs_now_and_others_later():
    released = []
    pool = slabs(release=released.append)
    kept, gone = pool.take(16 * KB), pool.take(16 * KB)
    pool.give(gone, None)
    pool.close()
    assert (len(released), pool.total_bytes) == (1, 16 * KB)
    assert pool.take(1) is None
    pool.give(kept, None)
    assert (len(released), pool.total_bytes) == (2, 0)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12_000)), max_size=60))
def test_extents_never_overlap_and_bytes_add_up(steps):
    """Against the naive picture: one owner per byte."""
    pool, live = slabs(), []
    for take, number in steps:
        if take:
            extent = pool.take(number)
            if extent is not None:
                live.append(extent)
        elif live:
            pool.give(live.pop(number % len(live)), None)
        assert pool.total_bytes <= pool.limit_bytes
        assert pool.used_bytes == sum(extent.nbytes for extent in live)
        for slab in pool.slabs:
            owners = torch.zeros(slab.memory.nbytes, dtype=torch.uint8)
            for extent in live:
                if extent.slab is slab:
                    owners[extent.offset : extent.offset + extent.nbytes] += 1
            for gap in slab.gaps:
                owners[gap.offset : gap.end] += 1
            assert int(owners.max()) <= 1
            assert all(one.end < other.offset for one, other in zip(slab.gaps, slab.gaps[1:], strict=False))


# ------------------------------------------------------------------------------------------------ memory


def test_memory_is_writable_and_zero():
    for memory in (anonymous_memory(5000), file_memory(5000)):
        assert (memory.nbytes, memory.dtype, int(memory.max())) == (5000, torch.uint8, 0)
        memory.fill_(7)
        assert int(memory.sum()) == 35_000


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_a_file_has_no_name_and_is_closed_with_its_last_tensor(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    memory = file_memory(64 * KB, str(tmp_path))
    view = memory[5:10]
    assert list(tmp_path.iterdir()) == []
    del memory
    view.fill_(1)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del view
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_killed_process_leaves_no_file(tmp_path):
    code = (
        "import os, sys; from remat.run.disk import file_memory\n"
        "memory = file_memory(1 << 20, sys.argv[1]); memory.fill_(1); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, timeout=120)
    assert done.returncode == -9, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_before_anything_is_written(monkeypatch, tmp_path):
    def full(descriptor, offset, nbytes):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    pool = Slabs(
        lambda n: file_memory(n, str(tmp_path)), lambda memory: None, 64 * KB, 16 * KB, "disk for offload"
    )
    with pytest.raises(HostMemoryError, match=r"more of disk for offload were refused \(.*No space left"):
        pool.reserve(KB)


def test_without_fallocate_the_file_is_written_in_full(monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    assert file_memory(3 * 2**20 + 5).nbytes == 3 * 2**20 + 5


def test_available_memory_with_and_without_psutil(monkeypatch):
    assert available_host_bytes() > 0

    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(hostmem.importlib, "import_module", missing)
    if os.path.exists("/proc/meminfo"):
        assert available_host_bytes() > 0
    monkeypatch.setattr(hostmem, "_container_bytes", lambda: 123)
    if os.path.exists("/proc/meminfo"):
        assert available_host_bytes() == 123
    monkeypatch.setattr(hostmem, "Path", lambda name: _Unreadable())
    with pytest.raises(HostMemoryError, match="pip install psutil, or give host_limit_bytes"):
        available_host_bytes()


class _Unreadable:
    def read_text(self):
        raise FileNotFoundError
