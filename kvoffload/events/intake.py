"""The intake: what waits for the publisher's thread, in order. Putting something in never blocks and never raises.

Commands always find room. Publications do up to a limit; beyond it they fold into one entry per block (see
`kvoffload.events.fold`) until the thread has caught up.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence

from kvoffload.events.fold import Fold
from kvoffload.events.lane import Lane
from kvoffload.keys import BlockInfo, OffloadKey
from kvoffload.manager.base import OffloadingEvent

logger = logging.getLogger(__name__)

_DRAIN_LIMIT = 20_000

Publication = tuple[Sequence[OffloadingEvent], Mapping[OffloadKey, BlockInfo]]


class Command:
    """Work for every lane, done in the publisher's thread in the order of the queue."""

    def __init__(self, action: Callable[[Lane], object]) -> None:
        self.action = action
        self.done = threading.Event()


class Intake:
    """The queue in front of the publisher's thread.

    Args:
        max_publications: Publications that may wait; more are folded.

    Attributes:
        dropped: Publications that were folded: their own batches are never sent.
    """

    def __init__(self, max_publications: int) -> None:
        self._max = self._limit = max_publications
        self._queue: queue.SimpleQueue[Command | Publication] = queue.SimpleQueue()
        self._put = self._queue.put
        self._size = self._queue.qsize
        self._lock = threading.Lock()
        self._fold: Fold | None = None
        self._closed = False
        self.dropped = 0

    def __len__(self) -> int:
        return self._size()

    def publish(self, events: Sequence[OffloadingEvent], infos: Mapping[OffloadKey, BlockInfo]) -> None:
        """Put a publication in, or fold it; drop it once closed. Any thread."""
        if self._size() >= self._limit:
            self._overflow(events, infos)
        else:
            self._put((events, infos))

    def command(self, action: Callable[[Lane], object]) -> Command:
        """Put a command in; once closed it counts as done. Any thread."""
        command = Command(action)
        if self._closed:
            command.done.set()
        else:
            self._put(command)
        return command

    def _overflow(self, events: Sequence[OffloadingEvent], infos: Mapping[OffloadKey, BlockInfo]) -> None:
        if self._closed:
            return
        with self._lock:
            if self._fold is None and self._size() < self._limit:
                self._put((events, infos))  # the thread was faster
                return
            if self._fold is None:
                self._fold = Fold()
                self._limit = -1
                logger.warning("the feed's queue is full: consumers will see a gap and ask for a replay")
            self._fold.add(events, infos)
            self.dropped += 1

    def take(self, wait_seconds: float, window: Callable[[], object] | None) -> list[Command | Publication]:
        """Return what is there. The publisher's thread.

        Args:
            wait_seconds: Longest wait for the first; 0 for none.
            window: Called when the first is a publication, to let more of them arrive.
        """
        items: list[Command | Publication] = []
        try:
            items.append(self._queue.get(timeout=wait_seconds) if wait_seconds else self._queue.get_nowait())
            if window is not None and not isinstance(items[0], Command):
                window()
            while len(items) < _DRAIN_LIMIT:
                items.append(self._queue.get_nowait())
        except queue.Empty:
            pass
        return items

    def take_fold(self) -> Fold | None:
        """Return the folded changes once the queue is empty, and take publications again. The publisher's thread."""
        if self._fold is None:
            return None
        with self._lock:
            if not self._queue.empty():
                return None
            fold, self._fold = self._fold, None
            self._limit = self._max
            return fold

    def close(self) -> None:
        """Take no commands any more: each counts as done. Publications get in until `end`, as far as there is room."""
        self._closed = True

    def wake(self) -> None:
        """Make the thread look."""
        self._put(Command(lambda _lane: None))

    def end(self) -> None:
        """The thread has ended: drop publications that come now."""
        self._limit = -1
