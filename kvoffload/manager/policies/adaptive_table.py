"""All reuse classes of the adaptive policy: the eviction order over their cells, and the clock that ages them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from kvoffload.manager.policies.adaptive_hazard import (
    BINS,
    EDGES_SECONDS,
    ClassKey,
    KindTotals,
    ReuseClass,
    age_bin,
)
from kvoffload.manager.policies.adaptive_node import Node

_PRIOR_HAZARD = 0.06
_KIND_WEIGHT = 240.0
_SCAN_SHARE = 0.125
_DECAY = 0.5


class ReuseTable:
    """All classes, the eviction order over them, and the clock that moves nodes from bin to bin.

    Args:
        block_weight: Size of a block in units of 512 tokens: the constants are in these.
        rerank_requests: Within this many requests every class is reranked once, a few at a time.
    """

    __slots__ = (
        "_base",
        "_cursor",
        "_due",
        "_heap",
        "_next_due",
        "_rerank_requests",
        "classes",
        "kinds",
        "now",
        "weight",
    )

    def __init__(self, block_weight: float = 1.0, rerank_requests: int = 50) -> None:
        self.weight = block_weight
        self.now = 0.0
        self.classes: dict[ClassKey, ReuseClass] = {}
        self.kinds: dict[int, KindTotals] = {}
        self._rerank_requests = rerank_requests
        self._base: dict[int, list[float]] = {}
        self._cursor: list[ReuseClass] = []
        self._heap: list[tuple[float, int, int, ReuseClass]] = []
        self._due = [0.0] * (BINS - 1)
        self._next_due = 0.0

    def get(self, key: ClassKey) -> ReuseClass:
        """Return a class, made on first use."""
        found = self.classes.get(key)
        if found is None:
            kind = self.kinds.get(key[0])
            if kind is None:
                kind = self.kinds[key[0]] = KindTotals()
                self._update_base()
            found = self.classes[key] = ReuseClass(key, kind, len(self.classes))
            found.update_rank(self._base[key[0]])
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
            heappush(self._heap, (reuse.rank[index], reuse.number, index, reuse))

    def watch(self, node: Node, reuse: ReuseClass) -> None:
        """Start a new life of `node` now, in class `reuse`."""
        node.leave_cell()
        node.leave_exposure()
        node.reuse = reuse
        node.time = self.now
        weight = len(node.keys) * self.weight
        reuse.exposed[0] += weight
        reuse.kind.exposed[0] += weight
        queue = node.exposure = reuse.exposures[0]
        queue[node] = None

    def ask(self, node: Node, age_seconds: float, blocks: int) -> None:
        """Note that `blocks` of a node were asked for again at this age."""
        index = age_bin(age_seconds)
        weight = blocks * self.weight
        node.reuse.asked[index] += weight
        node.reuse.kind.asked[index] += weight

    def advance(self, now: float) -> None:
        """Move the clock: nodes that outlived their bin enter the next one. A bin waits an eighth of its width."""
        self.now = now
        if now < self._next_due:
            return
        due = self._due
        bins = [index for index in range(BINS - 2, -1, -1) if now >= due[index]]
        for index in bins:
            due[index] = now + (EDGES_SECONDS[index + 1] - EDGES_SECONDS[index]) * _SCAN_SHARE
        self._next_due = min(due)
        for reuse in self.classes.values():
            cells, exposures = reuse.cells, reuse.exposures
            for index in bins:
                limit = now - EDGES_SECONDS[index + 1]
                if cells[index]:
                    self._age_cell(reuse, index, limit)
                if exposures[index]:
                    self._age_exposures(reuse, index, limit)

    def _age_cell(self, reuse: ReuseClass, index: int, limit: float) -> None:
        cell = reuse.cells[index]
        while cell:
            node = next(iter(cell))
            if node.time > limit:
                return
            del cell[node]
            node.age_bin = index + 1
            self._enter(node, reuse, index + 1)

    def _age_exposures(self, reuse: ReuseClass, index: int, limit: float) -> None:
        queue = reuse.exposures[index]
        following = reuse.exposures[index + 1] if index + 1 < BINS - 1 else None
        weight = 0
        while queue:
            node = next(iter(queue))
            if node.time > limit:
                break
            del queue[node]
            node.exposure = following
            if following is not None:
                following[node] = None
            weight += len(node.keys)
        reuse.exposed[index + 1] += weight * self.weight
        reuse.kind.exposed[index + 1] += weight * self.weight

    def rerank(self) -> None:
        """Recompute a share of the ranks; called once per request."""
        if not self._cursor:
            self._update_base()
            self._cursor = list(self.classes.values())
        for _ in range(-(-len(self.classes) // self._rerank_requests)):
            if not self._cursor:
                return
            reuse = self._cursor.pop()
            reuse.update_rank(self._base[reuse.key[0]])
            for index, cell in enumerate(reuse.cells):
                if cell:
                    reuse.in_heap[index] = True
                    heappush(self._heap, (reuse.rank[index], reuse.number, index, reuse))
        if len(self._heap) > 4 * BINS * (len(self.classes) + 4):
            self._rebuild_heap()

    def _rebuild_heap(self) -> None:
        self._heap.clear()
        for reuse in self.classes.values():
            for index, cell in enumerate(reuse.cells):
                reuse.in_heap[index] = bool(cell)
                if cell:
                    self._heap.append((reuse.rank[index], reuse.number, index, reuse))
        heapify(self._heap)

    def _update_base(self) -> None:
        asked = [sum(kind.asked[index] for kind in self.kinds.values()) for index in range(BINS)]
        exposed = [sum(kind.exposed[index] for kind in self.kinds.values()) for index in range(BINS)]
        overall = [
            (asked[index] + _KIND_WEIGHT * _PRIOR_HAZARD) / (exposed[index] + _KIND_WEIGHT) for index in range(BINS)
        ]
        for key, kind in self.kinds.items():
            self._base[key] = [
                (kind.asked[index] + _KIND_WEIGHT * overall[index]) / (kind.exposed[index] + _KIND_WEIGHT)
                for index in range(BINS)
            ]

    def decay(self) -> None:
        """Halve all sums: the past counts less."""
        everything: list[ReuseClass | KindTotals] = [*self.classes.values(), *self.kinds.values()]
        for sums in everything:
            sums.asked[:] = [value * _DECAY for value in sums.asked]
            sums.exposed[:] = [value * _DECAY for value in sums.exposed]

    def lowest(self) -> tuple[float, OrderedDict[Node, None]] | None:
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

    def expected_rank(self, kind: int, levels: Sequence[int], priority: int) -> float:
        """Return the rank of young blocks whose level is one of these, weighted by how often each has been seen."""
        total = weighted = 0.0
        for level in levels:
            reuse = self.get((kind, level, 0, priority))
            weight = reuse.exposed[0] + 1.0
            total += weight
            weighted += weight * reuse.rank[0]
        return weighted / total

    def least_recent(self) -> OrderedDict[Node, None] | None:
        """Return the cell whose head has been unused longest: plain LRU order."""
        for index in range(BINS - 1, -1, -1):
            cells = [reuse.cells[index] for reuse in self.classes.values() if reuse.cells[index]]
            if cells:
                return min(cells, key=lambda cell: next(iter(cell)).time)
        return None

    def clear(self) -> None:
        """Forget all nodes; the hazards stay."""
        for reuse in self.classes.values():
            for queues in (reuse.cells, reuse.exposures):
                for queue in queues:
                    queue.clear()
            reuse.in_heap = [False] * BINS
        self._heap.clear()
