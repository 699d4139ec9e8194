"""What others report, made safe to export: numbers that are numbers, text that encodes."""

from __future__ import annotations

import math
from numbers import Real


def plain_number(value: object) -> int | float | None:
    """Return a finite number as Python's own, whatever library it is from; None for anything else."""
    try:
        if type(value) is int or type(value) is float:
            return value if math.isfinite(value) else None
        number = float(value) if isinstance(value, Real) else math.nan
    except Exception:  # noqa: BLE001 - an integer beyond every float, or a type that cannot be compared
        return None
    return number if math.isfinite(number) else None


def plain_text(value: object) -> str:
    """Return text that UTF-8 can carry: a lone surrogate, as of an undecodable variable, would fail every scrape."""
    return str(value).encode("utf-8", "replace").decode()
