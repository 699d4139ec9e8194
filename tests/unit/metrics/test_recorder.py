"""Counting never raises, and what it says is what was counted."""

import json
import logging
from decimal import Decimal

import numpy as np
import pytest

from kvoffload.metrics.recorder import MetricsRecorder


@pytest.fixture
def recorder():
    return MetricsRecorder()


def test_counts_add_up_per_label(recorder):
    recorder.count("transfer_bytes", 10, "load")
    recorder.count("transfer_bytes", 5, "load")
    recorder.count("transfer_bytes", 1, "store")
    assert recorder.read_counters()["transfer_bytes"] == {"load": 15, "store": 1}
    assert recorder.value("transfer_bytes", "load") == 15


def test_an_observation_falls_into_the_first_bucket_that_holds_it(recorder):
    for seconds in (0.0, 1e-5, 1.1e-5, 10.0, 11.0):
        recorder.observe("load_seconds", seconds)
    data = recorder.read_histograms()["load_seconds"][""]
    assert (data["counts"][0], data["counts"][1], data["counts"][-2], data["counts"][-1]) == (2, 1, 1, 1)
    assert data["sum"] == pytest.approx(21.000021)


class Incomparable:
    """Not even comparing it works."""

    def __le__(self, other):
        raise RuntimeError("no")

    __ge__ = __lt__ = __gt__ = __le__


@pytest.mark.parametrize("odd", [np.zeros(2), Incomparable(), Decimal(1), 1j, 10**400], ids=repr)
def test_a_value_of_an_odd_type_neither_raises_nor_spoils_what_is_counted_later(recorder, odd):
    recorder.count("requests", odd)
    recorder.observe("load_seconds", odd)
    assert recorder.value("metrics_errors") == 2
    recorder.count("requests", 1)
    recorder.observe("load_seconds", 0.5)
    assert recorder.value("requests") == 1
    data = recorder.read_histograms()["load_seconds"][""]
    assert (sum(data["counts"]), data["sum"]) == (1, 0.5)


def test_another_librarys_numbers_become_pythons_own_so_that_counts_stay_exact_and_json(recorder):
    recorder.count("requests", 2**25)
    recorder.count("requests", np.float32(1))
    recorder.count("requests", np.int64(1))
    recorder.observe("load_seconds", np.float32(0.5))
    assert recorder.value("requests") == 2**25 + 2
    json.dumps([recorder.read_counters(), recorder.read_histograms()])


@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf"), None, "3", [], 1e30, -float("inf")])
def test_a_bad_value_is_ignored_counted_and_named_once(recorder, bad, caplog):
    """A-P1: a negative increment does not kill the request."""
    with caplog.at_level(logging.WARNING):
        recorder.count("transfer_bytes", bad, "load")
        recorder.observe("transfer_copy_seconds", bad, "load")
    assert recorder.value("metrics_errors") == 2
    assert recorder.value("transfer_bytes", "load") == 0
    assert recorder.read_histograms()["transfer_copy_seconds"]["load"]["sum"] == 0
    assert len(caplog.records) == 1
    assert "transfer_bytes" in caplog.text


@pytest.mark.parametrize(
    ("name", "label"), [("no_such", ""), ("transfer_bytes", "sideways"), ("requests", "x"), (None, ""), (["a"], [])]
)
def test_an_unknown_name_or_label_is_counted_not_raised(recorder, name, label):
    recorder.count(name, 1, label)
    recorder.observe(name, 1.0, label)
    assert recorder.value("metrics_errors") == 2


def test_an_unknown_reason_is_booked_as_other(recorder):
    recorder.count("unserved_loads", 2, "a reason of tomorrow")
    assert recorder.value("unserved_loads", "other") == 2
    assert recorder.value("metrics_errors") == 0


def test_what_was_read_does_not_change_later(recorder):
    before = recorder.read_counters(), recorder.read_histograms()
    recorder.count("requests")
    recorder.observe("load_seconds", 1.0)
    assert before[0]["requests"] == {"": 0}
    assert sum(before[1]["load_seconds"][""]["counts"]) == 0
