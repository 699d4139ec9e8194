"""Page-locks host memory for a device, in pieces, and undoes it before the memory is unmapped.

The registration goes through whatever registers memory with the device (`PageLocker`). Pieces end at row boundaries and
are at most 64 GiB: one call for 512 GiB or more fails. About 0.1 s per GB: call it in a thread.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
from collections.abc import Callable
from typing import Literal, Protocol

from kvoffload.errors import KVOffloadError, TransferError, UnsupportedError

logger = logging.getLogger(__name__)

MAX_PIECE_BYTES = 64 << 30

PinMode = Literal["auto", "require", "never"]


class PageLocker(Protocol):
    """Registers host memory with a device."""

    def register(self, address: int, size: int) -> None:
        """Page-lock `size` bytes.

        Raises:
            TransferError: The device's driver refused.
        """

    def unregister(self, address: int) -> None:
        """Undo `register`."""


class PinnedRange:
    """A range of host memory that is page-locked until `close`.

    Args:
        locker: Registers memory.
        address: Start.
        size: Bytes.
        row_bytes: Pieces end at multiples of it and of the page, so that no block and no page lies in two.
        max_piece_bytes: Largest piece.
        progress: Called with registered and total bytes after each piece.

    Raises:
        TransferError: A piece was refused; the ones before are registered no more.
    """

    def __init__(
        self,
        locker: PageLocker,
        address: int,
        size: int,
        *,
        row_bytes: int = mmap.PAGESIZE,
        max_piece_bytes: int = MAX_PIECE_BYTES,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._locker = locker
        self._pid = os.getpid()
        self._pieces: list[int] = []
        unit = math.lcm(row_bytes, mmap.PAGESIZE)
        step = max(unit, max_piece_bytes // unit * unit)
        try:
            for offset in range(0, size, step):
                piece = min(step, size - offset)
                locker.register(address + offset, piece)
                self._pieces.append(address + offset)
                if progress is not None:
                    progress(offset + piece, size)
        except BaseException:
            self.close()
            raise

    @property
    def cuts(self) -> list[int]:
        """Addresses where one piece ends and the next begins."""
        return self._pieces[1:]

    def close(self) -> None:
        """Unregister every piece, in reverse; must happen before the memory is unmapped. Idempotent.

        In a forked child nothing is done: registrations belong to the process that made them.
        """
        if os.getpid() != self._pid:
            self._pieces.clear()
        while self._pieces:
            piece = self._pieces.pop()
            try:
                self._locker.unregister(piece)
            except KVOffloadError as error:
                logger.warning("host memory at %#x could not be unregistered: %s", piece, error)


def pin(
    mode: PinMode,
    locker: PageLocker,
    address: int,
    size: int,
    *,
    row_bytes: int = mmap.PAGESIZE,
    progress: Callable[[int, int], None] | None = None,
) -> PinnedRange | None:
    """Page-lock a range as `pin_memory` says; None: it stays pageable.

    Raises:
        UnsupportedError: `mode` is `"require"` and the driver refused; the message says what to check.
    """
    if mode == "never":
        return None
    try:
        return PinnedRange(locker, address, size, row_bytes=row_bytes, progress=progress)
    except TransferError as error:
        if mode == "require":
            raise UnsupportedError(
                f"pin_memory='require': {size} bytes could not be page-locked: {error}; check `ulimit -l`, the "
                "container's memory limit, or use pin_memory='auto'"
            ) from error
        logger.warning("%d bytes could not be page-locked (%s): copies go through pageable memory, slower", size, error)
        return None
