"""`GhostLists`: two bounded lists of keys whose blocks are gone, as ARC's B1 and B2.

Theory of operation. Each list is a queue of keys in arrays, invisible to the garbage collector; an index maps each
ghost to its place there: its position, which only grows, doubled, plus the number of its list. Renewing a ghost marks
its entry dead and appends another. The oldest ghosts are the first entries that are not dead, found by array
operations; a chunk without live entries is dropped at once. When dead entries outnumber the live ones, a few chunks at
a time are cut to their live entries. The index is in shards, as in `kvoffload.manager.block_table`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvoffload.keys import OffloadKey
from kvoffload.manager.block_table import make_shards

_CHUNK = 4096
_SWEEP_CHUNKS = 2
_B1, _B2 = 0, 1


class _Chunk:
    """Entries of consecutive positions, or, once it was cut to its live ones, of those in `positions`."""

    __slots__ = ("cells", "dead", "fill", "keys", "live", "positions", "start")

    def __init__(self, size: int) -> None:
        self.start = 0
        self.fill = 0
        self.live = 0
        self.keys: npt.NDArray[np.object_] = np.empty(size, object)
        self.dead: npt.NDArray[np.bool_] = np.zeros(size, np.bool_)
        self.cells = self.dead.data
        self.positions: npt.NDArray[np.int64] | None = None

    def alive(self) -> npt.NDArray[np.intp]:
        """Return the places of the live entries, oldest first."""
        return (~self.dead[self.start : self.fill]).nonzero()[0] + self.start

    def place_of(self, position: int) -> int:
        """Return where the entry of a position is."""
        if self.positions is None:
            return position & (len(self.keys) - 1)
        return bisect_left(self.positions.data, position)

    def cut(self, number: int) -> None:
        """Keep the live entries only; `number` is the chunk's own."""
        places = self.alive()
        first = number * len(self.keys) if self.positions is None else 0
        self.positions = places + first if self.positions is None else self.positions[places]
        self.keys = self.keys[places]
        self.start, self.fill = 0, len(places)
        self.dead = np.zeros(self.fill, np.bool_)
        self.cells = self.dead.data


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
        self._size = _CHUNK
        self._bits = _CHUNK.bit_length() - 1
        self._queues: tuple[dict[int, _Chunk], dict[int, _Chunk]] = ({}, {})
        self._lengths = [0, 0]
        self._cursors = [0, 0]
        self._next = [0, 0]
        self.sizes = [0, 0]
        self.b1, self.b2 = GhostView(self, _B1), GhostView(self, _B2)

    def token_of(self, key: object) -> int | None:
        """Return the token of a ghost; its last bit is the number of its list."""
        return self._shards[hash(key) >> self._shift].get(key)  # type: ignore[call-overload, no-any-return] # any key

    def keys_of(self, number: int) -> Iterator[OffloadKey]:
        """Yield the keys of one list, oldest first."""
        for chunk in self._queues[number].values():
            yield from chunk.keys[chunk.alive()].tolist()

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
        found = {key: token for key, token in zip(keys, tokens, strict=True) if token is not None}
        for token in found.values():
            self._kill(token)
        order = [key for key, token in zip(reversed(keys), reversed(tokens), strict=True) if token is not None]
        order = list(dict.fromkeys(order))[::-1]
        for number in (_B1, _B2):
            some = [key for key in order if found[key] & 1 == number]
            if some:
                self._append(number, some)
        return [token & 1 == _B1 for token in tokens if token is not None]

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
                self._kill(token)

    def _kill(self, token: int) -> None:
        """Mark the entry of a token dead."""
        number, position = token & 1, token >> 1
        chunk = self._queues[number][position >> self._bits]
        chunk.cells[chunk.place_of(position)] = True
        chunk.live -= 1
        if not chunk.live:
            self._drop_if_complete(number, position >> self._bits)

    def _drop_if_complete(self, number: int, index: int) -> None:
        if (index + 1) << self._bits <= self._next[number]:
            chunk = self._queues[number].pop(index)
            self._lengths[number] -= chunk.fill - chunk.start

    def _append(self, number: int, keys: list[OffloadKey]) -> None:
        queue, shards, shift = self._queues[number], self._shards, self._shift
        token = self._next[number] << 1 | number
        for key in keys:
            shards[hash(key) >> shift][key] = token
            token += 2
        self._lengths[number] += len(keys)
        at = 0
        while at < len(keys):
            position = self._next[number]
            index, fill = position >> self._bits, position & (self._size - 1)
            if not fill:
                queue[index] = _Chunk(self._size)
                self._sweep(number)
            chunk = queue[index]
            now = keys[at : at + self._size - fill]
            chunk.fill = fill + len(now)
            chunk.keys[fill : chunk.fill] = now
            chunk.live += len(now)
            self._next[number] = position + len(now)
            at += len(now)

    def _forget_oldest(self, number: int, count: int) -> None:
        queue, shards, shift = self._queues[number], self._shards, self._shift
        self.sizes[number] -= count
        while count:
            index, chunk = next(iter(queue.items()))
            places = chunk.alive()[:count]
            end = int(places[-1]) + 1
            for key in chunk.keys[places].tolist():
                del shards[hash(key) >> shift][key]
            chunk.keys[chunk.start : end] = None
            self._lengths[number] -= end - chunk.start
            chunk.start = end
            chunk.live -= len(places)
            count -= len(places)
            if not chunk.live:
                self._drop_if_complete(number, index)

    def _sweep(self, number: int) -> None:
        """Cut a few chunks to their live entries, in turn, while the dead ones are more."""
        queue = self._queues[number]
        for _ in range(_SWEEP_CHUNKS):
            if self._lengths[number] <= 2 * self.sizes[number] + 2 * self._size:
                return
            complete = list(queue)[:-1]
            if not complete:
                return
            index = complete[self._cursors[number] % len(complete)]
            chunk = queue[index]
            self._lengths[number] -= chunk.fill - chunk.start - chunk.live
            chunk.cut(index)
            self._cursors[number] += 1
