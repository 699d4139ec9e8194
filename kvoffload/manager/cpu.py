"""`CPUOffloadingManager`: which key is in which block of host memory. Reference, chapter 4.

Theory of operation. A block's memory is in one of four states, and every change goes through the methods of this file:

    free      --prepare_store-->         writing
    writing   --complete_store-->        ready (success) | free (failure)
    writing   --reset, discard-->        detached --the copy's completion--> free
    writing   --abandon-->               free, or detached while the copy runs
    ready     --evict, discard, reset--> free (not pinned) | detached (pinned) --last load's completion--> free

*Detached* memory has no key any more, but a copy that has not ended may still read or write it. A reservation (one
`prepare_store` or `prepare_load`) is known by its ticket and remembers its blocks until the copy's end is reported, so
a late report finds exactly the memory it speaks of, whatever happened to the keys meanwhile.

Per-block state is in the columns of a `BlockTable`, and a call works on whole batches. The usual completion names
exactly the keys of its reservation: it takes the blocks from there and looks nothing up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np

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
from kvoffload.manager.block_table import BlockTable, Ids
from kvoffload.manager.policies.base import WRITING, CachePolicy
from kvoffload.manager.policies.indexed import order_of
from kvoffload.manager.policies.registry import load_policy
from kvoffload.manager.request_book import RequestBook
from kvoffload.manager.reservations import Owners, Reservations
from kvoffload.manager.specs import CPULoadStoreSpec

_NO_IDS = np.empty(0, np.int64)
_MATCHES = tuple(Match(ready, 0) for ready in range(1024))


class CPUOffloadingManager(OffloadingManager):
    """Keeps blocks of host memory under a pluggable cache policy.

    Args:
        num_blocks: Offloaded blocks in host memory; with 0 everything misses and every store is refused.
        cache_policy: A registered name, `"module.path:ClassName"`, or a `CachePolicy` class.
        enable_events: Keep an outbox for `take_events`; without it nothing is recorded.
        block_tokens: Tokens in a block, for policies that judge by size.

    Raises:
        UsageError: `num_blocks` is negative.
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
        self.medium = CPULoadStoreSpec.medium()
        self.events: list[OffloadingEvent] | None = [] if enable_events else None
        self._pool = BlockPool(num_blocks)
        self._table = BlockTable(num_blocks)
        policy_cls = load_policy(cache_policy) if isinstance(cache_policy, str) else cache_policy
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
            pending = self._count_pending(keys[match.ready : held])
        else:
            end = keys[held] if held < len(keys) else None
            looked = self._book.book(req_context.req_id, looked)
            missed = 1 if end is not None and looked and looked[-1] == end else 0
            pending = self._count_pending(looked)
        stats.lookups += len(looked)
        stats.misses += missed
        stats.pending += pending
        stats.hits += len(looked) - missed - pending
        return match

    def _count_pending(self, keys: Sequence[OffloadKey]) -> int:
        writing = self._table.writing
        return sum(key in writing for key in keys) if writing else 0

    def peek(self, key: OffloadKey) -> bool | None:
        """Return what `lookup` would, without counting: for callers that poll."""
        table = self._table
        if key in table.shards[hash(key) >> table.shift]:
            return True
        return None if key in table.writing else False

    def readable(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those of `keys` that can be loaded, in order: a pure read."""
        return [key for key, block in zip(keys, self._table.find(keys), strict=True) if block is not None]

    def match(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> Match:  # noqa: ARG002
        table = self._table
        shards, shift = table.shards, table.shift
        ready = 0
        for key in keys:
            if key not in shards[hash(key) >> shift]:
                break
            ready += 1
        else:
            return _MATCHES[ready] if ready < len(_MATCHES) else Match(ready, 0)
        writing = table.writing
        if not writing or keys[ready] not in writing:
            return _MATCHES[ready] if ready < len(_MATCHES) else Match(ready, 0)
        held = ready + 1
        for key in keys[held:]:
            if key not in shards[hash(key) >> shift] and key not in writing:
                break
            held += 1
        return Match(ready, held - ready)

    def held(self, keys: Iterable[OffloadKey]) -> set[OffloadKey]:
        keys = list(keys)
        return {key for key, block in zip(keys, self._table.find_held(keys), strict=True) if block is not None}

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
        table = self._table
        names = list(keys)
        found = table.find(names)
        if None in found:
            key = names[found.index(None)]
            what = "still written" if key in table.writing else "not held"
            raise UsageError(f"cannot load key {key.hex()}: it is {what}; look it up first")
        if len(found) > 1 and len(set(found)) != len(found):
            names = list(dict.fromkeys(names))
            found = table.find(names)
        ids = np.array(found, np.int64)
        if not found:
            return CPULoadStoreSpec.of_blocks(ids)
        refs = table.refs[ids]
        table.refs[ids] = refs + 1
        table.used[ids] = True
        self._stats.pinned += len(found) - int(np.count_nonzero(refs))
        ticket = self._reservations.open(names, ids, is_store=False)
        self._order.pinned(names, ids)
        return CPULoadStoreSpec.of_blocks(ids.copy(), ticket)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext | None = None) -> None:
        if req_context is not None and self._asks_who_touches:
            self._policy.touch_request(tuple(keys), req_context)
        else:
            self._policy.touch(keys)

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
        names = list(keys)
        whole = self._reservations.whole(names, ticket, self._detached, is_store=False)
        if whole is not None:
            self._unpin(names, self._reservations.close(whole))
            return
        names = list(dict.fromkeys(names))
        owners = self._loads_of(names) if ticket is None else self._under(names, ticket, is_store=False)
        self._end_load([(owner, key) for key, owner in owners.items()])

    def _loads_of(self, keys: list[OffloadKey]) -> Owners:
        """Return the load that each key means without a ticket; see `Reservations.loads_of`."""
        return self._reservations.loads_of(keys, dict(zip(keys, self._table.find(keys), strict=True)))

    def _end_load(self, ended: Iterable[tuple[int, OffloadKey]], *, stale: bool = True) -> None:
        """Give back pins one by one; free detached memory that nothing reads any more."""
        keys: list[OffloadKey] = []
        blocks: list[int] = []
        refs = self._table.refs
        for ticket, key in ended:
            block = self._reservations.close_key(ticket, key)
            if block not in self._detached:
                keys.append(key)
                blocks.append(block)
                continue
            self._stats.stale_completions += stale
            refs[block] -= 1
            if not refs[block]:
                self._free_detached(block)
        if keys:
            self._unpin(keys, np.array(blocks, np.int64))

    def _unpin(self, keys: list[OffloadKey], ids: Ids) -> None:
        refs = self._table.refs[ids] - 1
        self._table.refs[ids] = refs
        self._stats.pinned -= len(keys) - int(np.count_nonzero(refs))
        self._order.unpinned(keys, ids)

    # ---- stores

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        table, stats = self._table, self._stats
        offered = list(dict.fromkeys(keys))
        found = table.find_held(offered)
        wanted: Sequence[OffloadKey] = offered
        resident: list[int] = []
        if found.count(None) != len(found):
            wanted = [key for key, block in zip(offered, found, strict=True) if block is None]
            resident = [block for block in found if block is not None]
        filtered: list[OffloadKey] = []
        if not req_context.store:
            wanted = ()
        elif wanted and not self._admits_all:
            admitted = self._policy.admit(wanted, req_context)
            if len(admitted) != len(wanted):
                chosen = set(admitted)
                filtered = [key for key in wanted if key not in chosen]
                wanted = [key for key in wanted if key in chosen]
        count = len(wanted)
        if not count:
            stats.filtered += len(filtered)
            return PrepareStoreOutput([], CPULoadStoreSpec.of_blocks(_NO_IDS), [], filtered_keys=filtered)
        victims = _NO_IDS
        evicted: list[OffloadKey] = []
        shortage = count - self._pool.num_free
        if shortage > 0:
            chosen_victims = self._evict(offered, resident, shortage)
            if chosen_victims is None:
                stats.refused += count
                return None
            victims = chosen_victims
            evicted = table.keys[victims].tolist()
        ids, taken = victims, self._pool.allocate(count - len(victims)) if count > len(victims) else []
        if taken:
            ids = np.concatenate((np.array(taken, np.int64), victims)) if len(victims) else np.array(taken, np.int64)
        try:
            self._order.insert_blocks(wanted, ids)
        except BaseException:
            self._order.restore_blocks(evicted, victims)
            self._pool.free(taken)
            raise
        if evicted:
            table.withdraw(evicted)
            stats.evicted += len(evicted)
            used = int(np.count_nonzero(table.used[victims]))
            if used:
                table.used[victims] = False
            stats.evicted_unused += len(evicted) - used
            stats.ready -= len(evicted)
            self._announce(evicted, removed=True)
        table.keys[ids] = wanted
        table.refs[ids] = WRITING
        writing = table.writing
        for key, block in zip(wanted, ids.tolist(), strict=True):
            writing[key] = block
        stats.filtered += len(filtered)
        stats.reserved += count
        stats.writing += count
        ticket = self._reservations.open(list(wanted), ids, is_store=True)
        return PrepareStoreOutput(
            list(wanted), CPULoadStoreSpec.of_blocks(ids.copy(), ticket), evicted.copy(), ticket, filtered
        )

    def _evict(self, offered: Sequence[OffloadKey], resident: Sequence[int], count: int) -> Ids | None:
        """Let the policy drop `count` blocks, if so many can go at all."""
        idle = _NO_IDS
        if resident:
            idle = np.array(resident, np.int64)
            idle = idle[self._table.refs[idle] == 0]
        if count > self._stats.ready - self._stats.pinned - len(idle):
            return None
        return self._order.evict_for(offered, idle, count)

    def complete_store(
        self,
        keys: Collection[OffloadKey],
        success: bool = True,
        req_context: ReqContext | None = None,  # noqa: ARG002
        *,
        ticket: int | None = None,
    ) -> None:
        names = list(keys)
        whole = self._reservations.whole(names, ticket, self._detached, is_store=True)
        if whole is not None:
            self._end_store(names, self._reservations.close(whole), success=success)
            return
        names = list(dict.fromkeys(names))
        owners = self._stores_of(names) if ticket is None else self._under(names, ticket, is_store=True)
        done: dict[OffloadKey, int] = {}
        for key, owner in owners.items():
            block = self._reservations.close_key(owner, key)
            if block in self._detached:
                self._stats.stale_completions += 1
                self._free_detached(block)
            else:
                done[key] = block
        if done:
            self._end_store(list(done), np.array(list(done.values()), np.int64), success=success)

    def _stores_of(self, keys: list[OffloadKey]) -> Owners:
        """Return the store that each key means without a ticket; keys that have none are counted as stale."""
        writing, detached = self._table.writing, self._detached
        owners = self._reservations.stores_of({key: writing.get(key) for key in keys if key in writing or detached})
        self._stats.stale_completions += len(keys) - len(owners)
        return owners

    def _end_store(self, keys: list[OffloadKey], ids: Ids, *, success: bool) -> None:
        table, stats = self._table, self._stats
        count = len(keys)
        stats.writing -= count
        if not success:
            stats.failed += count
            self._order.drop(keys, ids)
            self._forget_writing(keys, ids)
            self._pool.free(ids.tolist())
            return
        writing = table.writing
        for key in keys:
            del writing[key]
        table.refs[ids] = 0
        table.publish(keys, ids.tolist())
        stats.stored += count
        stats.ready += count
        self._announce(keys, removed=False)
        self._order.written(keys, ids)

    def _forget_writing(self, keys: Iterable[OffloadKey], ids: Ids) -> None:
        for key in keys:
            del self._table.writing[key]
        self._table.keys[ids] = None

    # ---- giving up

    def abandon(self, ticket: int, *, copy_running: bool = False, hung: bool = False) -> None:
        reservation = self._reservations.get(ticket)
        if reservation is None:
            return
        blocks = reservation.blocks()
        if not reservation.is_store:
            if hung:
                self.discard([key for key, block in blocks.items() if block not in self._detached])
                self._quarantined.update(blocks.values())
            elif not copy_running:
                self._end_load([(ticket, key) for key in blocks.copy()], stale=False)
            return
        current = {key: block for key, block in blocks.items() if block not in self._detached}
        if current:
            ids = np.array(list(current.values()), np.int64)
            self._order.drop(list(current), ids)
            self._forget_writing(current, ids)
            self._stats.abandoned += len(current)
            self._stats.writing -= len(current)
            self._detached.update(current.values())
        if hung:
            self._quarantined.update(blocks.values())
        elif not copy_running:
            self._reservations.close(ticket)
            for block in blocks.values():
                self._free_detached(block)

    def discard(self, keys: Collection[OffloadKey]) -> int:
        table, stats = self._table, self._stats
        names = list(dict.fromkeys(keys))
        blocks = dict(zip(names, table.find_held(names), strict=True))
        written = {key: block for key, block in blocks.items() if key in table.writing}
        ready = {key: block for key, block in blocks.items() if block is not None and key not in written}
        for part in (written, ready):
            if part:
                self._order.drop(list(part), np.array(list(part.values()), np.int64))
        if written:
            self._forget_writing(written, np.array(list(written.values()), np.int64))
            self._detached.update(written.values())
            stats.abandoned += len(written)
            stats.writing -= len(written)
        if ready:
            table.withdraw(ready)
            self._let_go(np.array(list(ready.values()), np.int64))
            stats.discarded += len(ready)
            self._announce(list(ready), removed=True)
        return len(written) + len(ready)

    def reset_cache(self) -> int:
        table, stats = self._table, self._stats
        written = dict(table.writing)
        ids = self._pool.taken_except((*written.values(), *self._detached))
        ready: list[OffloadKey] = table.keys[ids].tolist()
        self._order.drop_all([*ready, *written] if written else ready)
        self._let_go(ids)
        self._detached.update(written.values())
        stats.reset_while_ready += len(ready)
        stats.reset_while_writing += len(written)
        stats.writing = 0
        self._announce(ready, removed=True)
        return len(ready)

    def _let_go(self, ids: Ids) -> None:
        """Free or detach readable blocks that just lost their keys."""
        table = self._table
        pinned = table.refs[ids] > 0
        idle = ids[~pinned]
        table.keys[ids] = None
        table.used[idle] = False
        self._pool.free(idle.tolist())
        self._detached.update(ids[pinned].tolist())
        self._stats.ready -= len(ids)
        self._stats.pinned -= len(ids) - len(idle)

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
        for ticket in self._reservations.tickets():
            self.abandon(ticket)

    def _under(self, keys: list[OffloadKey], ticket: int, *, is_store: bool) -> Owners:
        """Return the keys that are open under `ticket`; the others are counted as stale."""
        owners = self._reservations.under(keys, ticket, is_store=is_store)
        self._stats.stale_completions += len(keys) - len(owners)
        return owners

    def _free_detached(self, block: int) -> None:
        self._detached.discard(block)
        self._quarantined.discard(block)
        self._table.used[block] = False
        self._pool.free((block,))

    def _announce(self, keys: list[OffloadKey], *, removed: bool) -> None:
        if keys and self.events is not None:
            self.events.append(OffloadingEvent(keys, self.medium, removed))
