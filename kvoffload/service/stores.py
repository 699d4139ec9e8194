"""Stores: from written GPU blocks to readable offloaded blocks.

An offer reserves at once and is submitted at the end of the tick: all offers of a tick become one transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvoffload.keys import BlockInfo, OffloadKey
from kvoffload.manager.base import PrepareStoreOutput
from kvoffload.manager.specs import CPULoadStoreSpec, GPULoadStoreSpec
from kvoffload.service.board import TransferBoard
from kvoffload.service.core import Core, RequestState, describes
from kvoffload.service.geometry import Tables
from kvoffload.service.jobs import Job, JobState, QueuedStore, Transfer
from kvoffload.service.merging import all_ready, merge
from kvoffload.service.offers import Offer, computed_offer, explicit_offer
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
        self._queue: dict[int, QueuedStore] = {}
        self._queued_bytes = 0
        self.stored_bytes = 0

    @property
    def num_queued(self) -> int:
        """Offers that wait for the end of the tick."""
        return len(self._queue)

    def offer_computed(self, request: RequestState, tables: Tables, computed_tokens: int, ready: Ready) -> Job:
        """Offer what was not offered of the tokens computed so far; see `computed_offer`."""
        return self._offer(computed_offer(self._core.geometry, request, tables, computed_tokens, ready))

    def offer_spec(self, request: RequestState, spec: GPULoadStoreSpec, ready: Ready) -> Job:
        """Offer explicit GPU blocks; see `explicit_offer`."""
        return self._offer(explicit_offer(self._core.geometry, request, spec, ready))

    def _offer(self, offer: Offer) -> Job:
        """Reserve what there is room for and queue it, or answer at once."""
        core, request = self._core, offer.request
        self._first_use(request)
        job = Job(core.new_id(), request.context.req_id or "", "store", request.context, generation=core.generation)
        offered = offer.num_blocks
        refusal = self._refusal(offer)
        if refusal is not None or not offered or not request.context.store:
            verdict = StoreResult(rejected=offered, reason=refusal) if refusal and offered else StoreResult()
            if refusal and offered:
                core.history.note(offer.keys(), "rejected", core.clock())
            return self._answer(job, verdict)
        out, taken = self._prepare(offer)
        rejected = offered - taken.num_blocks
        if rejected:
            core.history.note(offer.keys_behind(taken), "rejected", core.clock())
        if out is None:
            why: StoreReason = "no_space" if core.fault is None else "unhealthy"
            return self._answer(job, StoreResult(rejected=offered, reason=why, error=core.fault))
        return self._reserve(taken, job, out, rejected)

    def _refusal(self, offer: Offer) -> StoreReason | None:
        """Return why nothing of an offer is taken; None when it may be."""
        core = self._core
        if core.fault is not None or core.absent is not None:
            return "unhealthy"
        if not core.enabled:
            return "disabled"
        if core.stores_paused:
            return "paused"
        if offer.request.over:
            return "aborted"
        if self._board.is_stuck("store"):
            return "deadline"
        if self._board.num_running("store") >= self._max_inflight_jobs:
            return "backpressure"
        pending = self._board.inflight_bytes["store"] + self._queued_bytes
        if not pending or pending + core.geometry.num_bytes(offer.sizes) <= self._max_inflight_bytes:
            return None
        fresh = []  # what is held already moves no bytes
        for group_idx, group in enumerate(core.geometry.groups):
            keys = offer.keys_of(group_idx)
            fresh.append((len(keys) - len(core.manager.held(keys))) * group.factor)
        return (
            "backpressure"
            if pending + core.geometry.num_bytes(fresh) > self._max_inflight_bytes and any(fresh)
            else None
        )

    def _prepare(self, offer: Offer) -> tuple[PrepareStoreOutput | None, Offer]:
        """Reserve the whole offer, or, where there is no room, the longest of its halved prefixes that fits."""
        while any(offer.counts) and self._core.fault is None:
            out = self._core.manager.prepare_store(offer.keys(), offer.request.context)
            if out is not None:
                return out, offer
            offer = offer.halved()
        return None, offer

    def _reserve(self, offer: Offer, job: Job, out: PrepareStoreOutput, rejected: int) -> Job:
        """Queue what the manager took of an offer; the rest is its job's verdict."""
        core, geometry, chain = self._core, self._core.geometry, offer.request.chain
        ids: list[int] = []
        sizes: list[int] = []
        infos: dict[OffloadKey, BlockInfo] = {}
        stored = set(out.keys_to_store)
        late: dict[OffloadKey, BlockInfo] = {}
        cpu = out.store_spec.block_ids.tolist() if isinstance(out.store_spec, CPULoadStoreSpec) else []
        cpu_parts: list[list[int]] = []
        taken = 0
        for group_idx, group in enumerate(geometry.groups):
            table, start, first = offer.tables[group_idx], offer.starts[group_idx], taken
            for at, key in enumerate(offer.keys_of(group_idx)):
                if key in stored:
                    ids += table[at * group.factor : (at + 1) * group.factor]
                    taken += 1
                    info = chain.info(start + at, group_idx) if core.wants_infos else None
                    if info is not None:
                        infos[key] = info
                elif key in core.undescribed:
                    info = chain.info(start + at, group_idx)
                    if info is not None and describes(info):
                        late[key] = info
                        core.undescribed.discard(key)
            sizes.append((taken - first) * group.factor)
            cpu_parts.append(cpu[first:taken])
        factor = geometry.groups[0].factor
        reserved = sum(sizes)
        filtered = len(out.filtered_keys) * factor
        job.verdict = StoreResult(
            stored=reserved,
            already_present=offer.num_blocks - reserved - filtered,
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
        indices = [start * group.factor for start, group in zip(offer.starts, geometry.groups, strict=True)]
        spec = GPULoadStoreSpec(ids, sizes, indices)
        job.keys, job.ticket, job.infos, job.gpu_blocks = out.keys_to_store, out.ticket, infos, ids
        job.num_bytes = geometry.num_bytes(sizes)
        for key in job.keys:
            core.writing[key] = job
        offer.request.jobs[job.id] = job
        job.on_release(offer.request.forget_job)
        core.book.hold(ids)
        self._queued_bytes += job.num_bytes
        self._queue[job.id] = QueuedStore(job, spec, cpu_parts, offer.ready)
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

    def _submit(self, offers: Sequence[QueuedStore]) -> BaseException | None:
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
