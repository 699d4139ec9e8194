"""`MetricsRecorder`: plain numbers in dictionaries. The hot path: no lock, no object per observation, never raises.

One thread counts (the engine's owner); any thread may read, and sees each number as it was at some moment.
"""

from __future__ import annotations

import logging
from bisect import bisect_left

from kvoffload.metrics.catalog import BY_NAME, CATALOG
from kvoffload.metrics.plain import plain_number
from kvoffload.metrics.snapshot import HistogramData

logger = logging.getLogger(__name__)

_LARGEST = 1e18


class _Histogram:
    """Observations of one series."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0


class MetricsRecorder:
    """A `MetricsSink` over the catalog.

    A name, label or value that is no metric's is counted in `metrics_errors`, named once in the log and ignored.
    """

    def __init__(self) -> None:
        self._counters: dict[str, dict[str, float]] = {
            metric.name: dict.fromkeys(metric.values, 0) for metric in CATALOG if metric.kind == "counter"
        }
        self._histograms: dict[tuple[str, str], _Histogram] = {
            (metric.name, value): _Histogram(metric.buckets)
            for metric in CATALOG
            if metric.kind == "histogram"
            for value in metric.values
        }
        self._warned = False

    def count(self, name: str, amount: float = 1, label: str = "") -> None:
        """Add to a counter."""
        try:
            slot = self._counters[name]
            if type(amount) is not int and type(amount) is not float:
                amount = plain_number(amount)  # type: ignore[assignment]  # None is refused below
            if 0 <= amount <= _LARGEST:
                slot[label if label in slot else "other"] += amount
                return
        except (KeyError, TypeError):
            pass
        self._refuse(name, amount, label)

    def observe(self, name: str, value: float, label: str = "") -> None:
        """Add one observation to a histogram."""
        try:
            if type(value) is not int and type(value) is not float:
                value = plain_number(value)  # type: ignore[assignment]  # None is refused below
            if 0 <= value <= _LARGEST:
                histogram = self._histograms[name, label]
                histogram.counts[bisect_left(histogram.bounds, value)] += 1
                histogram.total += value
                return
        except (KeyError, TypeError):
            pass
        self._refuse(name, value, label)

    def _refuse(self, name: object, value: object, label: object) -> None:
        self._counters["metrics_errors"][""] += 1
        if not self._warned:
            self._warned = True
            logger.warning("ignored a metric: name %r, value %r, label %r; more are only counted", name, value, label)

    def read_counters(self) -> dict[str, dict[str, float]]:
        """Return every counter: name, label value, number."""
        return {name: dict(slot) for name, slot in self._counters.items()}

    def read_histograms(self) -> dict[str, dict[str, HistogramData]]:
        """Return every histogram: name, label value, observations."""
        read: dict[str, dict[str, HistogramData]] = {}
        for (name, label), histogram in self._histograms.items():
            data = HistogramData(counts=list(histogram.counts), sum=histogram.total)
            read.setdefault(name, {})[label] = data
        return read

    def value(self, name: str, label: str = "") -> float:
        """Return one counter's number.

        Raises:
            KeyError: No such counter.
        """
        metric = BY_NAME[name]
        return self._counters[metric.name][label]
