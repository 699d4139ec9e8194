"""Snapshots become families: every series from the start, several engines in one registry, text that parsers accept."""

import json
import pickle

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from kvoffload.metrics.catalog import CATALOG, SERIES
from kvoffload.metrics.collector import OffloadCollector, collector_of
from kvoffload.metrics.exposition import MetricsExposition
from kvoffload.metrics.recorder import MetricsRecorder
from kvoffload.metrics.snapshot import MetricsSnapshot, SnapshotRelay, empty_snapshot

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


class Source:
    """An engine that counted this."""

    def __init__(self, engine="0", model="m", recorder=None, **values):
        self.engine, self.model = engine, model
        self.recorder = recorder or MetricsRecorder()
        self.values = values

    def metrics_snapshot(self) -> MetricsSnapshot:
        return MetricsSnapshot(
            labels={"model_name": self.model, "engine": self.engine},
            info={"version": "9", "policy": "lru"},
            values=self.recorder.read_counters() | self.values,
            histograms=self.recorder.read_histograms(),
        )


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse_text(text)
        for sample in family.samples
    }


def value(text: str, name: str, **labels: str) -> float:
    found = [
        number
        for (known, own), number in samples(text).items()
        if known == name and labels.items() <= dict(own).items()
    ]
    assert len(found) == 1, (name, labels, found)
    return found[0]


def test_every_series_of_the_catalog_is_there_at_zero_before_anything_happened():
    text = MetricsExposition(Source()).render()[0].decode()
    names = {name for name, _ in samples(text)}
    assert set(SERIES) - {"kvoffload_policy_value"} <= names
    for (name, labels), number in samples(text).items():
        if name in SERIES and SERIES[name].kind != "info":
            assert number == 0, (name, labels)
            assert set(dict(labels)) - {"le"} == set(SERIES[name].labels)


def test_an_empty_snapshot_exports_the_same_series_as_a_full_one():
    class Empty:
        def metrics_snapshot(self):
            return empty_snapshot({"model_name": "m", "engine": "0"}, {})

    full = samples(MetricsExposition(Source()).render()[0].decode())
    empty = samples(MetricsExposition(Empty()).render()[0].decode())
    ours = {key for key in full if key[0] in SERIES and SERIES[key[0]].kind != "info"}
    assert ours == {key for key in empty if key[0] in SERIES and SERIES[key[0]].kind != "info"}


def test_numbers_arrive_with_their_labels():
    source = Source(cache_blocks={"ready": 3, "free": 5})
    source.recorder.count("miss_blocks", 7, "evicted")
    source.recorder.observe("transfer_copy_seconds", 0.002, "load")
    text = MetricsExposition(source).render()[0].decode()
    assert value(text, "kvoffload_cache_blocks", state="ready") == 3
    assert value(text, "kvoffload_miss_blocks_total", cause="evicted", model_name="m", engine="0") == 7
    assert value(text, "kvoffload_transfer_copy_seconds_bucket", direction="load", le="0.002") == 1
    assert value(text, "kvoffload_transfer_copy_seconds_bucket", direction="load", le="0.001") == 0
    assert value(text, "kvoffload_transfer_copy_seconds_bucket", direction="load", le="+Inf") == 1
    assert value(text, "kvoffload_transfer_copy_seconds_count", direction="load") == 1
    assert value(text, "kvoffload_build_info", version="9") == 1


