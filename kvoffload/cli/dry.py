"""`kvoffload run --dry`: the requests through the manager alone."""

from __future__ import annotations

import argparse

from kvoffload.cli.progress import progress_bar
from kvoffload.cli.report import report
from kvoffload.config import OffloadConfig
from kvoffload.simulate.dry import run_dry
from kvoffload.simulate.gpu_cache import GpuPrefixCache
from kvoffload.simulate.workload import Workload, WorkloadSize
from kvoffload.spec.base import KVCacheConfig
from kvoffload.spec.cpu import CPUOffloadingSpec


def run_dry_command(args: argparse.Namespace, workload: Workload, measured: WorkloadSize, config: OffloadConfig) -> int:
    """Decide, and report what was decided."""
    sizes = KVCacheConfig(0, (args.block_bytes,), config.gpu_block_sizes)
    manager = CPUOffloadingSpec(config, sizes).get_manager()
    gpu = GpuPrefixCache(args.gpu_blocks, reuse=True) if args.gpu_blocks else None
    factor = config.block_size_factor
    with progress_bar("deciding", measured.requests) as advance:
        result = run_dry(workload, manager, factor=factor, store_step=args.store_step, gpu=gpu, progress=advance)
    stats = manager.stats()
    values: dict[str, object] = {
        "workload": workload.name,
        "policy": config.eviction_policy,
        "capacity_blocks": stats.capacity * factor,
        "unique_blocks": measured.unique_blocks,
        "skipped_lines": measured.bad_lines,
        "requests": result.requests,
        "requested_blocks": result.requested_blocks,
        "gpu_hit_blocks": result.gpu_hit_blocks,
        "prefix_hit_blocks": result.prefix_hit_blocks,
        "prefix_hit_ratio": result.prefix_hit_blocks / max(1, result.requested_blocks),
        "stored_blocks": stats.stored * factor,
        "evicted_blocks": stats.evicted * factor,
        "filtered_blocks": stats.filtered * factor,
        "refused_stores": result.refused_stores,
    }
    report("kvoffload run --dry", values, as_json=args.json)
    return 0
