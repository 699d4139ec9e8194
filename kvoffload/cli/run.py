"""Drive kvoffload with request traces, or with built-in multi-turn chats, and report what happened.

Without --dry the real service moves real bytes between a simulated GPU pool and host memory, and every loaded block is
checked. With --dry the requests go through the manager alone.

Examples:
  kvoffload run
  kvoffload run TRACE.jsonl --policy arc --capacity 5% --concurrency 32 --json
  kvoffload run TRACE.jsonl --dry --partial-blocks keep --capacity 5%
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvoffload.cli.progress import progress_bar
from kvoffload.cli.report import print_json, print_table
from kvoffload.cli.values import Capacity, capacity, natural, positive, size
from kvoffload.config import OffloadConfig
from kvoffload.errors import ConfigError
from kvoffload.manager.base import OffloadingManager
from kvoffload.manager.cpu import CPUOffloadingManager
from kvoffload.manager.reuse_filter import FilterReusedOffloadingManager
from kvoffload.simulate.dry import run_dry
from kvoffload.simulate.gpu_cache import GpuPrefixCache
from kvoffload.simulate.workload import Workload, WorkloadSize


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("traces", nargs="*", type=Path, metavar="TRACE", help="request traces (JSON lines); none: built-in chats")
    add("--dry", action="store_true", help="decisions only: no service, no bytes")
    add("--policy", default="lru", help="cache policy (lru)")
    add("--store-threshold", type=natural, default=0, metavar="N", help="store blocks asked for by N requests (0: all)")
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--cpu-bytes", type=size, metavar="SIZE", help="host memory, such as 512MiB")
    amount.add_argument(
        "--capacity",
        type=capacity,
        default=Capacity(percent=10),
        metavar="N|N%",
        help="host memory in blocks, or in %% of the unique blocks requested (10%%)",
    )
    add("--gpu-blocks", type=natural, default=0, metavar="N", help="prefix cache in front; 0: no reuse in front (0)")
    add("--block-bytes", type=size, default=64 << 10, metavar="SIZE", help="bytes of one engine block (64KiB)")
    add("--block-size-factor", type=positive, default=1, metavar="F", help="engine blocks in an offloaded block (1)")
    add("--store-step", type=positive, default=16, metavar="N", help="blocks computed and offered at a time (16)")
    add(
        "--partial-blocks",
        choices=("drop", "keep"),
        default="drop",
        help="a prompt's unfinished last block: real engines do not offer it (drop)",
    )
    add("--seed", type=int, default=0, help="seed of the built-in chats (0)")
    add("--requests", type=positive, metavar="N", help="stop after N requests (all of a trace; 600 built-in)")
    add("--skip-bad-lines", action="store_true", help="go on after a trace line that cannot be used, and count it")
    add("--json", action="store_true", help="one JSON object on standard output")


def run(args: argparse.Namespace) -> int:
    """Measure the workload, run it, report."""
    workload = Workload(
        args.traces,
        seed=args.seed,
        limit=args.requests,
        keep_partial=args.partial_blocks == "keep",
        skip_bad_lines=args.skip_bad_lines,
    )
    measured = workload.measure()
    if measured.bad_lines:
        print(f"skipped {measured.bad_lines} line(s), the first: {workload.first_error()}", file=sys.stderr)
    blocks = capacity_blocks(args, measured)
    if blocks < 1:
        raise ConfigError(f"the host memory asked for does not hold one offloaded block: {_asked(args)}")
    if blocks * args.block_size_factor < measured.largest_request:
        print(
            f"note: {blocks * args.block_size_factor} blocks of host memory are less than the longest prompt's "
            f"{measured.largest_request}: such a request is stored in part or not at all",
            file=sys.stderr,
        )
    if not args.dry:
        raise ConfigError("only --dry is available in this build")
    return _dry(args, workload, measured, blocks)


def capacity_blocks(args: argparse.Namespace, measured: WorkloadSize) -> int:
    """Return the host memory in offloaded blocks."""
    factor: int = args.block_size_factor
    if args.cpu_bytes is not None:
        return int(args.cpu_bytes // (args.block_bytes * factor))
    asked: Capacity = args.capacity
    return asked.resolve(measured.unique_blocks) // factor


def _asked(args: argparse.Namespace) -> str:
    size_of_block = args.block_bytes * args.block_size_factor
    return f"{args.cpu_bytes} bytes, a block has {size_of_block}" if args.cpu_bytes else "raise --capacity"


def _dry(args: argparse.Namespace, workload: Workload, measured: WorkloadSize, blocks: int) -> int:
    manager: OffloadingManager = CPUOffloadingManager(blocks, args.policy)
    if args.store_threshold >= 2:
        config = OffloadConfig(cpu_bytes_to_use=1, gpu_block_size=1)
        manager = FilterReusedOffloadingManager(manager, args.store_threshold, config.max_tracker_size)
    gpu = GpuPrefixCache(args.gpu_blocks, reuse=True) if args.gpu_blocks else None
    with progress_bar("deciding", measured.requests) as advance:
        result = run_dry(
            workload,
            manager,
            factor=args.block_size_factor,
            store_step=args.store_step,
            gpu=gpu,
            progress=advance,
        )
    factor: int = args.block_size_factor
    stats = manager.stats()
    values: dict[str, object] = {
        "workload": workload.name,
        "policy": args.policy,
        "capacity_blocks": blocks * factor,
        "unique_blocks": measured.unique_blocks,
        "skipped_lines": measured.bad_lines,
        "requests": result.requests,
        "requested_blocks": result.requested_blocks,
        "gpu_hit_blocks": result.gpu_hit_blocks,
        "prefix_hit_blocks": result.prefix_hit_blocks,
        "prefix_hit_ratio": result.prefix_hit_blocks / result.requested_blocks,
        "stored_blocks": stats.stored * factor,
        "evicted_blocks": stats.evicted * factor,
        "filtered_blocks": stats.filtered * factor,
        "refused_stores": result.refused_stores,
    }
    if args.json:
        print_json(values)
    else:
        print_table("kvoffload run --dry", values)
    return 0
