"""What loads gave to requests and what they saved: outcomes, time as the request felt it, prefill seconds."""

from __future__ import annotations

from kvoffload.errors import UsageError
from kvoffload.manager.base import MetricsSink
from kvoffload.metrics.plain import plain_number
from kvoffload.service.results import LoadOutcome, LoadResult

_MOVED = (LoadOutcome.LOADED, LoadOutcome.PARTIAL, LoadOutcome.FAILED)
_NOTICEABLE_SECONDS = 0.001
_WEIGHT = 0.1


class LoadLedger:
    """Books answers of loads.

    A loaded token is worth the time its prefill would have taken, at the configured rate or at the mean that
    `prefilled` reports; tokens loaded before any rate is known are priced when it is.

    Attributes:
        tokens_per_second: Prefill rate; 0 while it is unknown.
    """

    def __init__(self, metrics: MetricsSink, tokens_per_second: float | None) -> None:
        self._metrics = metrics
        self._fixed = tokens_per_second is not None
        self.tokens_per_second = tokens_per_second or 0.0
        self._unpriced_tokens = 0

    def answered(self, result: LoadResult, seconds: float) -> None:
        """Book the answer of one load, which took `seconds` of its request's time."""
        metrics = self._metrics
        metrics.count("loads", label=result.outcome.value)
        if result.reason is not None:
            metrics.count("unserved_loads", label=result.reason)
        if result.outcome in _MOVED or seconds >= _NOTICEABLE_SECONDS:
            metrics.observe("load_seconds", seconds)
            metrics.observe("load_pending_seconds", result.pending_seconds)
        if result.num_tokens:
            metrics.count("loaded_tokens", result.num_tokens)
            self._unpriced_tokens += result.num_tokens
            self._price()

    def cancelled(self) -> None:
        """The caller of a load was cancelled."""
        self._metrics.count("loads", label="cancelled")

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Learn the prefill rate from one prefill; a configured rate wins.

        Raises:
            UsageError: Not a number of tokens and of seconds above 0.
        """
        work, took = plain_number(tokens) or 0, plain_number(seconds) or 0
        rate = work / took if work > 0 and took > 0 else 0.0
        if not 0 < rate < float("inf"):
            raise UsageError(f"a prefill has tokens and seconds above 0, got {tokens!r} and {seconds!r}")
        if self._fixed:
            return
        known = self.tokens_per_second
        self.tokens_per_second = known + _WEIGHT * (rate - known) if known else rate
        self._price()

    def _price(self) -> None:
        if self.tokens_per_second and self._unpriced_tokens:
            self._metrics.count("prefill_seconds_saved", self._unpriced_tokens / self.tokens_per_second)
            self._unpriced_tokens = 0
