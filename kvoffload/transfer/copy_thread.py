"""The thread of a direction's copies, which the host and the CUDA back end share: a queue, and who waits for it."""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from kvoffload.errors import ClosedError

logger = logging.getLogger(__name__)

Copy = TypeVar("Copy")


class CopyThread(ABC, Generic[Copy]):
    """Copies in the order of submission, and a thread for them that starts with the first one.

    Args:
        name: The thread's name.
        on_done: Called from the thread after copies have ended, well or not.
    """

    def __init__(self, name: str, on_done: Callable[[], None]) -> None:
        self._name = name
        self._on_done = on_done
        self._changed = threading.Condition()
        self._queue: deque[Copy] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._pid = os.getpid()

    @abstractmethod
    def _run(self) -> None:
        """Be the thread: as long as `_next` returns a copy."""

    def _check_open(self) -> None:
        """Refuse a copy once closed; under the lock.

        Raises:
            ClosedError: The stream is closed.
        """
        if self._closed:
            raise ClosedError(f"{self._name} is shut down")

    def _put(self, copy: Copy) -> None:
        """Queue a copy, and start the thread if there is none; under the lock."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()
            self._thread = thread
        self._queue.append(copy)
        self._changed.notify()

    def _next(self, *, take: bool) -> Copy | None:
        """Wait for the oldest copy, and take it from the queue or not; None when closed and nothing is left."""
        with self._changed:
            while not self._queue:
                if self._closed:
                    return None
                self._changed.wait()
            return self._queue.popleft() if take else self._queue[0]

    def _ring(self) -> None:
        try:
            self._on_done()
        except Exception:
            logger.exception("%s: the callback for ended copies raised", self._name)

    def close(self) -> None:
        """Take no more copies; the thread ends after the queued ones."""
        if os.getpid() != self._pid:  # a fork has no thread to close, and may have inherited a held lock
            return
        with self._changed:
            self._closed = True
            self._changed.notify()
