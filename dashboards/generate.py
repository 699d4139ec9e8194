"""Write what follows from the catalog, the panels and the rules: `python dashboards/generate.py`.

Grafana's JSON, the Kubernetes manifests and `docs/metrics.md`. A test compares; nobody edits them by hand.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(ROOT)]

from panels import Dashboard, Panel  # noqa: E402 - found through the path above
from panels_cache import CACHE  # noqa: E402
from panels_feed import FEED  # noqa: E402
from panels_overview import OVERVIEW  # noqa: E402
from panels_transfers import TRANSFERS  # noqa: E402

from kvoffload.metrics.catalog import CATALOG  # noqa: E402

DASHBOARDS = (OVERVIEW, CACHE, TRANSFERS, FEED)
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
PANEL_HEIGHT, STAT_HEIGHT = 8, 5


def main() -> int:
    """Write every file, say which ones changed."""
    for path, text in generated():
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")
    return 0


def generated() -> Iterator[tuple[Path, str]]:
    """Yield each generated file and its text."""
    for dashboard in DASHBOARDS:
        yield HERE / "grafana" / f"{dashboard.uid}.json", json.dumps(grafana(dashboard), indent=2) + "\n"
    for name, manifests in kubernetes().items():
        head = "# Written by dashboards/generate.py; change the rules, panels or the generator instead.\n"
        yield HERE / "kubernetes" / f"{name}.yml", head + yaml.dump_all(manifests, sort_keys=False, width=120)
    yield ROOT / "docs" / "metrics.md", reference()


# ---- Grafana


def grafana(dashboard: Dashboard) -> dict[str, Any]:
    """Return a dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = number = 0
    for title, row in dashboard.rows:
        number += 1
        panels.append(
            {
                "id": number,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": top, "w": 24, "h": 1},
                "panels": [],
            }
        )
        top += 1
        left = height = 0
        for panel in row:
            if left + panel.width > 24:
                left, top = 0, top + height
            number += 1
            height = STAT_HEIGHT if panel.kind == "stat" else PANEL_HEIGHT
            panels.append(_panel(panel, number, {"x": left, "y": top, "w": panel.width, "h": height}))
            left += panel.width
        top += height
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["kvoffload"],
        "editable": True,
        "graphTooltip": 1,
        "schemaVersion": 39,
        "time": {"from": "now-15m", "to": "now"},
        "refresh": "15s",
        "links": [
            {
                "title": "kvoffload",
                "type": "dashboards",
                "tags": ["kvoffload"],
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
                "targetBlank": False,
                "icon": "external link",
                "tooltip": "",
                "url": "",
            }
        ],
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                    "refresh": 1,
                },
                _variable("instance", "Instance", "label_values(kvoffload_healthy, instance)"),
                _variable("model", "Model", 'label_values(kvoffload_healthy{instance=~"$instance"}, model_name)'),
            ]
        },
        "panels": panels,
    }


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
    }


HIDE_PLAIN_COLUMNS = {
    "id": "organize",
    "options": {"excludeByName": {"Time": True, "Value": True, "__name__": True, "job": True}},
}


def _panel(panel: Panel, number: int, where: dict[str, int]) -> dict[str, Any]:
    base = panel.thresholds[0] if panel.thresholds and panel.thresholds[0][0] == -1e9 else (None, "green")
    steps = [{"value": None, "color": base[1]}]
    steps += [{"value": value, "color": color} for value, color in panel.thresholds if value != -1e9]
    defaults: dict[str, Any] = {"unit": panel.unit, "thresholds": {"mode": "absolute", "steps": steps}}
    if panel.unit != "none":
        defaults["min"] = 0
    if panel.top is not None:
        defaults["max"] = panel.top
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 40 if panel.stacked else 8,
            "showPoints": "auto",
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "line" if panel.thresholds else "off"},
        }
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": f"{panel.meaning} {panel.action}",
        "gridPos": where,
        "datasource": SOURCE,
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": SOURCE,
                "expr": expr,
                "legendFormat": legend or "__auto",
                "range": panel.kind == "timeseries",
                "instant": panel.kind != "timeseries",
                "format": "table" if panel.kind == "table" else "time_series",
            }
            for place, (expr, legend) in enumerate(panel.queries)
        ],
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "transformations": [HIDE_PLAIN_COLUMNS] if panel.kind == "table" else [],
        "options": _options(panel),
    }


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "stat":
        return {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "value",
            "graphMode": "none",
            "textMode": "auto",
            "justifyMode": "auto",
            "orientation": "auto",
        }
    if panel.kind == "table":
        return {"showHeader": True}
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


