"""What the CUDA driver asks of copies: none is empty, none crosses two page-locked pieces, not too many in one call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvoffload.transfer.cuda_driver import CudaDriver
from kvoffload.transfer.plan import Descriptors

MAX_BATCH = 8192
"""Descriptors in one call: crashes and hangs were reported at about 52,000."""


def non_empty(descriptors: Descriptors) -> Descriptors:
    """Drop copies of no bytes: the driver refuses the whole batch for one of them."""
    wanted = descriptors.sizes > 0
    return descriptors if wanted.all() else Descriptors(*(column[wanted] for column in descriptors))


def cut_at(cuts: Sequence[int], descriptors: Descriptors, *, host_is_source: bool) -> Descriptors:
    """Divide copies whose host side crosses one of the addresses `cuts` (ascending) into one on each side, in order.

    The driver refuses a copy whose host memory lies in two registrations, although both are page-locked.
    """
    for cut in cuts:
        src, dst, sizes = descriptors
        host = src if host_is_source else dst
        crossing = np.flatnonzero((host < cut) & (host + sizes > cut))
        if not len(crossing):
            continue
        before = cut - host[crossing]
        after = sizes[crossing] - before
        sizes = sizes.copy()
        sizes[crossing] = before
        behind = crossing + 1
        descriptors = Descriptors(
            np.insert(src, behind, src[crossing] + before),
            np.insert(dst, behind, dst[crossing] + before),
            np.insert(sizes, behind, after),
        )
    return descriptors


def copy_descriptors(driver: CudaDriver, descriptors: Descriptors, order: int, stream: int, max_batch: int) -> None:
    """Queue copies in batches, or one by one on drivers without batches."""
    src, dst, sizes = descriptors
    if not driver.has_batch:
        for source, destination, size in zip(src.tolist(), dst.tolist(), sizes.tolist(), strict=True):
            driver.copy(destination, source, size, stream)
        return
    for start in range(0, len(sizes), max_batch):
        piece = slice(start, start + max_batch)
        driver.copy_batch(dst[piece], src[piece], sizes[piece], order, stream)
