"""`GhostLists`: two bounded lists of keys whose blocks are gone, as ARC's B1 and B2.

Theory of operation. An index maps each ghost to a token: a number that only grows, doubled, plus the number of its
list. Each list is a queue of (key, token) entries in arrays, invisible to the garbage collector; an entry is dead once
the index has another token for its key. Renewing a ghost appends an entry, forgetting the oldest pops them until a live
one comes. Dead entries are swept out a few chunks at a time when they outnumber the live ones. The index is cut into
shards for the reason given in `kvoffload.manager.block_table`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvoffload.keys import OffloadKey
from kvoffload.manager.block_table import make_shards

_CHUNK = 4096
_SWEEP_CHUNKS = 2
_B1, _B2 = 0, 1


class _Chunk:
    """Entries `start` to `fill` of a queue."""

    __slots__ = ("fill", "keys", "start", "tokens")

    def __init__(self) -> None:
        self.start = 0
        self.fill = 0
        self.keys: npt.NDArray[np.object_] = np.empty(_CHUNK, object)
        self.tokens: npt.NDArray[np.int64] = np.empty(_CHUNK, np.int64)

    def entries(self) -> list[tuple[OffloadKey, int]]:
        span = slice(self.start, self.fill)
        return list(zip(self.keys[span].tolist(), self.tokens[span].tolist(), strict=True))

    def put(self, entries: Sequence[tuple[OffloadKey, int]]) -> None:
        """Hold `entries` and nothing else, in no more memory than they need."""
        self.start, self.fill = 0, len(entries)
        self.keys = np.empty(self.fill, object)
        self.keys[:] = [key for key, _ in entries]
        self.tokens = np.array([token for _, token in entries], np.int64)


class GhostView(Collection[OffloadKey]):
    """The keys of one list, oldest first: a live view."""

    def __init__(self, lists: GhostLists, number: int) -> None:
        self._lists = lists
        self._number = number

    def __contains__(self, key: object) -> bool:
        token = self._lists.token_of(key)
        return token is not None and token & 1 == self._number

    def __iter__(self) -> Iterator[OffloadKey]:
        return self._lists.keys_of(self._number)

    def __len__(self) -> int:
        return self._lists.sizes[self._number]

    def keys(self) -> Collection[OffloadKey]:
        """Return the keys, oldest first."""
        return self


class GhostLists:
    """Keys in two lists, each held to `capacity` by forgetting its oldest; a key is in one of them at most.

    Attributes:
        b1: Keys of the first list.
        b2: Keys of the second list.
        sizes: How many keys each holds.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._shards, self._shift = make_shards(2 * capacity)
        self._queues: tuple[list[_Chunk], list[_Chunk]] = ([_Chunk()], [_Chunk()])
        self._lengths = [0, 0]
        self._cursors = [0, 0]
        self._next = 0
        self.sizes = [0, 0]
        self.b1, self.b2 = GhostView(self, _B1), GhostView(self, _B2)

    def token_of(self, key: object) -> int | None:
        """Return the token of a ghost; its last bit is the number of its list."""
        return self._shards[hash(key) >> self._shift].get(key)  # type: ignore[call-overload, no-any-return] # any key

    def keys_of(self, number: int) -> Iterator[OffloadKey]:
        """Yield the keys of one list, oldest first."""
        for chunk in self._queues[number]:
            yield from (key for key, token in chunk.entries() if self.token_of(key) == token)

    def known(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return the ghosts among `keys`, in order."""
        shards, shift = self._shards, self._shift
        return [key for key in keys if key in shards[hash(key) >> shift]]

    def touch(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Make the ghosts among `keys` the newest, the last one newest; return for each whether it is in `b1`."""
        if not self.sizes[_B1] and not self.sizes[_B2]:
            return []
        shards, shift = self._shards, self._shift
        tokens = [shards[hash(key) >> shift].get(key) for key in keys]
        if tokens.count(None) == len(tokens):
            return []
        found = [(key, token & 1) for key, token in zip(keys, tokens, strict=True) if token is not None]
        for number in (_B1, _B2):
            some = [key for key, its in found if its == number]
            if some:
                self._append(number, some)
        return [number == _B1 for _, number in found]

    def add(self, number: int, keys: list[OffloadKey]) -> None:
        """Append keys that are in no list to list `number` (0 or 1)."""
        keep = keys[max(0, len(keys) - self._capacity) :]
        surplus = self.sizes[number] + len(keep) - self._capacity
        if surplus > 0:
            self._forget_oldest(number, surplus)
        self.sizes[number] += len(keep)
        if keep:
            self._append(number, keep)

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Remove the ghosts among `keys`."""
        sizes = self.sizes
        if not sizes[_B1] and not sizes[_B2]:
            return
        shards, shift = self._shards, self._shift
        for key in keys:
            token = shards[hash(key) >> shift].pop(key, None)
            if token is not None:
                sizes[token & 1] -= 1

    def _append(self, number: int, keys: list[OffloadKey]) -> None:
        queue, shards, shift = self._queues[number], self._shards, self._shift
        first = self._next << 1 | number
        self._next += len(keys)
        self._lengths[number] += len(keys)
        token = first
        for key in keys:
            shards[hash(key) >> shift][key] = token
            token += 2
        at = 0
        while at < len(keys):
            chunk = queue[-1]
            now = keys[at : at + len(chunk.keys) - chunk.fill]
            if not now:
                queue.append(_Chunk())
                self._sweep(number)
                continue
            end = chunk.fill + len(now)
            chunk.keys[chunk.fill : end] = now
            chunk.tokens[chunk.fill : end] = np.arange(first + 2 * at, first + 2 * (at + len(now)), 2)
            chunk.fill = end
            at += len(now)

    def _forget_oldest(self, number: int, count: int) -> None:
        queue, shards, shift = self._queues[number], self._shards, self._shift
        self.sizes[number] -= count
        while count:
            chunk = queue[0]
            end = min(chunk.fill, chunk.start + count)
            if end == chunk.start:
                del queue[0]
                continue
            keys, tokens = chunk.keys[chunk.start : end].tolist(), chunk.tokens[chunk.start : end].tolist()
            chunk.keys[chunk.start : end] = None
            self._lengths[number] -= end - chunk.start
            chunk.start = end
            for key, token in zip(keys, tokens, strict=True):
                shard = shards[hash(key) >> shift]
                if shard.get(key) == token:
                    del shard[key]
                    count -= 1

    def _sweep(self, number: int) -> None:
        """Drop the dead entries of a few chunks, in turn, while they outnumber the live ones."""
        queue = self._queues[number]
        for _ in range(_SWEEP_CHUNKS):
            if len(queue) < 2 or self._lengths[number] <= 2 * self.sizes[number] + 2 * _CHUNK:
                return
            at = self._cursors[number] if self._cursors[number] < len(queue) - 1 else 0
            chunk = queue[at]
            entries = chunk.entries()
            live = [(key, token) for key, token in entries if self.token_of(key) == token]
            self._lengths[number] -= len(entries) - len(live)
            chunk.put(live)
            self._cursors[number] = at + bool(live)
            if not live:
                del queue[at]
