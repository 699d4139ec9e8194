"""Every call of the facade is cancelled at each of its suspensions, in three ways and on two loops; the books agree.

A scenario is run again and again: cancelled at its first suspension, at its second, ... until it completes. While it
waits, `tick` lets the world go on by one step (a copy ends), so that each run reaches its next suspension.
"""

from __future__ import annotations

import asyncio
import threading

import pytest
from service.harness import BLOCK, Rig, tokens
from service.stepping import CANCELS, LOOPS

import kvoffload as kv

TABLE = [10, 11, 12, 13]


class World:
    """A service with two blocks of one sequence stored, and copies that end one by one."""

    def __init__(self, **config):
        self.rig = Rig(pending_wait_seconds=60.0, load_deadline_seconds=60.0, **config)
        self.service = self.rig.service()

    async def prepare(self):
        await self.service.__aenter__()
        await self.store(range(2), 2).wait()
        self.rig.stores.hold()
        self.rig.loads.hold()

    def store(self, blocks, count, name="first"):
        rig, service = self.rig, self.service
        blocks = list(blocks)
        rig.allocate(blocks)
        rig.fill(blocks, 0)
        request = service.request(name, service.chain(tokens(count * BLOCK)), gpu_blocks=blocks, free=rig.free)
        return Left(request, count * BLOCK)

    def request(self, name="r", count=13, table=TABLE):
        self.rig.allocate(table)
        return self.service.request(name, self.service.chain(tokens(count)), gpu_blocks=list(table), free=self.rig.free)

    def tick(self):
        for handler in (self.rig.stores, self.rig.loads):
            for job in handler.pending_jobs()[:1]:
                handler.finish(job)

    async def settle(self):
        self.rig.stores.resume()
        self.rig.loads.resume()
        assert await self.service.drain(5.0)

    def check(self, *tables):
        stats = self.service.stats()
        assert (stats.requests, stats.leases, stats.queued_stores) == (0, 0, 0)
        assert (stats.busy_gpu_blocks, stats.deferred_gpu_blocks) == (0, 0)
        assert (stats.inflight_load_bytes, stats.inflight_store_bytes) == (0, 0)
        assert not self.service.room.busy
        self.rig.check([0, 1, *(block for table in tables for block in table)])


class Left:
    """A store by a request that is left at once."""

    def __init__(self, request, computed_tokens):
        self.request, self.computed_tokens = request, computed_tokens

    async def wait(self):
        return await (await self.offer())

    async def offer(self):
        async with self.request as request:
            return request.store(computed_tokens=self.computed_tokens, ready="host-visible")


async def load(world):
    async with world.request() as request:
        await request.load()


async def load_of_a_block_being_written(world):
    await world.store([20, 21, 22], 3, "writer").offer()
    await load(world)


async def load_in_line(world):
    async with world.request("ahead", table=[30, 31, 32, 33]) as ahead:
        first = asyncio.ensure_future(ahead.load())
        try:
            await asyncio.sleep(0)
            await load(world)
        finally:
            first.cancel()


async def lease(world):
    await world.store([20, 21, 22], 3, "writer").offer()
    async with world.request() as request, request.lease() as held:
        await held.load(kv.GPULoadStoreSpec([11, 12], [2], [1]))


async def store(world):
    async with world.request("s") as request:
        world.rig.fill(TABLE, 0)
        job = request.store(computed_tokens=12, ready="host-visible")
        await job
        await job.wait_source_released()


async def store_awaited_after_the_request_was_left(world):
    await world.store(TABLE, 4, "writer").wait()


async def drain(world):
    await world.store(TABLE, 4, "writer").offer()
    await world.service.drain()


SCENARIOS = {
    load: (1, [TABLE]),
    load_of_a_block_being_written: (2, [TABLE, [20, 21, 22]]),
    load_in_line: (3, [TABLE, [30, 31, 32, 33]]),
    lease: (2, [TABLE, [20, 21, 22]]),
    store: (1, [TABLE]),
    store_awaited_after_the_request_was_left: (1, [TABLE]),
    drain: (1, [TABLE]),
}
"""Each with the suspensions it has, and the block tables that come back."""


def _every_suspension(loop, once):
    """Run `once(n)`, which returns whether it completed, for n = 1, 2, ... until it does; return how many it took."""
    for number in range(1, 100):
        with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            if runner.run(once(number)):
                return number - 1
    raise AssertionError("the scenario never completes")


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("cancel", CANCELS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_books_are_exact_wherever_a_call_is_cancelled(scenario, cancel, loop):
    suspensions, tables = SCENARIOS[scenario]

    async def once(number):
        world = World(max_inflight_load_bytes=1)
        await world.prepare()
        completed = await cancel(scenario(world), number, world.tick)
        await world.settle()
        used = [table for table in tables if set(table) & set(world.rig.freed) or completed]
        world.check(*used)
        async with world.request("after") as request:
            assert (await request.load()).num_tokens >= 8, "what was held before still is"
        await world.service.aclose()
        return completed

    assert _every_suspension(loop, once) == suspensions


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("cancel", CANCELS)
def test_closing_goes_to_its_end_wherever_its_caller_is_cancelled(cancel, loop):
    """A-Y5."""

    async def once(number):
        world = World()
        await world.prepare()
        await world.store(TABLE, 4, "writer").offer()
        await asyncio.sleep(0)
        completed = await cancel(world.service.aclose(5.0), number, world.tick)
        world.rig.stores.finish_all()
        await world.service.aclose(5.0)
        world.check(TABLE)
        assert world.service.engine.closed
        assert world.service.engine.fileno() == -1
        return completed

    assert _every_suspension(loop, once) >= 1


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("cancel", CANCELS)
def test_service_whose_start_is_cancelled_is_taken_back(cancel, loop):
    async def once(number):
        rig = Rig()
        service = rig.service()
        go_on = threading.Event()
        get_handlers = rig.spec.get_handlers

        def slow(kv_caches):
            go_on.wait(5.0)
            return get_handlers(kv_caches)

        rig.spec.get_handlers = slow
        completed = await cancel(service.__aenter__(), number, go_on.set)
        go_on.set()
        for thread in threading.enumerate():
            if thread.name.startswith("kvoffload"):
                thread.join(5.0)
        if completed:
            assert service.health().ok
            await service.aclose()
        else:
            assert not service.health().ok
        assert service.engine.closed
        assert service.engine.fileno() == -1
        with pytest.raises(kv.KVOffloadError):
            service.check_open()
        return completed

    assert _every_suspension(loop, once) >= 1


@pytest.mark.parametrize("loop", LOOPS)
def test_loop_that_ends_closes_the_service_without_waiting_for_copies(loop):
    """A-Y5: `asyncio.run` cancels every task; what has to be released is released all the same."""
    world = World()

    async def main():
        await world.prepare()
        await world.store(TABLE, 4, "writer").offer()
        await asyncio.sleep(0)
        asyncio.get_running_loop().create_task(world.service.aclose(60.0))
        await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(main())
    assert world.service.engine.closed
    assert sorted(world.rig.freed) == [0, 1, 10, 11], "the copy still runs: its blocks must not be reused"
    left = [thread for thread in threading.enumerate() if thread.name.startswith("kvoffload")]
    for thread in left:
        thread.join(5.0)
    assert not any(thread.is_alive() for thread in left)
