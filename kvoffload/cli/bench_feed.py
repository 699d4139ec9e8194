"""Measure the feed beside a plain publisher of vLLM's shape (a queue, a thread, msgspec), in one run.

Reports delivered events per second, the cost of `publish` for its caller beside an empty SimpleQueue.put, encoding
beside msgspec on vLLM's structs, journal memory per announced block, and publish-to-receive latency beside the bare
socket's.

Examples:
  kvoffload bench feed
  kvoffload bench feed --json --blocks 20000
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import queue
import statistics
import threading
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from kvoffload.chain import BlockChain, GroupLayout
from kvoffload.cli.values import add_json, add_repeat, positive
from kvoffload.config import EventsConfig
from kvoffload.events.journal import Journal
from kvoffload.events.publisher import FeedPublisher
from kvoffload.events.residency import Residency
from kvoffload.events.wire import BlockStored, Codec
from kvoffload.keys import BlockInfo, OffloadKey
from kvoffload.manager.base import OffloadingEvent

_BLOCK_TOKENS = 16
_PUT_BATCH = 8
_ENCODE_BATCH = 64
_LATENCY_RATE = 2000


class PlainPublisher:
    """What vLLM's publisher does: a bounded queue, a thread that encodes a batch at a time, a PUB socket."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.SNDHWM, 100_000)
        self.endpoint = f"tcp://127.0.0.1:{self._pub.bind_to_random_port('tcp://127.0.0.1')}"
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=100_000)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def publish(self, events: list[BlockStored]) -> None:
        """Queue one batch of events."""
        self._queue.put((time.time(), events, 0))

    def _run(self) -> None:
        encode, sequence = msgspec.msgpack.Encoder().encode, 0
        while (batch := self._queue.get()) is not None:
            self._pub.send_multipart((b"", sequence.to_bytes(8, "big"), encode(batch)))
            sequence += 1

    def close(self) -> None:
        """Send what is queued and close."""
        self._queue.put(None)
        self._thread.join()
        self._pub.close(linger=1000)
        self._context.term()


class Receiver:
    """A subscriber that counts events in a thread and remembers when each message came."""

    def __init__(self, endpoint: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.RCVHWM, 0)
        monitor = self._sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._sub.subscribe(b"")
        self._sub.connect(endpoint)
        monitor.poll(5000)
        self._sub.disable_monitor()
        monitor.close()
        time.sleep(0.1)  # the subscription crosses after the handshake
        self.events = 0
        self.arrivals: list[tuple[float, int]] = []
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        decode = msgspec.msgpack.Decoder(tuple[float, list[msgspec.Raw], int]).decode
        while not self._stop:
            if self._sub.poll(50):
                payload = self._sub.recv_multipart()[2]
                now = time.perf_counter()
                count = len(decode(payload)[1])
                self.events += count
                self.arrivals.append((now, self.events))

    def wait(self, events: int, timeout: float = 60.0) -> float:
        """Return when that many events were there."""
        deadline = time.perf_counter() + timeout
        while self.events < events and time.perf_counter() < deadline:
            time.sleep(0.002)
        return self.arrivals[-1][0] if self.arrivals else time.perf_counter()

    def close(self) -> None:
        """Stop and close."""
        self._stop = True
        self._thread.join()
        self._sub.close(linger=0)
        self._context.term()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--blocks", type=positive, default=40_000, metavar="N", help="blocks to publish (default 40000)"
    )
    add_repeat(parser, 5)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    logger = logging.getLogger("kvoffload.events.listeners")
    logger.addFilter(_is_news)
    try:
        result = _measure(Work(args.blocks), args.repeat)
    finally:
        logger.removeFilter(_is_news)
    if args.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:<44} {value:,.3f}" if isinstance(value, float) else f"{name:<44} {value:,}")
    return 0


def _is_news(record: logging.LogRecord) -> bool:
    return "loopback" not in record.getMessage()  # where the feeds of a benchmark belong


def _measure(work: Work, repeat: int) -> dict[str, Any]:
    result: dict[str, Any] = {"blocks": work.blocks, "tokens_per_block": _BLOCK_TOKENS}
    result.update(delivery(work, repeat))
    result.update(caller_cost(work, repeat))
    result.update(encoding(work, repeat))
    result.update(journal_memory(work))
    result.update(latency(work))
    return result


