"""`kvoffload run`: the requests through the real service, with real bytes."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext

from kvoffload.cli.feed_check import FeedCheck
from kvoffload.cli.live_table import LiveTable, wanted
from kvoffload.cli.metrics_server import MetricsServer
from kvoffload.cli.observe import Observer
from kvoffload.cli.report import report
from kvoffload.config import OffloadConfig
from kvoffload.errors import ConfigError
from kvoffload.service.service import OffloadService
from kvoffload.simulate.drive import DriveOptions, DriveResult, drive
from kvoffload.simulate.workload import Workload, WorkloadSize


def run_drive_command(
    args: argparse.Namespace, workload: Workload, measured: WorkloadSize, config: OffloadConfig
) -> int:
    """Drive, and report what happened; 1 when a block was wrong, a copy failed or something was left behind."""
    options = DriveOptions(
        block_bytes=args.block_bytes,
        gpu_blocks=args.gpu_blocks,
        store_step=args.store_step,
        concurrency=args.concurrency,
        speed=args.speed,
        verify=args.verify,
        forever=args.forever,
        workers=args.workers,
    )
    table = None
    if wanted(as_json=args.json):
        table = LiveTable(measured.requests, config.block_size_factor, forever=options.forever)
    with _server(args.http) as server:
        observer = Observer(server, args.metrics_dump)
        feed = FeedCheck(workload, config)

        async def serve() -> DriveResult:
            stop = asyncio.Event()
            if options.forever:
                _stop_at_signals(stop)

            @asynccontextmanager
            async def beside(service: OffloadService) -> AsyncIterator[None]:
                async with observer.beside(service), feed.beside(service), _shown(table, service):
                    yield

            progress = (lambda _: None) if table is None else table.advance
            return await drive(workload, measured, config, options, progress=progress, beside=beside, stop=stop)

        result = asyncio.run(serve())
    values = {
        "workload": workload.name,
        "workers": args.workers,
        "policy": config.eviction_policy,
        "capacity_blocks": config.cpu_bytes_to_use // args.block_bytes,
        "capacity_bytes": config.cpu_bytes_to_use,
        "unique_blocks": measured.unique_blocks,
        "skipped_lines": measured.bad_lines,
        **_values(result, config.block_size_factor),
        **({"feed": feed.values} if feed.values else {}),
    }
    report("kvoffload run", values, as_json=args.json)
    if observer.failure is not None:
        print(f"the metrics were not written: {observer.failure}", file=sys.stderr)
    if feed.failed:
        print("the index built from the feed differs from the cache", file=sys.stderr)
    failed = feed.failed or observer.failure or result.corrupt_blocks or result.failures or any(result.leaked.values())
    return 1 if failed else 0


def _stop_at_signals(stop: asyncio.Event) -> None:
    """At a signal begin no further request; a second one ends the run at once, as it does without `--forever`."""
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def first() -> None:
        stop.set()
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)

    for number in before:
        loop.add_signal_handler(number, first)


@contextmanager
def _server(address: tuple[str, int] | None) -> Iterator[MetricsServer | None]:
    """Serve metrics at `address` while the block runs, and say where.

    Raises:
        ConfigError: The address cannot be bound.
    """
    if address is None:
        yield None
        return
    host, port = address
    try:
        server = MetricsServer(host, port)
    except OSError as error:
        raise ConfigError(
            f"--http: cannot listen on {host}:{port}: {error.strerror or error}; give an address of this machine and a "
            "free port (0: any)"
        ) from None
    with server:
        print(f"metrics on {server.url}/metrics", file=sys.stderr, flush=True)
        yield server


def _shown(table: LiveTable | None, service: OffloadService) -> AbstractAsyncContextManager[None]:
    return nullcontext() if table is None else table.beside(service)


def _values(result: DriveResult, factor: int) -> dict[str, object]:
    stats, metrics = result.stats, result.metrics
    return {
        "seconds": round(result.seconds, 3),
        "requests": result.requests,
        "requested_blocks": result.requested_blocks,
        "gpu_hit_blocks": result.gpu_hit_blocks,
        "loaded_blocks": result.loaded_blocks,
        "prefix_hit_ratio": result.loaded_blocks / max(1, result.requested_blocks),
        "stored_blocks": result.stored_blocks,
        "evicted_blocks": stats.manager.evicted * factor,
        "filtered_blocks": result.filtered_blocks,
        "rejected_blocks": result.rejected_blocks,
        "bytes_stored": stats.stored_bytes,
        "bytes_loaded": stats.loaded_bytes,
        "verified_blocks": result.verified_blocks,
        "corrupt_blocks": result.corrupt_blocks,
        "store_gbps": round(metrics.rate("store"), 3),
        "load_gbps": round(metrics.rate("load"), 3),
        "load_latency_ms": {
            "p50": _milliseconds(result.load_seconds, 0.5),
            "p99": _milliseconds(result.load_seconds, 0.99),
        },
        "p999_loop_lag_ms": _milliseconds(result.loop_lag_seconds, 0.999),
        "max_loop_lag_ms": _milliseconds(result.loop_lag_seconds, 1.0),
        "failures": result.failures,
        "leaked": result.leaked,
    }


def _milliseconds(seconds: Sequence[float], share: float) -> float | None:
    """Return a percentile in ms; None when there is nothing."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3)
