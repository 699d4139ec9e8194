"""`CPUOffloadingManager`: which key is in which block of host memory. Reference, chapter 4.

Theory of operation. A block's memory is in one of four states, and every change goes through the methods of this file:

    free      --prepare_store-->      writing
    writing   --complete_store-->     ready (success) | free (failure)
    writing   --reset, discard-->     detached --the copy's completion--> free
    writing   --abandon-->            free, or detached while the copy runs
    ready     --evict, discard, reset--> free (not pinned) | detached (pinned) --last load's completion--> free

*Detached* memory has no key any more, but a copy that has not ended may still read or write it. A reservation (one
`prepare_store` or `prepare_load`) is known by its ticket and remembers its blocks until the copy's end is reported, so
a late report finds exactly the memory it speaks of, whatever happened to the keys meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from kvoffload.errors import UsageError
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
from kvoffload.manager.block_pool import BlockPool
from kvoffload.manager.policies.base import WRITING, BlockStatus, CachePolicy
from kvoffload.manager.policies.registry import load_policy
from kvoffload.manager.request_book import RequestBook
from kvoffload.manager.specs import CPULoadStoreSpec

Blocks = dict[OffloadKey, BlockStatus]
Entry = tuple[OffloadKey, BlockStatus]


@dataclass(slots=True)
class _Reservation:
    """Blocks that one copy reads or writes and whose end was not reported yet."""

    is_store: bool
    blocks: Blocks


class CPUOffloadingManager(OffloadingManager):
    """Keeps blocks of host memory under a pluggable cache policy.

    Args:
        num_blocks: Offloaded blocks in host memory; with 0 everything misses and every store is refused.
        cache_policy: A registered name, `"module.path:ClassName"`, or a `CachePolicy` class.
        enable_events: Keep an outbox for `take_events`; without it nothing is recorded.

    Raises:
        UsageError: `num_blocks` is negative.
        RegistrationError: The policy is not known.
    """

    def __init__(
        self, num_blocks: int, cache_policy: str | type[CachePolicy] = "lru", enable_events: bool = False
    ) -> None:
        self.medium = CPULoadStoreSpec.medium()
        self.events: list[OffloadingEvent] | None = [] if enable_events else None
        self._pool = BlockPool(num_blocks)
        policy_cls = load_policy(cache_policy) if isinstance(cache_policy, str) else cache_policy
        self._policy = policy_cls(cache_capacity=num_blocks)
        self._blocks: Blocks = {}
        self._reservations: dict[int, _Reservation] = {}
        self._next_ticket = 1
        self._detached: set[int] = set()
        self._quarantined: set[int] = set()
        self._used: set[int] = set()
        self._book = RequestBook()
        self._stats = ManagerStats(capacity=num_blocks)

    # ---- reads

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        block = self._blocks.get(key)
        stats = self._stats
        if req_context.req_id is None or self._book.book(req_context.req_id, (key,)):
            stats.lookups += 1
            if block is None:
                stats.misses += 1
            elif block.ref_cnt >= 0:
                stats.hits += 1
            else:
                stats.pending += 1
        return False if block is None else True if block.ref_cnt >= 0 else None

    def peek(self, key: OffloadKey) -> bool | None:
        """Return what `lookup` would, without counting: for callers that poll."""
        block = self._blocks.get(key)
        return False if block is None else True if block.ref_cnt >= 0 else None

    def match(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> Match:  # noqa: ARG002
        get = self._blocks.get
        ready = held = 0
        for key in keys:
            block = get(key)
            if block is None:
                break
            if ready == held and block.ref_cnt >= 0:
                ready += 1
            held += 1
        return Match(ready, held - ready)

    def held(self, keys: Iterable[OffloadKey]) -> set[OffloadKey]:
        return self._blocks.keys() & set(keys)

    def stats(self) -> ManagerStats:
        return replace(
            self._stats,
            free=self._pool.num_free,
            detached=len(self._detached),
            quarantined=len(self._quarantined),
            policy=self._policy.stats(),
        )

    # ---- loads

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec:  # noqa: ARG002
        blocks: Blocks = {}
        for key in keys:
            block = self._blocks.get(key)
            if block is None or block.ref_cnt < 0:
                what = "not held" if block is None else "still written"
                raise UsageError(f"cannot load key {key.hex()}: it is {what}; look it up first")
            blocks[key] = block
        if not blocks:
            return CPULoadStoreSpec([])
        pinned = []
        for key, block in blocks.items():
            block.ref_cnt += 1
            if block.ref_cnt == 1:
                pinned.append(key)
            self._used.add(block.block_id)
        self._stats.pinned += len(pinned)
        ticket = self._reserve(is_store=False, blocks=blocks)
        if pinned:
            self._policy.on_pinned(pinned)
        return CPULoadStoreSpec([block.block_id for block in blocks.values()], ticket)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext | None = None) -> None:
        if req_context is None:
            self._policy.touch(keys)
        else:
            self._policy.touch_request(tuple(keys), req_context)

    def refresh(self, keys: Collection[OffloadKey]) -> None:
        """Mark keys, in prefix order, as used now without counting another use: for keys that were only stored."""
        self._policy.refresh(keys)

    def complete_load(
        self,
        keys: Collection[OffloadKey],
        req_context: ReqContext | None = None,  # noqa: ARG002
        *,
        ticket: int | None = None,
    ) -> None:
        unique = dict.fromkeys(keys)
        if ticket is None:
            owners = {key: self._load_of(key) for key in unique}
        else:
            owners = self._owners_of(unique, ticket, is_store=False)
        self._end_load([(owner, key) for key, owner in owners.items()])

    def _load_of(self, key: OffloadKey) -> int:
        """Return the oldest load that pins `key` now, else the oldest that still reads its detached memory."""
        current = self._blocks.get(key)
        detached: int | None = None
        if self._detached or (current is not None and current.ref_cnt > 0):
            for ticket, reservation in self._reservations.items():
                block = None if reservation.is_store else reservation.blocks.get(key)
                if block is not None and block is current:
                    return ticket
                if block is not None and detached is None:
                    detached = ticket
        if detached is None:
            raise UsageError(f"key {key.hex()} has no load to complete")
        return detached

    def _end_load(self, ended: Iterable[tuple[int, OffloadKey]]) -> None:
        """Give back pins; frees detached memory that nothing reads any more."""
        unpinned: list[OffloadKey] = []
        for ticket, key in ended:
            block = self._release(ticket, key)
            block.ref_cnt -= 1
            if block.block_id in self._detached:
                self._stats.stale_completions += 1
                if block.ref_cnt == 0:
                    self._free_detached(block)
            elif block.ref_cnt == 0:
                unpinned.append(key)
        self._stats.pinned -= len(unpinned)
        if unpinned:
            self._policy.on_unpinned(unpinned)

    # ---- stores

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        offered = dict.fromkeys(keys)
        wanted: Sequence[OffloadKey] = [key for key in offered if key not in self._blocks]
        if not req_context.store:
            wanted = ()
        filtered: list[OffloadKey] = []
        if wanted:
            admitted = self._policy.admit(wanted, req_context)
            if len(admitted) != len(wanted):
                chosen = set(admitted)
                filtered = [key for key in wanted if key not in chosen]
                wanted = [key for key in wanted if key in chosen]
        if not wanted:
            self._stats.filtered += len(filtered)
            return PrepareStoreOutput([], CPULoadStoreSpec([]), [], filtered_keys=filtered)
        shortage = max(0, len(wanted) - self._pool.num_free)
        victims = self._policy.evict(shortage, set(offered)) if len(wanted) <= self._pool.num_blocks else None
        if victims is None:
            self._stats.refused += len(wanted)
            return None
        taken = self._pool.allocate(len(wanted) - len(victims))
        block_ids = taken + [block.block_id for _, block in victims]
        blocks = {key: BlockStatus(block_id) for key, block_id in zip(wanted, block_ids, strict=True)}
        self._insert(blocks, victims, taken)
        self._forget_evicted(victims)
        self._blocks.update(blocks)
        self._stats.filtered += len(filtered)
        self._stats.reserved += len(blocks)
        self._stats.writing += len(blocks)
        ticket = self._reserve(is_store=True, blocks=blocks)
        spec = CPULoadStoreSpec(block_ids, ticket)
        return PrepareStoreOutput(list(blocks), spec, [key for key, _ in victims], ticket, filtered)

    def _insert(self, blocks: Blocks, victims: Sequence[Entry], taken: Sequence[int]) -> None:
        """Give new keys to the policy; when it raises, it has its old keys again and the pool its blocks."""
        inserted: list[OffloadKey] = []
        try:
            for key, block in blocks.items():
                self._policy.insert(key, block)
                inserted.append(key)
        except BaseException:
            for key in inserted:
                self._policy.remove(key)
            for key, block in victims:
                self._policy.insert(key, block)
            self._pool.free(taken)
            raise

    def _forget_evicted(self, victims: Sequence[Entry]) -> None:
        """Count and announce victims; their blocks have passed to the keys that evicted them."""
        for key, block in victims:
            del self._blocks[key]
            if block.block_id in self._used:
                self._used.remove(block.block_id)
            else:
                self._stats.evicted_unused += 1
        self._stats.evicted += len(victims)
        self._stats.ready -= len(victims)
        self._announce([key for key, _ in victims], removed=True)

    def complete_store(
        self,
        keys: Collection[OffloadKey],
        success: bool = True,
        req_context: ReqContext | None = None,  # noqa: ARG002
        *,
        ticket: int | None = None,
    ) -> None:
        unique = dict.fromkeys(keys)
        if ticket is None:
            owners = {}
            for key in unique:
                owner = self._store_of(key)
                if owner is None:
                    self._stats.stale_completions += 1
                else:
                    owners[key] = owner
        else:
            owners = self._owners_of(unique, ticket, is_store=True)
        done: list[OffloadKey] = []
        for key, owner in owners.items():
            block = self._release(owner, key)
            if block.block_id in self._detached:
                self._stats.stale_completions += 1
                self._free_detached(block)
                continue
            done.append(key)
            if success:
                block.ref_cnt = 0
            else:
                self._policy.remove(key)
                del self._blocks[key]
                self._free(block)
        self._stats.writing -= len(done)
        if success:
            self._stats.stored += len(done)
            self._stats.ready += len(done)
            self._announce(done, removed=False)
            if done:
                self._policy.on_ready(done)
        else:
            self._stats.failed += len(done)

    def _store_of(self, key: OffloadKey) -> int | None:
        """Return the store that writes `key` now, else the oldest that still writes its detached memory."""
        current = self._blocks.get(key)
        writing = current is not None and current.ref_cnt < 0
        detached: int | None = None
        if writing or self._detached:
            for ticket, reservation in self._reservations.items():
                block = reservation.blocks.get(key) if reservation.is_store else None
                if block is not None and block is current:
                    return ticket
                if block is not None and detached is None:
                    detached = ticket
        return detached

    # ---- giving up

    def abandon(self, ticket: int, *, copy_running: bool = False, hung: bool = False) -> None:
        reservation = self._reservations.get(ticket)
        if reservation is None:
            return
        if not reservation.is_store:
            self._abandon_load(ticket, reservation, copy_running=copy_running, hung=hung)
            return
        for key, block in reservation.blocks.items():
            if self._blocks.get(key) is block:
                self._policy.remove(key)
                del self._blocks[key]
                self._stats.abandoned += 1
                self._stats.writing -= 1
                self._detached.add(block.block_id)
            if hung:
                self._quarantined.add(block.block_id)
        if not (copy_running or hung):
            del self._reservations[ticket]
            for block in reservation.blocks.values():
                self._free_detached(block)

    def _abandon_load(self, ticket: int, reservation: _Reservation, *, copy_running: bool, hung: bool) -> None:
        if hung:
            self.discard([key for key, block in reservation.blocks.items() if self._blocks.get(key) is block])
            self._quarantined.update(block.block_id for block in reservation.blocks.values())
        elif not copy_running:
            stale = self._stats.stale_completions
            self._end_load([(ticket, key) for key in reservation.blocks])
            self._stats.stale_completions = stale

    def discard(self, keys: Collection[OffloadKey]) -> int:
        removed: list[OffloadKey] = []
        dropped = 0
        for key in dict.fromkeys(keys):
            block = self._blocks.pop(key, None)
            if block is None:
                continue
            dropped += 1
            self._policy.remove(key)
            if block.ref_cnt < 0:
                self._stats.abandoned += 1
                self._stats.writing -= 1
            else:
                self._stats.discarded += 1
                self._stats.ready -= 1
                removed.append(key)
            self._free_or_detach(block)
        self._announce(removed, removed=True)
        return dropped

    def reset_cache(self) -> int:
        blocks, self._blocks = self._blocks, {}
        removed = [key for key, block in blocks.items() if block.ref_cnt >= 0]
        if type(self._policy).clear is CachePolicy.clear:
            for key in blocks:
                self._policy.remove(key)
        else:
            self._policy.clear()
        for block in blocks.values():
            self._free_or_detach(block)
        self._stats.reset_while_ready += len(removed)
        self._stats.reset_while_writing += len(blocks) - len(removed)
        self._stats.ready = self._stats.writing = self._stats.pinned = 0
        self._announce(removed, removed=True)
        return len(removed)

    # ---- requests, events, end

    def finish_request(
        self, req_context: ReqContext, outcome: RequestOutcome | None = None, keys: Sequence[OffloadKey] = ()
    ) -> None:
        if req_context.req_id is not None:
            self._book.forget(req_context.req_id)
        self._policy.on_request_finished(keys, req_context, outcome)

    def take_events(self) -> list[OffloadingEvent]:
        taken = self.events
        if not taken:
            return []
        self.events = []
        return taken

    def shutdown(self) -> None:
        """Drop every key and every open reservation; nothing is announced."""
        self.events = None
        self.reset_cache()
        for ticket in list(self._reservations):
            self.abandon(ticket)

    # ---- the only places where state changes hands

    def _reserve(self, *, is_store: bool, blocks: Blocks) -> int:
        ticket = self._next_ticket
        self._next_ticket += 1
        self._reservations[ticket] = _Reservation(is_store, dict(blocks))
        return ticket

    def _release(self, ticket: int, key: OffloadKey) -> BlockStatus:
        reservation = self._reservations[ticket]
        block = reservation.blocks.pop(key)
        if not reservation.blocks:
            del self._reservations[ticket]
        return block

    def _owners_of(self, keys: Iterable[OffloadKey], ticket: int, *, is_store: bool) -> dict[OffloadKey, int]:
        """Return the keys that are open under `ticket`; the others are counted as stale."""
        reservation = self._reservations.get(ticket)
        if reservation is not None and reservation.is_store is not is_store:
            raise UsageError(f"ticket {ticket} is of a {'store' if reservation.is_store else 'load'}")
        owners: dict[OffloadKey, int] = {}
        for key in keys:
            if reservation is not None and key in reservation.blocks:
                owners[key] = ticket
            else:
                self._stats.stale_completions += 1
        return owners

    def _free(self, block: BlockStatus) -> None:
        self._used.discard(block.block_id)
        self._pool.free((block.block_id,))

    def _free_detached(self, block: BlockStatus) -> None:
        self._detached.discard(block.block_id)
        self._quarantined.discard(block.block_id)
        self._free(block)

    def _free_or_detach(self, block: BlockStatus) -> None:
        """Let go of a block that just lost its key."""
        if block.ref_cnt == 0:
            self._free(block)
            return
        self._detached.add(block.block_id)
        if block.ref_cnt != WRITING:
            self._stats.pinned -= 1

    def _announce(self, keys: list[OffloadKey], *, removed: bool) -> None:
        if keys and self.events is not None:
            self.events.append(OffloadingEvent(keys, self.medium, removed))
