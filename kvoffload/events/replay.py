"""Replays on the wire: dead numbers, the end marker, and the thread that answers."""

from __future__ import annotations

from collections.abc import Iterator

from kvoffload.events.compaction import ReplayBatch
from kvoffload.events.journal import Cut
from kvoffload.events.wire import Codec, sequence_frame

RELAXED_RUN = 1000
"""A relaxed replay leaves out runs of more dead numbers than this."""


def fill(
    cut: Cut, batches: Iterator[ReplayBatch], codec: Codec, *, skip_runs_over: int | None
) -> Iterator[tuple[bytes, bytes]]:
    """Yield sequence frame and payload of each message of a replay.

    Args:
        cut: What is replayed.
        batches: Its batches that say something.
        codec: Encodes.
        skip_runs_over: Leave out longer runs of dead numbers, but never the newest number; None: answer every number.
    """
    empty = codec.payload(cut.stamp[8:], [])
    number = cut.start

    def dead(stop: int) -> Iterator[tuple[bytes, bytes]]:
        if skip_runs_over is None or stop - number <= skip_runs_over:
            for sequence in range(number, stop):
                yield sequence.to_bytes(8, "big"), empty

    for batch in batches:
        yield from dead(batch.sequence)
        yield batch.stamp[:8], codec.payload(batch.stamp[8:], batch.events)
        number = batch.sequence + 1
    if number <= cut.last:
        yield from dead(cut.last)
        yield sequence_frame(cut.last), empty
