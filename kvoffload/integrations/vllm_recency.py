"""When a vLLM request counts as a use of its blocks: vLLM never calls `touch`, so requests' boundaries must do.

Theory of operation. `lru` and `arc` get what vLLM's own manager gives them: one use a request, when it finished, with
the head of the prefix newest. A block that the request only stored becomes recent, not frequent; a block that it loaded
or offered while it was held counts as used again. ARC also hears, before a block is stored, that its ghost was asked
for: storing it drops the ghost. Other policies hear of a request as they do under kvoffload's own service: all its keys
once, at its first load or store, and again at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby

from kvoffload.keys import OffloadKey
from kvoffload.manager.base import PrepareStoreOutput, ReqContext
from kvoffload.manager.cpu import CPUOffloadingManager
from kvoffload.manager.request_book import RequestBook

Position = Callable[[OffloadKey], int | None]

FINISH_POLICIES = ("lru", "arc")
"""Policies whose keys are used when the request finished."""


class RequestUses:
    """The keys one request loaded or offered, and how.

    Attributes:
        keys: All of them, in the order they were seen.
        inserted: Those it stored.
        reused: Those it found held and did not store itself.
        announced: Whether the policy was told of the request's start.
    """

    __slots__ = ("announced", "inserted", "keys", "reused")

    def __init__(self) -> None:
        self.keys: dict[OffloadKey, None] = {}
        self.inserted: set[OffloadKey] = set()
        self.reused: set[OffloadKey] = set()
        self.announced = False

    def loaded(self, keys: Collection[OffloadKey]) -> None:
        """Book keys that are loaded."""
        self.keys.update(dict.fromkeys(keys))
        self.reused.update(key for key in keys if key not in self.inserted)

    def offered(self, keys: Iterable[OffloadKey], held: Collection[OffloadKey], stored: Collection[OffloadKey]) -> None:
        """Book an offer: `keys` that count as used, those of them that were readable, and those that got a block."""
        self.keys.update(dict.fromkeys(keys))
        if held:
            self.reused.update(key for key in held if key not in self.inserted)
        self.inserted.update(stored)

    def in_prefix_order(self, position: Position) -> list[OffloadKey]:
        """Return the keys by the position of their last token, groups side by side; as seen where one is unknown."""
        keys = sorted(self.keys, key=_group) if len({key[-4:] for key in self.keys}) > 1 else list(self.keys)
        ends = [position(key) for key in keys]
        if None in ends:
            return keys
        order = sorted(range(len(keys)), key=ends.__getitem__)  # type: ignore[arg-type] # no None is left
        return [keys[index] for index in order]


def _group(key: OffloadKey) -> bytes:
    return key[-4:]


def mark_finished(manager: CPUOffloadingManager, uses: RequestUses, position: Position, *, recency_only: bool) -> None:
    """Tell an `lru` or `arc` manager that the request which made these uses ended."""
    keys = uses.in_prefix_order(position)
    if recency_only:
        manager.refresh(keys)
        return
    runs = [(kind, list(run)) for kind, run in groupby(keys, key=lambda key: _kind(key, uses))]
    for kind, run in reversed(runs):
        if kind == "stored":
            manager.refresh(run)
        elif kind == "reused":
            manager.touch([key for key in run if manager.peek(key) is not False])  # a ghost was not asked for again


def _kind(key: OffloadKey, uses: RequestUses) -> str:
    if key in uses.reused:
        return "reused"
    return "stored" if key in uses.inserted else "refused"


class GhostLearningManager(CPUOffloadingManager):
    """Shows its policy the absent keys of an offer, once per request, before their ghosts are dropped."""

    def __init__(self, num_blocks: int, cache_policy: str, enable_events: bool = False) -> None:
        super().__init__(num_blocks, cache_policy, enable_events)
        self._learnt = RequestBook()

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Touch the keys that are not held, then reserve; see `CPUOffloadingManager`."""
        held = self.held(keys)
        absent = [key for key in keys if key not in held]
        if absent and req_context.req_id is not None:
            absent = self._learnt.book(req_context.req_id, absent)
        if absent:
            self.touch(absent)
        return super().prepare_store(keys, req_context)

    def reset_cache(self) -> int:
        """Drop every key, and what requests were told of ghosts that are gone."""
        self._learnt = RequestBook()
        return super().reset_cache()

    def forget(self, req_id: str) -> None:
        """Free what was remembered of a request."""
        self._learnt.forget(req_id)


def request_keys(positions: Iterable[OffloadKey]) -> Sequence[OffloadKey]:
    """Return a request's keys, which come in prefix order, group after group."""
    return sorted(positions, key=_group)
