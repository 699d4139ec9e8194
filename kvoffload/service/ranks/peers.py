"""What the deciding process holds of each process that has connected to it."""

from __future__ import annotations

import os
import socket
import weakref
from contextlib import suppress
from dataclasses import dataclass

from kvoffload.service.ranks.wire import Hello


@dataclass(slots=True, eq=False)
class Peer:
    """A connected rank process.

    Attributes:
        identity: Its name on the zmq channel.
        invited: Welcome and region were sent.
        ready: It said so.
        greeted: Its first message came on the zmq channel.
    """

    hello: Hello
    sock: socket.socket
    pidfd: int
    identity: bytes
    invited: bool = False
    ready: bool = False
    greeted: bool = False

    def close(self) -> None:
        """End the connection, also where a fork holds it."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        os.close(self.pidfd)


@dataclass(slots=True)
class Stranger:
    """A process that has connected and not yet said who it is."""

    sock: socket.socket
    pid: int
    until_seconds: float


_listeners: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def note_listener(listener: socket.socket) -> None:
    """Remember a listening socket, so that no fork keeps its address taken."""
    _listeners.add(listener)


def _free_addresses_in_fork() -> None:
    """Close a fork's copies of listening sockets: they would keep the address taken when this process has gone."""
    for listener in _listeners:
        listener.close()


os.register_at_fork(after_in_child=_free_addresses_in_fork)
