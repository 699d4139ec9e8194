"""What becomes of transfers: they end, they hang, or everything breaks; each way every job is settled exactly once."""

from __future__ import annotations

import logging
from typing import cast

from kvoffload.service.board import TransferBoard
from kvoffload.service.core import Core
from kvoffload.service.jobs import Job, JobKind, JobState, Transfer
from kvoffload.service.loads import LoadDesk
from kvoffload.service.results import StoreReason
from kvoffload.service.stores import StoreDesk
from kvoffload.transfer.base import TransferResult

logger = logging.getLogger(__name__)

FAULT_POLL_SECONDS = 0.1
"""How often a broken service looks for ended copies, in case nothing wakes it any more."""


class Settler:
    """Routes ends, hangs and faults of transfers to the desk of their direction."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._broken_down = False
        self._uncounted: list[tuple[JobKind, int, bool, TransferResult]] = []

    def attach(self, board: TransferBoard, loads: LoadDesk, stores: StoreDesk) -> None:
        """Name whom to route to; once, before the first transfer."""
        self._board, self._loads, self._stores = board, loads, stores

    def ended(self, transfer: Transfer, result: TransferResult) -> None:
        """Settle the jobs of a transfer whose copy has ended; one that raises does not keep the others.

        Raises:
            Exception: The first that settling a job raised; all were tried.
        """
        late = any(job.state is JobState.HUNG for job in transfer.jobs)
        if not result.success:
            blocks = [block for job in transfer.jobs for block in job.gpu_blocks]
            self._core.log_failed_copy(transfer.kind, blocks, result.error)
        self._uncounted.append((transfer.kind, transfer.num_bytes, late, result))
        desk = self._loads if transfer.kind == "load" else self._stores
        errors: list[Exception] = []
        for job in transfer.jobs:
            try:
                desk.ended(job, result)
            except Exception as error:  # noqa: BLE001 - the other jobs of the transfer have ended, too
                errors.append(error)
        if errors:
            raise errors[0]

    def count_ended(self) -> None:
        """Count the transfers that ended since the last call."""
        if not self._uncounted:
            return
        ended, self._uncounted = self._uncounted, []
        metrics = self._core.metrics
        for kind, num_bytes, late, result in ended:
            metrics.count("transfers", 1, kind)
            if late:
                metrics.count("late_completions", 1, kind)
            if result.queue_time is not None:
                metrics.observe("transfer_queue_seconds", result.queue_time, kind)
            if result.transfer_time is not None:
                metrics.observe("transfer_copy_seconds", result.transfer_time, kind)
            if result.success:
                metrics.count("transfer_bytes", num_bytes, kind)
                metrics.observe("transfer_size_bytes", num_bytes, kind)
            else:
                metrics.count("transfer_failures", 1, kind)

    def hung(self, transfer: Transfer) -> None:
        """Answer the jobs of a transfer that outlived its deadline; their GPU blocks stay held."""
        blocks = sorted({block for job in transfer.jobs for block in job.gpu_blocks})
        logger.error(
            "a %s has not ended after its deadline: GPU blocks %s are quarantined until it does", transfer.kind, blocks
        )
        self._core.metrics.count("deadlines", label=transfer.kind)
        for job in transfer.jobs:
            if job.state is JobState.RUNNING:
                self.answer_early(job, "deadline", None)

    def settle_fault(self) -> None:
        """After a fault: take queued stores back and answer the running jobs, once; copies keep their blocks."""
        core = self._core
        if core.fault is None or self._broken_down:
            return
        self._broken_down = True
        self._stores.drop_all_queued("unhealthy")
        self.answer_running("unhealthy", core.fault)

    def answer_running(self, reason: str, error: BaseException | None) -> None:
        """Answer every running job now; its copy runs on and keeps its blocks."""
        for job in self._board.unended_jobs():
            if job.state is JobState.RUNNING:
                self.answer_early(job, reason, error)

    def answer_early(self, job: Job, reason: str, error: BaseException | None) -> None:
        """Answer one job whose copy has not ended."""
        if job.kind == "load":
            self._loads.answer_early(job, reason, error)
        else:
            self._stores.answer_early(job, cast("StoreReason", reason), error)
