"""Waiting on the loop: futures that are resolved in small batches, and waits with a deadline.

`Resolver` hands results to futures, at most `batch` per pass of the loop, so that ten thousand waiters of one store do
not stall everybody else: a resumed load takes some 40 to 100 microseconds, a pass 3 milliseconds. Waiting never owns
anything: a waiter that gives up or is cancelled is forgotten at once.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvoffload.service.jobs import Job, Signal

T = TypeVar("T")
Wait = asyncio.Future[bool]


WAITS_A_PASS = 32
"""Waits that end in one pass of the loop."""


class Resolver:
    """Ends waits of one loop, in batches: with True when what they wait for is there, with False when time is up.

    Deadlines are kept in one heap with one timer: a timer of the loop for each of ten thousand waiters costs more than
    the waits themselves. Loop thread only.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, batch: int = WAITS_A_PASS) -> None:
        self.loop = loop
        self._batch = batch
        self._queue: deque[Wait] = deque()
        self._scheduled = False
        self._left = 0
        self._deadlines: list[tuple[float, int, Wait]] = []
        self._numbers = itertools.count()
        self._num_over = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._open: set[Wait] = set()
        self._closed = False

    def resolve(self, future: Wait) -> None:
        """Give `future` True now, or in a later pass when this one had its share; one that is done is skipped."""
        if not self._scheduled:
            self._scheduled = True
            self._left = self._batch
            self.loop.call_soon(self._run)
        if self._queue or not self._left:
            self._queue.append(future)
        elif not future.done():
            self._left -= 1
            future.set_result(True)

    def _run(self) -> None:
        """A new pass."""
        queue, self._left = self._queue, self._batch
        while queue and self._left:
            future = queue.popleft()
            if not future.done():
                self._left -= 1
                future.set_result(True)
        self._scheduled = bool(queue) or not self._left
        if self._scheduled:
            self.loop.call_soon(self._run)

    async def wait(self, future: Wait, seconds: float | None) -> bool:
        """Wait for `future`; False when `seconds` passed first (None: no limit), or the resolver was closed."""
        if self._closed:
            return future.done() and future.result()
        self._open.add(future)
        if seconds is not None:
            due = self.loop.time() + max(0.0, seconds)
            heapq.heappush(self._deadlines, (due, next(self._numbers), future))
            if self._timer is None or due < self._timer_at:
                self._set_timer(due)
        try:
            return await future
        finally:
            self._open.discard(future)
            if seconds is not None:
                self._over()

    def _set_timer(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = due
        self._timer = self.loop.call_at(due, self._expire)

    def _expire(self) -> None:
        """End the waits whose time is up, a batch of them in each pass."""
        self._timer = None
        heap, now = self._deadlines, self.loop.time()
        for _ in range(self._batch):
            if not heap or heap[0][0] > now:
                break
            give_up(heapq.heappop(heap)[2])
        if heap:
            self._set_timer(max(now, heap[0][0]))

    def _over(self) -> None:
        """A wait is over; forget those that are once they are most of the heap."""
        self._num_over += 1
        if self._num_over > 64 and 2 * self._num_over > len(self._deadlines):
            self._num_over = 0
            self._deadlines = [entry for entry in self._deadlines if not entry[2].done()]
            heapq.heapify(self._deadlines)

    def close(self) -> None:
        """End every wait that is left, and every later one, with False, and stop the timer."""
        self._closed = True
        for future in list(self._open):
            give_up(future)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._deadlines.clear()


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
        return await resolver.wait(future, seconds)
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
        return await resolver.wait(future, seconds)
    finally:
        for job in jobs:
            job.ended.forget(ended)


def give_up(future: Wait) -> None:
    """End a wait with False, if it has not ended."""
    if not future.done():
        future.set_result(False)


async def in_thread(
    function: Callable[[], T], name: str, undo: Callable[[T], None] | None = None, *, daemon: bool = False
) -> T:
    """Run a blocking function in a thread of its own and wait for it.

    When the wait is cancelled, or the loop ends, the function runs on to its end, and then `undo` runs on its result,
    off the loop. The process waits for it at its end, except with `daemon`: for what the kernel undoes all the same.
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

    thread = threading.Thread(target=run, name=name, daemon=daemon)
    thread.start()
    try:
        result = await future
    except BaseException:  # cancelled, or the loop was dropped; an error of `function` leaves nothing to undo
        abandoned = True
        if unclaimed:
            threading.Thread(target=take_back, name=name, daemon=daemon).start()
        raise
    unclaimed.clear()
    thread.join()  # it has nothing left to do: who is told that it is over finds no thread of it
    return result
