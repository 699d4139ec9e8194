"""Checks that every handler makes at its door: the owner process, and what `ready` may be on the host."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable

from kvoffload.errors import UsageError
from kvoffload.transfer.base import HOST_VISIBLE, Ready

HostWait = Callable[[float], bool]


class OwnerProcess:
    """Remembers the process that made an object; threads and mappings of handlers do not survive a fork."""

    __slots__ = ("_pid", "_what")

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()

    def check(self) -> None:
        """Refuse use in a forked child.

        Raises:
            UsageError: This is not the process that made the object; the message names both pids.
        """
        if os.getpid() != self._pid:
            raise UsageError(
                f"{self._what} belongs to process {self._pid} and was used in its fork, process {os.getpid()}: "
                "create it after the fork"
            )


def host_wait(ready: Ready) -> HostWait | None:
    """Return how to wait for `ready` on the host: its `wait(timeout) -> bool`, or None if the bytes are there already.

    Raises:
        UsageError: It is neither `"host-visible"` nor an object with a blocking `wait`.
    """
    if isinstance(ready, str) and ready == HOST_VISIBLE:
        return None
    wait = getattr(ready, "wait", None)
    if not callable(wait) or inspect.iscoroutinefunction(wait):
        raise UsageError(
            f'ready={ready!r}: the host backend takes "host-visible" or an object with wait(timeout) -> bool, '
            "such as threading.Event"
        )
    blocking: HostWait = wait
    return blocking
