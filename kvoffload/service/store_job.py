"""`StoreJob`: a store on its way, as the caller of `OffloadRequest.store` sees it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from kvoffload.errors import ClosedError, QuarantinedError
from kvoffload.service.jobs import Job
from kvoffload.service.results import StoreResult
from kvoffload.service.waiting import wait_for_job
from kvoffload.transfer.base import JobId

if TYPE_CHECKING:
    from kvoffload.service.service import OffloadService


class StoreJob:
    """A store on its way. Await it for its `StoreResult`; nobody has to, and cancelling the wait changes nothing."""

    __slots__ = ("_job", "_service")

    def __init__(self, service: OffloadService, job: Job) -> None:
        self._service = service
        self._job = job

    @property
    def id(self) -> JobId:
        """The job's id."""
        return self._job.id

    def __repr__(self) -> str:
        return f"<StoreJob {self._job.id}, {self._job.result if self.done else 'on its way'}>"

    def __await__(self) -> Generator[object, None, StoreResult]:
        return self._result().__await__()

    async def _result(self) -> StoreResult:
        job = self._job
        await wait_for_job(self._service.resolver, job, job.answered, None)
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
        """Wait until no copy reads the source blocks.

        Raises:
            QuarantinedError: The service was closed while the copy still ran: the blocks must never be reused.
        """
        job = self._job
        await wait_for_job(self._service.resolver, job, job.ended, None)
        if not job.released:
            raise QuarantinedError(
                f"the service was closed while job {job.id} still read its blocks", gpu_blocks=job.gpu_blocks
            )
