"""What an expression in PromQL means in terms of the metric catalog: its names, labels, counters and units.

A unit is a mapping of dimension to exponent: bytes per second is `{"bytes": 1, "seconds": -1}`.
"""

from __future__ import annotations

from collections import Counter as Bag
from dataclasses import dataclass, field

import promql_parser as promql

from kvoffload.metrics.catalog import SERIES
from kvoffload.metrics.metric import CONSTANT_LABELS, Metric

TARGET_LABELS = {"instance", "job"}
RATES = {"rate", "increase", "irate"}
DIMENSIONS = {
    "": {},
    "bool": {},
    "blocks": {"blocks": 1},
    "tokens": {"tokens": 1},
    "bytes": {"bytes": 1},
    "seconds": {"seconds": 1},
    "bytes per second": {"bytes": 1, "seconds": -1},
    "tokens per second": {"tokens": 1, "seconds": -1},
    "bytes per block": {"bytes": 1, "blocks": -1},
    "tokens per block": {"tokens": 1, "blocks": -1},
}
GRAFANA = {
    "s": [{"seconds": 1}],
    "bytes": [{"bytes": 1}],
    "Bps": [{"bytes": 1, "seconds": -1}],
    "percentunit": [{}],
    "none": [{}],
    "short": [{}, {"blocks": 1}, {"tokens": 1}],
    "count:blocks/s": [{"blocks": 1, "seconds": -1}],
    "count:tokens/s": [{"tokens": 1, "seconds": -1}],
    "count:/s": [{"seconds": -1}, {"blocks": 1, "seconds": -1}],
}

Unit = dict[str, int] | None
"""None: a plain number, which fits any unit."""


@dataclass
class Finding:
    """What was read of one expression.

    Attributes:
        names: Series it reads.
        unit: Unit of its values.
        wrong: What is not right about it.
    """

    names: set[str] = field(default_factory=set)
    unit: Unit = None
    wrong: list[str] = field(default_factory=list)


def check(expression: str, recorded: dict[str, Unit] | None = None) -> Finding:
    """Parse and check one expression; `recorded` names series of recording rules and their units."""
    finding = Finding()
    finding.unit, _ = _Reader(finding, recorded or {}).read(promql.parse(expression), rated=False)
    return finding


class _Reader:
    def __init__(self, finding: Finding, recorded: dict[str, Unit]) -> None:
        self.finding = finding
        self.recorded = recorded

    def wrong(self, text: str) -> None:
        self.finding.wrong.append(text)

    def read(self, node: object, *, rated: bool) -> tuple[Unit, Metric | None]:
        """Return a node's unit, and the histogram whose buckets it is made of."""
        match node:
            case promql.ParenExpr() | promql.UnaryExpr():
                return self.read(node.expr, rated=rated)
            case promql.NumberLiteral() | promql.StringLiteral():
                return None, None
            case promql.VectorSelector():
                return self.selector(node, rated=rated)
            case promql.MatrixSelector():
                return self.selector(node.vector_selector, rated=rated)
            case promql.SubqueryExpr():
                return self.read(node.expr, rated=rated)
            case promql.AggregateExpr():
                unit, buckets = self.read(node.expr, rated=rated)
                self.labels(set(node.modifier.labels) if node.modifier else set(), node.expr)
                counts = str(node).startswith("count")
                return ({} if counts else unit), buckets
            case promql.BinaryExpr():
                return self.binary(node)
            case promql.Call():
                return self.call(node)
        raise TypeError(f"{node!r} is not understood")

    def selector(self, node: promql.VectorSelector, *, rated: bool) -> tuple[Unit, Metric | None]:
        name = node.name
        self.finding.names.add(name)
        if name in self.recorded:
            return self.recorded[name], None
        metric = SERIES.get(name)
        if metric is None:
            self.wrong(f"{name} is not in the catalog")
            return None, None
        counted = metric.kind in ("counter", "histogram")
        if rated and not counted:
            self.wrong(f"rate of the gauge {name}")
        if counted and not rated:
            self.wrong(f"{name} counts up: it needs a rate")
        for matcher in node.matchers.matchers:
            self.matcher(metric, name, matcher)
        if name.endswith("_bucket"):
            return {}, metric
        return DIMENSIONS["" if name.endswith("_count") and metric.kind == "histogram" else metric.unit], None

    def matcher(self, metric: Metric, name: str, matcher: promql.Matcher) -> None:
        known = {*metric.labels, *TARGET_LABELS}
        if matcher.name not in known:
            self.wrong(f"{name} has no label {matcher.name}")
        if matcher.name == metric.label and matcher.value != ".*":
            for value in matcher.value.split("|"):
                if value not in metric.values:
                    self.wrong(f"{matcher.name} of {name} is never {value}")

    def labels(self, used: set[str], inside: object) -> None:
        """Labels that an aggregation keeps exist on some series inside."""
        known = {*CONSTANT_LABELS, *TARGET_LABELS}
        for name in names_in(inside):
            metric = SERIES.get(name)
            if metric is not None:
                known |= {*metric.labels, *({"le"} if name.endswith("_bucket") else set())}
        for label in used - known:
            self.wrong(f"nothing inside has the label {label}")

    def binary(self, node: promql.BinaryExpr) -> tuple[Unit, Metric | None]:
        left, buckets = self.read(node.lhs, rated=False)
        right, _ = self.read(node.rhs, rated=False)
        operator = _operator(node)
        if operator in ("*", "/"):
            if left is None and right is None:
                return None, None
            unit = Bag(left or {})
            (unit.update if operator == "*" else unit.subtract)(right or {})
            return _reduced(unit), buckets
        if operator in ("and", "or", "unless"):
            return left, buckets
        if left is not None and right is not None and left != right:
            self.wrong(f"{left} {operator} {right}: {node}")
        return (left if left is not None else right), buckets

    def call(self, node: promql.Call) -> tuple[Unit, Metric | None]:
        name = node.func.name
        read = [self.read(argument, rated=name in RATES) for argument in node.args]
        if name in RATES:
            unit, buckets = read[0]
            if name == "increase" or unit is None:
                return unit, buckets
            slower = Bag(unit)
            slower.subtract({"seconds": 1})
            return _reduced(slower), buckets
        if name == "time":
            return {"seconds": 1}, None
        if name == "histogram_quantile":
            buckets = read[1][1]
            if buckets is None:
                self.wrong(f"no buckets in {node}")
                return None, None
            return DIMENSIONS[buckets.unit], None
        raise TypeError(f"{name} is not understood")


def _reduced(unit: Bag[str]) -> dict[str, int]:
    return {dimension: power for dimension, power in unit.items() if power}


def _operator(node: promql.BinaryExpr) -> str:
    """Return the operator's text: the parser keeps it in the printed form alone."""
    rest = str(node)[len(str(node.lhs)) :].strip()
    return rest.split()[0]


def names_in(node: object) -> set[str]:
    """Return the series that a node reads."""
    found: set[str] = set()

    def visit(inner: object) -> bool:
        if isinstance(inner, promql.VectorSelector):
            found.add(inner.name)
        elif isinstance(inner, promql.MatrixSelector):
            found.add(inner.vector_selector.name)
        return True

    promql.walk(node, visit)
    return found
