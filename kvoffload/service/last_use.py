"""When keys that are held were last used: the idle time of what is evicted. One entry per held key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvoffload.keys import OffloadKey


class LastUse:
    """Remembers when keys were stored or hit.

    Args:
        limit: More entries than that mean that nobody reports removals; then all are forgotten.
    """

    def __init__(self, limit: int) -> None:
        self._at: dict[OffloadKey, float] = {}
        self._limit = max(16, limit)

    def __len__(self) -> int:
        return len(self._at)

    def used(self, keys: Sequence[OffloadKey], now_seconds: float) -> None:
        """`keys` are held and were stored or hit now."""
        self._at.update(dict.fromkeys(keys, now_seconds))
        if len(self._at) > self._limit:
            self._at.clear()

    def gone(self, keys: Iterable[OffloadKey], now_seconds: float) -> list[float]:
        """Forget keys that left; return for how long each was not used, as far as that is known."""
        take = self._at.pop
        return [now_seconds - at for key in keys if (at := take(key, None)) is not None]

    def clear(self) -> None:
        """Forget everything: all keys left at once."""
        self._at = {}
