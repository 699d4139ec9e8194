"""A service over scripted handlers with real bytes, and the books every test checks at its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvoffload.chain import BlockChain
from kvoffload.config import OffloadConfig
from kvoffload.manager.base import OffloadingManager
from kvoffload.manager.cpu import CPUOffloadingManager
from kvoffload.manager.reuse_filter import FilterReusedOffloadingManager
from kvoffload.manager.specs import CPULoadStoreSpec, GPULoadStoreSpec
from kvoffload.memory.canonical import CanonicalKVCaches
from kvoffload.service.engine import OffloadEngine
from kvoffload.service.service import OffloadService
from kvoffload.spec.base import KVCacheConfig, OffloadingSpec
from kvoffload.transfer.scripted import ScriptedOffloadingHandler, ScriptedOffloadingHandlers

PAGE = 64
BLOCK = 4
CANARY = 0x5A


class ScriptedSpec(OffloadingSpec):
    """CPU manager and scripted handlers."""

    def __init__(
        self,
        config: OffloadConfig,
        kv_caches: CanonicalKVCaches,
        capacity: int,
        *,
        policy: str = "lru",
        threshold: int = 0,
    ) -> None:
        super().__init__(config, KVCacheConfig.from_canonical(kv_caches, config))
        self.handlers = ScriptedOffloadingHandlers.over(kv_caches, config.block_size_factor, capacity)
        self.cpu_manager = CPUOffloadingManager(capacity, policy, enable_events=True)
        self.manager: OffloadingManager = self.cpu_manager
        if threshold:
            self.manager = FilterReusedOffloadingManager(self.cpu_manager, threshold)

    def get_manager(self) -> OffloadingManager:
        return self.manager

    def get_handlers(self, kv_caches: CanonicalKVCaches) -> Iterator[Any]:
        yield GPULoadStoreSpec, CPULoadStoreSpec, self.handlers.gpu_to_cpu_handler
        yield CPULoadStoreSpec, GPULoadStoreSpec, self.handlers.cpu_to_gpu_handler


class ManualClock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Rig:
    """Everything a test needs: caches, spec, and the engine or service over them.

    Attributes:
        freed: GPU blocks passed to `free`, in order.
    """

    def __init__(
        self,
        *,
        capacity: int = 8,
        gpu_blocks: int = 64,
        factor: int = 1,
        policy: str = "lru",
        threshold: int = 0,
        **config: Any,
    ) -> None:
        self.gpu = [np.zeros((gpu_blocks, PAGE), np.int8) for _ in range(2)]
        self.kv_caches = CanonicalKVCaches.from_layers({f"layer.{i}": t for i, t in enumerate(self.gpu)}, block_dim=0)
        self.config = OffloadConfig(
            cpu_bytes_to_use=1 << 20, gpu_block_size=BLOCK, block_size=BLOCK * factor, eviction_policy=policy, **config
        )
        self.spec = ScriptedSpec(self.config, self.kv_caches, capacity, policy=policy, threshold=threshold)
        self.capacity = capacity
        self.freed: list[int] = []
        self.violations: list[str] = []

    @property
    def loads(self):
        return self.spec.handlers.cpu_to_gpu_handler

    @property
    def stores(self):
        return self.spec.handlers.gpu_to_cpu_handler

    def engine(self, **options: Any) -> OffloadEngine:
        return OffloadEngine(self.config, self.kv_caches, spec=self.spec, **options)

    def service(self, **options: Any) -> OffloadService:
        return OffloadService(self.config, self.kv_caches, spec=self.spec, **options)

    def free(self, blocks: Sequence[int]) -> None:
        """Take blocks back, and paint them: no copy that has not ended may touch them, now or later."""
        touched = {block for handler in (self.loads, self.stores) for block in _touched(handler)}
        if touched.intersection(blocks):
            self.violations.append(f"blocks {sorted(touched.intersection(blocks))} were freed under a running copy")
        self.freed.extend(blocks)
        for tensor in self.gpu:
            tensor[list(blocks)] = CANARY

    def allocate(self, blocks: Sequence[int]) -> None:
        """Give freed blocks to a new owner; the paint must be intact."""
        for block in blocks:
            if block in self.freed:
                self.freed.remove(block)
                if not all((tensor[block] == CANARY).all() for tensor in self.gpu):
                    self.violations.append(f"block {block} was written while nobody owned it")

    def check(self, freed: Sequence[int] = ()) -> None:
        """Nothing is pinned, running or held; exactly `freed` came back, each once, and nobody wrote to it since."""
        check_books(self.spec.cpu_manager, idle=True)
        assert sorted(self.freed) == sorted(freed)
        self.allocate(list(self.freed))
        assert self.violations == []
        assert self.loads.pending_jobs() == self.stores.pending_jobs() == []

    def fill(self, blocks: Sequence[int], seed: int) -> None:
        """Write distinct bytes into GPU blocks."""
        for position, block in enumerate(blocks):
            for layer, tensor in enumerate(self.gpu):
                tensor[block] = (seed * 31 + position * 7 + layer * 3) % 127 + 1

    def holds(self, blocks: Sequence[int], seed: int, first: int = 0) -> bool:
        """The GPU blocks hold what `fill` wrote, from its block `first` on."""
        return all(
            (tensor[block] == (seed * 31 + position * 7 + layer * 3) % 127 + 1).all()
            for position, block in enumerate(blocks, first)
            for layer, tensor in enumerate(self.gpu)
        )


def _touched(handler: ScriptedOffloadingHandler) -> set[int]:
    return {block for job in handler.submitted if not job.ended for block in job.gpu_blocks}


def tokens(count: int, seed: int = 0) -> list[int]:
    """Distinct token ids."""
    return [seed * 100_000 + index for index in range(count)]


async def store_prefix(rig, service, blocks, *, seed=0, name="store"):
    """Store as many full blocks of the seeded sequence as `blocks` names; return the result."""
    rig.allocate(blocks)
    rig.fill(blocks, seed)
    count = len(blocks) * BLOCK
    async with service.request(
        name, service.chain(tokens(count, seed)), gpu_blocks=list(blocks), free=rig.free
    ) as request:
        return await request.store(computed_tokens=count, ready="host-visible")


def check_books(manager: CPUOffloadingManager, *, idle: bool = False) -> None:
    """The conservation laws; with `idle`, also that nothing is pinned, being written or detached."""
    stats = manager.stats()
    assert stats.free + stats.writing + stats.ready + stats.detached == stats.capacity
    assert stats.reserved == stats.stored + stats.failed + stats.abandoned + stats.reset_while_writing + stats.writing
    assert stats.stored - stats.evicted - stats.discarded - stats.reset_while_ready == stats.ready
    assert stats.hits + stats.misses + stats.pending == stats.lookups
    if idle:
        assert (stats.writing, stats.pinned, stats.detached, stats.quarantined) == (0, 0, 0, 0)


def chain(rig: Rig, count: int, seed: int = 0) -> BlockChain:
    """A chain of `count` tokens."""
    layouts = rig.config.group_layouts()
    return BlockChain(layouts, tokens(count, seed))
