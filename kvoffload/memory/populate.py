"""Gives a mapping its physical pages now, without holding the GIL.

A page that is first touched by a copy costs 2 to 25 times the copy, and a page of a full tmpfs kills the process.
`mmap.madvise` holds the GIL; libc's does not when called through ctypes.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable

from kvoffload.errors import NoSpaceError

MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python 3.11's mmap
PIECE_BYTES = 4 * 1024 * 1024  # one call holds the address space: other threads' malloc waits for it
_PROGRESS_BYTES = 64 * 1024 * 1024

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_madvise.restype = ctypes.c_int
_memset = ctypes.CDLL(None).memset
_memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
_memset.restype = None

Progress = Callable[[int, int], None]


def populate(address: int, length: int, what: str, progress: Progress | None = None) -> None:
    """Make every page of a writable mapping present; contents stay as they are on kernels from 5.14 on.

    Args:
        address: Start, on a page boundary.
        length: Bytes.
        what: Named in errors.
        progress: Called with populated and total bytes after each 64 MiB and at the end.

    Raises:
        NoSpaceError: The kernel has no more pages for this mapping.
    """
    done = 0
    while done < length:
        piece = min(PIECE_BYTES, length - done)
        if _madvise(address + done, piece, MADV_POPULATE_WRITE) != 0:
            code = ctypes.get_errno()
            if code == errno.EINVAL:
                _touch(address + done, piece)
            elif code not in {errno.EINTR, errno.EAGAIN}:
                raise NoSpaceError(
                    f"{what}: only {done} of {length} bytes could be populated: {os.strerror(code)}",
                    requested_bytes=length,
                    available_bytes=done,
                )
            else:
                continue
        done += piece
        if progress is not None and (done % _PROGRESS_BYTES == 0 or done == length):
            progress(done, length)


def _touch(address: int, length: int) -> None:
    """Write one zero byte to each page of a fresh mapping: what older kernels are left with."""
    for at in range(address, address + length, mmap.PAGESIZE):
        _memset(at, 0, 1)
