"""The adaptive policy's safety net: what plain LRU would have done, exactly, and when to do that instead.

Theory of operation. LRU over requests needs no list of blocks: count, per request, the blocks that it was the last one
to touch. The newest requests whose counts add up to the capacity are the shadow cache; a run of keys is in it iff its
last request is not older. When the policy's own hits fall below the shadow's, eviction follows plain LRU for a while,
longer each time; then the policy gets another try.
"""

from __future__ import annotations

_CHECK_REQUESTS = 500
_FADE = 0.75
_TOLERANCE = 0.99
_FIRST_PENALTY = 2_000
_LONGEST_PENALTY = 64_000


class ShadowLRU:
    """Which runs a plain LRU of the same capacity would hold; O(1) per run.

    Args:
        capacity: Blocks in the pool.
    """

    __slots__ = ("_blocks_of", "_capacity", "_held", "_oldest", "request")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks_of: dict[int, int] = {}
        self._held = 0
        self._oldest = 0
        self.request = 0

    def holds(self, last_request: int) -> bool:
        """Whether runs last touched by that request are in the shadow cache."""
        return last_request >= self._oldest

    def leave(self, last_request: int, blocks: int) -> None:
        """Take blocks out of their last request's account; another request touches them now."""
        if last_request >= self._oldest:
            self._blocks_of[last_request] -= blocks
            self._held -= blocks

    def enter(self, blocks: int) -> None:
        """Book blocks of the current request, and drop the oldest requests beyond the capacity."""
        if self.request < self._oldest:  # it alone is larger than the cache
            return
        self._blocks_of[self.request] = self._blocks_of.get(self.request, 0) + blocks
        self._held += blocks
        while self._held > self._capacity:
            self._held -= self._blocks_of.pop(self._oldest, 0)
            self._oldest += 1

    def clear(self) -> None:
        """Forget the content."""
        self._blocks_of.clear()
        self._held = 0
        self._oldest = self.request + 1


class LRUGuard:
    """Compares own hits with the shadow's and says in which order to evict.

    Attributes:
        plain_lru: Whether eviction follows plain LRU now.
        switches: How often the guard took over.
        own_hits: Blocks found in unbroken held prefixes since the start.
        lru_hits: The same for the shadow LRU.
        asked: Blocks asked for since the start.
    """

    __slots__ = (
        "_next_check", "_own", "_penalty", "_requests", "_shadow", "asked", "lru_hits", "own_hits", "plain_lru",
        "switches",
    )  # fmt: skip

    def __init__(self) -> None:
        self.plain_lru = False
        self.switches = 0
        self.own_hits = self.lru_hits = self.asked = 0
        self._own = self._shadow = 0.0
        self._requests = 0
        self._next_check = _FIRST_PENALTY
        self._penalty = float(_FIRST_PENALTY)

    def count(self, own_hits: int, lru_hits: int, asked: int) -> None:
        """Book one request."""
        self.own_hits += own_hits
        self.lru_hits += lru_hits
        self.asked += asked
        self._own += own_hits
        self._shadow += lru_hits
        self._requests += 1
        if self._requests < self._next_check:
            return
        if self.plain_lru:
            self.plain_lru = False
            self._own = self._shadow = 0.0
            self._next_check = self._requests + _FIRST_PENALTY
        elif self._own < _TOLERANCE * self._shadow:
            self.plain_lru = True
            self.switches += 1
            self._next_check = self._requests + int(self._penalty)
            self._penalty = min(self._penalty * 2, _LONGEST_PENALTY)
        else:
            self._next_check = self._requests + _CHECK_REQUESTS
            self._own *= _FADE
            self._shadow *= _FADE
            self._penalty = max(_FIRST_PENALTY, self._penalty * 0.9)

    def stats(self) -> dict[str, float]:
        """Return the counters, by metric name."""
        return {
            "own_prefix_hit_blocks": self.own_hits,
            "lru_prefix_hit_blocks": self.lru_hits,
            "requested_blocks": self.asked,
            "guard_switches": self.switches,
            "guard_plain_lru": float(self.plain_lru),
        }
