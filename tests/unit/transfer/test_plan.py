"""The arithmetic of transfers: sub-block addresses as in the reference, joined and strided runs."""

import numpy as np
import pytest

from kvoffload.errors import UsageError
from kvoffload.memory.block_tensor import BlockTensor
from kvoffload.transfer.plan import Descriptors, coalesce, compute_sub_block_ptrs, equal_stride_runs


def pointers(ids, factor, count, *, skip=0, stride=32, row=32):
    output = np.zeros(count, np.int64)
    compute_sub_block_ptrs(np.array(ids), factor, output, BlockTensor(1000, 100, stride, row), skip_count=skip)
    return output.tolist()


def test_sub_block_addresses_of_the_reference_example():
    assert pointers([0, 1, 2], 2, 4, skip=1) == [1016, 1032, 1048, 1064]


def test_factor_one_takes_the_first_rows_and_strided_rows_keep_their_distance():
    assert pointers([3, 1, 2], 1, 2) == [1000 + 96, 1000 + 32]
    assert pointers([3, 1], 2, 4, stride=100) == [1300, 1316, 1100, 1116]


def test_torch_and_numpy_tensors_are_taken_as_they_are():
    torch = pytest.importorskip("torch")
    array = np.zeros((4, 16), np.int8)
    output = np.zeros(2, np.int64)
    for tensor in (array, torch.from_numpy(array)):
        compute_sub_block_ptrs(np.array([1, 3]), 1, output, tensor)
        assert output.tolist() == [array.ctypes.data + 16, array.ctypes.data + 48]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0], 2, 1, 2), r"skip_count 2 must be in 0..1 \(factor 2\)"),
        (([0], 2, 1, -1), "skip_count -1"),
        (([0], 0, 1, 0), "factor 0"),
        (([0], 3, 1, 0), "32 bytes cannot be cut in 3"),
        (([0, 1], 2, 4, 1), "2 blocks of 2 sub-blocks cannot give 4 after skipping 1"),
        (([0], 1, 2, 0), "cannot give 2"),
    ],
)
def test_sub_blocks_that_are_not_there_are_a_usage_error(arguments, message):
    ids, factor, count, skip = arguments
    with pytest.raises(UsageError, match=message):
        pointers(ids, factor, count, skip=skip)


def descriptors(*rows):
    return Descriptors(*np.array(rows, np.int64).reshape(-1, 3).T)


def test_only_neighbours_on_both_sides_are_joined():
    joined = coalesce(descriptors((0, 100, 8), (8, 108, 8), (16, 200, 8), (32, 208, 8), (40, 216, 4), (44, 220, 4)))
    assert [column.tolist() for column in joined] == [[0, 16, 32], [100, 200, 208], [16, 8, 16]]


def test_joining_nothing_and_one():
    assert len(coalesce(descriptors()).src) == 0
    assert coalesce(descriptors((1, 2, 3))).sizes.tolist() == [3]


def test_runs_of_equal_stride_are_found_and_share_no_descriptor():
    rows = [(i * 10, 1000 + i * 20, 8) for i in range(5)] + [(40 + i * 30, 1080 + i * 8, 8) for i in range(1, 5)]
    assert equal_stride_runs(descriptors(*rows), 3) == [(0, 5), (5, 9)]
    assert equal_stride_runs(descriptors(*rows), 5) == [(0, 5)]
    assert equal_stride_runs(descriptors(*rows[:2]), 3) == []


def test_runs_may_go_backwards_but_never_overlap():
    assert equal_stride_runs(descriptors(*[(900 - i * 10, i * 8, 8) for i in range(4)]), 3) == [(0, 4)]
    assert equal_stride_runs(descriptors(*[(i * 4, i * 8, 8) for i in range(4)]), 3) == []
    assert equal_stride_runs(descriptors(*[(i * 8, 0, 8) for i in range(4)]), 3) == []
