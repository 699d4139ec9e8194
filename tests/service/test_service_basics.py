"""Store, load, lease and leave through the asyncio service."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from service.harness import BLOCK, Rig, check_books, store_prefix, tokens

import kvoffload as kv


async def test_stored_blocks_are_loaded_back_byte_for_byte():
    rig = Rig()
    async with rig.service() as service:
        stored = await store_prefix(rig, service, [3, 5, 9])
        assert (stored.stored, stored.rejected, stored.failed) == (3, 0, 0)
        table = [20, 21, 22, 23]
        async with service.request("r", service.chain(tokens(13)), gpu_blocks=table, free=rig.free) as request:
            assert request.match() == kv.PrefixMatch(3, 0, 12)
            loaded = await request.load()
            assert loaded.outcome is kv.LoadOutcome.LOADED
            assert (loaded.num_blocks, loaded.num_tokens) == (3, 12)
            assert rig.holds([20, 21, 22], 0)
    assert sorted(rig.freed) == [3, 5, 9, 20, 21, 22, 23]
    check_books(rig.spec.cpu_manager, idle=True)


async def test_whole_prompt_cached_leaves_a_token_to_compute():
    """A-Y14."""
    rig = Rig()
    async with rig.service() as service:
        await store_prefix(rig, service, [0, 1, 2, 3])
        async with service.request("r", service.chain(tokens(16)), gpu_blocks=[10, 11, 12, 13], free=None) as request:
            assert (await request.load()).num_tokens == 12
            assert (await request.load(leave_tokens=0)).num_tokens == 16


async def test_computed_tokens_offers_each_complete_block_once_and_may_not_shrink():
    """A-Y13."""
    rig = Rig()
    async with rig.service() as service:
        chain = service.chain(tokens(16))
        async with service.request("r", chain, gpu_blocks=[0, 1, 2, 3], free=rig.free) as request:
            assert (await request.store(computed_tokens=6, ready="host-visible")).stored == 1
            assert await request.store(computed_tokens=7, ready="host-visible") == kv.StoreResult()
            assert await request.store(computed_tokens=7, ready="host-visible") == kv.StoreResult()
            with pytest.raises(kv.UsageError, match="shrank from 7 to 3"):
                request.store(computed_tokens=3, ready="host-visible")
            with pytest.raises(kv.UsageError, match="17"):
                request.store(computed_tokens=17, ready="host-visible")
            assert (await request.store(computed_tokens=16, ready="host-visible")).stored == 3


async def test_cancelled_load_keeps_its_pins_and_blocks_until_the_copy_has_ended():
    """A-Y1, A-Y9."""
    rig = Rig(capacity=4)
    async with rig.service() as service:
        await store_prefix(rig, service, [0, 1, 2, 3])
        rig.freed.clear()
        rig.loads.hold()

        async def reader():
            async with service.request(
                "r", service.chain(tokens(17)), gpu_blocks=[10, 11, 12, 13, 14], free=rig.free
            ) as r:
                await r.load()

        task = asyncio.create_task(reader())
        while not rig.loads.pending_jobs():
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert rig.freed == [14]
        refused = await store_prefix(rig, service, [20, 21, 22, 23], seed=7, name="other")
        assert (refused.stored, refused.reason) == (0, "no_space")
        rig.loads.finish_all()
        assert await service.drain(1.0)
        assert sorted(rig.freed) == [10, 11, 12, 13, 14, 20, 21, 22, 23]
        assert (await store_prefix(rig, service, [20, 21, 22, 23], seed=7, name="again")).stored == 4
    check_books(rig.spec.cpu_manager, idle=True)


async def test_second_request_waits_for_a_block_being_written_instead_of_storing_it_again():
    """A-Y6."""
    rig = Rig(pending_wait_seconds=5.0)
    async with rig.service() as service:
        rig.stores.hold()
        rig.fill([0], 1)
        async with service.request("r1", service.chain(tokens(BLOCK)), gpu_blocks=[0], free=rig.free) as first:
            job = first.store(computed_tokens=BLOCK, ready="host-visible")
            async with service.request(
                "r2", service.chain(tokens(BLOCK + 1)), gpu_blocks=[8, 9], free=rig.free
            ) as second:
                assert second.match() == kv.PrefixMatch(0, 1, 0)
                assert (await second.store(computed_tokens=BLOCK, ready="host-visible")).already_present == 1
                load = asyncio.create_task(second.load())
                await asyncio.sleep(0)
                assert len(rig.stores.submitted) == 1
                rig.stores.finish_all()
                assert (await load).num_tokens == BLOCK
                assert rig.holds([8], 1)
            first.abort()
            assert (await job).stored == 1
        async with service.request("r3", service.chain(tokens(BLOCK)), gpu_blocks=[12], free=None) as third:
            assert third.match().ready_blocks == 1


async def test_blocks_completed_in_the_last_step_are_stored_and_not_reused_before_the_copy():
    """A-Y8."""
    rig = Rig()
    async with rig.service() as service:
        rig.stores.hold()
        async with service.request("r1", service.chain(tokens(8)), gpu_blocks=[0, 1], free=rig.free) as request:
            request.store(computed_tokens=4, ready="host-visible")
            request.store(computed_tokens=8, ready="host-visible")
        assert rig.freed == []
        await asyncio.sleep(0)
        assert len(rig.stores.submitted) == 1, "one tick, one transfer"
        rig.stores.finish_all()
        await service.drain(1.0)
        assert sorted(rig.freed) == [0, 1]
        async with service.request("r2", service.chain(tokens(8)), gpu_blocks=[4, 5], free=None) as again:
            assert again.match().ready_blocks == 2


async def test_poller_that_raises_ends_the_waits_and_makes_the_service_unhealthy(caplog):
    """A-Y3, A-Y15."""
    rig = Rig()
    async with rig.service() as service:
        await store_prefix(rig, service, [0, 1, 2])
        rig.loads.hold()
        error = RuntimeError("lost the device")

        async def load(index):
            async with service.request(
                f"r{index}",
                service.chain(tokens(13)),
                gpu_blocks=list(range(20 + 4 * index, 24 + 4 * index)),
                free=rig.free,
            ) as r:
                return await r.load()

        waits = [asyncio.create_task(load(i)) for i in range(3)]
        while len(rig.loads.submitted) < 3:
            await asyncio.sleep(0)
        original = service.engine._board.worker.get_finished
        service.engine._board.worker.get_finished = lambda: (_ for _ in ()).throw(error)
        service.engine.bridge.notify()
        results = await asyncio.wait_for(asyncio.gather(*waits), 1.0)
        assert all(r.outcome is kv.LoadOutcome.FAILED and r.error is error for r in results)
        assert not service.health().ok
        assert (await load(9)).outcome is kv.LoadOutcome.UNHEALTHY
        assert (await store_prefix(rig, service, [5], seed=3, name="s2")).reason == "unhealthy"
        assert sum("lost the device" in record.getMessage() for record in caplog.records) == 1
        service.engine._board.worker.get_finished = original
        rig.loads.finish_all()
        await service.drain(1.0)
    check_books(rig.spec.cpu_manager, idle=True)


async def test_closing_twice_at_once_drains_and_later_calls_are_refused():
    """A-Y5."""
    rig = Rig()
    service = rig.service()
    async with service:
        rig.stores.hold()
        rig.fill([0, 1], 0)
        async with service.request("r", service.chain(tokens(8)), gpu_blocks=[0, 1], free=rig.free) as request:
            request.store(computed_tokens=8, ready="host-visible")
            await asyncio.sleep(0)
        closers = [asyncio.create_task(service.aclose(5.0)) for _ in range(2)]
        await asyncio.sleep(0)
        closers[0].cancel()
        rig.stores.finish_all()
        await closers[1]
        late = service.request("x", service.chain(tokens(8)), gpu_blocks=[0, 1], free=rig.free)
        for call in (late.__aenter__, service.drain, service.reset_cache):
            with pytest.raises(kv.ClosedError):
                await call()
        for refused in (lambda: service.abort("r"), service.pause_stores, lambda: service.explain("r")):
            with pytest.raises(kv.ClosedError):
                refused()
    assert sorted(rig.freed) == [0, 1]


async def test_closing_with_a_hung_copy_names_it_and_frees_everything_else():
    """A-Y12."""
    rig = Rig(load_deadline_seconds=0.05)
    service = rig.service()
    await service.__aenter__()
    await store_prefix(rig, service, [0, 1])
    rig.freed.clear()
    rig.loads.hold()
    async with service.request("r", service.chain(tokens(9)), gpu_blocks=[10, 11, 12], free=rig.free) as request:
        loaded = await request.load(timeout=1.0)
        assert (loaded.outcome, loaded.reason) == (kv.LoadOutcome.FAILED, "deadline")
        assert sorted(loaded.undefined_gpu_blocks) == [10, 11]
    assert rig.freed == [12]
    assert service.stats().manager.quarantined == 2
    with pytest.raises(kv.UndrainedCopies) as caught:
        await service.aclose(0.05)
    assert len(caught.value.jobs) == 1
    assert rig.freed == [12]


async def test_reset_overtakes_a_running_load_and_a_running_store():
    rig = Rig()
    async with rig.service() as service:
        await store_prefix(rig, service, [0, 1])
        rig.loads.hold()
        rig.stores.hold()
        async with service.request("r", service.chain(tokens(9)), gpu_blocks=[10, 11, 12], free=rig.free) as request:
            load = asyncio.create_task(request.load())
            store = request.store(computed_tokens=0, ready="host-visible")
            async with service.request("s", service.chain(tokens(4, 5)), gpu_blocks=[30], free=rig.free) as other:
                store = other.store(computed_tokens=4, ready="host-visible")
                await asyncio.sleep(0)
                await service.reset_cache()
                assert request.match().ready_blocks == 0
                rig.loads.finish_all()
                rig.stores.finish_all()
                assert ((await load).outcome, (await load).reason) == (kv.LoadOutcome.FAILED, "reset")
                assert ((await store).stored, (await store).reason) == (0, "reset")
    check_books(rig.spec.cpu_manager, idle=True)


async def test_failed_copies_are_results_and_leave_nothing_behind():
    """A-H3."""
    rig = Rig()
    async with rig.service() as service:
        rig.stores.fail_next(OSError("link down"))
        failed = await store_prefix(rig, service, [0, 1])
        assert (failed.stored, failed.failed, failed.reason) == (0, 2, "copy_failed")
        rig.stores.refuse_next(OSError("no stream"))
        refused = await store_prefix(rig, service, [0, 1], name="b")
        assert (refused.failed, str(refused.error)) == (2, "no stream")
        assert (await store_prefix(rig, service, [0, 1], name="c")).stored == 2
        rig.loads.fail_next(OSError("link down"))
        async with service.request("r", service.chain(tokens(9)), gpu_blocks=[10, 11, 12], free=rig.free) as request:
            loaded = await request.load()
            assert (loaded.outcome, loaded.reason) == (kv.LoadOutcome.FAILED, "copy_failed")
            assert (await request.load()).outcome is kv.LoadOutcome.LOADED
    check_books(rig.spec.cpu_manager, idle=True)


async def test_lease_pins_the_prefix_and_loads_from_it():
    rig = Rig(capacity=2)
    async with rig.service() as service:
        await store_prefix(rig, service, [0, 1])
        request = service.request("r", service.chain(tokens(9)), gpu_blocks=[10, 11, 12], free=None)
        async with request, request.lease() as lease:
            assert lease.match.ready_blocks == 2
            assert (await store_prefix(rig, service, [20], seed=4, name="x")).reason == "no_space"
            loaded = await lease.load(kv.GPULoadStoreSpec([11], [1], [1]))
            assert loaded.outcome is kv.LoadOutcome.LOADED
            assert rig.holds([11], 0, first=1)
            await service.reset_cache()
            assert (await lease.load(kv.GPULoadStoreSpec([11], [1], [1]))).reason == "reset"
    check_books(rig.spec.cpu_manager, idle=True)


def test_a_process_that_gives_up_while_memory_is_allocated_ends_at_once():
    code = """
import asyncio, threading
import numpy as np
from kvoffload import CanonicalKVCaches, OffloadConfig, OffloadEngine, OffloadService

OffloadEngine.start = lambda engine: threading.Event().wait()  # an allocation that takes for ever

async def main():
    caches = CanonicalKVCaches.from_layers({"layer": np.zeros((4, 8), np.int8)}, block_dim=0)
    service = OffloadService(OffloadConfig(cpu_bytes_to_use=64, gpu_block_size=16), caches)
    await asyncio.wait_for(service.__aenter__(), 0.1)

asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.stderr.endswith("TimeoutError\n")
