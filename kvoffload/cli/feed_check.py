"""What `kvoffload run` says of the feed: a subscriber in this process whose index must equal the cache at the end."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvoffload.config import OffloadConfig
from kvoffload.events.index import ResidencyIndex
from kvoffload.events.publisher import FeedPublisher
from kvoffload.events.wire import Hash
from kvoffload.keys import OffloadKey, make_offload_key
from kvoffload.service.service import OffloadService
from kvoffload.service.waiting import in_thread
from kvoffload.simulate.workload import Workload

_SOURCE = "run"
_PATIENCE_SECONDS = 30.0


class FeedCheck:
    """Follows the feed of a run and compares.

    Args:
        workload: Names every block that the cache can hold.
        config: The service's configuration.

    Attributes:
        values: What was found; empty when the feed is off.
    """

    def __init__(self, workload: Workload, config: OffloadConfig) -> None:
        self._workload = workload
        self._factor = config.block_size_factor
        self.values: dict[str, object] = {}
        self._before = 0, 0

    @property
    def failed(self) -> bool:
        """The index differs from the cache."""
        return self.values.get("index_equals_cache") is False

    @asynccontextmanager
    async def beside(self, service: OffloadService) -> AsyncIterator[None]:
        """Follow the service's feed while the block runs; compare when nothing runs any more."""
        feed = service.engine.feed
        if feed is None:
            yield
            return
        index = ResidencyIndex()
        try:
            index.follow({_SOURCE: (feed.endpoints[0], feed.replay_endpoints[0])})
            await in_thread(lambda: index.synced(_PATIENCE_SECONDS), "kvoffload-feed-check")
            # Both counts begin here: the announcement of the start goes out before anybody listens.
            await in_thread(lambda: feed.flush(_PATIENCE_SECONDS), "kvoffload-feed-check")
            self._before = feed.stats().published_events, index.status()[_SOURCE].events
            yield
            await in_thread(lambda: self._compare(service, feed, index), "kvoffload-feed-check")
        finally:
            await in_thread(index.close, "kvoffload-feed-check")

    def _compare(self, service: OffloadService, feed: FeedPublisher, index: ResidencyIndex) -> None:
        blocks = self._blocks(feed)
        held = service.engine.spec.get_manager().held(blocks)
        feed.flush(_PATIENCE_SECONDS)
        withheld = feed.withheld_hashes()
        expected = {name for key in held if blocks[key][-1] not in withheld for name in blocks[key]}
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            index.reached(_SOURCE, feed.stats().next_sequence - 1, 1.0)
            found = {name for medium, _, name in index.holds(_SOURCE) if medium == "CPU"}
            if found == expected or time.monotonic() > deadline:
                break
        stats, status = feed.stats(), index.status()[_SOURCE]
        self.values = {
            "endpoint": feed.endpoints[0],
            "published": stats.published_events - self._before[0],
            "received": status.events - self._before[1],
            "gaps": status.gaps_recovered,
            "resets": status.resets - 1,
            "dropped": stats.dropped,
            "withheld_blocks": len(withheld),
            "index_blocks": len(found),
            "index_equals_cache": found == expected,
        }

    def _blocks(self, feed: FeedPublisher) -> dict[OffloadKey, tuple[Hash, ...]]:
        """Return every offloaded block of the workload with the feed's names of its engine blocks."""
        hash_of, factor = feed.lanes[0].codec.hash_of, self._factor
        blocks: dict[OffloadKey, tuple[Hash, ...]] = {}
        for request in self._workload:
            names = request.block_hashes
            for end in range(factor, len(names) + 1, factor):
                key = make_offload_key(names[end - 1], 0)
                if key not in blocks:
                    blocks[key] = tuple(hash_of(name) for name in names[end - factor : end])
        return blocks
