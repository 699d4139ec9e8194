"""Checks of what callers pass: a mistake is a `UsageError` at the door, before anything has changed."""

from __future__ import annotations

import inspect
import operator
from typing import SupportsIndex

from kvoffload.errors import UsageError
from kvoffload.transfer.base import HOST_VISIBLE, Ready


def check_ready(ready: Ready, name: str = "ready") -> None:
    """Refuse what cannot say when bytes are ready.

    Raises:
        UsageError: Neither `"host-visible"` nor an event with a blocking `wait` (host) or `synchronize` (CUDA).
    """
    if isinstance(ready, str):
        known = ready == HOST_VISIBLE
    else:
        calls = [call for call in (getattr(ready, "wait", None), getattr(ready, "synchronize", None)) if callable(call)]
        known = bool(calls) and not isinstance(ready, type) and not inspect.iscoroutinefunction(calls[0])
    if not known:
        raise UsageError(
            f'{name} must be "host-visible" or an event recorded after the last write, with a blocking wait; '
            f"got {ready!r}"
        )


def whole_number(value: SupportsIndex, name: str) -> int:
    """Return `value` as an int; numpy's and torch's integers are taken, too.

    Raises:
        UsageError: It is none, or negative.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise UsageError(f"{name} must be a whole number, got {value!r}") from None
    if number < 0:
        raise UsageError(f"{name} must not be negative, got {number}")
    return number
