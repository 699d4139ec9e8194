"""One chaotic client: a request that loads, computes, stores, leases and leaves, and checks every byte it is given."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any, Protocol

from kvoffload.manager.base import ReqContext
from kvoffload.manager.specs import GPULoadStoreSpec
from kvoffload.service.request import OffloadRequest
from kvoffload.service.results import LoadResult
from kvoffload.service.service import OffloadService
from kvoffload.simulate.chaos.blocks import OwnedBlocks
from kvoffload.transfer.base import Ready

FAMILIES = 6
"""Sequences that differ; clients of one family share prefixes of any length."""


class World(Protocol):
    """What a client sees of the world it lives in."""

    service: OffloadService
    blocks: OwnedBlocks
    rng: random.Random
    block_size: int

    def complain(self, what: str) -> None:
        """Note something that must never happen."""

    def ready(self) -> Ready:
        """Return an event that happens some time, or that everything is there."""


class Client:
    """One request of a random family, length and behaviour."""

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self._world = world
        rng = world.rng
        self._family = rng.randrange(FAMILIES)
        self._num_blocks = rng.randrange(1, 9)
        self._num_tokens = self._num_blocks * world.block_size + rng.randrange(world.block_size)
        self._computed = 0

    async def live(self) -> None:
        """Run to the end."""
        async for _ in self.steps():
            await asyncio.sleep(0)

    async def steps(self) -> AsyncIterator[None]:
        """Run, and yield now and then, as a streaming response does."""
        world, rng = self._world, self._world.rng
        table = world.blocks.allocate(self._num_blocks + 1, rng)
        if table is None:
            return
        base = self._family * 1000
        chain = world.service.chain(range(base, base + self._num_tokens))
        context = ReqContext(self.name, store=rng.random() > 0.05)
        async with world.service.request(context, chain, gpu_blocks=table, free=world.blocks.free) as request:
            yield
            for _ in range(rng.randrange(1, 6)):
                if not await self._act(request, table):
                    return
                yield
            if rng.random() < 0.5:
                request.finished(output_tokens=rng.randrange(50), conversation_ended=rng.random() < 0.3)

    async def _act(self, request: OffloadRequest, table: list[int]) -> bool:
        """Do one thing; False when the request had better end."""
        rng = self._world.rng
        dice = rng.random()
        timeout = rng.choice((None, None, None, 0.0, 0.001))
        if dice < 0.45:
            first = rng.randrange(0, self._num_blocks) if rng.random() < 0.2 else 0
            loaded = await request.load(
                first_block=first, leave_tokens=rng.randrange(2), timeout=timeout, after=self._world.ready()
            )
            return self._check(loaded, table, first)
        if dice < 0.8:
            self._compute(table)
            job = request.store(computed_tokens=self._computed, ready=self._world.ready())
            if rng.random() < 0.3:
                await job
            return True
        if dice < 0.9:
            return await self._lease(request, table, timeout)
        match = request.match()
        if not 0 <= match.ready_blocks <= self._num_blocks:
            self._world.complain(f"{self.name} matches {match} of {self._num_blocks} blocks")
        return True

    async def _lease(self, request: OffloadRequest, table: list[int], timeout: float | None) -> bool:
        async with request.lease(timeout=timeout) as lease:
            count = lease.match.ready_blocks
            if not count:
                return True
            await asyncio.sleep(0)
            first = self._world.rng.randrange(count)
            blocks = GPULoadStoreSpec(table[first:count], [count - first], [first])
            return self._check(await lease.load(blocks, after=self._world.ready()), table, first)

    def _check(self, loaded: LoadResult, table: list[int], first: int) -> bool:
        blocks = table[first : first + loaded.num_blocks]
        wrong = self._world.blocks.gpu.count_wrong(blocks, self._names(first, len(blocks)))
        if wrong:
            self._world.complain(f"{self.name}: {wrong} of {len(blocks)} loaded blocks hold wrong bytes: {loaded}")
        if loaded.num_blocks and first * self._world.block_size <= self._computed:
            self._computed = max(self._computed, (first + loaded.num_blocks) * self._world.block_size)
        return not loaded.undefined_gpu_blocks  # a copy may still write them: they cannot be computed into

    def _compute(self, table: list[int]) -> None:
        """Prefill some more tokens, as an engine would; blocks that a copy may still touch are left for later."""
        world = self._world
        upto = world.rng.randrange(self._computed, self._num_tokens + 1)
        first, last = self._computed // world.block_size, upto // world.block_size
        todo = table[first:last]
        if world.service.engine.busy_gpu_blocks(todo):
            return
        world.blocks.gpu.compute(todo, self._names(first, len(todo)))
        self._computed = upto

    def _names(self, first: int, count: int) -> list[bytes]:
        return [b"%d/%d" % (self._family, position) for position in range(first, first + count)]


def task_error(task: asyncio.Task[Any]) -> BaseException | None:
    """Return what a finished client raised, cancellation aside."""
    return None if task.cancelled() else task.exception()
