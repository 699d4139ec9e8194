"""What the events feed says about itself, under the catalog's names."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

FEED_FIELDS = {
    "feed_events": "published_events",
    "feed_batches": "published_batches",
    "feed_dropped_batches": "dropped",
    "feed_replays": "replays",
    "feed_replayed_batches": "replay_messages",
    "feed_errors": "errors",
    "feed_subscribers": "subscribers",
    "feed_queue_events": "lag",
    "feed_lag_seconds": "lag_seconds",
    "feed_announced_blocks": "announced",
    "feed_withheld_blocks": "num_withheld",
}
"""Metric: attribute of the feed's statistics."""


@runtime_checkable
class FeedStatistics(Protocol):
    """An `EventSink` that counts; `stats()` has attributes named as in `FEED_FIELDS`, as far as it knows them."""

    def stats(self) -> object:
        """Return the statistics; from any thread, at once."""


def feed_values(events: object) -> dict[str, dict[str, float]]:
    """Return the feed's numbers; zeros, and `feed_enabled` 0, for a sink that does not count."""
    if not isinstance(events, FeedStatistics):
        return {"feed_enabled": {"": 0}}
    stats = events.stats()
    values = {name: {"": float(getattr(stats, field, 0))} for name, field in FEED_FIELDS.items()}
    return values | {"feed_enabled": {"": 1}}
