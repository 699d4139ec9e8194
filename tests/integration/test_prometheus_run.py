"""A real run, scraped by the real Prometheus with the project's own files: every panel has data, every sum is exact."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from integration.prometheus_tools import DASHBOARDS, Prometheus, program, prometheus, promtool

from kvoffload.cli.metrics_server import MetricsServer
from kvoffload.config import EventsConfig, OffloadConfig
from kvoffload.service.service import OffloadService
from kvoffload.simulate.drive import DriveOptions, DriveResult, drive
from kvoffload.simulate.workload import Workload

pytestmark = pytest.mark.integration
BLOCK_BYTES = 16 << 10
FACTOR = 2
PLACEHOLDERS = {"$__rate_interval": "5m", "$instance": ".*", "$model": ".*"}


def panel_expressions() -> dict[str, str]:
    """Every expression of every dashboard, by panel and place."""
    found = {}
    for path in sorted((DASHBOARDS / "grafana").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                expression = target["expr"]
                for name, value in PLACEHOLDERS.items():
                    expression = expression.replace(name, value)
                found[f"{path.stem}: {panel['title']} {target['refId']}"] = expression
    return found


@dataclass
class Observed:
    """What Prometheus knew at the end of the run, and what the run itself reported."""

    result: DriveResult = field(default_factory=DriveResult)
    panels: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    recorded: dict[str, int] = field(default_factory=dict)
    firing: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""


SUMS = {
    "loaded bytes": 'sum(kvoffload_transfer_bytes_total{direction="load"})',
    "stored bytes": 'sum(kvoffload_transfer_bytes_total{direction="store"})',
    "loaded tokens": "sum(kvoffload_loaded_tokens_total)",
    "evicted blocks": 'sum(kvoffload_removed_blocks_total{reason="evicted"})',
    "stored blocks": 'sum(kvoffload_store_blocks_total{outcome="stored"})',
    "requests": "sum(kvoffload_requests_total)",
    "looked for": "sum(kvoffload_requested_blocks_total)",
    "found": "sum(kvoffload_hit_blocks_total) + sum(kvoffload_pending_blocks_total)",
    "missed": "sum(kvoffload_miss_blocks_total)",
    "blocks in a state": "sum(kvoffload_cache_blocks)",
    "capacity": "sum(kvoffload_cache_capacity_blocks)",
    "lookup hits": 'sum(kvoffload_lookups_total{result="hit"})',
    "announced": "sum(kvoffload_feed_announced_blocks)",
    "withheld": "sum(kvoffload_feed_withheld_blocks)",
    "readable": 'sum(kvoffload_cache_blocks{state=~"ready|pinned"})',
    "metrics errors": "sum(kvoffload_metrics_errors_total)",
}
RECORDED = (
    "kvoffload:hit_tokens:ratio_rate5m", "kvoffload:miss_blocks:rate5m", "kvoffload:cache_used:ratio",
    "kvoffload:cache_held:ratio", "kvoffload:transfer_bytes:rate5m", "kvoffload:copy_speed:bytes_per_second_rate5m",
    "kvoffload:link_used:ratio_rate5m", "kvoffload:net_saved_seconds:rate5m", "kvoffload:load_seconds:p99_rate5m",
)  # fmt: skip


def look(server: Prometheus, ended: float, observed: Observed) -> None:
    """Wait until everything was scraped after the end, then ask."""
    server.wait_for(f"timestamp(kvoffload_requests_total) > {ended} and kvoffload_feed_queue_events == 0")
    observed.sums = {name: server.value(expression) for name, expression in SUMS.items()}
    server.wait_for("timestamp(kvoffload:hit_tokens:ratio_rate5m) > 0")
    observed.panels = {name: server.query(expression) for name, expression in panel_expressions().items()}
    observed.recorded = {name: len(server.query(name)) for name in RECORDED}
    observed.firing = server.query('ALERTS{alertstate="firing"}')


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    program("KVOFFLOAD_PROMETHEUS")
    seen = Observed()
    workload = Workload(seed=5, limit=1200, keep_partial=True)
    measured = workload.measure()
    blocks = measured.unique_blocks // 10 // FACTOR
    config = OffloadConfig(
        cpu_bytes_to_use=blocks * FACTOR * BLOCK_BYTES,
        gpu_block_size=workload.block_tokens,
        block_size=FACTOR * workload.block_tokens,
        eviction_policy="adaptive",
        model_name="simulated",
        instance_id="run-1",
        events=EventsConfig(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0"),
    )
    options = DriveOptions(block_bytes=BLOCK_BYTES, concurrency=8)
    folder = tmp_path_factory.mktemp("prometheus")
    with MetricsServer("127.0.0.1", 0) as metrics, prometheus(folder, [metrics.url.removeprefix("http://")]) as server:

        @asynccontextmanager
        async def beside(service: OffloadService) -> AsyncIterator[None]:
            metrics.show(service.metrics, lambda: service.health().ok)
            await asyncio.to_thread(server.wait_for, "kvoffload_healthy == 1")
            yield
            ended = (await asyncio.to_thread(server.query, "time()"))[1]
            await asyncio.to_thread(look, server, float(ended), seen)
            seen.text = (await service.metrics.render_in_thread())[0].decode()

        seen.result = asyncio.run(drive(workload, measured, config, options, beside=beside))
    return seen


@pytest.mark.parametrize("panel", list(panel_expressions()))
def test_every_panel_expression_returns_data(observed, panel):
    """A-P4."""
    values = [float(sample["value"][1]) for sample in observed.panels[panel]]
    assert values, panel_expressions()[panel]
    assert not all(math.isnan(value) for value in values), panel_expressions()[panel]


def test_sums_in_prometheus_equal_the_runs_own_report(observed):
    sums, result = observed.sums, observed.result
    assert sums["loaded bytes"] == result.stats.loaded_bytes > 0
    assert sums["stored bytes"] == result.stats.stored_bytes > 0
    assert sums["loaded bytes"] == result.loaded_blocks * BLOCK_BYTES
    assert sums["loaded tokens"] == result.loaded_blocks * 64
    assert sums["evicted blocks"] == result.stats.manager.evicted > 0
    assert sums["stored blocks"] * FACTOR == result.stored_blocks
    assert sums["lookup hits"] == result.stats.manager.hits > 0
    assert sums["requests"] == result.requests
    assert sums["metrics errors"] == 0


def test_misses_by_cause_add_up_in_prometheus(observed):
    sums = observed.sums
    assert sums["looked for"] == sums["found"] + sums["missed"]
    assert sums["blocks in a state"] == sums["capacity"] > 0


def test_the_feed_has_announced_what_is_readable(observed):
    """Two offloaded blocks may share their first engine block, which is announced once."""
    sums = observed.sums
    assert 0.9 * FACTOR * sums["readable"] < sums["announced"] + sums["withheld"] <= FACTOR * sums["readable"]


def test_every_recording_rule_was_evaluated(observed):
    assert all(observed.recorded.values()), observed.recorded


def test_no_alert_fires_on_a_healthy_run(observed):
    assert observed.firing == []


def test_promtool_lints_a_real_scrape_without_a_complaint(observed):
    assert promtool("check", "metrics", text=observed.text) == ""
