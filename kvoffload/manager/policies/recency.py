"""`RecencyLog`: blocks in the order of their last use, without a linked list.

Theory of operation. Using blocks appends their numbers to a log and writes their position there into the column
`stamp`; an entry whose block has another stamp by now is dead. So a batch is used by two array operations, and the
oldest block is the first live entry. Three things keep every call short:

- **Blocks that cannot be evicted** (pinned, or being written) are taken out when the head of the log reaches them:
  they are *parked*, once. When they are released they enter a heap by their stamp, which is drained before the log:
  all of it is older. The victims are those of a plain LRU list, in the same order, and no call looks twice at a pin.
- **Dead entries** are removed a few chunks at a time whenever the log grows by a chunk, as soon as they outnumber the
  live ones. Live entries move to the front of their chunk, or into the chunk before, whose numbers are lower: the order
  stays. Positions at and before the head are never given out again, so the heap's stamps stay the lowest.
- **Positions** are unique over all logs that share a clock, so one column `stamp` serves several lists.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from kvoffload.manager.block_table import ABSENT, BlockTable, Ids

CHUNK = 4096
_SWEEP_CHUNKS = 4
_FEW = 24
_ID_BITS = 40
_ID_MASK = (1 << _ID_BITS) - 1


class Clock:
    """Gives out ranges of positions."""

    __slots__ = ("next",)

    def __init__(self) -> None:
        self.next = ABSENT + 1


class _Chunk:
    __slots__ = ("base", "cells", "fill", "ids")

    def __init__(self, base: int) -> None:
        self.base = base
        self.fill = 0
        self.ids: npt.NDArray[np.int32] = np.empty(CHUNK, np.int32)
        self.cells = self.ids.data


class RecencyLog:
    """One list of blocks, the one that was used longest ago first.

    Attributes:
        size: Blocks in it; kept by its owner.
    """

    __slots__ = ("_chunks", "_clock", "_cursor", "_entries", "_heap", "_start", "_table", "size")

    def __init__(self, table: BlockTable, clock: Clock) -> None:
        self._table = table
        self._clock = clock
        self.clear()

    def clear(self) -> None:
        """Start empty; the table's columns are its owner's to clear."""
        self.size = 0
        self._heap: list[int] = []
        self._chunks: list[_Chunk] = []
        self._start = 0
        self._cursor = 1
        self._entries = 0
        self._new_chunk()

    def append(self, ids: Ids) -> None:
        """Make blocks the newest, the last one newest of all; with duplicates the last place counts."""
        table = self._table
        if table.num_parked:
            self._unpark(ids)
        stamp, left = table.stamp, ids
        while True:
            tail = self._chunks[-1]
            fill = tail.fill
            now = left[: CHUNK - fill]
            end = fill + len(now)
            tail.ids[fill:end] = now
            stamp[now] = np.arange(tail.base + fill, tail.base + end)
            tail.fill = end
            self._entries += end - fill
            left = left[end - fill :]
            if not len(left):
                return
            self._new_chunk()

    def take(self, count: int) -> Ids:
        """Remove and return up to `count` blocks that nothing holds, the oldest first."""
        table = self._table
        stamp, refs, parked = table.stamp, table.refs, table.parked
        taken: list[int] = []
        heap = self._heap
        while heap and len(taken) < count:
            entry = heappop(heap)
            block = entry & _ID_MASK
            if stamp[block] != entry >> _ID_BITS:
                continue
            if refs[block]:
                parked[block] = True
                table.num_parked += 1
            else:
                taken.append(block)
                stamp[block] = ABSENT
        if count <= _FEW:
            self._take_few(taken, count)
        if len(taken) == count:
            return np.array(taken, np.int64)
        found: list[Ids] = [np.array(taken, np.int64)] if taken else []
        need = window = count - len(taken)
        while need > 0:
            chunk, start = self._chunks[0], self._start
            end = min(chunk.fill, start + window)
            length = end - start
            if not length:
                if len(self._chunks) == 1:
                    break
                self._drop_head()
                continue
            ids = chunk.ids[start:end].astype(np.int64)
            live = stamp[ids] == np.arange(chunk.base + start, chunk.base + end)
            good = live & (refs[ids] == 0)
            hits = int(np.count_nonzero(good))
            if hits < length or hits > need:
                places = good.nonzero()[0]
                if hits > need:
                    places = places[:need]
                    length = int(places[-1]) + 1
                stuck = ids[:length][(live ^ good)[:length]]
                if len(stuck):
                    parked[stuck] = True
                    table.num_parked += len(stuck)
                ids = ids[places]
            stamp[ids] = ABSENT
            found.append(ids)
            need -= len(ids)
            window = 2 * max(need, window) + 64
            self._start = start + length
            self._entries -= length
        return found[0] if len(found) == 1 else np.concatenate(found or [np.empty(0, np.int64)])

    def _take_few(self, taken: list[int], count: int) -> None:
        """Add blocks to `taken`, one by one; gives up at a long run of others, which arrays skip faster."""
        stamp, refs, parked = self._table.cells
        patience = 4 * _FEW
        need = count - len(taken)
        while need and patience:
            chunk, start = self._chunks[0], self._start
            end = min(chunk.fill, start + patience)
            at, position, ids = start, chunk.base + start, chunk.cells
            while at < end:
                block = ids[at]
                if stamp[block] == position:
                    if refs[block]:
                        parked[block] = True
                        self._table.num_parked += 1
                    else:
                        stamp[block] = ABSENT
                        taken.append(block)
                        need -= 1
                        if not need:
                            end = at + 1
                at += 1
                position += 1
            self._start = end
            self._entries -= end - start
            patience -= end - start
            if end == chunk.fill and need:
                if len(self._chunks) == 1:
                    return
                self._drop_head()

    def release(self, ids: Ids) -> None:
        """Tell that nothing holds these blocks any more: parked ones come back into the order."""
        table = self._table
        back = ids[table.parked[ids]]
        if not len(back):
            return
        table.parked[back] = False
        table.num_parked -= len(back)
        for block, stamp in zip(back.tolist(), table.stamp[back].tolist(), strict=True):
            heappush(self._heap, stamp << _ID_BITS | block)

    def remove(self, ids: Ids) -> None:
        """Take blocks out of the order."""
        if self._table.num_parked:
            self._unpark(ids)
        self._table.stamp[ids] = ABSENT

    def _unpark(self, ids: Ids) -> None:
        parked = self._table.parked
        back = ids[parked[ids]]
        if len(back):
            parked[back] = False
            self._table.num_parked -= len(np.unique(back))

    def _drop_head(self) -> None:
        del self._chunks[0]
        self._start = 0
        self._cursor -= 1

    def _new_chunk(self) -> None:
        self._chunks.append(_Chunk(self._clock.next))
        self._clock.next += CHUNK
        if self._entries > 2 * self.size + _SWEEP_CHUNKS * CHUNK:
            for _ in range(_SWEEP_CHUNKS):
                self._sweep_chunk()

    def _sweep_chunk(self) -> None:
        """Drop the dead entries of one chunk between head and tail, and join it to the one before when both fit."""
        chunks, stamp = self._chunks, self._table.stamp
        if not 1 <= self._cursor < len(chunks) - 1:
            self._cursor = 1
            if len(chunks) < 3:
                return
        at = self._cursor
        chunk, before = chunks[at], chunks[at - 1]
        ids = chunk.ids[: chunk.fill]
        keep = ids[stamp[ids] == np.arange(chunk.base, chunk.base + chunk.fill)]
        self._entries -= len(ids) - len(keep)
        if before.fill + len(keep) <= CHUNK:
            target, fill = before, before.fill
            del chunks[at]
        else:
            target, fill = chunk, 0
            self._cursor = at + 1
        target.fill = fill + len(keep)
        target.ids[fill : target.fill] = keep
        stamp[keep] = np.arange(target.base + fill, target.base + target.fill)
