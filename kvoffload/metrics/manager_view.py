"""What a manager's books say, under the catalog's names; for the engine and for adapters that only have a manager."""

from __future__ import annotations

from kvoffload.manager.base import ManagerStats
from kvoffload.metrics.plain import plain_number, plain_text

_MAX_POLICY_VALUES = 32


def manager_values(stats: ManagerStats) -> dict[str, dict[str, float]]:
    """Return counters and gauges from a manager's statistics; states are disjoint and add up to the capacity."""
    figures = ((plain_text(name), plain_number(value)) for name, value in stats.policy.items())
    policy = {name: value for name, value in figures if value is not None}
    return {
        "cache_capacity_blocks": {"": stats.capacity},
        "cache_blocks": {
            "free": stats.free,
            "ready": stats.ready - stats.pinned,
            "pinned": stats.pinned,
            "writing": stats.writing,
            "detached": stats.detached - stats.quarantined,
            "quarantined": stats.quarantined,
        },
        "lookups": {"hit": stats.hits, "miss": stats.misses, "pending": stats.pending},
        "removed_blocks": {
            "evicted": stats.evicted,
            "discarded": stats.discarded,
            "reset": stats.reset_while_ready,
        },
        "evicted_unused_blocks": {"": stats.evicted_unused},
        "manager_store_blocks": {
            "stored": stats.stored,
            "failed": stats.failed,
            "abandoned": stats.abandoned,
            "reset": stats.reset_while_writing,
            "refused": stats.refused,
            "filtered": stats.filtered,
        },
        "stale_completions": {"": stats.stale_completions},
        "policy_value": dict(list(policy.items())[:_MAX_POLICY_VALUES]),
    }
