"""`Transfers`: loads and stores, each reserved when it begins and completed when its copy ended. Reference, chapter 4.

Which states a block goes through says `kvoffload.manager.cpu`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from kvoffload.errors import UsageError
from kvoffload.keys import OffloadKey
from kvoffload.manager.base import PrepareStoreOutput, ReqContext
from kvoffload.manager.block_states import BlockStates
from kvoffload.manager.block_table import NO_IDS, Ids
from kvoffload.manager.policies.base import WRITING
from kvoffload.manager.reservations import Owners
from kvoffload.manager.specs import CPULoadStoreSpec


class Transfers(BlockStates):
    """What reserves blocks for copies, and what their ends mean for the blocks."""

    # ---- loads

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec:  # noqa: ARG002
        table = self._table
        wanted = list(keys)
        ids = table.recall(wanted)
        if len(ids) < len(wanted):
            wanted = list(dict.fromkeys(wanted))
            found = table.find(wanted)
            if None in found:
                raise UsageError(f"cannot load key {wanted[found.index(None)].hex()}: it is not held; look it up first")
            ids = np.array(found, np.int64)
        if not wanted:
            return CPULoadStoreSpec.of_blocks(ids)
        refs = table.refs[ids]
        if self._stats.writing and int(refs.min()) < 0:
            key = wanted[int(refs.argmin())]
            raise UsageError(f"cannot load key {key.hex()}: it is still written; look it up first")
        table.refs[ids] = refs + 1
        table.used[ids] = True
        self._stats.pinned += len(ids) - int(np.count_nonzero(refs))
        ticket = self._reservations.open(wanted, ids, is_store=False)
        self._order.pinned(wanted, ids)
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
        ended = list(keys)
        whole = self._reservations.whole(ended, ticket, self._detached, is_store=False)
        if whole is not None:
            self._unpin(ended, self._reservations.close(whole))
            return
        ended = list(dict.fromkeys(ended))
        owners = self._loads_of(ended) if ticket is None else self._under(ended, ticket, is_store=False)
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
        offered = list(keys)
        if len(set(offered)) != len(offered):
            offered = list(dict.fromkeys(offered))
        found = table.find(offered)
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
            return PrepareStoreOutput([], CPULoadStoreSpec.of_blocks(NO_IDS), [], filtered_keys=filtered)
        victims = NO_IDS
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
        table.enter(wanted, ids.tolist())
        stats.filtered += len(filtered)
        stats.reserved += count
        stats.writing += count
        ticket = self._reservations.open(list(wanted), ids, is_store=True)
        return PrepareStoreOutput(
            list(wanted), CPULoadStoreSpec.of_blocks(ids.copy(), ticket), evicted.copy(), ticket, filtered
        )

    def _evict(self, offered: Sequence[OffloadKey], resident: Sequence[int], count: int) -> Ids | None:
        """Let the policy drop `count` blocks, if so many can go at all."""
        idle = NO_IDS
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
        ended = list(keys)
        whole = self._reservations.whole(ended, ticket, self._detached, is_store=True)
        if whole is not None:
            self._end_store(ended, self._reservations.close(whole), success=success)
            return
        ended = list(dict.fromkeys(ended))
        owners = self._stores_of(ended) if ticket is None else self._under(ended, ticket, is_store=True)
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
        refs = self._table.cells[1]
        written = {
            key: block if block is not None and refs[block] < 0 else None
            for key, block in zip(keys, self._table.find(keys), strict=True)
        }
        if not self._detached:
            written = {key: block for key, block in written.items() if block is not None}
        owners = self._reservations.stores_of(written)
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
        table.refs[ids] = 0
        stats.stored += count
        stats.ready += count
        self._announce(keys, removed=False)
        self._order.written(keys, ids)

    def _forget_writing(self, keys: Iterable[OffloadKey], ids: Ids) -> None:
        self._table.withdraw(keys)
        self._table.keys[ids] = None

    def _under(self, keys: list[OffloadKey], ticket: int, *, is_store: bool) -> Owners:
        """Return the keys that are open under `ticket`; the others are counted as stale."""
        owners = self._reservations.under(keys, ticket, is_store=is_store)
        self._stats.stale_completions += len(keys) - len(owners)
        return owners
