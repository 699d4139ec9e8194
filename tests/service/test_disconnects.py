"""Clients that go away: by cancellation, by a scope's level cancellation, by a generator that somebody else drops."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time

import anyio
import pytest
import uvloop
from service.harness import Rig, store_prefix, tokens

import kvoffload as kv

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def _until(condition):
    async def wait():
        while not condition():
            await asyncio.sleep(0)

    return wait()


async def test_next_owner_of_a_block_never_sees_the_copy_of_a_client_that_left():
    """A-Y9."""
    rig = Rig()
    async with rig.service() as service:
        await store_prefix(rig, service, [0, 1])
        rig.loads.hold()

        async def client():
            async with service.request("r", service.chain(tokens(9)), gpu_blocks=[10, 11, 12], free=rig.free) as r:
                await r.load()

        task = asyncio.create_task(client())
        await _until(rig.loads.pending_jobs)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert 10 not in rig.freed, "the copy may still write to it"
        rig.loads.finish_all()
        await service.drain(1.0)
        rig.allocate([10, 11])
        for tensor in rig.gpu:
            tensor[[10, 11]] = -86  # 0xAA
        await service.drain(1.0)
        assert all((tensor[[10, 11]] == -86).all() for tensor in rig.gpu)


@pytest.mark.parametrize("loop", LOOPS)
def test_thousand_clients_leave_at_once_during_a_copy_without_a_spin_and_each_in_under_a_millisecond(loop):
    """A-Y10: through anyio scopes, as Starlette does; a copy thread would run for 200 ms."""
    clients, per_client = 1000, 2
    rig = Rig(capacity=4, gpu_blocks=16 + clients * per_client)
    exits: list[float] = []

    async def main():
        async with rig.service() as service:
            await store_prefix(rig, service, [0, 1])
            rig.loads.hold()
            scopes = [anyio.CancelScope() for _ in range(clients)]

            async def client(index):
                table = [16 + per_client * index, 17 + per_client * index]
                with scopes[index]:
                    async with service.request(
                        f"r{index}", service.chain(tokens(9)), gpu_blocks=table, free=rig.free
                    ) as request:
                        try:
                            await request.load()
                        finally:
                            began = time.perf_counter()
                    exits.append(time.perf_counter() - began)
                exits.append(time.perf_counter() - began)

            async with asyncio.TaskGroup() as group:
                for index in range(clients):
                    group.create_task(client(index))
                await _until(lambda: len(rig.loads.submitted) == clients)
                cpu, began = time.process_time(), time.monotonic()
                for scope in scopes:
                    scope.cancel()
            leaving = time.process_time() - cpu
            cpu = time.process_time()
            await asyncio.sleep(0.2)
            spin = time.process_time() - cpu
            assert len(exits) == clients
            exits.sort()
            assert exits[clients // 2] < 0.001
            assert leaving < 2.0, f"{leaving} s of processor time for {clients} exits"
            assert spin < 0.05 * 0.2 + 0.02, f"{spin} s of processor time in 0.2 s of waiting"
            assert time.monotonic() - began < 60
            assert len(rig.freed) == 2, "only the stored blocks: every copy still runs"
            rig.loads.finish_all()
            assert await service.drain(10.0)
            assert sorted(rig.freed) == [0, 1, *range(16, 16 + clients * per_client)]
        rig.check([0, 1, *range(16, 16 + clients * per_client)])

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(main())


async def _stream(rig, service, name, table):
    async with service.request(name, service.chain(tokens(9)), gpu_blocks=table, free=rig.free) as request:
        yield await request.load()
        request.store(computed_tokens=9, ready="host-visible")
        yield "more"


async def test_generator_closed_by_another_task_leaves_exact_books(caplog):
    """A-Y11."""
    rig = Rig()
    async with rig.service() as service:
        await store_prefix(rig, service, [0, 1])
        stream = _stream(rig, service, "r", [10, 11, 12])
        assert (await anext(stream)).num_tokens == 8
        await asyncio.create_task(stream.aclose())
        assert service.stats().requests == 0
    rig.check([0, 1, 10, 11, 12])
    assert caplog.records == []


@pytest.mark.parametrize("loop", LOOPS)
def test_generator_that_is_collected_leaves_exact_books(loop, caplog):
    """A-Y11."""
    rig = Rig()
    problems = []

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        async with rig.service() as service:
            await store_prefix(rig, service, [0, 1])
            stream = _stream(rig, service, "r", [10, 11, 12])
            await anext(stream)
            del stream
            gc.collect()
            await _until(lambda: service.stats().requests == 0)
        rig.check([0, 1, 10, 11, 12])

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(main())
    assert problems == []
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_request_left_on_another_thread_is_left_on_the_loop_and_freed_there():
    rig = Rig()
    threads = []

    def free(blocks):
        threads.append(threading.current_thread())
        rig.free(blocks)

    async with rig.service() as service:
        request = service.request("r", service.chain(tokens(8)), gpu_blocks=[0, 1], free=free)
        await request.__aenter__()
        elsewhere = threading.Thread(target=request.leave)
        elsewhere.start()
        elsewhere.join()
        await _until(lambda: rig.freed)
        assert threads == [threading.current_thread()]
    rig.check([0, 1])


async def test_request_left_while_its_own_load_is_awaited_by_another_task():
    rig = Rig()
    async with rig.service() as service:
        await store_prefix(rig, service, [0, 1])
        rig.loads.hold()
        async with service.request("r", service.chain(tokens(9)), gpu_blocks=[10, 11, 12], free=rig.free) as request:
            load = asyncio.create_task(request.load())
            await _until(rig.loads.pending_jobs)
        result = await load
        assert (result.outcome, result.reason) == (kv.LoadOutcome.FAILED, "aborted")
        assert sorted(result.undefined_gpu_blocks) == [10, 11]
        assert 10 not in rig.freed
        rig.loads.finish_all()
        await service.drain(1.0)
    rig.check([0, 1, 10, 11, 12])


async def test_request_left_while_another_task_enters_its_lease_pins_nothing():
    rig = Rig(pending_wait_seconds=30.0)
    async with rig.service() as service:
        rig.stores.hold()
        async with service.request("w", service.chain(tokens(8)), gpu_blocks=[0, 1], free=rig.free) as writer:
            job = writer.store(computed_tokens=8, ready="host-visible")
        async with service.request("r", service.chain(tokens(8)), gpu_blocks=[10, 11], free=rig.free) as request:
            context = request.lease()
            entering = asyncio.create_task(context.__aenter__())
            await asyncio.sleep(0)
        rig.stores.finish_all()
        await job
        lease = await entering
        assert lease.match.ready_blocks == 0
        assert (await lease.load(kv.GPULoadStoreSpec([10], [1], [0]))).reason == "left"
        assert service.stats().manager.pinned == 0
        await context.__aexit__(None, None, None)
    rig.check([0, 1, 10, 11])


async def test_lease_that_is_left_on_another_thread_is_unpinned_on_the_loop(monkeypatch):
    rig = Rig()
    async with rig.service() as service:
        await store_prefix(rig, service, [0, 1])
        threads = []
        close = service.engine.close_lease
        monkeypatch.setattr(
            service.engine, "close_lease", lambda lease: (threads.append(threading.current_thread()), close(lease))
        )

        async with service.request("r", service.chain(tokens(9)), gpu_blocks=[10], free=rig.free) as request:
            context = request.lease()
            await context.__aenter__()

            def leave():
                with pytest.raises(StopIteration):
                    context.__aexit__(None, None, None).send(None)

            elsewhere = threading.Thread(target=leave)
            elsewhere.start()
            elsewhere.join()
            assert service.stats().leases == 1, "the manager is the loop thread's alone"
            await _until(lambda: not service.stats().leases)
        assert threads == [threading.current_thread()]
    rig.check([0, 1, 10])


async def test_service_that_is_closed_while_it_starts_does_not_open():
    """A front end that gives up during its start must not end with a service that nobody closes."""
    rig = Rig()
    service = rig.service()
    entering = asyncio.create_task(service.__aenter__())
    await asyncio.sleep(0)
    await service.aclose()
    with pytest.raises(kv.ClosedError, match="while it started"):
        await entering
    assert (service.is_open, service.engine.closed) == (False, True)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvoffload")]
    rig.check()
