"""`OffloadEngine`: the synchronous service, for a stepping scheduler; the asyncio service is built on it.

Theory of operation. One thread owns the engine and calls everything but `CompletionBridge.notify`. Calls never wait
(except `start`, `wait` and `close`): they decide in the manager, hand copies to handlers and return. `poll()` takes
what finished; `fileno()` becomes readable when there is something to poll. A failed copy is a result; `poll` never
raises.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from kvoffload.config import OffloadConfig
from kvoffload.errors import ClosedError, UndrainedCopies, UsageError
from kvoffload.keys import BlockChain, OffloadKey
from kvoffload.manager.base import EventSink, MetricsSink, ReqContext, RequestOutcome
from kvoffload.manager.specs import GPULoadStoreSpec
from kvoffload.memory.canonical import CanonicalKVCaches
from kvoffload.service.board import TransferBoard
from kvoffload.service.bridge import CompletionBridge
from kvoffload.service.core import Core, RequestState
from kvoffload.service.geometry import BlockGeometry, Tables
from kvoffload.service.jobs import Job, JobState, Transfer
from kvoffload.service.leases import LeaseDesk, LeaseState
from kvoffload.service.loads import LoadDesk
from kvoffload.service.ownership import Free
from kvoffload.service.reports import collect_stats, explain
from kvoffload.service.results import BlockReport, Health, JobDone, PrefixMatch, Stats
from kvoffload.service.stores import StoreDesk
from kvoffload.spec.base import KVCacheConfig, OffloadingSpec
from kvoffload.spec.factory import OffloadingSpecFactory
from kvoffload.transfer.base import HOST_VISIBLE, JobId, Ready, TransferResult
from kvoffload.transfer.worker import OffloadingWorker

logger = logging.getLogger(__name__)

_RECENT_REQUESTS = 256


class OffloadEngine:
    """Offloads KV-cache blocks for one model replica; synchronous, one owner thread.

    Args:
        config: What to do.
        kv_caches: The GPU side.
        spec: Manager and handlers to use instead of those that `config.spec_name` names.
        events: Where residency changes go.
        metrics: Where counts go.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        config: OffloadConfig,
        kv_caches: CanonicalKVCaches,
        *,
        spec: OffloadingSpec | None = None,
        events: EventSink | None = None,
        metrics: MetricsSink | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.kv_caches = kv_caches
        self.spec = (
            spec
            if spec is not None
            else OffloadingSpecFactory.create_spec(config, KVCacheConfig.from_canonical(kv_caches, config))
        )
        self.geometry = _geometry(config, kv_caches)
        self._events, self._metrics, self._clock = events, metrics, clock
        self._requests: dict[str, RequestState] = {}
        self._recent: OrderedDict[str, BlockChain] = OrderedDict()
        self._owner: int | None = None
        self._pid = os.getpid()
        self._closed = False
        self._started = False

    # ---- life

    def start(self) -> None:
        """Allocate host memory and start the handlers; may take seconds per 10 GiB. Any thread.

        Raises:
            NoSpaceError: Host memory is too small; nothing is left behind.
        """
        if self._started:
            raise UsageError("the engine was started before")
        manager = self.spec.get_manager()
        self.bridge = CompletionBridge()
        worker = OffloadingWorker()
        try:
            for src_cls, dst_cls, handler in self.spec.get_handlers(self.kv_caches):
                worker.register_handler(src_cls, dst_cls, handler)
        except BaseException:
            worker.shutdown()
            self.spec.shutdown()
            self.bridge.close()
            raise
        worker.set_notify(self.bridge.notify)
        config = self.config
        self._core = Core(
            manager,
            self.geometry,
            capacity=manager.stats().capacity,
            events=self._events,
            metrics=self._metrics,
            clock=self._clock,
        )
        self._core.enabled = config.enabled
        deadlines = {"load": config.load_deadline_seconds, "store": config.store_deadline_seconds}
        self._board = TransferBoard(worker, deadlines, self._clock, self._on_ended, self._on_hung)  # type: ignore[arg-type]  # literal keys
        self._loads = LoadDesk(self._core, self._board, config.max_inflight_load_bytes, config.max_inflight_jobs)
        self._stores = StoreDesk(
            self._core, self._board, self._loads.first_use, config.max_inflight_store_bytes, config.max_inflight_jobs
        )
        self._leases = LeaseDesk(self._core, config.lease_seconds)
        self._started = True

    def adopt(self) -> None:
        """Make the calling thread the owner."""
        self._owner = threading.get_ident()

    def __enter__(self) -> Self:
        self.start()
        self.adopt()
        return self

    def __exit__(self, et: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close(self.config.drain_seconds)

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("the engine is closed")
        if self._owner != threading.get_ident() or self._pid != os.getpid():
            self._complain()

    def _complain(self) -> None:
        if not self._started:
            raise UsageError("the engine was not started: use `with OffloadEngine(...)` or call start() and adopt()")
        if self._pid != os.getpid():
            raise UsageError(f"the engine belongs to process {self._pid}; it cannot be used after fork ({os.getpid()})")
        raise UsageError(f"the engine belongs to thread {self._owner}, not to {threading.get_ident()}")

    def close(self, timeout: float = 10.0) -> None:
        """Refuse new work, let running copies end, release everything. Idempotent.

        Raises:
            UndrainedCopies: Copies still run after `timeout` seconds: their memory stays mapped on purpose, everything
                else was released.
        """
        if self._closed or not self._started:
            self._closed = True
            return
        self._check()
        self.begin_close()
        deadline = time.monotonic() + timeout
        while not self._board.idle and (left := deadline - time.monotonic()) > 0:
            self._sleep_until_news(left)
            self._poll()
        self.finish_close()

    def begin_close(self) -> None:
        """First half of `close`: refuse new work, end requests and leases, take queued offers back."""
        self._core.enabled = False
        for request_id in list(self._requests):
            self.abort(request_id)
            self.finish(request_id)

    def finish_close(self) -> None:
        """Second half of `close`, when copies have ended or time is up. May block while threads end.

        Raises:
            UndrainedCopies: Copies still run.
        """
        unended = self._board.unended()
        self._closed = True
        core = self._core
        core.manager.reset_cache()
        core.flush_events(cause="reset")
        if unended:
            jobs = [job.id for transfer in unended for job in transfer.jobs]
            blocks = sorted({block for transfer in unended for job in transfer.jobs for block in job.gpu_blocks})
            raise UndrainedCopies(
                f"copies of jobs {jobs} still run; host memory stays mapped, GPU blocks {blocks} must not be reused",
                jobs=jobs,
            )
        self._board.worker.shutdown()
        self.spec.shutdown()
        core.manager.shutdown()
        self.bridge.close()

    # ---- requests

    def begin(self, context: ReqContext | str, chain: BlockChain) -> None:
        """Register a request.

        Raises:
            UsageError: No id, an id in use, or a chain that was not cut for this model.
        """
        self._check()
        context = ReqContext(context) if isinstance(context, str) else context
        if not context.req_id:
            raise UsageError("a request needs a req_id")
        if context.req_id in self._requests:
            raise UsageError(f"request {context.req_id!r} has begun already")
        if chain.groups != self.geometry.groups:
            raise UsageError(f"the chain was cut for {chain.groups}, the model has {self.geometry.groups}")
        req_id, now = context.req_id, self._clock()
        if context.started_seconds is None:
            context = replace(context, started_seconds=now)
        self._requests[req_id] = RequestState(context, chain, [0] * len(chain.groups), now)

    def state(self, request_id: str) -> RequestState:
        """Return a request's state.

        Raises:
            UsageError: It has not begun or has finished.
        """
        request = self._requests.get(request_id)
        if request is None:
            raise UsageError(f"request {request_id!r} has not begun or has finished")
        return request

    def hint(self, request_id: str, outcome: RequestOutcome) -> None:
        """Say what is known about a request's end; policies learn of it at `finish`."""
        self._check()
        self.state(request_id).outcome = outcome

    def finish(self, request_id: str) -> None:
        """End a request: leases end, offered stores still go out, running copies run on. Unknown ids are ignored."""
        self._check()
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        core = self._core
        self._leases.close_all_of(request.context, "left")
        keys: list[OffloadKey] = []
        for group_idx in range(len(self.geometry.groups)):
            keys += request.chain.keys(group_idx)
        now = self._clock()
        outcome = request.outcome or RequestOutcome()
        if outcome.now_seconds is None:
            outcome = replace(outcome, now_seconds=now)
        core.manager.finish_request(request.context, outcome, keys)
        core.flush_events()
        self._recent[request_id] = request.chain
        self._recent.move_to_end(request_id)
        while len(self._recent) > _RECENT_REQUESTS:
            self._recent.popitem(last=False)

    def abort(self, request_id: str) -> bool:
        """Stop a request in any state: nothing new is done for it, waiting calls end. False for an unknown id."""
        self._check()
        request = self._requests.get(request_id)
        if request is None:
            return False
        if not request.aborted:
            request.aborted = True
            self._core.metrics.count("aborts")
            self._leases.close_all_of(request.context, "aborted")
            for job in list(request.jobs.values()):
                if job.state is JobState.QUEUED:
                    self._stores.drop_queued(job, "aborted")
        return True

    def match(self, request_id: str) -> PrefixMatch:
        """Return how much of a request's prefix is held: pins nothing, counts nothing; cheap enough to poll."""
        self._check()
        return self._loads.match(self.state(request_id))

    # ---- jobs

    def submit_load(
        self, request_id: str, gpu_blocks: GPULoadStoreSpec, *, after: Ready = HOST_VISIBLE, leave_tokens: int = 0
    ) -> JobId | None:
        """Load the ready part of the given blocks; None when nothing of it is ready, or too many bytes are in flight.

        Args:
            request_id: Whose prefix.
            gpu_blocks: Destinations; `block_indices` say where in the sequence they start.
            after: What must have happened before the destinations may be overwritten.
            leave_tokens: Tokens at the end of the chain that are left to compute.

        Raises:
            UsageError: Unknown request, or blocks that do not fit the model.
        """
        self._check()
        request = self.state(request_id)
        tables, starts = self.geometry.split(gpu_blocks)
        first = self.geometry.common_start(tables, starts)
        max_tokens = request.chain.num_tokens - leave_tokens
        end = self.plan_load(request, tables, first, max_tokens)
        self.look_up(request)
        if end <= first or not self.room_for_load(first, end):
            return None
        job = self.run_load(request, tables, first, end, max_tokens, after)
        return self._report(job)

    def look_up(self, request: RequestState) -> None:
        """Book the request's look-ups and touch its keys, once in its life."""
        self._loads.first_use(request)

    def plan_load(self, request: RequestState, tables: Tables, first_token: int, max_tokens: int) -> int:
        """Return the token up to which `tables`, which start at `first_token`, can be filled now."""
        return self._loads.plan(request, tables, first_token, max_tokens)

    def room_for_load(self, first_token: int, end_token: int) -> bool:
        """A load of tokens `[first_token, end_token)` may be submitted now."""
        return self._loads.room(self._loads.size(first_token, end_token))

    def run_load(
        self, request: RequestState, tables: Tables, first_token: int, end_token: int, max_tokens: int, after: Ready
    ) -> Job:
        """Pin and submit a planned load; the job may have failed already."""
        asked = min(self.geometry.cut(max_tokens), first_token + len(tables[0]) * self.geometry.block_size)
        return self._loads.start(request, tables, first_token, end_token, partial=end_token < asked, after=after)

    def pending_job(self, request: RequestState) -> Job | None:
        """Return the last job that still writes a block right behind the ready prefix; None when none does."""
        return self._loads.pending_job(request)

    def _report(self, job: Job) -> JobId:
        job.report = True
        if job.result is not None:
            self._core.reported.append(job)
        return job.id

    def submit_store(self, request_id: str, gpu_blocks: GPULoadStoreSpec, ready: Ready) -> JobId:
        """Store the given blocks, which hold final KV data once `ready` has happened; a refusal is in its result.

        Raises:
            UsageError: Unknown request, a group does not start at an offloaded block, or reaches beyond the chain.
        """
        self._check()
        job_id = self._report(self.offer_spec(self.state(request_id), gpu_blocks, ready))
        self.flush_stores()
        return job_id

    def offer_spec(self, request: RequestState, gpu_blocks: GPULoadStoreSpec, ready: Ready) -> Job:
        """Reserve a store of explicit blocks; `flush_stores` submits it."""
        return self._stores.offer_spec(request, gpu_blocks, ready)

    def offer_computed(self, request: RequestState, tables: Tables, computed_tokens: int, ready: Ready) -> Job:
        """Reserve a store of what was computed since the last offer; `flush_stores` submits it."""
        return self._stores.offer_computed(request, tables, computed_tokens, ready)

    # ---- leases

    def open_lease(self, request: RequestState) -> LeaseState:
        """Pin the ready prefix of a request."""
        self._check()
        return self._leases.open(request, self._loads.match(request))

    def close_lease(self, lease: LeaseState) -> None:
        """Unpin; idempotent, also after the engine was closed."""
        if not self._closed:
            self._leases.close(lease, "left")

    def why_lease_dead(self, lease: LeaseState) -> str | None:
        """Return why a lease pins nothing any more; None while it holds."""
        return self._leases.why_dead(lease)

    # ---- the rhythm

    def flush_stores(self) -> None:
        """Submit all offers of this tick as one transfer."""
        self._check()
        self._stores.flush()

    def poll(self) -> Sequence[JobDone]:
        """Take what finished; never raises for a fault of a handler (see `health`)."""
        self._check()
        self._poll()
        reported, self._core.reported = self._core.reported, []
        return [JobDone(job.id, job.request_id, job.kind, job.result) for job in reported if job.result is not None]

    def _poll(self) -> None:
        self.bridge.consume()
        try:
            self._board.poll()
        except Exception as error:  # noqa: BLE001 - whatever a handler raises makes the service unhealthy
            self.break_down("polling the handlers failed", error)
        self._leases.expire()

    def break_down(self, reason: str, error: BaseException) -> None:
        """Become unhealthy: waiting calls end with `error`, new ones miss; running copies keep their blocks."""
        core = self._core
        if core.fault is None:
            core.fault, core.fault_reason = error, reason
            logger.error("%s: %r; serving misses from now on", reason, error, exc_info=error)
        for transfer in self._board.unended():
            for job in transfer.jobs:
                if job.state is JobState.RUNNING:
                    self._answer_early(job, "unhealthy", error)

    def _answer_early(self, job: Job, reason: str, error: BaseException | None) -> None:
        if job.kind == "load":
            self._loads.answer_early(job, reason, error)
        else:
            self._stores.answer_early(job, reason, error)  # type: ignore[arg-type]  # one of the store's reasons

    def _on_ended(self, transfer: Transfer, result: TransferResult) -> None:
        core = self._core
        core.metrics.observe("transfer_queue_seconds", result.queue_time or 0.0, transfer.kind)
        core.metrics.observe("transfer_copy_seconds", result.transfer_time or 0.0, transfer.kind)
        if result.success:
            core.metrics.count("transfer_bytes", transfer.num_bytes, transfer.kind)
        desk = self._loads if transfer.kind == "load" else self._stores
        for job in transfer.jobs:
            desk.ended(job, result)

    def _on_hung(self, transfer: Transfer) -> None:
        blocks = sorted({block for job in transfer.jobs for block in job.gpu_blocks})
        logger.error(
            "a %s has not ended after its deadline: GPU blocks %s are quarantined until it does", transfer.kind, blocks
        )
        self._core.metrics.count("deadlines", label=transfer.kind)
        for job in transfer.jobs:
            if job.state is JobState.RUNNING:
                self._answer_early(job, "deadline", None)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when `poll` has something to take."""
        return self.bridge.fileno()

    def wait(self, jobs: Collection[JobId], timeout: float) -> Sequence[JobDone]:
        """Block until none of `jobs` can touch its GPU blocks, or `timeout` seconds passed; return what finished."""
        self._check()
        deadline = time.monotonic() + timeout
        wanted = set(jobs)
        done: list[JobDone] = list(self.poll())
        while (left := deadline - time.monotonic()) > 0 and self._copying() & wanted:
            self._sleep_until_news(left)
            done += self.poll()
        return done

    def _copying(self) -> set[JobId]:
        return {job.id for transfer in self._board.unended() for job in transfer.jobs}

    def _sleep_until_news(self, seconds: float) -> None:
        upcoming = self.next_deadline()
        if upcoming is not None:
            seconds = min(seconds, max(0.0, upcoming - self._clock()))
        poller = select.poll()
        poller.register(self.fileno(), select.POLLIN)
        poller.poll(min(seconds, 1.0) * 1000)

    def next_deadline(self) -> float | None:
        """Return when `poll` should be called even if nothing finished, on the engine's clock; None: never."""
        times = [time for time in (self._board.next_deadline(), self._leases.next_deadline()) if time is not None]
        return min(times, default=None)

    def busy_gpu_blocks(self, gpu_blocks: Sequence[int]) -> Sequence[int]:
        """Return those of `gpu_blocks` that a copy may still touch."""
        self._check()
        return self._core.book.busy(gpu_blocks)

    def give_back(self, gpu_blocks: Sequence[int], free: Free | None) -> None:
        """Pass GPU blocks to `free` as soon as no copy can touch them, each once."""
        self._core.book.give_back(gpu_blocks, free)

    # ---- the cache as a whole

    def reset_cache(self) -> int:
        """Drop everything: the content is invalid. Running copies end without effect. Return engine blocks dropped."""
        self._check()
        core = self._core
        core.generation += 1
        core.writing.clear()
        dropped = core.manager.reset_cache()
        core.flush_events(cause="reset")
        core.metrics.count("resets")
        return dropped * self.geometry.groups[0].factor

    def discard(self, keys: Collection[OffloadKey]) -> int:
        """Drop some keys, whose content is invalid; return how many were held."""
        self._check()
        dropped = self._core.manager.discard(keys)
        self._core.flush_events(cause="discarded")
        return dropped

    @property
    def enabled(self) -> bool:
        """Loads may hit and stores are taken; switching off drops the cache and announces the removals."""
        return self._core.enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self._check()
        if self._core.enabled and not value:
            self.reset_cache()
        self._core.enabled = value

    def pause_stores(self, paused: bool = True) -> None:
        """Reject stores until called with False; loads go on."""
        self._check()
        self._core.stores_paused = paused

    @property
    def idle(self) -> bool:
        """No copy runs and no store waits to be submitted."""
        return self._board.idle and not self._stores.num_queued

    def explain(self, request_id: str) -> list[BlockReport]:
        """Say for each offloaded block of a running or recent request why it is, or is not, served."""
        self._check()
        request = self._requests.get(request_id)
        chain = request.chain if request is not None else self._recent.get(request_id)
        if chain is None:
            raise UsageError(f"request {request_id!r} is not known (the last {_RECENT_REQUESTS} are)")
        return explain(self._core, chain)

    def health(self) -> Health:
        """Return whether hits are served, and what is degraded."""
        core = self._core
        if self._closed:
            return Health(ok=False, reason="closed")
        if core.fault is not None:
            return Health(ok=False, reason=f"{core.fault_reason}: {core.fault!r}")
        if self._board.num_hung:
            return Health(ok=True, reason=f"{self._board.num_hung} transfers are hung, their blocks are quarantined")
        return Health(ok=True, reason="" if core.enabled else "disabled")

    def stats(self) -> Stats:
        """Return counters and occupancy."""
        stats = collect_stats(self._core, self._board)
        stats.requests, stats.leases = len(self._requests), len(self._leases)
        stats.queued_stores = self._stores.num_queued
        stats.loaded_bytes, stats.stored_bytes = self._loads.loaded_bytes, self._stores.stored_bytes
        return stats

    def pins(self) -> dict[str, int]:
        """Return the offloaded blocks pinned by leases, per request id."""
        return self._leases.by_owner()

    @property
    def fault(self) -> BaseException | None:
        """Why the engine is unhealthy; None while it is healthy."""
        return self._core.fault


def _geometry(config: OffloadConfig, kv_caches: CanonicalKVCaches) -> BlockGeometry:
    groups, num_groups = config.group_layouts(), len(kv_caches.group_data_refs)
    if len(groups) == 1:
        groups *= num_groups
    if len(groups) != num_groups:
        raise UsageError(f"gpu_block_size names {len(groups)} groups, the KV caches have {num_groups}")
    block_bytes = [sum(ref.page_size_bytes for ref in refs) for refs in kv_caches.group_data_refs]
    return BlockGeometry(groups, block_bytes, kv_caches.num_blocks)
