"""Removed blocks that a consumer of unknown age may still hold: 8 bytes each, up to a bound."""

from __future__ import annotations

from array import array
from collections.abc import Container

from kvoffload.events.blocks import Ident

_TIER_SHIFT = 64
_MASK = (1 << _TIER_SHIFT) - 1


class Tombstones:
    """Identities of removed blocks; the oldest are forgotten when the bound is reached.

    Attributes:
        discarded: How many were forgotten: from then on a full replay may leave a dead block behind.
    """

    def __init__(self, limit: int) -> None:
        self._limit = max(limit, 1)
        self._numbers: dict[int, array[int]] = {}
        self._names: list[bytes] = []
        self._count = 0
        self.discarded = 0

    def __len__(self) -> int:
        return self._count

    def add(self, ident: Ident, live: Container[Ident]) -> None:
        """Remember a removed block; `live` tells which ones may be dropped when room is needed."""
        if isinstance(ident, int):
            tier = ident >> _TIER_SHIFT
            numbers = self._numbers.get(tier)
            if numbers is None:
                numbers = self._numbers[tier] = array("Q")
            numbers.append(ident & _MASK)
        else:
            self._names.append(ident)
        self._count += 1
        if self._count > self._limit:
            self._compact(live)

    def entries(self) -> list[Ident]:
        """Return the remembered identities, each once."""
        found: dict[Ident, None] = dict.fromkeys(self._names)
        for tier, numbers in self._numbers.items():
            found.update(dict.fromkeys(number | tier << _TIER_SHIFT for number in numbers))
        return list(found)

    def _compact(self, live: Container[Ident]) -> None:
        """Drop what lives again and what is there twice; when that gains little, forget the oldest."""
        kept = [ident for ident in self.entries() if ident not in live]
        target = self._limit - self._limit // 8
        if len(kept) > target:
            excess = len(kept) - target
            self.discarded += excess
            kept = kept[excess:]
        self._numbers, self._names, self._count = {}, [], 0
        for ident in kept:
            if isinstance(ident, int):
                self._numbers.setdefault(ident >> _TIER_SHIFT, array("Q")).append(ident & _MASK)
            else:
                self._names.append(ident)
        self._count = len(kept)
