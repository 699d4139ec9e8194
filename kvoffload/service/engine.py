"""`OffloadEngine`: the synchronous service, for a stepping scheduler; the asyncio service is built on it.

Theory of operation. One thread owns the engine and calls everything but `CompletionBridge.notify`. Calls never wait
(except `start`, `wait` and `close`): they decide in the manager, hand copies to handlers and return. `poll()` takes
what finished; `fileno()` becomes readable when there is something to poll. A failed copy is a result; `poll` never
raises.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from kvoffload.chain import BlockChain
from kvoffload.errors import UsageError
from kvoffload.keys import OffloadKey
from kvoffload.manager.base import ReqContext, RequestOutcome
from kvoffload.manager.specs import GPULoadStoreSpec
from kvoffload.service.arguments import (
    as_list,
    check_keys,
    check_outcome,
    check_ready,
    check_timeout,
    deadline_after,
    whole_number,
)
from kvoffload.service.core import LeaseState, RequestState
from kvoffload.service.jobs import Job, JobState
from kvoffload.service.life import EngineLife
from kvoffload.service.ownership import Free
from kvoffload.service.reports import collect_stats, explain
from kvoffload.service.results import BlockReport, Health, JobDone, LoadOutcome, LoadResult, PrefixMatch, Stats
from kvoffload.transfer.base import HOST_VISIBLE, JobId, Ready

if TYPE_CHECKING:
    from kvoffload.service.ranks.remote import RemoteWorkers


class OffloadEngine(EngineLife):
    """Offloads KV-cache blocks for one model replica; synchronous, one owner thread.

    Args:
        config: What to do.
        kv_caches: The GPU side in this process; None with `workers`.
        workers: Ranks in other processes, which own the GPU side; None with `kv_caches`.
        spec: Manager and handlers to use instead of those that `config.spec_name` names.
        events: Where residency changes go.
        metrics: Where counts go, instead of a recorder of its own.
        clock: Monotonic seconds.
    """

    # ---- requests

    def begin(self, context: ReqContext | str, chain: BlockChain) -> None:
        """Register a request.

        Raises:
            UsageError: No id, an id in use, or a chain that was not cut for this model.
        """
        self.check()
        self._roster.begin(ReqContext(context) if isinstance(context, str) else context, chain)

    def state(self, request_id: str) -> RequestState:
        """Return a request's state.

        Raises:
            UsageError: It has not begun or has finished.
        """
        return self._roster.get(request_id)

    def hint(self, request_id: str, outcome: RequestOutcome) -> None:
        """Say what is known about a request's end; policies learn of it at `finish`."""
        self.check()
        check_outcome(outcome)
        self.state(request_id).outcome = outcome

    def finish(self, request_id: str) -> None:
        """End a request: leases end, offered stores still go out, running copies run on. Unknown ids are ignored."""
        self.check()
        request = self._roster.find(request_id)
        if request is not None:
            self.leases.close_all_of(request, "left")
            self._roster.finish(request)

    def abort(self, request_id: str) -> bool:
        """Stop a request in any state: nothing new is done for it, waiting calls end. False for an unknown id."""
        self.check()
        request = self._roster.find(request_id)
        if request is None:
            return False
        if not request.aborted:
            request.aborted = True
            self._core.metrics.count("aborts")
            self.leases.close_all_of(request, "aborted")
            for job in list(request.jobs.values()):
                if job.state is JobState.QUEUED:
                    self.stores.drop_queued(job, "aborted")
        return True

    def match(self, request_id: str) -> PrefixMatch:
        """Return how much of a request's prefix is held: pins nothing, counts nothing; cheap enough to poll."""
        self.check()
        return self.loads.match(self.state(request_id))

    def begin_close(self) -> None:
        """Refuse new work, take queued offers back, end requests and leases."""
        self._core.enabled = False
        self.stores.drop_all_queued("aborted")
        for request_id in self._roster.ids:
            self.abort(request_id)
            self.finish(request_id)

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
        self.check()
        request = self.state(request_id)
        check_ready(after, "after")
        leave_tokens = whole_number(leave_tokens, "leave_tokens")
        tables, starts = self.geometry.split(gpu_blocks)
        first = self.geometry.common_start(tables, starts)
        max_tokens = request.chain.num_tokens - leave_tokens
        loads = self.loads
        end = loads.plan(request, tables, first, max_tokens)
        loads.first_use(request)
        if end <= first or not loads.room(loads.size(first, end)):
            reason = None if end <= first else "backpressure"
            self.ledger.answered(LoadResult(LoadOutcome.MISS, reason=reason), 0.0)
            return None
        partial = end < loads.most(tables, first, max_tokens)
        return self._report(loads.start(request, tables, first, end, partial=partial, after=after))

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
        self.check()
        job_id = self._report(self.stores.offer_spec(self.state(request_id), gpu_blocks, ready))
        self.flush_stores()
        return job_id

    # ---- leases

    def open_lease(self, request: RequestState) -> LeaseState:
        """Pin the ready prefix of a request."""
        self.check()
        return self.leases.open(request, self.loads.match(request))

    def close_lease(self, lease: LeaseState) -> None:
        """Unpin; idempotent, also after the engine was closed."""
        if not self._closed:
            self.leases.close(lease, "left")

    def why_lease_dead(self, lease: LeaseState) -> str | None:
        """Return why a lease pins nothing any more; None while it holds."""
        return self.leases.why_dead(lease)

    # ---- the rhythm

    def flush_stores(self) -> None:
        """Submit all offers of this tick as one transfer."""
        self.check()
        self.stores.flush()

    def poll(self) -> Sequence[JobDone]:
        """Take what finished; never raises for a fault of a handler (see `health`)."""
        self.check()
        self._poll()
        reported, self._core.reported = self._core.reported, []
        for job in reported:
            if isinstance(job.result, LoadResult):
                self.ledger.answered(job.result, job.result.queue_seconds + job.result.copy_seconds)
        return [JobDone(job.id, job.request_id, job.kind, job.result) for job in reported if job.result is not None]

    def wait(self, jobs: Collection[JobId], timeout: float) -> Sequence[JobDone]:
        """Block until none of `jobs` can touch its GPU blocks, or `timeout` seconds passed; return what finished."""
        self.check()
        check_timeout(timeout)
        deadline = deadline_after(timeout)
        wanted = set(as_list(jobs, "jobs", "job ids"))
        done: list[JobDone] = list(self.poll())
        while (left := deadline - time.monotonic()) > 0 and wanted & {job.id for job in self._board.unended_jobs()}:
            self._sleep_until_news(left)
            done += self.poll()
        return done

    def busy_gpu_blocks(self, gpu_blocks: Sequence[int]) -> Sequence[int]:
        """Return those of `gpu_blocks` that a copy may still touch."""
        self.check()
        return self._core.book.busy(as_list(gpu_blocks, "gpu_blocks", "block ids"))

    def note_owner(self, gpu_blocks: Iterable[int]) -> None:
        """With `debug_checks`: GPU blocks were handed out, and nothing was written to them yet."""
        self._core.checks.owned(gpu_blocks)

    def give_back(self, gpu_blocks: Sequence[int], free: Free | None) -> None:
        """Pass GPU blocks to `free` as soon as no copy can touch them, each once."""
        self._core.book.give_back(gpu_blocks, free)

    # ---- ranks with the piggyback transport

    def take_commands(self) -> bytes:
        """Return what every rank has to do next; it goes into the step message to each rank."""
        return self._ranks().take_commands()

    def apply_results(self, rank: int, results: bytes) -> None:
        """Take what `OffloadRankWorker.execute` returned on a rank; `poll` then knows what ended."""
        self._ranks().apply_results(rank, results)

    def note_step(self, step: int) -> None:
        """Say that the results of step `step` came back; with `debug_checks` ranks refuse stores of a later step."""
        self._ranks().note_step(step)

    def _ranks(self) -> RemoteWorkers:
        self.check()
        if self.ground.workers is None:
            raise UsageError("this engine has no rank processes: they come with workers=RemoteWorkers(world_size)")
        return self.ground.workers

    # ---- the cache as a whole

    def reset_cache(self) -> int:
        """Drop everything: the content is invalid. Running copies end without effect. Return engine blocks dropped."""
        self.check()
        core = self._core
        self.stores.drop_all_queued("reset")
        core.generation += 1
        core.forget_all_writing()
        dropped = core.manager.reset_cache()
        core.flush_events(cause="reset")
        core.metrics.count("resets")
        return dropped * self.geometry.groups[0].factor

    def discard(self, keys: Collection[OffloadKey]) -> int:
        """Drop some keys, whose content is invalid; return how many were held.

        Running loads of them end with reason `"reset"`, running stores count them as failed for that reason.
        """
        self.check()
        keys = check_keys(keys)
        dropped = self._core.manager.discard(keys)
        if dropped:
            invalid = set(keys)
            self._core.history.note([key for key in keys if key in self._core.writing], "discarded", self._core.clock())
            for job in self.unreleased_jobs():
                job.discarded |= invalid.intersection(job.keys)
        self._core.flush_events(cause="discarded")
        return dropped

    @property
    def enabled(self) -> bool:
        """Loads may hit and stores are taken; switching off drops the cache and announces the removals."""
        return self._core.enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self.check()
        if not isinstance(value, bool):
            raise UsageError(f"enabled must be True or False; got {value!r}")
        if self._core.enabled and not value:
            self.reset_cache()
        self._core.enabled = value

    def pause_stores(self, paused: bool = True) -> None:
        """Reject stores until called with False; loads go on."""
        self.check()
        if not isinstance(paused, bool):
            raise UsageError(f"paused must be True or False; got {paused!r}")
        self._core.stores_paused = paused

    @property
    def idle(self) -> bool:
        """No copy runs and no store waits to be submitted."""
        return self._board.idle and not self.stores.num_queued

    def explain(self, request_id: str) -> list[BlockReport]:
        """Say for each offloaded block of a running or recent request why it is, or is not, served."""
        self.check()
        return explain(self._core, *self._roster.look_back(request_id))

    def health(self) -> Health:
        """Return whether hits are served, and what is degraded."""
        if self._closed or not self._started:
            return Health(ok=False, reason="closed" if self._closed else "not started")
        core = self._core
        if core.fault is not None:
            return Health(ok=False, reason=f"{core.fault_reason}: {core.fault!r}")
        if core.absent is not None:
            return Health(ok=False, reason=core.absent)
        if self._board.num_hung:
            return Health(ok=True, reason=f"{self._board.num_hung} transfers are hung, their blocks are quarantined")
        return Health(ok=True, reason="" if core.enabled else "disabled")

    def stats(self) -> Stats:
        """Return counters and occupancy; after closing, the last ones. Zeros before the start."""
        if self._last_stats is not None or not self._started:
            return self._last_stats or Stats()
        stats = collect_stats(self._core, self._board)
        stats.requests, stats.leases = len(self._roster), len(self.leases)
        stats.queued_stores = self.stores.num_queued
        stats.loaded_bytes, stats.stored_bytes = self.loads.loaded_bytes, self.stores.stored_bytes
        return stats

    def pins(self) -> dict[str, int]:
        """Return the offloaded blocks pinned by leases, per request id."""
        return self.leases.by_owner()

    def unreleased_jobs(self) -> list[Job]:
        """Return the jobs whose copies have not ended, queued ones included."""
        return [*self.stores.queued_jobs(), *self._board.unended_jobs()]

    @property
    def fault(self) -> BaseException | None:
        """Why the engine is unhealthy; None while it is healthy."""
        return self._core.fault
