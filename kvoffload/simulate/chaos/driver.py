"""The driver: one random thing after the other, and after each a look at everything that must be true."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import anyio

from kvoffload.errors import ClosedError, UsageError
from kvoffload.service.laws import broken_laws
from kvoffload.simulate.chaos.client import Client, task_error
from kvoffload.simulate.chaos.worlds import WORLDS, ChaosWorld

MAX_CLIENTS = 20
LOOK_AT_ALL = 512
WORLD_OPS = 4000
_PATIENCE = 2000


@dataclass(slots=True)
class _Running:
    """A client on its way: as a task (maybe in a cancel scope), or as a generator that somebody else drives."""

    client: Client
    task: asyncio.Task[None] | None = None
    scope: anyio.CancelScope | None = None
    steps: AsyncIterator[None] | None = None


@dataclass(slots=True)
class _Place:
    """One world and who lives in it."""

    world: ChaosWorld
    running: dict[str, _Running] = field(default_factory=dict)


class ChaosDriver:
    """Drives both worlds in turn.

    Args:
        seed: Everything that is random comes from it (threads and timers keep their own pace).
        progress: Called with the number of operations done.

    Attributes:
        violations: What must never happen and did.
    """

    def __init__(self, seed: int, progress: Callable[[int], None] | None = None) -> None:
        self._rng = random.Random(seed)  # noqa: S311 - not for secrets
        self._progress = progress
        self.violations: list[str] = []
        self._names = 0
        self._done = 0

    async def run(self, ops: int) -> None:
        """Do `ops` operations; the worlds are closed and built anew, of another shape, every few thousand."""
        places: list[_Place] = []
        for self._done in range(1, ops + 1):
            if self._done % WORLD_OPS == 1:
                await self._close(places)
                places = await self._open()
            place = places[self._rng.random() < 0.35]
            await self._operate(place)
            await asyncio.sleep(0)
            self._look(place)
            if self._progress is not None and self._done % 1024 == 0:
                self._progress(self._done)
        await self._close(places)

    async def _open(self) -> list[_Place]:
        places = [_Place(kind(random.Random(self._rng.random()), self._complain)) for kind in WORLDS]  # noqa: S311
        for place in places:
            await place.world.service.__aenter__()
        return places

    async def _close(self, places: Sequence[_Place]) -> None:
        for place in places:
            if self._rng.random() < 0.5:
                await self._calm(place)
            closing = asyncio.ensure_future(place.world.service.aclose(5.0))
            while not closing.done():
                await asyncio.sleep(0.0005)
                place.world.calm_down()
            if (error := closing.exception()) is not None:
                self._complain(f"closing raised {error!r}")
            await self._wait_for_clients(place)
            place.world.blocks.look_at_all()
            if place.world.blocks.num_owned:
                self._complain(f"{place.world.blocks.num_owned} blocks never came back")

    async def _wait_for_clients(self, place: _Place) -> None:
        """Let cancelled clients see it, and drop the generators that nobody drives."""
        for running in place.running.values():
            if running.task is not None:
                running.task.cancel()
            elif running.steps is not None:
                running.task = asyncio.ensure_future(_stream(running.steps, 0))
        for _ in range(_PATIENCE):
            place.world.calm_down()
            await asyncio.sleep(0.0005)
            self._forget_finished(place)
            if not place.running and not place.world.blocks.num_owned:  # the loop closes dropped generators by itself
                return

    def _complain(self, what: str) -> None:
        self.violations.append(f"operation {self._done}: {what}")

    async def _operate(self, place: _Place) -> None:
        rng, world = self._rng, place.world
        service = world.service
        dice = rng.random()
        if not service.enabled and dice < 0.1:
            service.enabled = True
        elif dice < 0.33:
            self._start_client(place)
        elif dice < 0.68:
            world.disturb()
        elif dice < 0.84:
            await self._disconnect(place)
        elif dice < 0.88:
            service.abort(rng.choice([*place.running, "nobody"]))
        elif dice < 0.93:
            world.pass_time()
        elif dice < 0.95:
            first = 1000 * rng.randrange(6)
            service.engine.discard(service.chain(range(first, first + 16)).keys(0))
        elif dice < 0.953:
            await service.reset_cache()
        elif dice < 0.956:
            service.enabled = False
        elif dice < 0.966:
            service.pause_stores(rng.random() < 0.2)
        elif dice < 0.98:
            await service.drain(0.0)
        elif place.running:
            with contextlib.suppress(UsageError):  # it may not have entered yet
                service.explain(rng.choice([*place.running]))

    def _start_client(self, place: _Place) -> None:
        if len(place.running) >= MAX_CLIENTS:
            return
        self._names += 1
        client = Client(place.world, f"client {self._names}")
        running = place.running[client.name] = _Running(client)
        dice = self._rng.random()
        if dice < 0.2:
            running.steps = client.steps()
        elif dice < 0.5:
            running.scope = anyio.CancelScope()
            running.task = asyncio.ensure_future(_live_in_scope(client, running.scope))
        else:
            running.task = asyncio.ensure_future(client.live())

    async def _disconnect(self, place: _Place) -> None:
        """Cancel somebody, or go on with or drop a streaming response, from another task than its own."""
        if not place.running:
            return
        name = self._rng.choice([*place.running])
        running = place.running[name]
        if running.scope is not None:
            running.scope.cancel()
        elif running.task is not None:
            running.task.cancel()
        elif running.steps is not None:
            running.task, running.steps = asyncio.ensure_future(_stream(running.steps, self._rng.randrange(4))), None

    def _look(self, place: _Place) -> None:
        world = place.world
        self._forget_finished(place)
        stats = world.service.stats()
        for law in broken_laws(stats.manager):
            self._complain(law)
        if not world.service.health().ok:
            self._complain(f"unhealthy: {world.service.health().reason}")
        room = world.service.room
        if len(room) and not room.num_called and not stats.running_loads:
            self._complain(f"{len(room)} loads wait for a turn that nothing will give them")
        world.blocks.look(2, self._rng)
        if self._done % LOOK_AT_ALL == 0:
            world.blocks.look_at_all()

    def _forget_finished(self, place: _Place) -> None:
        for name, running in list(place.running.items()):
            if running.task is not None and running.task.done():
                del place.running[name]
                error = task_error(running.task)
                if error is not None and not (isinstance(error, ClosedError) and place.world.service.engine.closed):
                    self._complain(f"{name} raised {error!r}")

    async def _calm(self, place: _Place) -> None:
        """Let everything end: then nothing is pinned, running or held, and every block came back."""
        service = place.world.service
        await self._wait_for_clients(place)
        service.enabled = True
        for _ in range(_PATIENCE):
            place.world.calm_down()
            if await service.drain(0.05):
                break
        else:
            self._complain("copies that were let go never ended")
        stats = service.stats()
        manager = stats.manager
        left = (manager.pinned, manager.writing, manager.detached, manager.quarantined)
        if any(left) or stats.busy_gpu_blocks or stats.deferred_gpu_blocks or stats.requests or stats.leases:
            self._complain(f"all is calm, but the books are not empty: {stats}")
        if place.world.blocks.num_owned:
            self._complain(f"all is calm, but {place.world.blocks.num_owned} blocks have an owner")
        place.world.blocks.look_at_all()


async def _live_in_scope(client: Client, scope: anyio.CancelScope) -> None:
    with scope:
        await client.live()


async def _stream(steps: AsyncIterator[None], count: int) -> None:
    """Read a few items of a streaming response, then drop it half-way."""
    try:
        for _ in range(count):
            if await anext(steps, _END) is _END:
                return
    finally:
        await steps.aclose()  # type: ignore[attr-defined]  # a generator


_END = object()
