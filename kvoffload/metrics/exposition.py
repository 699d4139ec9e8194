"""`MetricsExposition`: one engine's numbers in Prometheus text or OpenMetrics, and in registries of others."""

from __future__ import annotations

import asyncio
import logging
import os

from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import CollectorRegistry

from kvoffload.metrics.collector import collector_of
from kvoffload.metrics.snapshot import SnapshotSource

logger = logging.getLogger(__name__)


class MetricsExposition:
    """Renders what a source counts.

    It has a registry of its own, with the process's figures, so that nothing collides with what the application
    exports. `register(prometheus_client.REGISTRY)` adds the engine to the application's registry instead or besides.

    Args:
        source: An engine, or a `SnapshotRelay` for one in another process.

    Attributes:
        registry: The own registry: for `prometheus_client.start_http_server(port, registry=...)` and the like.
    """

    def __init__(self, source: SnapshotSource) -> None:
        self._source = source
        self._shared: list[CollectorRegistry] = []
        self.registry = CollectorRegistry()
        collector_of(self.registry).add(source)
        ProcessCollector(registry=self.registry)
        if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
            logger.warning(
                "PROMETHEUS_MULTIPROC_DIR is set: prometheus_client's multiprocess mode ignores custom collectors, "
                "so kvoffload's metrics are only in its own registry; scrape that one"
            )

    def register(self, registry: CollectorRegistry) -> None:
        """Export the engine from another registry too, until `unregister`."""
        if not any(known is registry for known in self._shared):
            self._shared.append(registry)
            collector_of(registry).add(self._source)

    def unregister(self) -> None:
        """Leave every registry but the own one; the engine does so when it closes."""
        shared, self._shared = self._shared, []
        for registry in shared:
            collector_of(registry).remove(self._source)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return body and content type; OpenMetrics when `accept` asks for it. From any thread but a busy loop's."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self.registry), content_type

    async def render_in_thread(self, accept: str = "") -> tuple[bytes, str]:
        """Do what `render` does without holding the loop."""
        return await asyncio.to_thread(self.render, accept)
