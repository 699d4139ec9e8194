"""The clairvoyant bound: which hits a cache could have had that knows all future requests.

Whoever is asked for last in the future leaves first, new blocks included. A block's next use is never later than that
of the blocks after it in a prefix, so what stays is closed under prefixes, and block hits are prefix hits.
Source: L. A. Belady, "A study of replacement algorithms for a virtual-storage computer" (1966), with bypass.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from kvoffload.keys import OffloadKey

NEVER = 1 << 60


def next_uses(key_lists: Sequence[Sequence[OffloadKey]]) -> list[list[int]]:
    """Return for each key of each request the number of the next request that asks for it; `NEVER` if none does."""
    upcoming: dict[OffloadKey, int] = {}
    uses: list[list[int]] = []
    for number in range(len(key_lists) - 1, -1, -1):
        keys = key_lists[number]
        uses.append([upcoming.get(key, NEVER) for key in keys])
        upcoming.update(dict.fromkeys(keys, number))
    uses.reverse()
    return uses


class BeladyCache:
    """A cache of `capacity` blocks that is told each key's next use."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.stored = 0
        self.evicted = 0
        self._next: dict[OffloadKey, int] = {}
        self._heap: list[tuple[int, int, OffloadKey]] = []

    def __len__(self) -> int:
        return len(self._next)

    def held(self, keys: Sequence[OffloadKey]) -> tuple[int, int]:
        """Return how many leading keys are held, and how many in all."""
        flags = [key in self._next for key in keys]
        return flags.index(False) if False in flags else len(flags), sum(flags)

    def serve(self, keys: Sequence[OffloadKey], uses: Sequence[int]) -> None:
        """Take one request; `uses` are its keys' next uses."""
        known, heap = self._next, self._heap
        fresh = set()
        for depth, (key, use) in enumerate(zip(keys, uses, strict=True)):
            if key not in known:
                if use == NEVER:
                    continue
                fresh.add(key)
            known[key] = use
            heappush(heap, (-use, -depth, key))
        while len(known) > self.capacity or (heap and heap[0][0] == -NEVER):
            use, _, key = heappop(heap)
            if known.get(key) != -use:
                continue  # asked for since: an entry with its new next use is in the heap
            del known[key]
            if key in fresh:
                fresh.remove(key)
            else:
                self.evicted += 1
        self.stored += len(fresh)
