"""Copies between addresses of host memory without holding the GIL for long.

Neighbours are joined; runs of equal stride are one 2-D numpy copy of int64 words (numpy lets go of the GIL); the rest
goes through libc's `memcpy`, whose call through ctypes lets go of it too. Pointers become Python integers in slices,
since one `tolist()` of all would stall the other threads.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.transfer.plan import CopyPlan, Descriptors, coalesce, equal_stride_runs

SLICE = 512
MIN_RUN = 8
MAX_RUN_BYTES = 64 * 1024  # from here on, one call a block costs nothing beside its bytes

_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = None


def copy_plan(plan: CopyPlan) -> None:
    """Copy all bytes of a plan whose both sides are host memory."""
    for segment in plan.segments():
        copy_descriptors(segment)


def copy_descriptors(descriptors: Descriptors) -> None:
    """Copy each descriptor's bytes; both addresses are the host's."""
    merged = coalesce(descriptors)
    done = 0
    if len(merged.src) < MIN_RUN or int(merged.sizes[0]) > MAX_RUN_BYTES:
        _copy_singles(merged, 0, len(merged.src))
        return
    for start, stop in equal_stride_runs(merged, MIN_RUN):
        _copy_singles(merged, done, start)
        _copy_run(merged, start, stop)
        done = stop
    _copy_singles(merged, done, len(merged.src))


def _copy_singles(descriptors: Descriptors, start: int, stop: int) -> None:
    memcpy = _memcpy
    for at in range(start, stop, SLICE):
        piece = slice(at, min(at + SLICE, stop))
        src, dst, sizes = (column[piece].tolist() for column in descriptors)
        for to, source, size in zip(dst, src, sizes, strict=True):
            memcpy(to, source, size)


def _copy_run(descriptors: Descriptors, start: int, stop: int) -> None:
    src, dst = int(descriptors.src[start]), int(descriptors.dst[start])
    src_step = int(descriptors.src[start + 1]) - src
    dst_step = int(descriptors.dst[start + 1]) - dst
    size, rows = int(descriptors.sizes[start]), stop - start
    word = 8 if (src | dst | src_step | dst_step | size) % 8 == 0 else 1
    np.copyto(_window(dst, rows, dst_step, size, word), _window(src, rows, src_step, size, word))


class _Window:
    """Host memory at an address, for `numpy.asarray`; the caller keeps it mapped."""

    __slots__ = ("__array_interface__",)

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def _window(address: int, rows: int, step: int, size: int, word: int) -> npt.NDArray[np.int64]:
    return np.asarray(
        _Window(
            {
                "version": 3,
                "typestr": f"<i{word}" if word > 1 else "|i1",
                "shape": (rows, size // word),
                "strides": (step, word),
                "data": (address, False),
            }
        )
    )
