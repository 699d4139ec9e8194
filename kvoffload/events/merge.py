"""Merging an engine's own feed into ours: its blocks go through the same residency, journal and sequence."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable

from kvoffload.events.lane import Lane
from kvoffload.events.settings import tcp_port
from kvoffload.events.subscriber import GapRecovered, Item, SourceReset, Subscription, Synced, Unrecoverable
from kvoffload.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, Hash

logger = logging.getLogger(__name__)


class MergeReader:
    """Reads one engine's feed in a thread and hands each change to the publisher.

    When the engine began a new life, or something was lost for good, what it holds is cleared and told anew: a block
    that is missing costs a prefill, a ghost costs trust. Only its own share goes: what others hold of the same tier
    (another merged engine, or the cache's own blocks in host memory) stays announced.

    Args:
        endpoint: The engine's feed.
        replay_endpoint: Its replay socket; None: losses cannot be recovered.
        hand_over: Takes work for every lane, in order.
        alone: No other engine's feed is merged: its GPU tier is the whole GPU tier.

    Raises:
        ConfigError: An endpoint is none of ZeroMQ's.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        hand_over: Callable[[Callable[[Lane], object]], object],
        *,
        alone: bool = True,
    ) -> None:
        for each in (endpoint, replay_endpoint):
            if each is not None:
                tcp_port(each)
        self.endpoint = endpoint
        self.gaps = 0
        self.decode_errors = 0
        self._replay_endpoint = replay_endpoint
        self._hand_over = hand_over
        self._alone = alone
        self._held: dict[tuple[str, int], Counter[Hash]] = {}
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
            self._share(item.medium, item.group_idx).update(item.block_hashes)
            self._hand_over(lambda lane: lane.residency.engine_stored(item))
        elif isinstance(item, BlockRemoved):
            share = self._share(item.medium, item.group_idx)
            told = []
            for name in item.block_hashes:
                if name not in share:
                    continue  # never told, or cleared since: another holder's block is not this engine's to remove
                told.append(name)
                share[name] -= 1
                if share[name] <= 0:
                    del share[name]
            if told:
                self._remove(told, item.medium or "GPU", item.group_idx or 0)
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

    def _share(self, medium: str | None, group: int | None) -> Counter[Hash]:
        """Return what the engine holds of one tier: how often it stored each block."""
        return self._held.setdefault((medium or "GPU", group or 0), Counter())

    def _remove(self, hashes: list[Hash], medium: str, group: int) -> None:
        self._hand_over(lambda lane: lane.residency.engine_removed(hashes, medium, group))

    def _clear(self) -> None:
        held, self._held = self._held, {}
        if self._alone and any(medium == "GPU" for medium, _ in held):
            self._hand_over(lambda lane: lane.residency.engine_cleared("GPU"))
        for (medium, group), share in held.items():
            if share and not (self._alone and medium == "GPU"):
                self._remove(list(share.elements()), medium, group)
