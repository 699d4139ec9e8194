"""Helpers for tests of the feed: chains, a bare subscriber and a bare replay client."""

from __future__ import annotations

import time
from contextlib import contextmanager

import zmq

from kvoffload.chain import BlockChain, GroupLayout
from kvoffload.config import EventsConfig
from kvoffload.events.publisher import FeedPublisher
from kvoffload.events.wire import END_SEQUENCE, AllBlocksCleared, BlockStored, decode_batch
from kvoffload.manager.base import OffloadingEvent

BLOCK = 4


def chain(seed: int, blocks: int, **options) -> BlockChain:
    return BlockChain([GroupLayout(BLOCK)], [seed * 1000 + i for i in range(blocks * BLOCK)], **options)


def stored(chain: BlockChain, first: int = 0, last: int | None = None, *, medium="CPU"):
    keys = list(chain.keys())[first:last]
    infos = {key: chain.info(first + i) for i, key in enumerate(keys)}
    return [OffloadingEvent(keys, medium, False)], infos


def removed(chain: BlockChain, first: int = 0, last: int | None = None, *, medium="CPU"):
    return [OffloadingEvent(list(chain.keys())[first:last], medium, True)], {}


@contextmanager
def publisher(**options):
    settings = {
        "endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0", "batch_window_seconds": 0.0,
        "heartbeat_seconds": 0.0, "start_announcement": False, **options,
    }  # fmt: skip
    kwargs = {name: settings.pop(name) for name in ("clock", "monotonic", "model_name") if name in settings}
    feed = FeedPublisher(EventsConfig(**settings), engine_block_size=BLOCK, instance_id="pod", **kwargs)
    feed.start()
    try:
        yield feed
    finally:
        assert feed.close(10)


class Reader:
    """A bare subscriber and replay client."""

    def __init__(self, feed: FeedPublisher, *, subscribe: bool = True, lane: int = 0) -> None:
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.dealer = self.context.socket(zmq.DEALER)
        if feed.replay_endpoints[lane] is not None:
            self.dealer.connect(feed.replay_endpoints[lane])
        if subscribe:
            monitor = self.sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            before = feed.stats().subscribers
            self.sub.subscribe(b"")
            self.sub.connect(feed.endpoints[lane])
            assert monitor.poll(5000)
            self.sub.disable_monitor()
            monitor.close()
            wait_for(lambda: feed.stats().subscribers > before)
            assert self.sub.poll(50) in (0, zmq.POLLIN)  # the subscription itself crosses after the handshake

    def __enter__(self):
        return self

    def __exit__(self, *_exc):
        self.context.destroy(linger=0)

    def next(self, timeout=5.0):
        """Return topic, sequence and payload of the next live message."""
        assert self.sub.poll(timeout * 1000), "no message"
        topic, sequence, payload = self.sub.recv_multipart()
        return topic, int.from_bytes(sequence, "big"), payload

    def silent(self, timeout=0.1) -> bool:
        return not self.sub.poll(timeout * 1000)

    def ask(self, request: bytes):
        """Return the frames of the one answer to `request`, without the delimiter."""
        self.dealer.send_multipart([b"", request])
        assert self.dealer.poll(5000), "no answer"
        return self.dealer.recv_multipart()[1:]

    def replay(self, start: int, timeout=10.0):
        """Return (sequence, payload) of a replay up to its end marker."""
        self.dealer.send_multipart([b"", start.to_bytes(8, "big")])
        messages = []
        while True:
            assert self.dealer.poll(timeout * 1000), f"no end marker after {len(messages)} messages"
            frames = self.dealer.recv_multipart()
            assert frames[0] == b""
            assert len(frames) == 4
            if frames[2] == END_SEQUENCE:
                assert frames[1] == frames[3] == b""
                return messages
            messages.append((int.from_bytes(frames[2], "big"), frames[3]))


def apply(index: set, payload: bytes) -> set:
    """Apply a payload to a plain set of (medium, hash), as a consumer that does not count does."""
    for event in decode_batch(payload).events:
        if isinstance(event, AllBlocksCleared):
            index.clear()
        elif isinstance(event, BlockStored):
            index |= {(event.medium, name) for name in event.block_hashes}
        else:
            index -= {(event.medium, name) for name in event.block_hashes}
    return index


def names(chain: BlockChain, first: int = 0, last: int | None = None, *, medium="CPU") -> set:
    hashes = chain.block_hashes()[first:last]
    return {(medium, int.from_bytes(h[-8:], "big")) for h in hashes}


def wait_for(condition, timeout=5.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.005)
