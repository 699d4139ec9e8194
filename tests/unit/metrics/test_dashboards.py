"""Dashboards, alerts and rules cannot drift: every expression is read against the catalog."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import promql_parser
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from reference.promql_check import GRAFANA, check

from kvoffload.metrics.catalog import CATALOG, SERIES

ROOT = Path(__file__).parents[3]
DASHBOARDS = sorted((ROOT / "dashboards" / "grafana").glob("*.json"))
RECORDING = yaml.safe_load((ROOT / "dashboards" / "recording.yml").read_text())
ALERTS = yaml.safe_load((ROOT / "dashboards" / "alerts.yml").read_text())
RECORDED = {rule["record"]: check(rule["expr"]).unit for group in RECORDING["groups"] for rule in group["rules"]}
PLACEHOLDERS = {"$__rate_interval": "1m", "$instance": ".*", "$model": ".*"}


def plain(expression: str) -> str:
    for name, value in PLACEHOLDERS.items():
        expression = expression.replace(name, value)
    assert "$" not in expression, expression
    return expression


def panels():
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            if panel["type"] != "row":
                yield pytest.param(panel, id=f"{path.stem.removeprefix('kvoffload-')}: {panel['title']}")


def alerts():
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            yield pytest.param(rule, id=rule["alert"])


def recording_rules():
    for group in RECORDING["groups"]:
        for rule in group["rules"]:
            yield pytest.param(rule, id=rule["record"])


@pytest.mark.parametrize("panel", list(panels()))
def test_every_panels_expressions_exist_in_the_catalog_and_fit_its_unit(panel):
    """A-P4."""
    for target in panel["targets"]:
        finding = check(plain(target["expr"]))
        assert not finding.wrong, target["expr"]
        unit = panel["fieldConfig"]["defaults"]["unit"]
        assert finding.unit is None or finding.unit in GRAFANA[unit], (unit, finding.unit, target["expr"])


@pytest.mark.parametrize("panel", list(panels()))
def test_every_panel_reads_like_a_panel(panel):
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert len(panel["description"]) > 30
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    assert steps[0]["value"] is None
    for target in panel["targets"]:
        assert target["datasource"] == panel["datasource"]
        for selector in re.findall(r"kvoffload_\w+\{([^}]*)\}", target["expr"]):
            assert selector.startswith('instance=~"$instance", model_name=~"$model"')
        kept = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
        for label in kept:
            assert label in target["expr"] or label in ("instance", "engine"), (label, target["expr"])


@pytest.mark.parametrize("rule", list(alerts()))
def test_every_alert_exists_in_the_catalog_and_says_what_to_do(rule):
    finding = check(rule["expr"], RECORDED)
    assert not finding.wrong
    assert rule["labels"]["severity"] in ("page", "ticket")
    notes = rule["annotations"]
    assert set(notes) == {"summary", "description", "runbook"}
    assert "1. " in notes["runbook"]
    assert "2. " in notes["runbook"]
    assert "cache_used" not in rule["expr"], "a full cache is normal"
    assert 'state="free"' not in rule["expr"], "a full cache is normal"


def test_the_alerts_are_those_that_matter_with_their_severity():
    severities = {rule["alert"]: rule["labels"]["severity"] for group in ALERTS["groups"] for rule in group["rules"]}
    assert severities == {
        "KvoffloadUnhealthy": "page",
        "KvoffloadRankDown": "page",
        "KvoffloadTransferFailures": "page",
        "KvoffloadQuarantine": "page",
        "KvoffloadNeverHits": "ticket",
        "KvoffloadCostsMoreThanItSaves": "ticket",
        "KvoffloadPoolPinned": "ticket",
        "KvoffloadStoresRejected": "ticket",
        "KvoffloadFeedLosing": "ticket",
        "KvoffloadFeedUnheard": "ticket",
        "KvoffloadLoopLag": "ticket",
    }


@pytest.mark.parametrize("rule", list(recording_rules()))
def test_every_recording_rule_exists_in_the_catalog_and_is_named_by_level_metric_operation(rule):
    assert not check(rule["expr"]).wrong
    assert re.fullmatch(r"kvoffload:[a-z_]+:[a-z0-9_]+", rule["record"])
    if "ratio" in rule["record"]:
        assert RECORDED[rule["record"]] == {}


def test_every_metric_is_on_a_dashboard_or_in_a_rule():
    used = set()
    for path in DASHBOARDS:
        used |= set(re.findall(r"kvoffload_\w+", path.read_text()))
    used |= set(re.findall(r"kvoffload_\w+", json.dumps([ALERTS, RECORDING])))
    unused = {metric.name for metric in CATALOG if not used & set(metric.series_names)}
    assert unused <= {"block_tokens", "prefill_tokens_per_second"}, "these two are for conversions"


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_survive_a_round_trip_through_grafanas_own_model(path):
    register_default_plugins()
    source = json.loads(path.read_text())
    back = json.loads(json.dumps(Dashboard.from_json(source), cls=JSONEncoder))

    def lost(ours, theirs, where=""):
        if isinstance(ours, dict):
            for key, value in ours.items():
                if key not in theirs:
                    if value not in (None, [], ""):
                        yield f"{where}.{key}"
                else:
                    yield from lost(value, theirs[key], f"{where}.{key}")
        elif isinstance(ours, list):
            if len(ours) != len(theirs):
                yield where
            for place, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
                yield from lost(mine, other, f"{where}[{place}]")
        elif ours != theirs:
            yield f"{where}: {ours!r} became {theirs!r}"

    assert list(lost(source, back)) == []


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_have_variables_ids_and_a_grid_without_overlap(path):
    board = json.loads(path.read_text())
    assert [variable["name"] for variable in board["templating"]["list"]] == ["datasource", "instance", "model"]
    for variable in board["templating"]["list"][1:]:
        metric, label = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", variable["query"]).groups()
        assert metric in SERIES
        assert label in ("instance", "model_name")
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    cells = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        covered = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & covered, panel["title"]
        cells |= covered


def generator():
    spec = importlib.util.spec_from_file_location("dashboards_generate", ROOT / "dashboards" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_files_are_what_the_generator_writes_now():
    files = dict(generator().generated())
    for path, text in files.items():
        assert path.read_text() == text, f"run: python dashboards/generate.py ({path.name})"
    kept = {*(ROOT / "dashboards" / "grafana").iterdir(), *(ROOT / "dashboards" / "kubernetes").iterdir()}
    assert kept <= set(files), "a file that nothing generates"


def test_kubernetes_manifests_hold_the_same_rules_and_dashboards():
    folder = ROOT / "dashboards" / "kubernetes"
    rule = yaml.safe_load((folder / "prometheusrule.yml").read_text())
    assert rule["spec"]["groups"] == RECORDING["groups"] + ALERTS["groups"]
    boards = list(yaml.safe_load_all((folder / "dashboards.yml").read_text()))
    inside = {name: json.loads(text) for board in boards for name, text in board["data"].items()}
    assert inside == {path.name: json.loads(path.read_text()) for path in DASHBOARDS}
    monitor = yaml.safe_load((folder / "podmonitor.yml").read_text())
    assert monitor["kind"] == "PodMonitor"
    for manifest in (rule, monitor, *boards):
        assert set(manifest) >= {"apiVersion", "kind", "metadata"}


@pytest.mark.parametrize(
    ("expression", "wrong"),
    [
        ("rate(kvoffload_no_such_total[1m])", "not in the catalog"),
        ("rate(kvoffload_cache_blocks[1m])", "rate of the gauge"),
        ("kvoffload_requests_total", "needs a rate"),
        ('rate(kvoffload_miss_blocks_total{cause="bored"}[1m])', "never bored"),
        ('rate(kvoffload_miss_blocks_total{reason="new"}[1m])', "no label reason"),
        ("sum by (direction) (rate(kvoffload_requests_total[1m]))", "the label direction"),
        ("rate(kvoffload_hit_tokens_total[1m]) + rate(kvoffload_hit_blocks_total[1m])", "+"),
        ("histogram_quantile(0.9, rate(kvoffload_load_seconds_sum[1m]))", "no buckets"),
    ],
)
def test_the_checker_finds_what_is_wrong(expression, wrong):
    assert wrong in " ".join(check(expression).wrong)


def test_what_is_no_promql_does_not_parse():
    with pytest.raises(ValueError, match=r"unclosed|unexpected"):
        promql_parser.parse("sum(rate(kvoffload_requests_total[1m])")
