"""A client of the replay socket: describe, snapshot, replay; of kvoffload's publisher and of vLLM's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import zmq

from kvoffload.errors import KVOffloadError
from kvoffload.events.settings import allow_ipv6, tcp_port
from kvoffload.events.wire import END_SEQUENCE, sequence_frame


class NoAnswer(KVOffloadError, TimeoutError):  # noqa: N818 - says what happened
    """The replay socket did not answer in time."""


class ReplayClient:
    """Asks one replay endpoint. Not thread-safe.

    Args:
        endpoint: The replay endpoint.
        context: ZeroMQ context.
        timeout: Seconds between two messages after which the publisher counts as gone.

    Raises:
        ConfigError: It is no ZeroMQ endpoint.
    """

    def __init__(self, endpoint: str, context: zmq.Context[zmq.Socket[bytes]], timeout: float = 2.0) -> None:
        tcp_port(endpoint)
        self.endpoint = endpoint
        self._context = context
        self._timeout_ms = int(timeout * 1000)
        self._socket: zmq.Socket[bytes] | None = None

    def describe(self) -> dict[str, Any] | None:
        """Return what the publisher says of itself; None for a publisher that is not ours.

        Raises:
            NoAnswer: Nobody answers, or the publisher is too busy.
        """
        frames = self._ask(b"describe")
        self._refused(frames)
        found: Any = None
        if len(frames) == 3 and frames[1] == b"describe":
            found = self._json(frames[2])
        self.close()
        return found if isinstance(found, dict) else None

    def snapshot(self) -> tuple[dict[str, Any], list[bytes]]:
        """Return the head of a snapshot and the payloads of the announced blocks.

        Raises:
            NoAnswer: The answer is not complete in time.
        """
        frames = self._ask(b"snapshot")
        self._refused(frames)
        head = self._json(frames[2]) if len(frames) == 3 and frames[1] == b"snapshot" else None
        if not isinstance(head, dict) or not isinstance(head.get("cut"), int):
            self.close()
            raise NoAnswer(f"{self.endpoint} answers a snapshot with something else: it is no publisher of kvoffload")
        payloads: list[bytes] = []
        while True:
            frames = self._receive()
            if len(frames) != 4:
                self.close()
                raise NoAnswer(f"{self.endpoint} breaks a snapshot off: ask again")
            if frames[2] == END_SEQUENCE:
                self.close()
                return head, payloads
            payloads.append(frames[3])

    def replay(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Yield sequence and payload of each message of a replay, up to its end marker.

        Raises:
            NoAnswer: It stops before its end.
        """
        frames = self._ask(sequence_frame(start))
        while len(frames) < 3 or frames[-2] != END_SEQUENCE:
            if len(frames) < 3 or len(frames[-2]) != 8:
                self.close()
                raise NoAnswer(f"{self.endpoint} answers a replay with something else")
            yield int.from_bytes(frames[-2], "big"), frames[-1]
            frames = self._receive()
        self.close()

    def close(self) -> None:
        """Drop the connection; the next request makes a new one, so that no late answer is mistaken for a new one."""
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None

    def _ask(self, request: bytes) -> list[bytes]:
        self.close()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        allow_ipv6(self._socket, self.endpoint)
        self._socket.connect(self.endpoint)
        self._socket.send_multipart((b"", request))
        return self._receive()

    def _refused(self, frames: list[bytes]) -> None:
        """Raise when the answer is an error of our publisher."""
        if len(frames) == 3 and frames[1] == b"error":
            error = self._json(frames[2])
            self.close()
            raise NoAnswer(f"{self.endpoint}: {error.get('error') if isinstance(error, dict) else error}")

    def _json(self, text: bytes) -> Any:  # noqa: ANN401 - JSON
        try:
            return json.loads(text)
        except ValueError as error:
            self.close()
            raise NoAnswer(f"{self.endpoint} answers with no JSON: it is no publisher of kvoffload") from error

    def _receive(self) -> list[bytes]:
        sock = self._socket
        if sock is None or not sock.poll(self._timeout_ms):
            self.close()
            raise NoAnswer(
                f"no answer from {self.endpoint} within {self._timeout_ms / 1000:g} s: give the "
                "replay_endpoint of a publisher that runs, or a longer timeout"
            )
        return sock.recv_multipart()
