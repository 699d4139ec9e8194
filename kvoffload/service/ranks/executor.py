"""`RankExecutor`: runs the commands of one life of the deciding process on a rank's worker, and gathers reports."""

from __future__ import annotations

from kvoffload.errors import UsageError
from kvoffload.service.ranks.wire import Command, Report, Reports, Welcome, decode_commands, encode, transfer_spec
from kvoffload.transfer.base import HOST_VISIBLE, Ready
from kvoffload.transfer.worker import OffloadingWorker


class RankExecutor:
    """Runs commands on a worker and gathers reports; one thread at a time.

    Args:
        worker: Moves the bytes of this rank.
        welcome: The deciding process's life and settings.
        rank: This rank.
        incarnation: This life of the rank.

    Attributes:
        stale_commands: Commands of another epoch, or seen before, dropped.
    """

    def __init__(self, worker: OffloadingWorker, welcome: Welcome, rank: int, incarnation: int) -> None:
        self._worker = worker
        self._welcome = welcome
        self._rank = rank
        self._incarnation = incarnation
        self._next = 1
        self._reports: list[Report] = []
        self.stale_commands = 0
        self.step = 0

    def run(self, data: bytes, ready: Ready = HOST_VISIBLE) -> None:
        """Submit a batch of commands.

        Raises:
            UsageError: These are no commands, or some were lost on the way.
        """
        try:
            batch = decode_commands(data)
        except ValueError as error:
            raise UsageError(f"these are no commands: {error}") from error
        rank = self._rank
        if batch.epoch != self._welcome.epoch or batch.incarnations[rank : rank + 1] != [self._incarnation]:
            self.stale_commands += len(batch.commands)
            return
        wanted = max(self._next, batch.starts[rank])
        if batch.first > wanted:
            raise UsageError(f"commands {wanted}..{batch.first - 1} were lost: every rank must get every message")
        skipped = wanted - batch.first
        self.stale_commands += min(skipped, len(batch.commands))
        for order in batch.commands[skipped:]:
            self._submit(order, ready)
        self._next = max(wanted, batch.first + len(batch.commands))

    def _submit(self, order: Command, ready: Ready) -> None:
        error: str | None = None
        if self._welcome.debug_checks and order.store and order.step > self.step:
            error = (
                f"a store of step {order.step} came while this rank is at step {self.step}: "
                "store only after the step's result came back"
            )
        else:
            try:
                if not self._worker.transfer_async(order.job, transfer_spec(order), ready):
                    error = repr(self._worker.take_submit_error(order.job) or "refused")
            except Exception as raised:  # noqa: BLE001 - a job that cannot begin has failed; the others go on
                error = repr(raised)
        if error is not None:
            self._reports.append(Report(order.job, False, 0, 0.0, 0.0, error))

    def reports(self) -> bytes:
        """Return what ended since the last call, encoded; empty when nothing did."""
        for result in self._worker.get_finished():
            self._reports.append(
                Report(
                    result.job_id,
                    result.success,
                    result.transfer_size or 0,
                    result.queue_time or 0.0,
                    result.transfer_time or 0.0,
                    None if result.success else repr(result.error),
                )
            )
        if not self._reports:
            return b""
        reports, self._reports = self._reports, []
        return encode(Reports(self._welcome.epoch, self._incarnation, self._rank, reports))
