"""`GhostLists`: two bounded lists of keys whose blocks are gone, as ARC's B1 and B2."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from kvoffload.keys import OffloadKey
from kvoffload.manager.block_pool import BlockPool
from kvoffload.manager.block_table import BlockTable
from kvoffload.manager.policies.recency import Clock, RecencyLog

_B1, _B2 = 1, 2


class GhostView(Collection[OffloadKey]):
    """The keys of one list, oldest first: a live view."""

    def __init__(self, table: BlockTable, part: int, log: RecencyLog) -> None:
        self._table = table
        self._part = part
        self._log = log

    def __contains__(self, key: object) -> bool:
        row = self._table.get(key)  # type: ignore[arg-type] # anything hashable can be asked for
        return row is not None and bool(self._table.part[row] == self._part)

    def __iter__(self) -> Iterator[OffloadKey]:
        rows = np.flatnonzero(self._table.part == self._part)
        return iter(self._table.keys[rows[np.argsort(self._table.stamp[rows])]].tolist())

    def __len__(self) -> int:
        return self._log.size

    def keys(self) -> Collection[OffloadKey]:
        """Return the keys, oldest first."""
        return self


class GhostLists:
    """Keys in two lists, each held to `capacity` by forgetting its oldest; a key is in one of them at most.

    Attributes:
        b1: Keys of the first list.
        b2: Keys of the second list.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._table = BlockTable(2 * capacity)
        self._pool = BlockPool(2 * capacity)
        clock = Clock()
        self._logs = (RecencyLog(self._table, clock), RecencyLog(self._table, clock))
        self.b1 = GhostView(self._table, _B1, self._logs[0])
        self.b2 = GhostView(self._table, _B2, self._logs[1])

    def known(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return the ghosts among `keys`, in order."""
        if not (self.b1 or self.b2):
            return []
        return [key for key, row in zip(keys, self._table.find(keys), strict=True) if row is not None]

    def touch(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Make the ghosts among `keys` the newest, the last one newest; return for each whether it is in `b1`."""
        rows = [row for row in self._table.find(keys) if row is not None]
        if not rows:
            return []
        ids = np.array(rows, np.int64)
        in_b1 = self._table.part[ids] == _B1
        self._logs[0].append(ids[in_b1])
        self._logs[1].append(ids[~in_b1])
        result: list[bool] = in_b1.tolist()
        return result

    def add(self, first: Sequence[OffloadKey], second: Sequence[OffloadKey]) -> None:
        """Append keys that are in no list to `b1` and `b2`."""
        for part, log, keys in ((_B1, self._logs[0], first), (_B2, self._logs[1], second)):
            keep = keys[max(0, len(keys) - self._capacity) :]
            surplus = log.size + len(keep) - self._capacity
            if surplus > 0:
                self._forget(log.take(surplus).tolist(), log)
            if not keep:
                continue
            rows = self._pool.allocate(len(keep))
            ids = np.array(rows, np.int64)
            self._table.publish(keep, rows)
            self._table.keys[ids] = keep
            self._table.part[ids] = part
            log.append(ids)
            log.size += len(rows)

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Remove the ghosts among `keys`."""
        if not (self.b1 or self.b2):
            return
        rows = [row for row in self._table.find(keys) if row is not None]
        if not rows:
            return
        ids = np.array(rows, np.int64)
        in_b1 = self._table.part[ids] == _B1
        for log, some in ((self._logs[0], ids[in_b1]), (self._logs[1], ids[~in_b1])):
            log.remove(some)
            self._forget(some.tolist(), log)

    def _forget(self, rows: list[int], log: RecencyLog) -> None:
        table = self._table
        keys = table.keys[rows]
        table.withdraw(keys.tolist())
        table.keys[rows] = None
        table.part[rows] = 0
        log.size -= len(rows)
        self._pool.free(rows)
