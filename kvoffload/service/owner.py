"""Who may call an engine: the one thread of the one process that owns it, from its start to its close."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, ClassVar

from kvoffload.errors import ClosedError, UsageError

_NOT_STARTED = "the engine was not started: use `with OffloadEngine(...)` or call start() and adopt()"


def _name(ident: int | None) -> str:
    return next((f"{thread.name!r}" for thread in threading.enumerate() if thread.ident == ident), f"{ident}")


class SingleOwner:
    """Refuses calls before the start, after the close, from another thread and after fork."""

    _MADE_BY_START: ClassVar[frozenset[str]] = frozenset()
    """Attributes that are not there before the start; who asks for one then is told to start."""

    def __init__(self) -> None:
        self._owner: int | None = None
        self._pid = os.getpid()
        self._started = False
        self._closed = False

    def adopt(self) -> None:
        """Make the calling thread the owner."""
        self._owner = threading.get_ident()

    def check(self) -> None:
        """Refuse use after close, from another thread, or after fork.

        Raises:
            ClosedError: The engine is closed.
            UsageError: Not started, another thread, or another process than the owner.
        """
        if self._closed:
            raise ClosedError("the engine is closed: make a new one")
        if self._owner != threading.get_ident() or self._pid != os.getpid():
            self.check_owner()

    def check_owner(self) -> None:
        """Refuse use before the start, from another thread, or after fork; a closed engine is fine.

        Raises:
            UsageError: Not started, another thread, or another process than the owner.
        """
        if self._owner == threading.get_ident() and self._pid == os.getpid():
            return
        if not self._started:
            raise UsageError(_NOT_STARTED)
        if self._pid != os.getpid():
            raise UsageError(
                f"the engine belongs to process {self._pid}; it cannot be used after fork ({os.getpid()}): "
                "make one after the fork"
            )
        raise UsageError(
            f"the engine belongs to thread {_name(self._owner)}, not to {_name(threading.get_ident())}: call it there "
            "(an OffloadService on its loop, by loop.call_soon_threadsafe or asyncio.run_coroutine_threadsafe), or "
            "adopt() an OffloadEngine here"
        )

    if not TYPE_CHECKING:  # checkers know the parts; at run time they are not there before the start

        def __getattr__(self, name: str) -> object:
            if name in self._MADE_BY_START:
                raise UsageError(_NOT_STARTED)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def is_foreign_process(self) -> bool:
        """This process is a fork of the engine's."""
        return self._pid != os.getpid()

    @property
    def owned_here(self) -> bool:
        """The calling thread is the owner."""
        return self._owner == threading.get_ident() and self._pid == os.getpid()

    @property
    def closed(self) -> bool:
        """Nothing can be called any more."""
        return self._closed
