"""`BlockStates`: the state of every block of host memory, and what can be read from it. Reference, chapter 4.

Which states there are, and who changes them, says `kvoffload.manager.cpu`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvoffload.errors import UsageError
from kvoffload.keys import OffloadKey
from kvoffload.manager.base import ManagerStats, Match, OffloadingEvent, OffloadingManager, ReqContext
from kvoffload.manager.block_pool import BlockPool
from kvoffload.manager.block_table import BlockTable
from kvoffload.manager.policies.base import CachePolicy
from kvoffload.manager.policies.indexed import order_of
from kvoffload.manager.policies.registry import load_policy
from kvoffload.manager.request_book import RequestBook
from kvoffload.manager.reservations import Reservations
from kvoffload.manager.specs import CPULoadStoreSpec

_MATCHES = tuple(Match(ready, 0) for ready in range(1024))


class BlockStates(OffloadingManager):
    """The state of a manager of host memory: lookups, statistics and the outbox; `CPUOffloadingManager` has the rest.

    Args:
        num_blocks: Offloaded blocks in host memory; with 0 everything misses and every store is refused.
        cache_policy: A registered name, `"module.path:ClassName"`, or a `CachePolicy` class.
        enable_events: Keep an outbox for `take_events`; without it nothing is recorded.
        block_tokens: Tokens in a block, for policies that judge by size.

    Raises:
        UsageError: An argument is of a wrong kind, or a number is out of range.
        RegistrationError: The policy is not known.
    """

    def __init__(
        self,
        num_blocks: int,
        cache_policy: str | type[CachePolicy] = "lru",
        enable_events: bool = False,
        *,
        block_tokens: int | None = None,
    ) -> None:
        _check_options(enable_events, block_tokens)
        self.medium = CPULoadStoreSpec.medium()
        self.events: list[OffloadingEvent] | None = [] if enable_events else None
        self._pool = BlockPool(num_blocks)
        self._table = BlockTable(num_blocks)
        policy_cls = _policy_class(cache_policy)
        self._policy = policy_cls(cache_capacity=num_blocks)
        if block_tokens is not None:
            self._policy.set_block_tokens(block_tokens)
        self._order = order_of(self._policy, self._table)
        self._admits_all = policy_cls.admit is CachePolicy.admit
        self._asks_who_touches = policy_cls.touch_request is not CachePolicy.touch_request
        self._reservations = Reservations()
        self._detached: set[int] = set()
        self._quarantined: set[int] = set()
        self._book = RequestBook()
        self._stats = ManagerStats(capacity=num_blocks)

    # ---- reads

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        found = self.peek(key)
        req_id = req_context.req_id
        if req_id is None or self._book.book_one(req_id, key):
            stats = self._stats
            stats.lookups += 1
            if found:
                stats.hits += 1
            elif found is None:
                stats.pending += 1
            else:
                stats.misses += 1
        return found

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Match:
        match = self.match(keys)
        held = match.ready + match.pending
        looked: Sequence[OffloadKey] = keys[: held + 1]
        stats = self._stats
        if req_context.req_id is None:
            missed = len(looked) - held
            pending = self._count_pending(keys[match.ready : held]) if match.pending else 0
        else:
            end = keys[held] if held < len(keys) else None
            looked = self._book.book(req_context.req_id, looked)
            missed = 1 if end is not None and looked and looked[-1] == end else 0
            pending = self._count_pending(looked) if match.pending else 0
        stats.lookups += len(looked)
        stats.misses += missed
        stats.pending += pending
        stats.hits += len(looked) - missed - pending
        return match

    def _count_pending(self, keys: Sequence[OffloadKey]) -> int:
        refs = self._table.cells[1]
        return sum(block is not None and refs[block] < 0 for block in self._table.find(keys))

    def peek(self, key: OffloadKey) -> bool | None:
        """Return what `lookup` would, without counting: for callers that poll."""
        block = self._table.get(key)
        if block is None:
            return False
        return True if self._table.cells[1][block] >= 0 else None

    def readable(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those of `keys` that can be loaded, in order: a pure read."""
        refs = self._table.cells[1]
        found = zip(keys, self._table.find(keys), strict=True)
        return [key for key, block in found if block is not None and refs[block] >= 0]

    def match(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> Match:  # noqa: ARG002
        ready, held = self._table.match(keys, writing=self._stats.writing > 0)
        if ready == held and ready < len(_MATCHES):
            return _MATCHES[ready]
        return Match(ready, held - ready)

    def held(self, keys: Iterable[OffloadKey]) -> set[OffloadKey]:
        keys = list(keys)
        return {key for key, block in zip(keys, self._table.find(keys), strict=True) if block is not None}

    def stats(self) -> ManagerStats:
        return replace(
            self._stats,
            free=self._pool.num_free,
            detached=len(self._detached),
            quarantined=len(self._quarantined),
            policy=self._policy.stats(),
        )

    # ---- the outbox, and what both halves of a transfer need

    def take_events(self) -> list[OffloadingEvent]:
        taken = self.events
        if not taken:
            return []
        self.events = []
        return taken

    def _free_detached(self, block: int) -> None:
        self._detached.discard(block)
        self._quarantined.discard(block)
        self._table.used[block] = False
        self._pool.free((block,))

    def _announce(self, keys: list[OffloadKey], *, removed: bool) -> None:
        if keys and self.events is not None:
            self.events.append(OffloadingEvent(keys, self.medium, removed))


def _policy_class(policy: object) -> type[CachePolicy]:
    if isinstance(policy, str):
        return load_policy(policy)
    if isinstance(policy, type) and issubclass(policy, CachePolicy):
        return policy
    raise UsageError(f"cache_policy must be a policy's name or a CachePolicy class, got {policy!r}")


def _check_options(enable_events: object, block_tokens: object) -> None:
    if not isinstance(enable_events, bool):
        raise UsageError(f"enable_events must be True or False, got {enable_events!r}")
    if block_tokens is None:
        return
    if isinstance(block_tokens, bool) or not isinstance(block_tokens, int) or block_tokens < 1:
        raise UsageError(f"block_tokens must be a positive whole number, got {block_tokens!r}")
