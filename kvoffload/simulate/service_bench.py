"""Measurements of the async service over simulated memory; each gives figures that belong to one run."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Self

from kvoffload.config import OffloadConfig
from kvoffload.manager.base import OffloadingManager
from kvoffload.manager.cpu import CPUOffloadingManager
from kvoffload.manager.specs import CPULoadStoreSpec, GPULoadStoreSpec
from kvoffload.memory.canonical import CanonicalKVCaches
from kvoffload.service.service import OffloadService
from kvoffload.simulate.gpu_memory import SimulatedGpu
from kvoffload.spec.base import HandlerRoute, KVCacheConfig, OffloadingSpec
from kvoffload.transfer.directional import SingleDirectionOffloadingHandler
from kvoffload.transfer.host import HostStream
from kvoffload.transfer.host_copy import copy_plan
from kvoffload.transfer.plan import CopyPlan
from kvoffload.transfer.scripted import ScriptedOffloadingHandlers
from kvoffload.transfer.stream import BlockOrder

Figures = dict[str, object]
_BLOCK = 16
_LOAD_BYTES = 64 << 10


class _Spec(OffloadingSpec):
    """A plain LRU manager over the given routes."""

    def __init__(self, config: OffloadConfig, caches: CanonicalKVCaches, capacity: int) -> None:
        super().__init__(config, KVCacheConfig.from_canonical(caches, config))
        self.manager = CPUOffloadingManager(capacity)
        self.routes: Sequence[HandlerRoute] = ()

    def get_manager(self) -> OffloadingManager:
        """Return the manager."""
        return self.manager

    def get_handlers(self, kv_caches: CanonicalKVCaches) -> Iterator[HandlerRoute]:  # noqa: ARG002 - given
        """Yield the given routes."""
        yield from self.routes


class _Bench:
    """A service over `gpu_blocks` blocks of `block_bytes`."""

    def __init__(self, gpu_blocks: int, block_bytes: int, capacity: int) -> None:
        self.gpu = SimulatedGpu(gpu_blocks, block_bytes)
        self.caches = CanonicalKVCaches.from_layers(self.gpu.layers, block_dim=0)
        config = OffloadConfig(
            cpu_bytes_to_use=1 << 20,
            gpu_block_size=_BLOCK,
            pending_wait_seconds=600.0,
            load_deadline_seconds=600.0,
            max_inflight_jobs=1 << 20,
        )
        self.spec = _Spec(config, self.caches, capacity)
        self.service = OffloadService(config, self.caches, spec=self.spec)

    def script(self, capacity: int) -> ScriptedOffloadingHandlers:
        """Use copies that end when told."""
        handlers = ScriptedOffloadingHandlers.over(self.caches, 1, capacity)
        self.spec.routes = [
            (GPULoadStoreSpec, CPULoadStoreSpec, handlers.gpu_to_cpu_handler),
            (CPULoadStoreSpec, GPULoadStoreSpec, handlers.cpu_to_gpu_handler),
        ]
        return handlers

    async def store(self, seed: int, gpu_block: int) -> None:
        """Offer one block of a sequence of its own and let the tick end."""
        chain = self.service.chain(range(seed * 100, seed * 100 + _BLOCK + 1))
        async with self.service.request(f"w{seed}", chain, gpu_blocks=[gpu_block], free=None) as request:
            request.store(computed_tokens=_BLOCK, ready="host-visible")
        await asyncio.sleep(0)


async def measure_wake_ups(rounds: int) -> Figures:
    """Time from the end of a 64 KiB copy to the resumption of its load, and a bare eventfd round trip."""
    bench = _Bench(4, _LOAD_BYTES, 4)
    ended = 0.0

    def copier(plan: CopyPlan) -> None:
        nonlocal ended
        copy_plan(plan)
        ended = time.perf_counter()

    cpu = SimulatedGpu(4, _LOAD_BYTES)
    gpu_tensors = [tensor.view for tensor in bench.caches.tensors]
    order = BlockOrder(4)
    store, load = (
        SingleDirectionOffloadingHandler(
            gpu_tensors,
            list(cpu.layers.values()),
            1,
            bench.caches.group_data_refs,
            gpu_to_cpu,
            order=order,
            make_stream=lambda name, on_done: HostStream(name, on_done, copier),
        )
        for gpu_to_cpu in (True, False)
    )
    bench.spec.routes = [(GPULoadStoreSpec, CPULoadStoreSpec, store), (CPULoadStoreSpec, GPULoadStoreSpec, load)]
    loads: list[float] = []
    bare: list[float] = []
    one_way: list[float] = []
    async with bench.service as service, _BareEventfd() as eventfd:
        await bench.store(1, 0)
        await service.drain()
        chain = service.chain(range(100, 100 + _BLOCK + 1))
        async with service.request("r", chain, gpu_blocks=[1, 2], free=None) as request:
            for _ in range(rounds):
                await request.load()
                loads.append(time.perf_counter() - ended)
                there_and_back, back = await eventfd.round_trip()
                bare.append(there_and_back)
                one_way.append(back)
    return {
        "wake_p50_seconds": _quantile(loads, 0.5),
        "wake_p99_seconds": _quantile(loads, 0.99),
        "eventfd_p50_seconds": _quantile(bare, 0.5),
        "eventfd_p99_seconds": _quantile(bare, 0.99),
        "eventfd_one_way_p50_seconds": _quantile(one_way, 0.5),
        "wake_ratio": round(_quantile(loads, 0.5) / _quantile(bare, 0.5), 2),
    }


class _BareEventfd:
    """A thread that answers one eventfd with another which the loop reads: the least that a round trip can cost."""

    async def __aenter__(self) -> Self:
        flags = os.EFD_CLOEXEC
        self._ask, self._answer = os.eventfd(0, flags), os.eventfd(0, flags | os.EFD_NONBLOCK)
        self._stop = False
        self._answered_at = 0.0
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(self._answer, self._on_readable)
        self._thread = threading.Thread(target=self._run, name="kvoffload-bench")
        self._thread.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._stop = True
        os.eventfd_write(self._ask, 1)
        await asyncio.to_thread(self._thread.join)
        self._loop.remove_reader(self._answer)
        os.close(self._ask)
        os.close(self._answer)

    def _run(self) -> None:
        while True:
            os.eventfd_read(self._ask)
            if self._stop:
                return
            self._answered_at = time.perf_counter()
            os.eventfd_write(self._answer, 1)

    def _on_readable(self) -> None:
        os.eventfd_read(self._answer)
        if not self._future.done():  # it is cancelled by an interrupt
            self._future.set_result(None)

    async def round_trip(self) -> tuple[float, float]:
        """Return the seconds from asking to the coroutine's resumption, and of the thread's answer alone."""
        self._future = self._loop.create_future()
        began = time.perf_counter()
        os.eventfd_write(self._ask, 1)
        await self._future
        now = time.perf_counter()
        return now - began, now - self._answered_at


async def measure_waiters(waiters: int, prefixes: int) -> Figures:
    """Let `waiters` loads wait for `prefixes` blocks being written, then end the copies one by one."""
    bench = _Bench(3 * prefixes, 64, prefixes)
    handlers = bench.script(prefixes)
    lag: list[float] = []
    busy: list[float] = []
    async with bench.service as service:
        handlers.gpu_to_cpu_handler.hold()
        for seed in range(prefixes):
            await bench.store(seed, seed)

        async def wait(number: int) -> int:
            seed = number % prefixes
            chain = service.chain(range(seed * 100, seed * 100 + _BLOCK + 1))
            table = [prefixes + 2 * seed, prefixes + 2 * seed + 1]
            async with service.request(f"r{number}", chain, gpu_blocks=table, free=None) as request:
                return (await request.load()).num_tokens

        everything = asyncio.gather(*(wait(number) for number in range(waiters)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        gc.collect()
        gc.freeze()  # as a server does once it is up
        beat = asyncio.ensure_future(_note_lag(lag, busy))
        began, cpu = time.perf_counter(), time.process_time()
        for job_id in handlers.gpu_to_cpu_handler.pending_jobs():
            handlers.gpu_to_cpu_handler.finish(job_id)
            await asyncio.sleep(0)
        loaded = await everything
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        beat.cancel()
        gc.unfreeze()
    return {
        "waiters": waiters,
        "waiters_served": sum(tokens == _BLOCK for tokens in loaded),
        "waiters_loads": len(handlers.cpu_to_gpu_handler.submitted),
        "waiters_seconds": round(seconds, 3),
        "waiters_cpu_microseconds_each": round(1e6 * cpu / waiters, 1),
        "waiters_loop_lag_p99_seconds": _quantile(lag, 0.99),
        "waiters_loop_busy_p99_seconds": _quantile(busy, 0.99),
    }


async def measure_disconnects(clients: int) -> Figures:
    """Cancel `clients` loads at once while their copies run, wait 200 ms, then let the copies end."""
    bench = _Bench(2 + 2 * clients, 64, 2)
    handlers = bench.script(2)
    exits: list[float] = []
    freed: list[int] = []
    async with bench.service as service:
        await bench.store(0, 0)
        await service.drain()
        handlers.cpu_to_gpu_handler.hold()

        async def client(number: int) -> None:
            chain = service.chain(range(_BLOCK + 1))
            table = [2 + 2 * number, 3 + 2 * number]
            began = 0.0
            try:
                async with service.request(f"c{number}", chain, gpu_blocks=table, free=freed.extend) as request:
                    try:
                        await request.load()
                    finally:
                        began = time.perf_counter()
            finally:
                exits.append(time.perf_counter() - began)

        tasks = [asyncio.ensure_future(client(number)) for number in range(clients)]
        while len(handlers.cpu_to_gpu_handler.submitted) < clients:  # noqa: ASYNC110 - one pass of the loop is all
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        early = len(freed) - clients  # the second block of each table is no copy's
        cpu = time.process_time()
        await asyncio.sleep(0.2)
        cpu = time.process_time() - cpu
        handlers.cpu_to_gpu_handler.finish_all()
        await service.drain()
    return {
        "disconnects": clients,
        "disconnect_exit_p50_seconds": _quantile(exits, 0.5),
        "disconnect_exit_p99_seconds": _quantile(exits, 0.99),
        "disconnect_cpu_ratio_while_waiting": round(cpu / 0.2, 4),
        "disconnect_blocks_freed_early": early,
        "disconnect_blocks_freed": len(freed),
    }


async def _note_lag(lag: list[float], busy: list[float], seconds: float = 0.001) -> None:
    """Note how late each beat is, and the processor time of the loop's thread since the last one.

    On a machine that others use, too, the second says how long the loop was held up by its own work.
    """
    last, used = time.perf_counter(), time.thread_time()
    while True:
        await asyncio.sleep(seconds)
        now, cpu = time.perf_counter(), time.thread_time()
        lag.append(now - last - seconds)
        busy.append(cpu - used)
        last, used = now, cpu


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 7)
