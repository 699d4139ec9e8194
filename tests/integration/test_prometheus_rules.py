"""promtool accepts what ships, and each alert fires when it should and stays silent when it should."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from integration.prometheus_tools import DASHBOARDS, promtool

from kvoffload.metrics.exposition import MetricsExposition
from kvoffload.metrics.recorder import MetricsRecorder
from kvoffload.metrics.snapshot import MetricsSnapshot

pytestmark = pytest.mark.integration
LABELS = 'instance="pod:9464", job="kvoffload", model_name="m", engine="0"'
HOUR = 60


@dataclass(frozen=True)
class Case:
    """Series by minute, and whether the alert is firing at some minute.

    Attributes:
        series: Name, with the metric's own label in braces, and promtool's notation of its values.
        at: Minute of the question.
        fires: How many alerts of that name fire then.
    """

    alert: str
    why: str
    series: dict[str, str]
    at: int
    fires: int


NEVER = {
    "kvoffload_hit_tokens_total": "0x300",
    "kvoffload_requests_total": "0+10x300",
    "kvoffload_enabled": "1x300",
    "kvoffload_start_time_seconds": "0x300",
}
COSTLY = {
    "kvoffload_load_seconds_sum": "0+20x300",
    "kvoffload_load_seconds_count": "0+60x300",
    "kvoffload_prefill_seconds_saved_total": "0+10x300",
}
PINNED = {
    'kvoffload_cache_blocks{state="pinned"}': "60x60",
    'kvoffload_cache_blocks{state="writing"}': "32x60",
    'kvoffload_cache_blocks{state="ready"}': "8x60",
    'kvoffload_cache_blocks{state="free"}': "0x60",
    "kvoffload_cache_capacity_blocks": "100x60",
}
REJECTED = {
    'kvoffload_store_blocks_total{outcome="stored"}': "0+900x120",
    'kvoffload_store_blocks_total{outcome="rejected"}': "0+100x120",
    'kvoffload_unstored_blocks_total{reason="no_space"}': "0+60x120",
    'kvoffload_unstored_blocks_total{reason="backpressure"}': "0+40x120",
}
UNHEARD = {
    "kvoffload_feed_subscribers": "0x120",
    "kvoffload_feed_enabled": "1x120",
    "kvoffload_start_time_seconds": "0x120",
}
SLOW_LOOP = {
    'kvoffload_loop_lag_seconds_bucket{le="0.05"}': "0+200x60",
    'kvoffload_loop_lag_seconds_bucket{le="0.25"}': "0+240x60",
    'kvoffload_loop_lag_seconds_bucket{le="+Inf"}': "0+240x60",
}
MISSING_RANK = {
    "kvoffload_healthy": "0x9",
    "kvoffload_enabled": "1x9",
    "kvoffload_ranks_up": "1x9",
    "kvoffload_ranks_expected": "2x9",
}
QUICK_LOOP = dict.fromkeys(SLOW_LOOP, "0+240x60")

CASES = (
    Case(
        "KvoffloadUnhealthy", "unhealthy for minutes", {"kvoffload_healthy": "0x10", "kvoffload_enabled": "1x10"}, 4, 1
    ),
    Case("KvoffloadUnhealthy", "healthy", {"kvoffload_healthy": "1x10", "kvoffload_enabled": "1x10"}, 4, 0),
    Case("KvoffloadUnhealthy", "a moment", {"kvoffload_healthy": "1 0 1x10", "kvoffload_enabled": "1x10"}, 4, 0),
    Case(
        "KvoffloadUnhealthy",
        "closed, not started or off",
        {"kvoffload_healthy": "0x9", "kvoffload_enabled": "0x9"},
        4,
        0,
    ),
    Case(
        "KvoffloadRankDown", "one of two ranks", {"kvoffload_ranks_up": "1x9", "kvoffload_ranks_expected": "2x9"}, 4, 1
    ),
    Case("KvoffloadRankDown", "all ranks", {"kvoffload_ranks_up": "2x9", "kvoffload_ranks_expected": "2x9"}, 4, 0),
    Case("KvoffloadRankDown", "a missing rank pages once", MISSING_RANK, 4, 1),
    Case("KvoffloadUnhealthy", "a missing rank pages once", MISSING_RANK, 4, 0),
    Case(
        "KvoffloadUnhealthy",
        "all ranks are up, something else is wrong",
        {**MISSING_RANK, "kvoffload_ranks_up": "2x9"},
        4,
        1,
    ),
    Case(
        "KvoffloadTransferFailures",
        "several failures",
        {'kvoffload_transfer_failures_total{direction="load"}': "0 1 2 3 4 5x20"},
        10,
        1,
    ),
    Case(
        "KvoffloadTransferFailures",
        "one failure long ago",
        {'kvoffload_transfer_failures_total{direction="load"}': "0 1x40"},
        30,
        0,
    ),
    Case(
        "KvoffloadQuarantine",
        "blocks that stay quarantined",
        {
            'kvoffload_gpu_blocks{state="quarantined"}': "4x20",
            'kvoffload_cache_blocks{state="quarantined"}': "4x20",
        },
        10,
        1,
    ),
    Case(
        "KvoffloadQuarantine",
        "a copy that ended late",
        {
            'kvoffload_gpu_blocks{state="quarantined"}': "4 4 0x20",
            'kvoffload_cache_blocks{state="quarantined"}': "4 4 0x20",
        },
        10,
        0,
    ),
    Case("KvoffloadNeverHits", "traffic without a hit", NEVER, 3 * HOUR, 1),
    Case("KvoffloadNeverHits", "one hit", NEVER | {"kvoffload_hit_tokens_total": "0x150 64x150"}, 3 * HOUR, 0),
    Case("KvoffloadNeverHits", "no traffic", NEVER | {"kvoffload_requests_total": "0x300"}, 3 * HOUR, 0),
    Case("KvoffloadNeverHits", "switched off", NEVER | {"kvoffload_enabled": "0x300"}, 3 * HOUR, 0),
    Case("KvoffloadNeverHits", "young", NEVER | {"kvoffload_start_time_seconds": "6000x300"}, 3 * HOUR, 0),
    Case("KvoffloadCostsMoreThanItSaves", "twice the cost", COSTLY, 2 * HOUR, 1),
    Case(
        "KvoffloadCostsMoreThanItSaves",
        "a tenth of the cost",
        COSTLY | {"kvoffload_load_seconds_sum": "0+1x300"},
        120,
        0,
    ),
    Case(
        "KvoffloadCostsMoreThanItSaves",
        "the saving is not known",
        COSTLY | {"kvoffload_prefill_seconds_saved_total": "0x300"},
        2 * HOUR,
        0,
    ),
    Case(
        "KvoffloadCostsMoreThanItSaves", "hardly a load", COSTLY | {"kvoffload_load_seconds_count": "0+1x300"}, 120, 0
    ),
    Case("KvoffloadPoolPinned", "92 of 100 held", PINNED, 20, 1),
    Case(
        "KvoffloadPoolPinned",
        "full of ready blocks",
        PINNED
        | {
            'kvoffload_cache_blocks{state="ready"}': "95x60",
            'kvoffload_cache_blocks{state="pinned"}': "3x60",
            'kvoffload_cache_blocks{state="writing"}': "2x60",
        },
        20,
        0,
    ),
    Case("KvoffloadStoresRejected", "a tenth is rejected", REJECTED, 40, 1),
    Case(
        "KvoffloadStoresRejected",
        "rejected on purpose",
        {name: value for name, value in REJECTED.items() if "unstored" not in name}
        | {'kvoffload_unstored_blocks_total{reason="paused"}': "0+100x120"},
        40,
        0,
    ),
    Case(
        "KvoffloadStoresRejected",
        "a few of few",
        {
            name: value.replace("00x", "x").replace("+60x", "+1x").replace("+40x", "+0x")
            for name, value in REJECTED.items()
        },
        40,
        0,
    ),
    Case(
        "KvoffloadFeedLosing",
        "drops go on",
        {"kvoffload_feed_dropped_batches_total": "0+5x60", "kvoffload_feed_enabled": "1x60"},
        25,
        1,
    ),
    Case(
        "KvoffloadFeedLosing",
        "nothing dropped",
        {"kvoffload_feed_dropped_batches_total": "5x60", "kvoffload_feed_enabled": "1x60"},
        25,
        0,
    ),
    Case("KvoffloadFeedUnheard", "on and unheard", UNHEARD, 40, 1),
    Case("KvoffloadFeedUnheard", "one subscriber", UNHEARD | {"kvoffload_feed_subscribers": "1x120"}, 40, 0),
    Case("KvoffloadFeedUnheard", "off", UNHEARD | {"kvoffload_feed_enabled": "0x120"}, 40, 0),
    Case("KvoffloadFeedUnheard", "young", UNHEARD | {"kvoffload_start_time_seconds": "2000x120"}, 40, 0),
    Case("KvoffloadLoopLag", "a blocked loop", SLOW_LOOP, 30, 1),
    Case("KvoffloadLoopLag", "a quick loop", QUICK_LOOP, 30, 0),
)


def series(name: str) -> str:
    base, _, own = name.partition("{")
    return f"{base}{{{LABELS}{', ' + own.rstrip('}') if own else ''}}}"


def test_promtool_accepts_the_configuration_and_the_rules():
    assert "SUCCESS" in promtool("check", "config", DASHBOARDS / "prometheus.yml")
    assert "SUCCESS" in promtool("check", "rules", DASHBOARDS / "alerts.yml", DASHBOARDS / "recording.yml")


def test_promtool_lints_every_exported_name_without_a_complaint():
    recorder = MetricsRecorder()

    class Source:
        def metrics_snapshot(self) -> MetricsSnapshot:
            return MetricsSnapshot(
                labels={"model_name": "m", "engine": "0"},
                info={},
                values=recorder.read_counters(),
                histograms=recorder.read_histograms(),
            )

    text = MetricsExposition(Source()).render()[0].decode()
    assert promtool("check", "metrics", text=text) == ""


def test_every_alert_has_a_case_that_fires_and_one_that_is_silent():
    rules = yaml.safe_load((DASHBOARDS / "alerts.yml").read_text())
    names = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    assert {case.alert for case in CASES if case.fires} == names
    assert {case.alert for case in CASES if not case.fires} == names


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.alert}: {case.why}")
def test_alerts_fire_when_they_should_and_stay_silent_when_they_should(case: Case, tmp_path: Path):
    firing = f'count(ALERTS{{alertname="{case.alert}", alertstate="firing"}})'
    suite = {
        "rule_files": [str(DASHBOARDS / "alerts.yml")],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": series(name), "values": values} for name, values in case.series.items()],
                "promql_expr_test": [
                    {
                        "expr": firing,
                        "eval_time": f"{case.at}m",
                        "exp_samples": [{"labels": "{}", "value": case.fires}] if case.fires else [],
                    }
                ],
            }
        ],
    }
    path = tmp_path / "suite.yml"
    path.write_text(yaml.safe_dump(suite))
    promtool("test", "rules", path)


def test_recording_rules_compute_what_their_names_say(tmp_path: Path):
    inputs = {
        "kvoffload_hit_tokens_total": "0+25x20",
        "kvoffload_prompt_tokens_total": "0+100x20",
        'kvoffload_cache_blocks{state="free"}': "25x20",
        'kvoffload_cache_blocks{state="pinned"}': "10x20",
        'kvoffload_cache_blocks{state="writing"}': "5x20",
        "kvoffload_cache_capacity_blocks": "100x20",
        'kvoffload_transfer_bytes_total{direction="load"}': "0+6000x20",
        'kvoffload_transfer_copy_seconds_sum{direction="load"}': "0+3x20",
        'kvoffload_link_bytes_per_second{direction="load"}': "1000x20",
        'kvoffload_miss_blocks_total{cause="new"}': "0+120x20",
        "kvoffload_prefill_seconds_saved_total": "0+60x20",
        "kvoffload_load_seconds_sum": "0+30x20",
        'kvoffload_load_seconds_bucket{le="0.1"}': "0+99x20",
        'kvoffload_load_seconds_bucket{le="0.3"}': "0+100x20",
        'kvoffload_load_seconds_bucket{le="+Inf"}': "0+100x20",
    }
    expected = {
        "kvoffload:hit_tokens:ratio_rate5m": 0.25,
        "kvoffload:cache_used:ratio": 0.75,
        "kvoffload:cache_held:ratio": 0.15,
        "kvoffload:transfer_bytes:rate5m": 100,
        "kvoffload:copy_speed:bytes_per_second_rate5m": 2000,
        "kvoffload:link_used:ratio_rate5m": 0.1,
        "kvoffload:miss_blocks:rate5m": 2,
        "kvoffload:net_saved_seconds:rate5m": 0.5,
        "kvoffload:load_seconds:p99_rate5m": 0.1,
    }
    rules = yaml.safe_load((DASHBOARDS / "recording.yml").read_text())
    assert {rule["record"] for group in rules["groups"] for rule in group["rules"]} == set(expected)
    suite = {
        "rule_files": [str(DASHBOARDS / "recording.yml")],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": series(name), "values": values} for name, values in inputs.items()],
                "promql_expr_test": [
                    {"expr": f"sum({name})", "eval_time": "15m", "exp_samples": [{"labels": "{}", "value": value}]}
                    for name, value in expected.items()
                ],
            }
        ],
    }
    path = tmp_path / "suite.yml"
    path.write_text(yaml.safe_dump(suite))
    promtool("test", "rules", path)
