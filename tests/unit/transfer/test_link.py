"""The ceiling is measured before anything is stored, and leaves nothing behind."""

import numpy as np
import pytest

from kvoffload.transfer.link import host_link_bytes_per_second, store_link_bytes_per_second


def test_host_copies_have_a_speed_that_is_measured_once():
    assert host_link_bytes_per_second() > 1e8
    assert host_link_bytes_per_second() == host_link_bytes_per_second()


@pytest.mark.parametrize("backend", ["host", "cuda"])
@pytest.mark.parametrize("factor", [1, 2])
def test_stores_of_neighbours_have_a_speed_and_gpu_blocks_are_only_read(make_rig, backend, factor):
    rig = make_rig(backend, factor, groups=(((16, 16),), ((32, 32),)))
    before = [tensor.copy() for tensor in rig.gpu]
    speed = store_link_bytes_per_second(
        rig.stores, gpu_blocks=24, cpu_blocks=12, factor=factor, block_bytes=16, num_groups=2
    )
    assert speed is None or speed > 0
    assert backend == "cuda" or speed
    assert all(np.array_equal(old, new) for old, new in zip(before, rig.gpu, strict=True))
    assert rig.stores.get_finished() == []
    assert rig.stores.pending_jobs() == []


def test_a_copy_that_fails_leaves_the_speed_unknown(make_rig):
    rig = make_rig("scripted")
    rig.stores.fail_next(OSError("no link"))
    sizes = {"gpu_blocks": 24, "cpu_blocks": 12, "factor": 1, "block_bytes": 16, "num_groups": 1}
    assert store_link_bytes_per_second(rig.stores, **sizes) is None
    assert store_link_bytes_per_second(rig.stores, **(sizes | {"cpu_blocks": 0})) is None
