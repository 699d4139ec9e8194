"""Least recently used. Reference, chapter 5.2."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kvoffload.keys import OffloadKey
from kvoffload.manager.policies.base import BlockStatus, CachePolicy


class LRUCachePolicy(CachePolicy):
    """Evicts the key that was not used for longest.

    Attributes:
        blocks: Held keys, the next victim first.
    """

    def __init__(self, cache_capacity: int) -> None:
        self.cache_capacity = cache_capacity
        self.blocks: OrderedDict[OffloadKey, BlockStatus] = OrderedDict()

    def get(self, key: OffloadKey) -> BlockStatus | None:
        return self.blocks.get(key)

    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        self.blocks[key] = block

    def remove(self, key: OffloadKey) -> None:
        del self.blocks[key]

    def touch(self, keys: Iterable[OffloadKey]) -> None:
        blocks = self.blocks
        for key in reversed(list(keys)):
            if key in blocks:
                blocks.move_to_end(key)

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, BlockStatus]] | None:
        victims: list[tuple[OffloadKey, BlockStatus]] = []
        if n <= 0:
            return victims
        for key, block in self.blocks.items():
            if block.ref_cnt == 0 and key not in protected:
                victims.append((key, block))
                if len(victims) == n:
                    break
        else:
            return None
        for key, _ in victims:
            del self.blocks[key]
        return victims

    def clear(self) -> None:
        self.blocks.clear()
