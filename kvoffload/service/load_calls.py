"""The loads of one request, from the call to its answer.

A load waits three times: for blocks that are being written, without holding a pin; for its turn, while too many bytes
are in flight; and for its copy. After each wait it looks anew at what is ready, and at whether it may still go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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


@dataclass(slots=True, eq=False)
class _Call:
    """One load call.

    Attributes:
        state: Whose.
        tables: Where it would write, from token `first` on.
        first: First token.
        wanted: Token up to which it would load, were everything ready.
        max_tokens: Token up to which it may load.
        until: When it is answered at the latest.
        after: What must have happened before the destination may be overwritten.
        stop: Asked after each wait, and before the copy: what it returns is the answer.
        taken_back: Its GPU blocks are their owner's again.
    """

    state: RequestState
    tables: Tables
    first: int
    wanted: int
    max_tokens: int
    until: float
    after: Ready
    stop: Callable[[], LoadResult | None]
    taken_back: bool = False


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
        self._waiting: set[_Call] = set()

    def take_back(self, blocks: Sequence[int]) -> None:
        """GPU blocks are their owner's again: a load that still waits for its turn must not write to them later."""
        for call in self._waiting:
            if any(not set(table).isdisjoint(blocks) for table in call.tables):
                call.taken_back = True

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
        until = began + (self._service.config.load_deadline_seconds if timeout is None else timeout)
        wanted = self._engine.loads.most(tables, first, max_tokens)
        call = _Call(state, tables, first, wanted, max_tokens, until, after, stop)
        self._waiting.add(call)
        try:
            result = await self._load(call)
        except asyncio.CancelledError:
            ledger.cancelled()
            raise
        finally:
            self._waiting.discard(call)
        ledger.answered(result, self._service.clock() - began)
        return result

    async def _load(self, call: _Call) -> LoadResult:
        service, loads, state, first = self._service, self._engine.loads, call.state, call.first
        began = service.clock()
        await self.wait_pending(state, call.wanted, min(call.until, began + service.config.pending_wait_seconds))
        pending = service.clock() - began
        turn = False
        try:
            while True:
                refusal = self._refusal(call)
                if refusal is not None:
                    return replace(refusal, pending_seconds=pending)
                end = loads.plan(state, call.tables, first, call.max_tokens)
                loads.first_use(state)
                if end <= first:
                    return LoadResult(LoadOutcome.MISS, pending_seconds=pending)
                if (turn or not service.room.busy) and loads.room(loads.size(first, end)):
                    break
                first_in_line, turn = turn, False
                turn = await service.room.wait(call.until - service.clock(), self._waits, first=first_in_line)
                if not turn:
                    refusal = self._refusal(call) or LoadResult(LoadOutcome.MISS, reason="backpressure")
                    return replace(refusal, pending_seconds=pending)
            job = loads.start(state, call.tables, first, end, partial=end < call.wanted, after=call.after)
            service.arm_timer()
        finally:
            if turn:
                service.room.next()
        result = await self._wait_copied(state, job, call.until)
        if result.outcome is LoadOutcome.LOADED and end < call.wanted:  # a load that was joined asked for less
            result = replace(result, outcome=LoadOutcome.PARTIAL)
        elif result.outcome is LoadOutcome.PARTIAL and end >= call.wanted:
            result = replace(result, outcome=LoadOutcome.LOADED)
        return replace(result, pending_seconds=pending)

    def _refusal(self, call: _Call) -> LoadResult | None:
        """Return the answer of a load that may not start; None when it may."""
        engine, service = self._engine, self._service
        if call.taken_back:
            return LoadResult(LoadOutcome.MISS, reason="aborted")
        stopped = call.stop()
        if stopped is not None:
            return stopped
        if call.state.over:
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
