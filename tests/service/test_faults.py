"""What is plugged in may raise, hang or lie: the books stay exact, and the service serves misses."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest
from service.harness import BLOCK, ManualClock, Rig, chain, check_books, store_prefix, tokens

import kvoffload as kv
from kvoffload.transfer.scripted import ScriptedOffloadingHandler


def _spec(blocks, first=0):
    return kv.GPULoadStoreSpec(blocks, [len(blocks)], [first])


async def _store(rig, service, blocks, *, seed=0, name="store"):
    count = len(blocks) * BLOCK
    rig.fill(blocks, seed)
    async with service.request(
        name, service.chain(tokens(count, seed)), gpu_blocks=list(blocks), free=rig.free
    ) as request:
        return await request.store(computed_tokens=count, ready="host-visible")


class BrokenError(Exception):
    """Raised by a plug-in."""


@pytest.mark.parametrize(
    "method",
    [
        "match",
        "lookup_prefix",
        "touch",
        "prepare_load",
        "complete_load",
        "prepare_store",
        "complete_store",
        "abandon",
        "take_events",
        "finish_request",
    ],
)
async def test_manager_that_raises_makes_the_service_unhealthy_and_no_block_is_lost(method, monkeypatch):
    rig = Rig()
    async with rig.service() as service:
        await _store(rig, service, [0, 1])
        rig.allocate([0, 1])

        def broken(*args, **kwargs):
            raise BrokenError(method)

        broken.__name__ = method
        with monkeypatch.context() as patch:
            patch.setattr(rig.spec.cpu_manager, method, broken)
            table = [10, 11, 12, 13]
            async with service.request("r", service.chain(tokens(16)), gpu_blocks=table, free=rig.free) as request:
                loaded = await request.load()
                if method in ("match", "prepare_load"):
                    assert loaded.outcome in (kv.LoadOutcome.UNHEALTHY, kv.LoadOutcome.MISS)
                elif method == "complete_load":
                    assert loaded.num_tokens == 8, "its bytes are there"
                stored = await request.store(computed_tokens=16, ready="host-visible")
                if method in ("prepare_store", "complete_store"):
                    assert (stored.stored, stored.reason) == (0, "unhealthy")
                    assert isinstance(stored.error, BrokenError)
                dropped = request.store(computed_tokens=16, ready="host-visible")
                request.abort()
                await dropped
            await asyncio.sleep(0)
        if method != "abandon":  # nothing was given up in this run
            assert not service.health().ok
            assert method in service.health().reason
        assert sorted(rig.freed) == table
        assert await service.drain(1.0)
        assert (service.stats().busy_gpu_blocks, service.stats().requests) == (0, 0)


async def test_job_that_cannot_be_settled_does_not_keep_the_others_of_its_transfer(monkeypatch):
    rig = Rig()
    async with rig.service() as service:
        rig.stores.hold()
        jobs = []
        for seed, block in enumerate((3, 4, 5)):
            async with service.request(
                f"r{seed}", service.chain(tokens(BLOCK, seed)), gpu_blocks=[block], free=rig.free
            ) as request:
                jobs.append(request.store(computed_tokens=BLOCK, ready="host-visible"))
        await asyncio.sleep(0)
        assert len(rig.stores.submitted) == 1
        complete = rig.spec.cpu_manager.complete_store
        calls = iter([BrokenError("first"), None, None])

        def first_raises(*args, **kwargs):
            error = next(calls)
            if error:
                raise error
            return complete(*args, **kwargs)

        monkeypatch.setattr(rig.spec.cpu_manager, "complete_store", first_raises)
        rig.stores.finish_all()
        results = [await job for job in jobs]
        assert [r.stored for r in results] == [0, 1, 1]
        assert sorted(rig.freed) == [3, 4, 5]
        check_books(rig.spec.cpu_manager, idle=True)


@pytest.mark.parametrize("sink", ["events", "metrics"])
async def test_observer_that_raises_is_logged_once_and_ignored(sink, caplog):
    class Raising:
        def publish(self, events, infos):
            raise BrokenError("publish")

        def describe(self, infos):
            raise BrokenError("describe")

        def count(self, name, amount=1, label=""):
            raise BrokenError("count")

        def observe(self, name, value, label=""):
            raise BrokenError("observe")

    rig = Rig()
    async with rig.service(**{sink: Raising()}) as service:
        assert (await _store(rig, service, [0, 1])).stored == 2
        async with service.request("r", service.chain(tokens(9)), gpu_blocks=[10, 11, 12], free=rig.free) as request:
            assert (await request.load()).num_tokens == 8
        assert service.health().ok
    assert sum("sink raised" in record.getMessage() for record in caplog.records) == 1
    rig.check([0, 1, 10, 11, 12])


@pytest.mark.parametrize("when", ["at its submission", "in flight"])
@pytest.mark.parametrize("kind", ["store", "load"])
async def test_failed_copy_is_named_in_the_log_and_a_flood_of_them_is_not(kind, when, caplog):
    rig, clock = Rig(capacity=32), ManualClock()
    handler = rig.stores if kind == "store" else rig.loads
    fail = handler.fail_next if when == "in flight" else handler.refuse_next

    async def once(service, seed):
        if kind == "store":
            return await _store(rig, service, [0, 1], seed=seed)
        async with service.request("r", service.chain(tokens(9, 1)), gpu_blocks=[0, 1, 2], free=None) as request:
            return await request.load()

    async with rig.service(clock=clock) as service:
        await _store(rig, service, [0, 1], seed=1)
        for seed in (2, 3, 4):
            fail(OSError("link down"))
            assert (await once(service, seed)).reason == "copy_failed"
        assert [record.getMessage() for record in caplog.records] == [
            f"a {kind} of GPU blocks [0, 1] failed: OSError('link down')"
        ]
        clock.advance(1.0)
        fail(OSError("link down"))
        await once(service, 5)
        assert len(caplog.records) == 2


async def test_free_that_raises_is_logged_with_the_blocks_and_nothing_else_is_lost(caplog):
    rig = Rig()

    def free(blocks):
        raise BrokenError("free")

    async with rig.service() as service:
        rig.stores.hold()
        async with service.request("a", service.chain(tokens(8, 1)), gpu_blocks=[0, 1], free=free) as first:
            first.store(computed_tokens=8, ready="host-visible")
        async with service.request("b", service.chain(tokens(8, 2)), gpu_blocks=[2, 3], free=rig.free) as second:
            job = second.store(computed_tokens=8, ready="host-visible")
        await asyncio.sleep(0)
        rig.stores.finish_all()
        assert (await job).stored == 2
        assert sorted(rig.freed) == [2, 3]
        assert service.health().ok
        assert service.engine.recorder.value("callback_errors") == 1
    assert "[0, 1]" in caplog.text
    check_books(rig.spec.cpu_manager, idle=True)


async def test_offer_that_no_handler_takes_does_not_fail_the_others_of_its_tick():
    class CudaOnly:
        def synchronize(self):
            """An event the host cannot wait for."""

    rig = Rig()
    async with rig.service() as service:
        results = []
        for seed, (block, ready) in enumerate([(0, "host-visible"), (1, CudaOnly()), (2, "host-visible")]):
            async with service.request(
                f"r{seed}", service.chain(tokens(BLOCK, seed)), gpu_blocks=[block], free=rig.free
            ) as request:
                results.append(request.store(computed_tokens=BLOCK, ready=ready))
        assert [(await job).stored for job in results] == [1, 0, 1]
        assert "CudaOnly" in str((await results[1]).error)
        assert service.health().ok
    rig.check([0, 1, 2])


async def test_merged_store_whose_ready_never_fires_is_answered_in_time_and_its_blocks_come_back_at_close():
    """The copy has not started: closing fails it without moving a byte, so its blocks are safe to reuse."""
    clock = ManualClock()
    rig = Rig(store_deadline_seconds=30.0)
    service = rig.service(clock=clock)
    async with service:
        never, jobs = threading.Event(), []
        for seed, ready in enumerate(["host-visible", never]):
            async with service.request(
                f"r{seed}", service.chain(tokens(BLOCK, seed)), gpu_blocks=[seed], free=rig.free
            ) as request:
                jobs.append(request.store(computed_tokens=BLOCK, ready=ready))
        await asyncio.sleep(0)
        clock.advance(30.0)
        service.engine.bridge.notify()
        assert [((await job).failed, (await job).reason) for job in jobs] == [(1, "deadline")] * 2
        assert rig.freed == []
        assert service.stats().quarantined_gpu_blocks == 2
        await service.aclose(0.0)
    rig.check([0, 1])


async def test_broken_bridge_does_not_lose_blocks_of_copies_that_end_later(caplog):
    """A-P5, A-Y3: nothing wakes the service any more, so it looks by itself."""
    rig = Rig()
    async with rig.service() as service:
        await _store(rig, service, [0, 1])
        rig.loads.hold()
        async with service.request("r", service.chain(tokens(9)), gpu_blocks=[10, 11, 12], free=rig.free) as request:
            load = asyncio.create_task(request.load())
            await asyncio.sleep(0)
            service.engine.break_down("the completion bridge failed", OSError("bad descriptor"))
            assert (await load).reason == "unhealthy"
        assert 10 not in rig.freed
        rig.loads.notify = None
        rig.loads.finish_all()
        assert await service.drain(5.0)
    rig.check([0, 1, 10, 11, 12])


@pytest.mark.parametrize("error", [OSError("bad descriptor"), RuntimeError("odd")])
async def test_bridge_that_raises_is_one_fault_and_one_log_line(error, caplog, monkeypatch):
    rig = Rig()
    async with rig.service() as service:
        await _store(rig, service, [0, 1])

        def broken():
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(service.engine.bridge, "consume", broken)
            service.engine.bridge.notify()
            while service.health().ok:
                await asyncio.sleep(0)
            async with service.request("r", service.chain(tokens(9)), gpu_blocks=[10, 11], free=rig.free) as request:
                assert (await request.load()).outcome is kv.LoadOutcome.UNHEALTHY
    assert sum(str(error) in record.getMessage() for record in caplog.records) == 1
    rig.check([0, 1, 10, 11])


async def test_without_fail_open_an_unhealthy_service_raises_to_loads():
    rig = Rig(fail_open=False)
    async with rig.service() as service:
        await _store(rig, service, [0, 1])
        rig.loads.hold()
        async with service.request("r", service.chain(tokens(9)), gpu_blocks=[10, 11, 12], free=rig.free) as request:
            load = asyncio.create_task(request.load())
            await asyncio.sleep(0)
            error = OSError("device lost")
            service.engine.break_down("test", error)
            with pytest.raises(kv.KVOffloadError) as caught:
                await load
            assert caught.value.__cause__ is error
            with pytest.raises(kv.KVOffloadError, match="unhealthy"):
                await request.load()
            assert (await request.store(computed_tokens=9, ready="host-visible")).reason == "unhealthy"
        rig.loads.finish_all()
        await service.drain(1.0)
    rig.check([0, 1, 10, 11, 12])


async def test_handler_that_fails_to_shut_down_stops_nothing_else():
    """A-H4."""
    rig = Rig()
    service = rig.service()
    await service.__aenter__()

    class Odd(ScriptedOffloadingHandler):
        def shutdown(self, timeout=10.0):
            raise BrokenError("shutdown")

    rig.stores.__class__ = Odd
    with pytest.raises(kv.KVOffloadError, match="1 handlers failed"):
        await service.aclose()
    with pytest.raises(kv.KVOffloadError, match="1 handlers failed"):
        await service.aclose()
    assert rig.loads._closed
    assert service.engine.fileno() == -1


def test_hung_load_that_ends_late_gives_its_blocks_back_and_stays_dropped():
    clock = ManualClock()
    rig = Rig(load_deadline_seconds=5.0)
    with rig.engine(clock=clock) as engine:
        engine.begin("a", chain(rig, 8))
        engine.submit_store("a", _spec([0, 1]), "host-visible")
        engine.poll()
        rig.loads.hold()
        engine.submit_load("a", _spec([10, 11]))
        engine.finish("a")
        engine.give_back([10, 11, 12], rig.free)
        clock.advance(5.0)
        (done,) = engine.poll()
        assert (done.result.reason, list(done.result.undefined_gpu_blocks)) == ("deadline", [10, 11])
        assert rig.freed == [12]
        stats = engine.stats()
        assert (stats.quarantined_gpu_blocks, stats.manager.quarantined, stats.manager.ready) == (2, 2, 0)
        rig.loads.finish_all()
        assert engine.poll() == []
        assert engine.stats().quarantined_gpu_blocks == 0
        rig.check([10, 11, 12])


async def test_closing_with_a_running_copy_answers_who_waits_for_it(caplog):
    """A-Y12."""
    rig = Rig()
    service = rig.service()
    await service.__aenter__()
    rig.stores.hold()
    async with service.request("r", service.chain(tokens(8)), gpu_blocks=[0, 1, 2], free=rig.free) as request:
        job = request.store(computed_tokens=8, ready="host-visible")
        waits = asyncio.gather(job._result(), job.wait_source_released(), return_exceptions=True)
        await asyncio.sleep(0)
        with caplog.at_level(logging.CRITICAL, "kvoffload"), pytest.raises(kv.UndrainedCopies) as caught:
            await service.aclose(0.01)
        assert list(caught.value.jobs) == [job.id]
    result, released = await asyncio.wait_for(waits, 1.0)
    assert (result.failed, result.reason) == (2, "aborted")
    assert isinstance(released, kv.QuarantinedError)
    assert released.gpu_blocks == (0, 1)
    assert rig.freed == [2]
    with pytest.raises(kv.QuarantinedError):
        await asyncio.wait_for(job.wait_source_released(), 1.0)
    assert await job == result


async def test_closing_leaves_the_blocks_of_open_requests_with_their_owners_until_they_leave():
    """The owner may be in the middle of a prefill into them."""
    rig = Rig()
    service = rig.service()
    await service.__aenter__()
    async with service.request("r", service.chain(tokens(8)), gpu_blocks=[0, 1, 2], free=rig.free) as request:
        request.store(computed_tokens=8, ready="host-visible")
        await service.aclose()
        assert rig.freed == []
        with pytest.raises(kv.ClosedError):
            request.match()
    rig.check([0, 1, 2])


async def test_hung_store_does_not_take_the_blocks_of_later_requests_and_bounds_the_waits_behind_it():
    clock = ManualClock()
    rig = Rig(store_deadline_seconds=30.0)
    async with rig.service(clock=clock) as service:
        rig.stores.hold()
        jobs = []
        for seed in range(3):
            async with service.request(
                f"r{seed}", service.chain(tokens(BLOCK, seed)), gpu_blocks=[seed], free=rig.free
            ) as request:
                jobs.append(request.store(computed_tokens=BLOCK, ready="host-visible"))
            await asyncio.sleep(0)
            clock.advance(1.0)
        clock.advance(28.5)  # the second waits behind a copy that does not end: its own deadline counts
        service.engine.bridge.notify()
        assert [(await job).reason for job in jobs[:2]] == ["deadline"] * 2
        assert not jobs[2].done
        clock.advance(1.0)
        service.engine.bridge.notify()
        assert (await jobs[2]).reason == "deadline"
        late = await _store(rig, service, [9], seed=9, name="late")
        assert (late.rejected, late.reason) == (1, "deadline")
        assert rig.freed == [9], "no copy of it was begun"
        rig.stores.finish_all()
        rig.stores.resume()
        assert await service.drain(1.0)
        rig.allocate([9])
        assert (await _store(rig, service, [9], seed=9, name="later")).stored == 1
    rig.check([0, 1, 2, 9])


async def test_hung_load_turns_later_loads_into_misses_and_lets_those_in_line_go():
    clock = ManualClock()
    rig = Rig(load_deadline_seconds=5.0, max_inflight_load_bytes=1)
    async with rig.service(clock=clock) as service:
        await _store(rig, service, [0, 1])
        rig.loads.hold()

        async def load(index):
            table = [10 + 3 * index + i for i in range(3)]
            async with service.request(f"r{index}", service.chain(tokens(9)), gpu_blocks=table, free=rig.free) as r:
                return await r.load(timeout=1000.0)

        tasks = [asyncio.create_task(load(index)) for index in range(4)]
        while not rig.loads.pending_jobs():
            await asyncio.sleep(0)
        clock.advance(5.0)
        service.engine.bridge.notify()
        results = await asyncio.wait_for(asyncio.gather(*tasks), 5.0)
        assert [r.outcome for r in results] == [kv.LoadOutcome.FAILED] + [kv.LoadOutcome.MISS] * 3
        assert {r.reason for r in results} == {"deadline"}
        assert sorted(rig.freed) == [0, 1, *range(12, 22)], "all but the blocks of the hung copy"
        rig.loads.finish_all()
        assert await service.drain(1.0)
        assert not service.room.busy
    rig.check([0, 1, *range(10, 22)])


async def test_memory_that_a_hung_copy_uses_is_not_released_by_closing(monkeypatch):
    """A-H4, A-Y12: closing releases everything else, but neither the spec's memory nor the manager."""
    rig = Rig()
    service = rig.service()
    await service.__aenter__()
    await store_prefix(rig, service, [0, 1])
    released = []
    monkeypatch.setattr(rig.spec, "shutdown", lambda: released.append("spec"))
    monkeypatch.setattr(rig.spec.cpu_manager, "shutdown", lambda: released.append("manager"))
    rig.loads.hold()
    async with service.request("r", service.chain(tokens(9)), gpu_blocks=[10, 11, 12], free=rig.free) as request:
        load = asyncio.create_task(request.load())
        await asyncio.sleep(0)
        while not rig.loads.pending_jobs():
            await asyncio.sleep(0)
        with pytest.raises(kv.UndrainedCopies):
            await service.aclose(0.0)
        await load
    assert released == []
