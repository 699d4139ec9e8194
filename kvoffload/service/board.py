"""The transfers in flight: submit, take completions, notice copies that do not end.

A direction is a queue, so only its oldest transfer can be late: it is *hung* when it has been the oldest for longer
than the deadline. A hung transfer is answered but stays on the board until its copy really ends. Until then the
direction is *stuck*: what waits behind is answered a deadline after its own submission, and nothing new should be sent
after it, since that would only lose more GPU blocks.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping

from kvoffload.errors import TransferError
from kvoffload.service.jobs import Job, JobKind, Transfer
from kvoffload.transfer.base import TransferResult, TransferWorker

logger = logging.getLogger(__name__)

Ended = Callable[[Transfer, TransferResult], None]
Hung = Callable[[Transfer], None]


class TransferBoard:
    """Runs transfers on a worker and says when each has ended or is overdue.

    Args:
        worker: Moves the bytes.
        deadlines: Seconds after which the oldest transfer of a direction is hung.
        clock: Monotonic seconds.
        on_ended: Called once per transfer, when its copy has ended.
        on_hung: Called when a transfer is declared hung.
    """

    def __init__(
        self,
        worker: TransferWorker,
        deadlines: Mapping[JobKind, float],
        clock: Callable[[], float],
        on_ended: Ended,
        on_hung: Hung,
    ) -> None:
        self.worker = worker
        self._deadlines = dict(deadlines)
        self._clock = clock
        self._on_ended = on_ended
        self._on_hung = on_hung
        self._running: dict[JobKind, OrderedDict[int, Transfer]] = {"load": OrderedDict(), "store": OrderedDict()}
        self._head_since: dict[JobKind, float] = {"load": 0.0, "store": 0.0}
        self._hung: dict[int, Transfer] = {}
        self._num_hung: dict[JobKind, int] = {"load": 0, "store": 0}
        self.inflight_bytes: dict[JobKind, int] = {"load": 0, "store": 0}

    def num_running(self, kind: JobKind) -> int:
        """Transfers of one direction that are in time."""
        return len(self._running[kind])

    def is_stuck(self, kind: JobKind) -> bool:
        """A hung copy holds the direction up."""
        return self._num_hung[kind] > 0

    @property
    def num_hung(self) -> int:
        """Transfers that were declared hung and whose copy has not ended."""
        return len(self._hung)

    @property
    def idle(self) -> bool:
        """No copy runs, hung ones included."""
        return not (self._running["load"] or self._running["store"] or self._hung)

    def unended(self) -> list[Transfer]:
        """Return the transfers whose copies have not ended."""
        return [*self._running["load"].values(), *self._running["store"].values(), *self._hung.values()]

    def unended_jobs(self) -> list[Job]:
        """Return the jobs whose copies have not ended."""
        return [job for transfer in self.unended() for job in transfer.jobs]

    def submit(self, transfer: Transfer) -> BaseException | None:
        """Hand a transfer to its handler; return why it was refused, or None."""
        running = self._running[transfer.kind]
        transfer.submitted_seconds = self._clock()
        if not running:
            self._head_since[transfer.kind] = transfer.submitted_seconds
        running[transfer.id] = transfer
        self.inflight_bytes[transfer.kind] += transfer.num_bytes
        error: BaseException | None
        try:
            if self.worker.transfer_async(transfer.id, transfer.spec, transfer.ready):
                return None
            error = self.worker.take_submit_error(transfer.id)
        except Exception as raised:  # noqa: BLE001 - no handler for the direction: a refusal like any other
            error = raised
        self._drop(transfer)
        return error if error is not None else TransferError("the handler refused the transfer")

    def _drop(self, transfer: Transfer) -> None:
        running = self._running[transfer.kind]
        was_head = next(iter(running), None) == transfer.id
        del running[transfer.id]
        self.inflight_bytes[transfer.kind] -= transfer.num_bytes
        if was_head and running:
            head = next(iter(running.values()))
            stuck = self.is_stuck(transfer.kind)
            self._head_since[transfer.kind] = head.submitted_seconds if stuck else self._clock()

    def poll(self) -> None:
        """Take what finished.

        Raises:
            Exception: What the worker or a handler raised; every completion that was taken is booked.
        """
        errors: list[Exception] = []
        for result in self.worker.get_finished():
            try:
                self.end(result)
            except Exception as error:  # noqa: BLE001 - the other completions would be lost
                errors.append(error)
        errors += [error for error in self.worker.take_handler_errors().values() if isinstance(error, Exception)]
        if errors:
            raise errors[0]

    def end(self, result: TransferResult) -> None:
        """Book the end of one copy; unknown ids are ignored."""
        transfer = self._hung.pop(result.job_id, None)
        if transfer is None:
            transfer = self._running["load"].get(result.job_id) or self._running["store"].get(result.job_id)
            if transfer is None:
                logger.warning("a handler reported job %d, which is not running", result.job_id)
                return
            self._drop(transfer)
        else:
            self._num_hung[transfer.kind] -= 1
            if not self.is_stuck(transfer.kind):
                self._head_since[transfer.kind] = self._clock()
        self._on_ended(transfer, result)

    def check_deadlines(self) -> None:
        """Declare the oldest transfer of a direction hung if it has been the oldest for too long."""
        now = self._clock()
        for kind, running in self._running.items():
            while running and now - self._head_since[kind] >= self._deadlines[kind]:
                self.declare_hung(next(iter(running.values())))

    def declare_hung(self, transfer: Transfer) -> None:
        """Move a running transfer to the hung ones and say so."""
        self._num_hung[transfer.kind] += 1
        self._drop(transfer)
        self._hung[transfer.id] = transfer
        self._on_hung(transfer)

    def next_deadline(self) -> float | None:
        """Return when `check_deadlines` may next find something; None when nothing runs."""
        times = [self._head_since[kind] + self._deadlines[kind] for kind, running in self._running.items() if running]
        return min(times, default=None)
