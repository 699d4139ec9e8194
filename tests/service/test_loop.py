"""The loop is never held up: wake-ups grow with completions, large work runs elsewhere or in slices."""

from __future__ import annotations

import asyncio
import gc
import sys
import time

import numpy as np
import pytest
import uvloop
from service.harness import BLOCK, Rig, tokens

import kvoffload as kv

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


SLOWER = 20 if sys.flags.dev_mode else 1  # asyncio's debug mode notes a stack for every future


class Heartbeat:
    """Notes, between its beats, how late the next one is and how much processor time the loop's thread took.

    Other programs make a beat late, but they take none of this thread's time; a blocking call makes it late and takes
    none: so both are looked at.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.late: list[float] = []
        self.busy: list[float] = []

    async def __aenter__(self):
        self._task = asyncio.ensure_future(self._beat())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_):
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.late.sort()
        self.busy.sort()

    async def _beat(self):
        last, used = time.perf_counter(), time.thread_time()
        while True:
            await asyncio.sleep(self._seconds)
            now, cpu = time.perf_counter(), time.thread_time()
            self.late.append(now - last - self._seconds)
            self.busy.append(cpu - used)
            last, used = now, cpu


@pytest.mark.parametrize("loop", LOOPS)
def test_ten_thousand_waiters_on_a_hundred_prefixes_cost_a_hundred_wake_ups(loop, monkeypatch):
    prefixes, per_prefix = 100, 100
    rig = Rig(
        capacity=prefixes,
        gpu_blocks=prefixes + 2 * prefixes,
        pending_wait_seconds=120.0,
        load_deadline_seconds=120.0,
    )

    async def main():
        async with rig.service() as service:
            rig.stores.hold()
            chains = [service.chain(tokens(BLOCK + 1, seed)) for seed in range(prefixes)]
            jobs = []
            for seed, chain in enumerate(chains):
                async with service.request(f"w{seed}", chain, gpu_blocks=[seed], free=None) as request:
                    jobs.append(request.store(computed_tokens=BLOCK, ready="host-visible"))
                await asyncio.sleep(0)
            polls = 0
            poll = service.engine.take_ended

            def counted():
                nonlocal polls
                polls += 1
                return poll()

            monkeypatch.setattr(service.engine, "take_ended", counted)

            async def reader(seed, number):
                table = [prefixes + 2 * seed, prefixes + 2 * seed + 1]
                async with service.request(f"r{seed}/{number}", chains[seed], gpu_blocks=table, free=None) as request:
                    return (await request.load()).num_tokens

            tasks = [asyncio.ensure_future(reader(s, n)) for s in range(prefixes) for n in range(per_prefix)]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            everything = asyncio.gather(*tasks)
            gc.collect()
            gc.freeze()  # the collector's own pauses over ten thousand tasks are not what is measured
            heart = Heartbeat(0.001)
            async with heart:
                for job in rig.stores.pending_jobs():
                    rig.stores.finish(job)
                    await asyncio.sleep(0)
                loaded = await everything
            gc.unfreeze()
            assert loaded == [BLOCK] * (prefixes * per_prefix)
            assert polls <= 4 * prefixes + 10
            assert len(rig.loads.submitted) <= 5 * prefixes, "waiters of one prefix and destination share a load"
            assert heart.busy[int(len(heart.busy) * 0.99)] < 0.040 * SLOWER, heart.busy[
                -5:
            ]  # 20 ms on a machine of its own
            assert service.stats().requests == 0

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(main())


async def test_large_copies_start_and_shutdown_do_not_hold_up_the_loop():
    """A-Y4: 64 MiB stored and loaded, 100,000 keys looked at, start and shutdown; a beat every 5 ms."""
    block_bytes, blocks = 1 << 20, 64
    assert kv.OffloadService  # imported before the clock runs
    layer = np.ones((2 * blocks, block_bytes), np.int8)
    caches = kv.CanonicalKVCaches.from_layers({"layer": layer}, block_dim=0)
    config = kv.OffloadConfig(cpu_bytes_to_use=blocks * block_bytes, gpu_block_size=16)
    chain = kv.BlockChain(config.group_layouts(), range(blocks * 16 + 1))
    long_chain = kv.BlockChain(config.group_layouts(), block_hashes=[n.to_bytes(32, "big") for n in range(1, 100_001)])
    heart = Heartbeat(0.005)
    async with heart, kv.OffloadService(config, caches) as service:
        async with service.request("w", chain, gpu_blocks=list(range(blocks)), free=None) as request:
            assert (await request.store(computed_tokens=blocks * 16, ready="host-visible")).stored == blocks
        async with service.request("r", chain, gpu_blocks=list(range(blocks, 2 * blocks)), free=None) as request:
            assert (await request.load()).num_tokens == blocks * 16
        async with service.request("long", long_chain, gpu_blocks=[], free=None) as request:
            request.match()
            await request.load()
        await service.aclose()
    assert heart.busy[-1] < 0.100 * SLOWER, heart.busy[-5:]  # 50 ms on a machine of its own
    assert heart.late[-1] < 2.0, heart.late[-5:]
