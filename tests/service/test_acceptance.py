"""Public bug reports of systems that do the same job: those about the facade that have no test elsewhere here."""

from __future__ import annotations

import asyncio
import gc
import random
import re
import threading
import tracemalloc

import pytest
from service.harness import BLOCK, ManualClock, Rig, store_prefix, tokens

import kvoffload as kv


async def test_quarantined_block_is_in_the_scrape_in_the_health_and_in_the_sum_of_states():
    """A-P5."""
    clock = ManualClock()
    rig = Rig(load_deadline_seconds=5.0)
    async with rig.service(clock=clock) as service:
        await store_prefix(rig, service, [0, 1, 2])
        await store_prefix(rig, service, [3], seed=1, name="other")
        rig.loads.hold()
        async with service.request("r", service.chain(tokens(5, 1)), gpu_blocks=[10, 11], free=rig.free) as request:
            load = asyncio.create_task(request.load())
            while not rig.loads.pending_jobs():
                await asyncio.sleep(0)
            clock.advance(5.0)
            service.engine.bridge.notify()
            assert (await load).reason == "deadline"
            text, _ = await service.metrics.render_in_thread()
            body = text.decode()
            states = {m[1]: float(m[2]) for m in re.finditer(r'kvoffload_cache_blocks{.*state="(\w+)"} (\S+)', body)}
            assert states["quarantined"] == 1
            assert sum(states.values()) == rig.capacity
            assert "hung" in service.health().reason
            assert service.health().ok, "the others are served"
        rig.loads.finish_all()
        assert await service.drain(1.0)
        assert "hung" not in service.health().reason
    rig.check([0, 1, 2, 3, 10, 11])


async def test_thousand_cycles_of_cancelled_failed_and_finished_requests_leak_nothing(caplog):
    """A-Y7."""
    rng = random.Random(11)
    rig = Rig(capacity=8, gpu_blocks=16)
    async with rig.service() as service:

        async def one(number):
            table = [number % 2 * 4 + index for index in range(4)]
            rig.allocate(table)
            seed = rng.randrange(5)
            async with service.request(
                f"r{number}", service.chain(tokens(13, seed)), gpu_blocks=table, free=rig.free
            ) as request:
                kind = rng.randrange(4)
                if kind == 0:
                    request.match()
                elif kind == 1:
                    await request.load()
                elif kind == 2:
                    rig.fill(table, seed)
                    await request.store(computed_tokens=13, ready="host-visible")
                else:
                    async with request.lease():
                        await asyncio.sleep(0)

        async def cycles(numbers):
            for number in numbers:
                if rng.random() < 0.15:
                    rng.choice([rig.loads, rig.stores]).fail_next(OSError("link down"))
                task = asyncio.create_task(one(number))
                await asyncio.sleep(0)
                if rng.random() < 0.4:
                    task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                assert await service.drain(1.0)
                rig.loads.submitted.clear()
                rig.stores.submitted.clear()

        await cycles(range(400))
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        await cycles(range(400, 1000))
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        stats = service.stats()
        assert (stats.manager.pinned, stats.manager.writing, stats.manager.detached) == (0, 0, 0)
        assert stats.manager.free + stats.manager.ready == 8
        assert (stats.requests, stats.leases, stats.busy_gpu_blocks, stats.deferred_gpu_blocks) == (0, 0, 0, 0)
        assert service.engine.unreleased_jobs() == []
        assert grown < 400_000, grown
        assert service.health().ok
    assert rig.violations == []


