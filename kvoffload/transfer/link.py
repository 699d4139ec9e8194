"""The speed of one large copy: the ceiling that transfers are compared with."""

from __future__ import annotations

import functools
import time

import numpy as np

from kvoffload.manager.specs import CPULoadStoreSpec, GPULoadStoreSpec
from kvoffload.transfer.base import OffloadingHandler

_MEASURED_BYTES = 32 << 20
_REPETITIONS = 3
_PATIENCE_SECONDS = 5.0


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


def store_link_bytes_per_second(
    gpu_to_cpu: OffloadingHandler, *, gpu_blocks: int, cpu_blocks: int, factor: int, block_bytes: int, num_groups: int
) -> float | None:
    """Return the best of a few stores of neighbouring blocks, before anything is stored; None when one fails.

    It only reads GPU blocks, so an engine may already compute in them, and writes host blocks that hold nothing.

    Args:
        gpu_to_cpu: The handler; nothing was submitted to it.
        gpu_blocks: GPU blocks there are.
        cpu_blocks: Offloaded blocks there are.
        factor: Engine blocks in an offloaded block.
        block_bytes: Bytes of an engine block of the first group.
        num_groups: KV-cache groups.
    """
    count = min(gpu_blocks // factor, cpu_blocks, max(1, _MEASURED_BYTES // (block_bytes * factor)))
    if count < 1:
        return None
    others = [0] * (num_groups - 1)
    spec = (
        GPULoadStoreSpec(range(count * factor), [count * factor, *others], [0, *others]),
        CPULoadStoreSpec(range(count)),
    )
    best = 0.0
    for attempt in range(1, _REPETITIONS + 1):
        if not gpu_to_cpu.transfer_async(-attempt, spec) or not gpu_to_cpu.wait({-attempt}, _PATIENCE_SECONDS):
            return None
        (result,) = gpu_to_cpu.get_finished()
        if not (result.success and result.transfer_size and result.transfer_time):
            return None
        best = max(best, result.transfer_size / result.transfer_time)
    return best
