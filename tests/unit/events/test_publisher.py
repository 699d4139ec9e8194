"""The publisher over real sockets: live batches, replays, losses, description."""

from __future__ import annotations

import gc
import json
import socket
import time

import pytest
from feedkit import BLOCK, Reader, apply, chain, names, publisher, removed, stored, wait_for

from kvoffload.config import EventsConfig, OffloadConfig
from kvoffload.errors import ConfigError
from kvoffload.events.listeners import SilenceWatch
from kvoffload.events.publisher import FeedPublisher, create_publisher
from kvoffload.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, decode_batch
from kvoffload.keys import BlockInfo
from kvoffload.manager.base import OffloadingEvent


def test_replayed_batch_is_byte_equal_to_the_live_one_and_carries_its_topic():
    """A-E1."""
    with publisher() as feed, Reader(feed) as reader:
        live = []
        for number in range(6):
            feed.publish(*stored(chain(number, 2)))
            live.append(reader.next())
        assert [sequence for _, sequence, _ in live] == list(range(6))
        reader.dealer.send_multipart([b"", bytes(8)])
        for topic, sequence, payload in live:
            assert reader.dealer.recv_multipart() == [b"", topic, sequence.to_bytes(8, "big"), payload]
        assert reader.dealer.recv_multipart() == [b"", b"", (-1).to_bytes(8, "big", signed=True), b""]


def test_a_full_queue_never_blocks_the_caller_and_the_loss_is_seen_and_recovered():
    """A-E2."""
    with publisher(max_queue_size=1) as feed, Reader(feed) as reader:
        with feed.lanes[0].lock:  # the sender cannot go on
            feed.publish(*stored(chain(0, 1)))
            wait_for(lambda: feed.stats().lag == 0)  # the sender took it and waits for the lane
            slowest = 0.0
            for number in range(1, 6):
                before = time.perf_counter()
                feed.publish(*stored(chain(number, 1)))
                slowest = max(slowest, time.perf_counter() - before)
            assert slowest < 0.01
            assert feed.stats().dropped == 4
        first, second = reader.next(), reader.next()
        assert [first[1], second[1]] == [0, 1]
        wait_for(lambda: feed.stats().next_sequence == 6)
        feed.publish(*stored(chain(9, 1)))
        assert reader.next()[1] == 6  # 2 to 5 are missing: the gap
        index: set = set()
        for sequence, payload in reader.replay(2):
            assert sequence >= 2
            apply(index, payload)
        assert index == names(chain(9, 1)).union(*(names(chain(n, 1)) for n in range(2, 6)))


def test_folded_changes_keep_what_was_removed_while_the_queue_was_full():
    with publisher(max_queue_size=1) as feed, Reader(feed) as reader:
        feed.publish(*stored(chain(0, 2)))
        reader.next()
        with feed.lanes[0].lock:
            feed.publish(*stored(chain(1, 1)))
            wait_for(lambda: feed.stats().lag == 0)
            feed.publish(*stored(chain(2, 1)))
            feed.publish(*removed(chain(0, 2), 1))
            feed.publish(*stored(chain(3, 1)))
            feed.publish(*removed(chain(3, 1)))
        wait_for(lambda: feed.stats().next_sequence == 6)
        expected = names(chain(0, 1)) | names(chain(1, 1)) | names(chain(2, 1))
        assert feed.lanes[0].journal.announced() == {("CPU", 0, name) for _, name in expected}
        index = set(names(chain(0, 2)))
        for _, payload in reader.replay(1):
            apply(index, payload)
        assert index == expected


def test_removed_comes_before_stored():
    """A-E3: applied in order, the events give exactly what is readable."""
    a, b = chain(0, 1), chain(1, 1)
    with publisher() as feed, Reader(feed) as reader:
        feed.publish(*stored(a))
        index = apply(set(), reader.next()[2])
        events, infos = stored(b)
        feed.publish([OffloadingEvent(list(a.keys()), "CPU", True), *events], infos)
        payload = reader.next()[2]
        assert [type(event) for event in decode_batch(payload).events] == [BlockRemoved, BlockStored]
        assert apply(index, payload) == names(b)


def test_a_reset_of_the_cpu_tier_is_removals_in_bounded_batches_never_all_blocks_cleared():
    """A-E4: with no other activity, within a second."""
    big = chain(1, 3000)
    with publisher(batch_window_seconds=0.05) as feed, Reader(feed) as reader:
        feed.publish(*stored(big))
        feed.publish(*stored(chain(2, 1), medium="STORAGE"))  # not among the media of this feed
        index = apply(set(), reader.next()[2])
        assert index == names(big)
        before = time.monotonic()
        feed.publish(*removed(big))
        while index:
            payload = reader.next()[2]
            events = decode_batch(payload).events
            assert len(events) <= 4096
            assert len(payload) <= 16 << 20
            assert all(isinstance(event, BlockRemoved) and event.medium == "CPU" for event in events)
            apply(index, payload)
        assert time.monotonic() - before < 1.0


