"""Loads: from a ready prefix to bytes in GPU blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from kvoffload.errors import TransferError, UsageError
from kvoffload.keys import OffloadKey
from kvoffload.manager.base import Match
from kvoffload.service.board import TransferBoard
from kvoffload.service.core import Core, FirstLook, RequestState
from kvoffload.service.geometry import Tables
from kvoffload.service.jobs import Job, JobState, Transfer
from kvoffload.service.results import LoadOutcome, LoadResult, PrefixMatch
from kvoffload.transfer.base import HOST_VISIBLE, Ready, TransferResult

_Signature = tuple[OffloadKey, int, tuple[int, ...]]
"""Last key, first token and GPU blocks: loads that agree in these move the same bytes to the same place."""


@lru_cache(maxsize=4096)
def _shared(*looks: FirstLook) -> tuple[FirstLook, ...]:
    """Return one object for all requests that found alike: what thousands keep, the garbage collector looks at."""
    return looks


class LoadDesk:
    """Starts loads and settles them when their copies end."""

    def __init__(self, core: Core, board: TransferBoard, max_inflight_bytes: int, max_inflight_jobs: int) -> None:
        self._core = core
        self._board = board
        self._max_inflight_bytes = max_inflight_bytes
        self._max_inflight_jobs = max_inflight_jobs
        self._shared: dict[_Signature, tuple[Job, Ready]] = {}
        self.loaded_bytes = 0

    def match(self, request: RequestState) -> PrefixMatch:
        """Return what is ready and pending of a request's prefix: pins nothing, counts nothing."""
        core = self._core
        if not core.serving or request.over:
            return PrefixMatch(0, 0, 0)
        geometry, context, chain = core.geometry, request.context, request.chain
        ready = known = -1
        for group_idx, span in enumerate(geometry.spans):
            found = core.manager.match(chain.keys(group_idx), context)
            tokens = found.ready * span
            upto = tokens + found.pending * span
            ready = tokens if ready < 0 else min(ready, tokens)
            known = upto if known < 0 else min(known, upto)
        ready, known = geometry.cut(ready), geometry.cut(known)
        size = geometry.block_size
        return PrefixMatch(ready // size, (known - ready) // size, ready)

    def first_use(self, request: RequestState) -> None:
        """Book the request's look-ups and touch its keys, once in its life: retries are not look-ups."""
        if request.touched or request.finished:
            return
        request.touched = True
        core, chain, context = self._core, request.chain, request.context
        everything: list[OffloadKey] = []
        looks: list[FirstLook] = []
        for group_idx in range(len(core.geometry.groups)):
            keys = chain.keys(group_idx)
            everything += keys
            found = core.manager.lookup_prefix(keys, context)
            causes = self._causes(keys[found.ready + found.pending :])
            looks.append((found.ready, found.pending, causes))
            if group_idx == 0:
                self._book(request, keys, found, causes)
        core.manager.touch(everything, context)
        whole = all(not causes for _, _, causes in looks)
        request.found = _shared(*looks) if whole else tuple(looks)

    def _causes(self, missed: Sequence[OffloadKey]) -> tuple[str, ...]:
        """Return why each of `missed` is not found."""
        if not missed:
            return ()
        cause, held = self._core.history.cause, self._core.manager.held(missed)
        return tuple("unreachable" if key in held else cause(key) for key in missed)

    def _book(self, request: RequestState, keys: Sequence[OffloadKey], found: Match, causes: Sequence[str]) -> None:
        core, hits = self._core, found.ready
        tokens = request.chain.num_tokens
        request.hit_tokens = min(tokens, hits * core.geometry.spans[0])
        core.last_use.used(keys[:hits], core.clock())
        metrics = core.metrics
        metrics.count("requests")
        metrics.count("prompt_tokens", tokens)
        metrics.count("requested_blocks", len(keys))
        metrics.count("hit_blocks", hits)
        metrics.count("hit_tokens", request.hit_tokens)
        if found.pending:
            metrics.count("pending_blocks", found.pending)
        for why, amount in Counter(causes).items():
            metrics.count("miss_blocks", amount, why)

    @property
    def is_stuck(self) -> bool:
        """A load that does not end holds up all others: they had better miss than lose their blocks, too."""
        return self._board.is_stuck("load")

    def room(self, num_bytes: int) -> bool:
        """A load of `num_bytes` may be submitted now; one alone is never too large."""
        if self.is_stuck:
            return False
        jobs, inflight = self._board.num_running("load"), self._board.inflight_bytes["load"]
        return not jobs or (jobs < self._max_inflight_jobs and inflight + num_bytes <= self._max_inflight_bytes)

    def pending_job(self, request: RequestState, upto_tokens: int) -> Job | None:
        """Return the last job that still writes a block of the first `upto_tokens`, right behind the ready prefix."""
        core, last = self._core, None
        if not core.writing or not core.serving or request.over or self.is_stuck:
            return None
        for group_idx, span in enumerate(core.geometry.spans):
            keys = request.chain.keys(group_idx)[: -(-upto_tokens // span)]
            found = core.manager.match(keys, request.context)
            for key in keys[found.ready : found.ready + found.pending]:
                job = core.writing.get(key)
                if job is not None and (last is None or job.id > last.id):
                    last = job
        return last

    def most(self, tables: Tables, first_token: int, max_tokens: int) -> int:
        """Return the token up to which a load could fill `tables`, were everything ready."""
        geometry = self._core.geometry
        room = min(len(table) * group.block_size for table, group in zip(tables, geometry.groups, strict=True))
        return max(first_token, geometry.cut(min(max_tokens, first_token + room)))

    def size(self, first_token: int, end_token: int) -> int:
        """Return the bytes of a load of tokens `[first_token, end_token)`."""
        geometry = self._core.geometry
        return geometry.num_bytes([(end_token - first_token) // group.block_size for group in geometry.groups])

    def plan(self, request: RequestState, tables: Tables, first_token: int, max_tokens: int) -> int:
        """Return the token up to which a load can fill `tables` now; `first_token` when there is nothing.

        Args:
            request: Whose prefix.
            tables: Per group, GPU blocks from `first_token` on.
            first_token: Where the tables start.
            max_tokens: Do not load beyond this token.

        Raises:
            UsageError: `first_token` is not at a block end of every group, or an id is out of range.
        """
        geometry = self._core.geometry
        if first_token % geometry.align_tokens:
            raise UsageError(f"a load starts at a block end of every group, not at token {first_token}")
        geometry.check_ids(tables)
        return max(first_token, min(self.match(request).ready_tokens, self.most(tables, first_token, max_tokens)))

    def start(
        self,
        request: RequestState,
        tables: Tables,
        first_token: int,
        end_token: int,
        *,
        partial: bool,
        after: Ready = HOST_VISIBLE,
    ) -> Job:
        """Pin and submit a load of tokens `[first_token, end_token)`, all ready; or join the same load in flight.

        Raises:
            UsageError: A GPU block is named twice: it cannot hold two blocks' bytes.
        """
        core, geometry = self._core, self._core.geometry
        spec = geometry.spec(tables, first_token, end_token)
        keys = geometry.keys(
            [request.chain.keys(group_idx) for group_idx in range(len(geometry.groups))], first_token, end_token
        )
        blocks = spec.block_ids.tolist()
        if len(set(blocks)) < len(blocks):
            raise UsageError(f"a GPU block is named twice: each must be another one; got {blocks}")
        signature = (keys[-1], first_token, tuple(blocks))
        running = self._running_twin(signature, after)
        if running is not None:
            return running
        job = Job(
            id=core.new_id(),
            request_id=request.context.req_id or "",
            kind="load",
            context=request.context,
            keys=keys,
            gpu_blocks=blocks,
            generation=core.generation,
            num_bytes=geometry.num_bytes(spec.group_sizes),
            num_blocks=spec.group_sizes[0],
            num_tokens=end_token - first_token,
            first_token=first_token,
            partial=partial,
        )
        source = core.manager.prepare_load(keys, request.context)
        if source is None:
            return self._refuse(job)
        job.ticket = source.ticket
        request.jobs[job.id] = job
        job.on_release(request.forget_job)
        core.book.hold(blocks)
        job.move(JobState.RUNNING)
        self._shared[signature] = job, after
        job.on_release(lambda _: self._forget(signature, job))
        refused = self._board.submit(Transfer(int(job.id), "load", (source, spec), [job], after, job.num_bytes))
        if refused is not None:
            core.metrics.count("transfer_failures", label="load")
            core.log_failed_copy("load", blocks, refused)
            result = LoadResult(LoadOutcome.FAILED, reason="copy_failed", error=refused)
            self._close(job, result)
        return job

    def _running_twin(self, signature: _Signature, after: Ready) -> Job | None:
        """Return an unanswered load of the same bytes to the same place that also waits for what `after` asks."""
        running, waits_for = self._shared.get(signature, (None, None))
        if running is None or running.result is not None or running.discarded:
            return None
        if running.generation != self._core.generation:
            return None
        return running if after is waits_for or isinstance(after, str) else None

    def _refuse(self, job: Job) -> Job:
        """Answer a job that the manager could not reserve."""
        core = self._core
        job.result = LoadResult(LoadOutcome.UNHEALTHY, reason="unhealthy", error=core.fault)
        job.move(JobState.DONE)
        core.finish_job(job)
        core.release_job(job)
        return job

    def _forget(self, signature: _Signature, job: Job) -> None:
        if self._shared.get(signature, (None,))[0] is job:
            del self._shared[signature]

    def ended(self, job: Job, outcome: TransferResult) -> None:
        """Settle a job whose copy has ended."""
        core = self._core
        queue, copy = outcome.queue_time or 0.0, outcome.transfer_time or 0.0
        if outcome.success:
            self.loaded_bytes += job.num_bytes
        if job.state is JobState.HUNG:
            self._close(job, None)
        elif not outcome.success:
            self._close(job, self._failed(job, "copy_failed", outcome.error, queue, copy))
        elif job.discarded or job.generation != core.generation:
            self._close(job, self._failed(job, "reset", None, queue, copy))
        elif (wrong := core.checks.wrong_load(job)) is not None:
            core.manager.discard(job.keys)
            self._close(job, self._failed(job, "copy_failed", TransferError(wrong), queue, copy))
        else:
            kind = LoadOutcome.PARTIAL if job.partial else LoadOutcome.LOADED
            self._close(job, LoadResult(kind, job.num_blocks, job.num_tokens, queue_seconds=queue, copy_seconds=copy))

    def answer_early(self, job: Job, reason: str, error: BaseException | None) -> None:
        """Answer a job whose copy has not ended; its pins and GPU blocks stay held until it does."""
        core = self._core
        if reason == "deadline":
            core.manager.abandon(job.ticket, copy_running=True, hung=True)
            core.flush_events(cause="discarded")
        job.move(JobState.HUNG)
        job.result = self._failed(job, reason, error, 0.0, 0.0)
        core.finish_job(job)

    @staticmethod
    def _failed(job: Job, reason: str, error: BaseException | None, queue: float, copy: float) -> LoadResult:
        return LoadResult(
            LoadOutcome.FAILED,
            undefined_gpu_blocks=tuple(job.gpu_blocks),
            queue_seconds=queue,
            copy_seconds=copy,
            reason=reason,
            error=error,
        )

    def _close(self, job: Job, result: LoadResult | None) -> None:
        """Give pins and GPU blocks back, then answer: the copy has ended, or never began."""
        core = self._core
        core.manager.complete_load(job.keys, job.context, ticket=job.ticket)
        core.flush_events()
        if result is not None:
            job.result = result
        job.move(JobState.DONE)
        core.book.unhold(job.gpu_blocks)
        if result is not None:
            core.finish_job(job)
        core.release_job(job)
