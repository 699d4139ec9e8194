"""What looks at a run from outside: `--http` and `--metrics-dump`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kvoffload.cli.metrics_server import MetricsServer
from kvoffload.errors import ConfigError
from kvoffload.service.service import OffloadService
from kvoffload.service.waiting import in_thread


class Observer:
    """Shows a run's service to scrapers while it runs, and writes its metrics to a file at the end.

    Args:
        server: Serves `/metrics`; None: nothing is served.
        dump: File for the metrics at the end, in Prometheus's text format; None: none.

    Attributes:
        failure: Why the metrics could not be written.

    Raises:
        ConfigError: The file cannot be written.
    """

    def __init__(self, server: MetricsServer | None, dump: Path | None) -> None:
        self._server = server
        self._dump = dump
        self.failure: OSError | None = None
        if dump is not None:
            try:
                dump.open("ab").close()
            except OSError as error:
                raise ConfigError(
                    f"--metrics-dump: cannot write {dump}: {error.strerror or error}; give a writable file"
                ) from None

    @asynccontextmanager
    async def beside(self, service: OffloadService) -> AsyncIterator[None]:
        """Look at `service` while the block runs."""
        if self._server is not None:
            self._server.show(service.metrics, lambda: service.is_ready)
        try:
            yield
        finally:
            if self._server is not None:
                self._server.show(service.metrics)
        if self._dump is not None:
            dump = self._dump
            try:
                await in_thread(lambda: dump.write_bytes(service.metrics.render()[0]), "kvoffload-dump")
            except OSError as error:
                self.failure = error