def test_large_changes_are_split_in_batches_of_4096_events():
    with publisher() as feed, Reader(feed) as reader:
        feed.publish(*stored(chain(1, 9000)))
        sizes = [len(decode_batch(reader.next()[2]).events) for _ in range(3)]
        assert sizes == [4096, 4096, 808]


def test_first_events_lost_to_a_late_subscriber_come_back_by_replay():
    """A-E6."""
    with publisher() as feed:
        for number in range(3):
            feed.publish(*stored(chain(number, 1)))
            assert feed.flush()
        with Reader(feed) as reader:
            feed.publish(*stored(chain(3, 1)))
            assert reader.next()[1] == 3
            assert [sequence for sequence, _ in reader.replay(0)] == [0, 1, 2, 3]


def test_nobody_listens_is_said_once():
    """A-E8: after a minute, once; again only after somebody came and left."""
    watch = SilenceWatch(0.0)
    assert [watch.check(now, 0) for now in (1.0, 59.0, 60.0, 61.0, 600.0)] == [False, False, True, False, False]
    assert not watch.check(700.0, 1)
    assert [watch.check(now, 0) for now in (701.0, 760.0, 761.0, 900.0)] == [False, False, True, False]


def test_the_subscriber_count_follows_connections(caplog):
    """A-E8: the gauge is 0 without a subscriber."""
    now = [0.0]
    with publisher(monotonic=lambda: now[0]) as feed:
        assert feed.stats().subscribers == 0
        now[0] = 61.0
        wait_for(lambda: "nobody has listened" in caplog.text)
        with Reader(feed):
            assert feed.stats().subscribers == 1
        wait_for(lambda: feed.stats().subscribers == 0)
    assert caplog.text.count("nobody has listened") == 1
    assert "only this host" in caplog.text


def test_reannounce_after_the_engine_cleared_its_tier_brings_the_cpu_blocks_back_once():
    """A-E9: for a consumer that counts references, too; here through our own feed."""
    a = chain(1, 5)
    with publisher() as feed, Reader(feed) as reader:
        feed.gpu_stored(a, 0, 3)
        feed.publish(*stored(a))
        feed.flush()
        feed.gpu_cleared()
        feed.flush()
        counts: dict = {}
        while not reader.silent(0.2):
            for event in decode_batch(reader.next()[2]).events:
                if isinstance(event, AllBlocksCleared):
                    counts.clear()
                    continue
                step = 1 if isinstance(event, BlockStored) else -1
                for name in event.block_hashes:
                    counts[event.medium, name] = max(counts.get((event.medium, name), 0) + step, 0)
        assert {place: n for place, n in counts.items() if n} == dict.fromkeys(names(a), 1)


def test_reannounce_beside_an_engines_own_feed_is_right_whatever_the_consumer_holds():
    """A-E9: the engine's AllBlocksCleared came over its own feed; ours must not send one."""
    a = chain(1, 4)
    with publisher(sole_publisher=False) as feed, Reader(feed) as reader:
        feed.publish(*stored(a))
        index = apply(set(), reader.next()[2])
        for consumer in (index, set(), {("CPU", 5)}):
            feed.reannounce()
            payload = reader.next()[2]
            kinds = [type(event) for event in decode_batch(payload).events]
            assert kinds == [BlockRemoved] + [BlockStored] * 4
            assert apply(consumer, payload) - {("CPU", 5)} == names(a)


def test_a_salted_chain_without_its_extra_keys_is_not_announced(caplog):
    """A-E10."""
    a = chain(1, 3, cache_salt="tenant")
    infos = {
        key: BlockInfo((key[:-4],), a.block_hashes()[i - 1] if i else None, tuple(range(BLOCK)), BLOCK, salted=True)
        for i, key in enumerate(a.keys())
    }
    with publisher() as feed, Reader(feed) as reader:
        feed.publish([OffloadingEvent(list(a.keys()), "CPU", False)], infos)
        feed.publish(*stored(chain(2, 1)))
        assert apply(set(), reader.next()[2]) == names(chain(2, 1))
        assert feed.stats().withheld["salted"] == 3
        assert caplog.text.count("(salted): their extra keys are unknown") == 1
        feed.describe({key: a.info(i) for i, key in enumerate(a.keys())})
        payload = reader.next()[2]
        assert apply(set(), payload) == names(a)
        assert decode_batch(payload).events[0].extra_keys == [["tenant"]]
        assert feed.stats().withheld["salted"] == 0


