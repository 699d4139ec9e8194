"""What values in a configuration may look like: sizes with units, whole numbers, lists and switches written as text.

Each function returns the value in its own type or raises a `ValueError` that says what it must be.
"""

from __future__ import annotations

import re
from fractions import Fraction
from numbers import Integral

from kvoffload.errors import ConfigError

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_TOKENS = "must be a positive whole number of tokens, such as 16, or one for each KV-cache group"
SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(value: object, *, key: str = "size") -> int:
    """Return a size in bytes from an int, or from text such as `"1048576"`, `"10GB"` (decimal) or `"8GiB"` (binary).

    Raises:
        ConfigError: The value is no positive whole number of bytes; the message names `key` and the value.
    """
    try:
        return size_in_bytes(value)
    except ValueError as error:
        raise ConfigError(f"{key} {error}; got {value!r}") from None


def size_in_bytes(value: object) -> int:
    """Return a size in bytes."""
    value = _plain(value)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, str) and (match := SIZE.fullmatch(value)) and (unit := _UNITS.get(match[2].lower())):
        size = Fraction(match[1]) * unit
        if size > 0 and size.denominator == 1:
            return int(size)
    raise ValueError("must be a positive size in bytes, such as 1048576, '512MiB' or '10GB'")


def _plain(value: object) -> object:
    """Return numpy's integers as ints, everything else as it is."""
    return value if isinstance(value, bool) or not isinstance(value, Integral) else int(value)


def integer(value: object) -> object:
    """Accept ints and decimal text; bools and floats are mistakes, not numbers."""
    value = _plain(value)
    if isinstance(value, bool | float) or (isinstance(value, str) and not re.fullmatch(r"\s*-?\d+\s*", value)):
        raise ValueError("must be a whole number, such as 16")
    return value


def real(value: object) -> object:
    """Refuse bools where a number is wanted."""
    if isinstance(value, bool):
        raise ValueError("must be a number, such as 0.5")  # noqa: TRY004 - pydantic collects ValueErrors
    return value


def items(value: object) -> object:
    """Accept `"a,b"` for a list: environment variables hold text."""
    if isinstance(value, str):
        return tuple(item.strip() for item in value.split(",") if item.strip())
    return value


def block_sizes(value: object) -> object:
    """Return tokens in an engine block, one number or one for each KV-cache group."""
    value = items(value)
    if isinstance(value, tuple | list):
        if not value:
            raise ValueError(_TOKENS)
        sizes = tuple(_positive(item) for item in value)
        return sizes[0] if len(sizes) == 1 else sizes
    return _positive(value)


def _positive(value: object) -> int:
    """Return a whole number of at least 1."""
    try:
        value = integer(value)
    except ValueError:
        raise ValueError(_TOKENS) from None
    if not isinstance(value, int | str) or int(value) < 1:
        raise ValueError(_TOKENS)
    return int(value)


def switch(value: object) -> bool | None:
    """Return what a switch says; None when it is none."""
    text = value.strip().lower() if isinstance(value, str) else value
    if text is True or text in ("true", "on", "1"):
        return True
    return False if text is False or text in ("false", "off", "0", "") else None
