"""Replays are complete whatever the reader does, and live publishing goes on beside them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
import zmq
from feedkit import Reader, chain, publisher, stored, wait_for

from kvoffload.events.wire import END_SEQUENCE

BATCHES = 10_000


def fill(feed, batches=BATCHES):
    """Publish `batches` live numbers, each with a block that stays."""
    lane = feed.lanes[0]
    with lane.lock:
        for number in range(batches):
            events, infos = stored(chain(number, 1))
            lane.residency.store_all(events[0].keys, "CPU", infos)
            lane.journal.seal()
        lane.journal.take_sealed()


@pytest.mark.slow
def test_a_slow_reader_gets_10_000_of_10_000_and_the_end_marker_20_of_20_times():
    with publisher(batch_window_seconds=0.0) as feed, Reader(feed) as reader:
        fill(feed)
        for run in range(20):
            context = zmq.Context()
            dealer = context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.RCVHWM, 10)
            dealer.setsockopt(zmq.RCVBUF, 4096)
            dealer.connect(feed.replay_endpoints[0])
            dealer.send_multipart([b"", bytes(8)])
            time.sleep(0.05)  # the reader is busy elsewhere: its pipe is full
            live, received = 0, 0
            while True:
                assert dealer.poll(10_000), f"run {run}: no end marker after {received} messages"
                frames = dealer.recv_multipart()
                if frames[2] == END_SEQUENCE:
                    break
                received += 1
                if received % 500 == 0:  # the live feed keeps its rate meanwhile
                    before = time.monotonic()
                    feed.publish(*stored(chain(100_000 + run * 100 + live, 1)))
                    reader.next()
                    assert time.monotonic() - before < 1.0
                    live += 1
            context.destroy(linger=0)
            # Live batches published before the cut are part of the replay; those after it are not.
            assert received == BATCHES + sum(20 for _ in range(run)), f"run {run}"


COUNTER = """
import sys, time, zmq
context = zmq.Context()
dealer = context.socket(zmq.DEALER)
dealer.setsockopt(zmq.RCVHWM, 100_000)
dealer.connect(sys.argv[1])
dealer.send_multipart([b"", bytes(8)])
start, expected, receive = time.monotonic(), 0, super(zmq.Socket, dealer).recv
while True:
    receive(), receive()
    sequence = receive()
    receive()
    if sequence == b"\\xff" * 8:
        break
    assert int.from_bytes(sequence, "big") == expected
    expected += 1
print(expected, time.monotonic() - start)
"""


@pytest.mark.slow
def test_a_strict_replay_of_5_000_000_numbers_takes_at_most_90_seconds():
    with publisher(contiguity="strict", max_sequences=6_000_000) as feed:
        lane = feed.lanes[0]
        feed.publish(*stored(chain(1, 4)))
        assert feed.flush()
        with lane.lock:
            lane.journal.skip(5_000_000 - 1)
        arguments = [sys.executable, "-c", COUNTER, feed.replay_endpoints[0]]
        found = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=280).stdout.split()
        print(f"strict replay: {found[0]} numbers in {float(found[1]):.1f} s")
        assert int(found[0]) == 5_000_000
        assert float(found[1]) <= 90


def test_more_readers_than_slots_are_all_answered():
    with publisher() as feed:
        fill(feed, 300)
        readers = [Reader(feed, subscribe=False) for _ in range(20)]
        for reader in readers:
            reader.dealer.send_multipart([b"", bytes(8)])
        for reader in readers:
            messages = 0
            while reader.dealer.recv_multipart()[2] != END_SEQUENCE:
                messages += 1
            assert messages == 300
            reader.__exit__()


def test_a_reader_that_stops_reading_or_goes_away_blocks_nobody():
    with publisher() as feed, Reader(feed) as live:
        fill(feed, 3000)
        stuck, gone = Reader(feed, subscribe=False), Reader(feed, subscribe=False)
        for reader in (stuck, gone):
            reader.dealer.setsockopt(zmq.RCVHWM, 1)
            reader.dealer.send_multipart([b"", bytes(8)])
        gone.__exit__()
        with Reader(feed, subscribe=False) as healthy:
            assert len(healthy.replay(0)) == 3000
        feed.publish(*stored(chain(99_999, 1)))
        assert live.next()
        stuck.__exit__()


SUBSCRIBER = """
import sys, zmq
context = zmq.Context()
sub = context.socket(zmq.SUB)
sub.setsockopt(zmq.RCVHWM, 1)
sub.subscribe(b"")
sub.connect(sys.argv[1])
sub.recv_multipart()
print("connected", flush=True)
sys.stdin.read()
"""


def test_a_killed_and_a_stopped_subscriber_block_nobody():
    with publisher() as feed, Reader(feed) as live:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", SUBSCRIBER, feed.endpoints[0]],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for _ in range(2)
        ]  # fmt: skip
        try:
            wait_for(lambda: feed.stats().subscribers == 3, 20)
            time.sleep(0.2)
            feed.publish(*stored(chain(0, 1)))
            live.next()
            for process in processes:
                assert process.stdout.readline() == "connected\n"
            processes[0].kill()
            processes[1].send_signal(signal.SIGSTOP)
            slowest = 0.0
            for number in range(1, 2000):
                before = time.perf_counter()
                feed.publish(*stored(chain(number, 1)))
                slowest = max(slowest, time.perf_counter() - before)
            assert feed.flush()
            assert slowest < 1.0  # a blocked caller would wait for the stopped subscriber for ever
            while live.sub.poll(200):
                last = int.from_bytes(live.sub.recv_multipart()[1], "big")
            assert last == feed.stats().next_sequence - 1
            wait_for(lambda: feed.stats().subscribers == 2)
        finally:
            for process in processes:
                process.kill()
                process.communicate()


def test_a_replay_that_breaks_still_ends_with_the_marker(monkeypatch, caplog):
    def broken(*_args, **_options):
        yield b"topic", bytes(8), b"payload"
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr("kvoffload.events.replay.fill", broken)
    with publisher() as feed, Reader(feed) as reader:
        assert reader.replay(0) == [(0, b"payload")]
        monkeypatch.undo()
        feed.publish(*stored(chain(1, 1)))
        reader.next()
        assert len(reader.replay(0)) == 1
    assert "ends early" in caplog.text
