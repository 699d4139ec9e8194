"""How the deciding process and its ranks meet: a unix socket over which identity, geometry and the region go.

The socket is abstract (no file is left by any kill) and only takes processes of the same user. The connection stays
open: its end, or the end of the process behind it (pidfd), says that the rank is gone.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from contextlib import suppress

from kvoffload.errors import ClosedError, ConfigError, UnsupportedError, UsageError
from kvoffload.memory.region import SharedOffloadRegion
from kvoffload.service.ranks.wire import PROTOCOL, Hello, Welcome, decode_hello, decode_welcome, encode

MAX_MESSAGE_BYTES = 1 << 16


def new_address() -> str:
    """Return an unused address for ranks to connect to."""
    return f"@kvoffload-{os.getpid()}-{secrets.token_hex(8)}"


def listen(address: str) -> socket.socket:
    """Return a listening socket.

    Args:
        address: `@name` for an abstract socket, or a path.

    Raises:
        UsageError: The address is taken.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        sock.bind(_socket_name(address))
    except OSError as error:
        sock.close()
        raise UsageError(f"ranks cannot meet at {address!r}: {error.strerror}; use another address") from error
    sock.listen(64)
    return sock


def _socket_name(address: str) -> str:
    return "\0" + address[1:] if address.startswith("@") else address


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
        UnsupportedError: The kernel has no pidfd (older than 5.3).
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise ClosedError(f"process {pid} is gone") from None
    except OSError as error:
        raise UnsupportedError(f"pidfd_open failed: {error.strerror}; Linux 5.3 or newer is needed") from error


def receive_hello(sock: socket.socket, timeout: float) -> Hello:
    """Read what a rank says of itself.

    Raises:
        ClosedError: It went away, said nothing in time, or said nonsense.
    """
    sock.settimeout(timeout)
    try:
        data = sock.recv(MAX_MESSAGE_BYTES)
        if not data:
            raise ClosedError("a rank connected and left")
        return decode_hello(data)
    except (OSError, ValueError) as error:
        raise ClosedError(f"a process connected but is no rank: {error}") from error
    finally:
        with suppress(OSError):
            sock.settimeout(None)


def why_refused(hello: Hello, first: Hello, version: str) -> str | None:
    """Return why a rank cannot join a group whose first rank is `first`; both sides are named. None: it can."""
    if hello.protocol != PROTOCOL or hello.version != version:
        return (
            f"rank {hello.rank} runs kvoffload {hello.version} (protocol {hello.protocol}), the deciding process runs "
            f"{version} (protocol {PROTOCOL}): install the same version"
        )
    if not 0 <= hello.rank < first.world_size:
        return f"rank {hello.rank} is not in 0..{first.world_size - 1}"
    names = ("world_size", "page_sizes", "group_page_sizes", "gpu_block_sizes", "block_size_factor")
    for name in names:
        mine, theirs = getattr(hello, name), getattr(first, name)
        if mine != theirs:
            return f"rank {hello.rank} has {name} {mine}, rank {first.rank} has {theirs}: they must be equal"
    return None


def connect(address: str, timeout: float) -> socket.socket:
    """Connect to the deciding process, waiting for it to appear.

    Raises:
        ClosedError: It did not appear within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            sock.connect(_socket_name(address))
        except OSError as error:
            sock.close()
            if time.monotonic() >= deadline:
                raise ClosedError(f"nobody listens at {address!r} after {timeout} s: {error.strerror}") from error
            time.sleep(0.02)
        else:
            return sock


def introduce(sock: socket.socket, hello: Hello, timeout: float) -> tuple[Welcome, SharedOffloadRegion]:
    """Say who we are; return the answer and the region.

    Raises:
        ConfigError: The deciding process refused us; the message says why.
        ClosedError: It went away.
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
        region = SharedOffloadRegion.receive(sock, hello.rank)
        sock.send(b"ready")
    except OSError as error:
        raise ClosedError(f"the deciding process cannot be reached: {error}") from error
    sock.settimeout(None)
    return welcome, region
