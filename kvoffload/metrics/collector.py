"""`OffloadCollector`: snapshots become Prometheus families when somebody scrapes.

One collector serves a registry, however many engines are in it, because a family may appear only once in a scrape.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector, CollectorRegistry

from kvoffload.metrics.catalog import CATALOG
from kvoffload.metrics.metric import CONSTANT_LABELS, INFO_LABELS, PREFIX, Metric
from kvoffload.metrics.snapshot import HistogramData, MetricsSnapshot, SnapshotSource

logger = logging.getLogger(__name__)

# A pause between families lets the loop's thread have the interpreter; one family takes far less than the 5 ms after
# which it would insist.
_PAUSE_SECONDS = 20e-6


class OffloadCollector(Collector):
    """Exports the engines that were added, told apart by their constant labels.

    Args:
        pause: Called between families with seconds to sleep.
    """

    def __init__(self, pause: Callable[[float], None] = time.sleep) -> None:
        self._entries: list[_Entry] = []
        self._lock = threading.Lock()
        self._pause = pause

    def describe(self) -> Iterable[Family]:
        """Return nothing: names need no check, and registering must not take a snapshot."""
        return ()

    def add(self, source: SnapshotSource) -> None:
        """Export one more engine."""
        with self._lock:
            self._entries.append(_Entry(source))

    def remove(self, source: SnapshotSource) -> None:
        """Stop exporting an engine; unknown ones are ignored."""
        with self._lock:
            self._entries = [entry for entry in self._entries if entry.source is not source]

    def collect(self) -> Iterator[Family]:
        """Yield each family of the catalog once."""
        with self._lock:
            entries = list(self._entries)
        read = [(entry, snapshot) for entry in entries if (snapshot := _read(entry.source)) is not None]
        with self._lock:
            snapshots = [(self._name(entry, snapshot), snapshot) for entry, snapshot in read]
        for metric in CATALOG:
            yield _family(metric, snapshots)
            self._pause(_PAUSE_SECONDS)

    def _name(self, entry: _Entry, snapshot: MetricsSnapshot) -> tuple[str, ...]:
        """Return an engine's constant labels; of the same name, later ones get a number and keep it; lock held."""
        labels = snapshot["labels"]
        own = tuple(labels.get(label, "") for label in CONSTANT_LABELS)
        if entry.own != own:
            taken = {other.unique for other in self._entries if other is not entry}
            entry.own = entry.unique = own
            number = 1
            while entry.unique in taken:
                number += 1
                entry.unique = (*own[:-1], f"{own[-1]}-{number}")
        return entry.unique


class _Entry:
    """One engine of a registry: its constant labels, as it says them and as they are exported."""

    __slots__ = ("own", "source", "unique")

    def __init__(self, source: SnapshotSource) -> None:
        self.source = source
        self.own: tuple[str, ...] = ()
        self.unique: tuple[str, ...] = ()


def _read(source: SnapshotSource) -> MetricsSnapshot | None:
    try:
        return source.metrics_snapshot()
    except Exception:
        logger.exception("an engine's metrics could not be read")
        return None


def _family(metric: Metric, snapshots: Sequence[tuple[tuple[str, ...], MetricsSnapshot]]) -> Family:
    name = PREFIX + metric.name
    if metric.kind == "info":
        info = GaugeMetricFamily(name, metric.help, labels=[*CONSTANT_LABELS, *INFO_LABELS])
        for constant, snapshot in snapshots:
            info.add_metric([*constant, *(snapshot["info"].get(label, "") for label in INFO_LABELS)], 1)
        return info
    labels = [*CONSTANT_LABELS, metric.label] if metric.label else [*CONSTANT_LABELS]
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(name, metric.help, labels=labels)
        for constant, snapshot in snapshots:
            _add_histogram(histogram, metric, constant, snapshot["histograms"].get(metric.name, {}))
        return histogram
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(name, metric.help, labels=labels)
    for constant, snapshot in snapshots:
        known = snapshot["values"].get(metric.name, {})
        for value in metric.values or known:
            family.add_metric([*constant, value] if metric.label else list(constant), known.get(value, 0))
    return family


def _add_histogram(
    family: HistogramMetricFamily, metric: Metric, constant: tuple[str, ...], known: Mapping[str, HistogramData]
) -> None:
    for value in metric.values:
        data = known.get(value) or HistogramData(counts=[0] * (len(metric.buckets) + 1), sum=0.0)
        buckets, below = [], 0
        for bound, count in zip((*(repr(bound) for bound in metric.buckets), "+Inf"), data["counts"], strict=True):
            below += count
            buckets.append((bound, below))
        family.add_metric([*constant, value] if metric.label else list(constant), buckets, data["sum"])


_by_registry: weakref.WeakKeyDictionary[CollectorRegistry, weakref.ref[OffloadCollector]] = weakref.WeakKeyDictionary()
"""The registry keeps its collector alive; a strong reference here would keep both, and their engines, for ever."""
_by_registry_lock = threading.Lock()


def collector_of(registry: CollectorRegistry) -> OffloadCollector:
    """Return the one collector of a registry, registered at its first use."""
    with _by_registry_lock:
        known = _by_registry.get(registry)
        collector = known() if known is not None else None
        if collector is None:
            collector = OffloadCollector()
            _by_registry[registry] = weakref.ref(collector)
            registry.register(collector)
        return collector
