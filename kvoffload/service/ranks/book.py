"""Which rank owes which report: pure bookkeeping, no socket, no thread, no clock.

A job ends when every rank that got its command has reported or its process is gone. One failure fails it everywhere,
but its blocks stay held until all have ended. While a rank is missing nothing new is submitted.

Commands have one running number for all ranks, so that one message serves all; a rank that joins late starts behind
the last one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice

from kvoffload.errors import TransferError
from kvoffload.service.ranks.wire import Command, Commands, Report, Reports, encode
from kvoffload.transfer.base import TransferResult, TransferType


@dataclass(slots=True)
class _Rank:
    """A rank's life: 0 when there is none.

    Attributes:
        start: Number of the first command that concerns it.
        sent: Number of the last command it got.
        retired: It takes no more commands, but its copies may still run.
    """

    incarnation: int = 0
    start: int = 0
    sent: int = 0
    retired: bool = False

    @property
    def up(self) -> bool:
        return self.incarnation != 0 and not self.retired


@dataclass(slots=True)
class _Open:
    store: bool
    owed: set[int]
    size: int = 0
    queue_seconds: float = 0.0
    copy_seconds: float = 0.0
    error: str | None = None


class RankBook:
    """Numbers commands per rank and joins their reports into results.

    Args:
        world_size: Ranks that must be up.
        epoch: This life of the deciding process.

    Attributes:
        stale_reports: Reports of another epoch, incarnation or job, dropped.
    """

    def __init__(self, world_size: int, epoch: int) -> None:
        self.epoch = epoch
        self.stale_reports = 0
        self._ranks = [_Rank() for _ in range(world_size)]
        self._number = 0
        self._unsent: deque[Command] = deque()
        self._open: dict[int, _Open] = {}
        self._ended: list[TransferResult] = []

    @property
    def world_size(self) -> int:
        """Ranks that must be up."""
        return len(self._ranks)

    def missing(self) -> list[int]:
        """Return the ranks that are not up."""
        return [index for index, rank in enumerate(self._ranks) if not rank.up]

    def num_up(self) -> int:
        """Return how many ranks are up."""
        return sum(rank.up for rank in self._ranks)

    def join(self, rank: int, incarnation: int) -> None:
        """A rank process is up; it knows of no earlier command."""
        self.leave(rank, "a new process took its place")
        self._ranks[rank] = _Rank(incarnation, start=self._number + 1, sent=self._number)

    def retire(self, rank: int) -> None:
        """A rank takes no more commands; what it owes has not ended, its copies may still run."""
        self._ranks[rank].retired = True

    def leave(self, rank: int, why: str) -> None:
        """A rank's process is gone: what it owed has ended, and failed."""
        state = self._ranks[rank]
        if not state.incarnation:
            return
        self._ranks[rank] = _Rank()
        for job, entry in list(self._open.items()):
            if rank in entry.owed:
                self._settle(job, entry, rank, f"rank {rank} is gone: {why}")

    def submit(self, order: Command) -> None:
        """Queue a command for every rank.

        Raises:
            TransferError: A rank is missing; nothing was queued.
        """
        missing = self.missing()
        if missing:
            raise TransferError(f"rank {missing[0]} of {self.world_size} is missing")
        self._open[order.job] = _Open(order.store, set(range(self.world_size)))
        self._number += 1
        self._unsent.append(order)

    def take(self, rank: int) -> bytes | None:
        """Return the commands that a rank has not got yet, encoded; None when there are none."""
        state = self._ranks[rank]
        if not state.up or state.sent == self._number:
            return None
        return self._batch([state])

    def take_each(self) -> dict[int, bytes]:
        """Return for each rank what it has not got yet; ranks that lack the same get the same message."""
        behind = [index for index, state in enumerate(self._ranks) if state.up and state.sent != self._number]
        if len({self._ranks[index].sent for index in behind}) == 1:
            return dict.fromkeys(behind, self._batch([self._ranks[index] for index in behind]))
        batches = {index: self.take(index) for index in behind}
        return {index: batch for index, batch in batches.items() if batch is not None}

    def take_common(self) -> bytes:
        """Return what some rank has not got yet, as one message for all; they must all get every message."""
        states = [state for state in self._ranks if state.up]
        if all(state.sent == self._number for state in states):
            return b""
        return self._batch(states)

    def _batch(self, states: list[_Rank]) -> bytes:
        begin = min(state.sent for state in states)
        kept = self._number - len(self._unsent)
        commands = list(islice(self._unsent, begin - kept, None))
        for state in states:
            state.sent = self._number
        done = min((state.sent for state in self._ranks if state.up), default=self._number)
        for _ in range(done - kept):
            self._unsent.popleft()
        incarnations = [state.incarnation for state in self._ranks]
        starts = [state.start for state in self._ranks]
        return encode(Commands(self.epoch, begin + 1, commands, incarnations, starts))

    def report(self, reports: Reports) -> None:
        """Book what ended on one rank; stale reports change nothing."""
        rank = reports.rank
        fresh = (
            reports.epoch == self.epoch
            and 0 <= rank < self.world_size
            and reports.incarnation != 0
            and self._ranks[rank].incarnation == reports.incarnation
        )
        if not fresh:
            self.stale_reports += max(1, len(reports.reports))
            return
        for item in reports.reports:
            entry = self._open.get(item.job)
            if entry is None or rank not in entry.owed:
                self.stale_reports += 1
                continue
            self._add(entry, item)
            self._settle(item.job, entry, rank, None if item.success else f"rank {rank}: {item.error or 'failed'}")

    @staticmethod
    def _add(entry: _Open, item: Report) -> None:
        entry.size += item.size
        entry.queue_seconds = max(entry.queue_seconds, item.queue_seconds)
        entry.copy_seconds = max(entry.copy_seconds, item.copy_seconds)

    def _settle(self, job: int, entry: _Open, rank: int, error: str | None) -> None:
        entry.owed.discard(rank)
        entry.error = entry.error or error
        if entry.owed:
            return
        del self._open[job]
        kind: TransferType = ("GPU", "CPU") if entry.store else ("CPU", "GPU")
        failure = TransferError(entry.error) if entry.error else None
        self._ended.append(
            TransferResult(
                job,
                failure is None,
                transfer_size=entry.size,
                transfer_time=entry.copy_seconds,
                transfer_type=kind,
                queue_time=entry.queue_seconds,
                error=failure,
            )
        )

    @property
    def has_ended(self) -> bool:
        """Whether `take_ended` has something to return."""
        return bool(self._ended)

    def take_ended(self) -> list[TransferResult]:
        """Return what has ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def pending(self) -> list[int]:
        """Return the jobs that a rank still owes a report for."""
        return list(self._open)
