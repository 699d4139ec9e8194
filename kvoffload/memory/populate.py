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


def populate(address: int, length: int, what: str, progress: Progress | None = None, *, reserved: bool = False) -> None:
    """Make every page of a writable mapping present.

    Contents stay as they are; only on kernels before 5.14, and without `reserved`, each page's first byte becomes 0.

    Args:
        address: Start, on a page boundary.
        length: Bytes.
        what: Named in errors.
        progress: Called with populated and total bytes after each 64 MiB and at the end.
        reserved: The pages exist (in a file that others may be using already), they only have to be mapped.

    Raises:
        NoSpaceError: The kernel has no more pages for this mapping.
    """
    done = 0
    while done < length:
        piece = min(PIECE_BYTES, length - done)
        if _madvise(address + done, piece, MADV_POPULATE_WRITE) != 0:
            code = ctypes.get_errno()
            if code == errno.EINVAL:
                _touch(address + done, piece, reserved=reserved)
            elif code not in {errno.EINTR, errno.EAGAIN}:
                raise NoSpaceError(
                    f"{what}: only {done} of {length} bytes could be populated: {os.strerror(code)}; ask for less, or "
                    "raise the memory limit",
                    requested_bytes=length,
                    available_bytes=done,
                )
            else:
                continue
        done += piece
        if progress is not None and (done % _PROGRESS_BYTES == 0 or done == length):
            progress(done, length)


def _touch(address: int, length: int, *, reserved: bool) -> None:
    """Touch each page, which older kernels are left with: read it if it exists, since others may hold data in it."""
    for at in range(address, address + length, mmap.PAGESIZE):
        if reserved:
            ctypes.string_at(at, 1)
        else:
            _memset(at, 0, 1)