def test_openmetrics_is_rendered_when_asked_for_and_parses():
    body, content_type = MetricsExposition(Source()).render(OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text")
    families = {family.name: family.type for family in parse_openmetrics(body.decode())}
    assert body.endswith(b"# EOF\n")
    for metric in CATALOG:
        kind = "gauge" if metric.kind == "info" else metric.kind
        assert families["kvoffload_" + metric.name] == kind
    plain_type = MetricsExposition(Source()).render("text/plain")[1]
    assert plain_type.startswith("text/plain")


def test_two_engines_share_a_registry_and_each_family_appears_once():
    """A-P2: two alive at once in one registry."""
    registry = CollectorRegistry()
    Counter("application_own", "Of the application.", registry=registry)
    first, second = MetricsExposition(Source("0")), MetricsExposition(Source("1"))
    first.register(registry)
    second.register(registry)
    second.register(registry)
    text = generate_latest(registry).decode()
    assert text.count("# TYPE kvoffload_requests_total counter") == 1
    assert (
        value(text, "kvoffload_requests_total", engine="0") == value(text, "kvoffload_requests_total", engine="1") == 0
    )
    first.unregister()
    assert 'engine="0"' not in generate_latest(registry).decode()
    second.unregister()
    assert "kvoffload_requests_total{" not in generate_latest(registry).decode()


def test_engines_of_the_same_name_are_numbered_apart():
    collector = OffloadCollector(pause=lambda seconds: None)
    for _ in range(3):
        collector.add(Source("pod"))
    requests = next(family for family in collector.collect() if family.name == "kvoffload_requests")
    assert [sample.labels["engine"] for sample in requests.samples] == ["pod", "pod-2", "pod-3"]


def test_a_source_that_raises_or_is_gone_leaves_the_others_in_the_scrape(caplog):
    class Broken:
        def metrics_snapshot(self):
            raise RuntimeError("no snapshot today")

    registry = CollectorRegistry()
    collector = collector_of(registry)
    assert collector_of(registry) is collector
    collector.add(Broken())
    collector.add(SnapshotRelay())
    collector.add(Source("9"))
    assert value(generate_latest(registry).decode(), "kvoffload_requests_total", engine="9") == 0
    assert "no snapshot today" in caplog.text


def test_the_own_registry_has_the_process_and_no_host_name():
    text = MetricsExposition(Source()).render()[0].decode()
    assert "process_start_time_seconds" in text
    assert "process_resident_memory_bytes" in text
    assert "nodename" not in text


def test_multiprocess_mode_is_warned_about(monkeypatch, caplog):
    MetricsExposition(Source())
    assert not caplog.records
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/nowhere")
    MetricsExposition(Source())
    assert "PROMETHEUS_MULTIPROC_DIR" in caplog.text


@pytest.mark.parametrize("carry", [lambda data: json.loads(json.dumps(data)), lambda d: pickle.loads(pickle.dumps(d))])
def test_a_relayed_snapshot_exports_the_same_text(carry):
    source = Source()
    source.recorder.count("loaded_tokens", 12)
    source.recorder.observe("loop_lag_seconds", 0.004)
    relay = SnapshotRelay()
    relay.update(carry(source.metrics_snapshot()))
    ours = [line for line in MetricsExposition(source).render()[0].decode().splitlines() if "kvoffload" in line]
    assert ours == [line for line in MetricsExposition(relay).render()[0].decode().splitlines() if "kvoffload" in line]


def test_a_dead_engines_numbers_are_not_exported():
    now = [0.0]
    relay = SnapshotRelay(10.0, clock=lambda: now[0])
    exposition = MetricsExposition(relay)
    assert "kvoffload_requests_total{" not in exposition.render()[0].decode()
    relay.update(Source().metrics_snapshot())
    now[0] = 10.0
    assert "kvoffload_requests_total{" in exposition.render()[0].decode()
    now[0] = 10.1
    assert "kvoffload_requests_total{" not in exposition.render()[0].decode()


def changed(snapshot: MetricsSnapshot, **parts: object) -> object:
    return {**snapshot, **{name: {**snapshot[name], **part} for name, part in parts.items()}}


@pytest.mark.parametrize(
    "parts",
    [
        {"values": {"requests": {"": None}}},
        {"values": {"requests": {"": "x"}}},
        {"values": {"requests": [1]}},
        {"values": {"policy_value": {5: 1.0, "\ud800": 2.0}}},
        {"histograms": {"load_seconds": {"": {"counts": [1, 2], "sum": 1.0}}}},
        {"histograms": {"load_seconds": {"": None}, "of_tomorrow": {"": {"counts": [1], "sum": 1.0}}}},
        {"labels": {"model_name": 5, "engine": "\ud800"}},
    ],
    ids=repr,
)
def test_a_snapshot_from_another_version_does_not_spoil_the_front_ends_registry(parts, caplog):
    registry = CollectorRegistry()
    Counter("app", "The application's own.", registry=registry)
    relay = SnapshotRelay()
    MetricsExposition(relay).register(registry)
    relay.update(changed(Source(cache_blocks={"ready": 3}).metrics_snapshot(), **parts))
    text = generate_latest(registry).decode()
    assert value(text, "app_total") == 0
    assert value(text, "kvoffload_cache_blocks", state="ready") == 3
    assert len(caplog.records) == (0 if "labels" in parts or "policy_value" in parts.get("values", ()) else 1)


@pytest.mark.parametrize("wrong", [None, [1], {}, {"labels": None, "info": {}, "values": {}, "histograms": {}}])
def test_what_is_no_snapshot_is_not_taken(wrong):
    relay = SnapshotRelay()
    relay.update(Source().metrics_snapshot())
    before = relay.metrics_snapshot()
    relay.update(wrong)
    assert relay.metrics_snapshot() is before


def test_an_empty_snapshot_is_taken():
    relay = SnapshotRelay()
    relay.update(empty_snapshot({"model_name": "m", "engine": "7"}, {}))
    assert value(MetricsExposition(relay).render()[0].decode(), "kvoffload_requests_total", engine="7") == 0


def test_an_engine_keeps_its_number_when_another_of_its_name_leaves():
    """Else its counters would go on under the other's name, and Prometheus would see a reset."""
    registry = CollectorRegistry()
    first, second, third = Source(requests={"": 7}), Source(requests={"": 9}), Source(requests={"": 1})
    collector = collector_of(registry)
    collector.add(first)
    collector.add(second)
    assert value(generate_latest(registry).decode(), "kvoffload_requests_total", engine="0-2") == 9
    collector.remove(first)
    text = generate_latest(registry).decode()
    assert value(text, "kvoffload_requests_total") == value(text, "kvoffload_requests_total", engine="0-2") == 9
    collector.add(third)
    assert value(generate_latest(registry).decode(), "kvoffload_requests_total", engine="0") == 1
