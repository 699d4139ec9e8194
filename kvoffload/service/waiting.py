"""Waiting on the loop: futures that are resolved in small batches, and waits with a deadline.

`Resolver` hands results to futures, at most `batch` per pass of the loop, so that ten thousand waiters of one store do
not stall everybody else. Waiting never owns anything: a waiter that gives up or is cancelled is forgotten at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvoffload.service.jobs import Job, Signal

T = TypeVar("T")
Wait = asyncio.Future[bool]


class Resolver:
    """Resolves futures of one loop in batches; loop thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, batch: int = 512) -> None:
        self.loop = loop
        self._batch = batch
        self._queue: deque[Wait] = deque()
        self._scheduled = False

    def resolve(self, future: Wait) -> None:
        """Give `future` True in this pass or a later one; one that is done by then is skipped."""
        self._queue.append(future)
        if not self._scheduled:
            self._scheduled = True
            self.loop.call_soon(self._run)

    def _run(self) -> None:
        self._scheduled = False
        queue = self._queue
        for _ in range(min(self._batch, len(queue))):
            future = queue.popleft()
            if not future.done():
                future.set_result(True)
        if queue:
            self._scheduled = True
            self.loop.call_soon(self._run)


async def wait_within(loop: asyncio.AbstractEventLoop, future: Wait, seconds: float | None) -> bool:
    """Wait for `future`; False when `seconds` passed first (None: no limit)."""
    timer = loop.call_later(max(0.0, seconds), give_up, future) if seconds is not None else None
    try:
        return await future
    finally:
        if timer is not None:
            timer.cancel()


async def wait_for_job(
    resolver: Resolver, job: Job, signal: Signal, seconds: float | None, interrupts: set[Wait] | None = None
) -> bool:
    """Wait until a signal of `job` happens; return whether it did within `seconds` and without an interrupt.

    Args:
        resolver: Resolves the future.
        job: The job.
        signal: One of its signals.
        seconds: Longest wait; None for no limit.
        interrupts: The future is put here while waiting; resolving it with False ends the wait.
    """
    if signal.happened:
        return True
    future: Wait = resolver.loop.create_future()

    def happened(_: Job) -> None:
        resolver.resolve(future)

    signal.listen(job, happened)
    if interrupts is not None:
        interrupts.add(future)
    try:
        return await wait_within(resolver.loop, future, seconds)
    finally:
        signal.forget(happened)
        if interrupts is not None:
            interrupts.discard(future)


async def wait_released(resolver: Resolver, jobs: Sequence[Job], seconds: float | None) -> bool:
    """Wait until no copy of any of `jobs` can touch GPU blocks; False when `seconds` passed first."""
    left = {job.id for job in jobs if not job.released}
    if not left:
        return True
    future: Wait = resolver.loop.create_future()

    def ended(job: Job) -> None:
        left.discard(job.id)
        if not left:
            resolver.resolve(future)

    for job in jobs:
        job.on_release(ended)
    try:
        return await wait_within(resolver.loop, future, seconds)
    finally:
        for job in jobs:
            job.ended.forget(ended)


def give_up(future: Wait) -> None:
    """End a wait with False, if it has not ended."""
    if not future.done():
        future.set_result(False)


async def in_thread(function: Callable[[], T], name: str, undo: Callable[[T], None] | None = None) -> T:
    """Run a blocking function in a thread of its own and wait for it.

    When the wait is cancelled, or the loop ends, the function runs on to its end, and then `undo` runs on its result,
    off the loop.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    lock = threading.Lock()
    abandoned = False
    unclaimed: list[T] = []

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # None only when T allows it

    def run() -> None:
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - carried to the waiter
            post(None, error)
            return
        with lock:
            unclaimed.append(result)
        if not post(result, None) or abandoned:
            take_back()

    def post(result: T | None, error: BaseException | None) -> bool:
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:  # the loop is gone, and with it the waiter
            return False
        return True

    def take_back() -> None:
        with lock:
            results, unclaimed[:] = unclaimed[:], []
        if undo is not None:
            for result in results:
                undo(result)

    threading.Thread(target=run, name=name).start()
    try:
        result = await future
    except BaseException:  # cancelled, or the loop was dropped; an error of `function` leaves nothing to undo
        abandoned = True
        if unclaimed:
            threading.Thread(target=take_back, name=name).start()
        raise
    unclaimed.clear()
    return result
