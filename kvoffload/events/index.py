"""`ResidencyIndex`: who holds which prefix, from the feeds of many sources."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from kvoffload.events.subscriber import GapRecovered, Item, SourceReset, Subscription, Synced, Unrecoverable, is_silent
from kvoffload.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, Hash

logger = logging.getLogger(__name__)

Place = tuple[str, int | None, Hash]
_Edge = tuple[int, Hash | None, tuple[int, ...], str | None, Any]


@dataclass(frozen=True, slots=True)
class TierMatch:
    """Tokens of a prefix that a source can serve: `gpu` from its GPU alone, `cpu` with host memory behind it."""

    gpu: int
    cpu: int


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """What is known of one source.

    Attributes:
        synced: What was heard is the whole truth, as of `silent_seconds` ago.
        sequence: Last number applied.
        blocks: Blocks it holds.
        gaps_recovered: Gaps that a replay closed.
        resets: Times it was heard from the beginning, the start included.
        unrecoverable: Times something was missing for good.
        last_problem: What the last reset or loss was about.
        model_name: Its model, if it says so.
        events: Events applied.
        silent_seconds: Time since it last said something.
        silent: It beats, but was not heard for several beats and does not answer: it may be gone.
    """

    synced: bool
    sequence: int
    blocks: int
    gaps_recovered: int
    resets: int
    unrecoverable: int
    last_problem: str | None
    model_name: str | None
    events: int
    silent_seconds: float
    silent: bool


@dataclass(slots=True)
class _Source:
    places: dict[Place, _Edge | None] = field(default_factory=dict)
    edges: dict[_Edge, dict[Place, None]] = field(default_factory=dict)
    block_size: int = 0
    model_name: str | None = None
    synced: bool = False
    sequence: int = -1
    gaps_recovered: int = 0
    resets: int = 0
    unrecoverable: int = 0
    last_problem: str | None = None
    events: int = 0
    heard_at: float = field(default_factory=time.monotonic)
    heartbeat_seconds: float = 0.0


class ResidencyIndex:
    """Applies feeds and answers which source holds how much of a prompt. Thread-safe.

    `follow` reads feeds in threads of its own; without it, `apply` takes the items of a `Subscription` by hand.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._sources: dict[str, _Source] = {}
        self._threads: dict[str, threading.Thread] = {}
        self._stop = threading.Event()

    def follow(self, sources: Mapping[str, str | tuple[str, str | None]], *, timeout: float = 2.0) -> None:
        """Follow feeds: name -> endpoint (replays at the next port), or name -> (endpoint, replay endpoint)."""
        for name, where in sources.items():
            endpoint, replay = (where, "next") if isinstance(where, str) else where
            with self._lock:
                self._sources.setdefault(name, _Source())
            thread = threading.Thread(
                target=self._follow, args=(name, endpoint, replay, timeout), name=f"kvoffload-index-{name}", daemon=True
            )
            self._threads[name] = thread
            thread.start()

    def synced(self, timeout: float = 10.0) -> bool:
        """Wait until every followed source is synced."""
        with self._changed:
            return self._changed.wait_for(lambda: all(s.synced for s in self._sources.values()), timeout)

    def reached(self, source: str, sequence: int, timeout: float = 10.0) -> bool:
        """Wait until everything up to a number of a source was applied."""
        with self._changed:
            return self._changed.wait_for(
                lambda: source in self._sources and self._sources[source].sequence >= sequence, timeout
            )

    def apply(self, source: str, item: Item) -> None:
        """Apply one item of a source's subscription."""
        with self._lock:
            found = self._sources.setdefault(source, _Source())
            found.heard_at = time.monotonic()
            self._apply(found, item)

    def holds(self, source: str) -> set[Place]:
        """Return (medium, group, hash) of every block that a source holds."""
        with self._lock:
            found = self._sources.get(source)
            return set() if found is None else set(found.places)

    def longest_prefix(
        self,
        token_ids: Sequence[int],
        model: str | None = None,
        *,
        lora_name: str | None = None,
        extra_keys: Sequence[Sequence[Any] | None] = (),
        group_idx: int = 0,
    ) -> dict[str, TierMatch]:
        """Return what each source can serve of a prompt, in tokens.

        Args:
            token_ids: The prompt.
            model: Leave out sources that serve another model; None: all count.
            lora_name: Adapter of the request.
            extra_keys: Per block, what else identifies it (salt, multimodal hashes): salted blocks match only with it.
            group_idx: KV-cache group.
        """
        with self._lock:
            return {
                name: _match(source, token_ids, lora_name, extra_keys, group_idx)
                for name, source in self._sources.items()
                if model is None or source.model_name in (None, model)
            }

    def status(self) -> dict[str, SourceStatus]:
        """Return the state of each source."""
        now = time.monotonic()
        with self._lock:
            return {
                name: SourceStatus(
                    s.synced, s.sequence, len(s.places), s.gaps_recovered, s.resets, s.unrecoverable, s.last_problem,
                    s.model_name, s.events, max(0.0, now - s.heard_at),
                    is_silent(s.heartbeat_seconds, now - s.heard_at),
                )
                for name, s in self._sources.items()
            }  # fmt: skip

    def close(self, timeout: float = 5.0) -> None:
        """Stop following."""
        self._stop.set()
        deadline = time.monotonic() + timeout
        for thread in self._threads.values():
            thread.join(max(deadline - time.monotonic(), 0.1))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _follow(self, name: str, endpoint: str, replay: str | None, timeout: float) -> None:
        source = self._sources[name]
        with Subscription(endpoint, replay, timeout=timeout) as subscription:
            while not self._stop.is_set():
                try:
                    for item in subscription.poll(0.1):
                        with self._lock:
                            self._apply(source, item)
                except Exception:
                    logger.exception("the index goes on after an error of source %s", name)
                    self._stop.wait(0.5)
                with self._changed:
                    description = subscription.description or {}
                    source.model_name = description.get("model_name") or source.model_name
                    source.sequence = subscription.sequence
                    source.heard_at = subscription.heard_at
                    source.heartbeat_seconds = subscription.heartbeat_seconds
                    self._changed.notify_all()

    def _apply(self, source: _Source, item: Item) -> None:
        source.events += isinstance(item, BlockStored | BlockRemoved | AllBlocksCleared)
        if isinstance(item, BlockStored):
            _store(source, item)
        elif isinstance(item, BlockRemoved):
            for name in item.block_hashes:
                _remove(source, (item.medium or "GPU", item.group_idx, name))
        elif isinstance(item, AllBlocksCleared):
            source.places.clear()
            source.edges.clear()
        elif isinstance(item, SourceReset):
            source.places.clear()
            source.edges.clear()
            source.synced = False
            source.resets += 1
            source.last_problem = item.reason
        elif isinstance(item, Synced):
            source.synced, source.sequence = True, item.sequence
        elif isinstance(item, GapRecovered):
            source.gaps_recovered += 1
        elif isinstance(item, Unrecoverable):
            source.unrecoverable += 1
            source.last_problem = item.why


