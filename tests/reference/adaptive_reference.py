"""The adaptive policy's algorithm once more, in its plainest form: one request after the other, short instead of fast.

It knows no pins, steps, groups, hints or priorities. A request is served at once: what it found, what it stores, what
has to leave. `AdaptiveCachePolicy` must decide the same when it is asked in the same order, see `adaptive_driver`.

What is kept: runs of keys without a fork (`Run`), in a radix tree. A run's class says how it is used; per class and age
is counted how much lived so long and how much was asked for then, and a class is worth, at an age, the most reuses a
block-second that keeping its blocks for some while has bought (Gittins index). What is worth least leaves, oldest run
first, from its end. Numbers in brackets are those of the description's points.
"""

from __future__ import annotations

from collections import defaultdict
from math import log2
from typing import NamedTuple

FIRST, LATER, PATH, SHARED = range(4)
BINS = 14
EDGES = [0.0] + [2.0**i for i in range(BINS - 1)] + [4 * 2.0 ** (BINS - 1)]
ENDLESS = BINS - 1
TOLERANCE = 0.99


class Run:
    def __init__(self, keys, parent):
        self.keys, self.parent = keys, parent
        self.held = 0  # leading keys that have blocks
        self.living = set()  # children that hold something
        self.forks = 0  # children ever
        self.count = 0
        self.time = 0.0
        self.request = 0
        self.kind = None  # its class: kind and level
        self.talks = False  # it is the end of a conversation
        self.cell = None


class Served(NamedTuple):
    hits: int
    stored: list
    evicted: list


