"""Runs a coroutine and cancels it at a chosen suspension: the 1st, the 2nd, ... until it completes uncancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any

import anyio
import anyio.lowlevel
import uvloop

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


class Stepped:
    """An awaitable that runs a coroutine and calls `at(number, future)` each time it is about to suspend."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], at: Callable[[int, Any], None]) -> None:
        self._coroutine = coroutine
        self._at = at
        self.count = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        resume: Callable[[Any], Any] = self._coroutine.send
        value: Any = None
        while True:
            try:
                future = resume(value)
            except StopIteration as stop:
                return stop.value
            self.count += 1
            self._at(self.count, future)
            try:
                value = yield future
                resume = self._coroutine.send
            except BaseException as error:
                resume, value = self._coroutine.throw, error


async def cancelled_at_once(work: Coroutine[Any, Any, Any], number: int, tick: Callable[[], None]) -> bool:
    """Cancel the task at suspension `number`; return whether the work completed instead."""

    def at(count, future):
        asyncio.get_running_loop().call_soon(tick)
        if count == number:
            asyncio.current_task().cancel()

    return await _in_task(Stepped(work, at))


async def cancelled_with_the_result(work: Coroutine[Any, Any, Any], number: int, tick: Callable[[], None]) -> bool:
    """Cancel the task when what it waits for at suspension `number` is there, but the task has not seen it."""

    def at(count, future):
        asyncio.get_running_loop().call_soon(tick)
        if count == number:
            task = asyncio.current_task()
            if future is None:
                task.cancel()
            else:
                future.add_done_callback(lambda _: task.cancel())

    return await _in_task(Stepped(work, at))


async def _in_task(stepped: Stepped) -> bool:
    async def run():
        return await stepped

    task = asyncio.ensure_future(run())
    try:
        await task
    except asyncio.CancelledError:
        assert task.cancelled()
        return False
    return True


async def in_a_cancelled_scope(work: Coroutine[Any, Any, Any], number: int, tick: Callable[[], None]) -> bool:
    """Cancel an anyio scope around the work at suspension `number`: each later await is cancelled, too."""
    with anyio.CancelScope() as scope:

        def at(count, future):
            asyncio.get_running_loop().call_soon(tick)
            if count == number:
                scope.cancel()

        await Stepped(work, at)
        if not scope.cancel_called:
            return True
        await anyio.lowlevel.checkpoint()
    return False


CANCELS = [cancelled_at_once, cancelled_with_the_result, in_a_cancelled_scope]