async def test_poller_that_raises_fails_the_waits_with_its_error_as_cause_when_asked_to_fail(caplog):
    """A-Y3, with `fail_open=False`: three awaits are pending, each gets the error, new calls fail at once."""
    rig = Rig(fail_open=False)
    async with rig.service() as service:
        await store_prefix(rig, service, [0, 1])
        rig.loads.hold()
        error = RuntimeError("lost the device")

        async def load(index):
            table = [10 + 3 * index + i for i in range(3)]
            async with service.request(f"r{index}", service.chain(tokens(9)), gpu_blocks=table, free=rig.free) as r:
                return await r.load()

        waits = [asyncio.create_task(load(index)) for index in range(3)]
        while len(rig.loads.submitted) < 3:
            await asyncio.sleep(0)
        original = service.engine._board.worker.get_finished

        def broken():
            service.engine._board.worker.get_finished = original
            raise error

        service.engine._board.worker.get_finished = broken
        service.engine.bridge.notify()
        results = await asyncio.wait_for(asyncio.gather(*waits, return_exceptions=True), 1.0)
        assert [result.__cause__ for result in results] == [error] * 3
        assert not service.health().ok
        with pytest.raises(kv.KVOffloadError, match="unhealthy"):
            await load(3)
        assert sum("lost the device" in record.getMessage() for record in caplog.records) == 1
        rig.loads.finish_all()
        assert await service.drain(1.0)
    rig.check([0, 1, *range(10, 22)])


async def test_two_closers_return_after_the_copies_have_ended_and_the_threads_are_gone():
    """A-Y5: four copies run; nothing is left of them, no task and no thread."""
    rig = Rig(gpu_blocks=32)
    service = rig.service()
    await service.__aenter__()
    rig.stores.hold()
    for seed in range(4):
        async with service.request(
            f"r{seed}", service.chain(tokens(BLOCK, seed)), gpu_blocks=[seed], free=rig.free
        ) as request:
            request.store(computed_tokens=BLOCK, ready="host-visible")
        await asyncio.sleep(0)
    closers = [asyncio.create_task(service.aclose(5.0)) for _ in range(2)]
    await asyncio.sleep(0.01)
    assert not any(closer.done() for closer in closers)
    rig.stores.finish_all()
    await asyncio.gather(*closers)
    for thread in threading.enumerate():
        if thread.name.startswith("kvoffload"):
            thread.join(5.0)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvoffload")]
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
    for call in (
        lambda: service.abort("r"),
        service.pause_stores,
        lambda: service.explain("r0"),
        service.check_open,
    ):
        with pytest.raises(kv.ClosedError):
            call()
    for coroutine in (service.reset_cache(), service.drain()):
        with pytest.raises(kv.ClosedError):
            await coroutine
    rig.check([0, 1, 2, 3])


async def test_abort_while_a_load_waits_ends_the_wait_and_leaves_the_copy_to_its_blocks():
    """A-Y2: queued, pinned, loading, finished; twice; and another request is served."""
    rig = Rig()
    async with rig.service() as service:
        await store_prefix(rig, service, [0, 1])
        assert service.abort("unknown") is False
        rig.loads.hold()
        async with service.request("r", service.chain(tokens(9)), gpu_blocks=[10, 11, 12], free=rig.free) as request:
            async with request.lease() as lease:
                load = asyncio.create_task(request.load())
                while not rig.loads.pending_jobs():
                    await asyncio.sleep(0)
                assert service.abort("r")
                assert service.abort("r")
                result = await load
                assert (result.outcome, result.reason) == (kv.LoadOutcome.FAILED, "aborted")
                assert (await lease.load(kv.GPULoadStoreSpec([12], [1], [0]))).reason == "aborted"
            assert (await request.load()).reason == "aborted"
            assert (await request.store(computed_tokens=8, ready="host-visible")).reason in ("aborted", None)
        assert service.abort("r") is False
        assert rig.freed == [0, 1, 12]
        rig.loads.resume()
        assert await service.drain(1.0)
        rig.allocate([10, 11, 12])
        async with service.request("r2", service.chain(tokens(9)), gpu_blocks=[10, 11, 12], free=rig.free) as again:
            assert (await again.load()).num_tokens == 8
    rig.check([0, 1, 10, 11, 12])
