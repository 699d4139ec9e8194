"""Two worlds for chaotic clients: copies that end as scripted, and copies that threads really make.

Both have a clock that only the driver moves, so deadlines pass when it says so. `disturb` does something to the copies;
`calm_down` lets all of them end.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

from kvoffload.config import OffloadConfig
from kvoffload.manager.base import OffloadingManager
from kvoffload.manager.cpu import CPUOffloadingManager
from kvoffload.manager.reuse_filter import FilterReusedOffloadingManager
from kvoffload.manager.specs import CPULoadStoreSpec, GPULoadStoreSpec
from kvoffload.memory.canonical import CanonicalKVCaches
from kvoffload.service.service import OffloadService
from kvoffload.simulate.chaos.blocks import OwnedBlocks
from kvoffload.spec.base import HandlerRoute, KVCacheConfig, OffloadingSpec
from kvoffload.transfer.base import HOST_VISIBLE, Ready
from kvoffload.transfer.directional import CpuGpuOffloadingHandlers
from kvoffload.transfer.scripted import ScriptedOffloadingHandler, ScriptedOffloadingHandlers

BLOCK_SIZE = 4
GPU_BLOCKS = 192
BLOCK_BYTES = 128
POLICIES = ("lru", "arc", "adaptive")


class DriverClock:
    """Seconds that pass when the driver says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


class ChaosSpec(OffloadingSpec):
    """A manager of few blocks over handlers made elsewhere."""

    def __init__(self, config: OffloadConfig, kv_caches: CanonicalKVCaches, capacity: int) -> None:
        super().__init__(config, KVCacheConfig.from_canonical(kv_caches, config))
        self.capacity = capacity
        manager: OffloadingManager = CPUOffloadingManager(capacity, config.eviction_policy, enable_events=True)
        if config.store_threshold > 1:
            manager = FilterReusedOffloadingManager(manager, config.store_threshold)
        self.manager = manager
        self.handlers: CpuGpuOffloadingHandlers | ScriptedOffloadingHandlers | None = None

    def get_manager(self) -> OffloadingManager:
        """Return the manager."""
        return self.manager

    def get_handlers(self, kv_caches: CanonicalKVCaches) -> Iterator[HandlerRoute]:  # noqa: ARG002 - the world's
        """Yield a route per direction."""
        if self.handlers is not None:
            yield GPULoadStoreSpec, CPULoadStoreSpec, self.handlers.gpu_to_cpu_handler
            yield CPULoadStoreSpec, GPULoadStoreSpec, self.handlers.cpu_to_gpu_handler

    def shutdown(self, timeout: float = 10.0) -> None:
        """Nothing: the handlers are shut down by their worker."""


class ChaosWorld:
    """A small service over real bytes."""

    name = ""

    def __init__(self, rng: random.Random, complain: Callable[[str], None]) -> None:
        self.rng = rng
        self.complain = complain
        self.block_size = BLOCK_SIZE
        self.clock = DriverClock()
        self.blocks = OwnedBlocks(GPU_BLOCKS, BLOCK_BYTES, complain)
        caches = self.caches = CanonicalKVCaches.from_layers(self.blocks.gpu.layers, block_dim=0)
        factor = rng.choice((1, 1, 2))
        config = OffloadConfig(
            cpu_bytes_to_use=1 << 20,
            gpu_block_size=BLOCK_SIZE,
            block_size=BLOCK_SIZE * factor,
            eviction_policy=rng.choice(POLICIES),
            store_threshold=rng.choice((0, 0, 0, 2)),
            max_inflight_load_bytes=rng.choice((8, 64)) * BLOCK_BYTES,
            max_inflight_store_bytes=rng.choice((16, 64)) * BLOCK_BYTES,
            lease_seconds=20.0,
        )
        self.spec = ChaosSpec(config, caches, rng.choice((6, 24, 64)))
        self.service = OffloadService(config, caches, spec=self.spec, clock=self.clock)

    def ready(self) -> Ready:
        """Return when a copy may start."""
        return HOST_VISIBLE

    def disturb(self) -> None:
        """Do something to the copies."""

    def calm_down(self) -> None:
        """Let every copy end."""

    def pass_time(self) -> None:
        """Let some seconds pass; now and then more than any deadline."""
        self.clock.now += self.rng.choice((0.01, 1.0, 2.0, 2.0, 6.0, 31.0))
        self.service.engine.bridge.notify()


class ScriptedWorld(ChaosWorld):
    """Copies end, fail, hang, come late or write early when the driver says so."""

    name = "scripted"

    def __init__(self, rng: random.Random, complain: Callable[[str], None]) -> None:
        super().__init__(rng, complain)
        handlers = ScriptedOffloadingHandlers.over(self.caches, self.spec.config.block_size_factor, self.spec.capacity)
        handlers.hold()
        self.spec.handlers = handlers
        self._handlers = handlers

    def disturb(self) -> None:
        """End, fail, hang, refuse or half-do a copy; ending well is the rule."""
        rng = self.rng
        handler: ScriptedOffloadingHandler = rng.choice(tuple(self._handlers.both))
        handler.submitted.clear()
        pending = handler.pending_jobs()
        dice = rng.random()
        if not pending or dice > 0.95:
            if dice > 0.97:
                handler.refuse_next(rng.choice((None, OSError("refused"))))
            elif dice > 0.95:
                handler.fail_next(OSError("failed in flight"))
            return
        oldest, chosen = pending[0], rng.choice(pending)
        if dice < 0.75:
            handler.finish(oldest)
        elif dice < 0.82:
            handler.finish(chosen)
        elif dice < 0.88:
            handler.fail(oldest, OSError("link down"), copy=rng.random() < 0.5)
        elif dice < 0.93:
            handler.copy_now(chosen)
        else:
            handler.hang(chosen)

    def calm_down(self) -> None:
        """End every copy, hung ones too."""
        self._handlers.resume()
        for handler in self._handlers.both:
            while pending := handler.pending_jobs():  # ending one may let others end by themselves
                handler.finish(pending[0])
            handler.hold()


class HostWorld(ChaosWorld):
    """Threads copy; an event may keep a copy from starting for a while."""

    name = "host"

    def __init__(self, rng: random.Random, complain: Callable[[str], None]) -> None:
        super().__init__(rng, complain)
        self.spec.handlers = CpuGpuOffloadingHandlers(
            self.caches, self.spec.config.block_size_factor, self.spec.capacity
        )
        self._events: list[threading.Event] = []

    def ready(self) -> Ready:
        """Return an event that happens when the driver says so, or that the bytes are there."""
        if self.rng.random() < 0.7:
            return HOST_VISIBLE
        event = threading.Event()
        self._events.append(event)
        return event

    def disturb(self) -> None:
        """Let the oldest event happen."""
        if self._events:
            self._events.pop(0).set()

    def calm_down(self) -> None:
        """Let every event happen."""
        while self._events:
            self._events.pop().set()


WORLDS = (ScriptedWorld, HostWorld)
