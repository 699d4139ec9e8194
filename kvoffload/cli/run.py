"""Drive kvoffload with request traces, or with built-in multi-turn chats, and report what happened.

Without --dry the real service moves real bytes between a simulated GPU pool and host memory, and every loaded block is
checked. With --dry the requests go through the manager alone.

Examples:
  kvoffload run
  kvoffload run TRACE.jsonl --policy arc --capacity 5% --concurrency 32 --json
  kvoffload run TRACE.jsonl --dry --partial-blocks keep --capacity 5%
  kvoffload run TRACE.jsonl --workers 4
  kvoffload run --forever --speed 10 --http 127.0.0.1:9464
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from pathlib import Path

from kvoffload.cli.values import (
    Capacity,
    add_json,
    add_workload,
    address,
    capacity,
    endpoint,
    natural,
    policy,
    positive,
    size,
    speed,
    whole,
)
from kvoffload.config import Consumer, EventsConfig, OffloadConfig
from kvoffload.errors import ConfigError
from kvoffload.events.settings import PRESETS
from kvoffload.simulate.workload import Workload, WorkloadSize


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("traces", nargs="*", type=Path, metavar="TRACE", help="request traces, JSON lines (default built-in chats)")
    add("--dry", action="store_true", help="decisions only: no service, no bytes")
    add("--policy", type=policy, default="lru", metavar="POLICY", help="cache policy (default lru)")
    add(
        "--store-threshold",
        type=natural,
        default=0,
        metavar="N",
        help="store blocks that N requests asked for; 0: all (default 0)",
    )
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument(
        "--cpu-bytes", type=size, metavar="SIZE", help="host memory, such as 512MiB (default by --capacity)"
    )
    amount.add_argument(
        "--capacity",
        type=capacity,
        default=Capacity(percent=10),
        metavar="N|N%",
        help="host memory in blocks, or in %% of the unique blocks requested (default 10%%)",
    )
    add(
        "--gpu-blocks",
        type=natural,
        default=0,
        metavar="N",
        help="prefix cache in front; 0: no reuse in front (default 0)",
    )
    add("--block-bytes", type=size, default=64 << 10, metavar="SIZE", help="bytes of one engine block (default 64KiB)")
    add(
        "--block-size-factor",
        type=positive,
        default=1,
        metavar="F",
        help="engine blocks in an offloaded block (default 1)",
    )
    add(
        "--prefill-rate", type=positive, default=10_000, metavar="N",
        help="tokens per second of a prefill that a hit saves: the simulated one only writes bytes (default 10000)",
    )  # fmt: skip
    add("--concurrency", type=positive, default=8, metavar="N", help="requests at a time (default 8)")
    add(
        "--speed",
        type=speed,
        metavar="max|N",
        help="N times the trace's own clock, or as fast as possible (default max)",
    )
    add(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="check each loaded block's bytes (default on)",
    )
    add("--seed", type=whole, default=0, metavar="N", help="seed of the built-in chats (default 0)")
    add_workload(parser)
    add(
        "--workers",
        type=natural,
        default=0,
        metavar="N",
        help="rank processes that share each block; 0: none (default 0)",
    )
    feed = parser.add_mutually_exclusive_group()
    feed.add_argument(
        "--feed",
        "--events",
        dest="feed",
        type=endpoint,
        metavar="ENDPOINT",
        help="publish the events feed there, such as tcp://127.0.0.1:5557 (default only this process reads it)",
    )
    feed.add_argument("--no-feed", action="store_true", help="no events feed at all")
    add(
        "--feed-replay",
        type=endpoint,
        metavar="ENDPOINT",
        help="answer replays there (default the port after the feed's; for ipc://PATH, ipc://PATH_replay)",
    )
    add("--for", "--consumer", dest="consumer", choices=sorted(PRESETS), help="whom the feed must suit (default vllm)")
    add("--forever", action="store_true", help="begin anew at the end, until SIGTERM or Ctrl-C")
    add("--http", type=address, metavar="HOST:PORT", help="serve /metrics, /livez and /readyz there (default nowhere)")
    add("--metrics-dump", type=Path, metavar="FILE", help="write the metrics to FILE at the end (default nowhere)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure the workload, run it, report."""
    _check_options(args)
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
    config = _config(args, workload, measured)
    held = config.cpu_bytes_to_use // args.block_bytes
    if held < measured.largest_request:
        print(
            f"note: {held} blocks of host memory are less than the longest prompt's {measured.largest_request}: "
            "such a request is stored in part or not at all",
            file=sys.stderr,
        )
    if 0 < args.gpu_blocks < measured.largest_request:
        print(f"note: --gpu-blocks is raised to the longest prompt's {measured.largest_request}", file=sys.stderr)
        args.gpu_blocks = measured.largest_request
    if args.dry:
        from kvoffload.cli.dry import run_dry_command

        return run_dry_command(args, workload, measured, config)
    from kvoffload.cli.drive import run_drive_command

    if args.feed is not None or args.no_feed:
        return run_drive_command(args, workload, measured, config)
    # A feed that only this process knows of; an abstract address (@) is no file that a kill could leave behind.
    name = f"ipc://@kvoffload-run-{os.getpid()}-{secrets.token_hex(4)}"
    events = EventsConfig(endpoint=f"{name}-feed", replay_endpoint=f"{name}-replay")
    return run_drive_command(args, workload, measured, config.model_copy(update={"events": events}))