# ---- Kubernetes


def kubernetes() -> dict[str, list[dict[str, Any]]]:
    """Return the manifests, by file name."""
    labels = {"app.kubernetes.io/name": "kvoffload"}
    rules = [group for name in ("recording.yml", "alerts.yml") for group in read_yaml(name)["groups"]]
    monitor = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": "kvoffload", "labels": labels},
        "spec": {
            "selector": {"matchLabels": dict(labels)},
            "podMetricsEndpoints": [{"port": "metrics", "path": "/metrics", "interval": "15s"}],
        },
    }
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "kvoffload", "labels": labels},
        "spec": {"groups": rules},
    }
    boards = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": board.uid, "labels": {**labels, "grafana_dashboard": "1"}},
            "data": {f"{board.uid}.json": json.dumps(grafana(board), separators=(",", ":"))},
        }
        for board in DASHBOARDS
    ]
    return {"podmonitor": [monitor], "prometheusrule": [rule], "dashboards": boards}


def read_yaml(name: str) -> dict[str, Any]:
    """Return a hand-written file of this folder."""
    content: dict[str, Any] = yaml.safe_load((HERE / name).read_text())
    return content


# ---- the reference


def reference() -> str:
    """Return `docs/metrics.md`."""
    parts = [(HERE / "metrics_intro.md").read_text().rstrip(), "", "## Metrics", ""]
    parts += [
        "Every series has the labels `model_name` and `engine`. Every series exists from the start, at 0.",
        "A *block* is an offloaded block: `kvoffload_cache_block_bytes` bytes, `kvoffload_block_tokens` tokens.",
        "",
    ]
    rows = [
        (
            f"`{metric.full_name}`",
            metric.kind,
            f"`{metric.label}`: {', '.join(value for value in metric.values) or 'the policy chooses'}"
            if metric.label
            else "",
            metric.help,
            metric.action,
        )
        for metric in CATALOG
    ]
    parts += _table(("metric", "type", "label", "what it is", "what to do"), rows)
    for board in DASHBOARDS:
        parts += ["", f"## Dashboard: {board.title.removeprefix('kvoffload / ')}", "", board.description, ""]
        parts += _table(
            ("panel", "what it shows", "what to do"),
            [(panel.title, panel.meaning, panel.action) for panel in board.panels],
        )
    parts += ["", "## Alerts", ""]
    parts += _table(
        ("alert", "severity", "when", "what to do"),
        [
            (
                f"`{rule['alert']}`",
                rule["labels"]["severity"],
                rule["annotations"]["description"].strip(),
                rule["annotations"]["runbook"].strip(),
            )
            for group in read_yaml("alerts.yml")["groups"]
            for rule in group["rules"]
        ],
    )
    parts += ["", "## Recording rules", ""]
    parts += _table(
        ("series", "expression"),
        [
            (f"`{rule['record']}`", "`" + " ".join(rule["expr"].split()) + "`")
            for group in read_yaml("recording.yml")["groups"]
            for rule in group["rules"]
        ],
    )
    return "\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + [
        "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row) + " |" for row in rows
    ]


if __name__ == "__main__":
    raise SystemExit(main())
