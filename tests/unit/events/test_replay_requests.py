"""Requests on the replay socket beyond what a publisher keeps open: bounded, answered, counted, said once."""

from __future__ import annotations

import json
import threading

import pytest
import zmq
from feedkit import Reader, chain, names, publisher, stored, wait_for

from kvoffload.events import GapRecovered, SourceReset, Synced, Unrecoverable, subscribe
from kvoffload.events.client import NoAnswer, ReplayClient
from kvoffload.events.replay import _Answer
from kvoffload.events.wire import BlockStored


@pytest.fixture
def pipes(monkeypatch):
    """What stands between the publisher and its readers: `stuck.set()` until they read."""
    stuck, turn = threading.Event(), _Answer.turn
    stuck.set()
    monkeypatch.setattr(_Answer, "turn", lambda answer, now: None if stuck.is_set() else turn(answer, now))
    return stuck


@pytest.fixture
def full(pipes):
    """A publisher that keeps two requests open, both of readers that do not read."""
    with publisher() as feed, Reader(feed, subscribe=False) as one, Reader(feed, subscribe=False) as other:
        feed.publish(*stored(chain(1, 1)))
        assert feed.flush()
        feed._server._max_open = 2
        for reader in (one, other):
            reader.dealer.send_multipart([b"", bytes(8)])
        wait_for(lambda: feed.stats().active_replays == 2)
        yield feed
        pipes.clear()


def test_a_replay_that_finds_no_room_gets_its_end_marker_at_once(full, caplog):
    with Reader(full, subscribe=False) as reader:
        assert reader.replay(0) == []
        assert reader.replay(7) == []
    assert full.stats().replays_refused == 2
    assert full.stats().active_replays == 2
    assert caplog.text.count("are refused: 2 are open") == 1


@pytest.mark.parametrize("request_", [b"describe", b"snapshot", b"something else"])
def test_what_waits_for_no_end_marker_gets_a_json_error(full, request_):
    with Reader(full, subscribe=False) as reader:
        kind, text = reader.ask(request_)
    assert kind == b"error"
    assert "2 requests are open" in json.loads(text)["error"]


@pytest.mark.parametrize("ask", [ReplayClient.describe, ReplayClient.snapshot])
def test_the_client_is_told_that_the_publisher_is_busy(full, ask):
    context = zmq.Context()
    client = ReplayClient(full.replay_endpoints[0], context)
    with pytest.raises(NoAnswer, match="2 requests are open"):
        ask(client)
    context.destroy(linger=0)


def test_room_comes_back_when_readers_read(full, pipes):
    pipes.clear()
    wait_for(lambda: full.stats().active_replays == 0)
    with Reader(full, subscribe=False) as reader:
        kind, _ = reader.ask(b"describe")
        assert kind == b"describe"
        assert len(reader.replay(0)) == 1


def test_a_gap_whose_replay_was_refused_is_not_called_recovered(monkeypatch):
    with publisher() as feed, subscribe(feed.endpoints[0], feed.replay_endpoints[0]) as subscription:
        items = list(subscription.poll(0.2))
        assert Synced(-1) in items
        wait_for(lambda: feed.stats().subscribers == 1)
        replay = ReplayClient.replay
        monkeypatch.setattr(ReplayClient, "replay", lambda client, start: iter(()))
        lane = feed.lanes[0]
        send, lane.send = lane.send, lambda batches: None
        feed.publish(*stored(chain(1, 2)))
        feed.flush()
        lane.send = send
        feed.publish(*stored(chain(2, 2)))
        found = []
        wait_for(lambda: found.extend(subscription.poll(0.05)) or any(isinstance(i, Synced) for i in found))
        monkeypatch.setattr(ReplayClient, "replay", replay)
        assert not any(isinstance(item, GapRecovered) for item in found)
        assert SourceReset("the replay ended before the gap was closed") in found
        held = {("CPU", name) for i in found if isinstance(i, BlockStored) for name in i.block_hashes}
        assert held == names(chain(1, 2)) | names(chain(2, 2))


def test_a_gap_that_nobody_answers_is_told_and_the_subscription_goes_on(monkeypatch):
    with publisher() as feed, subscribe(feed.endpoints[0], feed.replay_endpoints[0]) as subscription:
        list(subscription.poll(0.2))
        wait_for(lambda: feed.stats().subscribers == 1)

        def nobody(*_):
            raise NoAnswer("no answer")

        with monkeypatch.context() as gone:
            for name in ("describe", "snapshot", "replay"):
                gone.setattr(ReplayClient, name, nobody)
            feed.lanes[0].journal.skip(3)
            feed.publish(*stored(chain(1, 1)))
            found = []
            wait_for(lambda: found.extend(subscription.poll(0.05)) or Unrecoverable("no answer") in found)
        wait_for(lambda: found.extend(subscription.poll(0.05)) or isinstance(found[-1], Synced))
        assert {("CPU", name) for i in found if isinstance(i, BlockStored) for name in i.block_hashes} == names(
            chain(1, 1)
        )
