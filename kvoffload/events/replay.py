"""Replays on the wire: dead numbers, the end marker, and the thread that answers.

Requests arrive on a ROUTER socket as `[b""][what]`: eight bytes (a start sequence), `describe` or `snapshot`. Replay
messages are `[b""][topic][sequence][payload]`; the end is `[b""][b""][ff x 8][b""]`. A snapshot is
`[b""][b"snapshot"][JSON]`, then the announced blocks under the number of the cut, then the end marker. Anything else is
answered by a JSON error.

ROUTER_MANDATORY makes a full pipe an error instead of a silent loss: the message is kept and tried again, so a slow
reader gets everything, and the end marker too. Each replay sends a bounded share per turn; live publishing goes on in
another thread and never waits.

Only so many requests may be open: one more is answered at once by the end of its replay, or by a JSON error where a
snapshot or a description was asked for. A reader that got nothing of its gap asks again or starts over.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, cast

import zmq

from kvoffload.events.compaction import ReplayBatch, compact
from kvoffload.events.journal import Cut
from kvoffload.events.lane import Lane
from kvoffload.events.wire import END_SEQUENCE, Codec, sequence_frame

logger = logging.getLogger(__name__)

RELAXED_RUN = 1000
"""A relaxed replay leaves out runs of more dead numbers than this."""
MAX_ACTIVE = 8
"""Replays answered at once; more wait their turn. An answer of one message does not wait for them."""
MAX_OPEN = 1000
"""Requests that are answered or wait; one more is refused."""
SNAPSHOT_EVENTS = 1024
"""Events in one message of a snapshot."""
_TURN_MESSAGES, _TURN_BYTES = 512, 4 << 20
_STALL_SECONDS = 120.0
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_IDLE_POLL_MS, _BLOCKED_POLL_MS = 100, 2


def fill(
    cut: Cut, batches: Iterator[ReplayBatch], codec: Codec, *, skip_runs_over: int | None, topic: bytes = b""
) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Yield topic, sequence frame and payload of each message of a replay.

    Args:
        cut: What is replayed.
        batches: Its batches that say something.
        codec: Encodes.
        skip_runs_over: Leave out longer runs of dead numbers, but never the newest number; None: answer every number.
        topic: The topic frame.
    """
    empty = codec.payload(cut.stamp[8:], [])
    number = cut.start

    def dead(stop: int) -> Iterator[tuple[bytes, bytes, bytes]]:
        if skip_runs_over is None or stop - number <= skip_runs_over:
            for sequence in range(number, stop):
                yield topic, sequence.to_bytes(8, "big"), empty

    for batch in batches:
        yield from dead(batch.sequence)
        yield topic, batch.stamp[:8], codec.payload(batch.stamp[8:], batch.events)
        number = batch.sequence + 1
    if number <= cut.last:
        yield from dead(cut.last)
        yield topic, sequence_frame(cut.last), empty


def snapshot_payloads(cut: Cut, lane: Lane) -> Iterator[bytes]:
    """Yield the announced blocks, parents first, in payloads of a bounded number of events."""
    codec, ts8 = lane.replay_codec, cut.stamp[8:]
    for batch in compact(cut, codec, lane.journal.tiers):
        events = [event for event in batch.events if event != codec.cleared]
        for start in range(0, len(events), SNAPSHOT_EVENTS):
            yield codec.payload(ts8, events[start : start + SNAPSHOT_EVENTS])


class _Answer:
    """One request being answered: an iterator of messages and the one that did not fit."""

    def __init__(self, lane: Lane, identity: bytes, messages: Iterator[tuple[bytes, ...]], now: float) -> None:
        self.lane = lane
        self.identity = identity
        self.messages = messages
        self.pending: tuple[bytes, ...] | None = None
        self.broken = False
        self.progress_at = now

    def turn(self, now: float) -> bool | None:
        """Send one share: True when finished, False when more can be sent at once, None when the pipe is full."""
        router, counters = self.lane.router, self.lane.counters
        if router is None:
            return True
        # The bare socket's send: the convenient one costs more than all the rest of a dead number's message.
        send, identity, messages = super(zmq.Socket, router).send, self.identity, self.messages
        outcome: bool | None = False
        more, last, sent_bytes, sent = _MORE, int(zmq.NOBLOCK), 0, 0
        for _ in range(_TURN_MESSAGES):
            message = self.pending or next(messages, None)
            if message is None:
                outcome = True
                break
            try:
                send(identity, more)
                send(b"", more)
                for frame in message[:-1]:
                    send(frame, more)
                send(message[-1], last)
            except zmq.Again:
                self.pending, outcome = message, None
                break
            except zmq.ZMQError:  # the reader has gone
                outcome = True
                break
            self.pending = None
            sent += 1
            sent_bytes += len(message[-1])
            if sent_bytes > _TURN_BYTES:
                break
        counters.replay_messages += sent
        counters.replay_bytes += sent_bytes
        if sent:
            self.progress_at = now
        return outcome


