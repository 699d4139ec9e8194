"""Ctrl-C and SIGTERM end a command in the same way: what it began is undone, and the exit code tells which it was."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Self


class Signals:
    """Turns SIGTERM into the interrupt that Ctrl-C is, while the block runs.

    Everything that gives way to Ctrl-C (asyncio cancels its task, `with` blocks are left) then gives way to both.
    Outside the main thread, and where somebody else handles SIGTERM, nothing is changed.

    Attributes:
        terminated: SIGTERM came.
    """

    def __init__(self) -> None:
        self.terminated = False
        self._installed = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminate)
            self._installed = True
        return self

    def __exit__(self, et: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        if self._installed:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _terminate(self, _number: int, frame: FrameType | None) -> None:
        self.terminated = True
        handler = signal.getsignal(signal.SIGINT)  # asyncio has its own while it runs
        if not callable(handler):  # ignored: started with `&` by a script
            raise KeyboardInterrupt
        handler(signal.SIGINT, frame)
