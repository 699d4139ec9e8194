"""A workload through the real service, with real bytes: what `kvoffload run` does.

Each request is a small engine of its own: it takes GPU blocks, loads what is held, computes the rest in steps, offers
each step, and leaves. Its GPU blocks come back through `free` when no copy touches them. One thread stands for the
device: it writes and checks blocks, so that the loop's lag shows what the service costs the loop.
"""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from kvoffload.config import OffloadConfig
from kvoffload.memory.canonical import CanonicalKVCaches
from kvoffload.metrics.recorder import MetricsRecorder
from kvoffload.service.results import LoadOutcome, Stats, StoreResult
from kvoffload.service.service import OffloadService
from kvoffload.service.store_job import StoreJob
from kvoffload.simulate.gpu_cache import GpuPrefixCache, GpuTable
from kvoffload.simulate.gpu_memory import SimulatedGpu
from kvoffload.simulate.rank_rig import RankRig
from kvoffload.simulate.sharded_gpu import ShardedGpu
from kvoffload.simulate.workload import Workload, WorkloadRequest, WorkloadSize

_REGIONS = ("/dev/shm/kvoffload_", "/memfd:kvoffload")  # noqa: S108 - what maps of regions are called
_DRAIN_SECONDS = 30.0
_KEPT_VALUES = 4_000_000
_TOKEN_IDS = 1 << 30
_SCRATCH_BYTES = 1 << 30
T = TypeVar("T")
Work = Callable[[Sequence[int], Sequence[bytes]], T]
Beside = Callable[[OffloadService], AbstractAsyncContextManager[object]]


@dataclass(frozen=True, slots=True)
class DriveOptions:
    """How a workload is driven.

    Attributes:
        block_bytes: Bytes of one engine block.
        gpu_blocks: Blocks of the GPU prefix cache in front; 0: scratch blocks, nothing is found there.
        store_step: Engine blocks computed and offered at a time.
        concurrency: Requests at a time.
        speed: Times faster than the trace's own clock; None: as fast as possible.
        verify: Check every loaded block.
        forever: Begin anew when the workload ends, until told to stop.
        workers: Rank processes, each with its share of every block; 0: everything in this process.
    """

    block_bytes: int
    gpu_blocks: int = 0
    store_step: int = 16
    concurrency: int = 8
    speed: float | None = None
    verify: bool = True
    forever: bool = False
    workers: int = 0


class RunMetrics(MetricsRecorder):
    """What the service counts and observes in one run."""

    def rate(self, direction: str) -> float:
        """Return the GB/s of one direction's copies, while they ran."""
        seconds = self.read_histograms()["transfer_copy_seconds"][direction]["sum"]
        return self.value("transfer_bytes", direction) / seconds / 1e9 if seconds else 0.0


@dataclass(slots=True)
class DriveResult:
    """What happened; blocks are engine blocks.

    Attributes:
        requests: Requests served.
        requested_blocks: Blocks of their prompts, unfinished ones included.
        gpu_hit_blocks: Blocks found on the simulated GPU.
        loaded_blocks: Blocks loaded from host memory: the prefix hits.
        verified_blocks: Loaded blocks that were checked.
        corrupt_blocks: Checked blocks that held other bytes than were stored.
        stored_blocks: Blocks that became readable.
        filtered_blocks: Blocks that a reuse filter or the policy did not let in.
        rejected_blocks: Blocks that were refused, by reason.
        failures: Loads and stores whose copy failed or did not end in time.
        load_seconds: Duration of each load that moved something, as the request felt it.
        loop_lag_seconds: How late each tick of a 1 ms ticker was.
        seconds: Duration of the run.
        stats: The service's own counters at the end, nothing running.
        metrics: What the service counted.
        leaked: What was left: pins and jobs before closing; tasks, threads and shared memory after.
    """

    requests: int = 0
    requested_blocks: int = 0
    gpu_hit_blocks: int = 0
    loaded_blocks: int = 0
    verified_blocks: int = 0
    corrupt_blocks: int = 0
    stored_blocks: int = 0
    filtered_blocks: int = 0
    rejected_blocks: dict[str, int] = field(default_factory=dict)
    failures: int = 0
    load_seconds: array[float] = field(default_factory=lambda: array("d"))
    loop_lag_seconds: array[float] = field(default_factory=lambda: array("d"))
    seconds: float = 0.0
    stats: Stats = field(default_factory=Stats)
    metrics: RunMetrics = field(default_factory=RunMetrics)
    leaked: dict[str, int] = field(default_factory=dict)


