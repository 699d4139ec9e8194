"""Who listens: subscriber counts from socket monitors, and the warnings about a feed that nobody can hear."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvoffload.events.lane import Lane
from kvoffload.events.settings import is_loopback

logger = logging.getLogger(__name__)

_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH

SILENCE_SECONDS = 60.0
"""Time without a subscriber after which one warning is logged."""


class SilenceWatch:
    """Says once that nobody listens. Pure: time comes in as an argument."""

    def __init__(self, started_at: float) -> None:
        self._alone_since: float | None = started_at
        self._warned = False

    def check(self, now: float, subscribers: int) -> bool:
        """Return True when the warning is due."""
        if subscribers > 0:
            self._alone_since, self._warned = None, False
            return False
        if self._alone_since is None:
            self._alone_since = now
        if self._warned or now - self._alone_since < SILENCE_SECONDS:
            return False
        self._warned = True
        return True


class Listeners:
    """Counts the subscribers of all lanes. `poll` belongs to one thread; the sockets are made by the caller's.

    Args:
        lanes: Whose subscribers.
        now: Monotonic time.
        on_join: Told of each lane that got a subscriber, a tick after it connected.

    A monitor, not XPUB: it leaves the bytes that consumers exchange with the publisher as vLLM's are.
    """

    def __init__(self, lanes: Sequence[Lane], now: float, on_join: Callable[[Lane], None]) -> None:
        self._monitors = []
        self._on_join = on_join
        self._joined: set[int] = set()
        self._strangers = [0] * len(lanes)
        for lane in lanes:
            events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILED
            self._monitors.append((lane, lane.pub.get_monitor_socket(events), SilenceWatch(now)))
            if lane.settings.bind and lane.endpoint.startswith("tcp://") and is_loopback(lane.endpoint):
                logger.warning("feed %s is bound to loopback: only this host can subscribe", lane.endpoint)

    def poll(self, now: float) -> None:
        """Update the counts of all lanes and warn when nobody has listened for a minute."""
        for index, (lane, monitor, watch) in enumerate(self._monitors):
            if index in self._joined:  # one tick later: its subscription has crossed
                self._joined.remove(index)
                self._on_join(lane)
            with suppress(zmq.Again):
                while True:
                    event = recv_monitor_message(monitor, zmq.NOBLOCK)["event"]
                    if event & _FAILED:  # a probe, not a subscriber: its disconnect follows
                        self._strangers[index] += 1
                        continue
                    if event == zmq.EVENT_DISCONNECTED and self._strangers[index]:
                        self._strangers[index] -= 1
                        continue
                    step = 1 if event == zmq.EVENT_HANDSHAKE_SUCCEEDED else -1
                    lane.counters.subscribers = max(lane.counters.subscribers + step, 0)
                    if step > 0:
                        self._joined.add(index)
            if watch.check(now, lane.counters.subscribers):
                logger.warning("nobody has listened to feed %s for %.0f s", lane.endpoint, SILENCE_SECONDS)

    def close(self) -> None:
        """Detach the monitors."""
        for lane, monitor, _ in self._monitors:
            lane.pub.disable_monitor()
            monitor.close()