def _check_options(args: argparse.Namespace) -> None:
    """Refuse options that contradict each other, before anything is read."""
    if args.dry and (given := _given(args)):
        raise ConfigError(
            f"{', '.join(given)} cannot go with --dry: {'it needs' if len(given) == 1 else 'they need'} "
            "the service; leave --dry out"
        )
    for option, value in (("--feed-replay", args.feed_replay), ("--for", args.consumer)):
        if value is not None and args.feed is None:
            raise ConfigError(f"{option} {value} needs --feed ENDPOINT: it is about a feed that others read")
    if args.feed_replay is not None and args.feed_replay == args.feed and not args.feed.endswith(":0"):
        raise ConfigError(f"--feed and --feed-replay are both {args.feed}: give the replays an endpoint of their own")
    unit = 8 * max(1, args.workers)
    if not args.dry and args.block_bytes % unit:
        least = max(unit, args.block_bytes // unit * unit)
        raise ConfigError(
            f"--block-bytes must be a multiple of {unit} (8 for each of --workers), such as {least} or {least + unit}; "
            f"got {args.block_bytes}"
        )


def _given(args: argparse.Namespace) -> list[str]:
    """Return the options in use that need the service."""
    names = ("forever", "http", "metrics_dump", "workers", "feed")
    return [f"--{name.replace('_', '-')}" for name in names if getattr(args, name)]


def _events(feed: str | None, replay: str | None, consumer: Consumer | None) -> EventsConfig | None:
    """Return the feed's configuration: replays are answered beside the feed, unless told otherwise."""
    if feed is None:
        return None
    if replay is None and not feed.startswith("tcp://"):
        replay = f"{feed}_replay"
    elif replay is None:
        host, _, port = feed.rpartition(":")
        if int(port) == 0xFFFF:
            raise ConfigError(f"--feed {feed} leaves no port above it for replays: give --feed-replay, or a lower port")
        replay = f"{host}:{int(port) + 1 if int(port) else 0}"
    return EventsConfig(endpoint=feed, replay_endpoint=replay, consumer=consumer or "vllm")


def _config(args: argparse.Namespace, workload: Workload, measured: WorkloadSize) -> OffloadConfig:
    """Return the service's configuration; its host memory is a whole number of offloaded blocks."""
    factor: int = args.block_size_factor
    offloaded = args.block_bytes * factor
    asked: Capacity = args.capacity
    wanted = args.cpu_bytes or asked.resolve(measured.unique_blocks) * args.block_bytes
    if wanted < offloaded:
        name = "--cpu-bytes" if args.cpu_bytes else "--capacity"
        raise ConfigError(
            f"{name} must hold one offloaded block of {offloaded} bytes (--block-bytes {args.block_bytes} x "
            f"--block-size-factor {factor}); got {wanted} bytes"
            + ("" if args.cpu_bytes else f", of {measured.unique_blocks} unique blocks")
        )
    return OffloadConfig(
        cpu_bytes_to_use=wanted // offloaded * offloaded,
        gpu_block_size=workload.block_tokens,
        block_size=workload.block_tokens * factor,
        world_size=max(1, args.workers),
        eviction_policy=args.policy,
        store_threshold=args.store_threshold,
        model_name="simulated",
        prefill_tokens_per_second=args.prefill_rate,
        events=_events(args.feed, args.feed_replay, args.consumer),
    )
