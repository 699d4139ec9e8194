"""What strangers, odd settings and late callers do to a feed: nothing."""

import socket
import threading

import pytest
import zmq
from feedkit import Reader, chain, names, publisher, stored, wait_for

from kvoffload.config import EventsConfig
from kvoffload.errors import ConfigError
from kvoffload.events.client import NoAnswer, ReplayClient
from kvoffload.events.index import ResidencyIndex
from kvoffload.events.publisher import FeedPublisher
from kvoffload.events.register import dialled, registration
from kvoffload.events.settings import reachable, tcp_port
from kvoffload.events.subscriber import Subscription
from kvoffload.events.wire import BlockStored, decode_batch


def test_a_port_scan_does_not_take_subscribers_off_the_count():
    with publisher() as feed, Reader(feed):
        port = tcp_port(feed.endpoints[0])
        for greeting in (b"", b"GET / HTTP/1.0\r\n\r\n", b""):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(greeting)
        with Reader(feed):  # its handshake comes behind the strangers
            wait_for(lambda: feed.stats().subscribers == 2)
        wait_for(lambda: feed.stats().subscribers == 1)


@pytest.mark.parametrize("setting", ["heartbeat_seconds", "batch_window_seconds"])
def test_a_wait_that_the_platform_cannot_count_does_not_end_the_feed(setting):
    blocks = chain(1, 2)
    with publisher(**{setting: 1e12}) as feed, Reader(feed) as reader:
        assert feed.flush()
        feed.gpu_stored(blocks, 0, 2)  # a command does not wait for the window
        assert decode_batch(reader.next()[2]).events


def test_what_comes_after_closing_is_dropped_and_waits_for_nothing():
    with publisher() as feed:
        pass
    for _ in range(100):
        feed.publish(*stored(chain(1, 2)))
        feed.reannounce()
        feed.gpu_cleared()
    assert feed.stats().lag <= 1  # what closing itself left
    assert feed.stats().dropped == 0
    assert feed.flush(0.0)


def test_readers_that_stall_in_a_replay_do_not_silence_describe():
    with publisher(contiguity="strict") as feed, Reader(feed) as reader:
        with feed.lanes[0].lock:
            feed.lanes[0].journal.skip(2_000_000)
        context = zmq.Context()
        readers = [context.socket(zmq.DEALER) for _ in range(9)]
        for stalled in readers:
            stalled.setsockopt(zmq.RCVHWM, 10)
            stalled.connect(feed.replay_endpoints[0])
            stalled.send_multipart([b"", bytes(8)])
        wait_for(lambda: feed.stats().active_replays == 9)
        assert reader.ask(b"describe")[0] == b"describe"
        assert reader.ask(b"?")[0] == b"error"
        context.destroy(linger=0)


@pytest.mark.parametrize("setting", [{"merge_from": ["nowhere"]}, {"merge_replay_from": ["tcp://127.0.0.1:1"]}])
def test_a_merge_that_cannot_be_is_refused_at_the_start(setting):
    with pytest.raises(ConfigError):
        FeedPublisher(EventsConfig(endpoint="tcp://127.0.0.1:0", replay_endpoint=None, **setting))


def test_a_reader_of_no_endpoint_is_told_so():
    context = zmq.Context()
    for make in (lambda: Subscription("nowhere", None), lambda: ReplayClient("nowhere", context)):
        with pytest.raises(ConfigError, match="nowhere"):
            make()
    context.term()


def test_an_ipv6_endpoint_is_published_followed_and_asked():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    blocks = chain(1, 3)
    with publisher(endpoint="tcp://[::1]:0", replay_endpoint="tcp://[::1]:0") as feed, ResidencyIndex() as index:
        feed.publish(*stored(blocks))
        index.follow({"v6": (feed.endpoints[0], feed.replay_endpoints[0])})
        assert index.synced()
        wait_for(lambda: {(medium, name) for medium, _, name in index.holds("v6")} == names(blocks))


@pytest.mark.parametrize(
    ("bound", "host", "named"),
    [
        ("tcp://0.0.0.0:5557", "10.0.0.7", "tcp://10.0.0.7:5557"),
        ("tcp://[::]:5557", "fd00::7", "tcp://[fd00::7]:5557"),
        ("tcp://127.0.0.1:5557", "10.0.0.7", "tcp://127.0.0.1:5557"),
        ("ipc:///run/feed", "10.0.0.7", "ipc:///run/feed"),
    ],
)
def test_a_wildcard_is_registered_under_an_address_that_can_be_dialled(bound, host, named):
    assert reachable(bound, host) == named
    described = {
        "instance_id": "pod", "endpoint": bound, "replay_endpoint": None, "model_name": "m", "block_size": 4, "rank": 0
    }  # fmt: skip
    assert registration(dialled(described, host))["endpoint"] == named


def test_a_merged_adapter_known_by_number_alone_stays_an_adapter():
    event = BlockStored([7], None, [1, 2, 3, 4], 4, 9, "GPU", None)
    with publisher() as feed, Reader(feed) as reader:
        feed._intake.command(lambda lane: lane.residency.engine_stored(event))
        (told,) = decode_batch(reader.next()[2]).events
        assert told.lora_id == 9


@pytest.mark.parametrize(
    "answer", [[b""], [b"", b"describe", b"{"], [b"", b"snapshot", b"[]"], [b"", b"snapshot", b""]]
)
def test_a_replay_socket_that_answers_nonsense_counts_as_silent(answer):
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    client = ReplayClient(f"tcp://127.0.0.1:{port}", context, 5.0)

    def serve():
        for _ in range(2):
            identity, _, what = router.recv_multipart()
            assert what in (b"snapshot", bytes(8))
            router.send_multipart([identity, *answer])

    server = threading.Thread(target=serve)
    server.start()
    with pytest.raises(NoAnswer):
        client.snapshot()
    with pytest.raises(NoAnswer):
        list(client.replay(0))
    server.join()
    context.destroy(linger=0)
