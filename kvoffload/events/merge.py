"""Merging an engine's own feed into ours: its blocks go through the same residency, journal and sequence."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvoffload.events.lane import Lane
from kvoffload.events.settings import tcp_port
from kvoffload.events.subscriber import GapRecovered, Item, SourceReset, Subscription, Synced, Unrecoverable
from kvoffload.events.wire import AllBlocksCleared, BlockRemoved, BlockStored

logger = logging.getLogger(__name__)


class MergeReader:
    """Reads one engine's feed in a thread and hands each change to the publisher.

    When the engine began a new life, or something was lost for good, its tiers are cleared and told anew: a block that
    is missing costs a prefill, a ghost costs trust.

    Args:
        endpoint: The engine's feed.
        replay_endpoint: Its replay socket; None: losses cannot be recovered.
        hand_over: Takes work for every lane, in order.

    Raises:
        ConfigError: An endpoint is none of ZeroMQ's.
    """

    def __init__(
        self, endpoint: str, replay_endpoint: str | None, hand_over: Callable[[Callable[[Lane], object]], object]
    ) -> None:
        for each in (endpoint, replay_endpoint):
            if each is not None:
                tcp_port(each)
        self.endpoint = endpoint
        self.gaps = 0
        self.decode_errors = 0
        self._replay_endpoint = replay_endpoint
        self._hand_over = hand_over
        self._media: set[str] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvoffload-merge", daemon=True)

    def start(self) -> None:
        """Start reading."""
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Stop reading; False when the thread did not end in time."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with Subscription(self.endpoint, self._replay_endpoint, timeout=1.0) as subscription:
            while not self._stop.is_set():
                try:
                    for item in subscription.poll(0.05):
                        self._take(item)
                    self.decode_errors = subscription.decode_errors
                except Exception:
                    logger.exception("merging %s goes on after an error", self.endpoint)
                    self._stop.wait(0.5)

    def _take(self, item: Item) -> None:
        if isinstance(item, BlockStored):
            self._media.add(item.medium or "GPU")
            self._hand_over(lambda lane: lane.residency.engine_stored(item))
        elif isinstance(item, BlockRemoved):
            group = 0 if item.group_idx is None else item.group_idx
            self._hand_over(lambda lane: lane.residency.engine_removed(item.block_hashes, item.medium or "GPU", group))
        elif isinstance(item, AllBlocksCleared | SourceReset):
            self._clear()
        elif isinstance(item, GapRecovered):
            self.gaps += 1
        elif isinstance(item, Unrecoverable):
            self.gaps += 1
            logger.warning("merged feed %s: %s", self.endpoint, item.why)
            self._clear()
        elif isinstance(item, Synced):
            logger.info("merged feed %s is synced at %d", self.endpoint, item.sequence)

    def _clear(self) -> None:
        for medium in sorted(self._media):
            self._clear_medium(medium)
        self._media.clear()

    def _clear_medium(self, medium: str) -> None:
        self._hand_over(lambda lane: lane.residency.engine_cleared(medium))
