"""What the adaptive policy learns: how likely a block is asked for again, given its class and its age.

Theory of operation. Blocks of one *reuse class* (how its run is used, how much was asked and answered, the hint it
came with) are taken to behave alike. Per class and age bin two sums are kept: blocks that lived through the bin
(*exposed*) and blocks that were asked for in it (*asked*), both halved every few thousand requests. Their quotient,
smoothed towards wider sets of blocks, is the hazard of reuse. The rank of (class, bin) is its Gittins index: over the
best horizon, reuses bought per second that a block of memory stays occupied. The lowest rank is evicted first.

Sources: the Gittins index for caching; hit density of LHD (Beckmann et al., NSDI'18).
"""

from __future__ import annotations

from collections import OrderedDict
from math import log2

from kvoffload.manager.policies.adaptive_node import Node

BINS = 14
EDGES_SECONDS = (0.0, *(2.0**exponent for exponent in range(BINS - 1)), 4.0 * 2.0 ** (BINS - 1))
"""Age bins: below 1 s, then one for each doubling; the last one has no end, this is the length it counts with."""
_WIDTHS_SECONDS = [EDGES_SECONDS[index + 1] - EDGES_SECONDS[index] for index in range(BINS)]

CLASS_WEIGHT = 500.0
_MAX_HAZARD = 0.98
_DECAY = 0.5

SHARED = 3
PRIVATE_PATH = 2
LATER_TURN = 1
FIRST_TURN = 0

ClassKey = tuple[int, int, int, int]
"""Kind, level, hint, priority."""


def age_bin(age_seconds: float) -> int:
    """Return the bin of an age."""
    return 0 if age_seconds < 1.0 else min(BINS - 1, 1 + int(log2(age_seconds)))


class Sums:
    """Blocks asked for again and blocks that entered the bin, by age bin."""

    __slots__ = ("asked", "exposed")

    def __init__(self) -> None:
        self.asked = [0.0] * BINS
        self.exposed = [0.0] * BINS

    def hazards(self, towards: list[float], weight: float) -> list[float]:
        """Return asked / exposed by bin, smoothed with `weight` blocks that behave like `towards`."""
        return [
            (asked + weight * base) / (exposed + weight)
            for asked, exposed, base in zip(self.asked, self.exposed, towards, strict=True)
        ]

    def decay(self) -> None:
        """Halve everything: the past counts less."""
        self.asked[:] = [value * _DECAY for value in self.asked]
        self.exposed[:] = [value * _DECAY for value in self.exposed]


class ReuseClass(Sums):
    """Blocks that are taken to behave alike.

    Attributes:
        key: Kind, level, hint, priority.
        margins: Sums over wider sets of classes that hold this one: its kind first, then its level, its hint.
        rank: Gittins index by age bin, times 2 to the power of the priority.
        ranked_blocks: How many blocks had been watched, fading, when that was computed; at least one.
        in_heap: Bins whose cell has an entry of the current rank in the heap.
        cells: Evictable nodes by age bin, the longest unused first.
        exposures: Watched nodes by age bin, the same order.
    """

    __slots__ = ("cells", "exposures", "in_heap", "key", "margins", "rank", "ranked_blocks", "worth")

    def __init__(self, key: ClassKey, margins: tuple[Sums, ...]) -> None:
        super().__init__()
        self.key = key
        self.margins = margins
        self.worth = 2.0 ** key[3]
        self.rank = [0.0] * BINS
        self.ranked_blocks = 1.0
        self.in_heap = [False] * BINS
        self.cells: list[OrderedDict[Node, None]] = [OrderedDict() for _ in range(BINS)]
        self.exposures: list[OrderedDict[Node, None]] = [OrderedDict() for _ in range(BINS)]

    def base(self, of_kind: list[float]) -> list[float]:
        """Return the hazards to lean on: those of the kind; with a hint, as if hint and level acted independently."""
        if not self.key[2]:
            return of_kind
        by_level, by_hint = (sums.hazards(of_kind, CLASS_WEIGHT) for sums in self.margins[1:])
        return [a * b / kind for a, b, kind in zip(by_level, by_hint, of_kind, strict=True)]

    def update_rank(self, of_kind: list[float]) -> None:
        """Recompute the ranks in one pass from the oldest bin; `of_kind` holds the kind's hazards."""
        hazards = self.hazards(self.base(of_kind), CLASS_WEIGHT)
        stack: list[tuple[float, float, float]] = []  # reuses, block-seconds, survival of a horizon's pieces
        rank, worth = self.rank, self.worth
        for index in range(BINS - 1, -1, -1):
            reuses = hazards[index]
            reuses = min(reuses, _MAX_HAZARD)
            survival = 1.0 - reuses
            seconds = (1.0 - reuses / 2.0) * _WIDTHS_SECONDS[index]
            while stack and stack[-1][0] * seconds > reuses * stack[-1][1]:
                more_reuses, more_seconds, more_survival = stack.pop()
                reuses += survival * more_reuses
                seconds += survival * more_seconds
                survival *= more_survival
            stack.append((reuses, seconds, survival))
            rank[index] = worth * reuses / seconds
        self.ranked_blocks = self.exposed[0] + 1.0
        self.in_heap = [False] * BINS
