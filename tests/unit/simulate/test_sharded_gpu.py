"""Ranks' GPU memory in one file."""

import numpy as np
import pytest

from kvoffload.errors import ConfigError
from kvoffload.simulate.sharded_gpu import ShardedGpu

NAMES = [b"a" * 16, b"b" * 16, b"c" * 16]


@pytest.fixture
def gpu():
    gpu = ShardedGpu(4, 256, 2)
    yield gpu
    gpu.close()


def test_every_rank_holds_its_own_share(gpu):
    gpu.compute([0, 1, 3], NAMES)
    assert gpu.count_wrong([0, 1, 3], NAMES) == 0
    shares = [np.concatenate([array[0] for array in rank.layers.values()]) for rank in gpu.ranks]
    assert [share.nbytes for share in shares] == [128, 128]
    assert (shares[0] != shares[1]).all()


def test_a_block_that_is_wrong_on_one_rank_is_wrong_once(gpu):
    gpu.compute([0, 1, 3], NAMES)
    for rank in gpu.ranks:
        rank.layers["layer.1"][3, 7] ^= 1
    gpu.ranks[1].layers["layer.0"][0, 0] ^= 1
    assert gpu.count_wrong([0, 1, 3], NAMES) == 2


def test_bytes_of_another_rank_are_wrong(gpu):
    gpu.compute([0], NAMES[:1])
    for name, array in gpu.ranks[1].layers.items():
        array[0] = gpu.ranks[0].layers[name][0]
    assert gpu.count_wrong([0], NAMES[:1]) == 1


def test_a_block_that_cannot_be_cut_is_refused():
    with pytest.raises(ConfigError, match="multiple of 24 for 3 workers; got 256"):
        ShardedGpu(4, 256, 3)
