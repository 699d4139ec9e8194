"""Block ids are 63-bit numbers, whatever holds them."""

import numpy as np
import pytest

from kvoffload.errors import UsageError
from kvoffload.manager.specs import CPULoadStoreSpec, GPULoadStoreSpec


def test_an_unsigned_id_that_does_not_fit_is_refused_instead_of_becoming_negative():
    with pytest.raises(UsageError, match=r"below 2\*\*63; got 9223372036854775808"):
        CPULoadStoreSpec(np.array([0, 2**63], np.uint64))


@pytest.mark.parametrize("ids", [[0, 3], (0, 3), range(0, 6, 3), np.array([0, 3], np.uint64), np.array([0, 3], "i4")])
def test_ids_are_taken_from_lists_ranges_and_arrays(ids):
    assert CPULoadStoreSpec(ids).block_ids.tolist() == [0, 3]


@pytest.mark.parametrize("ids", [[0.5], [True], ["a"], None, [[0]], {0}, [-1], [2**70]], ids=str)
def test_other_ids_are_refused(ids):
    with pytest.raises(UsageError, match="block"):
        GPULoadStoreSpec(ids, [1], [0])
