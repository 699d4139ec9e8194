"""A workload through the manager alone: decisions without bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvoffload.keys import OffloadKey, make_offload_key
from kvoffload.manager.base import ManagerStats, OffloadingManager, ReqContext, RequestOutcome
from kvoffload.simulate.gpu_cache import GpuPrefixCache
from kvoffload.simulate.workload import WorkloadRequest


@dataclass(slots=True)
class DryResult:
    """What the manager decided; blocks are engine blocks.

    Attributes:
        requests: Requests served.
        requested_blocks: Blocks of their prompts, unfinished ones included.
        gpu_hit_blocks: Blocks found on the simulated GPU.
        prefix_hit_blocks: Further blocks of the unbroken prefix that host memory holds.
        refused_stores: Steps for which there was no room.
        stats: The manager's own counters, in offloaded blocks.
    """

    requests: int = 0
    requested_blocks: int = 0
    gpu_hit_blocks: int = 0
    prefix_hit_blocks: int = 0
    refused_stores: int = 0
    stats: ManagerStats | None = None


def run_dry(
    requests: Iterable[WorkloadRequest],
    manager: OffloadingManager,
    *,
    factor: int = 1,
    store_step: int = 16,
    gpu: GpuPrefixCache | None = None,
    progress: Callable[[], None] = lambda: None,
) -> DryResult:
    """Look each request's blocks up until the first miss, touch them, store the missing ones, finish.

    Args:
        requests: What to serve, one after the other.
        manager: Who decides; used by nobody else.
        factor: Engine blocks in an offloaded block.
        store_step: Engine blocks offered at a time.
        gpu: A simulated prefix cache in front.
        progress: Called after each request.
    """
    result = DryResult()
    for request in requests:
        _serve(request, manager, factor, max(1, store_step // factor), gpu, result)
        result.requests += 1
        result.requested_blocks += request.num_blocks
        progress()
    result.stats = manager.stats()
    return result


def _serve(
    request: WorkloadRequest,
    manager: OffloadingManager,
    factor: int,
    step: int,
    gpu: GpuPrefixCache | None,
    result: DryResult,
) -> None:
    context = ReqContext(str(request.number), started_seconds=request.arrival_seconds)
    hashes = request.block_hashes
    keys = [make_offload_key(name, 0) for name in hashes[factor - 1 :: factor]]
    table = gpu.acquire(hashes) if gpu is not None else None
    on_gpu = table.cached if table is not None else 0
    result.gpu_hit_blocks += on_gpu
    found = on_gpu // factor
    while found < len(keys) and manager.lookup(keys[found], context):
        found += 1
    result.prefix_hit_blocks += max(0, found * factor - on_gpu)
    manager.touch(keys, context)
    for first in range(found, len(keys), step):
        _store(keys[first : first + step], manager, context, result)
    if gpu is not None and table is not None:
        for block, name in zip(table.blocks, hashes, strict=True):
            gpu.commit(block, name)
        gpu.release(table.blocks)
    outcome = RequestOutcome(request.arrival_seconds, request.output_tokens)
    manager.finish_request(context, outcome, keys)
    manager.take_events()  # nobody listens


def _store(keys: list[OffloadKey], manager: OffloadingManager, context: ReqContext, result: DryResult) -> None:
    stored = manager.prepare_store(keys, context)
    if stored is None:
        result.refused_stores += 1
    elif stored.keys_to_store:
        manager.complete_store(stored.keys_to_store, True, context, ticket=stored.ticket)
