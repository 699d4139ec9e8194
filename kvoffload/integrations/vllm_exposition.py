"""kvoffload's own `/metrics` in vLLM's engine core, for those who scrape it instead of, or besides, vLLM's.

It serves the names of kvoffload's catalog, which the dashboards and alerts are written for. Numbers are those of the
last scheduler step: they are taken in the scheduler's thread, and a scrape only reads them.
"""

from __future__ import annotations

import logging
import re
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import start_http_server

from kvoffload.config import OffloadConfig
from kvoffload.errors import ConfigError
from kvoffload.integrations.vllm_metrics import ManagerMetrics
from kvoffload.metrics.exposition import MetricsExposition
from kvoffload.metrics.manager_view import manager_values
from kvoffload.metrics.snapshot import MetricsSnapshot, empty_snapshot
from kvoffload.service.feed_view import feed_values

logger = logging.getLogger(__name__)

_ENDPOINT = re.compile(r"(?P<host>[^\s:]+|\[[0-9a-fA-F:]+\]):(?P<port>\d{1,5})")


class ManagerExposition:
    """Serves one manager's numbers over HTTP until it is closed.

    Args:
        endpoint: `"host:port"`; port 0 takes a free one.
        metrics: Where the scheduler's thread leaves the manager's statistics.
        offload: Configuration, for the labels.
        events: The feed's sink, if it counts.

    Attributes:
        port: The port it listens on.

    Raises:
        ConfigError: The endpoint is no `"host:port"`, or cannot be bound.
    """

    def __init__(self, endpoint: str, metrics: ManagerMetrics, offload: OffloadConfig, events: object = None) -> None:
        parts = _ENDPOINT.fullmatch(endpoint)
        if parts is None or int(parts["port"]) > 65535:
            raise ConfigError(f"metrics_endpoint must be 'host:port', such as 127.0.0.1:9095; got {endpoint!r}")
        self._metrics = metrics
        self._events = events
        self._labels = {"model_name": offload.model_name or "", "engine": offload.instance_id or ""}
        self._info = {
            "version": _version(), "policy": offload.eviction_policy, "spec": "KVOffloadSpec",
            "block_size": str(offload.gpu_block_sizes[0]), "block_size_factor": str(offload.block_size_factor),
            "feed": str(events is not None).lower(),
        }  # fmt: skip
        exposition = MetricsExposition(self)
        try:
            self._server, self._thread = start_http_server(
                int(parts["port"]), parts["host"].strip("[]"), registry=exposition.registry
            )
        except OSError as error:
            raise ConfigError(f"metrics_endpoint {endpoint!r} cannot be served: {error}") from error
        self.port = int(self._server.server_port)
        logger.info("kvoffload: metrics on port %d", self.port)

    def metrics_snapshot(self) -> MetricsSnapshot:
        """Return the numbers of the last step; called by a scrape's thread."""
        snapshot = empty_snapshot(self._labels, self._info)
        snapshot["values"].update(manager_values(self._metrics.latest))
        snapshot["values"].update(feed_values(self._events))
        return snapshot

    def close(self) -> None:
        """Stop serving; idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


def _version() -> str:
    try:
        return version("kvoffload")
    except PackageNotFoundError:
        return "unknown"
