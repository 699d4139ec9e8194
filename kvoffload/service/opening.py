"""What an engine is built on: handlers in this process, or ranks in others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvoffload.config import OffloadConfig
from kvoffload.errors import UsageError
from kvoffload.memory import preflight
from kvoffload.memory.canonical import CanonicalKVCaches
from kvoffload.service.arguments import shown
from kvoffload.service.geometry import BlockGeometry
from kvoffload.spec.base import KVCacheConfig, OffloadingSpec
from kvoffload.spec.factory import OffloadingSpecFactory
from kvoffload.transfer.base import TransferWorker
from kvoffload.transfer.worker import OffloadingWorker

if TYPE_CHECKING:
    from kvoffload.service.ranks.remote import RemoteWorkers


@dataclass(slots=True)
class Ground:
    """Spec, geometry and worker; with ranks the first two are known once these have joined.

    Attributes:
        kv_caches: The GPU side in this process; None with `workers`.
        workers: Ranks in other processes; None with `kv_caches`.
    """

    config: OffloadConfig
    kv_caches: CanonicalKVCaches | None
    workers: RemoteWorkers | None
    spec: OffloadingSpec | None = None
    geometry: BlockGeometry | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.config, OffloadConfig):
            raise UsageError(f"config must be an OffloadConfig, got {shown(self.config)}")
        if self.kv_caches is not None and not isinstance(self.kv_caches, CanonicalKVCaches):
            raise UsageError(f"kv_caches come from CanonicalKVCaches.from_layers(...), got {shown(self.kv_caches)}")
        if (self.kv_caches is None) == (self.workers is None):
            raise UsageError("give either kv_caches (in this process) or workers (rank processes), not both or neither")
        if self.workers is not None and self.workers.world_size != self.config.world_size:
            raise UsageError(
                f"world_size is {self.config.world_size}, but RemoteWorkers has {self.workers.world_size} ranks"
            )
        if self.kv_caches is not None:
            if self.config.world_size != 1:
                raise UsageError(
                    f"world_size is {self.config.world_size}, but kv_caches are those of one process: set it to 1, or "
                    f"pass workers=RemoteWorkers({self.config.world_size}) instead"
                )
            pages = [[ref.page_size_bytes for ref in refs] for refs in self.kv_caches.group_data_refs]
            self.geometry = BlockGeometry.of(self.config, pages, self.kv_caches.num_blocks)
            if self.spec is None:
                cache_config = KVCacheConfig.from_canonical(self.kv_caches, self.config)
                self.spec = OffloadingSpecFactory.create_spec(self.config, cache_config)

    def open(self) -> TransferWorker:
        """Allocate host memory and make handlers, or meet the ranks; may take long. Nothing is left when it raises."""
        if self.workers is not None:
            return self._open_ranks(self.workers)
        worker = OffloadingWorker()
        if self.spec is None or self.kv_caches is None:  # __post_init__ saw to it
            raise UsageError("there are no KV caches")
        try:
            for src_cls, dst_cls, handler in self.spec.get_handlers(self.kv_caches):
                worker.register_handler(src_cls, dst_cls, handler)
        except BaseException:
            worker.shutdown()
            self.spec.shutdown()
            raise
        return worker

    def _open_ranks(self, workers: RemoteWorkers) -> TransferWorker:
        try:
            hello = workers.gather(self.config)
            cache_config = KVCacheConfig(hello.num_blocks, tuple(hello.page_sizes), tuple(hello.gpu_block_sizes))
            if self.spec is None:
                self.spec = OffloadingSpecFactory.create_spec(self.config, cache_config)
            self.geometry = BlockGeometry.of(
                self.config, hello.group_page_sizes, hello.num_blocks, self.config.world_size
            )
            preflight.check_memory(
                self.spec.host_bytes, "shared region"
            )  # before the manager's tables for so many blocks
            workers.provide(self.spec.get_manager().stats().capacity)
        except BaseException as error:
            workers.shutdown(why=f"its start failed: {str(error) or type(error).__name__}")
            raise
        return workers

    def give_up(self) -> None:
        """End an `open` that waits for ranks; it raises `ClosedError` and leaves nothing. Returns at once."""
        if self.workers is not None:
            self.workers.give_up()

    def measure_link(self) -> dict[str, float]:
        """Return the bytes per second of one large copy per direction; empty where it is not known (ranks)."""
        if self.spec is None or self.kv_caches is None:
            return {}
        return self.spec.measure_link(self.kv_caches)
