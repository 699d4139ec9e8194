"""What loads, stores and the engine share: the manager, the books, the sinks and the counters. One owner thread."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvoffload.chain import BlockChain
from kvoffload.errors import ClosedError
from kvoffload.keys import BlockInfo, OffloadKey
from kvoffload.manager.base import (
    EventSink,
    MetricsSink,
    OffloadingEvent,
    OffloadingManager,
    ReqContext,
    RequestOutcome,
)
from kvoffload.metrics.recorder import MetricsRecorder
from kvoffload.service.checks import Checks
from kvoffload.service.geometry import BlockGeometry
from kvoffload.service.guard import GuardedManager, IsolatedEvents, IsolatedMetrics
from kvoffload.service.history import Cause, KeyHistory
from kvoffload.service.jobs import Job, JobKind, Signal
from kvoffload.service.last_use import LastUse
from kvoffload.service.ownership import GPUBlockBook
from kvoffload.service.results import PrefixMatch
from kvoffload.transfer.base import JobId

logger = logging.getLogger(__name__)

_REMEMBERED_KEYS = 1 << 17
"""Fates that are remembered at least: a small cache would forget an eviction before its key is asked for again."""


_FAILURE_LOG_SECONDS = 1.0
"""A device that fails every copy must not fill the log: all failures are counted, one in this time is named."""


class NullEvents:
    """An `EventSink` that nobody listens to."""

    def publish(self, events: Sequence[OffloadingEvent], infos: Mapping[OffloadKey, BlockInfo]) -> None:
        """Drop them."""

    def describe(self, infos: Mapping[OffloadKey, BlockInfo]) -> None:
        """Drop them."""


class NullMetrics:
    """A `MetricsSink` that nobody reads."""

    def count(self, name: str, amount: float = 1, label: str = "") -> None:
        """Drop it."""

    def observe(self, name: str, value: float, label: str = "") -> None:
        """Drop it."""


@dataclass(slots=True, eq=False)
class LeaseState:
    """One lease.

    Attributes:
        match: The prefix that was ready when it began, all of it pinned.
        ended: None while it holds; else why it ended: `"left"`, `"expired"`, `"reset"` or `"aborted"`.
    """

    id: JobId
    request: RequestState
    match: PrefixMatch
    keys: list[OffloadKey]
    ticket: int | None
    generation: int
    expires_seconds: float
    ended: str | None = None


FirstLook = tuple[int, int, tuple[str, ...]]
"""What a request found at its first look-up: ready blocks, then pending ones, then why each further one missed.

