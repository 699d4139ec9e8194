"""The handler's contract: `OffloadingHandler`, `TransferResult`, `TransferSpec`. Reference, chapter 9.1.

Submitting and polling never wait. Transfers of one handler run in the order of submission. A copy that fails is a
result with `success=False` and its error; a submission that cannot be made returns False or raises, and then no byte
moves for that job.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NewType, Protocol

from kvoffload.manager.specs import LoadStoreSpec

JobId = NewType("JobId", int)
TransferSpec = tuple[LoadStoreSpec, LoadStoreSpec]
"""Source and destination."""
TransferType = tuple[str, str]
"""Source medium and destination medium."""

HOST_VISIBLE: Literal["host-visible"] = "host-visible"
Ready = Literal["host-visible"] | Any
"""When a source may be read, or a destination overwritten: `"host-visible"` (now), or an event recorded after the last
write: on CUDA a `torch.cuda.Event`, on the host backend anything with `wait(timeout) -> bool`."""


class AllReady:
    """Several `Ready` events of one transfer: it waits for all of them."""

    __slots__ = ("events",)

    def __init__(self, events: Sequence[Ready]) -> None:
        self.events = tuple(events)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for each event; False when one did not come within `timeout` seconds (each)."""
        events: tuple[Any, ...] = self.events
        return all(event.wait(timeout) for event in events)


@dataclass(slots=True)
class TransferResult:
    """How one transfer ended.

    Attributes:
        job_id: The caller's id.
        success: All bytes were copied.
        transfer_size: Bytes copied.
        transfer_time: Seconds from the copy's start to its end.
        transfer_type: Source and destination medium.
        queue_time: Seconds from submission to the copy's start.
        error: Why it failed.
    """

    job_id: int
    success: bool
    transfer_size: int | None = None
    transfer_time: float | None = None
    transfer_type: TransferType | None = None
    queue_time: float | None = None
    error: BaseException | None = None


class OffloadingHandler(ABC):
    """Moves blocks in one direction, asynchronously.

    One owner thread calls `transfer_async`, `get_finished` and `shutdown`. `notify`, when set, is called without
    arguments from a handler thread whenever `get_finished` has news; it must return at once.
    """

    notify: Callable[[], None] | None = None

    @abstractmethod
    def transfer_async(self, job_id: int, spec: TransferSpec, ready: Ready = HOST_VISIBLE) -> bool:
        """Queue one transfer; return False if it cannot be queued.

        Args:
            job_id: The caller's id, unique among unfinished jobs.
            spec: Source and destination; their arrays are read before the call returns.
            ready: What the copy must wait for before its first byte.

        Raises:
            UsageError: The spec does not fit the layout; nothing was queued.
        """

    @abstractmethod
    def get_finished(self) -> list[TransferResult]:
        """Return what finished since the last call, in order of submission."""

    @abstractmethod
    def wait(self, job_ids: set[int], timeout: float | None = None) -> bool:
        """Block until the given jobs have ended; return False if that took longer than `timeout` seconds.

        Unknown ids count as ended. May be called from any thread.
        """

    def pending_jobs(self) -> list[int]:
        """Return the ids of jobs whose copy has not ended, in order of submission; may be called from any thread.

        After `shutdown` these are the copies that outlived its timeout: their memory must stay mapped.
        """
        return []

    def shutdown(self, timeout: float = 10.0) -> None:
        """Let queued copies end, then release threads and memory; idempotent.

        Copies that have not started within `timeout` seconds end as failed without moving a byte; one that is running
        by then keeps running and stays in `pending_jobs`. Results can still be fetched afterwards.
        """


class TransferWorker(Protocol):
    """What runs transfers for the service: an `OffloadingWorker` in this process, or ranks in others."""

    def set_notify(self, callback: Callable[[], None] | None) -> None:
        """Call `callback` from any thread whenever `get_finished` has news."""

    def transfer_async(self, job_id: int, spec: TransferSpec, ready: Ready = HOST_VISIBLE) -> bool:
        """Queue one transfer; False if it was refused."""

    def take_submit_error(self, job_id: int) -> BaseException | None:
        """Return why a transfer was refused, once."""

    def get_finished(self) -> list[TransferResult]:
        """Return what finished since the last call."""

    def take_handler_errors(self) -> Mapping[TransferType, BaseException]:
        """Return, once, what broke while polling."""

    def absent(self) -> str | None:
        """Return who is missing for transfers to be possible; None when nobody is."""

    def num_up(self) -> int:
        """Return how many ranks are there."""

    def shutdown(self, timeout: float = 10.0) -> None:
        """Let queued copies end, then release everything; idempotent."""