async def drive(
    workload: Workload,
    measured: WorkloadSize,
    config: OffloadConfig,
    options: DriveOptions,
    *,
    progress: Callable[[DriveResult], None] = lambda _: None,
    beside: Beside = lambda _: nullcontext(),
    stop: asyncio.Event | None = None,
) -> DriveResult:
    """Run a workload to its end and return what happened.

    Args:
        workload: The requests.
        measured: Their sizes.
        config: The service's configuration.
        options: How to drive it.
        progress: Called with the result so far after each request.
        beside: Returns what to enter while the service runs; it is left when nothing runs any more.
        stop: Once set, no further request begins.
    """
    before = _Surroundings.now()
    driver = _Driver(workload, measured, config, options, progress, beside, stop or asyncio.Event())
    result = await driver.run()
    after = _Surroundings.now()
    for _ in range(100):  # a thread that has done its work may need a moment to be gone
        if after.threads <= before.threads and after.tasks <= before.tasks:
            break
        await asyncio.sleep(0.01)
        after = _Surroundings.now()
    result.leaked |= {
        "tasks": len(after.tasks - before.tasks),
        "threads": len(after.threads - before.threads),
        "shm": len(after.shm - before.shm),
    }
    return result


@dataclass(frozen=True, slots=True)
class _Surroundings:
    """What a run must leave as it found it."""

    tasks: set[asyncio.Task[object]]
    threads: set[threading.Thread]
    shm: set[str]

    @classmethod
    def now(cls) -> _Surroundings:
        lines = Path("/proc/self/maps").read_text().splitlines()
        shm = {line.split(" ", 1)[0] for line in lines if any(name in line for name in _REGIONS)}
        return cls(set(asyncio.all_tasks()), set(threading.enumerate()), shm)


