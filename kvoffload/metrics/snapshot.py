"""`MetricsSnapshot`: all numbers of one engine at one moment, as plain data that JSON and pickle carry.

An engine makes snapshots; an exposition renders them, in the same process or in another one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol, TypedDict


class HistogramData(TypedDict):
    """Observations of one series: how many fell in each bucket (not cumulative, the last is beyond), and their sum."""

    counts: list[int]
    sum: float


class MetricsSnapshot(TypedDict):
    """All numbers of one engine.

    Attributes:
        labels: Values of the constant labels.
        info: Labels of `build_info`.
        values: Counters and gauges: name in the catalog, then label value ("" without label).
        histograms: The same for histograms.
    """

    labels: dict[str, str]
    info: dict[str, str]
    values: dict[str, dict[str, float]]
    histograms: dict[str, dict[str, HistogramData]]


class SnapshotSource(Protocol):
    """What an exposition reads; called from any thread, never raises."""

    def metrics_snapshot(self) -> MetricsSnapshot | None:
        """Return the numbers now; None: there is nothing to export."""


class SnapshotRelay:
    """The numbers of an engine in another process: the front end receives snapshots and exports the latest.

    Args:
        max_age_seconds: A snapshot older than that is not exported: a dead engine's numbers must not look alive.
        clock: Monotonic seconds.
    """

    def __init__(self, max_age_seconds: float = 30.0, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_age_seconds = max_age_seconds
        self._clock = clock
        self._latest: tuple[float, MetricsSnapshot] | None = None

    def update(self, snapshot: MetricsSnapshot) -> None:
        """Take a snapshot that arrived."""
        self._latest = (self._clock(), snapshot)

    def metrics_snapshot(self) -> MetricsSnapshot | None:
        """Return the latest snapshot while it is fresh."""
        latest = self._latest
        if latest is None or self._clock() - latest[0] > self._max_age_seconds:
            return None
        return latest[1]


def empty_snapshot(labels: Mapping[str, str], info: Mapping[str, str]) -> MetricsSnapshot:
    """Return a snapshot in which everything is 0."""
    return MetricsSnapshot(labels=dict(labels), info=dict(info), values={}, histograms={})
