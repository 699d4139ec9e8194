"""The adapter's series on vLLM's own `/metrics`: counters as differences since the last step, gauges as they are.

vLLM's front end registers what `build_metric_definitions` declares and fails on anything else, so the tables below are
the one place that names a series. The names begin with `vllm:`, which lets vLLM drop them when an engine is made anew
in the same process; labels (`model_name`, `engine`) are vLLM's.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata

from kvoffload.manager.base import ManagerStats
from kvoffload.manager.cpu import CPUOffloadingManager

PREFIX = "vllm:kvoffload_"

GAUGES: dict[str, tuple[str, str]] = {
    "capacity_blocks": ("capacity", "Offloaded blocks that fit in host memory."),
    "free_blocks": ("free", "Blocks of host memory that hold nothing."),
    "ready_blocks": ("ready", "Blocks that can be loaded."),
    "pinned_blocks": ("pinned", "Ready blocks that a running load holds."),
    "writing_blocks": ("writing", "Blocks whose store has not ended."),
    "detached_blocks": ("detached", "Blocks without a key that a running copy still uses."),
}
"""Series name after the prefix: field of `ManagerStats`, documentation."""

COUNTERS: dict[str, tuple[str, str]] = {
    "lookup_hit_blocks": ("hits", "Blocks found in host memory and loaded, once a request."),
    "lookup_miss_blocks": ("misses", "Lookups that ended at a block which host memory does not hold, once a request."),
    "lookup_pending_blocks": ("pending", "Lookups that met a block which was still written, once a request."),
    "stored_blocks": ("stored", "Blocks whose store ended well."),
    "failed_blocks": ("failed", "Blocks dropped because their store failed."),
    "evicted_blocks": ("evicted", "Blocks evicted to make room."),
    "evicted_unused_blocks": ("evicted_unused", "Evicted blocks that no request ever loaded."),
    "discarded_blocks": ("discarded", "Blocks dropped because a load of them failed."),
    "refused_blocks": ("refused", "Blocks offered when nothing could be evicted for them."),
    "filtered_blocks": ("filtered", "Blocks offered too rarely to be stored."),
    "reset_blocks": ("reset_while_ready", "Blocks dropped by a reset of the cache."),
    "stale_completions": ("stale_completions", "Completions of copies that a reset had given up."),
}

JOBS: dict[str, tuple[str, str]] = {
    "loads": ("loads", "Load jobs handed to the workers."),
    "failed_loads": ("failed_loads", "Load jobs that failed; vLLM recomputes or fails their requests."),
    "failed_stores": ("failed_stores", "Store jobs that failed; their blocks are not readable."),
    "refused_stores": ("refused_stores", "Offers that found no room."),
    "resets": ("resets", "Resets of the cache."),
}
"""Series name after the prefix: attribute of `ManagerMetrics`, documentation."""


def metric_definitions() -> dict[str, Any]:
    """Return the series for vLLM's `build_metric_definitions`."""
    definitions: dict[str, Any] = {
        PREFIX + name: OffloadingGaugeMetadata(documentation=text) for name, (_, text) in GAUGES.items()
    }
    for name, (_, text) in (COUNTERS | JOBS).items():
        definitions[PREFIX + name] = OffloadingCounterMetadata(documentation=text)
    return definitions


class ManagerMetrics:
    """Counts what the manager does not, and says what changed since vLLM asked last.

    Attributes:
        loads: Load jobs handed to the workers.
        failed_loads: Load jobs that failed.
        failed_stores: Store jobs that failed.
        refused_stores: Offers that found no room.
        resets: Resets of the cache.
        latest: The manager's statistics when they were last taken.
    """

    def __init__(self, source: CPUOffloadingManager) -> None:
        self.loads = self.failed_loads = self.failed_stores = self.refused_stores = self.resets = 0
        self._source = source
        self.latest = source.stats()
        self._seen: dict[str, float] = {}

    def take(self) -> OffloadingConnectorStats | None:
        """Return vLLM's stats object with what changed since the last call; None if nothing did."""
        stats, seen = self.refresh(), self._seen
        report: OffloadingConnectorStats | None = None
        for source, table, is_gauge in ((stats, GAUGES, True), (stats, COUNTERS, False), (self, JOBS, False)):
            for name, (field, _) in table.items():
                value = getattr(source, field)
                last = seen.get(name)
                if value == last:
                    continue
                seen[name] = value
                if report is None:
                    report = OffloadingConnectorStats()
                if is_gauge:
                    report.set_gauge(PREFIX + name, value)
                else:
                    report.increase_counter(PREFIX + name, value - (last or 0))
        return report

    def refresh(self) -> ManagerStats:
        """Take the manager's statistics now; in the scheduler's thread."""
        self.latest = self._source.stats()
        return self.latest
