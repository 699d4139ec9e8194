"""Configuration models: frozen, unknown keys refused, sizes with units."""

from __future__ import annotations

import re

from kvoffload.errors import ConfigError

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(value: object, *, key: str = "size") -> int:
    """Return a size in bytes from an int, or from text such as `"1048576"`, `"10GB"` (decimal) or `"8GiB"` (binary).

    Raises:
        ConfigError: The value is no positive whole number of bytes; the message names `key` and the value.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, str) and (match := _SIZE.fullmatch(value)) and (unit := _UNITS.get(match[2].lower())):
        size = float(match[1]) * unit
        if size > 0 and size == int(size):
            return int(size)
    raise ConfigError(f"{key} must be a positive size in bytes, such as 1048576, '512MiB' or '10GB'; got {value!r}")
