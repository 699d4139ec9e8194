"""The subscriber: one feed as a gapless stream of events, with what a consumer must know in between.

It subscribes first and asks for a snapshot second; live batches wait in the socket meanwhile. Then each batch must
carry the number after the one before. On a gap it asks for a replay; when the publisher began a new life, or the gap
cannot be closed, it starts over from a snapshot: the consumer gets `SourceReset`, forgets the source, and hears
everything again.

A publisher that beats (an empty batch after some silence) and is not heard for some beats is asked whether something
was missed; when it does not answer either, the subscription is *silent*: what it said last may be out of date.

A plain vLLM publisher is read too: without snapshots, from as far back as its replay reaches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import zmq

from kvoffload.events.client import NoAnswer, ReplayClient
from kvoffload.events.settings import allow_ipv6, rank_endpoint, tcp_port
from kvoffload.events.wire import Event, WireError, decode_batch

BEATS_BEFORE_SILENCE = 3.0
"""Heartbeats without a word after which a publisher is asked, and silent if it does not answer."""


@dataclass(frozen=True, slots=True)
class Synced:
    """From here on the events tell the whole truth; `sequence` is the last number applied."""

    sequence: int


@dataclass(frozen=True, slots=True)
class SourceReset:
    """Forget all that this source said; what follows is everything again."""

    reason: str


@dataclass(frozen=True, slots=True)
class GapRecovered:
    """`numbers` were missed and have been replayed."""

    numbers: int


@dataclass(frozen=True, slots=True)
class Unrecoverable:
    """Something is missing that this publisher cannot tell again."""

    why: str


Item = Event | Synced | SourceReset | GapRecovered | Unrecoverable


class Subscription:
    """An iterator over one feed. Belongs to one thread.

    Args:
        endpoint: Where the feed is published.
        replay_endpoint: Where replays are answered; "next" is the port after the feed's; None: nowhere.
        topic: Prefix of the topics to read.
        timeout: Seconds without an answer after which a replay socket counts as silent.
        clock: Monotonic seconds.

    Attributes:
        heard_at: When the publisher last said something, on the clock; when it was never heard: the start.

    Raises:
        ConfigError: An endpoint is none of ZeroMQ's.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = "next",
        *,
        topic: str = "",
        timeout: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if replay_endpoint == "next":
            replay_endpoint = rank_endpoint(endpoint, 1) if tcp_port(endpoint) else None
        self.endpoint, self.replay_endpoint = endpoint, replay_endpoint
        self.description: dict[str, Any] | None = None
        self.decode_errors = 0
        self.gaps = 0
        self.resets = 0
        for each in (endpoint, replay_endpoint):
            if each is not None:
                tcp_port(each)
        self._clock = clock
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._topic = topic
        self._sub = self._connect()
        self._client = None if replay_endpoint is None else ReplayClient(replay_endpoint, self._context, timeout)
        self._expected: int | None = None
        self._last_live = -1
        self.heard_at = self._asked_at = clock()
        self._synced = False

    def _connect(self) -> zmq.Socket[bytes]:
        sub = self._context.socket(zmq.SUB)
        allow_ipv6(sub, self.endpoint)
        sub.setsockopt(zmq.RCVHWM, 0)
        sub.setsockopt(zmq.RECONNECT_IVL, 50)
        sub.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        sub.setsockopt_string(zmq.SUBSCRIBE, self._topic)
        sub.connect(self.endpoint)
        return sub

    @property
    def sequence(self) -> int:
        """The last number applied; -1 before the first."""
        return -1 if self._expected is None else self._expected - 1

    @property
    def silent_seconds(self) -> float:
        """Time since the publisher last said something, live or in answer."""
        return max(0.0, self._clock() - self.heard_at)

    @property
    def silent(self) -> bool:
        """It beats, but was not heard for several beats and does not answer: it may be gone."""
        return is_silent(self.heartbeat_seconds, self.silent_seconds)

    @property
    def heartbeat_seconds(self) -> float:
        """Seconds between the publisher's heartbeats; 0 when it does not beat, or is not known."""
        return float((self.description or {}).get("heartbeat_seconds") or 0.0)

    def poll(self, timeout: float = 0.1) -> Iterator[Item]:
        """Yield what is there within `timeout` seconds; ends when that is over and nothing waits."""
        if not self._synced:
            yield from self._start_over("start")
        deadline = self._clock() + timeout
        while self._sub.poll(max(int((deadline - self._clock()) * 1000), 0)):
            frames = self._sub.recv_multipart()
            if len(frames) == 3 and len(frames[1]) == 8:
                self._hear()
                yield from self._live(int.from_bytes(frames[1], "big"), frames[2])
            if self._clock() >= deadline:
                break
        yield from self._doubt()

    def __iter__(self) -> Iterator[Item]:
        """Yield items for ever."""
        while True:
            yield from self.poll(1.0)

    def close(self) -> None:
        """Close the sockets."""
        if self._client is not None:
            self._client.close()
        self._sub.close(linger=0)
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _live(self, sequence: int, payload: bytes) -> Iterator[Item]:
        if sequence <= self._last_live:  # one publisher's live numbers only grow
            yield from self._start_over(f"the sequence went back from {self._last_live} to {sequence}")
        self._last_live = sequence
        if self._expected is None:
            self._expected = sequence
        if sequence < self._expected:
            return  # a replay or snapshot was faster
        if sequence > self._expected:
            yield from self._gap(sequence)
            if not self._synced or sequence < self.sequence + 1:
                return
        self._expected = sequence + 1
        yield from self._decode(payload)

    def _gap(self, sequence: int) -> Iterator[Item]:
        expected = self.sequence + 1
        self.gaps += 1
        if self._client is None:
            yield Unrecoverable(f"numbers {expected} to {sequence - 1} were lost and there is no replay endpoint")
            self._expected = sequence
            return
        try:
            if self._new_life():
                yield from self._start_over("the publisher began a new life")
                return
            if self._forgotten(expected):  # a replay might leave dead blocks, a snapshot does not
                yield from self._start_over("the publisher forgot some removals of the gap")
                return
            first: int | None = None
            for number, payload in self._client.replay(expected):
                if first is None and self.description is None and number > expected:
                    yield Unrecoverable(f"numbers {expected} to {number - 1} are older than the publisher's replay")
                first = number if first is None else first
                if number >= self.sequence + 1:
                    yield from self._decode(payload)
                    self._expected = number + 1
        except NoAnswer as error:
            yield from self._start_over(str(error))
            return
        if self.description is None and (first is None or first > expected):
            if first is None:
                yield Unrecoverable(f"numbers {expected} to {sequence - 1} are older than the publisher's replay")
            self._expected = max(self.sequence + 1, sequence)
            return
        if self.sequence + 1 < sequence:  # refused, or broken off: else it reaches our publisher's newest number
            yield from self._start_over("the replay ended before the gap was closed")
            return
        yield GapRecovered(sequence - expected)

    def _forgotten(self, sequence: int) -> bool:
        """The publisher may have discarded removals since that number."""
        told = self.description
        return bool(told and sequence < told["oldest_sequence"] and told["limits"]["tombstones_discarded"])

    def _doubt(self) -> Iterator[Item]:
        """After some silence of a publisher that beats, ask whether something was missed."""
        now, last = self._clock(), max(self.heard_at, self._asked_at)
        if self._client is None or not is_silent(self.heartbeat_seconds, now - last):
            return
        try:
            if self._new_life():
                yield from self._start_over("the publisher began a new life")
            elif self.description is not None and self.description["next_sequence"] > self.sequence + 1:
                yield from self._gap(self.description["next_sequence"])
        except NoAnswer:
            return  # it is gone; whatever comes next tells more
        finally:
            self._asked_at = self._clock()

    def _hear(self) -> None:
        self.heard_at = self._clock()

    def _new_life(self) -> bool:
        before, client = self.description, self._client
        if before is None or client is None:
            return False
        self.description = client.describe() or before
        self._hear()
        return bool(before["life_id"] != self.description["life_id"])

    def _start_over(self, reason: str) -> Iterator[Item]:
        if self._synced:  # batches of the life before must not be taken for the new one's
            self._sub.close(linger=0)
            self._sub = self._connect()
        self.resets += 1
        self._last_live = -1
        self._synced = True
        yield SourceReset(reason)
        if self._client is None:
            self._expected = None
            yield Unrecoverable("there is no replay endpoint: blocks stored before now are unknown")
            return
        try:
            self.description = self._client.describe()
            if self.description is None:
                yield from self._start_from_replay(self._client)
                return
            head, payloads = self._client.snapshot()
            self._hear()
        except NoAnswer as error:
            self._expected = None
            self._synced = False
            yield Unrecoverable(str(error))
            return
        for payload in payloads:
            yield from self._decode(payload)
        self._expected = int(head["cut"]) + 1
        yield Synced(self.sequence)

    def _start_from_replay(self, client: ReplayClient) -> Iterator[Item]:
        self._expected = None
        for number, payload in client.replay(0):
            if self._expected is None and number > 0:
                yield Unrecoverable(f"the publisher's replay begins at {number}: older blocks are unknown")
            yield from self._decode(payload)
            self._expected = number + 1
        yield Synced(self.sequence)

    def _decode(self, payload: bytes) -> Iterator[Event]:
        try:
            batch = decode_batch(payload)
        except WireError:
            self.decode_errors += 1
            return
        self.decode_errors += batch.skipped
        yield from batch.events


def is_silent(heartbeat_seconds: float, silent_seconds: float) -> bool:
    """Tell whether a publisher that beats was not heard for so long that it may be gone."""
    return 0 < BEATS_BEFORE_SILENCE * heartbeat_seconds <= silent_seconds


def subscribe(
    endpoint: str, replay_endpoint: str | None = "next", *, topic: str = "", timeout: float = 2.0
) -> Subscription:
    """Subscribe to a feed; iterate over the result, or `poll` it.

    Args:
        endpoint: Where the feed is published.
        replay_endpoint: Where replays are answered; "next" is the port after the feed's; None: nowhere.
        topic: Prefix of the topics to read.
        timeout: Seconds without an answer after which a replay socket counts as silent.
    """
    return Subscription(endpoint, replay_endpoint, topic=topic, timeout=timeout)
