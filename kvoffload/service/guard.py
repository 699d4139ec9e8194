"""Faults of what is plugged in: a manager, policy or observer that raises never tears the books.

A manager that raises makes the service unhealthy, and the call answers as if nothing were held. An observer (the events
feed, metrics) that raises is logged once, counted, and otherwise ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import ParamSpec, TypeVar

from kvoffload.keys import BlockInfo, OffloadKey
from kvoffload.manager.base import (
    EventSink,
    ManagerStats,
    Match,
    MetricsSink,
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
    ReqContext,
    RequestOutcome,
)
from kvoffload.manager.specs import LoadStoreSpec

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
NOTHING = Match(0, 0)


class GuardedManager:
    """The manager as the service calls it: each call answers, whatever the manager or its policy does.

    Args:
        manager: Decides.
        fail: Told what the manager raised; makes the service unhealthy.
    """

    def __init__(self, manager: OffloadingManager, fail: Callable[[str, BaseException], None]) -> None:
        self._manager = manager
        self._fail = fail

    def _call(self, default: T, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever a plug-in raises makes the service unhealthy
            self._fail(f"the manager's {getattr(function, '__name__', 'call')} raised", error)
            return default

    def match(self, keys: Sequence[OffloadKey], context: ReqContext | None = None) -> Match:
        """Return the held part of a prefix; nothing when the manager raises."""
        try:
            return self._manager.match(keys, context)
        except Exception as error:  # noqa: BLE001 - as in `_call`, without its cost
            self._fail("the manager's match raised", error)
            return NOTHING

    def held(self, keys: Collection[OffloadKey]) -> set[OffloadKey]:
        """Return those of `keys` that are held; none when the manager raises."""
        return self._call(set(), self._manager.held, keys)

    def lookup_prefix(self, keys: Sequence[OffloadKey], context: ReqContext) -> Match:
        """Return the held part of a prefix, counted; nothing when the manager raises."""
        return self._call(NOTHING, self._manager.lookup_prefix, keys, context)

    def touch(self, keys: Collection[OffloadKey], context: ReqContext) -> None:
        """Mark keys as used."""
        self._call(None, self._manager.touch, keys, context)

    def prepare_load(self, keys: Collection[OffloadKey], context: ReqContext) -> LoadStoreSpec | None:
        """Pin keys; None when the manager raises."""
        return self._call(None, self._manager.prepare_load, keys, context)

    def complete_load(self, keys: Collection[OffloadKey], context: ReqContext, *, ticket: int | None) -> None:
        """Unpin; what cannot be unpinned is given up."""
        try:
            self._manager.complete_load(keys, context, ticket=ticket)
        except Exception as error:  # noqa: BLE001 - as in `_call`
            self._fail("the manager's complete_load raised", error)
            self.abandon(ticket)

    def prepare_store(self, keys: Collection[OffloadKey], context: ReqContext) -> PrepareStoreOutput | None:
        """Reserve; None when there is no room or the manager raises."""
        return self._call(None, self._manager.prepare_store, keys, context)

    def complete_store(
        self, keys: Collection[OffloadKey], success: bool, context: ReqContext, *, ticket: int | None
    ) -> bool:
        """Make keys readable or drop them; False when the manager raised and the reservation was given up."""
        try:
            self._manager.complete_store(keys, success, context, ticket=ticket)
        except Exception as error:  # noqa: BLE001 - as in `_call`
            self._fail("the manager's complete_store raised", error)
            self.abandon(ticket)
            return False
        return True

    def abandon(self, ticket: int | None, *, copy_running: bool = False, hung: bool = False) -> None:
        """Give a reservation up."""
        if ticket is not None:
            self._call(None, self._manager.abandon, ticket, copy_running=copy_running, hung=hung)

    def discard(self, keys: Collection[OffloadKey]) -> int:
        """Drop keys."""
        return self._call(0, self._manager.discard, keys)

    def reset_cache(self) -> int:
        """Drop every key."""
        return self._call(0, self._manager.reset_cache)

    def finish_request(self, context: ReqContext, outcome: RequestOutcome, keys: Sequence[OffloadKey]) -> None:
        """Tell that a request ended."""
        self._call(None, self._manager.finish_request, context, outcome, keys)

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return and clear the outbox."""
        return self._call((), self._manager.take_events)

    def stats(self) -> ManagerStats:
        """Return counters and occupancy; zeros when the manager raises."""
        return self._call(ManagerStats(), self._manager.stats)

    def shutdown(self) -> None:
        """Release what the manager holds."""
        self._call(None, self._manager.shutdown)


class IsolatedEvents:
    """An `EventSink` that cannot raise: what the real one raises is logged once and counted."""

    def __init__(self, sink: EventSink, count: Callable[[str], None]) -> None:
        self._sink = sink
        self._count = count
        self._logged = False

    def publish(self, events: Sequence[OffloadingEvent], infos: Mapping[OffloadKey, BlockInfo]) -> None:
        """Hand on the manager's events."""
        try:
            self._sink.publish(events, infos)
        except Exception as error:  # noqa: BLE001 - an observer is isolated
            self._note(error)

    def describe(self, infos: Mapping[OffloadKey, BlockInfo]) -> None:
        """Hand on infos of keys that are held."""
        try:
            self._sink.describe(infos)
        except Exception as error:  # noqa: BLE001 - an observer is isolated
            self._note(error)

    def _note(self, error: Exception) -> None:
        self._count("observer_errors")
        if not self._logged:
            self._logged = True
            logger.error("the events sink raised; it is ignored from now on where it does", exc_info=error)


class IsolatedMetrics:
    """A `MetricsSink` that cannot raise: what the real one raises is logged once and counted in `errors`."""

    def __init__(self, sink: MetricsSink) -> None:
        self._sink = sink
        self.errors = 0

    def count(self, name: str, amount: float = 1, label: str = "") -> None:
        """Add to a counter."""
        try:
            self._sink.count(name, amount, label)
        except Exception as error:  # noqa: BLE001 - an observer is isolated
            self._note(error)

    def observe(self, name: str, value: float, label: str = "") -> None:
        """Add one observation to a histogram."""
        try:
            self._sink.observe(name, value, label)
        except Exception as error:  # noqa: BLE001 - an observer is isolated
            self._note(error)

    def _note(self, error: Exception) -> None:
        self.errors += 1
        if self.errors == 1:
            logger.error("the metrics sink raised; it is ignored from now on where it does", exc_info=error)
