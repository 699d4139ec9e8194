"""`OffloadRequest`: one request, owner of its pins, jobs and GPU blocks.

Leaving the `async with` block never awaits: pins go, and each GPU block reaches `free` once, when no copy can touch it.
It opens no task and no cancel scope, so it may be left in another task than it was entered in, under level
cancellation, or by the garbage collection of a generator.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableSequence, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvoffload.chain import BlockChain
from kvoffload.errors import ClosedError, UsageError
from kvoffload.manager.base import ReqContext, RequestOutcome
from kvoffload.manager.specs import GPULoadStoreSpec
from kvoffload.service.arguments import as_list, check_free, check_request, check_timeout, whole_number
from kvoffload.service.core import LeaseState, RequestState
from kvoffload.service.geometry import Tables
from kvoffload.service.lease import LeaseContext
from kvoffload.service.load_calls import LoadCalls
from kvoffload.service.ownership import Free
from kvoffload.service.results import LoadResult, PrefixMatch
from kvoffload.service.store_job import StoreJob
from kvoffload.service.waiting import Wait
from kvoffload.transfer.base import HOST_VISIBLE, Ready

if TYPE_CHECKING:
    from kvoffload.service.service import OffloadService

logger = logging.getLogger(__name__)


class OffloadRequest:
    """Owner of every pin, job and GPU block of one request.

    Args:
        service: The service.
        context: Who asks; a bare string is the request id.
        chain: Tokens and keys; may grow while the request runs.
        gpu_blocks: The engine's block table, which may grow by append; a table per group for several groups.
        free: Called on the loop thread with GPU blocks that no copy can touch any more, each block once, after the
            request was left. None: the caller has its own protocol (`StoreJob.on_source_released`, `when_released`).

    The request owns the blocks that are in `gpu_blocks` when it is left. Blocks that the caller took out before are the
    caller's again, to be reused when `when_released` says so. When entering raises, nothing was taken over.
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
        check_request(self.context, chain)
        if free is not None:
            check_free(free, "free")
        self.id = self.context.req_id or ""
        self.chain = chain
        self.gpu_blocks = gpu_blocks
        self._service = service
        self.engine = service.engine
        self._free = free
        self._state: RequestState | None = None
        self._left = False
        self._waits: set[Wait] = set()
        self._loads = LoadCalls(service, self._waits)

    def __repr__(self) -> str:
        state = "left" if self._left else "made, not entered" if self._state is None else "entered"
        return f"<OffloadRequest {self.id!r}, {self.chain.num_tokens} tokens, {state}>"

    async def __aenter__(self) -> Self:
        self._service.check_open()
        if self._left:
            raise UsageError(f"request {self.id!r} was left: make a new one")
        blocks = [block for table in self._tables() for block in table]
        self.engine.begin(self.context, self.chain)
        self._state = self.engine.state(self.id)
        self._service.add(self)
        self.engine.note_owner(blocks)
        return self

    async def __aexit__(
        self, et: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """End the request now; what `async with` does at its end. Idempotent, never waits.

        On another thread (a generator collected there) the loop does it as soon as it can.
        """
        if self._left or self._state is None:
            return
        service, engine = self._service, self.engine
        if not engine.owned_here and not self._may_leave_here(self.leave):
            return
        self._left = True
        service.remove(self)
        self.interrupt()
        try:
            engine.finish(self.id)
        except ClosedError:
            pass
        finally:
            blocks = [block for table in self._tables() for block in table]
            engine.give_back(blocks, self._free)

    def _may_leave_here(self, leave: Callable[[], None]) -> bool:
        """On another thread: hand the leaving to the loop, or, when there is none any more, allow it."""
        loop = self._service.loop
        if not self.engine.is_foreign_process and not loop.is_closed():
            loop.call_soon_threadsafe(leave)
            return False
        if self.engine.is_foreign_process or not self.engine.closed:
            logger.warning("request %r was left in a fork or after its loop was closed: nothing was freed", self.id)
            return False
        return True

    def interrupt(self) -> None:
        """End the waits of this request's calls; they answer with reason `"aborted"`."""
        for future in list(self._waits):
            if not future.done():
                future.set_result(False)

    def _entered(self) -> RequestState:
        self._service.check_open()
        if self._left:
            raise UsageError(f"request {self.id!r} was left: make a new one")
        if self._state is None:
            raise UsageError(f"request {self.id!r} is not entered: use `async with service.request(...)`")
        return self._state

    def _tables(self) -> Tables:
        return self.engine.geometry.tables(self.gpu_blocks)

    # ---- loads

    def match(self) -> PrefixMatch:
        """Return what is held of the prefix: pins nothing, counts nothing, microseconds."""
        self._entered()
        return self.engine.match(self.id)

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
            UsageError: Block table and arguments do not fit the model, or `timeout` is no number of seconds.
            ClosedError: The service is closed.
            TransferError: Unhealthy, with `fail_open=False`.
        """
        self._entered()
        leave_tokens = whole_number(leave_tokens, "leave_tokens")
        first = whole_number(first_block, "first_block") * self.engine.geometry.block_size
        tables = [
            table[first // group.block_size :]
            for table, group in zip(self._tables(), self.engine.geometry.groups, strict=True)
        ]
        return await self.load_tables(tables, first, self.chain.num_tokens - leave_tokens, timeout, after)

    async def load_tables(
        self,
        tables: Tables,
        first: int,
        max_tokens: int,
        timeout: float | None,
        after: Ready,
        stop: Callable[[], LoadResult | None] = lambda: None,
    ) -> LoadResult:
        """Load tokens `[first, max_tokens)` as far as they are held; the work behind `load` and `Lease.load`.

        `stop` is asked after each wait, and before the copy: what it returns is the answer.
        """
        return await self._loads.load(self._entered(), tables, first, max_tokens, timeout, after, stop)

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
        tokens = whole_number(computed_tokens, "computed_tokens")
        job = self.engine.stores.offer_computed(state, self._tables(), tokens, ready)
        self._service.submitted()
        return StoreJob(self._service, job)

    def store_blocks(self, blocks: GPULoadStoreSpec, *, ready: Ready) -> StoreJob:
        """Offer explicit GPU blocks; returns at once.

        Raises:
            UsageError: A group does not start at an offloaded block, or reaches beyond the chain.
        """
        job = self.engine.stores.offer_spec(self._entered(), blocks, ready)
        self._service.submitted()
        return StoreJob(self._service, job)

    # ---- the rest

    def lease(self, *, timeout: float | None = None) -> LeaseContext:
        """Return a lease to enter with `async with`: it waits for blocks being written, then pins the ready prefix."""
        return LeaseContext(self, timeout)

    async def open_lease(self, timeout: float | None) -> LeaseState:
        """Do what entering `lease()` does; who calls it ends the lease with `engine.close_lease`."""
        state, service, engine = self._entered(), self._service, self.engine
        check_timeout(timeout)
        wait = service.config.pending_wait_seconds if timeout is None else timeout
        await self._loads.wait_pending(state, self.chain.num_tokens, service.clock() + wait)
        engine.loads.first_use(state)
        lease = engine.open_lease(state)
        service.arm_timer()
        return lease

    def end_lease(self, lease: LeaseState) -> None:
        """Unpin; on another thread (a generator collected there) the loop does it as soon as it can."""
        engine = self.engine
        if engine.owned_here or self._may_leave_here(lambda: self.end_lease(lease)):
            engine.close_lease(lease)

    def finished(
        self,
        *,
        output_tokens: int | None = None,
        conversation_ended: bool = False,
        expected_return_seconds: float | None = None,
    ) -> None:
        """Say what is known about the request's end; policies use it when the request is left.

        Args:
            output_tokens: Tokens generated.
            conversation_ended: No further request of this conversation comes.
            expected_return_seconds: Seconds from now to the conversation's next request, as an estimate.

        Raises:
            UsageError: A value is no number.
        """
        self._entered()
        self.engine.hint(
            self.id,
            RequestOutcome(
                output_tokens=output_tokens,
                conversation_ended=conversation_ended,
                expected_return_seconds=expected_return_seconds,
            ),
        )

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Say what a prefill took, so that loaded tokens can be valued in seconds (`prefill_seconds_saved`).

        Args:
            tokens: Tokens that were computed, not those that were loaded.
            seconds: Time it took.

        Raises:
            UsageError: Not above 0.
        """
        self._entered()
        self.engine.ledger.prefilled(tokens, seconds)

    def abort(self) -> None:
        """Do nothing new for this request; waiting calls end. Idempotent, in any state."""
        if self._state is not None and not self._left and not self.engine.closed:
            self.engine.abort(self.id)
            self.interrupt()

    def when_released(self, blocks: Sequence[int], callback: Free) -> None:
        """Call `callback` with those of `blocks` that no copy can touch, now and later, each once.

        For blocks that the caller took out of `gpu_blocks`: blocks that stay in it go to `free` as well. It may
        be called after the request was left and the service closed: copies may still run.

        Raises:
            UsageError: Called on another thread than the loop's, after fork, or before the service was entered.
        """
        check_free(callback, "callback")
        blocks = as_list(blocks, "blocks", "GPU block ids")
        self.engine.check_owner()
        self._loads.take_back(blocks)
        self.engine.give_back(blocks, callback)
