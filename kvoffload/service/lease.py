"""`Lease` and `LeaseContext`: a pinned prefix, as the caller of `OffloadRequest.lease` sees it."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from kvoffload.errors import UsageError
from kvoffload.manager.specs import GPULoadStoreSpec
from kvoffload.service.core import LeaseState
from kvoffload.service.results import LoadOutcome, LoadResult
from kvoffload.transfer.base import HOST_VISIBLE, Ready

if TYPE_CHECKING:
    from kvoffload.service.request import OffloadRequest


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

        Args:
            blocks: GPU blocks per group, and the engine block at which each group begins.
            timeout: Seconds for everything together; default `load_deadline_seconds`.
            after: What must have happened before the destination may be overwritten: a CUDA event, or
                `"host-visible"`.

        Raises:
            UsageError: The groups of `blocks` start at different tokens, or ids are out of range.
        """
        dead = self._dead()
        if dead is not None:
            return dead
        geometry = self._request.engine.geometry
        tables, starts = geometry.split(blocks)
        first = geometry.common_start(tables, starts)
        return await self._request.load_tables(tables, first, self.match.ready_tokens, timeout, after, self._dead)

    def _dead(self) -> LoadResult | None:
        """Return the answer of a lease that pins nothing any more; None while it holds."""
        reason = self._request.engine.why_lease_dead(self._lease)
        return None if reason is None else LoadResult(LoadOutcome.MISS, reason=reason)


class LeaseContext:
    """Enters and leaves a `Lease`; leaving never awaits."""

    def __init__(self, request: OffloadRequest, timeout: float | None) -> None:
        self._request = request
        self._timeout = timeout
        self._lease: LeaseState | None = None
        self._entered = False

    async def __aenter__(self) -> Lease:
        if self._entered:
            raise UsageError("a lease is entered once: call request.lease() again for another")
        self._entered = True
        self._lease = await self._request.open_lease(self._timeout)
        return Lease(self._request, self._lease)

    async def __aexit__(
        self, et: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._lease is not None:
            self._request.end_lease(self._lease)
