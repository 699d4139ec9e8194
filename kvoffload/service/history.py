"""Why a key is not held: a compact memory of the last thing that happened to keys that left or never came in.

Keys are kept as 64-bit prints, so a wrong answer needs a collision of prints. They live in two generations: when the
young one is full it becomes the old one, and the old one is taken apart a little with each later call. So memory is
bounded, and no call takes long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal

from kvoffload.keys import OffloadKey

Cause = Literal["evicted", "filtered", "rejected", "failed", "reset", "discarded"]
"""What takes a key out, or keeps it from coming in."""


class KeyHistory:
    """Last fate of keys that are not held.

    Large lists (a reset drops every key) are taken in slices over later calls, so that no call takes long.

    Args:
        limit: Keys to remember, at least; twice the capacity serves well.
    """

    _SLICE = 2048

    def __init__(self, limit: int) -> None:
        self._limit = max(16, limit)
        self._young: dict[int, tuple[Cause, float]] = {}
        self._old: dict[int, tuple[Cause, float]] = {}
        self._dying: dict[int, tuple[Cause, float]] = {}
        self._backlog: deque[tuple[Sequence[OffloadKey], int, tuple[Cause, float]]] = deque()

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def note(self, keys: Sequence[OffloadKey], cause: Cause, now_seconds: float) -> None:
        """Remember that `keys` left, or did not come in, for `cause`."""
        if keys:
            self._backlog.append((keys, 0, (cause, now_seconds)))
            self._work()

    def _work(self) -> None:
        budget = self._SLICE
        while self._backlog and budget > 0:
            keys, position, entry = self._backlog.popleft()
            room = max(1, self._limit - len(self._young))
            taken = keys[position : position + min(budget, room)]
            young, dying = self._young, self._dying
            for key in taken:
                young[hash(key)] = entry
                if dying:
                    dying.popitem()
            if position + len(taken) < len(keys):
                self._backlog.appendleft((keys, position + len(taken), entry))
            budget -= len(taken)
            if len(young) >= self._limit:
                self._young, self._old, self._dying = {}, young, self._old

    def cause(self, key: OffloadKey) -> Cause | Literal["new"]:
        """Return why `key` is not held; `new` when nothing is remembered."""
        fate = self.fate(key)
        return fate[0] if fate else "new"

    def fate(self, key: OffloadKey) -> tuple[Cause, float] | None:
        """Return cause and time of what last happened to `key`, if it is remembered."""
        if self._backlog:
            self._work()
        mark = hash(key)
        return self._young.get(mark) or self._old.get(mark)
