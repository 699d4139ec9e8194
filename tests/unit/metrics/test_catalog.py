"""The catalog is the one table: consistent in itself, and every name counted in the code is in it."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

import kvoffload
from kvoffload.metrics.catalog import BY_NAME, CATALOG, LOAD_REASONS, MISS_CAUSES, SERIES, STORE_REASONS
from kvoffload.metrics.metric import CONSTANT_LABELS
from kvoffload.metrics.recorder import MetricsRecorder
from kvoffload.service.history import Cause
from kvoffload.service.results import LoadOutcome, StoreReason

PACKAGE = Path(kvoffload.__file__).parent


def test_names_are_unique_and_series_do_not_collide():
    assert len(BY_NAME) == len(CATALOG)
    assert len(SERIES) == sum(len(metric.series_names) for metric in CATALOG)


@pytest.mark.parametrize("metric", CATALOG, ids=lambda metric: metric.name)
def test_each_metric_follows_the_conventions(metric):
    assert metric.full_name.startswith("kvoffload_")
    assert metric.full_name.endswith("_total") == (metric.kind == "counter")
    assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket"))
    assert metric.help.endswith(".")
    assert metric.action.endswith(".")
    assert metric.label not in CONSTANT_LABELS
    assert len(metric.values) <= 12, "labels are few and bounded"
    assert (metric.kind == "histogram") == bool(metric.buckets)
    assert list(metric.buckets) == sorted(set(metric.buckets))
    if metric.unit in ("seconds", "bytes"):
        assert metric.unit in metric.name


def test_time_buckets_span_ten_microseconds_to_ten_seconds_and_size_buckets_4_kib_to_1_gib():
    waits, sizes = BY_NAME["transfer_copy_seconds"].buckets, BY_NAME["transfer_size_bytes"].buckets
    assert (waits[0], waits[-1]) == (1e-5, 10.0)
    assert (sizes[0], sizes[-1]) == (4096, 1 << 30)


def test_labels_cover_every_cause_outcome_and_reason_of_the_service():
    assert {"new", *get_args(Cause)} < set(MISS_CAUSES)
    assert {outcome.value for outcome in LoadOutcome} < set(BY_NAME["loads"].values)
    assert set(StoreReason.__args__) < set(STORE_REASONS)
    assert "copy_failed" in LOAD_REASONS


def counted() -> Iterator[tuple[str, int, str, str | None, str | None]]:
    """Every literal call of a sink's `count` and `observe` in the package."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr not in ("count", "_count", "observe") or not node.args:
                continue
            name = node.args[0]
            owner = ast.unparse(node.func.value)
            ours = "metrics" in owner.lower() or path.parent.name == "service"
            if not (ours and isinstance(name, ast.Constant) and isinstance(name.value, str)):
                continue
            labels = [item.value for item in node.keywords if item.arg == "label"] + node.args[2:3]
            label = labels[0].value if labels and isinstance(labels[0], ast.Constant) else None
            has_label = label if labels else ""
            yield path.name, node.lineno, node.func.attr.lstrip("_"), name.value, has_label


def test_every_name_and_literal_label_that_the_code_counts_is_in_the_catalog():
    calls = list(counted())
    assert len(calls) > 30
    for path, line, how, name, label in calls:
        where = f"{path}:{line}"
        assert name in BY_NAME, where
        metric = BY_NAME[name]
        assert metric.kind == ("counter" if how == "count" else "histogram"), where
        assert label is None or label in metric.values, where


def test_every_counter_and_histogram_is_fed_somewhere():
    fed = {name for _, _, _, name, _ in counted()} | {"metrics_errors"}
    text = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "catalog.py")
    for metric in CATALOG:
        if metric.kind != "info" and metric.name not in fed:
            assert f'"{metric.name}"' in text, f"{metric.name} is never given a value"


def test_the_recorder_starts_every_series_at_zero():
    recorder = MetricsRecorder()
    counters = recorder.read_counters()
    histograms = recorder.read_histograms()
    for metric in CATALOG:
        if metric.kind == "counter":
            assert counters[metric.name] == dict.fromkeys(metric.values, 0)
        if metric.kind == "histogram":
            assert set(histograms[metric.name]) == set(metric.values)
