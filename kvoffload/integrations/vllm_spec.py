"""`KVOffloadSpec`: what vLLM's offloading connector loads, and the reading of its configuration."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, ClassVar

from vllm.v1.kv_offload.base import CanonicalKVCaches as VllmCaches
from vllm.v1.kv_offload.base import OffloadingSpec
from vllm.v1.kv_offload.config import OffloadingConfig

from kvoffload.config import EventsConfig, OffloadConfig
from kvoffload.errors import ConfigError
from kvoffload.events.publisher import create_publisher
from kvoffload.integrations.vllm_exposition import ManagerExposition
from kvoffload.integrations.vllm_feed import Feed, OwnFeed, VllmFeed
from kvoffload.integrations.vllm_manager import KVOffloadManager
from kvoffload.integrations.vllm_metrics import metric_definitions
from kvoffload.integrations.vllm_taps import install_taps
from kvoffload.integrations.vllm_worker import KVOffloadWorker
from kvoffload.transfer.stream import MakeStream

logger = logging.getLogger(__name__)

METRICS_KEY = "metrics_endpoint"
"""Key of kvoffload's own `/metrics` in the engine core: `"host:port"`."""

VLLM_KEYS = frozenset(
    {
        "spec_name",
        "spec_module_path",
        "block_size",
        "blocks_per_chunk",
        "offload_prompt_only",
        "self_describing_kv_events",
    }
)
"""Keys of `kv_connector_extra_config` that vLLM reads itself; every other key is one of `OffloadConfig`."""

ADAPTER_KEYS = frozenset(
    {
        "cpu_bytes_to_use",
        "eviction_policy",
        "store_threshold",
        "max_tracker_size",
        "model_name",
        "instance_id",
        "pending_wait_seconds",
        "events",
    }
)
"""Keys of `OffloadConfig` that the adapter obeys; the others are about kvoffload's own service."""


class KVOffloadSpec(OffloadingSpec):  # type: ignore[misc] # vLLM is untyped here
    """One instance per role: the scheduler's makes the manager and the feed, a worker's the handlers and host memory.

    Attributes:
        offload: kvoffload's configuration, made of `kv_connector_extra_config` and of what vLLM knows itself.
        num_blocks: Offloaded blocks in host memory.
        make_stream: Device back end of the workers; None chooses by the device.

    Raises:
        ConfigError: A key is unknown or wrong, or `cpu_bytes_to_use` does not hold one block.
    """

    make_stream: ClassVar[MakeStream | None] = None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG003 - vLLM's signature
        """Return the series that the manager reports; called in the front end's process."""
        return metric_definitions()

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        if config.canonical_layout:
            raise ConfigError(
                "canonical_layout is not supported: host memory holds each rank's own pages; leave it out"
            )
        self.offload = offload_config(config)
        block_bytes = config.worker_kv_bytes_per_block * config.parallel.world_size * config.cache.blocks_per_chunk
        self.num_blocks = self.offload.cpu_bytes_to_use // block_bytes if block_bytes else 0
        if block_bytes and not self.num_blocks:
            raise ConfigError(
                f"cpu_bytes_to_use {self.offload.cpu_bytes_to_use} does not hold one offloaded block of {block_bytes} "
                "bytes (all ranks together)"
            )
        self._manager: KVOffloadManager | None = None
        self._worker: KVOffloadWorker | None = None
        install_taps()

    def get_manager(self) -> KVOffloadManager:
        """Return the scheduler's manager, made at the first call."""
        if self._manager is None:
            offload = self.offload
            self._manager = KVOffloadManager(
                self.num_blocks,
                offload.eviction_policy,
                store_threshold=offload.store_threshold,
                max_tracker_size=offload.max_tracker_size,
                feed=self._make_feed(),
                tokens_per_hash=self.tokens_per_hash,
                num_groups=len(self.config.groups),
                pending_wait_seconds=offload.pending_wait_seconds,
            )
            endpoint = self.config.extra_config.get(METRICS_KEY)
            if endpoint is not None:
                self._serve_metrics(str(endpoint), self._manager)
            logger.info(
                "kvoffload: %d offloaded blocks of %d engine blocks, policy %s",
                self.num_blocks, self.blocks_per_chunk, offload.eviction_policy,
            )  # fmt: skip
        return self._manager

    def _serve_metrics(self, endpoint: str, manager: KVOffloadManager) -> None:
        sink = manager.feed.sink if isinstance(manager.feed, OwnFeed) else None
        manager.on_shutdown.append(ManagerExposition(endpoint, manager.metrics, self.offload, sink).close)

    def _make_feed(self) -> Feed | None:
        if self.offload.events is not None:
            publisher = create_publisher(self.offload)
            if publisher is not None:
                publisher.start()
                logger.info("kvoffload: events on %s, replay on %s", publisher.endpoints, publisher.replay_endpoints)
                return OwnFeed(publisher)
        return VllmFeed(self.blocks_per_chunk) if self.config.enable_kv_cache_events else None

    def get_worker(self, kv_caches: VllmCaches) -> KVOffloadWorker:
        """Return this rank's worker, made at the first call: it allocates the rank's host memory."""
        if self._worker is None:
            self._worker = KVOffloadWorker(
                kv_caches, self.blocks_per_chunk, self.num_blocks, make_stream=type(self).make_stream
            )
        return self._worker


def offload_config(config: OffloadingConfig) -> OffloadConfig:
    """Return kvoffload's configuration for one vLLM engine.

    Raises:
        ConfigError: A key of `kv_connector_extra_config` is unknown or wrong; the message names it.
    """
    keys = {key: value for key, value in config.extra_config.items() if key not in VLLM_KEYS and key != METRICS_KEY}
    sizes = tuple(group.tokens_per_block for group in config.groups)
    chunks = config.cache.blocks_per_chunk
    derived: dict[str, Any] = {
        "gpu_block_size": sizes if len(set(sizes)) > 1 else sizes[0],
        "block_size": sizes[0] * chunks if chunks > 1 and len(set(sizes)) == 1 else None,
        "world_size": config.parallel.world_size,
    }
    clash = sorted(keys.keys() & derived.keys())
    if clash:
        raise ConfigError(f"{', '.join(clash)} cannot be set here: vLLM's own configuration decides; leave it out")
    idle = sorted((keys.keys() & OffloadConfig.model_fields.keys()) - ADAPTER_KEYS)
    if idle:
        raise ConfigError(f"{', '.join(idle)} would have no effect in vLLM: docs/vllm.md lists the keys that have")
    keys.setdefault("model_name", config.model.name)
    keys.setdefault("instance_id", config.engine_id)
    if "events" in keys:
        keys["events"] = _events(keys["events"], config)
    return OffloadConfig(**keys, **derived)


def _events(given: Any, config: OffloadingConfig) -> Any:  # noqa: ANN401 - checked by OffloadConfig
    """Return the feed's configuration with this rank's number; beside the engine's own feed it is not the only one."""
    events: dict[str, Any] = {"dp_rank": config.parallel.data_parallel_index}
    if config.enable_kv_cache_events and not (isinstance(given, Mapping) and given.get("merge_from")):
        events["sole_publisher"] = False
    if isinstance(given, Mapping):
        also = [{**events, **each} if isinstance(each, Mapping) else each for each in given.get("also", ())]
        return {**events, **given, **({"also": also} if also else {})}
    return EventsConfig(**events) if given is True else given