class ReplayServer:
    """Answers the replay sockets of all lanes in one thread.

    Args:
        lanes: Whom to answer for.
        describe: Makes the answer to `describe` for a lane.
        on_tick: Called about ten times a second in this thread (subscriber counts).
        clock: Monotonic seconds.
        max_open: Requests that may be answered or wait; one more is refused.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        describe: Callable[[Lane], dict[str, Any]],
        on_tick: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        max_open: int = MAX_OPEN,
    ) -> None:
        self._lanes = {lane.router: lane for lane in lanes if lane.router is not None}
        self._describe = describe
        self._on_tick = on_tick
        self._clock = clock
        self._max_open = max_open
        self._refusing = False
        self._active: deque[_Answer] = deque()
        self._waiting: deque[_Answer] = deque()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvoffload-replay", daemon=True)

    @property
    def active(self) -> int:
        """Answers under way."""
        return len(self._active) + len(self._waiting)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Stop the thread; False when it did not end in time."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        poller = zmq.Poller()
        for router in self._lanes:
            poller.register(router, zmq.POLLIN)
        blocked = False
        tick_at = 0.0
        while not self._stop.is_set():
            wait = _IDLE_POLL_MS if not self._active else _BLOCKED_POLL_MS if blocked else 0
            try:
                for router, _ in poller.poll(wait):
                    self._take(cast("zmq.Socket[bytes]", router))
                if not self._lanes:
                    self._stop.wait(_IDLE_POLL_MS / 1000)
                blocked = self._turn()
                now = self._clock()
                if now >= tick_at:
                    tick_at = now + _IDLE_POLL_MS / 1000
                    self._on_tick()
            except Exception:
                logger.exception("the replay thread goes on after an error")
                self._stop.wait(0.1)

    def _turn(self) -> bool:
        """Give each active answer its share; return whether all of them are blocked."""
        while self._waiting and len(self._active) < MAX_ACTIVE:
            self._active.append(self._waiting.popleft())
        now, blocked = self._clock(), bool(self._active)
        for _ in range(len(self._active)):
            answer = self._active.popleft()
            try:
                outcome = answer.turn(now)
            except Exception:
                logger.exception("a replay on %s ends early", answer.lane.replay_endpoint)
                if answer.broken:
                    continue
                answer.broken, outcome = True, False
                answer.messages = iter([(b"", END_SEQUENCE, b"")])  # a reader must never wait for its end
            if outcome is True:
                blocked = False
                continue
            if outcome is None and now - answer.progress_at > _STALL_SECONDS:
                answer.lane.counters.replays_given_up += 1
                logger.warning("a replay on %s was given up: its reader has stopped", answer.lane.replay_endpoint)
                continue
            blocked = blocked and outcome is None
            self._active.append(answer)
        return blocked

    def _take(self, router: zmq.Socket[bytes]) -> None:
        lane = self._lanes[router]
        with suppress(zmq.Again):
            for _ in range(self._max_open):  # who asks without end must not keep the others from their answers
                identity, *frames = router.recv_multipart(zmq.NOBLOCK)
                request = frames[-1] if frames else b""
                if self.active >= self._max_open:
                    self._refuse(lane, router, identity, request)
                    continue
                long = len(request) == 8 and request != b"describe"  # a start sequence, or `snapshot`
                (self._waiting if long else self._active).append(
                    _Answer(lane, identity, self._messages(lane, request), self._clock())
                )
        self._refusing = self._refusing and self.active >= self._max_open // 2

    def _refuse(self, lane: Lane, router: zmq.Socket[bytes], identity: bytes, request: bytes) -> None:
        """Answer a request that finds no room: whoever waits for an end marker gets it."""
        lane.counters.replays_refused += 1
        if not self._refusing:
            self._refusing = True
            logger.warning("requests to %s are refused: %d are open", lane.replay_endpoint, self.active)
        answer: tuple[bytes, ...] = (b"", END_SEQUENCE, b"")
        if request in (b"describe", b"snapshot") or len(request) != 8:
            answer = (b"error", json.dumps({"error": f"busy: {self.active} requests are open, ask again"}).encode())
        with suppress(zmq.ZMQError):  # it has gone, or does not read
            router.send_multipart((identity, b"", *answer), zmq.NOBLOCK)

    def _messages(self, lane: Lane, request: bytes) -> Iterator[tuple[bytes, ...]]:
        if request == b"describe":
            yield b"describe", json.dumps(self._describe(lane)).encode()
        elif request == b"snapshot":
            yield from self._snapshot(lane)
        elif len(request) == 8:
            yield from self._replay(lane, int.from_bytes(request, "big"))
        else:
            error = {
                "error": f"unknown request {request[:64]!r}",
                "known": ["8 bytes: sequence", "describe", "snapshot"],
            }
            yield b"error", json.dumps(error).encode()

    def _replay(self, lane: Lane, start: int) -> Iterator[tuple[bytes, ...]]:
        with lane.lock:
            cut = lane.journal.cut(start)
        lane.counters.replays += 1
        if cut.incomplete:
            lane.counters.incomplete_replays += 1
            logger.warning(
                "a replay from %d on %s may leave dead blocks behind: %d removals were forgotten",
                start, lane.replay_endpoint, lane.journal.tombstones_discarded,
            )  # fmt: skip
        run = RELAXED_RUN if lane.settings.contiguity == "relaxed" else None
        batches = compact(cut, lane.replay_codec, lane.journal.tiers)
        yield from fill(cut, batches, lane.replay_codec, skip_runs_over=run, topic=lane.topic)
        yield b"", END_SEQUENCE, b""

    def _snapshot(self, lane: Lane) -> Iterator[tuple[bytes, ...]]:
        with lane.lock:
            cut = lane.journal.cut(lane.journal.first)
        head = {"epoch": cut.first, "life": lane.counters.lives, "cut": cut.last, "blocks": len(cut.live)}
        yield b"snapshot", json.dumps(head).encode()
        sequence = sequence_frame(max(cut.last, 0))
        for payload in snapshot_payloads(cut, lane):
            yield lane.topic, sequence, payload
        yield b"", END_SEQUENCE, b""