Thousands are remembered, so it is a plain tuple: the garbage collector soon looks into it no more.
"""


def found_at(look: FirstLook, index: int) -> str | None:
    """Return what was found at one block; None for a block that the chain did not have yet."""
    ready, pending, causes = look
    if index < ready + pending:
        return "ready" if index < ready else "pending"
    missed = index - ready - pending
    return causes[missed] if missed < len(causes) else None


@dataclass(slots=True, eq=False)
class RequestState:
    """What the engine keeps of one request until `finish`.

    Attributes:
        touched: Its keys were looked up and touched (once per request).
        offered: Offloaded blocks offered so far, per group, by `OffloadRequest.store`.
        computed_tokens: Largest value given to `OffloadRequest.store`.
        aborted: Nothing new is done for it.
        finished: It has ended; nothing is pinned or booked for it any more.
        leases: Its open leases.
        hit_tokens: Tokens ready at its first look-up.
        found: What its first look-up found, per group.
    """

    context: ReqContext
    chain: BlockChain
    offered: list[int]
    touched: bool = False
    computed_tokens: int = 0
    aborted: bool = False
    finished: bool = False
    hit_tokens: int = 0
    outcome: RequestOutcome | None = None
    jobs: dict[JobId, Job] = field(default_factory=dict)
    leases: dict[JobId, LeaseState] = field(default_factory=dict)
    found: tuple[FirstLook, ...] = ()

    @property
    def over(self) -> bool:
        """Nothing new is done for it: it was aborted or has ended."""
        return self.aborted or self.finished

    def forget_job(self, job: Job) -> None:
        """The job is released."""
        self.jobs.pop(job.id, None)


def describes(info: BlockInfo | None) -> bool:
    """Whether a block with this info can be announced: a salted one only with its extra keys."""
    return info is not None and not (info.salted and info.extra_keys is None)


class Core:
    """Shared state of one engine.

    Attributes:
        generation: Resets so far; a job of an older generation moves bytes of an older content.
        undescribed: Held keys that the feed cannot announce for want of what describes them.
        absent: Which ranks are missing; None when all are up.
        ranks_expected: Ranks that a transfer needs.
        ranks_up: Those of them that are there.
        fault: Why the service is unhealthy; None when it is healthy.
        writing: Which job writes a key that is not readable yet.
        ring: Makes the owner poll soon.
    """

    def __init__(
        self,
        manager: OffloadingManager,
        geometry: BlockGeometry,
        *,
        capacity: int,
        events: EventSink | None,
        metrics: MetricsSink | None,
        clock: Callable[[], float],
        ring: Callable[[], None],
        checks: Checks | None = None,
    ) -> None:
        self.manager = GuardedManager(manager, self.fail)
        self.geometry = geometry
        self.capacity = capacity
        self.metrics = _isolated(metrics)
        self.events: EventSink = IsolatedEvents(events, self.metrics.count) if events is not None else NullEvents()
        self.clock = clock
        self.ring = ring
        self.checks = checks if checks is not None else Checks()
        self.book = GPUBlockBook(self.checks.freed, lambda: self.metrics.count("callback_errors"))
        self.history = KeyHistory(max(2 * capacity, _REMEMBERED_KEYS))
        self.last_use = LastUse(2 * capacity)
        self.writing: dict[OffloadKey, Job] = {}
        self.generation = 0
        self.undescribed: set[OffloadKey] = set()
        self.absent: str | None = None
        self.ranks_expected = self.ranks_up = 1
        self.fault: BaseException | None = None
        self.fault_reason = ""
        self.enabled = True
        self.stores_paused = False
        self.reported: list[Job] = []
        self._ids = itertools.count(1)
        self._next_failure_line = float("-inf")

    def new_id(self) -> JobId:
        """Return an id that no job or transfer of this engine had."""
        return JobId(next(self._ids))

    def fail(self, reason: str, error: BaseException) -> None:
        """Become unhealthy; the next poll ends the waits. Only the first fault is kept and logged."""
        if self.fault is None:
            self.fault, self.fault_reason = error, reason
            logger.error("%s: %r; serving misses from now on", reason, error, exc_info=error)
            self.ring()

    def log_failed_copy(self, kind: JobKind, gpu_blocks: Sequence[int], error: BaseException | None) -> None:
        """Name a copy that failed, at its submission or in flight, unless another was named a moment ago."""
        now = self.clock()
        if now >= self._next_failure_line and not isinstance(error, ClosedError):
            self._next_failure_line = now + _FAILURE_LOG_SECONDS
            logger.warning("a %s of GPU blocks %s failed: %r", kind, list(gpu_blocks), error)

    @property
    def serving(self) -> bool:
        """Loads may hit."""
        return self.enabled and self.fault is None and self.absent is None

    @property
    def wants_infos(self) -> bool:
        """Somebody listens to the events, so stores carry what describes their blocks."""
        return not isinstance(self.events, NullEvents)

    def flush_events(self, infos: Mapping[OffloadKey, BlockInfo] | None = None, cause: Cause = "evicted") -> None:
        """Deliver the manager's outbox in order; removals are remembered with `cause`."""
        events = list(self.manager.take_events())
        if not events:
            return
        now = self.clock()
        for event in events:
            if event.removed:
                if self.undescribed:
                    self.undescribed.difference_update(event.keys)
                self.history.note(event.keys, cause, now)
                if cause == "reset":
                    self.last_use.clear()
                    continue
                idle = self.last_use.gone(event.keys, now)
                if cause == "evicted":
                    for seconds in idle:
                        self.metrics.observe("eviction_idle_seconds", seconds)
            else:
                self.last_use.used(event.keys, now)
                if self.wants_infos:
                    known = infos or {}
                    self.undescribed.update(key for key in event.keys if not describes(known.get(key)))
        self.events.publish(events, infos or {})

    def forget_writing(self, job: Job) -> None:
        """The job's keys are not being written by it any more."""
        writing = self.writing
        for key in job.keys:
            if writing.get(key) is job:
                del writing[key]

    def forget_all_writing(self) -> None:
        """A reset overtook every store: who waits for its keys need not wait for its copy."""
        self.history.note(list(self.writing), "reset", self.clock())
        jobs = set(self.writing.values())
        self.writing.clear()
        for job in jobs:
            self._tell(job.unwritten, job)

    def finish_job(self, job: Job) -> None:
        """Tell who waits for the result; `job.result` is set."""
        if job.report:
            self.reported.append(job)
        self._tell(job.answered, job)
        self._tell(job.unwritten, job)

    def release_job(self, job: Job) -> None:
        """Tell who waits for the release; `job.state` is `DONE`."""
        self._tell(job.ended, job)

    def _tell(self, signal: Signal, job: Job) -> None:
        for listener in signal.fire():
            try:
                listener(job)
            except Exception:
                self.metrics.count("callback_errors")
                logger.exception("a callback of job %d raised", job.id)


def _isolated(metrics: MetricsSink | None) -> MetricsSink:
    """Return a sink that never raises; the recorder does not need to be wrapped."""
    if metrics is None:
        return NullMetrics()
    return metrics if isinstance(metrics, MetricsRecorder) else IsolatedMetrics(metrics)
