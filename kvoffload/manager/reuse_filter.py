"""`FilterReusedOffloadingManager`: store only what was asked for often enough. Reference, chapter 3."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from kvoffload.errors import ConfigError
from kvoffload.keys import OffloadKey
from kvoffload.manager.base import (
    ManagerStats,
    Match,
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
    ReqContext,
    RequestOutcome,
)
from kvoffload.manager.request_book import RequestBook
from kvoffload.manager.specs import LoadStoreSpec


class FilterReusedOffloadingManager(OffloadingManager):
    """Offers a key to the manager behind it once it was counted `store_threshold` times.

    Without a request id each lookup counts and nothing else, as in the reference. With one, a key counts once per
    request over lookups and offers, so keys behind a request's first miss count too.

    The tracker forgets the key that was counted longest ago, but never one that the same request (without ids: the same
    round of lookups up to a `prepare_store`) has counted: an offer larger than the tracker keeps what fits and makes
    progress, instead of pushing out its own keys.

    Keys that are held already go through to the manager behind, whatever their count: it protects them from eviction.

    Args:
        backing: The manager behind.
        store_threshold: Count from which a key is stored; 2 or more.
        max_tracker_size: Keys that are counted at a time.

    Raises:
        ConfigError: A threshold below 2, which filters nothing, or a tracker below 1.
    """

    def __init__(self, backing: OffloadingManager, store_threshold: int = 2, max_tracker_size: int = 64_000) -> None:
        if not isinstance(store_threshold, int) or store_threshold < 2:
            raise ConfigError(
                f"store_threshold must be at least 2 (below, nothing is filtered: leave it out); "
                f"got {store_threshold!r}"
            )
        if not isinstance(max_tracker_size, int) or max_tracker_size < 1:
            raise ConfigError(f"max_tracker_size must be at least 1; got {max_tracker_size!r}")
        self._backing = backing
        self.store_threshold = store_threshold
        self.max_tracker_size = max_tracker_size
        self.counts: OrderedDict[OffloadKey, int] = OrderedDict()
        self._book = RequestBook()
        self._round: set[OffloadKey] = set()
        self._filtered = 0

    # ---- counting

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        found = self._backing.lookup(key, req_context)
        self._count((key,), req_context)
        return found

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Match:
        match = self._backing.lookup_prefix(keys, req_context)
        self._count(keys[: match.ready + match.pending + 1], req_context)
        return match

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        offered = list(dict.fromkeys(keys))
        held = self._backing.held(offered)
        has_id = req_context.req_id is not None
        counts, threshold = self.counts, self.store_threshold
        known = self._book.booked(req_context.req_id) if req_context.req_id is not None else self._round
        eligible: list[OffloadKey] = []
        filtered: list[OffloadKey] = []
        for key in offered:
            count = counts.get(key, 0) + (has_id and key not in known)
            if count >= threshold or key in held:
                eligible.append(key)
            else:
                filtered.append(key)
        output = self._backing.prepare_store(eligible, req_context)
        if has_id:
            self._count(offered, req_context)
        else:
            self._round.clear()
        self._filtered += len(filtered)
        return output and replace(output, filtered_keys=filtered + output.filtered_keys)

    def _count(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        if req_context.req_id is None:
            fresh, own = keys, self._round
        else:
            fresh = self._book.book(req_context.req_id, keys)
            own = self._book.booked(req_context.req_id)
        counts = self.counts
        for key in fresh:
            if key in counts:
                counts[key] += 1
                counts.move_to_end(key)
            elif len(counts) < self.max_tracker_size:
                counts[key] = 1
            else:
                oldest = next(iter(counts))
                if oldest in own:
                    continue
                del counts[oldest]
                counts[key] = 1
            if req_context.req_id is None:
                own.add(key)

    # ---- passed on

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        return self._backing.prepare_load(keys, req_context)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext | None = None) -> None:
        self._backing.touch(keys, req_context)

    def complete_load(
        self, keys: Collection[OffloadKey], req_context: ReqContext | None = None, *, ticket: int | None = None
    ) -> None:
        self._backing.complete_load(keys, req_context, ticket=ticket)

    def complete_store(
        self,
        keys: Collection[OffloadKey],
        success: bool = True,
        req_context: ReqContext | None = None,
        *,
        ticket: int | None = None,
    ) -> None:
        self._backing.complete_store(keys, success, req_context, ticket=ticket)

    def match(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> Match:
        return self._backing.match(keys, req_context)

    def held(self, keys: Iterable[OffloadKey]) -> set[OffloadKey]:
        return self._backing.held(keys)

    def abandon(self, ticket: int, *, copy_running: bool = False, hung: bool = False) -> None:
        self._backing.abandon(ticket, copy_running=copy_running, hung=hung)

    def discard(self, keys: Collection[OffloadKey]) -> int:
        return self._backing.discard(keys)

    def reset_cache(self) -> int:
        return self._backing.reset_cache()

    def finish_request(
        self, req_context: ReqContext, outcome: RequestOutcome | None = None, keys: Sequence[OffloadKey] = ()
    ) -> None:
        if req_context.req_id is not None:
            self._book.forget(req_context.req_id)
        self._backing.finish_request(req_context, outcome, keys)

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._backing.take_events()

    def shutdown(self) -> None:
        self._backing.shutdown()

    def stats(self) -> ManagerStats:
        """Return the backing's figures; `filtered` adds the keys that were offered too early."""
        stats = self._backing.stats()
        return replace(stats, filtered=stats.filtered + self._filtered)
