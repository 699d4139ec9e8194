"""Compacted replay: from a `Cut` of the journal to the batches that bring any reader up to date.

What is told, per block, for a reader that holds what was announced before `window_start`:

- a block that nothing depends on: held and now absent: its first removal; held and now announced anew: that removal and
  the newest store; not held and announced: the newest store; else nothing;
- an ancestor of an announced block that was stored in the window: all its changes, each under its own number.

Both under the numbers where they happened. Therefore a reader may also stop anywhere in the window and continue with
live batches that it kept, as vLLM's own subscriber does: at each number it holds the parents that the live batches
behind it take for granted, and what it holds too much or too little, those batches bring.

A reader of unknown state (it starts below the window) first hears what it must forget, then the announced blocks.
Stores whose parent is absent at their place are bracketed, as in the live feed (see `kvoffload.events.journal`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from kvoffload.events.ancestry import absent_chain
from kvoffload.events.blocks import EventList, Ident, Node, Tiers
from kvoffload.events.journal import MAX_BATCH_BYTES, MAX_EVENTS, Cut
from kvoffload.events.wire import Codec, pack_stamp, stamp_sequence


@dataclass(frozen=True, slots=True)
class ReplayBatch:
    """One number of a replay that says something."""

    stamp: bytes
    events: list[bytes]

    @property
    def sequence(self) -> int:
        """Its number."""
        return stamp_sequence(self.stamp)


def compact(cut: Cut, codec: Codec, tiers: Tiers) -> Iterator[ReplayBatch]:
    """Yield the batches of a replay that say something, in ascending order of their numbers."""
    return _Compaction(cut, codec, tiers).batches()


class _Compaction:
    def __init__(self, cut: Cut, codec: Codec, tiers: Tiers) -> None:
        self._cut = cut
        self._codec = codec
        self._events = EventList(codec, tiers)
        self._flips: Counter[Ident] = Counter()
        for entry in cut.entries:
            self._flips.update(entry.flips)
        self._present: dict[Ident, bool] = {}
        self._sources: dict[Ident, Node] = {}
        self._run: list[Node] = []
        self._chain: list[Node] = []
        self._find_ancestors()

    def batches(self) -> Iterator[ReplayBatch]:
        if self._cut.fresh:
            yield from self._base()
        yield from self._window()

    def _find_ancestors(self) -> None:
        """Find the changed ancestors of blocks that were stored in the window: all their changes are told.

        The way up ends at an ancestor that was present throughout; one that was absent throughout is bracketed where it
        is needed, and needs its own parent there.
        """
        live, flips, sources = self._cut.live, self._flips, self._sources
        passed: set[Node] = set()
        for ident in flips:
            node = live.get(ident)
            parent = None if node is None else node.parent
            while parent is not None and parent not in passed:
                passed.add(parent)
                if parent.ident in flips:
                    parent = sources[parent.ident] = live.get(parent.ident, parent)
                elif parent.ident in live:
                    break
                parent = parent.parent

    def _held_before_window(self, ident: Ident) -> bool:
        return (ident in self._cut.live) ^ bool(self._flips[ident] & 1)

    def _is_present(self, ident: Ident) -> bool:
        known = self._present.get(ident)
        if known is not None:
            return known
        return not self._cut.fresh and self._held_before_window(ident)

    def _store(self, node: Node) -> None:
        """Store a block; neighbours of one event are collected, to give its very bytes again."""
        run = self._run
        if run and run[-1].event is node.event and run[-1].index + 1 == node.index:
            run.append(node)
        else:
            self._close_run()
            self._chain = absent_chain(node.parent, self._is_present)
            for ancestor in self._chain:
                self._events.store((ancestor,))
            self._run = [node]
        self._present[node.ident] = True

    def _close_run(self) -> None:
        self._events.store(self._run)
        for ancestor in reversed(self._chain):
            self._events.remove(ancestor.ident)
        self._run, self._chain = [], []

    def _remove(self, ident: Ident) -> None:
        self._close_run()
        self._events.remove(ident)
        self._present[ident] = False

    def _take(self, stamp: bytes) -> ReplayBatch:
        self._close_run()
        return ReplayBatch(stamp, self._events.take())

    def _full(self) -> bool:
        return len(self._events) >= MAX_EVENTS or self._events.size_bytes >= MAX_BATCH_BYTES

    def _base(self) -> Iterator[ReplayBatch]:
        """Yield what lies before the window: what to forget, then the blocks that were held when it began.

        Everything goes out as early as its number allows, at most one full batch a number while numbers last.
        """
        cut = self._cut
        number = cut.start
        stamp = pack_stamp(number, 0.0)[:8] + cut.stamp[8:]
        if cut.start == cut.first:
            if cut.start_stamp is not None:
                stamp = cut.start_stamp
                self._events.add(self._codec.cleared)
        elif cut.sole:
            self._events.add(self._codec.cleared)
        else:
            for ident in cut.tombstones:
                self._events.remove(ident)
            for ident in reversed(cut.live):
                self._events.remove(ident)
        for node, own in self._base_nodes():
            own_number = stamp_sequence(own)
            if (own_number > number or self._full()) and number < cut.window_start - 1:
                if len(self._events) or self._run:
                    yield self._take(stamp)
                if own_number > number:
                    number, stamp = own_number, own
                else:
                    number += 1
                    stamp = pack_stamp(number, 0.0)[:8] + cut.stamp[8:]
            self._store(node)
        if len(self._events) or self._run:
            yield self._take(stamp)

    def _base_nodes(self) -> list[tuple[Node, bytes]]:
        """Return the blocks to tell before the window, with the stamp they were stored under, in that order."""
        cut, flips = self._cut, self._flips
        last = pack_stamp(max(cut.window_start - 1, 0), 0.0)[:8] + cut.stamp[8:]
        nodes = [(node, node.stamp) for ident, node in cut.live.items() if ident not in flips]
        for ident, node in self._sources.items():
            if self._held_before_window(ident):
                nodes.append((node, min(node.stamp, last)))
        nodes.sort(key=lambda item: item[1][:8])
        return nodes

    def _window(self) -> Iterator[ReplayBatch]:
        cut, live, sources = self._cut, self._cut.live, self._sources
        left = Counter(self._flips)
        told: set[Ident] = set()
        for entry in cut.entries:
            for ident in entry.flips:
                left[ident] -= 1
                if ident in sources:
                    if self._is_present(ident):
                        self._remove(ident)
                    else:
                        self._store(sources[ident])
                    continue
                first = ident not in told
                told.add(ident)
                if first and not cut.fresh and self._held_before_window(ident):
                    self._remove(ident)
                elif left[ident] == 0 and ident in live:
                    self._store(live[ident])
            if len(self._events) or self._run:
                yield self._take(entry.stamp)