class Work:
    """The same blocks in the manager's form and as vLLM's structs, in publications of a few blocks."""

    def __init__(self, blocks: int) -> None:
        chain = BlockChain([GroupLayout(_BLOCK_TOKENS)], range(1, blocks * _BLOCK_TOKENS + 1))
        keys = list(chain.keys())
        infos: dict[OffloadKey, BlockInfo] = {k: i for n, k in enumerate(keys) if (i := chain.info(n)) is not None}
        hash_of = Codec().hash_of
        self.blocks = blocks
        self.publications: list[tuple[list[OffloadingEvent], dict[OffloadKey, BlockInfo]]] = []
        self.batches: list[list[BlockStored]] = []
        for start in range(0, blocks, _PUT_BATCH):
            part = keys[start : start + _PUT_BATCH]
            self.publications.append(([OffloadingEvent(part, "CPU", False)], {key: infos[key] for key in part}))
            self.batches.append([_struct(infos[key], hash_of) for key in part])


def _struct(info: BlockInfo, hash_of: Callable[[bytes], int | bytes]) -> BlockStored:
    parent = None if info.parent_hash is None else hash_of(info.parent_hash)
    names = [hash_of(name) for name in info.block_hashes]
    return BlockStored(
        names, parent, list(info.token_ids), info.block_size, None, "CPU", None, None, 0, info.kind, None
    )


def _feed(**options: object) -> FeedPublisher:
    settings = {
        "endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0", "heartbeat_seconds": 0,
        "start_announcement": False, "max_queue_size": 1_000_000, **options,
    }  # fmt: skip
    feed = FeedPublisher(EventsConfig.model_validate(settings), engine_block_size=_BLOCK_TOKENS)
    feed.start()
    return feed


def delivery(work: Work, repeat: int) -> dict[str, float]:
    """Events per second from the first publish to the last receive."""

    def ours() -> float:
        feed = _feed(batch_window_seconds=0)  # like the other: no window
        receiver = Receiver(feed.endpoints[0])
        gc.collect()
        start = time.perf_counter()
        for events, infos in work.publications:
            feed.publish(events, infos)
        rate = work.blocks / (receiver.wait(work.blocks) - start)
        receiver.close()
        feed.close()
        return rate

    hash_of = Codec().hash_of

    def plain() -> float:  # its caller makes the structs, as vLLM's connector does
        publisher = PlainPublisher()
        receiver = Receiver(publisher.endpoint)
        gc.collect()
        start = time.perf_counter()
        for events, infos in work.publications:
            publisher.publish([_struct(infos[key], hash_of) for event in events for key in event.keys])
        rate = work.blocks / (receiver.wait(work.blocks) - start)
        receiver.close()
        publisher.close()
        return rate

    pairs = [(ours(), plain()) for _ in range(repeat)]
    mine, theirs = statistics.median(p[0] for p in pairs), statistics.median(p[1] for p in pairs)
    return {
        "delivered_events_per_second": mine,
        "plain_events_per_second": theirs,
        "delivered_ratio": mine / theirs,
    }


def caller_cost(work: Work, repeat: int) -> dict[str, float]:
    """Nanoseconds of one call, timed one by one: the clock's own cost is in both, and given beside them."""
    simple: queue.SimpleQueue[object] = queue.SimpleQueue()
    feed = _feed(batch_window_seconds=0.5)
    mine: list[int] = []
    empty: list[int] = []
    clock = time.perf_counter_ns
    for _ in range(repeat):
        for publication in work.publications:
            before = clock()
            simple.put(publication)
            empty.append(clock() - before)
        for events, infos in work.publications:
            before = clock()
            feed.publish(events, infos)
            mine.append(clock() - before)
    feed.close(60)
    overhead = statistics.median(_clock_cost() for _ in range(1000))
    ours, theirs = statistics.median(mine), statistics.median(empty)
    return {
        "publish_p50_nanoseconds": ours,
        "simple_queue_put_p50_nanoseconds": theirs,
        "publish_ratio": ours / theirs,
        "clock_nanoseconds": overhead,
        "publish_ratio_without_clock": (ours - overhead) / max(theirs - overhead, 1.0),
        "publish_p99_nanoseconds": float(sorted(mine)[int(len(mine) * 0.99)]),
    }


def _clock_cost() -> int:
    before = time.perf_counter_ns()
    return time.perf_counter_ns() - before