def _store(source: _Source, event: BlockStored) -> None:
    size, parent = event.block_size, event.parent_block_hash
    medium, group = event.medium or "GPU", event.group_idx
    described = size > 0 and len(event.token_ids) == size * len(event.block_hashes)
    for index, name in enumerate(event.block_hashes):
        place = (medium, group, name)
        _remove(source, place)
        edge: _Edge | None = None
        if described:
            source.block_size = size
            tokens = tuple(event.token_ids[index * size : (index + 1) * size])
            extra = None if event.extra_keys is None else _frozen(event.extra_keys[index])
            edge = (group or 0, parent, tokens, event.lora_name, extra)
            source.edges.setdefault(edge, {})[place] = None
        source.places[place] = edge
        parent = name


def _remove(source: _Source, place: Place) -> None:
    edge = source.places.pop(place, None)
    if edge is not None:
        held = source.edges[edge]
        held.pop(place, None)
        if not held:
            del source.edges[edge]


def _frozen(value: object) -> Any:  # noqa: ANN401 - extra keys are whatever an engine hashed
    if isinstance(value, list | tuple):
        return tuple(_frozen(item) for item in value)
    return value


def _match(
    source: _Source,
    token_ids: Sequence[int],
    lora_name: str | None,
    extra_keys: Sequence[Sequence[Any] | None],
    group: int,
) -> TierMatch:
    size = source.block_size
    if not size:
        return TierMatch(0, 0)
    parent: Hash | None = None
    gpu = cpu = 0
    on_gpu = True
    for index, start in enumerate(range(0, len(token_ids) - size + 1, size)):
        extra = _frozen(extra_keys[index]) if index < len(extra_keys) else None
        edge = (group, parent, tuple(token_ids[start : start + size]), lora_name, extra)
        held: Iterable[Place] = source.edges.get(edge, ())
        media = {place[0] for place in held}
        if not media & {"GPU", "CPU"}:
            break
        on_gpu = on_gpu and "GPU" in media
        gpu += size if on_gpu else 0
        cpu += size
        parent = next(iter(held))[2]
    return TierMatch(gpu, cpu)
