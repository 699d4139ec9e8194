"""`MetricsSnapshot`: all numbers of one engine at one moment, as plain data that JSON and pickle carry.

An engine makes snapshots; an exposition renders them, in the same process or in another one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypedDict

from kvoffload.metrics.catalog import BY_NAME
from kvoffload.metrics.plain import plain_number, plain_text

logger = logging.getLogger(__name__)


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
        self._warned = False

    def update(self, snapshot: MetricsSnapshot) -> None:
        """Take a snapshot that arrived; what this version does not understand in it is left out, and logged once."""
        checked, all_good = _checked(snapshot)
        if not all_good and not self._warned:
            self._warned = True
            logger.warning("a snapshot of metrics holds what is none; is the engine of another version?")
        if checked is not None:
            self._latest = (self._clock(), checked)

    def metrics_snapshot(self) -> MetricsSnapshot | None:
        """Return the latest snapshot while it is fresh."""
        latest = self._latest
        if latest is None or self._clock() - latest[0] > self._max_age_seconds:
            return None
        return latest[1]


def _checked(snapshot: object) -> tuple[MetricsSnapshot | None, bool]:
    """Return what can be exported of what another process sent (None: nothing), and whether that is all of it."""
    parts = [_mapping(_mapping(snapshot).get(name)) for name in MetricsSnapshot.__annotations__]
    labels, info, values, histograms = parts
    if not labels or "values" not in _mapping(snapshot):
        return None, False
    all_good = True
    kept: dict[str, dict[str, float]] = {}
    for name, series in values.items():
        numbers = {plain_text(label): plain_number(value) for label, value in _mapping(series).items()}
        kept[name] = {label: value for label, value in numbers.items() if value is not None}
        all_good = all_good and isinstance(series, Mapping) and len(kept[name]) == len(series)
    kept_histograms: dict[str, dict[str, HistogramData]] = {}
    for name, series in histograms.items():
        kept_histograms[name] = {}
        for label, data in _mapping(series).items():
            if name in BY_NAME and _fits(data, len(BY_NAME[name].buckets) + 1):
                kept_histograms[name][plain_text(label)] = HistogramData(counts=list(data["counts"]), sum=data["sum"])
            else:
                all_good = False
    texts = [{str(name): plain_text(value) for name, value in part.items()} for part in (labels, info)]
    return MetricsSnapshot(labels=texts[0], info=texts[1], values=kept, histograms=kept_histograms), all_good


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _fits(data: object, num_counts: int) -> bool:
    counts, total = _mapping(data).get("counts"), _mapping(data).get("sum")
    return (
        isinstance(counts, list)
        and len(counts) == num_counts
        and all(type(count) is int for count in counts)
        and plain_number(total) is not None
    )


def empty_snapshot(labels: Mapping[str, str], info: Mapping[str, str]) -> MetricsSnapshot:
    """Return a snapshot in which everything is 0."""
    return MetricsSnapshot(labels=dict(labels), info=dict(info), values={}, histograms={})
