"""No freed GPU block is read or written by a copy, whatever happens at whichever suspension.

Freed blocks are painted and handed out again only with their paint intact; `free` itself notes a running copy that
touches what it is given. What was stored is loaded again at the end: a store that read a freed block would show.
"""

from __future__ import annotations

import asyncio

import pytest
from service.harness import BLOCK, ManualClock, Rig, tokens
from service.stepping import LOOPS, Stepped

import kvoffload as kv

TABLE, OTHER, WRITER = [10, 11, 12, 13], [30, 31, 32, 33], [20, 21, 22]


class World:
    """A service whose copies end when told, on a clock that only the test moves."""

    def __init__(self):
        self.clock = ManualClock()
        self.rig = Rig(
            gpu_blocks=64, pending_wait_seconds=3600.0, load_deadline_seconds=3600.0, max_inflight_load_bytes=1
        )
        self.service = self.rig.service(clock=self.clock)
        self.requests = []

    def request(self, name, table, count):
        self.rig.allocate(table)
        chain = self.service.chain(tokens(count))
        request = self.service.request(name, chain, gpu_blocks=list(table), free=self.rig.free)
        self.requests.append(request)
        return request

    def taken_over(self):
        """The blocks of every request that was entered: closing may have refused one."""
        return [block for request in self.requests if request._state is not None for block in request.gpu_blocks]

    def tick(self):
        for handler in (self.rig.stores, self.rig.loads):
            pending = [job.job_id for job in handler.submitted if not job.ended and not job.hung]
            for job in pending[:1]:
                handler.finish(job)


async def write(world):
    async with world.request("writer", WRITER, 12) as request:
        world.rig.fill(WRITER, 0)
        return request.store(computed_tokens=12, ready="host-visible")


async def load(world):
    async with world.request("r", TABLE, 13) as request:
        await request.load()


async def load_behind_a_store(world):
    await write(world)
    await load(world)


async def load_in_line(world):
    async with world.request("ahead", OTHER, 13) as ahead:
        first = asyncio.ensure_future(ahead.load())
        try:
            await asyncio.sleep(0)
            await load(world)
        finally:
            first.cancel()


async def lease(world):
    await write(world)
    async with world.request("r", TABLE, 13) as request, request.lease() as held:
        await held.load(kv.GPULoadStoreSpec([11, 12], [2], [1]))


async def store(world):
    async with world.request("r", TABLE, 16) as request:
        world.rig.fill(TABLE, 0)
        await request.store(computed_tokens=16, ready="host-visible")


SCENARIOS = [load, load_behind_a_store, load_in_line, lease, store]


def cancel(world, task):
    task.cancel()


def abort(world, task):
    for name in ("r", "ahead", "writer"):
        world.service.abort(name)


def reset(world, task):
    world.service.engine.reset_cache()


def switch_off(world, task):
    world.service.enabled = False


def hang_past_every_deadline(world, task):
    for handler in (world.rig.stores, world.rig.loads):
        for job in handler.pending_jobs():
            handler.hang(job)
    world.clock.advance(7200.0)
    world.service.engine.bridge.notify()


def break_down(world, task):
    world.service.engine.break_down("test", OSError("device lost"))


def fail_and_write(world, task):
    for handler in (world.rig.stores, world.rig.loads):
        for job in handler.pending_jobs():
            handler.fail(job, OSError("link down"), copy=True)


def close(world, task):
    world.closing = asyncio.ensure_future(world.service.aclose(5.0))


EVENTS = [cancel, abort, reset, switch_off, hang_past_every_deadline, break_down, fail_and_write, close]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_freed_blocks_are_never_touched_whatever_happens_at_any_suspension(scenario, event, loop, caplog):
    async def once(number):
        world = World()
        rig, service = world.rig, world.service
        await service.__aenter__()
        async with world.request("before", [0, 1], 8) as request:
            rig.fill([0, 1], 0)
            await request.store(computed_tokens=8, ready="host-visible")
        rig.stores.hold()
        rig.loads.hold()
        happened = False

        def at(count, future):
            nonlocal happened
            if count == number:
                happened = True
                event(world, asyncio.current_task())
            asyncio.get_running_loop().call_soon(world.tick)

        async def run():
            await Stepped(scenario(world), at)

        task = asyncio.ensure_future(run())
        for _ in range(200):
            await asyncio.sleep(0)
            if task.done():
                break
            world.tick()
        assert task.done(), "nobody waits for ever"
        if event is not cancel and not task.cancelled() and task.exception() is not None:
            assert event is close
            assert isinstance(task.exception(), kv.ClosedError)
        while any(handler.pending_jobs() for handler in (rig.stores, rig.loads)):
            for handler in (rig.stores, rig.loads):  # hung copies end late, and write
                for job in handler.pending_jobs():
                    handler.finish(job)
            await asyncio.sleep(0)
        rig.stores.resume()
        rig.loads.resume()
        if event is close and happened:
            await world.closing
        else:
            assert await service.drain(5.0)
            await _loads_are_right(world)
        await service.aclose()
        rig.check(world.taken_over())
        return not happened

    for number in range(1, 50):
        with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            if runner.run(once(number)):
                break
    assert number > 1


async def _loads_are_right(world):
    table = [40, 41, 42, 43]
    async with world.request("after", table, 17) as request:
        loaded = await request.load()
        assert world.rig.holds(table[: loaded.num_tokens // BLOCK], 0)