def test_a_block_without_description_is_withheld_until_it_arrives():
    a = chain(1, 3)
    with publisher() as feed, Reader(feed) as reader:
        events, infos = stored(a)
        late = {a.keys()[0]: infos.pop(a.keys()[0])}
        feed.publish(events, infos)
        feed.flush()
        assert reader.silent()
        assert feed.stats().withheld == {"no_info": 1, "orphan": 2, "salted": 0, "malformed": 0, "unencodable": 0}
        feed.describe(late)
        payload = reader.next()[2]
        assert apply(set(), payload) == names(a)
        assert [len(event.token_ids) for event in decode_batch(payload).events] == [BLOCK] * 3
        feed.publish(*removed(a))
        assert apply(names(a), reader.next()[2]) == set()


def test_an_event_that_cannot_be_encoded_is_dropped_alone():
    good, bad = chain(1, 1), chain(2, 1)
    events, infos = stored(good)
    info = bad.info(0)
    infos[bad.keys()[0]] = BlockInfo(info.block_hashes, None, info.token_ids, BLOCK, extra_keys=((object(),),))
    with publisher() as feed, Reader(feed) as reader:
        feed.publish([OffloadingEvent([bad.keys()[0]], "CPU", False), *events], infos)
        _, sequence, payload = reader.next()
        assert sequence == 0
        assert apply(set(), payload) == names(good)
        assert feed.stats().unencodable == 1
        feed.publish(*removed(bad))
        feed.publish(*stored(chain(3, 1)))
        assert reader.next()[1] == 1  # removing what was never announced says nothing


def test_nonsense_from_the_caller_is_counted_and_the_feed_goes_on():
    with publisher() as feed, Reader(feed) as reader:
        feed.publish([object()], {})
        feed.publish(*stored(chain(1, 1)))
        assert apply(set(), reader.next()[2]) == names(chain(1, 1))
        assert feed.stats().errors == 1


def test_an_offloaded_block_announces_each_engine_block_and_shared_ones_once():
    from kvoffload.chain import BlockChain, GroupLayout

    one = BlockChain([GroupLayout(BLOCK, 3)], range(24))
    two = BlockChain([GroupLayout(BLOCK, 3)], [*range(20), 7, 7, 7, 7])
    with publisher() as feed, Reader(feed) as reader:
        feed.publish(*stored(one))
        event = decode_batch(reader.next()[2]).events[0]
        assert (event.block_size, len(event.block_hashes), len(event.token_ids)) == (BLOCK, 3, 12)
        feed.publish(*stored(two, 1))
        shared = decode_batch(reader.next()[2]).events
        assert [len(event.block_hashes) for event in shared] == [1]  # five of six blocks are there already
        feed.publish(*removed(one))
        gone = decode_batch(reader.next()[2]).events
        assert sum(len(event.block_hashes) for event in gone) == 4  # two of them are part of the other block


def test_heartbeat_takes_a_number_and_life_begins_with_a_clear():
    with publisher(heartbeat_seconds=0.05, start_announcement=True) as feed, Reader(feed) as reader:
        first = reader.next()
        second = reader.next()
        assert second[1] == first[1] + 1
        assert decode_batch(second[2]).events == []
        sequence, payload = reader.replay(0)[0]
        assert sequence == 0
        assert decode_batch(payload).events == [AllBlocksCleared()]


def test_beside_another_publisher_a_life_begins_with_an_empty_batch():
    with publisher(start_announcement=True, sole_publisher=False) as feed, Reader(feed) as reader:
        assert [decode_batch(payload).events for _, payload in reader.replay(0)] == [[]]


def test_describe_snapshot_and_unknown_requests_are_answered():
    a = chain(1, 5)
    with publisher(model_name="m", start_announcement=True) as feed, Reader(feed) as reader:
        feed.publish(*stored(a))
        assert feed.flush()
        kind, text = reader.ask(b"describe")
        told = json.loads(text)
        assert kind == b"describe"
        assert (told["instance_id"], told["model_name"], told["topic"]) == ("pod", "m", "kv@pod@m")
        assert (told["epoch"], told["next_sequence"], told["block_size"]) == (0, 2, BLOCK)
        assert told["subscribers"] == 1
        kind, text = reader.ask(b"snapshot")
        assert kind == b"snapshot"
        assert json.loads(text) == {"epoch": 0, "life": 1, "cut": 1, "blocks": 5}
        _, topic, sequence, payload = reader.dealer.recv_multipart()
        assert (topic, int.from_bytes(sequence, "big")) == (b"kv@pod@m", 1)
        assert apply(set(), payload) == names(a)
        assert reader.dealer.recv_multipart()[2] == b"\xff" * 8
        kind, text = reader.ask(b"what?")
        assert kind == b"error"
        assert "unknown request" in json.loads(text)["error"]


