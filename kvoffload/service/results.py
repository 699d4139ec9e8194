"""What the service answers: a miss, a refusal, a timeout and a failed copy are values, not exceptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from kvoffload.manager.base import ManagerStats
from kvoffload.transfer.base import JobId


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """How much of a request's prefix is held.

    Attributes:
        ready_blocks: Engine blocks, counted from block 0, that can be loaded now.
        pending_blocks: Further engine blocks whose store is still running.
        ready_tokens: Tokens in the ready blocks.
    """

    ready_blocks: int
    pending_blocks: int
    ready_tokens: int


class LoadOutcome(StrEnum):
    """How a load ended."""

    LOADED = "loaded"
    """All blocks asked for hold valid bytes."""
    PARTIAL = "partial"
    """A prefix of them does; the rest was not touched."""
    MISS = "miss"
    """Nothing was loaded and nothing was touched."""
    FAILED = "failed"
    """A copy failed, did not end in time, or was overtaken by a reset: see `undefined_gpu_blocks`."""
    UNHEALTHY = "unhealthy"
    """The service is not healthy and answers every load as a miss."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Result of one load.

    Attributes:
        outcome: How it ended.
        num_blocks: Contiguous engine blocks (group 0) from `first_block` that now hold valid bytes.
        num_tokens: Tokens in those blocks.
        undefined_gpu_blocks: GPU blocks whose bytes are undefined: recompute them. A copy may still write them.
        pending_seconds: Time spent waiting for blocks that were being written.
        queue_seconds: Time between submission and the copy's start.
        copy_seconds: Time of the copy.
        reason: Why it is not `LOADED`: `"reset"`, `"timeout"`, `"deadline"` (its copy, or one before it, did not end in
            time), `"copy_failed"`, `"backpressure"`, `"aborted"`, `"expired"`, `"disabled"`, `"unhealthy"`, or None for
            a plain miss.
        error: The exception behind a failed copy or an unhealthy service.
    """

    outcome: LoadOutcome
    num_blocks: int = 0
    num_tokens: int = 0
    undefined_gpu_blocks: Sequence[int] = ()
    pending_seconds: float = 0.0
    queue_seconds: float = 0.0
    copy_seconds: float = 0.0
    reason: str | None = None
    error: BaseException | None = None


StoreReason = Literal[
    "no_space", "backpressure", "unhealthy", "aborted", "disabled", "paused", "copy_failed", "deadline", "reset"
]


@dataclass(frozen=True, slots=True)
class StoreResult:
    """Result of one store, in engine blocks of all groups.

    Attributes:
        stored: Readable since this job ended.
        already_present: Held already, or being written by another job.
        filtered: Not let in by the reuse filter or the policy's admission.
        rejected: Not stored for `reason`.
        failed: Reserved, but the copy failed or did not end in time.
        evicted: Dropped from the cache to make room.
        reason: Why blocks were rejected or failed; where a copy failed after some were rejected, why it failed.
        error: The exception behind a failed copy.
    """

    stored: int = 0
    already_present: int = 0
    filtered: int = 0
    rejected: int = 0
    failed: int = 0
    evicted: int = 0
    reason: StoreReason | None = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class JobDone:
    """One finished job, as `OffloadEngine.poll` reports it."""

    job_id: JobId
    request_id: str
    kind: Literal["load", "store"]
    result: LoadResult | StoreResult


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the service serves hits; `reason` says why not, or what is degraded."""

    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class BlockReport:
    """Why one offloaded block of a request is, or is not, served.

    Attributes:
        first_block: Its first engine block.
        group: Its KV-cache group.
        state: What is so now: `ready`, `pending`, `unserved` (held, but nothing is served now: `health()` says why),
            `unreachable` (held, but a block before it is not), `evicted`, `filtered`, `rejected`, `failed`, `reset`,
            `discarded` or `never offered`.
        seconds_ago: Age of that state, where it is remembered.
        found: What the request found when it first looked: `ready`, `pending`, or why it missed: `new` (nothing was
            known of the key), else as in `state`. None: it has not looked, or the block came later.
    """

    first_block: int
    group: int
    state: str
    seconds_ago: float | None = None
    found: str | None = None


@dataclass(slots=True)
class Stats:
    """A consistent picture of the service; block counts of the manager are offloaded blocks."""

    manager: ManagerStats = field(default_factory=ManagerStats)
    requests: int = 0
    running_loads: int = 0
    running_stores: int = 0
    queued_stores: int = 0
    hung_jobs: int = 0
    leases: int = 0
    inflight_load_bytes: int = 0
    inflight_store_bytes: int = 0
    busy_gpu_blocks: int = 0
    deferred_gpu_blocks: int = 0
    quarantined_gpu_blocks: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    generation: int = 0
    debug_violations: int = 0
