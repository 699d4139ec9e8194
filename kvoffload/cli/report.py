"""Results for people (a table) and for programs (one JSON object)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")


def report(title: str, values: Mapping[str, object], *, as_json: bool) -> None:
    """Print a result in the form that was asked for."""
    if as_json:
        print_json(values)
    else:
        print_table(title, values)


def print_json(values: Mapping[str, object]) -> None:
    """Print one object on standard output."""
    print(json.dumps(values, indent=2))


def print_table(title: str, values: Mapping[str, object]) -> None:
    """Print names and values in two columns; nested objects are indented below their name."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in values.items():
        if isinstance(value, Mapping):
            inner = ", ".join(f"{key} {readable(key, item)}" for key, item in value.items())
            table.add_row(name.replace("_", " "), inner or "-")
        else:
            table.add_row(name.replace("_", " "), readable(name, value))
    Console(color_system=None if os.environ.get("NO_COLOR") else "auto").print(table)


def readable(name: str, value: object) -> str:
    """Return a value as people read it, by its name's unit."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if "ratio" in name and isinstance(value, int | float):
        return f"{100 * value:.2f} %"
    if "bytes" in name and isinstance(value, int):
        return readable_bytes(value)
    if name.endswith("gbps") and isinstance(value, int | float):
        return f"{value:.2f} GB/s"
    if name.endswith("seconds") and isinstance(value, float) and 0 < abs(value) < 0.1:
        return f"{1e3 * value:.2f} ms" if abs(value) >= 1e-3 else f"{1e6 * value:.1f} µs"
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)


def readable_bytes(size: float) -> str:
    """Return a size with a binary unit."""
    for unit in _BYTES[:-1]:
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} {_BYTES[-1]}"
