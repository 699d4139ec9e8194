"""What callers do to requests, loads and stores beside the plain way."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref

import pytest
from service.harness import BLOCK, ManualClock, Rig, store_prefix, tokens

import kvoffload as kv
from kvoffload.service.life import EngineLife


async def _until(condition):
    while not condition():
        await asyncio.sleep(0)


def _request(rig, service, name="r", count=13, table=(10, 11, 12, 13), seed=0):
    return service.request(name, service.chain(tokens(count, seed)), gpu_blocks=list(table), free=rig.free)


async def test_request_that_dies_before_its_copy_leaves_no_reservation_and_a_late_report_changes_nothing():
    """A-M7."""
    rig = Rig()
    async with rig.service() as service:
        async with _request(rig, service, "r1", 4, [0]) as first:
            job = first.store(computed_tokens=4, ready="host-visible")
            first.abort()
            assert ((await job).rejected, (await job).reason) == (1, "aborted")
            assert first.match() == kv.PrefixMatch(0, 0, 0)
        assert service.stats().manager.free == rig.capacity
        assert rig.stores.submitted == []
        rig.stores.hold()
        async with _request(rig, service, "r2", 4, [1]) as second:
            overtaken = second.store(computed_tokens=4, ready="host-visible")
            await asyncio.sleep(0)
            await service.reset_cache()
            async with _request(rig, service, "r3", 4, [2]) as third:
                rig.fill([2], 3)
                again = third.store(computed_tokens=4, ready="host-visible")
                await asyncio.sleep(0)
                rig.stores.finish(rig.stores.pending_jobs()[0])
                assert (await overtaken).reason == "reset"
                assert third.match() == kv.PrefixMatch(0, 1, 0), "the late report is not of this reservation"
                rig.stores.finish_all()
                assert (await again).stored == 1
                assert third.match().ready_blocks == 1
    rig.check([0, 1, 2])


async def test_same_load_by_two_requests_is_one_copy_and_both_get_it():
    rig = Rig()
    async with rig.service() as service:
        await store_prefix(rig, service, [0, 1, 2])
        rig.loads.hold()
        shared = [10, 11, 12, 13]
        async with _request(rig, service, "a", table=shared) as a, _request(rig, service, "b", 17, shared) as b:
            loads = [asyncio.create_task(a.load()), asyncio.create_task(b.load())]
            await _until(rig.loads.pending_jobs)
            await asyncio.sleep(0)
            assert len(rig.loads.submitted) == 1
            rig.loads.finish_all()
            results = await asyncio.gather(*loads)
        assert [r.outcome for r in results] == [kv.LoadOutcome.LOADED, kv.LoadOutcome.PARTIAL]
        assert [r.num_tokens for r in results] == [12, 12]
    assert sorted(rig.freed) == [0, 1, 2, *sorted(shared * 2)]


async def test_load_is_not_joined_when_the_second_caller_waits_for_work_of_its_own():
    rig = Rig()
    async with rig.service() as service:
        await store_prefix(rig, service, [0, 1, 2])
        rig.loads.hold()
        event = threading.Event()
        async with _request(rig, service) as request:
            first = asyncio.create_task(request.load())
            await _until(rig.loads.pending_jobs)
            second = asyncio.create_task(request.load(after=event))
            await _until(lambda: len(rig.loads.submitted) == 2)
            assert rig.loads.submitted[1].ready is event
            rig.loads.finish_all()
            assert (await first).num_tokens == (await second).num_tokens == 12
    rig.check([0, 1, 2, 10, 11, 12, 13])


async def test_load_into_a_block_named_twice_is_a_usage_error_and_changes_nothing():
    rig = Rig()
    async with rig.service() as service:
        await store_prefix(rig, service, [0, 1, 2])
        async with _request(rig, service, table=[10, 10, 12, 13]) as request:
            with pytest.raises(kv.UsageError, match="twice"):
                await request.load()
        assert service.stats().manager.pinned == 0
    rig.check([0, 1, 2, 10, 12, 13])


async def test_table_with_a_block_twice_is_freed_once_per_block():
    rig = Rig()
    async with rig.service() as service, _request(rig, service, table=[5, 5, 6]):
        pass
    assert sorted(rig.freed) == [5, 6]


async def test_blocks_taken_out_of_a_table_are_the_callers_again_and_safe_when_it_is_told():
    rig = Rig()
    told = []
    async with rig.service() as service:
        rig.stores.hold()
        table = [10, 11, 12]
        async with service.request("r", service.chain(tokens(12)), gpu_blocks=table, free=rig.free) as request:
            request.store(computed_tokens=12, ready="host-visible")
            await asyncio.sleep(0)
            preempted, table[1:] = table[1:], []
            request.when_released(preempted, told.extend)
            request.chain.extend(tokens(8, 9))
            with pytest.raises(kv.UsageError, match="1 GPU blocks"):
                request.store(computed_tokens=20, ready="host-visible")
        assert (rig.freed, told) == ([], [])
        rig.stores.finish_all()
        await service.drain(1.0)
        assert (rig.freed, sorted(told)) == ([10], [11, 12])


async def test_stores_offered_in_the_tick_of_a_reset_are_taken_back_without_a_copy():
    rig = Rig()
    async with rig.service() as service, _request(rig, service) as request:
        job = request.store(computed_tokens=12, ready="host-visible")
        await service.reset_cache()
        assert ((await job).rejected, (await job).reason) == (3, "reset")
        assert rig.stores.submitted == []
        assert service.stats().manager.free == rig.capacity
    rig.check([10, 11, 12, 13])


async def test_reset_ends_the_wait_for_blocks_that_will_not_come():
    rig = Rig(pending_wait_seconds=60.0, load_deadline_seconds=60.0)
    async with rig.service() as service:
        rig.stores.hold()
        async with _request(rig, service, "w", table=[0, 1, 2, 3]) as writer, _request(rig, service) as reader:
            writer.store(computed_tokens=12, ready="host-visible")
            load = asyncio.create_task(reader.load())
            await asyncio.sleep(0)
            await service.reset_cache()
            assert (await asyncio.wait_for(load, 5.0)).outcome is kv.LoadOutcome.MISS
        rig.stores.finish_all()
        await service.drain(1.0)
    rig.check([0, 1, 2, 3, 10, 11, 12, 13])


async def test_load_does_not_wait_for_blocks_beyond_what_it_wants():
    rig = Rig(pending_wait_seconds=60.0, load_deadline_seconds=60.0)
    async with rig.service() as service:
        await store_prefix(rig, service, [0, 1])
        rig.stores.hold()
        async with _request(rig, service, "w", table=[4, 5, 2, 3]) as writer, _request(rig, service) as reader:
            job = writer.store(computed_tokens=12, ready="host-visible")
            async with reader.lease(timeout=0.0) as lease:
                loaded = await asyncio.wait_for(lease.load(kv.GPULoadStoreSpec([10, 11], [2], [0])), 5.0)
                assert loaded.num_tokens == 8
            rig.stores.finish_all()
            await job
    rig.check([0, 1, 2, 3, 4, 5, 10, 11, 12, 13])


async def test_request_larger_than_the_pool_is_a_miss_in_bounded_time():
    rig = Rig(capacity=2)
    async with rig.service() as service:
        async with _request(rig, service) as request:
            stored = await request.store(computed_tokens=12, ready="host-visible")
            assert (stored.stored + stored.rejected, stored.reason) == (3, "no_space")
        async with _request(rig, service, "again", table=[20, 21, 22, 23]) as request:
            assert (await asyncio.wait_for(request.load(), 5.0)).num_tokens == stored.stored * BLOCK


async def test_loads_larger_than_the_limit_run_alone_in_the_order_of_their_coming():
    rig = Rig(max_inflight_load_bytes=1, load_deadline_seconds=60.0)
    async with rig.service() as service:
        await store_prefix(rig, service, [0, 1])
        rig.loads.hold()
        order = []

        async def one(index):
            async with _request(rig, service, f"r{index}", 9, [10 + 3 * index + i for i in range(3)]) as request:
                await request.load()
                order.append(index)

        tasks = [asyncio.create_task(one(index)) for index in range(6)]
        await asyncio.sleep(0)
        tasks[2].cancel()
        assert service.abort("r3")
        while len(order) < 5:
            assert len(rig.loads.pending_jobs()) <= 1
            rig.loads.finish_all()
            await asyncio.sleep(0)
        assert [index for index in order if index != 3] == [0, 1, 4, 5]
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not service.room.busy
    rig.check([0, 1, *range(10, 28)])


async def test_waiting_load_times_out_as_backpressure_and_passes_its_turn_on():
    rig = Rig(max_inflight_load_bytes=1, load_deadline_seconds=60.0)
    async with rig.service() as service:
        await store_prefix(rig, service, [0, 1])
        rig.loads.hold()
        async with (
            _request(rig, service, "a", 9, [10, 11, 12]) as a,
            _request(rig, service, "b", 9, [13, 14, 15]) as b,
            _request(rig, service, "c", 9, [16, 17, 18]) as c,
        ):
            first = asyncio.create_task(a.load())
            await _until(rig.loads.pending_jobs)
            second, third = asyncio.create_task(b.load(timeout=0.01)), asyncio.create_task(c.load())
            assert ((await second).outcome, (await second).reason) == (kv.LoadOutcome.MISS, "backpressure")
            rig.loads.finish_all()
            await _until(rig.loads.pending_jobs)
            rig.loads.finish_all()
            assert (await first).num_tokens == (await third).num_tokens == 8
    rig.check([0, 1, *range(10, 19)])


async def test_turn_that_meets_a_miss_is_passed_on():
    """A load that was called but finds nothing any more must not leave the others waiting."""
    rig = Rig(max_inflight_load_bytes=1, load_deadline_seconds=60.0)
    async with rig.service() as service:
        await store_prefix(rig, service, [0, 1])
        await store_prefix(rig, service, [2, 3], seed=5, name="other")
        rig.loads.hold()
        async with (
            _request(rig, service, "a", 9, [10, 11, 12]) as a,
            _request(rig, service, "b", 9, [13, 14, 15], seed=5) as b,
            _request(rig, service, "c", 9, [16, 17, 18]) as c,
        ):
            tasks = [asyncio.create_task(a.load())]
            await _until(rig.loads.pending_jobs)
            tasks += [asyncio.create_task(b.load()), asyncio.create_task(c.load())]
            await asyncio.sleep(0)
            service.engine.discard(b.chain.keys(0))
            rig.loads.finish_all()
            await _until(rig.loads.pending_jobs)
            rig.loads.finish_all()
            assert [(await task).num_tokens for task in tasks] == [8, 0, 8]
    rig.check([0, 1, 2, 3, *range(10, 19)])


async def test_a_load_that_is_overtaken_by_discard_ends_with_reason_reset_and_is_not_joined():
    """Discarded content is invalid: who loads it must not be told that it is good."""
    rig = Rig()
    async with rig.service() as service:
        await store_prefix(rig, service, [0, 1])
        rig.loads.hold()
        async with _request(rig, service, "a", 9, [10, 11, 12]) as request:
            load = asyncio.create_task(request.load())
            await _until(rig.loads.pending_jobs)
            assert service.discard(request.chain.keys(0)[1:]) == 1
            rig.loads.finish_all()
            result = await load
            assert (result.outcome, result.reason, list(result.undefined_gpu_blocks)) == ("failed", "reset", [10, 11])
    rig.check([0, 1, 10, 11, 12])


async def test_a_store_that_is_overtaken_by_discard_counts_the_dropped_blocks_as_failed():
    rig = Rig()
    async with rig.service() as service:
        rig.stores.hold()
        async with _request(rig, service, "a", 12, [0, 1, 2]) as request:
            job = request.store(computed_tokens=12, ready="host-visible")
            await _until(rig.stores.pending_jobs)
            assert service.discard(request.chain.keys(0)[1:]) == 2
            rig.stores.finish_all()
            result = await job
            assert (result.stored, result.failed, result.reason) == (1, 2, "reset")
            assert request.match().ready_blocks == 1
    rig.check([0, 1, 2])


async def test_drain_waits_for_what_is_on_its_way_and_not_for_what_comes_later():
    rig = Rig()
    async with rig.service() as service:
        rig.stores.hold()
        async with _request(rig, service, "a", 4, [0]) as first:
            first.store(computed_tokens=4, ready="host-visible")
        draining = asyncio.create_task(service.drain(5.0))
        await asyncio.sleep(0)
        async with _request(rig, service, "b", 4, [1], seed=2) as second:
            late = second.store(computed_tokens=4, ready="host-visible")
        await _until(lambda: len(rig.stores.pending_jobs()) == 2)
        rig.stores.finish(rig.stores.pending_jobs()[0])
        assert await draining
        assert not late.done
        assert not await service.drain(0.0)
        rig.stores.finish_all()
        assert await service.drain(5.0)
    rig.check([0, 1])


async def test_waits_that_were_given_up_on_leave_nothing_behind_on_a_long_job():
    rig = Rig()
    async with rig.service() as service:
        rig.stores.hold()
        async with _request(rig, service) as request:
            job = request.store(computed_tokens=12, ready="host-visible")
            await asyncio.sleep(0)
            inner = service.engine.unreleased_jobs()[0]
            before = len(inner.answered), len(inner.ended), len(inner.unwritten)
            for _ in range(50):
                waits = [asyncio.ensure_future(job._result()), asyncio.ensure_future(job.wait_source_released())]
                waits.append(asyncio.ensure_future(service.drain()))
                await asyncio.sleep(0)
                for wait in waits:
                    wait.cancel()
                await asyncio.gather(*waits, return_exceptions=True)
            assert (len(inner.answered), len(inner.ended), len(inner.unwritten)) == before
            rig.stores.finish_all()
            assert (await job).stored == 3


async def test_lease_that_expired_loads_nothing_and_pins_nothing():
    clock = ManualClock()
    rig = Rig(lease_seconds=10.0)
    async with rig.service(clock=clock) as service:
        await store_prefix(rig, service, [0, 1])
        async with _request(rig, service) as request, request.lease() as lease:
            assert service.stats().manager.pinned == 2
            clock.advance(10.0)
            service.engine.bridge.notify()
            await _until(lambda: not service.stats().manager.pinned)
            assert (await lease.load(kv.GPULoadStoreSpec([10], [1], [0]))).reason == "expired"
    rig.check([0, 1, 10, 11, 12, 13])


async def test_one_context_may_serve_one_request_after_the_other_but_not_two_at_once():
    rig = Rig()
    context = kv.ReqContext("same")
    async with rig.service() as service:
        for _ in range(2):
            async with service.request(context, service.chain(tokens(4)), gpu_blocks=[0], free=rig.free) as request:
                await request.store(computed_tokens=4, ready="host-visible")
                twin = service.request(context, service.chain(tokens(4)), gpu_blocks=[1], free=rig.free)
                with pytest.raises(kv.UsageError, match="begun already"):
                    await twin.__aenter__()
            with pytest.raises(kv.UsageError, match="was left"):
                await request.__aenter__()
        assert rig.freed == [0, 0], "entering that raises takes nothing over"


async def test_abort_finds_its_request_among_many_without_looking_at_each():
    rig = Rig(gpu_blocks=4096)
    async with rig.service() as service:
        requests = [_request(rig, service, f"r{index}", 4, [index]) for index in range(4000)]
        for request in requests:
            await request.__aenter__()
        lookups = 0

        class Watched(dict):
            def __iter__(self):
                nonlocal lookups
                lookups += 1
                return super().__iter__()

        service._open = Watched(service._open)
        assert service.abort("r3999")
        assert not service.abort("nobody")
        assert lookups == 0
        for request in requests:
            request.leave()
    assert len(rig.freed) == 4000


def test_use_after_fork_is_refused_with_both_pids_and_the_parents_books_are_untouched():
    rig = Rig()
    with rig.engine() as engine:
        read, write = os.pipe()
        child = os.fork()
        if not child:
            try:
                engine.stats()
                engine.poll()
                os.write(write, b"no error")
            except kv.UsageError as error:
                os.write(write, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        message = os.read(read, 4096).decode()
        os.close(read)
        os.close(write)
        assert str(os.getpid()) in message
        assert str(child) in message
        assert engine.poll() == []


async def test_calls_from_another_thread_are_refused_before_anything_changes():
    rig = Rig()
    async with rig.service() as service, _request(rig, service) as request:
        caught = []

        def call():
            for step in (
                lambda: request.store(computed_tokens=12, ready="host-visible"),
                lambda: request.when_released([0], caught.append),
            ):
                try:
                    step()
                except kv.UsageError as error:
                    caught.append(str(error))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert ["belongs to thread 'MainThread'" in message for message in caught] == [True, True]
        assert "asyncio.run_coroutine_threadsafe" in caught[0]
        assert service.stats().manager.reserved == 0


async def test_what_is_printed_says_which_object_and_its_state():
    rig = Rig()
    async with rig.service() as service:
        made = _request(rig, service)
        assert "made, not entered" in repr(made)
        async with made as request:
            assert "entered" in repr(request)
            assert "tokens, 1 groups" in repr(request.chain)
            job = request.store(computed_tokens=0, ready="host-visible")
            assert repr(job).startswith("<StoreJob ")
            assert repr(service) == "<OffloadService, 1 requests, healthy>"
        assert "left" in repr(request)
        with pytest.raises(kv.UsageError, match="was left: make a new one"):
            request.match()
    assert "closed" in repr(service)


async def test_blocks_are_given_back_after_the_request_was_left_and_the_service_closed():
    rig, told = Rig(), []
    service = rig.service()
    async with service, _request(rig, service) as request:
        pass
    request.when_released([7], told.extend)
    assert told == [7]


async def test_blocks_of_a_service_that_was_not_entered_are_not_given_back():
    rig = Rig()
    service = rig.service()
    request = service.request("r", kv.BlockChain(service.engine.geometry.groups), gpu_blocks=[0], free=None)
    with pytest.raises(kv.UsageError, match="not started"):
        request.when_released([0], list)


def test_engine_that_was_never_started_closes_and_reports():
    rig = Rig()
    engine = rig.engine()
    assert isinstance(engine, EngineLife)
    assert engine.health() == kv.Health(ok=False, reason="not started")
    assert engine.stats().manager.capacity == 0
    engine.close()
    with pytest.raises(kv.ClosedError):
        engine.poll()


async def test_service_that_cannot_start_leaves_nothing_and_says_so():
    rig = Rig()

    def broken(kv_caches):
        raise OSError("no memory")
        yield

    rig.spec.get_handlers = broken
    service = rig.service()
    with pytest.raises(OSError, match="no memory"):
        await service.__aenter__()
    assert not service.health().ok
    await service.aclose()
    with pytest.raises(kv.UsageError, match="not entered"):
        service.check_open()
    with pytest.raises(kv.UsageError, match="entered once"):
        await service.__aenter__()


async def test_engine_that_was_closed_and_forgotten_is_collected():
    async def live():
        rig = Rig()
        service = rig.service()
        async with service, _request(rig, service) as request:
            await request.store(computed_tokens=12, ready="host-visible")
            service.metrics.render()
        return weakref.ref(service.engine)

    forgotten = await live()
    for thread in threading.enumerate():
        if thread.name.startswith("kvoffload"):
            thread.join(5.0)
    await asyncio.sleep(0)
    gc.collect()
    assert forgotten() is None


async def test_callback_for_a_released_source_comes_once_when_the_copy_ends_and_at_once_afterwards():
    rig = Rig()
    async with rig.service() as service:
        rig.stores.hold()
        async with _request(rig, service, "r", 4, [0]) as request:
            job, told = request.store(computed_tokens=4, ready="host-visible"), []
            job.on_source_released(lambda: told.append("waited"))
            await asyncio.sleep(0)
            request.abort()
            assert (job.source_released, told) == (False, []), "an abort is not the end of a copy"
            rig.stores.finish_all()
            await job.wait_source_released()
            job.on_source_released(lambda: told.append("late"))
            assert (job.source_released, told) == (True, ["waited", "late"])
