"""The host back end: one FIFO worker thread per direction copies between arrays of host memory.

For development, tests, CPU inference, and as the reference for what other back ends must do. Submitting takes
microseconds; the thread lets go of the GIL while bytes move (see `host_copy`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvoffload.errors import ClosedError
from kvoffload.transfer.base import Ready
from kvoffload.transfer.checks import HostWait, host_wait
from kvoffload.transfer.copy_thread import CopyThread
from kvoffload.transfer.host_copy import copy_plan
from kvoffload.transfer.plan import CopyPlan
from kvoffload.transfer.stream import CopyEvent

_ABANDON_POLL_SECONDS = 0.05


class HostEvent:
    """One queued copy of a `HostStream`; done when its thread says so."""

    __slots__ = ("_done", "_ended", "_started", "_submitted", "after", "error", "plan", "ready")

    def __init__(self, plan: CopyPlan, ready: HostWait | None, after: CopyEvent | None) -> None:
        self.plan: CopyPlan | None = plan
        self.ready = ready
        self.after = after
        self.error: BaseException | None = None
        self._done = threading.Event()
        self._submitted = self._ended = time.monotonic()
        self._started: float | None = None

    @property
    def queue_seconds(self) -> float:
        """From submission to the copy's start, or to its end if it never started."""
        return (self._ended if self._started is None else self._started) - self._submitted

    @property
    def copy_seconds(self) -> float:
        """From the copy's start to its end."""
        return 0.0 if self._started is None else self._ended - self._started

    def query(self) -> bool:
        """Return whether the copy has ended."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the copy has ended; return False at the timeout."""
        return self._done.wait(timeout)

    def start(self) -> None:
        """Note that the copy starts now."""
        self._started = time.monotonic()

    def end(self, error: BaseException | None) -> None:
        """Note how the copy ended, let go of its memory, and wake those who wait."""
        self._ended = time.monotonic()
        self.error, self.plan, self.ready, self.after = error, None, None, None
        self._done.set()


class HostStream(CopyThread[HostEvent]):
    """One named worker thread that runs copies in the order of submission.

    Args:
        name: The thread's name.
        on_done: Called from the thread after each copy, well ended or not.
        copier: Moves one plan's bytes.
    """

    def __init__(self, name: str, on_done: Callable[[], None], copier: Callable[[CopyPlan], None] = copy_plan) -> None:
        super().__init__(name, on_done)
        self._copier = copier
        self._abandon = threading.Event()

    def submit(self, plan: CopyPlan, ready: Ready, after: CopyEvent | None) -> HostEvent:
        """Queue a copy; see `CopyStream`."""
        event = HostEvent(plan, host_wait(ready), after)
        with self._changed:
            self._check_open()
            self._put(event)
        return event

    def shutdown(self, timeout: float) -> None:
        """Close and wait; at the timeout fail what has not started. A running copy is left to run."""
        self.close()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(timeout)
        if not thread.is_alive():
            return
        self._abandon.set()
        with self._changed:
            waiting = list(self._queue)
            self._queue.clear()
        for event in waiting:
            event.end(ClosedError(f"{self._name} was shut down before this copy started"))
        thread.join(4 * _ABANDON_POLL_SECONDS)  # one that waits for `ready` looks at the flag that often
        if waiting:
            self._ring()

    def _run(self) -> None:
        while (event := self._next(take=True)) is not None:
            error: BaseException | None = None
            try:
                self._copy(event)
            except BaseException as raised:  # noqa: BLE001 - a dead thread would leave every later job pending
                error = raised
            event.end(error)
            del event, error
            self._ring()

    def _copy(self, event: HostEvent) -> None:
        for wait in (event.ready, event.after.wait if event.after is not None else None):
            while wait is not None and not wait(_ABANDON_POLL_SECONDS):
                if self._abandon.is_set():
                    raise ClosedError(f"{self._name} was shut down before this copy started")
        event.start()
        if event.plan is not None:
            self._copier(event.plan)
