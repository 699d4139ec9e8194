"""LRU and ARC in their plainest form, on OrderedDicts: what fast policies must agree with, victim by victim."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

from kvoffload.manager.policies.base import CachePolicy


class PlainLRU(CachePolicy):
    def __init__(self, cache_capacity):
        self.blocks = OrderedDict()

    def get(self, key):
        return self.blocks.get(key)

    def insert(self, key, block):
        self.blocks[key] = block

    def remove(self, key):
        del self.blocks[key]

    def touch(self, keys):
        for key in reversed(list(keys)):
            if key in self.blocks:
                self.blocks.move_to_end(key)

    def evict(self, n, protected):
        victims = list(islice(((k, b) for k, b in self.blocks.items() if b.ref_cnt == 0 and k not in protected), n))
        if len(victims) < n:
            return None
        for key, _ in victims:
            del self.blocks[key]
        return victims


class PlainARC(CachePolicy):
    def __init__(self, cache_capacity):
        self.cache_capacity = cache_capacity
        self.target_t1_size = 0.0
        self.t1, self.t2, self.b1, self.b2 = (OrderedDict() for _ in range(4))

    def get(self, key):
        return self.t1.get(key) or self.t2.get(key)

    def insert(self, key, block):
        self.t1[key] = block
        self.b1.pop(key, None)
        self.b2.pop(key, None)

    def remove(self, key):
        if self.t1.pop(key, None) is None:
            self.t2.pop(key, None)

    def touch(self, keys):
        for key in reversed(list(keys)):
            if key in self.t1:
                block = self.t1.pop(key)
                (self.t2 if block.is_ready else self.t1)[key] = block
            elif key in self.t2:
                self.t2.move_to_end(key)
            elif key in self.b1:
                delta = max(1, len(self.b2) / len(self.b1))
                self.target_t1_size = min(self.target_t1_size + delta, self.cache_capacity)
                self.b1.move_to_end(key)
            elif key in self.b2:
                delta = max(1, len(self.b1) / len(self.b2))
                self.target_t1_size = max(self.target_t1_size - delta, 0)
                self.b2.move_to_end(key)

    def refresh(self, keys):
        for key in reversed(list(keys)):
            for part in (self.t1, self.t2):
                if key in part:
                    part.move_to_end(key)

    def evict(self, n, protected):
        chosen, taken, t1_size = [], set(), len(self.t1)

        def oldest(part):
            for key, block in part.items():
                if block.ref_cnt == 0 and key not in protected and key not in taken:
                    return key
            return None

        for _ in range(n):
            key, from_t1 = None, t1_size >= int(self.target_t1_size)
            if from_t1:
                key = oldest(self.t1)
            if key is None:
                from_t1, key = False, oldest(self.t2)
            if key is None:
                from_t1, key = True, oldest(self.t1)
            if key is None:
                return None
            t1_size -= from_t1
            taken.add(key)
            chosen.append((key, from_t1))
        result = []
        for key, from_t1 in chosen:
            part, ghosts = (self.t1, self.b1) if from_t1 else (self.t2, self.b2)
            result.append((key, part.pop(key)))
            ghosts[key] = None
        for ghosts in (self.b1, self.b2):
            while len(ghosts) > self.cache_capacity:
                ghosts.popitem(last=False)
        return result

    def clear(self):
        for part in (self.t1, self.t2, self.b1, self.b2):
            part.clear()
        self.target_t1_size = 0.0
