"""`CPUOffloadingManager`: which key is in which block of host memory. Reference, chapter 4.

Theory of operation. A block's memory is in one of four states, and every change goes through this manager:

    free      --prepare_store-->         writing
    writing   --complete_store-->        ready (success) | free (failure)
    writing   --reset, discard-->        detached --the copy's completion--> free
    writing   --abandon-->               free, or detached while the copy runs
    ready     --evict, discard, reset--> free (not pinned) | detached (pinned) --last load's completion--> free

*Detached* memory has no key any more, but a copy that has not ended may still read or write it. A reservation (one
`prepare_store` or `prepare_load`) is known by its ticket and remembers its blocks until the copy's end is reported, so
a late report finds exactly the memory it speaks of, whatever happened to the keys meanwhile.

The manager is three classes, one upon the other: `BlockStates` has the state and what only reads it, `Transfers`
reserves and completes copies, and here is what drops keys before their time: giving a copy up, discarding, resetting.

Per-block state is in the columns of a `BlockTable`, and a call works on whole batches. The usual completion names
exactly the keys of its reservation: it takes the blocks from there and looks nothing up.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from kvoffload.keys import OffloadKey
from kvoffload.manager.base import ReqContext, RequestOutcome
from kvoffload.manager.block_table import Ids
from kvoffload.manager.transfers import Transfers


class CPUOffloadingManager(Transfers):
    """Keeps blocks of host memory under a pluggable cache policy; see `BlockStates` for the arguments."""

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
        unwanted = list(dict.fromkeys(keys))
        refs = table.cells[1]
        held = {key: block for key, block in zip(unwanted, table.find(unwanted), strict=True) if block is not None}
        written = {key: block for key, block in held.items() if refs[block] < 0}
        ready = {key: block for key, block in held.items() if refs[block] >= 0}
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
        held = self._pool.taken_except(tuple(self._detached))
        is_written = table.refs[held] < 0
        ids, written = held[~is_written], held[is_written].tolist()
        ready: list[OffloadKey] = table.keys[ids].tolist()
        self._order.drop_all([*ready, *table.keys[written].tolist()] if written else ready)
        self._let_go(ids)
        table.keys[written] = None
        self._detached.update(written)
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

    # ---- requests, end

    def finish_request(
        self, req_context: ReqContext, outcome: RequestOutcome | None = None, keys: Sequence[OffloadKey] = ()
    ) -> None:
        if req_context.req_id is not None:
            self._book.forget(req_context.req_id)
        self._policy.on_request_finished(keys, req_context, outcome)

    def shutdown(self) -> None:
        """Drop every key and every open reservation; nothing is announced."""
        self.events = None
        self.reset_cache()
        for ticket in self._reservations.tickets():
            self.abandon(ticket)
