"""An engine's numbers as one snapshot, for whoever asks from whatever thread.

Theory of operation. Only the owner's thread sees the books in a consistent state. Another thread that wants a snapshot
leaves a note, rings the completion bridge, and the owner answers at its next poll. An owner that does not poll (an idle
step loop, a blocked event loop) does not hold a scrape up: after a moment the asker reads the books itself.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol, runtime_checkable

from kvoffload import __version__
from kvoffload.config import OffloadConfig
from kvoffload.manager.base import MetricsSink
from kvoffload.metrics.manager_view import manager_values
from kvoffload.metrics.plain import plain_text
from kvoffload.metrics.snapshot import HistogramData, MetricsSnapshot
from kvoffload.service.core import Core
from kvoffload.service.feed_view import FeedStatistics, feed_values
from kvoffload.service.ledger import LoadLedger
from kvoffload.service.results import Stats

_PATIENCE_SECONDS = 0.25
_TRIES = 10

Values = Mapping[str, Mapping[str, float]]
"""Name in the metric catalog, label value, number."""


@runtime_checkable
class ReadableMetrics(Protocol):
    """A `MetricsSink` whose numbers can be read back."""

    def read_counters(self) -> dict[str, dict[str, float]]:
        """Return every counter."""

    def read_histograms(self) -> dict[str, dict[str, HistogramData]]:
        """Return every histogram."""


class SnapshotDesk:
    """Hands snapshots to other threads.

    Args:
        make: Makes a snapshot; right on the owner's thread, elsewhere it may find a dictionary changing under it.
        ring: Wakes the owner.
    """

    def __init__(self, make: Callable[[], MetricsSnapshot], ring: Callable[[], None]) -> None:
        self._make = make
        self._ring = ring
        self._asking: deque[_Ask] = deque()

    def ask(self, patience_seconds: float = _PATIENCE_SECONDS) -> MetricsSnapshot:
        """Return a snapshot; any thread but the owner's."""
        ask = _Ask()
        self._asking.append(ask)
        self._ring()
        if ask.answered.wait(patience_seconds) and ask.snapshot is not None:
            return ask.snapshot
        with suppress(ValueError):  # the owner took it a moment ago
            self._asking.remove(ask)
        for _ in range(_TRIES):
            try:
                return self._make()
            except RuntimeError:  # a dictionary changed size: the owner is at work, so try again
                continue
        return self._make()

    def serve(self) -> None:
        """Answer who asked; owner's thread, as part of each poll."""
        if not self._asking:
            return
        snapshot = self._make()
        while self._asking:
            ask = self._asking.popleft()
            ask.snapshot = snapshot
            ask.answered.set()


class _Ask:
    """One note of a thread that waits."""

    __slots__ = ("answered", "snapshot")

    def __init__(self) -> None:
        self.answered = threading.Event()
        self.snapshot: MetricsSnapshot | None = None


def stats_values(stats: Stats) -> dict[str, Mapping[str, float]]:
    """Return what an engine's statistics say, under the catalog's names."""
    return {
        **manager_values(stats.manager),
        "running_transfers": {"load": stats.running_loads, "store": stats.running_stores},
        "inflight_bytes": {"load": stats.inflight_load_bytes, "store": stats.inflight_store_bytes},
        "queued_stores": {"": stats.queued_stores},
        "active_requests": {"": stats.requests},
        "leases": {"": stats.leases},
        "hung_jobs": {"": stats.hung_jobs},
        "gpu_blocks": {
            "busy": stats.busy_gpu_blocks,
            "deferred": stats.deferred_gpu_blocks,
            "quarantined": stats.quarantined_gpu_blocks,
        },
    }


class Telemetry:
    """Everything an engine exports.

    Args:
        config: The engine's configuration.
        recorder: Where the service counts.
    """

    def __init__(self, config: OffloadConfig, recorder: MetricsSink) -> None:
        self.recorder = recorder
        self.link_bytes_per_second: dict[str, float] = {}
        self._labels = {
            "model_name": plain_text(config.model_name or "unknown"),
            "engine": plain_text(config.instance_id or "0"),
        }
        self._info = {
            "version": __version__,
            "policy": plain_text(config.eviction_policy),
            "spec": plain_text(config.spec_name),
            "block_size_factor": str(config.block_size_factor),
            "feed": "off",
        }
        self._sizes: dict[str, Mapping[str, float]] = {}
        self._more: list[Callable[[], Values]] = []
        self._core: Core | None = None
        self._events: object = None
        self._final: MetricsSnapshot | None = None

    def start(self, core: Core, ledger: LoadLedger, read_stats: Callable[[], Stats], events: object) -> None:
        """The engine has its parts; `events` is asked for the feed's numbers."""
        geometry = core.geometry
        self._info["block_size"] = str(geometry.spans[0])
        self._info["feed"] = "on" if isinstance(events, FeedStatistics) else "off"
        self._sizes = {
            "cache_block_bytes": {"": sum(geometry.block_bytes) * geometry.groups[0].factor},
            "block_size_factor": {"": geometry.groups[0].factor},
            "block_tokens": {"": geometry.spans[0]},
        }
        self._core, self._ledger, self._read_stats, self._events = core, ledger, read_stats, events
        self._started_unix_seconds = time.time()
        self._desk = SnapshotDesk(self.snapshot, core.ring)

    def add(self, read: Callable[[], Values]) -> None:
        """Add numbers to every snapshot: names in the catalog, label values, numbers; read on the owner's thread."""
        self._more.append(read)

    def ask(self) -> MetricsSnapshot:
        """Return a snapshot to another thread than the owner's."""
        return self.snapshot() if self._core is None or self._final is not None else self._desk.ask()

    def serve(self) -> None:
        """Answer other threads; part of each poll."""
        self._desk.serve()

    def finish(self, last: Stats) -> None:
        """The engine is closed; from now on every snapshot is the one of its end."""
        self._final = self._assemble(last, closed=True)

    def snapshot(self) -> MetricsSnapshot:
        """Return all numbers; owner's thread."""
        if self._final is not None:
            return self._final
        if self._core is None:
            return self._assemble(None, closed=True)
        return self._assemble(self._read_stats(), closed=False)

    def _assemble(self, stats: Stats | None, *, closed: bool) -> MetricsSnapshot:
        parts: list[Values] = [self._sizes, feed_values(self._events)]
        core = self._core
        if core is not None and stats is not None:
            state: Values = {
                "link_bytes_per_second": self.link_bytes_per_second,
                "prefill_tokens_per_second": {"": self._ledger.tokens_per_second},
                "healthy": {"": int(not closed and core.fault is None and core.absent is None)},
                "enabled": {"": int(not closed and core.enabled)},
                "stores_paused": {"": int(core.stores_paused)},
                "ranks_expected": {"": 0 if closed else core.ranks_expected},
                "ranks_up": {"": 0 if closed else core.ranks_up},
                "start_time_seconds": {"": self._started_unix_seconds},
            }
            parts += [stats_values(stats), state, *(read() for read in self._more)]
        values: dict[str, dict[str, float]] = {}
        histograms: dict[str, dict[str, HistogramData]] = {}
        if isinstance(self.recorder, ReadableMetrics):
            values, histograms = self.recorder.read_counters(), self.recorder.read_histograms()
        for part in parts:
            for name, numbers in part.items():
                values[name] = dict(numbers)
        return MetricsSnapshot(labels=dict(self._labels), info=dict(self._info), values=values, histograms=histograms)
