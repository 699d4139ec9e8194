"""Readers of option values, for argparse: a wrong one is a usage mistake that names what is right."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from kvoffload.errors import ConfigError

MOST = 10**12
"""The largest count that an option takes: beyond it is a slip of the finger, not a machine."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Host memory in blocks, or in percent of a workload's unique blocks."""

    blocks: int | None = None
    percent: float | None = None

    def resolve(self, unique_blocks: int) -> int:
        """Return the number of engine blocks."""
        if self.blocks is not None:
            return self.blocks
        return int(unique_blocks * (self.percent or 0) / 100)


def capacity(text: str) -> Capacity:
    """Read `5%`, or a number of blocks."""
    number, percent = (text[:-1], True) if text.endswith("%") else (text, False)
    try:
        value = float(number) if percent else int(number)
    except ValueError:
        value = -1
    if not 0 < value <= MOST:
        raise argparse.ArgumentTypeError(
            f"must be a positive number of blocks, or a percentage such as 5%; got {text!r}"
        )
    return Capacity(percent=value) if percent else Capacity(blocks=int(value))


def size(text: str) -> int:
    """Read bytes, with or without a unit."""
    from kvoffload.config_values import parse_bytes

    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("size ")) from None


def speed(text: str) -> float | None:
    """Read `max` (None), or how many times faster than a trace's clock."""
    if text == "max":
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be 'max' or a positive number; got {text!r}")
    return value


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    return _at_least(text, 1)


def natural(text: str) -> int:
    """Read a whole number of at least 0."""
    return _at_least(text, 0)


def _at_least(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= MOST:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}; got {text!r}")
    return value


def address(text: str) -> tuple[str, int]:
    """Read `HOST:PORT`."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"must be HOST:PORT, such as 127.0.0.1:9464; got {text!r}")
    return host.strip("[]"), int(port)
