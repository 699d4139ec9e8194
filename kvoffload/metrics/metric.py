"""`Metric`: what the catalog says of one metric, and how an entry is written down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PREFIX = "kvoffload_"
CONSTANT_LABELS = ("model_name", "engine")
INFO_LABELS = ("version", "policy", "spec", "block_size", "block_size_factor", "feed")

Kind = Literal["counter", "gauge", "histogram", "info"]
Unit = Literal[
    "",
    "blocks",
    "tokens",
    "bytes",
    "seconds",
    "bytes per second",
    "tokens per second",
    "bytes per block",
    "tokens per block",
    "bool",
]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: Without prefix and suffix.
        kind: Its Prometheus type.
        help: What it is, in one sentence; exported.
        action: What to look at when it moves; for the reference.
        label: Its one label; "" for none.
        values: All values of that label.
        unit: Base unit.
        buckets: Upper bounds of a histogram, without infinity.
    """

    name: str
    kind: Kind
    help: str
    action: str = ""
    label: str = ""
    values: tuple[str, ...] = ("",)
    unit: Unit = ""
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        """Name of the exported family; a counter's has `_total`."""
        return PREFIX + self.name + ("_total" if self.kind == "counter" else "")

    @property
    def series_names(self) -> tuple[str, ...]:
        """Names of the exported series."""
        if self.kind == "histogram":
            return tuple(PREFIX + self.name + suffix for suffix in ("_bucket", "_sum", "_count"))
        return (self.full_name,)

    @property
    def labels(self) -> tuple[str, ...]:
        """Every label of its series, without a bucket's `le`."""
        if self.kind == "info":
            return (*CONSTANT_LABELS, *INFO_LABELS)
        return (*CONSTANT_LABELS, self.label) if self.label else CONSTANT_LABELS


def counter(
    name: str, text: str, action: str, label: str = "", values: tuple[str, ...] = (), unit: Unit = ""
) -> Metric:
    """Return a counter's entry."""
    return Metric(name, "counter", text, action, label, values or ("",), unit)


def gauge(name: str, text: str, action: str, label: str = "", values: tuple[str, ...] = (), unit: Unit = "") -> Metric:
    """Return a gauge's entry."""
    return Metric(name, "gauge", text, action, label, values or ("",), unit)


def histogram(
    name: str,
    text: str,
    action: str,
    buckets: tuple[float, ...],
    label: str = "",
    values: tuple[str, ...] = (),
    unit: Unit = "seconds",
) -> Metric:
    """Return a histogram's entry."""
    return Metric(name, "histogram", text, action, label, values or ("",), unit, buckets)
