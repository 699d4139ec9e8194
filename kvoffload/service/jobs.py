"""One job: a load or a store of one request, from reservation to the end of its copy.

Theory of operation. A job has two ends. Its *result* is what the caller waits for; its *release* says that no copy can
touch its GPU blocks any more. Usually both come together. When a copy outlives its deadline the result comes first
(`HUNG`) and the release when the copy really ends, if ever. When a reset or abort overtakes a job the copy still runs
on, and both come at its end.

A *transfer* is what a handler runs: one load job, or all stores offered in one tick.

Who waits for a job listens to one of its signals; a listener that gives up is forgotten at once, so a copy that never
ends gathers none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from kvoffload.errors import KVOffloadError
from kvoffload.keys import BlockInfo, OffloadKey
from kvoffload.manager.base import ReqContext
from kvoffload.manager.specs import GPULoadStoreSpec
from kvoffload.service.results import LoadResult, StoreResult
from kvoffload.transfer.base import JobId, Ready, TransferSpec

JobKind = Literal["load", "store"]


class JobState(Enum):
    """Where a job is."""

    QUEUED = "queued"
    """Reserved, not submitted: no copy can touch its blocks."""
    RUNNING = "running"
    """Submitted; a copy may touch its blocks."""
    HUNG = "hung"
    """Answered, because its copy outlived its deadline; the copy may still touch its blocks."""
    DONE = "done"
    """Answered and released."""


_LEGAL = {
    JobState.QUEUED: {JobState.RUNNING, JobState.DONE},
    JobState.RUNNING: {JobState.HUNG, JobState.DONE},
    JobState.HUNG: {JobState.DONE},
    JobState.DONE: set[JobState](),
}


class Signal:
    """Something that happens once to a job: tells its listeners then, and later ones at once."""

    __slots__ = ("_listeners", "happened")

    def __init__(self) -> None:
        self.happened = False
        self._listeners: dict[Listener, None] | None = None

    def __len__(self) -> int:
        return len(self._listeners) if self._listeners else 0

    def listen(self, job: Job, listener: Listener) -> None:
        """Call `listener` with the job when it happens; at once if it has."""
        if self.happened:
            listener(job)
        elif self._listeners is None:
            self._listeners = {listener: None}
        else:
            self._listeners[listener] = None

    def forget(self, listener: Listener) -> None:
        """Do not call that listener any more."""
        if self._listeners is not None:
            self._listeners.pop(listener, None)

    def fire(self) -> Iterable[Listener]:
        """It happens now: return whom to tell."""
        self.happened = True
        listeners, self._listeners = self._listeners, None
        return listeners or ()


@dataclass(slots=True, eq=False)
class Job:
    """One load or store of one request.

    Attributes:
        id: Unique in this engine.
        request_id: Whose it is.
        kind: `"load"` or `"store"`.
        keys: Offloaded blocks it reads or writes.
        ticket: The manager's reservation; None when nothing was reserved.
        gpu_blocks: GPU blocks its copy touches.
        generation: Number of resets before it was reserved.
        num_bytes: Bytes its copy moves.
        num_blocks: Engine blocks (group 0) of a load.
        num_tokens: Tokens of a load.
        first_token: Where a load starts.
        partial: A load of less than was asked for.
        discarded: Keys that were dropped as invalid while its copy ran, or before it was submitted.
        answered: Happens when the result is known.
        ended: Happens when no copy can touch its GPU blocks any more.
        unwritten: Happens when a store does not write its keys any more: it was answered, or a reset overtook it.
    """

    id: JobId
    request_id: str
    kind: JobKind
    context: ReqContext
    keys: Sequence[OffloadKey] = ()
    ticket: int | None = None
    gpu_blocks: Sequence[int] = ()
    generation: int = 0
    num_bytes: int = 0
    num_blocks: int = 0
    num_tokens: int = 0
    first_token: int = 0
    partial: bool = False
    infos: dict[OffloadKey, BlockInfo] = field(default_factory=dict)
    verdict: StoreResult | None = None
    state: JobState = JobState.QUEUED
    result: LoadResult | StoreResult | None = None
    report: bool = False
    discarded: set[OffloadKey] = field(default_factory=set)
    answered: Signal = field(default_factory=Signal)
    ended: Signal = field(default_factory=Signal)
    unwritten: Signal = field(default_factory=Signal)

    @property
    def released(self) -> bool:
        """No copy can touch its GPU blocks any more."""
        return self.state is JobState.DONE

    def move(self, state: JobState) -> None:
        """Change state; the only place that does.

        Raises:
            KVOffloadError: The change is not legal; nothing changed.
        """
        if state not in _LEGAL[self.state]:
            raise KVOffloadError(f"job {self.id} cannot go from {self.state.value} to {state.value}")
        self.state = state

    def on_release(self, listener: Listener) -> None:
        """Call `listener` once, when no copy can touch the job's GPU blocks; at once if that is so."""
        self.ended.listen(self, listener)


Listener = Callable[[Job], None]


@dataclass(slots=True, eq=False)
class Transfer:
    """What a handler runs: its id there, its jobs, and when it was submitted."""

    id: int
    kind: JobKind
    spec: TransferSpec
    jobs: list[Job]
    ready: Ready
    num_bytes: int
    submitted_seconds: float = 0.0


@dataclass(slots=True)
class QueuedStore:
    """A store that is reserved and waits for the end of the tick, with its pieces per group."""

    job: Job
    gpu: GPULoadStoreSpec
    cpu_block_ids: Sequence[Sequence[int]]
    ready: Ready
