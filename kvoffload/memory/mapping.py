"""`Mapping`: memory from mmap that lives exactly as long as somebody refers to it.

Python's own mmap object can be closed under a view that is still in use, and the next access is a SIGSEGV. Here nothing
closes: views refer to the mapping, and it is unmapped when the last of them is gone. What was registered with a device
is unregistered right before.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Self

from kvoffload.errors import NoSpaceError

logger = logging.getLogger(__name__)

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_mmap.restype = ctypes.c_void_p
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_munmap.restype = ctypes.c_int
_MAP_FAILED = ctypes.c_void_p(-1).value
_UNMAP_PIECE_BYTES = 16 * 1024 * 1024  # one call holds the address space: other threads' malloc waits for it
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


class Mapping:
    """A writable range of pages.

    Attributes:
        address: Where it starts, on a page boundary.
        length: Bytes asked for.
    """

    def __init__(self, length: int, flags: int, fd: int) -> None:
        address = _mmap(None, length, _READ_WRITE, flags, fd, 0)
        if address is None or address == _MAP_FAILED:
            code = ctypes.get_errno()
            if code == errno.ENOMEM:
                raise NoSpaceError(
                    f"{length} bytes cannot be mapped: {os.strerror(code)} (address space or overcommit limit); "
                    "ask for less, or raise the limit (ulimit -v, vm.overcommit_memory)",
                    requested_bytes=length,
                    available_bytes=0,
                )
            raise OSError(code, f"mmap of {length} bytes: {os.strerror(code)}")
        self.address: int = address
        self.length = length
        self._before_unmap: list[Callable[[], None]] = []
        finalizer = weakref.finalize(self, _unmap, address, length, self._before_unmap, os.getpid())
        finalizer.atexit = False  # a daemon thread may still copy; the kernel unmaps when the process is gone

    @classmethod
    def anonymous(cls, length: int) -> Self:
        """Map private memory that no file stands behind.

        Raises:
            NoSpaceError: The kernel refuses to map that much.
        """
        return cls(length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)

    @classmethod
    def of_file(cls, fd: int, length: int) -> Self:
        """Map the first `length` bytes of a file, shared with all who map it; the file may be closed afterwards.

        Raises:
            NoSpaceError: The kernel refuses to map that much.
        """
        return cls(length, mmap.MAP_SHARED, fd)

    def before_unmap(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, right before the pages go, in this process only (never in a fork)."""
        self._before_unmap.append(callback)


def _unmap(address: int, length: int, before: list[Callable[[], None]], pid: int) -> None:
    if os.getpid() == pid:
        for callback in before:
            try:
                callback()
            except Exception:
                logger.exception("releasing memory at %#x from its device failed", address)
    for at in range(0, length, _UNMAP_PIECE_BYTES):
        _munmap(address + at, min(_UNMAP_PIECE_BYTES, length - at))
