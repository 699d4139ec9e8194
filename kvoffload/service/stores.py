"""Stores: from written GPU blocks to readable offloaded blocks.

An offer reserves at once and is submitted at the end of the tick: all offers of a tick become one transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvoffload.errors import UsageError
from kvoffload.keys import BlockInfo, OffloadKey
from kvoffload.manager.base import PrepareStoreOutput
from kvoffload.manager.specs import CPULoadStoreSpec, GPULoadStoreSpec
from kvoffload.service.arguments import check_ready
from kvoffload.service.board import TransferBoard
from kvoffload.service.core import Core, RequestState, describes
from kvoffload.service.geometry import Tables
from kvoffload.service.jobs import Job, JobState, StoreOffer, Transfer
from kvoffload.service.merging import all_ready, merge
from kvoffload.service.results import StoreReason, StoreResult
from kvoffload.transfer.base import Ready, TransferResult


class StoreDesk:
    """Reserves stores, submits them in one transfer per tick, and settles them when their copies end."""

    def __init__(
        self,
        core: Core,
        board: TransferBoard,
        first_use: Callable[[RequestState], None],
        max_inflight_bytes: int,
        max_inflight_jobs: int,
    ) -> None:
        self._core = core
        self._first_use = first_use
        self._board = board
        self._max_inflight_bytes = max_inflight_bytes
        self._max_inflight_jobs = max_inflight_jobs
        self._queue: dict[int, StoreOffer] = {}
        self._queued_bytes = 0
        self.stored_bytes = 0

    @property
    def num_queued(self) -> int:
        """Offers that wait for the end of the tick."""
        return len(self._queue)

    def offer_computed(self, request: RequestState, tables: Tables, computed_tokens: int, ready: Ready) -> Job:
        """Offer the complete offloaded blocks below `computed_tokens` that were not offered before.

        Raises:
            UsageError: `computed_tokens` shrank or exceeds the chain, or a table is too short or has a wrong id.
        """
        geometry, chain = self._core.geometry, request.chain
        if computed_tokens < request.computed_tokens:
            raise UsageError(
                f"computed_tokens of request {request.context.req_id!r} shrank "
                f"from {request.computed_tokens} to {computed_tokens}"
            )
        if computed_tokens > chain.num_tokens:
            raise UsageError(f"computed_tokens is {computed_tokens}, the chain has {chain.num_tokens} tokens")
        starts, counts, parts = list(request.offered), [], []
        for group_idx, (group, span) in enumerate(zip(geometry.groups, geometry.spans, strict=True)):
            upto = min(computed_tokens // span, len(chain.keys(group_idx)))
            first, last = starts[group_idx] * group.factor, upto * group.factor
            if len(tables[group_idx]) < last:
                raise UsageError(
                    f"group {group_idx} has {len(tables[group_idx])} GPU blocks, {computed_tokens} tokens need {last}"
                )
            counts.append(max(0, upto - starts[group_idx]))
            parts.append(tables[group_idx][first:last])
        geometry.check_ids(parts)
        geometry.check_distinct(parts)
        check_ready(ready)
        request.computed_tokens = computed_tokens
        request.offered = [start + count for start, count in zip(starts, counts, strict=True)]
        return self._offer(request, parts, starts, counts, ready)

    def offer_spec(self, request: RequestState, spec: GPULoadStoreSpec, ready: Ready) -> Job:
        """Offer explicit GPU blocks; a tail that fills no offloaded block is not offered.

        Raises:
            UsageError: A group does not start at an offloaded block, or reaches beyond the chain; nothing is reserved.
        """
        geometry, chain = self._core.geometry, request.chain
        tables, _ = geometry.split(spec)
        starts, counts = [], []
        for group_idx, (group, index) in enumerate(zip(geometry.groups, spec.block_indices, strict=True)):
            if index % group.factor:
                raise UsageError(
                    f"a store starts at an offloaded block: block_indices[{group_idx}] is {index}, "
                    f"not a multiple of {group.factor}"
                )
            start, count = index // group.factor, len(tables[group_idx]) // group.factor
            if count and start + count > len(chain.keys(group_idx)):
                raise UsageError(
                    f"group {group_idx}: offloaded blocks {start}..{start + count - 1} are not all in the chain, "
                    f"which has {len(chain.keys(group_idx))}"
                )
            starts.append(start)
            counts.append(count)
        geometry.check_ids(tables)
        geometry.check_distinct(tables)
        return self._offer(request, tables, starts, counts, ready)

    def _offer(
        self, request: RequestState, tables: Tables, starts: Sequence[int], counts: Sequence[int], ready: Ready
    ) -> Job:
        check_ready(ready)
        self._first_use(request)
        core, geometry = self._core, self._core.geometry
        job = Job(core.new_id(), request.context.req_id or "", "store", request.context, generation=core.generation)
        offered = sum(count * group.factor for count, group in zip(counts, geometry.groups, strict=True))
        refusal = self._refusal(request, starts, counts)
        if refusal is not None or not offered or not request.context.store:
            verdict = StoreResult(rejected=offered, reason=refusal) if refusal and offered else StoreResult()
            if refusal and offered:
                core.history.note(self._keys(request, starts, counts), "rejected", core.clock())
            return self._answer(job, verdict)
        out, tried = self._prepare(request, starts, counts)
        tried_blocks = sum(count * group.factor for count, group in zip(tried, geometry.groups, strict=True))
        if tried_blocks < offered:
            left = [start + count for start, count in zip(starts, tried, strict=True)]
            rest = [count - some for count, some in zip(counts, tried, strict=True)]
            core.history.note(self._keys(request, left, rest), "rejected", core.clock())
        if out is None:
            why: StoreReason = "no_space" if core.fault is None else "unhealthy"
            return self._answer(job, StoreResult(rejected=offered, reason=why, error=core.fault))
        return self._reserve(request, job, tables, starts, tried, out, offered - tried_blocks, ready)

    def _refusal(self, request: RequestState, starts: Sequence[int], counts: Sequence[int]) -> StoreReason | None:
        core = self._core
        if core.fault is not None or core.absent is not None:
            return "unhealthy"
        if not core.enabled:
            return "disabled"
        if core.stores_paused:
            return "paused"
        if request.over:
            return "aborted"
        if self._board.is_stuck("store"):
            return "deadline"
        if self._board.num_running("store") >= self._max_inflight_jobs:
            return "backpressure"
        pending = self._board.inflight_bytes["store"] + self._queued_bytes
        if not pending or pending + self._size(counts) <= self._max_inflight_bytes:
            return None
        fresh = []  # what is held already moves no bytes
        for group_idx, (start, count) in enumerate(zip(starts, counts, strict=True)):
            keys = request.chain.keys(group_idx)[start : start + count]
            fresh.append(len(keys) - len(core.manager.held(keys)))
        return "backpressure" if any(fresh) and pending + self._size(fresh) > self._max_inflight_bytes else None

    def _size(self, counts: Sequence[int]) -> int:
        geometry = self._core.geometry
        return geometry.num_bytes([count * group.factor for count, group in zip(counts, geometry.groups, strict=True)])

    def _keys(self, request: RequestState, starts: Sequence[int], counts: Sequence[int]) -> list[OffloadKey]:
        keys: list[OffloadKey] = []
        for group_idx, (start, count) in enumerate(zip(starts, counts, strict=True)):
            keys += request.chain.keys(group_idx)[start : start + count]
        return keys

    def _prepare(
        self, request: RequestState, starts: Sequence[int], counts: Sequence[int]
    ) -> tuple[PrepareStoreOutput | None, list[int]]:
        """Reserve the whole offer, or, where there is no room, the longest of its halved prefixes that fits."""
        tried = list(counts)
        while any(tried) and self._core.fault is None:
            out = self._core.manager.prepare_store(self._keys(request, starts, tried), request.context)
            if out is not None:
                return out, tried
            tried = [count // 2 for count in tried]
        return None, tried

    def _reserve(
        self,
        request: RequestState,
        job: Job,
        tables: Tables,
        starts: Sequence[int],
        tried: Sequence[int],
        out: PrepareStoreOutput,
        rejected: int,
        ready: Ready,
    ) -> Job:
        core, geometry = self._core, self._core.geometry
        ids: list[int] = []
        sizes: list[int] = []
        indices: list[int] = []
        infos: dict[OffloadKey, BlockInfo] = {}
        stored = set(out.keys_to_store)
        late: dict[OffloadKey, BlockInfo] = {}
        cpu = out.store_spec.block_ids.tolist() if isinstance(out.store_spec, CPULoadStoreSpec) else []
        cpu_parts: list[list[int]] = []
        taken = 0
        for group_idx, group in enumerate(geometry.groups):
            keys = request.chain.keys(group_idx)
            first = taken
            size = 0
            indices.append(starts[group_idx] * group.factor)
            for at in range(tried[group_idx]):
                position = starts[group_idx] + at
                key = keys[position]
                if key in stored:
                    ids += tables[group_idx][at * group.factor : (at + 1) * group.factor]
                    size += group.factor
                    taken += 1
                    info = request.chain.info(position, group_idx) if core.wants_infos else None
                    if info is not None:
                        infos[key] = info
                elif key in core.undescribed:
                    info = request.chain.info(position, group_idx)
                    if info is not None and describes(info):
                        late[key] = info
                        core.undescribed.discard(key)
            sizes.append(size)
            cpu_parts.append(cpu[first:taken])
        factor = geometry.groups[0].factor
        reserved = sum(sizes)
        tried_blocks = sum(count * group.factor for count, group in zip(tried, geometry.groups, strict=True))
        filtered = len(out.filtered_keys) * factor
        job.verdict = StoreResult(
            stored=reserved,
            already_present=tried_blocks - reserved - filtered,
            filtered=filtered,
            rejected=rejected,
            evicted=len(out.evicted_keys) * factor,
            reason="no_space" if rejected else None,
        )
        core.flush_events(cause="evicted")
        if out.filtered_keys:
            core.history.note(out.filtered_keys, "filtered", core.clock())
        if late:
            core.events.describe(late)
        if not reserved:
            return self._answer(job, job.verdict)
        spec = GPULoadStoreSpec(ids, sizes, indices)
        job.keys, job.ticket, job.infos, job.gpu_blocks = out.keys_to_store, out.ticket, infos, ids
        job.num_bytes = geometry.num_bytes(sizes)
        for key in job.keys:
            core.writing[key] = job
        request.jobs[job.id] = job
        job.on_release(request.forget_job)
        core.book.hold(ids)
        self._queued_bytes += job.num_bytes
        self._queue[job.id] = StoreOffer(job, spec, cpu_parts, ready)
        return job

    def _answer(self, job: Job, result: StoreResult) -> Job:
        """Answer a job that reserved nothing."""
        core = self._core
        self._count(result)
        job.result = result
        job.move(JobState.DONE)
        core.finish_job(job)
        core.release_job(job)
        return job

    def _count(self, result: StoreResult, verdict: StoreResult | None = None) -> None:
        """Count offered blocks by outcome, in offloaded blocks; those that `verdict` rejected keep its reason."""
        metrics, factor = self._core.metrics, self._core.geometry.groups[0].factor
        for outcome, amount in (
            ("stored", result.stored),
            ("already_present", result.already_present),
            ("filtered", result.filtered),
            ("rejected", result.rejected),
            ("failed", result.failed),
        ):
            if amount:
                metrics.count("store_blocks", amount // factor, outcome)
        at_once = verdict.rejected if verdict is not None else 0
        for reason, amount in (
            (verdict.reason if verdict is not None else None, at_once),
            (result.reason, result.rejected + result.failed - at_once),
        ):
            if amount:
                metrics.count("unstored_blocks", amount // factor, reason or "other")

    def flush(self) -> None:
        """Submit all queued offers as one transfer."""
        if not self._queue:
            return
        offers = list(self._queue.values())
        self._queue.clear()
        self._queued_bytes = 0
        for offer in offers:
            offer.job.move(JobState.RUNNING)
        refused = self._submit(offers)
        if refused is None:
            return
        for offer in offers:  # one offer that no handler takes must not fail the others of its tick
            error = self._submit([offer]) if len(offers) > 1 else refused
            if error is not None:
                self._core.metrics.count("transfer_failures", label="store")
                self._core.log_failed_copy("store", offer.job.gpu_blocks, error)
                self._close(offer.job, success=False, reason="copy_failed", error=error)

    def _submit(self, offers: Sequence[StoreOffer]) -> BaseException | None:
        """Hand offers to the handler as one transfer; return why it was refused, or None."""
        spec, cpu_ids = merge(offers)
        jobs = [offer.job for offer in offers]
        num_bytes = sum(job.num_bytes for job in jobs)
        sides = (spec, CPULoadStoreSpec(cpu_ids))
        return self._board.submit(
            Transfer(int(self._core.new_id()), "store", sides, jobs, all_ready(offers), num_bytes)
        )

    def queued_jobs(self) -> list[Job]:
        """Return the jobs whose offers wait for the end of the tick."""
        return [offer.job for offer in self._queue.values()]

    def drop_all_queued(self, reason: StoreReason) -> None:
        """Take back every offer that was not submitted."""
        for offer in list(self._queue.values()):
            self.drop_queued(offer.job, reason)

    def drop_queued(self, job: Job, reason: StoreReason) -> None:
        """Take back an offer that was not submitted."""
        offer = self._queue.pop(job.id, None)
        if offer is None:
            return
        core = self._core
        self._queued_bytes -= job.num_bytes
        core.manager.abandon(job.ticket)
        core.history.note(job.keys, "reset" if reason == "reset" else "rejected", core.clock())
        core.forget_writing(job)
        verdict = job.verdict or StoreResult()
        job.result = replace(verdict, stored=0, rejected=verdict.rejected + verdict.stored, reason=reason)
        self._count(job.result, verdict)
        self._release(job)
        core.finish_job(job)
        core.release_job(job)

    def ended(self, job: Job, outcome: TransferResult) -> None:
        """Settle a job whose copy has ended."""
        core = self._core
        if job.state is JobState.HUNG:
            core.manager.complete_store(job.keys, outcome.success, job.context, ticket=job.ticket)
            core.flush_events(job.infos)
            self._release(job)
            core.release_job(job)
            return
        self._close(job, success=outcome.success, reason="copy_failed", error=outcome.error)

    def _close(self, job: Job, *, success: bool, reason: StoreReason, error: BaseException | None) -> None:
        core = self._core
        core.forget_writing(job)
        if not core.manager.complete_store(job.keys, success, job.context, ticket=job.ticket) and success:
            success, reason, error = False, "unhealthy", core.fault
        core.flush_events(job.infos)
        verdict = job.verdict or StoreResult()
        if success and job.generation == core.generation:
            core.checks.stored(job)
            self.stored_bytes += job.num_bytes
            lost = len(job.discarded) * core.geometry.groups[0].factor
            job.result = (
                replace(verdict, stored=verdict.stored - lost, failed=lost, reason="reset") if lost else verdict
            )
        else:
            if not success:
                core.history.note(job.keys, "failed", core.clock())
            why: StoreReason = reason if not success else "reset"
            job.result = replace(verdict, stored=0, failed=verdict.stored, reason=why, error=error)
        self._count(job.result, verdict)
        self._release(job)
        core.finish_job(job)
        core.release_job(job)

    def answer_early(self, job: Job, reason: StoreReason, error: BaseException | None) -> None:
        """Answer a job whose copy has not ended: its keys go, its memory and GPU blocks stay held until it does."""
        core = self._core
        core.forget_writing(job)
        core.manager.abandon(job.ticket, copy_running=True, hung=reason == "deadline")
        core.history.note(job.keys, "failed", core.clock())
        verdict = job.verdict or StoreResult()
        job.move(JobState.HUNG)
        job.result = replace(verdict, stored=0, failed=verdict.stored, reason=reason, error=error)
        self._count(job.result, verdict)
        core.finish_job(job)

    def _release(self, job: Job) -> None:
        job.move(JobState.DONE)
        self._core.book.unhold(job.gpu_blocks)
