"""`CPUOffloadingSpec`: offloading to host memory. Reference, chapter 6."""

from __future__ import annotations

from collections.abc import Iterator

from kvoffload.config import OffloadConfig
from kvoffload.errors import ConfigError, RegistrationError
from kvoffload.manager.base import OffloadingManager
from kvoffload.manager.cpu import CPUOffloadingManager
from kvoffload.manager.reuse_filter import FilterReusedOffloadingManager
from kvoffload.manager.specs import CPULoadStoreSpec, GPULoadStoreSpec
from kvoffload.memory.canonical import CanonicalKVCaches
from kvoffload.spec.base import HandlerRoute, KVCacheConfig, OffloadingSpec
from kvoffload.transfer.directional import CpuGpuOffloadingHandlers
from kvoffload.transfer.link import host_link_bytes_per_second, store_link_bytes_per_second


class CPUOffloadingSpec(OffloadingSpec):
    """Offloads to host memory that all ranks share.

    Attributes:
        offloaded_block_bytes: Bytes of one offloaded block: all tensors, all its engine blocks, all ranks.
        num_blocks: Offloaded blocks that fit into `cpu_bytes_to_use`.
        host_bytes: Bytes of all these blocks.

    Raises:
        ConfigError: Not one block fits, or the KV cache has no bytes.
    """

    def __init__(self, config: OffloadConfig, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(config, kv_cache_config)
        per_rank = kv_cache_config.bytes_per_block
        self.offloaded_block_bytes = per_rank * self.block_size_factor * config.world_size
        if self.offloaded_block_bytes < 1:
            raise ConfigError(
                f"the KV cache has no bytes per block: page sizes {list(kv_cache_config.page_size_bytes)}"
            )
        self.num_blocks = config.cpu_bytes_to_use // self.offloaded_block_bytes
        if self.num_blocks < 1:
            raise ConfigError(
                f"cpu_bytes_to_use must hold at least one offloaded block of {self.offloaded_block_bytes} bytes "
                f"({per_rank} bytes x {self.block_size_factor} engine blocks x {config.world_size} ranks); "
                f"got {config.cpu_bytes_to_use}"
            )
        self.host_bytes = self.num_blocks * self.offloaded_block_bytes
        self._manager: OffloadingManager | None = None
        self._handlers: CpuGpuOffloadingHandlers | None = None

    def get_manager(self) -> OffloadingManager:
        """Return the manager, behind a reuse filter when `store_threshold` is 2 or more; always the same one.

        Raises:
            RegistrationError: `eviction_policy` is unknown; the message names the known ones.
        """
        if self._manager is None:
            config = self.config
            try:
                manager: OffloadingManager = CPUOffloadingManager(
                    num_blocks=self.num_blocks,
                    cache_policy=config.eviction_policy,
                    enable_events=True,  # the service learns of removals from them, also where no feed is published
                    block_tokens=config.block_size,
                )
            except RegistrationError as error:
                raise RegistrationError(f"eviction_policy: {error}") from None
            if config.store_threshold >= 2:
                manager = FilterReusedOffloadingManager(
                    backing=manager,
                    store_threshold=config.store_threshold,
                    max_tracker_size=config.max_tracker_size,
                )
            self._manager = manager
        return self._manager

    def get_handlers(self, kv_caches: CanonicalKVCaches) -> Iterator[HandlerRoute]:
        """Yield GPU to CPU, then CPU to GPU; made at the first call, the same ones later.

        Raises:
            UnsupportedError: No backend can reach these tensors on this machine.
        """
        if self._handlers is None:
            self._handlers = CpuGpuOffloadingHandlers(
                kv_caches=kv_caches,
                block_size_factor=self.block_size_factor,
                num_cpu_blocks=self.num_blocks,
                pin_memory=self.config.pin_memory,
            )
        yield GPULoadStoreSpec, CPULoadStoreSpec, self._handlers.gpu_to_cpu_handler
        yield CPULoadStoreSpec, GPULoadStoreSpec, self._handlers.cpu_to_gpu_handler

    def shutdown(self, timeout: float = 10.0) -> None:
        """Shut both handlers down and unlock their host memory; idempotent."""
        if self._handlers is not None:
            self._handlers.shutdown(timeout)

    def measure_link(self, kv_caches: CanonicalKVCaches) -> dict[str, float]:
        """Return the speed of host copies; on other devices that of stores, which the loads' is taken to equal."""
        if kv_caches.device == "cpu":
            speed: float | None = host_link_bytes_per_second()
        elif self._handlers is None:
            speed = None
        else:
            speed = store_link_bytes_per_second(
                self._handlers.gpu_to_cpu_handler,
                gpu_blocks=kv_caches.num_blocks,
                cpu_blocks=self.num_blocks,
                factor=self.block_size_factor,
                block_bytes=sum(ref.page_size_bytes for ref in kv_caches.group_data_refs[0]),
                num_groups=kv_caches.num_groups,
            )
        return {"load": speed, "store": speed} if speed else {}
