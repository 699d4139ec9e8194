"""The subscriber and the index: gaps, new lives, merged feeds, plain vLLM publishers, prefixes by tokens."""

from __future__ import annotations

import threading
import time

import pytest
import zmq
from feedkit import BLOCK, chain, names, publisher, removed, stored, wait_for

from kvoffload.events import GapRecovered, ResidencyIndex, SourceReset, Synced, TierMatch, Unrecoverable, subscribe
from kvoffload.events.subscriber import Subscription
from kvoffload.events.wire import END_SEQUENCE, BlockRemoved, BlockStored, Codec, pack_stamp, sequence_frame


def where(feed):
    return {"pod": (feed.endpoints[0], feed.replay_endpoints[0])}


def settled(index, feed) -> set:
    """Return what the index holds once everything published is applied."""
    assert feed.flush()
    assert index.reached("pod", feed.stats().next_sequence - 1)
    return {(medium, name) for medium, _, name in index.holds("pod")}


def collect(subscription, until, timeout=5.0):
    items = []
    deadline = time.monotonic() + timeout
    while not any(isinstance(item, until) for item in items):
        assert time.monotonic() < deadline, items
        items += subscription.poll(0.05)
    return items


def test_a_late_index_equals_the_publishers_set_and_follows_it():
    a, b = chain(1, 6), chain(2, 4)
    with publisher(heartbeat_seconds=0.1) as feed, ResidencyIndex() as index:
        feed.publish(*stored(a))
        feed.flush()
        index.follow(where(feed))
        assert index.synced(5)
        assert settled(index, feed) == names(a)
        feed.publish(*stored(b))
        feed.publish(*removed(a, 3))
        assert settled(index, feed) == names(a, 0, 3) | names(b)
        assert index.status()["pod"].resets == 1  # the start itself


def test_longest_prefix_counts_tokens_per_tier_and_keeps_tenants_apart():
    a, salted = chain(1, 6), chain(1, 6, cache_salt="tenant")
    with publisher(heartbeat_seconds=0.1, model_name="m") as feed, ResidencyIndex() as index:
        index.follow(where(feed))
        assert index.synced(5)
        feed.gpu_stored(a, 0, 2)
        feed.publish(*stored(a, 0, 5))
        settled(index, feed)
        assert index.longest_prefix(a.token_ids) == {"pod": TierMatch(2 * BLOCK, 5 * BLOCK)}
        assert index.longest_prefix(a.token_ids, "m") == {"pod": TierMatch(2 * BLOCK, 5 * BLOCK)}
        assert index.longest_prefix(a.token_ids, "other") == {}
        assert index.longest_prefix([0, *a.token_ids]) == {"pod": TierMatch(0, 0)}
        feed.publish(*removed(a, 0, 5))
        feed.gpu_removed(a.block_hashes()[:2])
        feed.publish(*stored(salted))
        settled(index, feed)
        assert index.longest_prefix(a.token_ids) == {"pod": TierMatch(0, 0)}
        assert index.longest_prefix(a.token_ids, extra_keys=[["tenant"]]) == {"pod": TierMatch(0, 6 * BLOCK)}


def test_a_gap_is_recovered_and_told():
    with publisher() as feed, subscribe(feed.endpoints[0], feed.replay_endpoints[0]) as subscription:
        assert [type(item) for item in collect(subscription, Synced)] == [SourceReset, Synced]
        wait_for(lambda: feed.stats().subscribers == 1)
        feed.publish(*stored(chain(1, 1)))
        collect(subscription, BlockStored)
        lane = feed.lanes[0]
        send, lane.send = lane.send, lambda batches: None
        for number in range(2, 5):
            feed.publish(*stored(chain(number, 1)))
            feed.flush()
        feed.publish(*removed(chain(1, 1)))
        feed.flush()
        lane.send = send
        feed.publish(*stored(chain(5, 1)))
        items = collect(subscription, GapRecovered)
        assert GapRecovered(4) in items
        hashes = [name for item in items if isinstance(item, BlockStored) for name in item.block_hashes]
        assert {("CPU", name) for name in hashes} >= set().union(*(names(chain(n, 1)) for n in range(2, 6)))
        assert any(isinstance(item, BlockRemoved) for item in items)


