"""All reuse classes of the adaptive policy: the eviction order over their cells, and the clock that ages them."""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush

from kvoffload.manager.policies.adaptive_hazard import (
    BINS,
    EDGES_SECONDS,
    SHARED,
    ClassKey,
    ReuseClass,
    Sums,
    age_bin,
)
from kvoffload.manager.policies.adaptive_node import Node

Queue = OrderedDict[Node, None]

_PRIOR_HAZARD = 0.06
_KIND_WEIGHT = 240.0
_SCAN_SHARE = 0.125
_RERANK_REQUESTS = 50
_AGED_AT_ONCE = 4096
_RERANKS_AT_ONCE = 64


class ReuseTable:
    """All classes, the eviction order over them, and the clock that moves nodes from bin to bin.

    Attributes:
        classes: By key.
        now: The clock.
        weight: Size of a block in units of 512 tokens: the constants are in these.
    """

    __slots__ = (
        "_base",
        "_cursor",
        "_due",
        "_expected",
        "_heap",
        "_margins",
        "_next_due",
        "_queues",
        "_requests",
        "classes",
        "now",
        "weight",
    )

    def __init__(self) -> None:
        self.weight = 1.0
        self.now = 0.0
        self.classes: dict[ClassKey, ReuseClass] = {}
        self._queues: list[list[tuple[Queue, Queue, ReuseClass]]] = [[] for _ in range(BINS)]  # all there are, by bin
        self._margins: dict[tuple[int, int, int], Sums] = {}  # kind, level or -1, hint or -1
        self._requests = 0
        self._base: dict[int, list[float]] = {}
        self._cursor: list[ReuseClass] = []
        self._heap: list[tuple[float, ClassKey, int, ReuseClass]] = []
        self._expected: dict[tuple[int, tuple[int, ...], int], float] = {}
        self._due = [0.0] * (BINS - 1)
        self._next_due = 0.0

    def get(self, key: ClassKey) -> ReuseClass:
        """Return a class, made on first use."""
        found = self.classes.get(key)
        if found is None:
            kind, level, hint, _ = key
            wider = [(kind, -1, -1)]
            if kind != SHARED:
                wider += [(kind, level, -1), (kind, -1, hint)] if hint else [(kind, level, -1)]
            margins = tuple(self._margins.setdefault(name, Sums()) for name in wider)
            found = self.classes[key] = ReuseClass(key, margins)
            for queues, cell, watched in zip(self._queues, found.cells, found.exposures, strict=True):
                queues.append((cell, watched, found))
            self._update_base()
            found.update_rank(self._base[kind])
        return found

    def place(self, node: Node) -> None:
        """Put a node into the cell of its class and age."""
        index = node.age_bin = age_bin(self.now - node.time)
        self._enter(node, node.reuse, index)

    def put_back(self, node: Node) -> None:
        """Put a node that was just taken out at the head of its cell again."""
        node.leave_cell()
        self._enter(node, node.reuse, node.age_bin)
        node.reuse.cells[node.age_bin].move_to_end(node, last=False)

    def _enter(self, node: Node, reuse: ReuseClass, index: int) -> None:
        cell = node.cell = reuse.cells[index]
        cell[node] = None
        if not reuse.in_heap[index]:
            reuse.in_heap[index] = True
            heappush(self._heap, (reuse.rank[index], reuse.key, index, reuse))

    def watch(self, node: Node, reuse: ReuseClass) -> None:
        """Start a new life of `node` now, in class `reuse`."""
        if not reuse.exposed[0]:
            self._begin_pass()
            self._continue_pass()
        node.leave_cell()
        node.leave_exposure()
        node.reuse = reuse
        node.time = self.now
        weight = len(node.keys) * self.weight
        reuse.exposed[0] += weight
        for margin in reuse.margins:
            margin.exposed[0] += weight
        queue = node.exposure = reuse.exposures[0]
        queue[node] = None

    def ask(self, node: Node, age_seconds: float, blocks: int) -> None:
        """Note that `blocks` of a node were asked for again at this age."""
        index = age_bin(age_seconds)
        weight = blocks * self.weight
        node.reuse.asked[index] += weight
        for margin in node.reuse.margins:
            margin.asked[index] += weight

    def advance(self, now: float) -> None:
        """Move the clock: nodes that outlived their bin enter the next one.

        A bin waits an eighth of its width for its next scan, and a node moves by one bin in a call. When more are due
        than one call may move, as after a burst of keys without a request, the next calls move the others.
        """
        self.now = now
        if now < self._next_due:
            return
        due = self._due
        bins = [index for index in range(BINS - 2, -1, -1) if now >= due[index]]
        left = _AGED_AT_ONCE
        for index in bins:
            if left > 0:
                left -= self._age_bin(index, now - EDGES_SECONDS[index + 1], left)
            if left > 0:
                due[index] = now + (EDGES_SECONDS[index + 1] - EDGES_SECONDS[index]) * _SCAN_SHARE
        self._next_due = min(due)

    def _age_bin(self, index: int, limit: float, most: int) -> int:
        """Move nodes that are not younger than `limit` to the next bin, up to `most`; return how many it were."""
        left = most
        for cell, watched, reuse in self._queues[index]:
            while cell and left > 0:
                node = next(iter(cell))
                if node.time > limit:
                    break
                del cell[node]
                node.age_bin = index + 1
                self._enter(node, reuse, index + 1)
                left -= 1
            if watched and left > 0 and next(iter(watched)).time <= limit:
                left -= self._age_exposures(reuse, index, limit, left)
        return most - left

    def _age_exposures(self, reuse: ReuseClass, index: int, limit: float, most: int) -> int:
        watched = reuse.exposures[index]
        following = reuse.exposures[index + 1] if index + 1 < BINS - 1 else None
        blocks = moved = 0
        while watched and moved < most:
            node = next(iter(watched))
            if node.time > limit:
                break
            del watched[node]
            node.exposure = following
            if following is not None:
                following[node] = None
            blocks += len(node.keys)
            moved += 1
        weight = blocks * self.weight
        reuse.exposed[index + 1] += weight
        for margin in reuse.margins:
            margin.exposed[index + 1] += weight
        return moved

    def rerank(self) -> None:
        """Note that a request ended: every so many of them all ranks are computed anew, a limited number in each call.

        The first block of a class begins such a pass too, so that ranks are of one time.
        """
        self._requests += 1
        if self._requests % _RERANK_REQUESTS == 0:
            self._begin_pass()
        self._continue_pass()

    def _begin_pass(self) -> None:
        self._update_base()
        self._cursor = list(self.classes.values())
        self._expected.clear()

    def _continue_pass(self) -> None:
        cursor = self._cursor
        if not cursor:
            return
        for reuse in cursor[-_RERANKS_AT_ONCE:]:
            reuse.update_rank(self._base[reuse.key[0]])
            for index, cell in enumerate(reuse.cells):
                if cell:
                    reuse.in_heap[index] = True
                    heappush(self._heap, (reuse.rank[index], reuse.key, index, reuse))
        del cursor[-_RERANKS_AT_ONCE:]
        if len(self._heap) > 4 * BINS * (len(self.classes) + 4):
            self._rebuild_heap()

    def _rebuild_heap(self) -> None:
        self._heap.clear()
        for reuse in self.classes.values():
            for index, cell in enumerate(reuse.cells):
                reuse.in_heap[index] = bool(cell)
                if cell:
                    self._heap.append((reuse.rank[index], reuse.key, index, reuse))
        heapify(self._heap)

    def _update_base(self) -> None:
        """Recompute the hazards of the kinds, which lean on those of all blocks."""
        kinds = {name[0]: sums for name, sums in self._margins.items() if name[1:] == (-1, -1)}
        everything = Sums()
        for sums in kinds.values():
            everything.asked = [a + b for a, b in zip(everything.asked, sums.asked, strict=True)]
            everything.exposed = [a + b for a, b in zip(everything.exposed, sums.exposed, strict=True)]
        overall = everything.hazards([_PRIOR_HAZARD] * BINS, _KIND_WEIGHT)
        self._base = {kind: sums.hazards(overall, _KIND_WEIGHT) for kind, sums in kinds.items()}

    def decay(self) -> None:
        """Halve all sums: the past counts less."""
        everything: list[Sums] = [*self.classes.values(), *self._margins.values()]
        for sums in everything:
            sums.decay()

    def lowest(self) -> tuple[float, Queue] | None:
        """Return rank and cell of what is worth least; None when nothing is evictable."""
        heap = self._heap
        while heap:
            rank, _, index, reuse = heap[0]
            if reuse.rank[index] == rank:
                if reuse.cells[index]:
                    return rank, reuse.cells[index]
                reuse.in_heap[index] = False
            heappop(heap)
        return None

    def expected_rank(self, kind: int, levels: tuple[int, ...], priority: int) -> float:
        """Return the rank of young blocks of unknown answer and hint, weighted by how often each class has been seen.

        Args:
            kind: Their kind.
            levels: What their level can be.
            priority: Their priority.
        """
        known = self._expected.get((kind, levels, priority))
        if known is None:
            likely = [
                r for key, r in self.classes.items() if key[0] == kind and key[3] == priority and key[1] in levels
            ]
            if not likely:
                return self.get((kind, levels[0], 0, priority)).rank[0]
            weighted = sum(reuse.ranked_blocks * reuse.rank[0] for reuse in likely)
            known = self._expected[kind, levels, priority] = weighted / sum(reuse.ranked_blocks for reuse in likely)
        return known

    def least_recent(self) -> Queue | None:
        """Return the cell whose head has been unused longest: plain LRU order."""
        oldest: Queue | None = None
        since = 0.0
        for index in range(BINS - 1, -1, -1):
            for cell, _, _ in self._queues[index]:
                if cell:
                    time = next(iter(cell)).time
                    if oldest is None or time < since:
                        oldest, since = cell, time
            if oldest is not None:
                return oldest
        return None

    def clear(self) -> None:
        """Forget all nodes; the hazards stay."""
        for reuse in self.classes.values():
            for queues in (reuse.cells, reuse.exposures):
                for queue in queues:
                    queue.clear()
            reuse.in_heap = [False] * BINS
        self._heap.clear()