class AdaptiveReference:
    """Decides; `ghosts_per_block` and `foresight` (the answer's length is known before storing) are the variations."""

    def __init__(self, capacity, *, ghosts_per_block=4, foresight=False):
        self.capacity, self.foresight = capacity, foresight
        self.max_ghosts = max(4096, ghosts_per_block * capacity)  # [15]
        self.run_of = {}
        self.held = 0
        self.cells = {}  # class and bin -> runs whose end may leave, the first one first; none is empty [11]
        self.watched = [{} for _ in range(BINS)]  # runs by the age they have been seen to reach [8]
        self.ghosts = {}  # runs with keys without blocks, the first to be forgotten first
        self.asked, self.exposed = (defaultdict(lambda: [0.0] * BINS) for _ in range(2))  # by class, and by kind [7]
        self.rank, self.seen = {}, {}  # as of the last ranking: worth by class and bin, exposure by class
        self.due = [0.0] * BINS
        self.requests, self.now = 0, 0.0
        self.shadow, self.oldest = {}, 0  # plain LRU: blocks by the last request that asked for them [16]
        self.own = self.lru = 0.0
        self.plain, self.check, self.penalty = False, 2000, 2000.0
        self._rank((FIRST, 0))

    def serve(self, keys, now, answer_tokens):
        self.requests += 1
        self.now = now
        self._age()
        path = self._walk(keys)
        hits = self._count_hits(path)
        self._guard(path, hits, len(keys))
        fresh = keys[sum(len(run.keys) for run in path) :]
        last = path[-1] if path else None
        continues = last is not None and last.talks and last.forks < 4  # [3]
        fork = len(path) - 1
        if continues:
            fork = max((i for i, run in enumerate(path) if run.forks >= 2), default=-1)
        size = (len(fresh) > 4) + (len(fresh) > 16)
        level = 3 * ((answer_tokens > 16) + (answer_tokens > 256)) + size  # [5]
        kind = LATER if continues else FIRST
        for run in path:
            self._leave_cell(run)
        asks = fresh and self.cells and not self.plain and self.held + len(fresh) > self.capacity
        declined = asks and not self.foresight and self._is_poor(self._expected(kind, size))

        for run in path:
            age = age_bin(now - run.time)
            for name in (run.kind, run.kind[0]):
                self.asked[name][age] += len(run.keys)
        for i, run in enumerate(path):  # [4], [12]
            run.count += 1
            popularity = min(5, run.count.bit_length())
            self._watch(run, (SHARED, popularity) if i <= fork else (PATH, level))
        if continues:
            last.talks = False
        if fresh:
            if last is not None:
                last.forks += 1
            last = Run(fresh, last)
            last.count = 1
            self.run_of.update(dict.fromkeys(fresh, last))
            self._watch(last, (kind, level))
        if last is not None:
            last.talks = True
        if asks and self.foresight:
            declined = self._is_poor(self.rank[kind, level][0])

        stored = [key for run in path for key in self._fill(run)]
        if fresh and declined:
            self.ghosts[last] = None
        elif fresh:
            stored += self._fill(last)
            path.append(last)
        for run in path[: fork + 1] + self._merge(path[fork + 1 :]) if continues else path:
            self._place(run)
        if self.requests % 50 == 0:
            self._rank_all()
        if self.requests % 2000 == 0:
            for row in (*self.asked.values(), *self.exposed.values()):
                row[:] = [value / 2 for value in row]
        evicted = self._evict(self.held - self.capacity)
        self._forget_ghosts()
        return Served(hits, stored, evicted)

    # ---- the tree

    def _walk(self, keys):
        """Return the runs that `keys` begin with, cut where `keys` part from them. [2]"""
        path, at = [], 0
        while at < len(keys) and keys[at] in self.run_of:
            run = self.run_of[keys[at]]
            assert run.keys[0] == keys[at], "ghosts are forgotten from the end"
            same = 1
            while same < len(run.keys) and run.keys[same : same + 1] == keys[at + same : at + same + 1]:
                same += 1
            path.append(run if same == len(run.keys) else self._split(run, same))
            at += same
        assert not any(key in self.run_of for key in keys[at:]), "what is known has a known parent"
        return path

    def _split(self, run, size):
        """Cut a run: a new one has its first keys, it keeps the others, and its children."""
        upper = Run(run.keys[:size], run.parent)
        upper.count, upper.time, upper.request, upper.kind = run.count, run.time, run.request, run.kind
        upper.forks, upper.held = 1, min(run.held, size)
        run.keys, run.held, run.parent = run.keys[size:], run.held - upper.held, upper
        if upper.held and upper.parent is not None:
            upper.parent.living.discard(run)
            upper.parent.living.add(upper)
        if run.held:
            upper.living.add(run)
        else:
            self._leave_cell(run)
        self.run_of.update(dict.fromkeys(upper.keys, upper))
        return upper

    def _fill(self, run):
        """Give blocks to all keys of a run; return those that had none."""
        stored = run.keys[run.held :]
        run.held = len(run.keys)
        self.held += len(stored)
        self.ghosts.pop(run, None)
        if run.parent is not None:
            run.parent.living.add(run)
        return stored

    def _merge(self, path):
        """Join runs of one class where nothing else hangs between them. [12]"""
        merged = path[:1]
        for run in path[1:]:
            upper = merged[-1]
            if upper.forks == 1 and upper.kind == run.kind:
                merged.pop()
                self.run_of.update(dict.fromkeys(upper.keys, run))
                run.keys, run.held = upper.keys + run.keys, upper.held + run.held
                run.parent, run.count = upper.parent, upper.count
                if run.parent is not None:
                    run.parent.living.discard(upper)
                    run.parent.living.add(run)
                self._stop_watching(upper)
            merged.append(run)
        return merged

    # ---- ages, worth

    def _watch(self, run, kind):
        """A run's life begins anew, in this class."""
        self._stop_watching(run)
        run.kind, run.time, run.request = kind, self.now, self.requests
        if not self.exposed[kind][0]:
            self._rank_all()
        self._reach(run, 0)

    def _stop_watching(self, run):
        for queue in self.watched:
            queue.pop(run, None)

    def _reach(self, run, age):
        for name in (run.kind, run.kind[0]):
            self.exposed[name][age] += len(run.keys)
        self.watched[age][run] = None

    def _age(self):
        """Move what is too old for its bin to the next one; a bin is looked at once per eighth of its width. [8]"""
        for age in range(BINS - 2, -1, -1):
            if self.now < self.due[age]:
                continue
            self.due[age] = self.now + (EDGES[age + 1] - EDGES[age]) / 8
            limit = self.now - EDGES[age + 1]
            for run in [run for run in self.watched[age] if run.time <= limit]:
                del self.watched[age][run]
                self._reach(run, age + 1)
            for kind, _ in [cell for cell in self.cells if cell[1] == age]:
                queue = self.cells[kind, age]
                while queue and next(iter(queue)).time <= limit:
                    run = next(iter(queue))
                    self._leave_cell(run)
                    self._enter_cell(run, age + 1)

    def _rank_all(self):
        for kind in [name for name in self.exposed if not isinstance(name, int)]:
            self._rank(kind)

    def _rank(self, kind):
        """Compute a class's worth at every age. [9], [10]"""
        hazards = []
        for b in range(BINS):
            exposed, asked = (sum(row[b] for name, row in rows.items() if isinstance(name, int))
                              for rows in (self.exposed, self.asked))  # fmt: skip
            everything = smooth(asked, exposed, 0.06, 240)
            of_kind = smooth(self.asked[kind[0]][b], self.exposed[kind[0]][b], everything, 240)
            hazards.append(min(0.98, smooth(self.asked[kind][b], self.exposed[kind][b], of_kind, 500)))
        self.rank[kind] = [best_rate(hazards[b:], b) for b in range(BINS)]
        self.seen[kind] = self.exposed[kind][0] + 1.0

    # ---- what is stored, what leaves

    def _expected(self, kind, size):
        """Return the worth of a new run whose answer nobody knows yet: the mean over the answers seen."""
        likely = [k for k in self.rank if k[0] == kind and k[1] % 3 == size]
        if not likely:
            likely = [(kind, size)]
            self._rank((kind, size))
        return sum(self.seen[k] * self.rank[k][0] for k in likely) / sum(self.seen[k] for k in likely)

    def _is_poor(self, worth):
        """Whether that is too little for pushing something out. [14]"""
        return worth < 1.5 * self._worth_of(self._lowest())

    def _worth_of(self, cell):
        kind, age = cell
        return self.rank[kind][age]

    def _lowest(self):
        return min(self.cells, key=lambda cell: (self._worth_of(cell), cell))

    def _least_recent(self):
        oldest_bin = max(age for _, age in self.cells)
        cells = [(kind, oldest_bin) for kind in self.rank if (kind, oldest_bin) in self.cells]
        return min(cells, key=lambda cell: next(iter(self.cells[cell])).time)

    def _place(self, run):
        if run.held and not run.living and run.cell is None:
            self._enter_cell(run, age_bin(self.now - run.time))

    def _enter_cell(self, run, age):
        run.cell = (run.kind, age)
        self.cells.setdefault(run.cell, {})[run] = None

    def _leave_cell(self, run):
        if run.cell is not None:
            del self.cells[run.cell][run]
            if not self.cells[run.cell]:
                del self.cells[run.cell]
            run.cell = None

    def _evict(self, count):
        """Let `count` blocks go. [13]"""
        evicted = []
        while len(evicted) < count:
            run = next(iter(self.cells[self._least_recent() if self.plain else self._lowest()]))
            keep = max(0, run.held - (count - len(evicted)))
            evicted += run.keys[keep : run.held][::-1]
            run.held = keep
            self.ghosts.setdefault(run)
            if not keep:
                self._leave_cell(run)
                if run.parent is not None:
                    run.parent.living.discard(run)
                    self._place(run.parent)
        self.held -= len(evicted)
        return evicted

    def _forget_ghosts(self):
        while self.ghosts and len(self.run_of) - self.held > self.max_ghosts:
            run = next(iter(self.ghosts))
            del self.ghosts[run]
            for key in run.keys[run.held :]:
                del self.run_of[key]
            run.keys = run.keys[: run.held]
            if not run.keys:
                self._stop_watching(run)

    # ---- what plain LRU would have done [16]

    def _count_hits(self, path):
        hits = 0
        for run in path:
            hits += run.held
            if run.held < len(run.keys):
                break
        return hits

    def _guard(self, path, hits, size):
        self.own += hits
        whole = True
        for run in path:
            whole = whole and run.request >= self.oldest
            self.lru += len(run.keys) if whole else 0
            if run.request in self.shadow:
                self.shadow[run.request] -= len(run.keys)
        self.shadow[self.requests] = size
        while sum(self.shadow.values()) > self.capacity:
            self.oldest = next(iter(self.shadow)) + 1
            del self.shadow[self.oldest - 1]
        if self.requests < self.check:
            return
        if self.plain:
            self.plain, self.own, self.lru, self.check = False, 0.0, 0.0, self.requests + 2000
        elif self.own < TOLERANCE * self.lru:
            self.plain, self.check = True, self.requests + int(self.penalty)
            self.penalty = min(2 * self.penalty, 64_000)
        else:
            self.own, self.lru, self.check = 0.75 * self.own, 0.75 * self.lru, self.requests + 500
            self.penalty = max(2000.0, 0.9 * self.penalty)


def age_bin(seconds):
    """[6]"""
    return 0 if seconds < 1 else min(ENDLESS, 1 + int(log2(seconds)))


def smooth(asked, exposed, base, weight):
    return (asked + weight * base) / (exposed + weight)


def best_rate(hazards, first_bin):
    """Return the most reuses a block-second over all horizons that begin in this bin."""
    best = reuses = seconds = 0.0
    survival = 1.0
    for b, hazard in enumerate(hazards, first_bin):
        reuses += survival * hazard
        seconds += survival * (1 - hazard / 2) * (EDGES[b + 1] - EDGES[b])
        survival *= 1 - hazard
        best = max(best, reuses / seconds)
    return best
