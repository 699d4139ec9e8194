"""From handler threads to the owner: one eventfd, one wake-up per burst of completions.

`notify` may be called from any thread and returns at once; it writes to the eventfd only when the last wake-up was
consumed. The owner waits for `fileno()` to become readable, then calls `consume()` and polls.
"""

from __future__ import annotations

import os
import threading


class CompletionBridge:
    """An eventfd that handler threads ring and the owner listens to."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._rung = False
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """Return the file descriptor that becomes readable when something finished; -1 when closed."""
        return self._fd

    def notify(self) -> None:
        """Wake the owner; from any thread."""
        with self._lock:
            if self._rung or self._fd < 0:
                return
            self._rung = True
            os.eventfd_write(self._fd, 1)

    def consume(self) -> None:
        """Take the wake-up before polling, so that a completion in between rings again."""
        with self._lock:
            if not self._rung or self._fd < 0:
                return
            self._rung = False
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Close the descriptor; later rings are ignored. Idempotent."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