def test_a_silent_publisher_is_asked_whether_the_tail_was_lost():
    with publisher(heartbeat_seconds=0.1) as feed, ResidencyIndex() as index:
        index.follow(where(feed))
        assert index.synced(5)
        lane = feed.lanes[0]
        send, lane.send = lane.send, lambda batches: None
        feed.publish(*stored(chain(1, 3)))
        feed.flush()
        wait_for(lambda: {(m, h) for m, _, h in index.holds("pod")} == names(chain(1, 3)))
        lane.send = send


@pytest.mark.parametrize("consumer", ["vllm", "dynamo"])
def test_a_restarted_publisher_is_a_source_reset_and_leaves_no_ghost(consumer):
    with ResidencyIndex() as index:
        with publisher(consumer=consumer, heartbeat_seconds=0.1, start_announcement=True) as feed:
            endpoint, replay = feed.endpoints[0], feed.replay_endpoints[0]
            index.follow({"pod": (endpoint, replay)}, timeout=0.5)
            assert index.synced(5)
            for number in range(5):
                feed.publish(*stored(chain(number, 2)))
                settled(index, feed)
        options = {"endpoint": endpoint, "replay_endpoint": replay, "consumer": consumer}
        with publisher(heartbeat_seconds=0.1, start_announcement=True, **options) as feed:
            feed.publish(*stored(chain(9, 2)))
            wait_for(lambda: {(m, h) for m, _, h in index.holds("pod")} == names(chain(9, 2)), 10)
            assert index.status()["pod"].resets >= 2


def test_without_a_replay_endpoint_a_loss_is_called_unrecoverable():
    with publisher(replay_endpoint=None) as feed, subscribe(feed.endpoints[0], None) as subscription:
        items = collect(subscription, Unrecoverable)
        assert isinstance(items[0], SourceReset)
        wait_for(lambda: feed.stats().subscribers == 1)
        feed.publish(*stored(chain(1, 1)))
        collect(subscription, BlockStored)
        feed.lanes[0].journal.skip(3)
        feed.publish(*stored(chain(2, 1)))
        items = collect(subscription, BlockStored)
        assert "numbers 1 to 3 were lost" in items[0].why


class VllmPublisher(threading.Thread):
    """What vLLM's publisher does: PUB, and a ROUTER that replays its last batches."""

    def __init__(self, keep=1000):
        super().__init__(daemon=True)
        self.context = zmq.Context()
        self.pub, self.router = self.context.socket(zmq.PUB), self.context.socket(zmq.ROUTER)
        self.endpoint = f"tcp://127.0.0.1:{self.pub.bind_to_random_port('tcp://127.0.0.1')}"
        self.replay_endpoint = f"tcp://127.0.0.1:{self.router.bind_to_random_port('tcp://127.0.0.1')}"
        self.codec, self.next, self.keep = Codec(), 0, keep
        self.buffer: list[tuple[bytes, bytes]] = []
        self.stopping = threading.Event()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_exc):
        self.stopping.set()
        self.join()
        self.context.destroy(linger=0)

    def send(self, *events, lost=False):
        stamp = pack_stamp(self.next, 1.0)
        self.next += 1
        payload = self.codec.payload(stamp[8:], events)
        self.buffer = [*self.buffer, (stamp[:8], payload)][-self.keep :]
        if not lost:
            self.pub.send_multipart([b"", stamp[:8], payload])

    def stored(self, chain, first=0, last=None, **options):
        hashes = [self.codec.hash_of(h) for h in chain.block_hashes()]
        self.send(
            self.codec.stored(
                BlockStored(
                    hashes[first:last],
                    hashes[first - 1] if first else None,
                    list(chain.token_ids[first * BLOCK : None if last is None else last * BLOCK]),
                    BLOCK,
                    None,
                    "GPU",
                    None,
                )
            ),
            **options,
        )

    def run(self):
        while not self.stopping.is_set():
            if self.router.poll(20):
                identity, _, start = self.router.recv_multipart()
                for sequence, payload in self.buffer:
                    if int.from_bytes(sequence, "big") >= int.from_bytes(start, "big"):
                        self.router.send_multipart([identity, b"", b"", sequence, payload])
                self.router.send_multipart([identity, b"", b"", END_SEQUENCE, b""])


def test_a_plain_vllm_publisher_is_read_too():
    with VllmPublisher() as engine:
        engine.stored(chain(1, 3))
        with subscribe(engine.endpoint, engine.replay_endpoint) as subscription:
            items = collect(subscription, Synced)
            assert [type(item) for item in items] == [SourceReset, BlockStored, Synced]
            wait_for(lambda: engine.send() or any(True for _ in subscription.poll(0.05)) or subscription.sequence > 0)
            engine.stored(chain(2, 1), lost=True)
            engine.stored(chain(3, 1))
            assert GapRecovered(1) in collect(subscription, GapRecovered)
    assert sequence_frame(5) == b"\0" * 7 + b"\5"


