"""Adaptive replacement cache, as the reference decides it. Reference, chapter 5.3."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvoffload.keys import OffloadKey
from kvoffload.manager.block_table import NO_IDS, BlockTable, Ids
from kvoffload.manager.policies.ghosts import GhostLists
from kvoffload.manager.policies.indexed import IndexedPolicy, PartView
from kvoffload.manager.policies.recency import Clock, RecencyLog

_T1, _T2 = 1, 2


class ARCCachePolicy(IndexedPolicy):
    """Balances recency (T1) against frequency (T2), learning from ghosts of what was evicted (B1, B2).

    Where it differs from the paper (Megiddo and Modha, FAST '03), on purpose, to decide as the reference does:

    - A key that is stored again enters T1 even when it has a ghost; the paper puts a ghost hit into T2.
    - A ghost hit moves the target when the key is *touched*; storing the key only drops the ghost.
    - T1 gives up a block when `len(t1) >= int(target)`; the paper says `>` outside a B2 hit.
    - Each ghost list alone is held to the capacity; the paper bounds |T1| + |B1| and the sum of all four.
    - A touch of a block that is still written only makes it the newest of T1.

    Where it differs from the reference: when T2 has no evictable block, T1 gives one up although it is below its
    target, so that pins in T2 do not refuse a store that fits.

    Attributes:
        t1: Held keys seen once, oldest first (a view, as the other three).
        t2: Held keys seen again, oldest first.
        b1: Ghosts of T1, oldest first.
        b2: Ghosts of T2, oldest first.
        target_t1_size: How large T1 should be, 0 to `cache_capacity`.
    """

    def bind(self, table: BlockTable) -> None:
        self.table = table
        clock = Clock()
        self._lists = (RecencyLog(table, clock), RecencyLog(table, clock))
        self._ghosts = GhostLists(self.cache_capacity)
        self.t1, self.t2 = PartView(self, _T1), PartView(self, _T2)
        self.b1, self.b2 = self._ghosts.b1, self._ghosts.b2
        self.target_t1_size = 0.0

    def touch(self, keys: Iterable[OffloadKey]) -> None:
        self.sync()
        self._use(list(keys), frequent=True)

    def refresh(self, keys: Iterable[OffloadKey]) -> None:
        self._use(list(keys), frequent=False)

    def _use(self, keys: list[OffloadKey], *, frequent: bool) -> None:
        ids = self.table.recall(keys)
        if len(ids) < len(keys):
            rest = keys[len(ids) :]
            found = self.table.find(rest)
            if frequent and None in found:
                self._learn([key for key, block in zip(rest[::-1], found[::-1], strict=True) if block is None])
            blocks = dict.fromkeys(ids.tolist() + [block for block in found if block is not None])
            if len(blocks) > len(ids):
                ids = np.array(list(blocks), np.int64)
        if not len(ids):
            return
        ids = ids[::-1]
        table, (first, second) = self.table, self._lists
        in_t1 = table.part[ids] == _T1
        stays = in_t1 & (table.refs[ids] < 0) if frequent else in_t1
        staying = int(np.count_nonzero(stays))
        if not staying:
            second.append(ids)
        elif staying == len(ids):
            first.append(ids)
            return
        else:
            first.append(ids[stays])
            second.append(ids[~stays])
        risen = int(np.count_nonzero(in_t1)) - staying
        if risen:
            table.part[ids[in_t1 & ~stays]] = _T2
            first.size -= risen
            second.size += risen

    def _learn(self, absent: list[OffloadKey]) -> None:
        """Move the target by the ghosts among `absent`; they become the newest of their lists."""
        b1_size, b2_size = len(self.b1), len(self.b2)
        for is_b1 in self._ghosts.touch(absent):
            if is_b1:
                target = self.target_t1_size + max(1.0, b2_size / b1_size)
                self.target_t1_size = min(target, float(self.cache_capacity))
            else:
                self.target_t1_size = max(self.target_t1_size - max(1.0, b1_size / b2_size), 0.0)

    def insert_blocks(self, keys: Sequence[OffloadKey], ids: Ids) -> None:
        first = self._lists[0]
        self.table.part[ids] = _T1
        first.size += len(ids)
        first.append(ids)
        self._ghosts.discard(keys)

    def evict_blocks(self, count: int) -> Ids:
        first = self._lists[0]
        above = first.size - int(self.target_t1_size) + 1
        ids = self._take(0, min(count, above)) if above > 0 else NO_IDS
        if len(ids) < count:
            ids = np.concatenate((ids, self._take(1, count - len(ids))))
        if len(ids) < count:
            ids = np.concatenate((ids, self._take(0, count - len(ids))))
        return ids

    def _take(self, number: int, count: int) -> Ids:
        """Move up to `count` keys from T1 (0) or T2 (1) to its ghosts; return their blocks."""
        log = self._lists[number]
        ids = log.take(count)
        log.size -= len(ids)
        self.table.part[ids] = 0
        self._ghosts.add(number, self.table.keys[ids].tolist())
        return ids

    def remove_blocks(self, ids: Ids) -> None:
        table, (first, second) = self.table, self._lists
        in_t1 = int(np.count_nonzero(table.part[ids] == _T1))
        first.size -= in_t1
        second.size -= len(ids) - in_t1
        table.part[ids] = 0
        first.remove(ids)

    def release_blocks(self, ids: Ids) -> None:
        in_t1 = self.table.part[ids] == _T1
        self._lists[0].release(ids[in_t1])
        self._lists[1].release(ids[~in_t1])

    def stats(self) -> dict[str, float]:
        return {
            "t1": float(self._lists[0].size),
            "t2": float(self._lists[1].size),
            "b1": float(len(self.b1)),
            "b2": float(len(self.b2)),
            "target_t1_size": self.target_t1_size,
        }
