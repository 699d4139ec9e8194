"""The manager's contract: `OffloadingManager`, its values, and the Protocols by which others hear of it.

Reference, chapter 1. Beyond it: tickets, `match`, `discard`, `reset_cache`, `abandon`, `finish_request`, `stats`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvoffload.keys import BlockInfo, OffloadKey
from kvoffload.manager.specs import LoadStoreSpec


@dataclass(slots=True)
class ReqContext:
    """Who asks. Reference, chapter 1.2.

    Attributes:
        req_id: Request id; with one, hits and the reuse filter count each key once per request.
        kv_transfer_params: Engine parameters of the request, passed through.
        priority: Larger is kept longer by policies that look at it.
        store: False: nothing of this request is stored.
        started_seconds: Monotonic time at which the request came, on the clock of `RequestOutcome.now_seconds`.
    """

    req_id: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    priority: int = 0
    store: bool = True
    started_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """What is known when a request ends; time and hints come in as arguments, the manager has no clock.

    Attributes:
        now_seconds: Monotonic time of the end; None: policies count requests instead.
        output_tokens: Tokens generated.
        conversation_ended: The embedder knows that this conversation does not go on.
        expected_return_seconds: The embedder's estimate of the seconds until the conversation's next request.
    """

    now_seconds: float | None = None
    output_tokens: int | None = None
    conversation_ended: bool = False
    expected_return_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Match:
    """Length of a prefix: `ready` keys from the start can be loaded.

    `pending` more are held, but behind one that is being written: when that ends well, `ready + pending` can be loaded.
    """

    ready: int
    pending: int


@dataclass(frozen=True, slots=True)
class OffloadingEvent:
    """Keys that became readable or ceased to be. Reference, chapter 1.5."""

    keys: list[OffloadKey]
    medium: str
    removed: bool


@dataclass(slots=True)
class PrepareStoreOutput:
    """What a store may write. Reference, chapter 1.4.

    Attributes:
        keys_to_store: Keys that got a block, in offer order, each once.
        store_spec: Their blocks, in the same order.
        evicted_keys: Keys that made room.
        ticket: Names this reservation; None when nothing was reserved.
        filtered_keys: Keys that a reuse filter or an admission rule did not let in.
    """

    keys_to_store: list[OffloadKey]
    store_spec: LoadStoreSpec
    evicted_keys: list[OffloadKey]
    ticket: int | None = None
    filtered_keys: list[OffloadKey] = field(default_factory=list)


@dataclass(slots=True)
class ManagerStats:
    """Counters since the start and occupancy now, in offloaded blocks.

    Always true: free + writing + ready + detached = capacity; reserved = stored + failed + abandoned +
    reset_while_writing + writing; stored - evicted - discarded - reset_while_ready = ready; hits + misses + pending =
    lookups. `pinned` is a part of ready, `quarantined` a part of detached. `stale_completions` counts each key of a
    completion that had nothing to complete; `refused` the blocks that a refused store would have needed.
    """

    capacity: int = 0
    free: int = 0
    writing: int = 0
    ready: int = 0
    pinned: int = 0
    detached: int = 0
    quarantined: int = 0
    lookups: int = 0
    hits: int = 0
    misses: int = 0
    pending: int = 0
    reserved: int = 0
    stored: int = 0
    failed: int = 0
    abandoned: int = 0
    reset_while_writing: int = 0
    evicted: int = 0
    evicted_unused: int = 0
    discarded: int = 0
    reset_while_ready: int = 0
    refused: int = 0
    filtered: int = 0
    stale_completions: int = 0
    policy: dict[str, float] = field(default_factory=dict)

    @property
    def usage(self) -> float:
        """Share of the capacity that is not free, 0 to 1; 0.0 without capacity."""
        return self._share(self.capacity - self.free)

    @property
    def write_usage(self) -> float:
        """Share of the capacity that stores hold, 0 to 1."""
        return self._share(self.writing)

    @property
    def read_usage(self) -> float:
        """Share of the capacity that loads hold, 0 to 1."""
        return self._share(self.pinned)

    def _share(self, blocks: int) -> float:
        return blocks / self.capacity if self.capacity else 0.0


class OffloadingManager(ABC):
    """Decides which blocks host memory keeps. Reference, chapter 1.6.

    **Tickets.** `prepare_store` and `prepare_load` reserve and return a ticket (`PrepareStoreOutput.ticket`,
    `LoadStoreSpec.ticket`), an int that is never used twice. A completion with a ticket that was reset, abandoned or
    already completed is dropped and counted (`stale_completions`): it makes nothing readable and unpins nothing; if
    memory was *detached* and waits for the end of that copy, the completion is that end, and the memory becomes free.
    Without a ticket the current reservation of each key is meant: `complete_store` ignores and counts keys that have
    none, `complete_load` without a pin raises.

    **All or nothing.** Each call succeeds, or raises, or returns None, and then nothing has changed.

    **Duplicates** of a key inside one call count once.

    Not thread-safe: one owner calls it.
    """

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Return True (readable), False (not held) or None (being written: ask again). Counted."""

    @abstractmethod
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Pin `keys` and return where they are; `complete_load` unpins.

        Raises:
            UsageError: A key is not readable; nothing is pinned.
        """

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext | None = None) -> None:
        """Mark keys, in prefix order, as used now; absent keys are given too (policies learn from their ghosts)."""

    def complete_load(
        self, keys: Collection[OffloadKey], req_context: ReqContext | None = None, *, ticket: int | None = None
    ) -> None:
        """Unpin what `prepare_load` pinned.

        Raises:
            UsageError: Without a ticket, a key has no pin; nothing is unpinned.
        """

    @abstractmethod
    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Reserve blocks for the keys that are not held, evicting others if needed; None when there is no room."""

    def complete_store(
        self,
        keys: Collection[OffloadKey],
        success: bool = True,
        req_context: ReqContext | None = None,
        *,
        ticket: int | None = None,
    ) -> None:
        """Make reserved keys readable, or drop them and free their blocks when the copy failed."""

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return and clear the outbox; applied one by one it gives exactly the readable set."""
        return ()

    def shutdown(self) -> None:
        """Release what the manager holds."""

    # Beyond the reference.

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Match:
        """Look `keys` up in order as `lookup` does, up to and including the first one that is not held; counted."""
        ready = held = 0
        for key in keys:
            found = self.lookup(key, req_context)
            if found is False:
                break
            if ready == held and found:
                ready += 1
            held += 1
        return Match(ready, held - ready)

    def held(self, keys: Iterable[OffloadKey]) -> set[OffloadKey]:
        """Return those of `keys` that are held, readable or being written: a pure read."""
        return {key for key in keys if self.match((key,)) != Match(0, 0)}

    @abstractmethod
    def match(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> Match:
        """Return how much of the prefix is ready, and how much more will be: a pure read, no count, no recency."""

    @abstractmethod
    def abandon(self, ticket: int, *, copy_running: bool = False, hung: bool = False) -> None:
        """Give a reservation up.

        A store's keys disappear (counted `abandoned`), a load's pins go. Without a running copy the memory is free at
        once; with one it is *detached* until the copy's completion is reported with the same ticket. A load whose copy
        runs keeps its pins until that completion: the content stays valid, so its keys stay readable. `hung` (implies
        a running copy) also counts the blocks as quarantined and, for a load, drops the keys: they are detached,
        counted `discarded`, and a removal is announced. Unknown and finished tickets are ignored.
        """

    @abstractmethod
    def discard(self, keys: Collection[OffloadKey]) -> int:
        """Drop keys whose content is invalid; pinned and unfinished ones are detached. Return how many were dropped."""

    @abstractmethod
    def reset_cache(self) -> int:
        """Drop every key; pinned and unfinished blocks are detached. Return how many readable keys were dropped."""

    def finish_request(
        self,
        req_context: ReqContext,
        outcome: RequestOutcome | None = None,
        keys: Sequence[OffloadKey] = (),
    ) -> None:
        """Tell that a request ended, with all its keys in prefix order (group after group)."""

    @abstractmethod
    def stats(self) -> ManagerStats:
        """Return counters and occupancy, consistent with each other."""


class EventSink(Protocol):
    """Where residency changes go. Never blocks, never raises; called by the manager's owner, in order."""

    def publish(self, events: Sequence[OffloadingEvent], infos: Mapping[OffloadKey, BlockInfo]) -> None:
        """Take the manager's events; `infos` describes stored keys where the caller knows them."""

    def describe(self, infos: Mapping[OffloadKey, BlockInfo]) -> None:
        """Take infos of keys that are already held: blocks withheld for want of them are announced now."""


class MetricsSink(Protocol):
    """Where the service counts. Names are those of the metric catalog without prefix and suffix; never raises."""

    def count(self, name: str, amount: float = 1, label: str = "") -> None:
        """Add to a counter; `label` is the value of its one label, if it has one."""

    def observe(self, name: str, value: float, label: str = "") -> None:
        """Add one observation to a histogram."""
