"""Host tensors take exactly the bytes asked for, are populated, and go with the last tensor."""

import ctypes
import errno
import gc
from pathlib import Path

import numpy as np
import pytest

from kvoffload.errors import NoSpaceError
from kvoffload.memory.host_memory import allocate_host_tensors

MIB = 1 << 20


def resident_bytes():
    gc.collect()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


@pytest.mark.parametrize("sizes", [[129 * MIB], [64 * MIB] * 5 + [4096]], ids=["129 MiB", "5 x 64 MiB + 1 page"])
def test_memory_taken_is_memory_asked_for(sizes):
    """A-H5: no rounding to a power of two; every page is present before the first copy."""
    before = resident_bytes()
    tensors = allocate_host_tensors(sizes, 1)
    grown = resident_bytes() - before
    assert sum(sizes) - MIB <= grown <= sum(sizes) + 4 * MIB
    del tensors
    assert resident_bytes() - before < 4 * MIB


def test_tensors_do_not_overlap_and_outlive_each_other():
    first, second = allocate_host_tensors([100, 24], 7)
    a, b = np.asarray(first), np.asarray(second)
    a[:], b[:] = 1, 2
    del first, second
    gc.collect()
    assert a.shape == (7, 100)
    assert (a == 1).all()
    assert (b == 2).all()


def test_progress_is_reported_to_the_end():
    seen = []
    allocate_host_tensors([MIB], 150, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(64 * MIB, 150 * MIB), (128 * MIB, 150 * MIB), (150 * MIB, 150 * MIB)]


def test_fresh_memory_is_populated_on_kernels_without_populate(monkeypatch):
    def no_populate(*_):
        ctypes.set_errno(errno.EINVAL)
        return -1

    monkeypatch.setattr("kvoffload.memory.populate._madvise", no_populate)
    before = resident_bytes()
    (tensor,) = allocate_host_tensors([64 * MIB], 1)
    assert resident_bytes() - before >= 63 * MIB
    del tensor


def test_memory_that_the_kernel_has_not_is_an_error_with_both_numbers(monkeypatch):
    def no_memory(*_):
        ctypes.set_errno(errno.ENOMEM)
        return -1

    monkeypatch.setattr("kvoffload.memory.populate._madvise", no_memory)
    with pytest.raises(NoSpaceError, match="only 0 of 1048576 bytes could be populated") as caught:
        allocate_host_tensors([MIB], 1)
    assert (caught.value.requested_bytes, caught.value.available_bytes) == (MIB, 0)
