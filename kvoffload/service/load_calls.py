"""The loads of one request, from the call to its answer.

A load waits three times: for blocks that are being written, without holding a pin; for its turn, while too many bytes
are in flight; and for its copy. After each wait it looks anew at what is ready, and at whether it may still go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvoffload.errors import TransferError
from kvoffload.service.arguments import check_ready, check_timeout
from kvoffload.service.core import RequestState
from kvoffload.service.geometry import Tables
from kvoffload.service.jobs import Job
from kvoffload.service.results import LoadOutcome, LoadResult
from kvoffload.service.waiting import Wait, wait_for_job
from kvoffload.transfer.base import Ready

if TYPE_CHECKING:
    from kvoffload.service.service import OffloadService


class _Starting:
    """A load whose copy was not submitted yet, and where it would write."""

    __slots__ = ("tables", "taken_back")

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.taken_back = False


class LoadCalls:
    """Carries out the load calls of one request.

    Args:
        service: Whose engine, room and clock.
        waits: Futures of the request's waits; resolving one with False ends its wait.
    """

    def __init__(self, service: OffloadService, waits: set[Wait]) -> None:
        self._service = service
        self._engine = service.engine
        self._waits = waits
        self._starting: set[_Starting] = set()

    def take_back(self, blocks: Sequence[int]) -> None:
        """GPU blocks are their owner's again: a load that still waits for its turn must not write to them later."""
        for starting in self._starting:
            if any(not set(table).isdisjoint(blocks) for table in starting.tables):
                starting.taken_back = True

    async def load(
        self,
        state: RequestState,
        tables: Tables,
        first: int,
        max_tokens: int,
        timeout: float | None,
        after: Ready,
        stop: Callable[[], LoadResult | None],
    ) -> LoadResult:
        """Load tokens `[first, max_tokens)` as far as they are held, and book the answer.

        `stop` is asked after each wait, and before the copy: what it returns is the answer.
        """
        check_ready(after, "after")
        check_timeout(timeout)
        ledger, began = self._engine.ledger, self._service.clock()
        starting = _Starting(tables)

        def refused() -> LoadResult | None:
            if starting.taken_back:
                return LoadResult(LoadOutcome.MISS, reason="aborted")
            return stop() or self._refusal(state)

        self._starting.add(starting)
        try:
            result = await self._load(state, tables, first, max_tokens, timeout, after, refused)
        except asyncio.CancelledError:
            ledger.cancelled()
            raise
        finally:
            self._starting.discard(starting)
        ledger.answered(result, self._service.clock() - began)
        return result

    async def _load(
        self,
        state: RequestState,
        tables: Tables,
        first: int,
        max_tokens: int,
        timeout: float | None,
        after: Ready,
        refused: Callable[[], LoadResult | None],
    ) -> LoadResult:
        service, loads, config = self._service, self._engine.loads, self._service.config
        began = service.clock()
        until = began + (config.load_deadline_seconds if timeout is None else timeout)
        wanted = loads.most(tables, first, max_tokens)
        await self.wait_pending(state, wanted, min(until, began + config.pending_wait_seconds))
        pending = service.clock() - began
        turn = False
        try:
            while True:
                refusal = refused()
                if refusal is not None:
                    return replace(refusal, pending_seconds=pending)
                end = loads.plan(state, tables, first, max_tokens)
                loads.first_use(state)
                if end <= first:
                    return LoadResult(LoadOutcome.MISS, pending_seconds=pending)
                if (turn or not service.room.busy) and loads.room(loads.size(first, end)):
                    break
                first_in_line, turn = turn, False
                turn = await service.room.wait(until - service.clock(), self._waits, first=first_in_line)
                if not turn:
                    refusal = refused() or LoadResult(LoadOutcome.MISS, reason="backpressure")
                    return replace(refusal, pending_seconds=pending)
            job = loads.start(state, tables, first, end, partial=end < wanted, after=after)
            service.arm_timer()
        finally:
            if turn:
                service.room.next()
        result = await self._wait_copied(state, job, until)
        if result.outcome is LoadOutcome.LOADED and end < wanted:  # a load that was joined asked for less
            result = replace(result, outcome=LoadOutcome.PARTIAL)
        elif result.outcome is LoadOutcome.PARTIAL and end >= wanted:
            result = replace(result, outcome=LoadOutcome.LOADED)
        return replace(result, pending_seconds=pending)

    def _refusal(self, state: RequestState) -> LoadResult | None:
        """Return the answer of a load that may not start; None when it may."""
        engine, service = self._engine, self._service
        if state.over:
            return LoadResult(LoadOutcome.MISS, reason="aborted")
        health = engine.health()
        if not health.ok:
            if not service.config.fail_open:
                raise TransferError(f"the service is unhealthy: {health.reason}") from engine.fault
            return LoadResult(LoadOutcome.UNHEALTHY, reason="unhealthy", error=engine.fault)
        if not engine.enabled:
            return LoadResult(LoadOutcome.MISS, reason="disabled")
        if engine.loads.is_stuck:
            return LoadResult(LoadOutcome.MISS, reason="deadline")
        return None

    async def wait_pending(self, state: RequestState, upto_tokens: int, until: float) -> None:
        """Wait for blocks of the first `upto_tokens` that are being written; holds no pin."""
        service = self._service
        while True:
            job = self._engine.loads.pending_job(state, upto_tokens)
            left = until - service.clock()
            if job is None or left <= 0:
                return
            if not await wait_for_job(service.resolver, job, job.unwritten, left, self._waits):
                return

    async def _wait_copied(self, state: RequestState, job: Job, until: float) -> LoadResult:
        """Wait for the answer of a load that was started."""
        service = self._service
        if job.result is None:
            await wait_for_job(service.resolver, job, job.answered, until - service.clock(), self._waits)
        result = job.result
        if isinstance(result, LoadResult):
            if result.reason == "unhealthy" and not service.config.fail_open:
                error = TransferError("the service is unhealthy")
                error.undefined_gpu_blocks = tuple(result.undefined_gpu_blocks)
                raise error from result.error
            return result
        reason = "aborted" if state.over else "timeout"
        return LoadResult(LoadOutcome.FAILED, undefined_gpu_blocks=tuple(job.gpu_blocks), reason=reason)
