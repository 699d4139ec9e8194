"""Hit ratios of cache policies on a trace: the production manager, without bytes, one request after the other.

A request looks its blocks up until the first miss, touches all of them, offers the missing ones in steps, completes
the stores at once and ends. Its last, unfinished block is not offered (unless told so), but counts as asked for.
Figures are those of the requests after the warm-up.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvoffload.errors import ConfigError, KVOffloadError
from kvoffload.keys import OffloadKey, make_offload_key
from kvoffload.manager.base import ReqContext, RequestOutcome
from kvoffload.manager.cpu import CPUOffloadingManager
from kvoffload.manager.policies.registry import known_policies, load_policy
from kvoffload.simulate.belady import BeladyCache, next_uses
from kvoffload.simulate.hints import Hint, HintModel
from kvoffload.simulate.workload import Workload

BELADY = "belady"
DEAF = frozenset({"lru", "arc", BELADY})
"""Policies that do not listen to hints."""

_STORE_STEP = 16


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One request: keys of the blocks that can be kept, and how many blocks it asked for in all."""

    arrival_seconds: float
    keys: list[OffloadKey]
    num_blocks: int
    output_tokens: int


class SimulatedTrace:
    """A whole trace in memory.

    Args:
        path: Trace file; None: the built-in chats.
        keep_partial: Also keep a prompt's unfinished last block.
        seed: Seed of the built-in chats and of the hints.
        limit: Requests to take.
        skip_bad_lines: Go on after a line that cannot be used, and count it.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        keep_partial: bool = False,
        seed: int = 0,
        limit: int | None = None,
        skip_bad_lines: bool = False,
    ) -> None:
        workload = Workload(
            [path] if path is not None else [],
            seed=seed,
            limit=limit,
            keep_partial=keep_partial,
            skip_bad_lines=skip_bad_lines,
        )
        measured = workload.measure()
        self.unique_blocks, self.bad_lines = measured.unique_blocks, measured.bad_lines
        self.first_error = workload.first_error()
        self.name = workload.name if path is None else str(path)  # as given: file names alone may be equal
        self.block_tokens = workload.block_tokens
        self.seed = seed
        self.requests = [
            SimulatedRequest(
                request.arrival_seconds,
                [make_offload_key(name, 0) for name in request.block_hashes],
                request.num_blocks,
                request.output_tokens,
            )
            for request in workload
        ]

    @cached_property
    def next_uses(self) -> list[list[int]]:
        """Next use of each key of each request, for `belady`."""
        return next_uses([request.keys for request in self.requests])

    def first_measured(self, warmup: float) -> int:
        """Return the number of the first request after the warm-up, a share of the trace's time."""
        first, last = self.requests[0].arrival_seconds, self.requests[-1].arrival_seconds
        start = first + warmup * (last - first)
        return next(number for number, request in enumerate(self.requests) if request.arrival_seconds >= start)


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Figures of one policy at one capacity; blocks as the trace counts them, after the warm-up."""

    trace: str
    policy: str
    hint: str | None
    capacity_blocks: int
    prefix_hit_ratio: float
    block_hit_ratio: float
    stored_blocks: int
    evicted_blocks: int
    seconds: float


def check_policy(name: str) -> None:
    """Import a policy.

    Raises:
        ConfigError: There is no such policy (the message names those there are), or it cannot be imported.
    """
    if name == BELADY:
        return
    if ":" not in name and name not in known_policies():
        known = ", ".join([*known_policies(), BELADY])
        raise ConfigError(f"unknown cache policy {name!r}: known are {known}, or 'module.path:ClassName' for your own")
    try:
        load_policy(name)
    except KVOffloadError as error:
        raise ConfigError(str(error)) from error


def simulate(
    trace: SimulatedTrace,
    policy: str,
    capacity: int,
    *,
    hint: HintModel | None = None,
    warmup: float = 0.5,
    store_step: int = _STORE_STEP,
) -> SimulationResult:
    """Run one policy at one capacity over a trace.

    Args:
        trace: The requests.
        policy: Registered name, `module:Class`, or `belady`.
        capacity: Blocks in host memory.
        hint: What is said at each request's end.
        warmup: Share of the trace's time whose requests fill the cache and are not counted.
        store_step: Blocks offered at a time.
    """
    first = trace.first_measured(warmup)
    started = time.perf_counter()
    if policy == BELADY:
        counts = _run_belady(trace, capacity, first)
    else:
        counts = _run_manager(trace, policy, capacity, hint, first, store_step)
    asked = sum(request.num_blocks for request in trace.requests[first:])
    return SimulationResult(
        trace=trace.name,
        policy=policy,
        hint=hint.text if hint is not None and hint.text != "none" else None,
        capacity_blocks=capacity,
        prefix_hit_ratio=counts.prefix / max(1, asked),
        block_hit_ratio=counts.blocks / max(1, asked),
        stored_blocks=counts.stored,
        evicted_blocks=counts.evicted,
        seconds=time.perf_counter() - started,
    )


@dataclass(slots=True)
class _Counts:
    prefix: int = 0
    blocks: int = 0
    stored: int = 0
    evicted: int = 0


def _run_belady(trace: SimulatedTrace, capacity: int, first: int) -> _Counts:
    cache, counts = BeladyCache(capacity), _Counts()
    stored = evicted = 0
    for number, (request, uses) in enumerate(zip(trace.requests, trace.next_uses, strict=True)):
        if number >= first:
            prefix, blocks = cache.held(request.keys)
            counts.prefix += prefix
            counts.blocks += blocks
        if number == first:
            stored, evicted = cache.stored, cache.evicted
        cache.serve(request.keys, uses)
    counts.stored, counts.evicted = cache.stored - stored, cache.evicted - evicted
    return counts


def _run_manager(
    trace: SimulatedTrace, policy: str, capacity: int, hint: HintModel | None, first: int, step: int
) -> _Counts:
    manager, counts = CPUOffloadingManager(capacity, policy, block_tokens=trace.block_tokens), _Counts()
    hints = hint.draw(trace.requests, trace.seed) if hint is not None else [Hint()] * len(trace.requests)
    before = manager.stats()
    for number, (request, said) in enumerate(zip(trace.requests, hints, strict=True)):
        ready = manager.match(request.keys).ready
        if number >= first:
            counts.prefix += ready
            counts.blocks += len(manager.held(request.keys))
        if number == first:
            before = manager.stats()
        _serve(manager, str(number), request, said, ready, step)
    after = manager.stats()
    counts.stored, counts.evicted = after.stored - before.stored, after.evicted - before.evicted
    return counts


def _serve(
    manager: CPUOffloadingManager, name: str, request: SimulatedRequest, said: Hint, ready: int, step: int
) -> None:
    keys, now = request.keys, request.arrival_seconds
    context = ReqContext(name, started_seconds=now)
    manager.touch(keys, context)
    for start in range(ready, len(keys), step):
        stored = manager.prepare_store(keys[start : start + step], context)
        if stored is not None and stored.ticket is not None:
            manager.complete_store(stored.keys_to_store, ticket=stored.ticket)
    outcome = RequestOutcome(
        now_seconds=now,
        output_tokens=request.output_tokens,
        conversation_ended=said.conversation_ended,
        expected_return_seconds=said.expected_return_seconds,
    )
    manager.finish_request(context, outcome, keys)
