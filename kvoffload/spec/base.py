"""`OffloadingSpec`: what a configuration means on one machine. Reference, chapter 1.9."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from kvoffload.config import OffloadConfig
from kvoffload.errors import ConfigError
from kvoffload.manager.base import OffloadingManager
from kvoffload.manager.specs import LoadStoreSpec
from kvoffload.memory.canonical import CanonicalKVCaches
from kvoffload.transfer.base import OffloadingHandler

HandlerRoute = tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]
"""Source spec class, destination spec class, and the handler that moves blocks between them."""


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """Sizes of the engine's KV cache on one rank.

    Attributes:
        num_blocks: Engine blocks in the cache; 0 when it is not known yet.
        page_size_bytes: Bytes of one engine block in each tensor (layers that share a tensor are in it once).
        gpu_block_sizes: Tokens in an engine block, per KV-cache group.
    """

    num_blocks: int
    page_size_bytes: tuple[int, ...]
    gpu_block_sizes: tuple[int, ...]

    @classmethod
    def from_canonical(cls, kv_caches: CanonicalKVCaches, config: OffloadConfig) -> Self:
        """Return the sizes of a canonical KV cache; one configured block size serves all its groups."""
        sizes = config.gpu_block_sizes
        return cls(
            num_blocks=kv_caches.num_blocks,
            page_size_bytes=tuple(tensor.page_size_bytes for tensor in kv_caches.tensors),
            gpu_block_sizes=sizes * kv_caches.num_groups if len(sizes) == 1 else sizes,
        )

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one engine block over all tensors of one rank."""
        return sum(self.page_size_bytes)


class OffloadingSpec(ABC):
    """Turns a configuration into a manager (for who decides) and handlers (for who owns the tensors).

    Args:
        config: The checked configuration.
        kv_cache_config: Sizes of the engine's KV cache.

    Attributes:
        host_bytes: Host memory that all ranks together will take; 0 where a spec cannot tell.

    Raises:
        ConfigError: The two disagree about the groups' block sizes.
    """

    host_bytes: int = 0

    def __init__(self, config: OffloadConfig, kv_cache_config: KVCacheConfig) -> None:
        self.config = config
        self.kv_cache_config = kv_cache_config
        self.gpu_block_size = kv_cache_config.gpu_block_sizes
        _check_groups(config.gpu_block_sizes, self.gpu_block_size)
        self.hash_block_size = min(self.gpu_block_size)
        self.block_size_factor = config.block_size_factor

    @abstractmethod
    def get_manager(self) -> OffloadingManager:
        """Return the manager; always the same one."""

    @abstractmethod
    def get_handlers(self, kv_caches: CanonicalKVCaches) -> Iterator[HandlerRoute]:
        """Yield a route per direction; made at the first call, the same ones later."""

    def shutdown(self, timeout: float = 10.0) -> None:
        """Release what manager and handlers share (page locks, device contexts), after the handlers; idempotent."""

    def measure_link(self, kv_caches: CanonicalKVCaches) -> dict[str, float]:  # noqa: ARG002
        """Return the bytes per second of one large copy, for `load` and `store`; empty where it is not known.

        May take some 100 ms; no copy runs meanwhile.
        """
        return {}


def _check_groups(configured: Sequence[int], actual: Sequence[int]) -> None:
    expected = list(configured) * len(actual) if len(configured) == 1 else list(configured)
    if expected != list(actual):
        raise ConfigError(
            f"gpu_block_size is {list(configured)}, but the KV cache has groups of {list(actual)} tokens: "
            "set it to those"
        )
