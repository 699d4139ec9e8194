"""Checks of what callers pass: a mistake is a `UsageError` at the door, before anything has changed.

What is not checked here would be found by a policy deep inside the manager, and one caller's mistake would look like a
broken manager, which ends the service for all.
"""

from __future__ import annotations

import inspect
import math
import operator
import time
from collections.abc import Collection, Iterable
from numbers import Real
from typing import SupportsIndex, TypeVar

from kvoffload.chain import BlockChain
from kvoffload.errors import UsageError
from kvoffload.keys import OffloadKey
from kvoffload.manager.base import ReqContext, RequestOutcome
from kvoffload.transfer.base import HOST_VISIBLE, Ready

_T = TypeVar("_T")


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


def check_timeout(timeout: float | None, name: str = "timeout") -> None:
    """Refuse a time that no wait can be bounded by; one in the past is no time, infinity and None are no limit.

    Raises:
        UsageError: It is no number, not a number (NaN), or an integer that no float can hold.
    """
    _check_seconds(timeout, name)


def check_free(free: object, name: str) -> None:
    """Refuse what cannot take GPU blocks back.

    Raises:
        UsageError: It is not callable, or a coroutine function: nobody would await it, and the blocks were lost.
    """
    if not callable(free):
        raise UsageError(f"{name} must be callable with a list of GPU blocks, or None; got {free!r}")
    if inspect.iscoroutinefunction(free):
        raise UsageError(f"{name} is called, not awaited: it must be a plain function, got {free!r}")


def check_request(context: ReqContext, chain: BlockChain) -> None:
    """Refuse what cannot name a request.

    Raises:
        UsageError: The context or the chain is of another type, or holds a value of one.
    """
    if not isinstance(context, ReqContext):
        raise UsageError(f"a request is named by a str or a ReqContext, got {context!r}")
    if not isinstance(context.req_id, str) or not context.req_id:
        raise UsageError(f"a request needs a req_id, a non-empty str; got {context.req_id!r}")
    if not _is_number(context.priority):
        raise UsageError(f"priority must be a number, got {context.priority!r}")
    _check_seconds(context.started_seconds, "started_seconds")
    if not isinstance(chain, BlockChain):
        raise UsageError(f"chain must come from service.chain(...), got {type(chain).__name__}")


def check_request_id(request_id: object) -> None:
    """Refuse what is no request's id.

    Raises:
        UsageError: It is no str.
    """
    if not isinstance(request_id, str):
        raise UsageError(f"request_id must be a str, the id that a request began with; got {request_id!r}")


def check_outcome(outcome: RequestOutcome) -> None:
    """Refuse hints that are no numbers.

    Raises:
        UsageError: One is.
    """
    if not isinstance(outcome, RequestOutcome):
        raise UsageError(f"outcome must be a RequestOutcome; got {outcome!r}")
    if outcome.output_tokens is not None:
        whole_number(outcome.output_tokens, "output_tokens")
    _check_seconds(outcome.now_seconds, "now_seconds")
    _check_seconds(outcome.expected_return_seconds, "expected_return_seconds")


def check_keys(keys: Collection[OffloadKey]) -> list[OffloadKey]:
    """Return the keys as a list.

    Raises:
        UsageError: One is no bytes.
    """
    checked = as_list(keys, "keys", "block keys, as chain.keys() gives them")
    wrong: list[object] = [key for key in checked if not isinstance(key, bytes)]
    if wrong:
        raise UsageError(f"keys must be bytes, as chain.keys() gives them; got {wrong[0]!r}")
    return checked


def as_list(values: Iterable[_T], name: str, what: str) -> list[_T]:
    """Return the values as a list.

    Raises:
        UsageError: They are none.
    """
    try:
        return list(values)
    except TypeError:
        raise UsageError(f"{name} must be a list of {what}; got {values!r}") from None


def shown(value: object) -> str:
    """Return a wrong value as a message shows it: as it is, or only its type where that would fill the screen."""
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"


def _is_number(value: object) -> bool:
    try:
        return isinstance(value, Real) and not math.isnan(value)
    except OverflowError:  # an integer that no float can hold
        return False


def _check_seconds(value: float | None, name: str) -> None:
    if value is not None and not _is_number(value):
        raise UsageError(f"{name} must be a number of seconds, or None; got {value!r}")


def deadline_after(timeout: float | None) -> float:
    """Return the time, on `time.monotonic`, at which a wait of `timeout` seconds ends; never without one."""
    return time.monotonic() + (math.inf if timeout is None else timeout)
