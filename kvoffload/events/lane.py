"""A lane: one endpoint's own sequence, journal, encoding and sockets, behind one lock.

The publisher's thread changes the journal and seals batches under the lock; the replay thread takes cuts under it,
always between two batches. Nothing is sent while it is held.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import zmq

from kvoffload.errors import ConfigError
from kvoffload.events.journal import Journal, SealedBatch
from kvoffload.events.residency import Residency
from kvoffload.events.settings import EndpointSettings, allow_ipv6, free_pair, tcp_port
from kvoffload.events.wire import Codec

logger = logging.getLogger(__name__)

SEND_HIGH_WATER_MARK = 100_000
"""Batches that one slow subscriber may lag before its connection loses some."""
REPLAY_HIGH_WATER_MARK = 1_000
_ALERT_SHARE = 0.9


@dataclass(slots=True)
class LaneCounters:
    """What a lane has sent."""

    batches: int = 0
    events: int = 0
    sent_bytes: int = 0
    subscribers: int = 0
    replays: int = 0
    incomplete_replays: int = 0
    replay_messages: int = 0
    replay_bytes: int = 0
    lives: int = 0
    replays_given_up: int = 0
    replays_refused: int = 0


class Lane:
    """One endpoint of the feed.

    Attributes:
        born: When it was made, in microseconds: tells lives apart that begin with the same number.

    Args:
        settings: How it speaks.
        context: Makes its sockets.
        clock: Wall clock in seconds.

    Raises:
        ConfigError: The endpoint cannot be bound; the message names the port and the next free pair.
    """

    def __init__(
        self, settings: EndpointSettings, context: zmq.Context[zmq.Socket[bytes]], clock: Callable[[], float]
    ) -> None:
        self.settings = settings
        self.codec = Codec(settings.encoding, settings.hash_mode, settings.rank)
        self.replay_codec = Codec(settings.encoding, settings.hash_mode, settings.rank)
        self.topic = settings.topic.encode()
        self.lock = threading.Lock()
        self.counters = LaneCounters(lives=1)
        self._clock = clock
        self._alerted = False
        self.born = int(clock() * 1e6)
        first = int(clock() * 1e6) if settings.sequence_start == "epoch" else 0
        self.journal = self._journal(first)
        self.residency = Residency(self.journal, settings.media)
        self.pub = context.socket(zmq.PUB)
        self.router: zmq.Socket[bytes] | None = None
        self._files: list[tuple[Path, int]] = []
        try:
            self.pub.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
            self.pub.setsockopt(zmq.LINGER, 1000)
            self.endpoint = self._attach("endpoint", self.pub, settings.endpoint, bind=settings.bind)
            self.replay_endpoint: str | None = None
            if settings.replay_endpoint is not None:
                self.router = context.socket(zmq.ROUTER)
                self.router.setsockopt(zmq.ROUTER_MANDATORY, 1)
                self.router.setsockopt(zmq.SNDHWM, REPLAY_HIGH_WATER_MARK)
                self.router.setsockopt(zmq.LINGER, 0)
                self.replay_endpoint = self._attach("replay_endpoint", self.router, settings.replay_endpoint, bind=True)
        except BaseException:
            self.close()
            raise

    def _attach(self, key: str, sock: zmq.Socket[bytes], endpoint: str, *, bind: bool) -> str:
        """Bind or connect a socket; remember the file that it makes, which ZeroMQ leaves behind."""
        found = attach(key, sock, endpoint, bind=bind)
        path = Path(found.removeprefix("ipc://"))
        if bind and found.startswith("ipc://") and path.exists():
            self._files.append((path, path.stat().st_ino))
        return found

    def _journal(self, first: int) -> Journal:
        settings = self.settings
        return Journal(
            self.codec,
            first_sequence=first,
            replay_window=settings.replay_window,
            sole_publisher=settings.sole_publisher,
            max_tombstones=settings.max_tombstones,
            clock=self._clock,
        )

    def start(self) -> None:
        """Announce the new life."""
        with self.lock:
            if self.settings.start_announcement:
                self.journal.start_life()

    def renew(self) -> None:
        """Start a new life when the numbers come to an end (strict replays answer every one of them); lock held."""
        settings = self.settings
        if settings.contiguity != "strict" or settings.sequence_start != "zero" or not settings.sole_publisher:
            return
        if self.journal.next >= settings.max_sequences:
            logger.warning("feed %s starts a new life at sequence %d", self.endpoint, self.journal.next)
            self.journal.new_life()
            self.counters.lives += 1
            self._alerted = False
        elif self.journal.next >= settings.max_sequences * _ALERT_SHARE and not self._alerted:
            self._alerted = True
            logger.warning("feed %s will start a new life at sequence %d", self.endpoint, settings.max_sequences)

    def send(self, batches: list[SealedBatch]) -> None:
        """Send sealed batches; never waits: a subscriber that does not keep up misses some and sees the gap."""
        counters = self.counters
        for batch in batches:
            try:
                self.pub.send_multipart((self.topic, batch.sequence, batch.payload), zmq.NOBLOCK)
            except zmq.Again:
                continue
            counters.batches += 1
            counters.events += batch.events
            counters.sent_bytes += len(batch.payload)

    def close(self) -> None:
        """Close the sockets, and remove their files, unless another process has bound there since."""
        self.pub.close()
        if self.router is not None:
            self.router.close()
        for path, number in self._files:
            with suppress(OSError):
                if path.stat().st_ino == number:
                    path.unlink()
        self._files.clear()


def attach(key: str, sock: zmq.Socket[bytes], endpoint: str, *, bind: bool) -> str:
    """Bind or connect a socket and return the endpoint that others can use; `key` of the configuration names it.

    Raises:
        ConfigError: It cannot be bound or connected.
    """
    port = tcp_port(endpoint)
    if bind and endpoint.startswith("ipc://") and (taken := _taken(endpoint.removeprefix("ipc://"))):
        raise ConfigError(f"events.{key} {endpoint!r} cannot be bound: {taken}; give another path")
    allow_ipv6(sock, endpoint)
    try:
        if not bind:
            sock.connect(endpoint)
            return endpoint
        sock.bind(f"{endpoint.rpartition(':')[0]}:*" if port == 0 else endpoint)
    except zmq.ZMQError as error:
        hint = ""
        if error.errno == zmq.EADDRINUSE and port:
            pair = free_pair(port + 1)
            hint = f"; port {port} is taken" + (f", {pair[0]} and {pair[1]} are free" if pair else "")
        elif endpoint.startswith("ipc://"):
            hint = (
                "; give a path of at most 107 bytes in a folder that may be written, or ipc://@NAME, which is no file"
            )
        elif bind and error.errno in {errno.EADDRNOTAVAIL, errno.ENODEV}:
            hint = "; give an address of this host, or tcp://*:PORT for all of them"
        elif bind and error.errno == errno.EACCES:
            hint = "; give a port from 1024 on: those below need privileges"
        raise ConfigError(f"events.{key} {endpoint!r} cannot be {'bound' if bind else 'used'}: {error}{hint}") from None
    return str(sock.getsockopt_string(zmq.LAST_ENDPOINT))


def _taken(path: str) -> str:
    """Say what a path holds that must not be lost; ZeroMQ replaces whatever it finds."""
    try:
        if path.startswith("@") or not Path(path).exists():
            return ""
        if not Path(path).is_socket():
            return "a file that is no socket is there"
    except OSError:  # a folder that may not be looked into: binding says so
        return ""
    with socket.socket(socket.AF_UNIX) as probe:
        return "" if probe.connect_ex(path) else "another process listens there"
