"""`Link`: a rank's connection to one life of the deciding process."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time

from kvoffload.memory.region import SharedOffloadRegion
from kvoffload.service.ranks import meeting


class Link:
    """The connection to one life of the deciding process, and the region that came over it.

    Args:
        sock: The connection.
        pidfd: The process at its other end.
    """

    def __init__(self, sock: socket.socket, pidfd: int) -> None:
        self.sock = sock
        self.pidfd = pidfd
        self.region: SharedOffloadRegion | None = None

    def say(self, word: bytes) -> None:
        """Tell the deciding process; it may be gone."""
        with contextlib.suppress(OSError):
            self.sock.send(word, socket.MSG_DONTWAIT)

    def is_down(self) -> bool:
        """Whether the deciding process is gone or hung up."""
        return meeting.has_ended(self.pidfd) or meeting.has_hung_up(self.sock)

    def wait_down(self, timeout: float | None) -> bool:
        """Block until `is_down`; False when `timeout` seconds passed first."""
        deadline = None if timeout is None else time.monotonic() + timeout
        poller = select.poll()
        poller.register(self.sock, select.POLLIN)
        poller.register(self.pidfd, select.POLLIN)
        while not self.is_down():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            poller.poll(None if left is None else left * 1000)
        return True

    def hang_up(self) -> None:
        """End the connection, but keep the descriptors."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection, also where a fork holds it, and unmap the region."""
        self.hang_up()
        self.sock.close()
        os.close(self.pidfd)
        if self.region is not None:
            self.region.cleanup()
