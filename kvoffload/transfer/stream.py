"""What a device back end provides: `CopyStream`, which copies plans in order, and the `CopyEvent` of each copy.

`BlockOrder` joins the streams of both directions: a copy that touches engine blocks of an unfinished copy the other way
waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from kvoffload.transfer.base import Ready
from kvoffload.transfer.plan import CopyPlan, Int64Array


class CopyEvent(Protocol):
    """The end of one copy, as seen from any thread."""

    @property
    def error(self) -> BaseException | None:
        """Why it failed; only meaningful once it has ended."""

    @property
    def queue_seconds(self) -> float:
        """From submission to the copy's start."""

    @property
    def copy_seconds(self) -> float:
        """From the copy's start to its end."""

    def query(self) -> bool:
        """Return whether the copy has ended; never waits."""

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the copy has ended; return False at the timeout."""


class CopyStream(Protocol):
    """Copies plans one after the other in the order of submission."""

    def submit(self, plan: CopyPlan, ready: Ready, after: CopyEvent | None) -> CopyEvent:
        """Queue a copy that starts once `ready` holds and `after` has ended; never waits.

        Raises:
            UsageError: This back end cannot wait for such a `ready`.
            ClosedError: The stream is closed.
        """

    def close(self) -> None:
        """Take no more copies, and end the stream's thread after the queued ones; never waits."""

    def shutdown(self, timeout: float) -> None:
        """Close; at the timeout fail the copies that have not started and return."""


MakeStream = Callable[[str, Callable[[], None]], CopyStream]
"""Makes the stream of a direction from its name and a callback for ended copies."""


class BlockOrder:
    """Remembers, per direction, which copy last touched each engine block; used by the owner thread only."""

    def __init__(self, num_gpu_blocks: int) -> None:
        self._last = (np.zeros(num_gpu_blocks, np.int64), np.zeros(num_gpu_blocks, np.int64))
        self._running: tuple[deque[tuple[int, CopyEvent]], ...] = (deque(), deque())
        self._count = 0

    def must_wait_for(self, gpu_to_cpu: bool, gpu_blocks: Int64Array) -> CopyEvent | None:
        """Return the last unfinished copy the other way that touches one of the blocks.

        Copies of one direction end in order, so that one stands for all before it.
        """
        running = self._running[not gpu_to_cpu]
        while running and running[0][1].query():
            running.popleft()
        if not running or not len(gpu_blocks):
            return None
        number = int(self._last[not gpu_to_cpu][gpu_blocks].max())
        return next((event for at, event in running if at == number), None)

    def add(self, gpu_to_cpu: bool, gpu_blocks: Int64Array, event: CopyEvent) -> None:
        """Note a submitted copy."""
        self._count += 1
        running = self._running[gpu_to_cpu]
        while running and running[0][1].query():
            running.popleft()
        running.append((self._count, event))
        self._last[gpu_to_cpu][gpu_blocks] = self._count
