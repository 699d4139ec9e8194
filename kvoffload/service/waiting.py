"""Waiting on the loop: futures that are resolved in small batches, and waits with a deadline.

`Resolver` hands results to futures, at most `batch` per pass of the loop, so that ten thousand waiters of one store do
not stall everybody else. Waiting never owns anything: a cancelled waiter leaves nothing behind but a done future.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from kvoffload.service.jobs import Job

T = TypeVar("T")


class Resolver:
    """Resolves futures of one loop in batches; loop thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, batch: int = 512) -> None:
        self._loop = loop
        self._batch = batch
        self._queue: deque[tuple[asyncio.Future[object], object]] = deque()
        self._scheduled = False

    def resolve(self, future: asyncio.Future[object], value: object) -> None:
        """Give `future` its value in this pass or a later one; a cancelled future is skipped."""
        self._queue.append((future, value))
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        self._scheduled = False
        queue = self._queue
        for _ in range(min(self._batch, len(queue))):
            future, value = queue.popleft()
            if not future.done():
                future.set_result(value)
        if queue:
            self._scheduled = True
            self._loop.call_soon(self._run)


async def wait_for_job(
    resolver: Resolver,
    loop: asyncio.AbstractEventLoop,
    subscribe: Callable[[Callable[[Job], None]], None],
    seconds: float | None,
    interrupts: set[asyncio.Future[object]] | None = None,
) -> bool:
    """Wait until `subscribe`'s callback fires; return whether it did within `seconds` and without an interrupt.

    Args:
        resolver: Resolves the future.
        loop: The running loop.
        subscribe: `job.on_result` or `job.on_release`.
        seconds: Longest wait; None for no limit.
        interrupts: The future is put here while waiting; resolving it with False ends the wait.
    """
    future: asyncio.Future[object] = loop.create_future()
    subscribe(lambda _: resolver.resolve(future, True))
    timer = loop.call_later(max(0.0, seconds), give_up, future) if seconds is not None else None
    if interrupts is not None:
        interrupts.add(future)
    try:
        return bool(await future)
    finally:
        if timer is not None:
            timer.cancel()
        if interrupts is not None:
            interrupts.discard(future)


def give_up(future: asyncio.Future[object]) -> None:
    """End a wait with False, if it has not ended."""
    if not future.done():
        future.set_result(False)


async def in_thread(function: Callable[[], T], name: str) -> T:
    """Run a blocking function in a thread of its own and wait for it.

    When the wait is cancelled the function runs on to its end; its result is dropped.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # None only when T allows it

    def run() -> None:
        try:
            result, error = function(), None
        except BaseException as caught:  # noqa: BLE001 - carried to the waiter
            result, error = None, caught
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:  # the loop is gone, and with it the waiter
            return

    threading.Thread(target=run, name=name).start()
    return await future
