import pytest

from kvoffload.errors import UsageError
from kvoffload.manager.block_pool import BlockPool


def test_fresh_blocks_come_first_in_order_then_the_last_freed():
    pool = BlockPool(4)
    assert list(pool.allocate(3)) == [0, 1, 2]
    pool.free([0, 2])
    assert pool.num_free == 3
    assert list(pool.allocate(3)) == [3, 2, 0]
    assert pool.num_free == 0


def test_asking_for_more_than_is_free_takes_nothing():
    pool = BlockPool(2)
    with pytest.raises(UsageError, match="3 blocks asked for, 2 free"):
        pool.allocate(3)
    assert pool.num_free == 2


def test_negative_size_is_refused():
    with pytest.raises(UsageError, match="-1"):
        BlockPool(-1)


def test_the_blocks_handed_out_are_told_without_those_named():
    pool = BlockPool(6)
    pool.allocate(5)
    pool.free([1])
    assert pool.taken_except([3]).tolist() == [0, 2, 4]
    assert BlockPool(3).taken_except([]).tolist() == []


@pytest.mark.parametrize("num_blocks", [1.5, None, "8", True])
def test_a_pool_of_no_whole_number_of_blocks_is_refused(num_blocks):
    with pytest.raises(UsageError, match="whole number"):
        BlockPool(num_blocks)