def test_each_endpoint_has_its_own_numbers_encoding_and_media():
    other = {
        "endpoint": "tcp://127.0.0.1:0", "replay_endpoint": None, "consumer": "aibrix", "media": ["GPU"],
        "start_announcement": False,
    }  # fmt: skip
    a = chain(1, 2)
    with publisher(also=[other]) as feed, Reader(feed) as first, Reader(feed, lane=1) as second:
        feed.publish(*stored(a))
        assert apply(set(), first.next()[2]) == names(a)
        feed.gpu_stored(a, 0, 2)
        assert apply(set(), first.next()[2]) == names(a, medium="GPU")
        _, sequence, payload = second.next()
        assert sequence == 0
        assert payload[11] == 0x9B  # an array of eleven fields
        assert apply(set(), payload) == names(a, medium="GPU")


def test_a_strict_sole_feed_starts_a_new_life_when_its_numbers_end(caplog):
    a = chain(1, 2)
    options = {"contiguity": "strict", "max_sequences": 20, "start_announcement": True}
    with publisher(**options) as feed, Reader(feed) as reader:
        feed.publish(*stored(a))
        for number in range(25):
            feed.publish(*stored(chain(2 + number, 1)))
            feed.flush()
        stats = feed.stats()
        assert stats.lives == 2
        assert stats.next_sequence < 20
        index: set = set()
        for _, payload in reader.replay(0):
            apply(index, payload)
        assert len(index) == 27
        assert "will start a new life" in caplog.text


def test_publish_after_close_does_nothing():
    with publisher() as feed:
        pass
    feed.publish(*stored(chain(1, 1)))
    assert feed.close()


def test_the_file_of_a_local_socket_goes_with_it_unless_another_process_bound_there_since(tmp_path):
    mine, taken = tmp_path / "mine", tmp_path / "taken"
    with publisher(endpoint=f"ipc://{mine}", replay_endpoint=f"ipc://{taken}"):
        taken.unlink()
        taken.write_text("the next life's")
        assert mine.exists()
    assert sorted(tmp_path.iterdir()) == [taken]


def test_a_path_where_another_feed_listens_is_refused_and_one_left_by_a_kill_is_taken_over(tmp_path):
    path = tmp_path / "feed"
    with publisher(endpoint=f"ipc://{path}"):
        with pytest.raises(ConfigError, match="another process listens there; give another path"):
            FeedPublisher(EventsConfig(endpoint=f"ipc://{path}", replay_endpoint=None))
        assert path.is_socket()
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))  # closing it leaves the file
    with publisher(endpoint=f"ipc://{path}"):
        pass
    assert not path.exists()


def test_a_path_in_a_folder_that_may_not_be_looked_into_is_told_by_its_key(tmp_path, monkeypatch):
    def refuse(_path, **_options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("kvoffload.events.lane.Path.exists", refuse)
    with pytest.raises(ConfigError, match=r"^events.endpoint 'ipc://.*/no/feed' cannot be bound: .* may be written"):
        FeedPublisher(EventsConfig(endpoint=f"ipc://{tmp_path}/no/feed", replay_endpoint=None))


def test_a_taken_port_is_named_with_the_next_free_pair():
    with publisher() as feed:
        said = r" 'tcp://.*' cannot be bound: .*; port \d+ is taken, \d+ and \d+ are free"
        with pytest.raises(ConfigError, match="^events.endpoint" + said):
            FeedPublisher(EventsConfig(endpoint=feed.endpoints[0], replay_endpoint=None))
        with pytest.raises(ConfigError, match="^events.replay_endpoint" + said):
            FeedPublisher(EventsConfig(endpoint="tcp://127.0.0.1:0", replay_endpoint=feed.endpoints[0]))


def test_the_publisher_of_a_service_config():
    """A-K2: no GPU, no torch."""
    config = OffloadConfig(cpu_bytes_to_use="1MiB", gpu_block_size=16, model_name="m", instance_id="i")
    assert create_publisher(config) is None
    events = {"endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0"}
    feed = create_publisher(
        OffloadConfig(cpu_bytes_to_use="1MiB", gpu_block_size=16, model_name="m", instance_id="i", events=events)
    )
    assert feed is not None
    with feed:
        assert feed.lanes[0].settings.topic == "kv@i@m"


def test_a_publisher_that_was_never_started_nor_closed_is_closed_when_it_is_dropped():
    feed = FeedPublisher(EventsConfig(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0"))
    port = int(feed.endpoints[0].rsplit(":", 1)[1])
    del feed
    with pytest.warns(ResourceWarning, match=f"unclosed publisher of the feed tcp://127.0.0.1:{port}"):
        gc.collect()
    with socket.create_server(("127.0.0.1", port)):  # its port is free again
        pass
