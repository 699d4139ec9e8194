"""`KVOffloadManager`: kvoffload's manager in the place of vLLM's, in the scheduler's process.

Theory of operation. vLLM names neither jobs nor reservations when it reports completions: it gives the request and an
unordered set of keys, and after `reset_cache()` it gives nothing. The adapter therefore remembers the ticket of each
reservation with its request, and knows by it which copy ended, which one failed on a worker (`note_failed`), and which
belong to a cache that was reset. Memory of reset copies is given back at the next schedule: by then vLLM has put the
order to wait for them in front of everything that could use that memory again.

Nothing here waits, and the data plane is elsewhere (`vllm_worker`), possibly in another process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingManager,
    PrepareStoreOutput,
    RequestOffloadingContext,
    ScheduleEndContext,
    TierFilter,
)
from vllm.v1.kv_offload.base import OffloadingEvent as VllmEvent
from vllm.v1.kv_offload.base import ReqContext as VllmContext
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvoffload.integrations.vllm_feed import Feed
from kvoffload.integrations.vllm_metrics import ManagerMetrics
from kvoffload.integrations.vllm_recency import (
    FINISH_POLICIES,
    RequestUses,
    RequestwiseARC,
    request_keys,
)
from kvoffload.integrations.vllm_requests import GroupView, RequestView
from kvoffload.integrations.vllm_state import HostBlocks, Job, RequestState, request_context
from kvoffload.keys import OffloadKey
from kvoffload.manager.base import ReqContext, RequestOutcome
from kvoffload.manager.cpu import CPUOffloadingManager
from kvoffload.manager.reuse_filter import FilterReusedOffloadingManager

_ANYONE = ReqContext()
"""For lookups that the adapter itself counts once a request."""

_HIT, _MISS, _PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING


class KVOffloadManager(OffloadingManager):  # type: ignore[misc] # vLLM is untyped here
    """vLLM's view of a `CPUOffloadingManager`.

    Args:
        num_blocks: Offloaded blocks in host memory.
        cache_policy: Any policy of kvoffload.
        store_threshold: Requests that must have offered a block before it is stored; below 2 all are.
        max_tracker_size: Blocks that the reuse filter counts.
        feed: Where stored and removed blocks are announced.
        tokens_per_hash: Tokens that one hash of a vLLM request covers.
        num_groups: KV-cache groups.
        pending_wait_seconds: How long a request may be held up by blocks that are still written before they are a miss.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        num_blocks: int,
        cache_policy: str = "lru",
        *,
        store_threshold: int = 0,
        max_tracker_size: int = 64_000,
        feed: Feed | None = None,
        tokens_per_hash: int = 16,
        num_groups: int = 1,
        pending_wait_seconds: float = 0.2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.feed = feed
        policy = RequestwiseARC if cache_policy == "arc" else cache_policy
        self.cpu = CPUOffloadingManager(num_blocks, policy, enable_events=feed is not None)
        self.filter = (
            FilterReusedOffloadingManager(self.cpu, store_threshold, max_tracker_size) if store_threshold >= 2 else None
        )
        self.metrics = ManagerMetrics(self.cpu)
        self.on_shutdown: list[Callable[[], None]] = []
        self.pending_wait_seconds = pending_wait_seconds
        self._front = self.filter or self.cpu
        self._clock = clock
        self._peek = self.cpu.peek
        self._one_group = num_groups == 1
        self._uses_at_finish = cache_policy in FINISH_POLICIES
        self._recency_only = cache_policy == "lru"
        self._tokens_per_hash = tokens_per_hash
        self._generation = 0
        self._open: dict[int, Job] = {}
        self._failed: set[int] = set()
        self._reset: list[Job] = []
        self._closed_to: set[str] = set()
        self._views: dict[str, RequestView] = {}
        self._groups: Mapping[int, GroupView] | None = None

    # ---- requests

    @property
    def wants_requests(self) -> bool:
        """Whether blocks are described, so that the manager needs to see the requests themselves."""
        return self.feed is not None and self.feed.needs_infos

    def attach_request(self, request: Any, groups: Callable[[], Mapping[int, GroupView]]) -> None:  # noqa: ANN401
        """Take a vLLM `Request` whose blocks may be offered; `groups` is asked once."""
        if self._groups is None:
            self._groups = groups()
        self._views[request.request_id] = RequestView(request, self._groups, self._tokens_per_hash)

    def on_new_request(self, req_context: VllmContext) -> RequestOffloadingContext:
        """Open a request."""
        self._state(req_context)
        tiers = req_context.load_tier_filter
        if tiers is not TierFilter.ALL and not tiers.allows(Medium.CPU, None):
            self._closed_to.add(req_context.req_id)
        return RequestOffloadingContext()

    def _state(self, req_context: VllmContext) -> RequestState:
        state: RequestState | None = req_context.get_state(RequestState)
        if state is None:
            state = RequestState(request_context(req_context), self._generation)
            req_context.set_state(state)
        elif state.generation != self._generation:
            state.restart(self._generation)
        return state

    def on_request_finished(self, req_context: VllmContext) -> None:
        """Count the request's uses; completions of its copies may still come."""
        state = self._state(req_context)
        req_id = req_context.req_id
        self._views.pop(req_id, None)
        self._closed_to.discard(req_id)
        keys: Sequence[OffloadKey] = ()
        outcome: RequestOutcome | None = None
        if not self._uses_at_finish:
            keys = self._all_keys(req_context, state)
            outcome = RequestOutcome(now_seconds=self._clock())
        elif self._recency_only:
            position = req_context.get_offload_key_position
            self.cpu.refresh(state.context.uses.keys(position, one_group=self._one_group))
        else:
            state.context.position = req_context.get_offload_key_position
            state.context.one_group = self._one_group
        self._front.finish_request(state.context, outcome, keys)
        state.context.uses = RequestUses()

    def _all_keys(self, req_context: VllmContext, state: RequestState) -> tuple[OffloadKey, ...]:
        keys = getattr(req_context, "_offload_key_positions", None) or state.context.uses.keys()
        return tuple(request_keys(keys))

    def _announce_start(self, req_context: VllmContext, state: RequestState) -> None:
        if not self._uses_at_finish and not state.announced:
            state.announced = True
            state.context.started_seconds = self._clock()
            self.cpu.touch(self._all_keys(req_context, state), state.context)

    # ---- lookups and loads

    def lookup(self, key: OffloadKey, req_context: VllmContext) -> LookupResult:
        """Say whether a block can be loaded; cheap, since vLLM polls it while a block is written."""
        found = self._peek(key)
        if found and not self._closed_to:
            return _HIT
        if found is False:
            state = self._state(req_context)
            if key != state.last_miss:
                state.last_miss = key
                self.cpu.lookup(key, _ANYONE)
            return _MISS
        if req_context.req_id in self._closed_to:
            return _MISS
        return _HIT if found else self._lookup_pending(key, req_context)

    def _lookup_pending(self, key: OffloadKey, req_context: VllmContext) -> LookupResult:
        state = self._state(req_context)
        now = self._clock()
        if state.pending_since is None:
            state.pending_since = now
            self.cpu.lookup(key, _ANYONE)
        return _PENDING if now - state.pending_since < self.pending_wait_seconds else _MISS

    def get_load_source(self, key: OffloadKey, req_context: VllmContext) -> CacheHitSource:  # noqa: ARG002
        """Return host memory: the only tier."""
        return CacheHitSource.HOST

    def prepare_load(self, keys: Collection[OffloadKey], req_context: VllmContext) -> HostBlocks:
        """Pin blocks for one load job."""
        state = self._state(req_context)
        self._announce_start(req_context, state)
        spec = self.cpu.prepare_load(keys, state.context)
        self.cpu.lookup_prefix(tuple(keys), _ANYONE)
        state.pending_since = None
        if spec.ticket is not None:
            state.loads.append(self._opened(Job(spec.ticket, list(keys), is_store=False)))
        state.context.uses.reused(tuple(keys))
        self.metrics.loads += 1
        return HostBlocks.of(spec, req_context.req_id)

    def complete_load(self, keys: Collection[OffloadKey], req_context: VllmContext) -> None:
        """Unpin; blocks whose load failed are dropped, so that the request's next lookup recomputes them."""
        job = self._closed(self._state(req_context).loads, keys)
        if job is None:
            return
        self.cpu.complete_load(job.keys, ticket=job.ticket)
        if job.ticket in self._failed:
            self._failed.discard(job.ticket)
            self.metrics.failed_loads += 1
            self.cpu.discard(job.keys)
            self._publish()

    def _opened(self, job: Job) -> Job:
        self._open[job.ticket] = job
        return job

    def _closed(self, jobs: list[Job], keys: Collection[OffloadKey]) -> Job | None:
        """Return the request's job on `keys`, which are all of its keys in any order, and forget it."""
        probe = next(iter(keys), None)
        for index, job in enumerate(jobs):
            if len(jobs) == 1 or probe in job.keys:
                del jobs[index]
                self._open.pop(job.ticket, None)
                return job
        return None

    # ---- stores

    def prepare_store(self, keys: Collection[OffloadKey], req_context: VllmContext) -> PrepareStoreOutput | None:
        """Reserve blocks for an offer; None when there is no room."""
        state = self._state(req_context)
        self._announce_start(req_context, state)
        state.pending_since = None
        offered = list(keys)
        held = self.cpu.readable(offered)
        if held:
            state.context.uses.reused(held)
        output = self._front.prepare_store(offered, state.context)
        if output is None:
            self.metrics.refused_stores += 1
            state.context.uses.refused(self._admitted(offered))
            return None
        stored = output.keys_to_store
        if stored:
            state.context.uses.stored(stored)
        if output.ticket is not None:
            state.stores.append(self._opened(Job(output.ticket, stored, is_store=True)))
            self._describe(stored, req_context)
        if output.evicted_keys:
            self._publish()
        return PrepareStoreOutput(stored, HostBlocks.of(output.store_spec, req_context.req_id), output.evicted_keys)

    def _admitted(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Return the keys of a refused offer that count as used: readable ones, and those that wanted a block."""
        peek = self._peek
        if self.filter is None:
            return [key for key in keys if peek(key) is not None]
        counts, threshold = self.filter.counts, self.filter.store_threshold
        return [key for key in keys if (found := peek(key)) or (found is False and counts.get(key, 0) >= threshold)]

    def _describe(self, keys: Iterable[OffloadKey], req_context: VllmContext) -> None:
        feed, view = self.feed, self._views.get(req_context.req_id)
        if feed is None or view is None:
            return
        for key in keys:
            info = view.info(key, req_context.get_offload_key_position(key))
            if info is not None:
                feed.infos[key] = info

    def complete_store(self, keys: Collection[OffloadKey], req_context: VllmContext, success: bool = True) -> None:
        """Make blocks readable, or drop them when their copy failed on any worker, whatever vLLM says."""
        job = self._closed(self._state(req_context).stores, keys)
        if job is None:
            return
        if job.ticket in self._failed:
            self._failed.discard(job.ticket)
            success = False
        if not success:
            self.metrics.failed_stores += 1
        self.cpu.complete_store(job.keys, success, ticket=job.ticket)
        if not success and self.feed is not None:
            self.feed.forget(job.keys)
        self._publish()

    # ---- what the worker and the engine tell

    def note_failed(self, tickets: Iterable[int]) -> None:
        """Hear of copies that failed on a worker, before vLLM reports them as complete."""
        self._failed.update(ticket for ticket in tickets if ticket in self._open)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:  # noqa: ARG002
        """Give back the memory of copies that were running at a reset: this step's orders wait for them first."""
        if not self._reset:
            return
        for job in self._reset:
            if job.is_store:
                self.cpu.complete_store(job.keys, False, ticket=job.ticket)
            else:
                self.cpu.complete_load(job.keys, ticket=job.ticket)
        self._reset.clear()

    def has_pending_work(self) -> bool:
        """Whether copies of a cache that was reset still hold memory: the engine must step once more."""
        return bool(self._reset)

    def reset_cache(self) -> None:
        """Drop every block and announce it; vLLM will not report copies that are running."""
        self._reset += self._open.values()
        self._open.clear()
        self._failed.clear()
        self._generation += 1
        self.cpu.reset_cache()
        if self.feed is not None:
            self.feed.reset(self.cpu.take_events())
        self.metrics.resets += 1
        self.metrics.refresh()

    # ---- events and figures

    def _publish(self) -> None:
        if self.feed is not None and self.cpu.events:
            self.feed.publish(self.cpu.take_events())

    def take_events(self) -> Iterable[VllmEvent]:
        """Return events for vLLM's own publisher; none when kvoffload publishes itself."""
        return self.feed.take() if self.feed is not None else ()

    def get_stats(self) -> Any:  # noqa: ANN401 - vLLM's OffloadingConnectorStats
        """Return what changed since the last call, None if nothing did."""
        return self.metrics.take()

    def shutdown(self) -> None:
        """Close the feed and what `on_shutdown` names; idempotent."""
        if self.feed is not None:
            self.feed.close()
        while self.on_shutdown:
            self.on_shutdown.pop()()
