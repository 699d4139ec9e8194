"""Why a key is not held: a compact memory of the last thing that happened to keys that left or never came in.

Keys are kept as 64-bit prints in insertion order and the oldest is forgotten past the limit, so a wrong answer needs a
collision of prints and memory is bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvoffload.keys import OffloadKey

CAUSES = ("new", "evicted", "filtered", "rejected", "failed", "reset", "discarded")


class KeyHistory:
    """Last fate of keys that are not held.

    Large lists (a reset drops every key) are taken in slices over later calls, so that no call takes long.

    Args:
        limit: Keys to remember; twice the capacity serves well.
    """

    _SLICE = 2048

    def __init__(self, limit: int) -> None:
        self._limit = max(16, limit)
        self._fate: dict[int, tuple[str, float]] = {}
        self._backlog: deque[tuple[Sequence[OffloadKey], int, tuple[str, float]]] = deque()

    def __len__(self) -> int:
        return len(self._fate)

    def note(self, keys: Sequence[OffloadKey], cause: str, now_seconds: float) -> None:
        """Remember that `keys` left, or did not come in, for `cause`."""
        self._backlog.append((keys, 0, (cause, now_seconds)))
        self._work()

    def _work(self) -> None:
        budget, fate = self._SLICE, self._fate
        while self._backlog and budget > 0:
            keys, position, entry = self._backlog.popleft()
            for key in keys[position : position + budget]:
                mark = hash(key)
                fate.pop(mark, None)
                fate[mark] = entry
            if position + budget < len(keys):
                self._backlog.appendleft((keys, position + budget, entry))
            budget -= len(keys) - position
        while len(fate) > self._limit:
            del fate[next(iter(fate))]

    def cause(self, key: OffloadKey) -> str:
        """Return why `key` is not held; `new` when nothing is remembered."""
        fate = self.fate(key)
        return fate[0] if fate else "new"

    def fate(self, key: OffloadKey) -> tuple[str, float] | None:
        """Return cause and time of what last happened to `key`, if it is remembered."""
        if self._backlog:
            self._work()
        return self._fate.get(hash(key))
