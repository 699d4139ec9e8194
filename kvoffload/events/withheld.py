"""The withheld: blocks that are present but not announced, why, and for which parent they wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kvoffload.events.blocks import Ident, Tiers, Unit
from kvoffload.events.wire import Hash

Reason = Literal["no_info", "salted", "malformed", "unencodable", "orphan"]
REASONS: tuple[Reason, ...] = ("no_info", "salted", "malformed", "unencodable", "orphan")

WHY: dict[Reason, str] = {
    "no_info": "nobody said which tokens they hold",
    "salted": "their extra keys are unknown, and without them consumers would report false hits",
    "malformed": "their description does not fit them",
    "unencodable": "the consumer's format has no way to name them",
    "orphan": "a block before them is not held, so no request can use them now",
}
"""What each reason means, as the log says it once."""


@dataclass(slots=True)
class Withheld:
    """A present block that is not announced.

    Attributes:
        reason: Why.
        unit: What describes it; None while nothing usable does.
        count: How often it was reported present.
    """

    reason: Reason
    unit: Unit | None
    count: int = 1


class WithheldBlocks:
    """The withheld blocks of one feed.

    Attributes:
        blocks: The withheld blocks by identity. Read it; `add` and `take` change it.
        orphans: Withheld blocks by the group and hash of the parent they wait for. Read it.
        total: Blocks withheld so far, by reason.
    """

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self.blocks: dict[Ident, Withheld] = {}
        self.orphans: dict[tuple[int | None, Hash], set[Ident]] = {}
        self._sizes: Counter[Reason] = Counter()
        self.total: Counter[Reason] = Counter()

    def sizes(self) -> dict[Reason, int]:
        """Return how many blocks are withheld now, by reason."""
        return {reason: self._sizes[reason] for reason in REASONS}

    def add(self, ident: Ident, unit: Unit | None, reason: Reason, count: int) -> None:
        """Withhold a block that is not withheld."""
        self.blocks[ident] = Withheld(reason, unit, count)
        self._sizes[reason] += 1
        self.total[reason] += 1
        if unit is not None and unit.parent is not None:
            group = self._tiers.name(unit.tier)[1]
            self.orphans.setdefault((group, unit.parent), set()).add(ident)

    def take(self, ident: Ident) -> Withheld:
        """Withhold a withheld block no more; return what was known of it."""
        held = self.blocks.pop(ident)
        self._sizes[held.reason] -= 1
        if held.unit is not None and held.unit.parent is not None:
            place = (self._tiers.name(held.unit.tier)[1], held.unit.parent)
            waiting = self.orphans.get(place)
            if waiting is not None:
                waiting.discard(ident)
                if not waiting:
                    del self.orphans[place]
        return held

    def remove(self, ident: Ident) -> bool:
        """A block was reported absent; False when it is not withheld."""
        held = self.blocks.get(ident)
        if held is None:
            return False
        held.count -= 1
        if held.count <= 0:
            self.take(ident)
        return True

    def waiting_for(self, unit: Unit) -> Iterator[Ident]:
        """Yield the blocks that wait for `unit`, and for those in turn; they may be taken meanwhile."""
        group = self._tiers.name(unit.tier)[1]
        stack = [(group, name) for name in unit.hashes]
        while stack:
            for ident in list(self.orphans.get(stack.pop(), ())):
                held = self.blocks.get(ident)
                hashes = held.unit.hashes if held is not None and held.unit is not None else ()
                if hashes:
                    yield ident
                    stack.extend((group, name) for name in hashes)
