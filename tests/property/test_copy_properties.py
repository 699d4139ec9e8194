"""Whatever the descriptors, the host copy moves exactly their bytes."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload.transfer.host_copy import copy_descriptors
from kvoffload.transfer.plan import Descriptors, coalesce, equal_stride_runs

UNIT = 8
blocks = st.integers(0, 60)


@st.composite
def copies(draw):
    """Unit-sized copies between two arrays, each destination once, mixing runs and scattered ones."""
    pairs: dict[int, int] = {}
    for _ in range(draw(st.integers(1, 6))):
        count, src, dst = draw(st.integers(1, 14)), draw(blocks), draw(blocks)
        src_step, dst_step = draw(st.integers(-3, 3)), draw(st.integers(-3, 3))
        for i in range(count):
            source, target = src + i * src_step, dst + i * dst_step
            if 0 <= source < 64 and 0 <= target < 64:
                pairs.setdefault(target, source)
    return list(pairs.items()), draw(st.sampled_from([UNIT, UNIT - 3]))


@settings(max_examples=300, deadline=None)
@given(copies())
def test_copy_moves_exactly_the_described_bytes(case):
    pairs, size = case
    rng = np.random.default_rng(len(pairs))
    src, dst = rng.integers(0, 256, 64 * UNIT, np.uint8), rng.integers(0, 256, 64 * UNIT, np.uint8)
    wanted = dst.copy()
    for target, source in pairs:
        wanted[target * UNIT : target * UNIT + size] = src[source * UNIT : source * UNIT + size]
    to, source_at = (np.array(column, np.int64) for column in zip(*pairs, strict=True))
    described = Descriptors(
        src.ctypes.data + source_at * UNIT, dst.ctypes.data + to * UNIT, np.full(len(pairs), size, np.int64)
    )
    copy_descriptors(described)
    assert np.array_equal(dst, wanted)


@settings(max_examples=300, deadline=None)
@given(copies(), st.integers(2, 9))
def test_joined_bytes_add_up_and_runs_are_disjoint(case, min_length):
    pairs, size = case
    to, source = (np.array(column, np.int64) * UNIT for column in zip(*pairs, strict=True))
    merged = coalesce(Descriptors(source, to, np.full(len(pairs), size, np.int64)))
    assert int(merged.sizes.sum()) == size * len(pairs)
    last = 0
    for start, stop in equal_stride_runs(merged, min_length):
        assert last <= start
        assert stop - start >= min_length
        assert len(set(np.diff(merged.src[start:stop]).tolist())) <= 1
        last = stop
    assert last <= len(merged.src)
