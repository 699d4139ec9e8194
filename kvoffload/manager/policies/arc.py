"""Adaptive replacement cache, as the reference decides it. Reference, chapter 5.3."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from kvoffload.keys import OffloadKey
from kvoffload.manager.policies.base import BlockStatus, CachePolicy

Victim = tuple[OffloadKey, BlockStatus]


class ARCCachePolicy(CachePolicy):
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
        t1: Held keys seen once, oldest first.
        t2: Held keys seen again, oldest first.
        b1: Ghosts of T1, oldest first.
        b2: Ghosts of T2, oldest first.
        target_t1_size: How large T1 should be, 0 to `cache_capacity`.
    """

    def __init__(self, cache_capacity: int) -> None:
        self.cache_capacity = cache_capacity
        self.target_t1_size = 0.0
        self.t1: OrderedDict[OffloadKey, BlockStatus] = OrderedDict()
        self.t2: OrderedDict[OffloadKey, BlockStatus] = OrderedDict()
        self.b1: OrderedDict[OffloadKey, None] = OrderedDict()
        self.b2: OrderedDict[OffloadKey, None] = OrderedDict()

    def get(self, key: OffloadKey) -> BlockStatus | None:
        block = self.t1.get(key)
        return self.t2.get(key) if block is None else block

    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        self.t1[key] = block
        self.b1.pop(key, None)
        self.b2.pop(key, None)

    def remove(self, key: OffloadKey) -> None:
        if self.t1.pop(key, None) is None:
            self.t2.pop(key, None)

    def touch(self, keys: Iterable[OffloadKey]) -> None:
        for key in reversed(list(keys)):
            if key in self.t1:
                if self.t1[key].is_ready:
                    self.t2[key] = self.t1.pop(key)
                else:
                    self.t1.move_to_end(key)
            elif key in self.t2:
                self.t2.move_to_end(key)
            elif key in self.b1:
                delta = max(1.0, len(self.b2) / len(self.b1))
                self.target_t1_size = min(self.target_t1_size + delta, float(self.cache_capacity))
                self.b1.move_to_end(key)
            elif key in self.b2:
                delta = max(1.0, len(self.b1) / len(self.b2))
                self.target_t1_size = max(self.target_t1_size - delta, 0.0)
                self.b2.move_to_end(key)

    def refresh(self, keys: Iterable[OffloadKey]) -> None:
        for key in reversed(list(keys)):
            if key in self.t1:
                self.t1.move_to_end(key)
            elif key in self.t2:
                self.t2.move_to_end(key)

    def evict(self, n: int, protected: set[OffloadKey]) -> list[Victim] | None:
        if n <= 0:
            return []
        recent = _evictable(self.t1, protected)
        frequent = _evictable(self.t2, protected)
        t1_size, target = len(self.t1), int(self.target_t1_size)
        chosen: list[tuple[Victim, bool]] = []
        for _ in range(n):
            victim = next(recent, None) if t1_size >= target else None
            from_t1 = victim is not None
            if victim is None:
                victim = next(frequent, None)
            if victim is None:
                victim = next(recent, None)
                from_t1 = True
            if victim is None:
                return None
            t1_size -= from_t1
            chosen.append((victim, from_t1))
        for (key, _), from_t1 in chosen:
            if from_t1:
                del self.t1[key]
                self.b1[key] = None
            else:
                del self.t2[key]
                self.b2[key] = None
        for ghosts in (self.b1, self.b2):
            for _ in range(len(ghosts) - self.cache_capacity):
                ghosts.popitem(last=False)
        return [victim for victim, _ in chosen]

    def clear(self) -> None:
        for part in (self.t1, self.t2, self.b1, self.b2):
            part.clear()
        self.target_t1_size = 0.0

    def stats(self) -> dict[str, float]:
        return {
            "t1": float(len(self.t1)),
            "t2": float(len(self.t2)),
            "b1": float(len(self.b1)),
            "b2": float(len(self.b2)),
            "target_t1_size": self.target_t1_size,
        }


def _evictable(part: OrderedDict[OffloadKey, BlockStatus], protected: set[OffloadKey]) -> Iterator[Victim]:
    """Yield evictable keys of one list, oldest first; an exhausted iterator stays exhausted."""
    return ((key, block) for key, block in part.items() if block.ref_cnt == 0 and key not in protected)
