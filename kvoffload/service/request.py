"""`OffloadRequest`: one request, owner of its pins, jobs and GPU blocks.

Leaving the `async with` block never awaits: pins go, and each GPU block reaches `free` once, when no copy can touch it.
It opens no task and no cancel scope, so it may be left in another task than it was entered in, under level
cancellation, or by the garbage collection of a generator.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, MutableSequence, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvoffload.errors import ClosedError, TransferError, UsageError
from kvoffload.keys import BlockChain
from kvoffload.manager.base import ReqContext, RequestOutcome
from kvoffload.manager.specs import GPULoadStoreSpec
from kvoffload.service.core import RequestState
from kvoffload.service.geometry import Tables
from kvoffload.service.jobs import Job
from kvoffload.service.leases import LeaseState
from kvoffload.service.ownership import Free
from kvoffload.service.results import LoadOutcome, LoadResult, PrefixMatch, StoreResult
from kvoffload.service.waiting import wait_for_job
from kvoffload.transfer.base import HOST_VISIBLE, JobId, Ready

if TYPE_CHECKING:
    from kvoffload.service.service import OffloadService


class StoreJob:
    """A store on its way. Await it for its `StoreResult`; nobody has to."""

    __slots__ = ("_job", "_service")

    def __init__(self, service: OffloadService, job: Job) -> None:
        self._service = service
        self._job = job

    @property
    def id(self) -> JobId:
        """The job's id."""
        return self._job.id

    def __await__(self) -> Generator[object, None, StoreResult]:
        return self._result().__await__()

    async def _result(self) -> StoreResult:
        job, service = self._job, self._service
        if job.result is None:
            await wait_for_job(service.resolver, service.loop, job.on_result, None)
        if not isinstance(job.result, StoreResult):
            raise ClosedError("the service was closed before the store ended")
        return job.result

    @property
    def done(self) -> bool:
        """The result is known."""
        return self._job.result is not None

    @property
    def source_released(self) -> bool:
        """No copy reads its GPU blocks any more."""
        return self._job.released

    def on_source_released(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the loop thread once no copy reads the source blocks; at once if that is so."""
        self._job.on_release(lambda _: callback())

    async def wait_source_released(self) -> None:
        """Wait until no copy reads the source blocks."""
        if not self._job.released:
            service = self._service
            await wait_for_job(service.resolver, service.loop, self._job.on_release, None)


class OffloadRequest:
    """Owner of every pin, job and GPU block of one request.

    Args:
        service: The service.
        context: Who asks; a bare string is the request id.
        chain: Tokens and keys; may grow while the request runs.
        gpu_blocks: The engine's block table, which may grow by append; a table per group for several groups.
        free: Called on the loop thread with GPU blocks that no copy can touch any more, each block once, after the
            request was left. None: the caller has its own protocol (`StoreJob.source_released`, `when_released`).
    """

    def __init__(
        self,
        service: OffloadService,
        context: ReqContext | str,
        chain: BlockChain,
        *,
        gpu_blocks: MutableSequence[int] | Sequence[MutableSequence[int]],
        free: Free | None,
    ) -> None:
        self.context = ReqContext(context) if isinstance(context, str) else context
        self.id = self.context.req_id or ""
        self.chain = chain
        self.gpu_blocks = gpu_blocks
        self._service = service
        self._engine = service.engine
        self._free = free
        self._state: RequestState | None = None
        self._left = False
        self._waits: set[asyncio.Future[object]] = set()

    async def __aenter__(self) -> Self:
        self._service.check_open()
        if self._left:
            raise UsageError(f"request {self.id!r} was left: make a new one")
        self._engine.begin(self.context, self.chain)
        self._state = self._engine.state(self.id)
        self._service.add(self)
        return self

    async def __aexit__(
        self, et: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """End the request now; what `async with` does at its end. Idempotent, never waits."""
        if self._left or self._state is None:
            return
        self._left = True
        self._service.remove(self)
        self.interrupt()
        self._engine.finish(self.id)
        blocks = [block for table in self._tables() for block in table]
        self._engine.give_back(blocks, self._free)

    def interrupt(self) -> None:
        """End the waits of this request's calls; they answer with reason `"aborted"`."""
        for future in list(self._waits):
            if not future.done():
                future.set_result(False)

    def _entered(self) -> RequestState:
        self._service.check_open()
        if self._state is None or self._left:
            raise UsageError(f"request {self.id!r} is not entered: use `async with service.request(...)`")
        return self._state

    def _tables(self) -> Tables:
        return self._engine.geometry.tables(self.gpu_blocks)

    # ---- loads

    def match(self) -> PrefixMatch:
        """Return what is held of the prefix: pins nothing, counts nothing, microseconds."""
        self._entered()
        return self._engine.match(self.id)

    async def load(
        self,
        *,
        first_block: int = 0,
        leave_tokens: int = 1,
        timeout: float | None = None,
        after: Ready = HOST_VISIBLE,
    ) -> LoadResult:
        """Load the held part of the prefix into `gpu_blocks`.

        Waits up to `pending_wait_seconds` for blocks that are being written, then for its turn and the copy. A miss, a
        timeout, a failed copy are results. Cancelling the call does not cancel the copy: the GPU blocks stay held.

        Args:
            first_block: Engine block (group 0) to start at: those before are on the GPU already.
            leave_tokens: Tokens at the end of the chain that are left to compute.
            timeout: Seconds for everything together; default `load_deadline_seconds`.
            after: What must have happened before the destination may be overwritten.

        Raises:
            UsageError: Block table and arguments do not fit the model.
            ClosedError: The service is closed.
            TransferError: Unhealthy, with `fail_open=False`.
        """
        state = self._entered()
        if first_block < 0 or leave_tokens < 0:
            raise UsageError(f"first_block and leave_tokens must not be negative, got {first_block} and {leave_tokens}")
        first = first_block * self._engine.geometry.block_size
        tables = [
            table[first // group.block_size :]
            for table, group in zip(self._tables(), self._engine.geometry.groups, strict=True)
        ]
        return await self.load_tables(state, tables, first, self.chain.num_tokens - leave_tokens, timeout, after)

    async def load_tables(
        self, state: RequestState, tables: Tables, first: int, max_tokens: int, timeout: float | None, after: Ready
    ) -> LoadResult:
        """Load tokens `[first, max_tokens)` as far as they are held; the work behind `load` and `Lease.load`."""
        service, engine, config = self._service, self._engine, self._service.config
        began = service.clock()
        until = began + (config.load_deadline_seconds if timeout is None else timeout)
        await self._wait_pending(state, min(until, began + config.pending_wait_seconds))
        pending = service.clock() - began
        waited = False
        while True:
            refusal = self._refusal(state)
            if refusal is not None:
                return replace(refusal, pending_seconds=pending)
            end = engine.plan_load(state, tables, first, max_tokens)
            engine.look_up(state)
            if end <= first:
                return LoadResult(LoadOutcome.MISS, pending_seconds=pending)
            if (waited or not service.room_queue) and engine.room_for_load(first, end):
                break
            if not await service.wait_room(until - service.clock(), self._waits, first=waited):
                refusal = self._refusal(state) or LoadResult(LoadOutcome.MISS, reason="backpressure")
                return replace(refusal, pending_seconds=pending)
            waited = True
        job = engine.run_load(state, tables, first, end, max_tokens, after)
        service.load_started()
        result = await self._await_load(state, job, until)
        return replace(result, pending_seconds=pending)

    async def _await_load(self, state: RequestState, job: Job, until: float) -> LoadResult:
        service = self._service
        if job.result is None:
            await wait_for_job(service.resolver, service.loop, job.on_result, until - service.clock(), self._waits)
        result = job.result
        if isinstance(result, LoadResult):
            if result.reason == "unhealthy" and not service.config.fail_open:
                raise TransferError("the service is unhealthy") from result.error
            return result
        reason = "aborted" if state.aborted or self._left else "timeout"
        return LoadResult(LoadOutcome.FAILED, undefined_gpu_blocks=tuple(job.gpu_blocks), reason=reason)

    def _refusal(self, state: RequestState) -> LoadResult | None:
        """Return the answer of a load that may not start; None when it may."""
        engine, service = self._engine, self._service
        if state.aborted or self._left:
            return LoadResult(LoadOutcome.MISS, reason="aborted")
        health = engine.health()
        if not health.ok:
            if not service.config.fail_open:
                raise TransferError(f"the service is unhealthy: {health.reason}") from engine.fault
            return LoadResult(LoadOutcome.UNHEALTHY, reason="unhealthy", error=engine.fault)
        if not engine.enabled:
            return LoadResult(LoadOutcome.MISS, reason="disabled")
        return None

    async def _wait_pending(self, state: RequestState, until: float) -> None:
        """Wait for blocks of the prefix that are being written; holds no pin."""
        service = self._service
        while self._refusal(state) is None:
            job = self._engine.pending_job(state)
            left = until - service.clock()
            if job is None or left <= 0:
                return
            if not await wait_for_job(service.resolver, service.loop, job.on_result, left, self._waits):
                return

    # ---- stores

    def store(self, *, computed_tokens: int, ready: Ready) -> StoreJob:
        """Offer the complete blocks below `computed_tokens` that were not offered yet; returns at once.

        Args:
            computed_tokens: Tokens whose KV data the engine has written, or will have when `ready` happens.
            ready: A CUDA event recorded after the last write, or `"host-visible"`.

        Raises:
            UsageError: `computed_tokens` shrank, exceeds the chain, or the block table is too short.
        """
        state = self._entered()
        job = self._engine.offer_computed(state, self._tables(), computed_tokens, ready)
        self._service.submitted()
        return StoreJob(self._service, job)

    def store_blocks(self, blocks: GPULoadStoreSpec, *, ready: Ready) -> StoreJob:
        """Offer explicit GPU blocks; returns at once.

        Raises:
            UsageError: A group does not start at an offloaded block, or reaches beyond the chain.
        """
        job = self._engine.offer_spec(self._entered(), blocks, ready)
        self._service.submitted()
        return StoreJob(self._service, job)

    # ---- the rest

    def lease(self, *, timeout: float | None = None) -> LeaseContext:
        """Return a lease to enter with `async with`: it waits for blocks being written, then pins the ready prefix."""
        return LeaseContext(self, timeout)

    def finished(
        self,
        *,
        output_tokens: int | None = None,
        conversation_ended: bool = False,
        expected_return_seconds: float | None = None,
    ) -> None:
        """Say what is known about the request's end; policies use it when the request is left."""
        self._entered()
        self._engine.hint(
            self.id,
            RequestOutcome(
                output_tokens=output_tokens,
                conversation_ended=conversation_ended,
                expected_return_seconds=expected_return_seconds,
            ),
        )

    def abort(self) -> None:
        """Do nothing new for this request; waiting calls end. Idempotent, in any state."""
        if self._state is not None and not self._left:
            self._engine.abort(self.id)
            self.interrupt()

    def when_released(self, blocks: Sequence[int], callback: Free) -> None:
        """Call `callback` with those of `blocks` that no copy can touch, now and later, each once."""
        self._engine.give_back(blocks, callback)


class Lease:
    """The ready prefix of a request, pinned until its block is left, `lease_seconds` passed, or a reset.

    Attributes:
        match: What was ready when the lease began; all of it is pinned.
    """

    def __init__(self, request: OffloadRequest, lease: LeaseState) -> None:
        self._request = request
        self._lease = lease
        self.match = lease.match

    async def load(
        self, blocks: GPULoadStoreSpec, *, timeout: float | None = None, after: Ready = HOST_VISIBLE
    ) -> LoadResult:
        """Load pinned blocks into explicit GPU blocks; a miss with a reason when the lease pins nothing any more.

        Raises:
            UsageError: The groups of `blocks` start at different tokens, or ids are out of range.
        """
        request, engine = self._request, self._request._engine  # noqa: SLF001 - same module
        dead = engine.why_lease_dead(self._lease)
        if dead is not None:
            return LoadResult(LoadOutcome.MISS, reason=dead)
        tables, starts = engine.geometry.split(blocks)
        first = engine.geometry.common_start(tables, starts)
        state = request._entered()  # noqa: SLF001 - same module
        return await request.load_tables(state, tables, first, self.match.ready_tokens, timeout, after)


class LeaseContext:
    """Enters and leaves a `Lease`; leaving never awaits."""

    def __init__(self, request: OffloadRequest, timeout: float | None) -> None:
        self._request = request
        self._timeout = timeout
        self._lease: LeaseState | None = None

    async def __aenter__(self) -> Lease:
        request = self._request
        state = request._entered()  # noqa: SLF001 - same module
        service, engine = request._service, request._engine  # noqa: SLF001 - same module
        wait = service.config.pending_wait_seconds if self._timeout is None else self._timeout
        await request._wait_pending(state, service.clock() + wait)  # noqa: SLF001 - same module
        engine.look_up(state)
        self._lease = engine.open_lease(state)
        service.arm_timer()
        return Lease(request, self._lease)

    async def __aexit__(
        self, et: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._lease is not None:
            self._request._engine.close_lease(self._lease)  # noqa: SLF001 - same module
