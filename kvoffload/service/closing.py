"""Closing a service on its loop: bounded, once, and to the end even when the loop itself ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from kvoffload.service.engine import OffloadEngine
from kvoffload.service.waiting import WAITS_A_PASS, Resolver, in_thread, wait_released

logger = logging.getLogger(__name__)


class Closing:
    """One closing of one service.

    Args:
        engine: What to close; `begin_close` is called at once.
        resolver: Of the service's loop.
        detach: Stops the loop from calling the service back.
    """

    def __init__(self, engine: OffloadEngine, resolver: Resolver, detach: Callable[[], None]) -> None:
        self._engine = engine
        self._resolver = resolver
        self._detach = detach
        self._task: asyncio.Task[None] | None = None

    def start(self, timeout: float, interrupts: Sequence[Callable[[], None]]) -> None:
        """Begin; the rest runs as a task that callers of `wait` share."""
        self._engine.begin_close()
        self._task = self._resolver.loop.create_task(self._run(timeout, interrupts), name="kvoffload-close")
        self._task.add_done_callback(self._done)

    async def wait(self) -> None:
        """Wait for the end; cancelling the wait does not stop the closing."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def _run(self, timeout: float, interrupts: Sequence[Callable[[], None]]) -> None:
        engine = self._engine
        for number, interrupt in enumerate(interrupts, 1):
            interrupt()
            if not number % WAITS_A_PASS:
                await asyncio.sleep(0)
        await wait_released(self._resolver, engine.unreleased_jobs(), timeout)
        await in_thread(engine.stop_handlers, "kvoffload-close")
        engine.settle_close()
        self._detach()
        await in_thread(engine.drop_cache, "kvoffload-close")
        engine.raise_unclean()

    def _done(self, task: asyncio.Task[None]) -> None:
        """Note how it ended; when the loop cancelled it half-way, do the rest here and now."""
        if task.cancelled():
            self._finish_now()
        elif (error := task.exception()) is not None:
            logger.error("closing ended with: %s", error)
            if not self._engine.closed:
                self._finish_now()

    def _finish_now(self) -> None:
        try:
            self._engine.stop_handlers()
            self._engine.settle_close()
            self._detach()
            self._engine.drop_cache()
            self._engine.raise_unclean()
        except Exception as error:  # noqa: BLE001 - the loop ends: nobody is left to raise to
            logger.error("closing ended with: %s", error)  # noqa: TRY400 - the message says it all