def test_a_gap_older_than_a_vllm_publishers_buffer_is_unrecoverable():
    with VllmPublisher(keep=2) as engine, subscribe(engine.endpoint, engine.replay_endpoint) as subscription:
        engine.send()
        collect(subscription, Synced)
        wait_for(lambda: engine.send() or any(True for _ in subscription.poll(0.05)) or subscription.sequence > 0)
        for number in range(5):
            engine.stored(chain(number, 1), lost=True)
        engine.stored(chain(9, 1))
        assert "older than" in next(i for i in collect(subscription, Unrecoverable) if isinstance(i, Unrecoverable)).why


def test_what_is_lost_for_good_is_said_before_what_a_short_replay_still_holds():
    with VllmPublisher(keep=3) as engine, subscribe(engine.endpoint, engine.replay_endpoint) as subscription:
        engine.send()
        collect(subscription, Synced)
        wait_for(lambda: engine.send() or any(True for _ in subscription.poll(0.05)) or subscription.sequence > 0)
        expected = subscription.sequence + 1
        for number in range(5):
            engine.stored(chain(number, 1), lost=True)
        engine.stored(chain(9, 1))
        items = collect(subscription, BlockStored)
        assert isinstance(items[0], Unrecoverable)
        assert items[0].why == f"numbers {expected} to {engine.next - 4} are older than the publisher's replay"
        assert len([item for item in items if isinstance(item, BlockStored)]) == 3
        assert not any(isinstance(item, GapRecovered) for item in items)


def test_a_source_that_died_is_called_silent_and_one_that_only_has_no_news_is_not():
    with ResidencyIndex() as index:
        with publisher(heartbeat_seconds=0.05) as feed:
            index.follow(where(feed), timeout=0.1)
            assert index.synced(5)
            first = index.status()["pod"].sequence
            wait_for(lambda: index.status()["pod"].sequence > first + 5)  # heartbeats alone
            assert not index.status()["pod"].silent
            lane = feed.lanes[0]
            send, lane.send = lane.send, lambda batches: None  # the live way is cut, the answers are not
            wait_for(lambda: index.status()["pod"].gaps_recovered >= 2)
            lane.send = send
        wait_for(lambda: index.status()["pod"].silent)
        status = index.status()["pod"]
        assert status.synced
        assert status.silent_seconds >= 0.15


def test_a_publisher_without_heartbeats_is_never_called_silent():
    now = [0.0]
    with publisher() as feed, subscribe(feed.endpoints[0], feed.replay_endpoints[0]) as known:
        list(known.poll(0.1))
        known._clock = lambda: known.heard_at + 1000.0
        assert known.silent_seconds == 1000.0
        assert not known.silent
    with Subscription("tcp://127.0.0.1:1", None, clock=lambda: now[0]) as unknown:
        now[0] = 50.0
        assert (unknown.heard_at, unknown.silent_seconds, unknown.silent) == (0.0, 50.0, False)


def test_an_engines_feed_is_merged_into_ours_with_one_sequence():
    a = chain(1, 6)
    with VllmPublisher() as engine:
        engine.stored(a, 0, 3)
        merge = {"merge_from": [engine.endpoint], "merge_replay_from": [engine.replay_endpoint]}
        with publisher(heartbeat_seconds=0.1, **merge) as feed, ResidencyIndex() as index:
            index.follow(where(feed))
            assert index.synced(5)
            feed.publish(*stored(a))
            wait_for(lambda: {(m, h) for m, _, h in index.holds("pod")} == names(a) | names(a, 0, 3, medium="GPU"))
            assert index.longest_prefix(a.token_ids) == {"pod": TierMatch(3 * BLOCK, 6 * BLOCK)}
            wait_for(lambda: engine.send() or feed.stats().merge_gaps == 0)
            engine.stored(a, 3, 5, lost=True)
            engine.send()
            wait_for(lambda: index.longest_prefix(a.token_ids)["pod"].gpu == 5 * BLOCK)
            engine.send(engine.codec.cleared)
            wait_for(lambda: {(m, h) for m, _, h in index.holds("pod")} == names(a))
            assert feed.stats().merge_gaps == 1
