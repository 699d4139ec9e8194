"""The speed of one large copy: the ceiling that transfers are compared with."""

from __future__ import annotations

import functools
import time

import numpy as np

_MEASURED_BYTES = 32 << 20
_REPETITIONS = 3


@functools.cache
def host_link_bytes_per_second() -> float:
    """Return the best of a few large copies between host buffers; measured once per process, some 50 ms."""
    source = np.ones(_MEASURED_BYTES // 8, np.int64)
    target = np.zeros_like(source)
    target.fill(1)  # both sides are populated before the first copy is timed
    best = float("inf")
    for _ in range(_REPETITIONS):
        began = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - began)
    return _MEASURED_BYTES / best
