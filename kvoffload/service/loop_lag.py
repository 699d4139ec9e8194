"""How late the event loop runs: a timer that notes by how much it was overtaken."""

from __future__ import annotations

import asyncio

from kvoffload.manager.base import MetricsSink


class LoopLagProbe:
    """Observes `loop_lag_seconds` a few times a second until stopped; loop thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, metrics: MetricsSink, every_seconds: float = 0.1) -> None:
        self._loop = loop
        self._metrics = metrics
        self._every_seconds = every_seconds
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Plan the next observation."""
        self._due = self._loop.time() + self._every_seconds
        self._timer = self._loop.call_at(self._due, self._observe)

    def _observe(self) -> None:
        self._metrics.observe("loop_lag_seconds", max(0.0, self._loop.time() - self._due))
        self.start()

    def stop(self) -> None:
        """Plan nothing more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
