"""What a publisher says of itself: counters for the metrics, and the answer to `describe`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvoffload.events.lane import Lane

PROTOCOL = "kvoffload-feed/1"


@dataclass(frozen=True, slots=True)
class PublisherStats:
    """Counters since the start and gauges now; counts of the first endpoint where it says so.

    Attributes:
        published_batches: Batches sent live, over all endpoints; heartbeats included.
        published_events: Events in them.
        sent_bytes: Payload bytes of live batches.
        dropped: Publications whose send was lost to a full queue (their changes were not).
        lag: Publications that wait for the sender now.
        lag_seconds: Time since the sender last took something, while something waits.
        subscribers: Subscribers connected now, over all endpoints.
        announced: Engine blocks announced now (first endpoint).
        withheld: Blocks present but not announced now, by reason (first endpoint).
        withheld_total: Blocks ever withheld, by reason (first endpoint).
        replays: Replays answered or under way.
        active_replays: Answers under way now.
        incomplete_replays: Replays that may leave dead blocks behind.
        replays_given_up: Replays whose reader stopped reading.
        replays_refused: Requests that found too many others open.
        replay_messages: Messages sent in replays and snapshots.
        replay_bytes: Payload bytes of these.
        lives: Lives of the first endpoint's sequence.
        next_sequence: Number of the next batch (first endpoint).
        unencodable: Blocks that have no encoding.
        decode_errors: Events or batches of a merged feed that could not be read.
        merge_gaps: Gaps seen in merged feeds.
        errors: Publications that raised in the publisher's thread.
    """

    published_batches: int = 0
    published_events: int = 0
    sent_bytes: int = 0
    dropped: int = 0
    lag: int = 0
    lag_seconds: float = 0.0
    subscribers: int = 0
    announced: int = 0
    withheld: Mapping[str, int] = field(default_factory=dict)
    withheld_total: Mapping[str, int] = field(default_factory=dict)
    replays: int = 0
    active_replays: int = 0
    incomplete_replays: int = 0
    replays_given_up: int = 0
    replays_refused: int = 0
    replay_messages: int = 0
    replay_bytes: int = 0
    lives: int = 0
    next_sequence: int = 0
    unencodable: int = 0
    decode_errors: int = 0
    merge_gaps: int = 0
    errors: int = 0

    @property
    def num_withheld(self) -> int:
        """Blocks present but not announced now."""
        return sum(self.withheld.values())


def describe_lane(
    lane: Lane, *, instance_id: str, model_name: str | None, block_size: int | None, heartbeat_seconds: float
) -> dict[str, Any]:
    """Return the answer to `describe` for one endpoint."""
    settings, journal = lane.settings, lane.journal
    return {
        "protocol": PROTOCOL,
        "instance_id": instance_id,
        "model_name": model_name,
        "epoch": journal.first,
        "life_id": f"{lane.born}-{lane.counters.lives}",
        "oldest_sequence": journal.oldest,
        "next_sequence": journal.next,
        "endpoint": lane.endpoint,
        "replay_endpoint": lane.replay_endpoint,
        "topic": settings.topic,
        "rank": settings.rank,
        "encoding": settings.encoding,
        "hash_mode": settings.hash_mode,
        "contiguity": settings.contiguity,
        "sequence_start": settings.sequence_start,
        "sole_publisher": settings.sole_publisher,
        "consumers": list(settings.consumers),
        "media": list(settings.media),
        "block_size": block_size,
        "heartbeat_seconds": heartbeat_seconds,
        "blocks": len(journal),
        "withheld": lane.residency.withheld.sizes(),
        "subscribers": lane.counters.subscribers,
        "limits": {
            "replay_window": settings.replay_window,
            "max_sequences": settings.max_sequences,
            "max_tombstones": settings.max_tombstones,
            "tombstones_discarded": journal.tombstones_discarded,
            "incomplete_replays": lane.counters.incomplete_replays,
            "replays_refused": lane.counters.replays_refused,
        },
    }
