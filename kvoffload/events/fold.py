"""What a full queue does with events: the *send* is dropped, never the change.

Changes fold into one entry per block: the sum of its stores and removals. Equal hashes mean equal content, so a removal
followed by a store is no change at all, and the map holds at most the blocks that were present before the loss and
those that are present now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvoffload.events.residency import Residency
from kvoffload.keys import BlockInfo, OffloadKey
from kvoffload.manager.base import OffloadingEvent


@dataclass(slots=True)
class _Change:
    net: int = 0
    info: BlockInfo | None = None


@dataclass(slots=True)
class Fold:
    """The last state of the blocks whose events found no room.

    Attributes:
        lost: How many publications were folded: the numbers that consumers will miss.
    """

    lost: int = 0
    _changes: dict[tuple[OffloadKey, str], _Change] = field(default_factory=dict)
    _late: dict[OffloadKey, BlockInfo] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._changes)

    def add(self, events: Sequence[OffloadingEvent], infos: Mapping[OffloadKey, BlockInfo]) -> None:
        """Fold one publication; without events, the infos describe held blocks."""
        self.lost += 1
        if not events:
            self._late.update(infos)
        changes = self._changes
        for event in events:
            step = -1 if event.removed else 1
            for key in event.keys:
                place = (key, event.medium)
                change = changes.get(place)
                if change is None:
                    change = changes[place] = _Change()
                change.net += step
                change.info = None if event.removed else infos.get(key)
                if change.net == 0 and change.info is None:
                    del changes[place]

    def apply(self, residency: Residency) -> None:
        """Bring the folded state to the residency: removals first, then stores in the order of their first change."""
        for (key, medium), change in self._changes.items():
            for _ in range(-change.net):
                residency.remove(key, medium)
        late = self._late
        for (key, medium), change in self._changes.items():
            for _ in range(change.net):
                residency.store(key, medium, change.info)
            if change.net == 0 and change.info is not None:
                late[key] = change.info
        residency.describe(late)