def encoding(work: Work, repeat: int) -> dict[str, float]:
    """Encoding alone, of the same blocks: ours as the residency does it, over msgspec on vLLM's structs."""
    encode, join = msgspec.msgpack.Encoder().encode, b"".join
    structs = [event for batch in work.batches for event in batch]
    infos = [info for _, described in work.publications for info in described.values()]
    rows = [
        (info.block_hashes[0][-8:], info.parent_hash and info.parent_hash[-8:], struct.token_ids)
        for info, struct in zip(infos, structs, strict=True)
    ]
    like = infos[0]
    theirs: list[float] = []
    mine: list[float] = []
    for _ in range(max(repeat, 5)):  # the fastest of each counts: both are pure computation
        start = time.perf_counter()
        for first in range(0, work.blocks, _ENCODE_BATCH):
            encode((1.5, structs[first : first + _ENCODE_BATCH], 0))
        theirs.append(time.perf_counter() - start)
        codec, encoded = Codec(), bytearray()
        into = codec.encode_into
        start = time.perf_counter()
        for first in range(0, work.blocks, _ENCODE_BATCH):
            events: list[bytes] = []
            add = events.append
            head, parent_mark, tokens_mark, no_parent, tail = codec.template(
                "CPU", 0, like.block_size, like.lora_name, like.kind, like.sliding_window
            )
            for name, parent, tokens in rows[first : first + _ENCODE_BATCH]:
                into(tokens, encoded)
                if parent is None:
                    add(join((head, name, no_parent, encoded, tail)))
                else:
                    add(join((head, name, parent_mark, parent, tokens_mark, encoded, tail)))
            codec.payload(b"\0" * 8, events)
        mine.append(time.perf_counter() - start)
    return {"encoded_events_per_second": work.blocks / min(mine), "encoding_ratio": min(theirs) / min(mine)}


def journal_memory(work: Work) -> dict[str, float]:
    """Bytes per announced block in residency and journal, without its encoded event and the window's changes."""
    gc.collect()
    tracemalloc.start()
    journal = Journal(Codec(), replay_window=1, clock=time.time)
    residency = Residency(journal)
    before = tracemalloc.get_traced_memory()[0]
    for events, infos in work.publications:
        for event in events:
            for key in event.keys:
                residency.store(key, event.medium, infos.get(key))
        journal.seal()
        journal.take_sealed()
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    payload = sum(len(event) for event in journal.encoded_events())
    return {
        "journal_bytes_per_block": (used - payload) / len(journal),
        "payload_bytes_per_block": payload / len(journal),
    }


def latency(work: Work, seconds: float = 2.0) -> dict[str, float]:
    """Publish-to-receive p99 at a fixed rate of batches, ours without a batching window beside a bare PUB socket."""
    count = min(int(seconds * _LATENCY_RATE), len(work.publications))
    feed = _feed(batch_window_seconds=0)
    receiver = Receiver(feed.endpoints[0])
    sent, total = [], 0
    start = time.perf_counter()
    for index, (events, infos) in enumerate(work.publications[:count]):
        _sleep_until(start + index / _LATENCY_RATE)
        total += len(events[0].keys)
        sent.append((time.perf_counter(), total))
        feed.publish(events, infos)
    receiver.wait(total)
    mine = _delays(sent, receiver.arrivals)
    receiver.close()
    feed.close()

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pub = context.socket(zmq.PUB)
    receiver = Receiver(f"tcp://127.0.0.1:{pub.bind_to_random_port('tcp://127.0.0.1')}")
    encode = msgspec.msgpack.Encoder().encode
    payloads = [encode((1.5, batch, 0)) for batch in work.batches[:count]]
    sent, total = [], 0
    start = time.perf_counter()
    for index, payload in enumerate(payloads):
        _sleep_until(start + index / _LATENCY_RATE)
        total += len(work.batches[index])
        sent.append((time.perf_counter(), total))
        pub.send_multipart((b"", index.to_bytes(8, "big"), payload))
    receiver.wait(total)
    bare = _delays(sent, receiver.arrivals)
    receiver.close()
    pub.close(linger=0)
    context.term()
    return {
        "latency_batches_per_second": float(_LATENCY_RATE),
        "publish_to_receive_p50_microseconds": mine[0],
        "publish_to_receive_p99_microseconds": mine[1],
        "bare_socket_p50_microseconds": bare[0],
        "bare_socket_p99_microseconds": bare[1],
    }


def _sleep_until(when: float) -> None:
    left = when - time.perf_counter()
    if left > 0:
        time.sleep(left)


def _delays(sent: list[tuple[float, int]], arrivals: list[tuple[float, int]]) -> tuple[float, float]:
    """Return p50 and p99 in microseconds, matching cumulated event counts."""
    delays: list[float] = []
    position = 0
    for when, total in sent:
        while position < len(arrivals) and arrivals[position][1] < total:
            position += 1
        if position == len(arrivals):
            break
        delays.append((arrivals[position][0] - when) * 1e6)
    delays.sort()
    return delays[len(delays) // 2], delays[int(len(delays) * 0.99)]
