"""How the deciding process and its ranks meet: a unix socket over which identity, geometry and the region go.

The socket is abstract unless a path is given (no file is left by any kill) and only takes processes of the same user.
The connection stays open: its end, or the end of the process behind it (pidfd), says that the other side is gone. Both
are watched, since a fork can hold a connection open longer than the process that made it lives.
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path

from kvoffload.errors import ClosedError, ConfigError, UnsupportedError, UsageError
from kvoffload.memory.region import SharedOffloadRegion
from kvoffload.service.ranks.wire import Hello, Welcome, decode_hello, decode_welcome, encode

MAX_MESSAGE_BYTES = 1 << 16
_RETRY_SECONDS = 0.02


def new_address() -> str:
    """Return an unused address for ranks to connect to."""
    return f"@kvoffload-{os.getpid()}-{secrets.token_hex(8)}"


def listen(address: str) -> socket.socket:
    """Return a listening socket that does not block.

    Args:
        address: `@name` for an abstract socket, or a path; a socket file that nobody listens at is replaced.

    Raises:
        UsageError: The address is taken, or cannot be used.
    """
    if not address:
        raise UsageError("the address where ranks meet is empty: no rank could connect to it")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        try:
            sock.bind(_socket_name(address))
        except OSError as error:
            if error.errno != errno.EADDRINUSE or address.startswith("@") or _is_alive(address):
                raise
            if not Path(address).is_socket():
                raise UsageError(f"ranks cannot meet at {address!r}: it is no socket; use another address") from None
            Path(address).unlink(missing_ok=True)
            sock.bind(address)
        sock.listen(64)
        sock.setblocking(False)
    except UsageError:
        sock.close()
        raise
    except OSError as error:
        sock.close()
        why = error.strerror or "it is longer than the 107 bytes of a socket's address"
        raise UsageError(f"ranks cannot meet at {address!r}: {why}; use another address") from error
    return sock


def remove(address: str) -> None:
    """Remove the socket file of an address, if it has one."""
    if not address.startswith("@"):
        with suppress(OSError):
            Path(address).unlink()


def _socket_name(address: str) -> str:
    return "\0" + address[1:] if address.startswith("@") else address


def _is_alive(address: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as probe:
        try:
            probe.connect(address)
        except OSError as error:
            return error.errno != errno.ECONNREFUSED
    return True


def peer_pid(sock: socket.socket) -> int:
    """Return the process behind a connection.

    Raises:
        UsageError: It belongs to another user.
    """
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if uid != os.getuid():
        raise UsageError(f"process {pid} belongs to user {uid}, not to {os.getuid()}: it may not join")
    return int(pid)


def open_pidfd(pid: int) -> int:
    """Return a descriptor that becomes readable when the process is gone.

    Raises:
        ClosedError: It is gone already.
        UnsupportedError: The kernel has no pidfd (older than 5.3), or the process is in another pid namespace.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise ClosedError(f"process {pid} is gone") from None
    except OSError as error:
        raise UnsupportedError(
            f"process {pid} cannot be watched (pidfd_open: {error.strerror}): Linux 5.3 or newer is needed, and all "
            "ranks in one pid namespace"
        ) from error


def has_ended(pidfd: int) -> bool:
    """Return whether the process behind a pidfd is gone."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


def has_hung_up(sock: socket.socket) -> bool:
    """Return whether the other end of a connection was closed; never blocks."""
    try:
        return not sock.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def read_hello(sock: socket.socket) -> Hello:
    """Read what a rank says of itself; it is there.

    Raises:
        ClosedError: It went away, or said nonsense.
    """
    try:
        data = sock.recv(MAX_MESSAGE_BYTES)
        if not data:
            raise ClosedError("it connected and left")
        return decode_hello(data)
    except (OSError, ValueError) as error:
        raise ClosedError(f"it is no rank: {error}") from error


def connect(address: str, timeout: float) -> tuple[socket.socket, int]:
    """Connect to the deciding process, waiting for it to appear; return the connection and its pidfd.

    Raises:
        ClosedError: It did not appear within `timeout` seconds.
        UsageError: Another user's process listens there.
    """
    deadline = time.monotonic() + timeout
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            sock.settimeout(max(_RETRY_SECONDS, deadline - time.monotonic()))
            sock.connect(_socket_name(address))
            pidfd = open_pidfd(peer_pid(sock))
            if not has_ended(pidfd):
                return sock, pidfd
            os.close(pidfd)
            why = "the process that listened is gone, a fork of it holds the socket"
            sock.close()
        except (OSError, ClosedError) as error:
            sock.close()
            why = str(error)
        except BaseException:
            sock.close()
            raise
        if time.monotonic() >= deadline:
            raise ClosedError(
                f"nobody listens at {address!r} after {timeout} s: {why}; start the deciding process first"
            )
        time.sleep(_RETRY_SECONDS)


def introduce(sock: socket.socket, hello: Hello, timeout: float) -> tuple[Welcome, SharedOffloadRegion]:
    """Say who we are; return the answer and the region.

    Raises:
        ConfigError: The deciding process refused us; the message says why.
        ClosedError: It went away, or did not answer in time.
    """
    sock.settimeout(timeout)
    try:
        sock.send(encode(hello))
        data = sock.recv(MAX_MESSAGE_BYTES)
        if not data:
            raise ClosedError("the deciding process went away while this rank waited to join")
        welcome = decode_welcome(data)
        if welcome.refusal is not None:
            raise ConfigError(welcome.refusal)
        if welcome.given_up is not None:
            raise ClosedError(f"the deciding process went away: {welcome.given_up}")
        region = SharedOffloadRegion.receive(sock, hello.rank)
    except TimeoutError as error:
        raise ClosedError(f"the deciding process did not let this rank in within {timeout} s") from error
    except OSError as error:
        raise ClosedError(f"the deciding process cannot be reached: {error}") from error
    sock.settimeout(None)
    return welcome, region
