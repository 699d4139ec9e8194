"""Tombstones: what a consumer that comes back after the window must forget, and what if some were forgotten."""

from __future__ import annotations

import json

import pytest
from feedkit import Reader, apply, chain, names, publisher, removed, stored, wait_for

from kvoffload.events import SourceReset, Synced, subscribe
from kvoffload.events.tombstones import Tombstones
from kvoffload.events.wire import BlockStored


def number(name, tier=0):
    return name | tier << 64


def test_the_oldest_are_forgotten_first_and_counted():
    stones = Tombstones(8)
    for name in range(9):
        stones.add(number(name), ())
    assert (len(stones), stones.discarded) == (7, 2)
    assert set(stones.entries()) == {number(name) for name in range(2, 9)}


def test_what_lives_again_or_is_there_twice_makes_room_without_a_loss():
    stones = Tombstones(8)
    for name in (0, 1, 2, 3, 0, 1, 2, 3):
        stones.add(number(name), ())
    stones.add(number(4), {number(0), number(1)})
    assert stones.discarded == 0
    assert set(stones.entries()) == {number(2), number(3), number(4)}


@pytest.mark.parametrize(
    "make", [lambda name: number(name, name % 3), lambda name: bytes([0, name % 3]) + bytes([name])]
)
def test_tiers_and_wide_hashes_are_kept_apart(make):
    stones = Tombstones(100)
    for name in range(6):
        stones.add(make(name), ())
    assert set(stones.entries()) == {make(name) for name in range(6)}


def _churn(feed, count):
    """Store and remove `count` chains of one block each, in numbers of their own."""
    for seed in range(count):
        feed.publish(*stored(chain(seed, 1)))
        feed.publish(*removed(chain(seed, 1)))
        assert feed.flush()


BESIDE = {"sole_publisher": False, "replay_window": 4, "start_announcement": True}


def test_beside_another_publisher_a_reader_of_unknown_age_forgets_every_tombstone(caplog):
    with publisher(max_tombstones=100, **BESIDE) as feed, Reader(feed, subscribe=False) as reader:
        _churn(feed, 20)
        feed.publish(*stored(chain(99, 2)))
        assert feed.flush()
        held = {("CPU", 77)}.union(
            *(names(chain(seed, 1)) for seed in range(20))
        )  # 77: what the engine's own feed told
        for _, payload in reader.replay(1):
            apply(held, payload)
        assert held == names(chain(99, 2)) | {("CPU", 77)}
        assert feed.stats().incomplete_replays == 0
    assert "may leave dead blocks" not in caplog.text


def test_a_replay_without_some_removals_is_logged_counted_and_described(caplog):
    with publisher(max_tombstones=8, **BESIDE) as feed, Reader(feed, subscribe=False) as reader:
        _churn(feed, 20)
        ghosts = set().union(*(names(chain(seed, 1)) for seed in range(20)))
        for _, payload in reader.replay(1):
            apply(ghosts, payload)
        limits = json.loads(reader.ask(b"describe")[1])["limits"]
        assert 0 < len(ghosts) == limits["tombstones_discarded"] <= 20 - 8 + 1
        assert limits["incomplete_replays"] == feed.stats().incomplete_replays == 1
        reader.replay(limits["max_sequences"])  # beyond the end, and inside the window: nothing is missing there
        assert feed.stats().incomplete_replays == 1
    assert caplog.text.count("may leave dead blocks behind") == 1


def test_a_subscriber_starts_over_when_removals_of_its_gap_were_forgotten():
    with (
        publisher(max_tombstones=2, **BESIDE) as feed,
        subscribe(feed.endpoints[0], feed.replay_endpoints[0]) as subscription,
    ):
        list(subscription.poll(0.2))
        wait_for(lambda: feed.stats().subscribers == 1)
        lane = feed.lanes[0]
        send, lane.send = lane.send, lambda batches: None
        _churn(feed, 20)
        lane.send = send
        feed.publish(*stored(chain(99, 2)))
        found = []
        wait_for(lambda: found.extend(subscription.poll(0.05)) or any(isinstance(item, Synced) for item in found))
        assert found[0] == SourceReset("the publisher forgot some removals of the gap")
        told = {("CPU", name) for item in found if isinstance(item, BlockStored) for name in item.block_hashes}
        assert told == names(chain(99, 2))