class _Driver:
    """The engine around the service: GPU blocks, requests at a time, the clock of arrivals."""

    def __init__(
        self,
        workload: Workload,
        measured: WorkloadSize,
        config: OffloadConfig,
        options: DriveOptions,
        progress: Callable[[DriveResult], None],
        beside: Beside,
        stop: asyncio.Event,
    ) -> None:
        self.workload, self.config, self.options, self.progress = workload, config, options, progress
        self.beside, self.stop = beside, stop
        scratch = min(measured.largest_request * min(options.concurrency, 4), _SCRATCH_BYTES // options.block_bytes)
        pool = max(measured.largest_request, options.gpu_blocks or scratch)
        self.cache = GpuPrefixCache(pool, reuse=options.gpu_blocks > 0)
        workers, block_bytes = options.workers, options.block_bytes
        self.gpu = ShardedGpu(pool, block_bytes, workers) if workers else SimulatedGpu(pool, block_bytes)
        self.device = ThreadPoolExecutor(1, thread_name_prefix="simulated-gpu")
        self.block_tokens = workload.block_tokens
        self.result = DriveResult()
        self.room = asyncio.Event()
        self.turn = asyncio.Lock()

    async def run(self) -> DriveResult:
        result = self.result
        loop = asyncio.get_running_loop()
        async with self._service() as service, self.beside(service):
            ticker = loop.create_task(_tick(result.loop_lag_seconds))
            try:
                start = loop.time()
                await self._serve_all(service, start)
                drained = await service.drain(_DRAIN_SECONDS)
                result.seconds = loop.time() - start
            finally:
                ticker.cancel()
                self.device.shutdown()
            result.stats = service.stats()
            stats = result.stats
            result.leaked = {
                "pins": stats.manager.pinned,
                "jobs": stats.running_loads + stats.running_stores + stats.queued_stores + (not drained),
            }
        return result

    @asynccontextmanager
    async def _service(self) -> AsyncIterator[OffloadService]:
        """Open the service, over memory in this process or over ranks."""
        metrics = self.result.metrics
        if isinstance(self.gpu, SimulatedGpu):
            caches = CanonicalKVCaches.from_layers(self.gpu.layers, block_dim=0)
            async with OffloadService(self.config, caches, metrics=metrics) as service:
                yield service
            return
        rig = RankRig(self.config, self.gpu)
        try:
            async with rig.running(), OffloadService(self.config, workers=rig.workers, metrics=metrics) as service:
                yield service
        finally:
            self.gpu.close()

    async def _serve_all(self, service: OffloadService, start: float) -> None:
        loop = asyncio.get_running_loop()
        slots = asyncio.Semaphore(self.options.concurrency)
        speed = self.options.speed
        async with asyncio.TaskGroup() as tasks:
            for request in self._arrivals():
                if speed is not None:
                    await self._pause(start + request.arrival_seconds / speed - loop.time())
                await slots.acquire()
                if self.stop.is_set():
                    break
                task = tasks.create_task(self._serve(service, request))
                task.add_done_callback(lambda _: slots.release())

    def _arrivals(self) -> Iterator[WorkloadRequest]:
        """Yield the workload's requests; over and over, on one clock and with running numbers, if asked for."""
        if not self.options.forever:
            yield from self.workload
            return
        number, shift = 0, 0.0
        while True:
            end = shift
            for request in self.workload:
                end = shift + request.arrival_seconds
                yield replace(request, number=number, arrival_seconds=end)
                number += 1
            shift = end

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not longer than until the stop."""
        if seconds <= 0 or self.stop.is_set():
            await asyncio.sleep(0)
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(self.stop.wait(), seconds)

    async def _serve(self, service: OffloadService, request: WorkloadRequest) -> None:
        result, names = self.result, request.block_hashes
        if names:
            for job in await self._generate(service, request):
                _book(await job, result)
        result.requests += 1
        result.requested_blocks += request.num_blocks
        self.progress(result)

    async def _generate(self, service: OffloadService, request: WorkloadRequest) -> list[StoreJob]:
        """Do what an engine does for one prompt; return the stores on their way."""
        result, names = self.result, request.block_hashes
        table = await self._acquire(names)
        result.gpu_hit_blocks += table.cached
        chain = service.chain(self._tokens(names), block_hashes=names)
        stores: list[StoreJob] = []
        async with service.request(str(request.number), chain, gpu_blocks=table.blocks, free=self._release) as served:
            # A prompt with an unfinished block has tokens left to compute anyway.
            leave = 1 if request.num_blocks == len(names) and not self.workload.keep_partial else 0
            began = service.clock()
            loaded = await served.load(first_block=table.cached, leave_tokens=leave)
            if loaded.outcome in (LoadOutcome.FAILED, LoadOutcome.UNHEALTHY):
                result.failures += 1
            if loaded.undefined_gpu_blocks:
                return stores  # a copy may still write them: this prompt needs other blocks
            done = table.cached + loaded.num_blocks
            if loaded.num_blocks:
                _keep(result.load_seconds, service.clock() - began)
                result.loaded_blocks += loaded.num_blocks
                await self._check(table, names, done)
            step = self.options.store_step
            for end in [min(begin + step, len(names)) for begin in range(done, len(names), step)] or [done]:
                began = service.clock()
                await self._compute(table, names, done, end)
                if end > done:
                    served.prefilled((end - done) * self.block_tokens, max(service.clock() - began, 1e-9))
                stores.append(served.store(computed_tokens=end * self.block_tokens, ready="host-visible"))
                done = end
            served.finished(output_tokens=request.output_tokens)
        return stores

    def _tokens(self, names: Sequence[bytes]) -> array[int]:
        """Return tokens for blocks that a trace only names, the same ones for the same name, for the feed."""
        if self.config.events is None:
            return array("I")
        size = self.block_tokens
        firsts = np.array([int.from_bytes(name[-12:], "big") * size % _TOKEN_IDS for name in names], np.uint32)
        return array("I", (firsts[:, None] + np.arange(size, dtype=np.uint32)).tobytes())

    async def _check(self, table: GpuTable, names: Sequence[bytes], end: int) -> None:
        """Check what was loaded, up to block `end`; only then it serves later requests."""
        result, part = self.result, slice(table.cached, end)
        if self.options.verify:
            wrong = await self._on_device(self.gpu.count_wrong, table.blocks[part], names[part])
            result.corrupt_blocks += wrong
            result.verified_blocks += end - table.cached
        self._commit(table.blocks[part], names[part])

    async def _compute(self, table: GpuTable, names: Sequence[bytes], begin: int, end: int) -> None:
        part = slice(begin, end)
        await self._on_device(self.gpu.compute, table.blocks[part], names[part])
        self._commit(table.blocks[part], names[part])

    async def _on_device(self, work: Work[T], blocks: Sequence[int], names: Sequence[bytes]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.device, partial(work, blocks, names))

    def _commit(self, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        for block, name in zip(blocks, names, strict=True):
            self.cache.commit(block, name)

    async def _acquire(self, names: Sequence[bytes]) -> GpuTable:
        """Wait for GPU blocks; who came first is served first."""
        async with self.turn:
            while (table := self.cache.acquire(names)) is None:
                self.room.clear()
                await self.room.wait()
            return table

    def _release(self, blocks: Sequence[int]) -> None:
        self.cache.release(blocks)
        self.room.set()


def _book(stored: StoreResult, result: DriveResult) -> None:
    result.stored_blocks += stored.stored
    result.filtered_blocks += stored.filtered
    result.failures += stored.failed > 0
    if stored.rejected:
        reason = stored.reason or "other"
        result.rejected_blocks[reason] = result.rejected_blocks.get(reason, 0) + stored.rejected


async def _tick(lags: array[float]) -> None:
    """Note how late each of many 1 ms sleeps ends."""
    clock = asyncio.get_running_loop().time
    while True:
        due = clock() + 0.001
        await asyncio.sleep(0.001)
        _keep(lags, clock() - due)


def _keep(values: array[float], value: float) -> None:
    """Append; a run without end forgets its oldest values."""
    values.append(value)
    if len(values) > _KEPT_VALUES:
        del values[: _KEPT_VALUES // 2]
