"""What the dashboards are made of: panels as data, and PromQL written in terms of the metric catalog.

Each dashboard is a `panels_*.py`; `generate.py` turns them into Grafana's JSON and the reference in `docs/metrics.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvoffload.metrics.catalog import BY_NAME
from kvoffload.metrics.metric import Metric

SELECTOR = 'instance=~"$instance", model_name=~"$model"'
WINDOW = "$__rate_interval"

BLOCKS, TOKENS, EVENTS = "count:blocks/s", "count:tokens/s", "count:/s"  # Grafana's units of rates: 1.2 K blocks/s
GREEN, YELLOW, ORANGE, RED, BLUE = "green", "yellow", "orange", "red", "blue"


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        title: Its heading.
        meaning: What it shows.
        action: What to do about it.
        unit: Grafana's unit of its values.
        queries: PromQL and legend of each query.
        kind: How it is drawn.
        width: Of 24 columns.
        stacked: Series add up.
        top: Largest value that can be, for ratios 1.
        thresholds: From which value on which colour; the base is green.
        states: What single values are called, with a colour each.
    """

    title: str
    meaning: str
    action: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: Literal["timeseries", "stat", "table"] = "timeseries"
    width: int = 8
    stacked: bool = False
    top: float | None = None
    thresholds: tuple[tuple[float, str], ...] = ()
    states: tuple[tuple[int, str, str], ...] = ()


@dataclass(frozen=True)
class Dashboard:
    """One dashboard: rows of panels."""

    uid: str
    title: str
    description: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        """All panels."""
        return tuple(panel for _, panels in self.rows for panel in panels)


def metric(name: str) -> Metric:
    """Return a metric of the catalog; a name that is not in it fails here."""
    return BY_NAME[name]


def of(name: str, suffix: str = "", **labels: str) -> str:
    """Return a selector of a metric; a label value starting with `~` is a pattern."""
    entry = metric(name)
    for label, value in labels.items():
        if label != entry.label:
            raise ValueError(f"{name} has no label {label}")
        if not value.startswith("~") and value not in entry.values:
            raise ValueError(f"{label} of {name} is never {value}")
    own = [_matcher(label, value) for label, value in labels.items()]
    base = entry.full_name if not suffix else "kvoffload_" + name + suffix
    return f"{base}{{{', '.join([SELECTOR, *own])}}}"


def _matcher(label: str, value: str) -> str:
    return f'{label}=~"{value[1:]}"' if value.startswith("~") else f'{label}="{value}"'


def rate(name: str, suffix: str = "", *, by: str = "", **labels: str) -> str:
    """Return a counter's summed rate."""
    inner = f"rate({of(name, suffix, **labels)}[{WINDOW}])"
    return f"sum by ({by}) ({inner})" if by else f"sum({inner})"


def total(name: str, *, by: str = "", **labels: str) -> str:
    """Return a gauge's sum."""
    return f"sum by ({by}) ({of(name, **labels)})" if by else f"sum({of(name, **labels)})"


def quantile(share: float, name: str, *, by: str = "") -> str:
    """Return a quantile of a histogram."""
    return f"histogram_quantile({share}, {rate(name, '_bucket', by=f'le, {by}' if by else 'le')})"


def ratio(part: str, whole: str) -> str:
    """Return one expression divided by another."""
    return f"{part} / {whole}"


def mean(name: str, **labels: str) -> str:
    """Return the mean of a histogram's observations."""
    return ratio(rate(name, "_sum", **labels), rate(name, "_count", **labels))


ANY_IS_BAD = ((1e-9, RED),)

HIT_RATIO = f"{rate('hit_tokens')} / {rate('prompt_tokens')}"
SAVED = rate("prefill_seconds_saved")
COST = rate("load_seconds", "_sum")
USED = f"1 - {total('cache_blocks', state='free')} / {total('cache_capacity_blocks')}"

MISS_SHARE = ratio(rate("miss_blocks", by="cause"), f"ignoring(cause) group_left() {rate('miss_blocks')}")
READY = of("cache_blocks", state="~ready|pinned")
FACTOR = f"on (instance, model_name, engine) group_left() {of('block_size_factor')}"
READY_ENGINE_BLOCKS = f"sum({READY} * {FACTOR})"
READY_BYTES = f"sum({READY} * on (instance, model_name, engine) group_left() {of('cache_block_bytes')})"
