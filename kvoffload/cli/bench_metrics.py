"""What counting costs a job of the asyncio service, and what a full scrape does to its loop.

The service runs over scripted handlers, which end at once, so that a job's time is the facade's alone. The calls that
it makes are logged, then replayed on the recorder: each share is a ratio of medians of one run. The lag of a 1 ms
ticker is taken with and without scrapes beside it.

Examples:
  kvoffload bench metrics
  kvoffload bench metrics --jobs 100 --json --check
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvoffload.cli.main import FAILED, OK
from kvoffload.cli.report import print_json, print_table
from kvoffload.cli.values import add_check, add_json, add_repeat, positive
from kvoffload.config import OffloadConfig
from kvoffload.manager.base import OffloadingManager
from kvoffload.manager.cpu import CPUOffloadingManager
from kvoffload.manager.specs import CPULoadStoreSpec, GPULoadStoreSpec
from kvoffload.memory.canonical import CanonicalKVCaches
from kvoffload.metrics.recorder import MetricsRecorder
from kvoffload.service.service import OffloadService
from kvoffload.spec.base import HandlerRoute, KVCacheConfig, OffloadingSpec
from kvoffload.transfer.scripted import ScriptedOffloadingHandlers

BLOCK = 16
CAPACITY = 1024
RECORD_SHARE = 0.03
SCRAPE_LAG_MS = 5.0
_TRANSFER = {
    "transfers", "transfer_bytes", "transfer_queue_seconds", "transfer_copy_seconds", "transfer_size_bytes",
}  # fmt: skip

Call = tuple[str, str, float, str]
"""Method of the sink and its arguments."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options."""
    parser.add_argument(
        "--jobs", type=positive, default=400, metavar="N", help="transfers per measurement (default 400)"
    )
    parser.add_argument("--blocks", type=positive, default=8, metavar="N", help="blocks of a transfer (default 8)")
    add_repeat(parser, 9)
    parser.add_argument(
        "--scrapes", type=positive, default=100, metavar="N", help="scrapes beside the ticker (default 100)"
    )
    add_json(parser)
    add_check(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    values = asyncio.run(_measure(args.jobs, args.blocks, args.repeat, args.scrapes))
    met = values["transfer_record_share"] <= RECORD_SHARE and values["scrape_loop_lag_p99_ms"] <= SCRAPE_LAG_MS
    report = {**values, "all_met": met}
    if args.json:
        print_json(report)
    else:
        print_table("cost of metrics", report)
    return FAILED if args.check and not met else OK


class _CallLog(MetricsRecorder):
    """A recorder that also remembers how it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def count(self, name: str, amount: float = 1, label: str = "") -> None:
        self.calls.append(("count", name, amount, label))

    def observe(self, name: str, value: float, label: str = "") -> None:
        self.calls.append(("observe", name, value, label))


class _ScriptedSpec(OffloadingSpec):
    """A CPU manager over handlers that end each transfer at once."""

    def __init__(self, config: OffloadConfig, kv_caches: CanonicalKVCaches) -> None:
        super().__init__(config, KVCacheConfig.from_canonical(kv_caches, config))
        self._manager = CPUOffloadingManager(CAPACITY, "lru", enable_events=True)
        self._handlers = ScriptedOffloadingHandlers.over(kv_caches, 1, CAPACITY)

    def get_manager(self) -> OffloadingManager:
        return self._manager

    def get_handlers(self, kv_caches: CanonicalKVCaches) -> Iterator[HandlerRoute]:  # noqa: ARG002
        yield GPULoadStoreSpec, CPULoadStoreSpec, self._handlers.gpu_to_cpu_handler
        yield CPULoadStoreSpec, GPULoadStoreSpec, self._handlers.cpu_to_gpu_handler


def _service(recorder: MetricsRecorder, blocks: int) -> OffloadService:
    layers = {"layer": np.zeros((2 * blocks, 64), np.int8)}
    caches = CanonicalKVCaches.from_layers(layers, block_dim=0)
    config = OffloadConfig(cpu_bytes_to_use=1 << 20, gpu_block_size=BLOCK)
    return OffloadService(config, caches, spec=_ScriptedSpec(config, caches), metrics=recorder)


async def _jobs(service: OffloadService, jobs: int, blocks: int, first: int) -> float:
    """Run pairs of requests, one that stores and one that loads the same; return seconds per job."""
    clock = time.perf_counter
    table, other = list(range(blocks)), list(range(blocks, 2 * blocks))
    chains = [service.chain(range(number * 10_000, number * 10_000 + blocks * BLOCK)) for number in range(jobs // 2)]
    began = clock()
    for number, chain in enumerate(chains, first):
        async with service.request(f"store {number}", chain, gpu_blocks=table, free=None) as request:
            await request.store(computed_tokens=blocks * BLOCK, ready="host-visible")
        async with service.request(f"load {number}", chain, gpu_blocks=other, free=None) as request:
            await request.load(leave_tokens=0)
    return (clock() - began) / (2 * len(chains))


def _replay(calls: Sequence[Call]) -> float:
    """Return the seconds that a recorder takes for logged calls."""
    recorder = MetricsRecorder()
    bound: list[tuple[Callable[[str, float, str], None], str, float, str]] = [
        (recorder.count if method == "count" else recorder.observe, name, value, label)
        for method, name, value, label in calls
    ]
    began = time.perf_counter()
    for function, name, value, label in bound:
        function(name, value, label)
    return time.perf_counter() - began


async def _measure(jobs: int, blocks: int, repeat: int, scrapes: int) -> dict[str, float]:
    log = _CallLog()
    async with _service(log, blocks) as service:
        await _jobs(service, jobs, blocks, 0)
    calls = log.calls
    transfer_calls = [call for call in calls if call[1] in _TRANSFER]
    transfers = sum(1 for call in calls if call[1] == "transfers")
    done = 2 * (jobs // 2)
    facade, record, every = [], [], []
    async with _service(MetricsRecorder(), blocks) as service:
        for round_ in range(repeat):
            await service.reset_cache()
            facade.append(await _jobs(service, jobs, blocks, round_ * jobs))
            record.append(_replay(transfer_calls) / transfers)
            every.append(_replay(calls) / done)
        quiet, _ = await _lag(service, 0)
        busy, seconds = await _lag(service, scrapes)
        body, _ = service.metrics.render()
    job = statistics.median(facade)
    return {
        "facade_us_per_job": _us(job),
        "transfer_record_us": _us(statistics.median(record)),
        "transfer_record_share": round(statistics.median(record) / job, 4),
        "records_us_per_job": _us(statistics.median(every)),
        "records_share": round(statistics.median(every) / job, 4),
        "series": sum(1 for line in body.splitlines() if not line.startswith(b"#")),
        "scrape_bytes": len(body),
        "scrape_ms": round(1e3 * statistics.median(seconds), 3),
        "quiet_loop_lag_p99_ms": _p99_ms(quiet),
        "scrape_loop_lag_p99_ms": _p99_ms(busy),
    }


async def _lag(service: OffloadService, scrapes: int) -> tuple[list[float], list[float]]:
    """Return how late a 1 ms ticker was beside scrapes (or beside nothing for as long), and what each scrape took."""
    lags: list[float] = []
    took: list[float] = []
    ticker = asyncio.ensure_future(_tick(lags))
    if not scrapes:
        await asyncio.sleep(0.5)
    for _ in range(scrapes):
        began = time.perf_counter()
        await service.metrics.render_in_thread()
        took.append(time.perf_counter() - began)
    ticker.cancel()
    return lags, took


async def _tick(lags: list[float]) -> None:
    while True:
        due = time.perf_counter() + 0.001
        await asyncio.sleep(0.001)
        lags.append(max(0.0, time.perf_counter() - due))


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 2)


def _p99_ms(lags: Sequence[float]) -> float:
    ordered = sorted(lags)
    return round(1e3 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 3)
