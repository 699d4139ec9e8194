"""The journal: what is announced now, under which numbers it was announced, and what changed lately.

Its memory is the announced blocks, the removed ancestors that they still need, and the changes of the last
`replay_window` numbers; never the history. `Cut` is a consistent view for a replay or snapshot, taken between two
batches and read by another thread; `kvoffload.events.compaction` turns it into batches.

**Brackets.** Consumers cannot place a child whose parent they do not know, and some forget a parent when it is removed.
So when a block is stored after its parent was removed, the parent (and its removed ancestors) are stored before it and
removed behind it, in the same batch: right for consumers that count references and for those that do not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from kvoffload.events.ancestry import RemovedNodes, absent_chain, parents_first
from kvoffload.events.blocks import EventList, Ident, Node, Tiers
from kvoffload.events.tombstones import Tombstones
from kvoffload.events.wire import Codec, Hash, pack_stamp, sequence_frame, stamp_sequence

MAX_EVENTS = 4096
"""Events in one batch, if its blocks can be told apart."""
MAX_BATCH_BYTES = 16 << 20
_MAX_LOGGED_CHANGES = 2_000_000


@dataclass(frozen=True, slots=True)
class SealedBatch:
    """A batch that has its number: the frames of a live message, but for the topic."""

    sequence: bytes
    payload: bytes
    events: int


@dataclass(frozen=True, slots=True)
class LogEntry:
    """The blocks whose presence changed in one number, in order; each occurrence flips it."""

    stamp: bytes
    flips: tuple[Ident, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """A view of the journal between two batches.

    Attributes:
        start: The first number that the reader wants, not below `first`.
        first: First number of this life.
        last: Newest number given out; `first - 1` when there is none.
        window_start: From this number on, changes are known one by one.
        fresh: The reader's state before `window_start` is not known to be ours: everything is told again.
        start_stamp: Stamp of number `first` when it carries AllBlocksCleared.
        entries: Changes from `window_start` on.
        live: The announced blocks in store order; when not `fresh`, those that the changes need.
        tombstones: Removed blocks that a reader of unknown age may still hold (only beside another publisher).
        incomplete: Tombstones were discarded: a reader of unknown age may keep a dead block.
        stamp: Time of the cut under number `last`.
    """

    start: int
    first: int
    last: int
    window_start: int
    fresh: bool
    sole: bool
    start_stamp: bytes | None
    entries: list[LogEntry]
    live: dict[Ident, Node]
    tombstones: list[Ident]
    incomplete: bool
    stamp: bytes


class OpenBatch(NamedTuple):
    """The batch under construction, for a caller in a hurry (see `Journal.open_batch`)."""

    stamp: bytes
    nodes: dict[Ident, Node]
    flips: list[Ident]
    events: list[bytes]
    room: int


class Journal:
    """Numbers batches and remembers what they said. Not thread-safe: its owner locks.

    Args:
        codec: How events are encoded.
        first_sequence: Number of the first batch of this life.
        replay_window: Numbers whose changes are kept one by one.
        sole_publisher: Nobody else tells the same consumers about the same worker.
        max_tombstones: Removed blocks to remember, beside another publisher.
        clock: Wall clock in seconds, for the batches' `ts`.
    """

    def __init__(
        self,
        codec: Codec,
        *,
        first_sequence: int = 0,
        replay_window: int = 10_000,
        sole_publisher: bool = True,
        max_tombstones: int = 1_000_000,
        clock: Callable[[], float],
    ) -> None:
        self.codec = codec
        self.tiers = Tiers()
        self.first = first_sequence
        self.next = first_sequence
        self.sole = sole_publisher
        self._window = replay_window
        self._clock = clock
        self._nodes: dict[Ident, Node] = {}
        self.nodes: Mapping[Ident, Node] = self._nodes
        self._dead = RemovedNodes()
        self._log: deque[LogEntry] = deque()
        self._logged_changes = 0
        self._oldest = first_sequence
        self._start_stamp: bytes | None = None
        self._tombstones = None if sole_publisher else Tombstones(max_tombstones)
        self._batch = EventList(codec, self.tiers)
        self._flips: list[Ident] = []
        self._stamp: bytes | None = None
        self._sealed: list[SealedBatch] = []

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def oldest(self) -> int:
        """The oldest number from which changes are known one by one."""
        return max(self._oldest, self.next - self._window)

    @property
    def tombstones_discarded(self) -> int:
        """Removed blocks that were forgotten."""
        return 0 if self._tombstones is None else self._tombstones.discarded

    def announced(self) -> set[tuple[str, int | None, Hash]]:
        """Return medium, group and hash of each announced block."""
        tiers = self.tiers
        return {(*tiers.name(tiers.tier_of(i)), tiers.hash_of(i)) for i in self._nodes}

    def encoded_events(self) -> list[bytes]:
        """Return the encoded events that are kept for announced blocks, each once."""
        return list({id(node.event): node.event for node in self._nodes.values()}.values())

    def live(self, ident: Ident) -> Node | None:
        """Return the announced block of that identity."""
        return self._nodes.get(ident)

    def nodes_of(self, tiers: Container[int]) -> list[Node]:
        """Return the announced blocks of some tiers, children first."""
        return [n for n in reversed(self._nodes.values()) if self.tiers.tier_of(n.ident) in tiers]

    def known(self, tier: int, name: Hash) -> Node | None:
        """Return the block with that hash: announced, or removed and still needed; this tier first, then others."""
        removed = None
        for other in self.tiers.beside(tier):
            ident = self.tiers.ident(other, name)
            node = self._nodes.get(ident)
            if node is not None:
                return node
            removed = removed or self._dead.get(ident)
        return removed

    def announce(self, tier: int, hashes: Sequence[Hash], event: bytes, parent: Node | None) -> None:
        """Announce blocks that are not announced; `event` is their encoded store, `parent` the block before them."""
        self._make_room()
        chain = absent_chain(parent, self._nodes.__contains__)
        for node in chain:
            self._batch.store((node,))
        stamp = self._stamp_of_batch()
        count = len(hashes)
        for index, name in enumerate(hashes):
            ident = self.tiers.ident(tier, name)
            before = self._dead.get(ident)
            if count == 1 and before is not None and before.event == event:  # its children keep the bytes anyway
                event = before.event
            parent = Node(ident, event, stamp, parent, index, count)
            self._nodes[ident] = parent
            self._flips.append(ident)
        self._batch.add(event)
        for node in reversed(chain):
            self._batch.remove(node.ident)

    def open_batch(self) -> OpenBatch:
        """Return what a caller needs to announce many blocks itself; it holds until the journal is used otherwise.

        For each block that is not announced, and whose parent is: put a `Node` with `stamp` in `nodes`, append its
        identity to `flips` and its event to `events`, at most `room` times; then `note_bytes`.
        """
        self._make_room()
        batch = self._batch
        if batch.has_removals:
            batch.flush()
        return OpenBatch(self._stamp_of_batch(), self._nodes, self._flips, batch.events, MAX_EVENTS - len(batch.events))

    def note_bytes(self, size_bytes: int) -> None:
        """Count the bytes of events that were appended to an open batch."""
        self._batch.size_bytes += size_bytes

    def removed(self, ident: Ident) -> Node | None:
        """Return the removed block of that identity, if others still need it."""
        return self._dead.get(ident) if self._dead.refs else None

    def retire(self, node: Node) -> None:
        """Announce the removal of an announced block."""
        self._make_room()
        self._stamp_of_batch()
        self._batch.remove(node.ident)
        self._bury(node)

    def _bury(self, node: Node) -> None:
        del self._nodes[node.ident]
        self._dead.add(node)
        self._flips.append(node.ident)
        if self._tombstones is not None:
            self._tombstones.add(node.ident, self._nodes)

    def clear(self) -> list[Node]:
        """Put AllBlocksCleared in the batch; return what was announced, in store order."""
        self._make_room()
        self._stamp_of_batch()
        self._batch.add(self.codec.cleared)
        nodes = list(self._nodes.values())
        for node in nodes:
            self._bury(node)
        return nodes

    def restore(self, nodes: Iterable[Node]) -> None:
        """Announce removed `nodes` again, parents first."""
        for node in parents_first(nodes):
            parent = node.parent
            if parent is not None:
                parent = self._nodes.get(parent.ident, parent)
            event = node.event if node.count == 1 else self.codec.part(node.event, node.index, node.index + 1)
            self.announce(self.tiers.tier_of(node.ident), (self.tiers.hash_of(node.ident),), event, parent)
            self._nodes[node.ident].refs = node.refs

    def reannounce(self, medium: str | None = None) -> int:
        """Remove all announced blocks (of one medium), children first, and store them again; return how many."""
        wanted = None if medium is None else self.tiers.of_medium(medium)
        nodes = [n for n in self._nodes.values() if wanted is None or self.tiers.tier_of(n.ident) in wanted]
        ordered = parents_first(nodes)
        for node in reversed(ordered):
            self.retire(node)
        self.restore(ordered)
        return len(ordered)

    def start_life(self) -> None:
        """Take the first number: AllBlocksCleared for a sole publisher, an empty batch beside another one."""
        if self.sole:
            self._start_stamp = self._stamp_of_batch()
            self._batch.add(self.codec.cleared)
        self.seal(empty=True)

    def new_life(self) -> None:
        """Begin again at number 0: consumers clear, and hear what is announced once more."""
        self.seal()
        nodes = list(self._nodes.values())
        self._nodes.clear()
        self._log.clear()
        self._logged_changes = 0
        self.first = self.next = self._oldest = 0
        self.start_life()
        self.restore(nodes)
        self.seal()

    def seal(self, *, empty: bool = False) -> None:
        """End the batch under construction: it gets its number. With `empty`, also when it holds nothing."""
        if not len(self._batch) and not empty:
            return
        stamp = self._stamp_of_batch()
        events = self._batch.take()
        self._sealed.append(SealedBatch(stamp[:8], self.codec.payload(stamp[8:], events), len(events)))
        if self._flips:
            self._log.append(LogEntry(stamp, tuple(self._flips)))
            self._logged_changes += len(self._flips)
            self._flips = []
        self._stamp = None
        self.next += 1
        self._trim()

    def skip(self, numbers: int) -> None:
        """Use up numbers without a batch: consumers see the gap."""
        self.seal()
        self.next += numbers
        self._trim()

    def take_sealed(self) -> list[SealedBatch]:
        """Return the batches sealed since the last call, in order."""
        sealed, self._sealed = self._sealed, []
        return sealed

    def cut(self, start: int) -> Cut:
        """Return what a replay from `start` needs; nothing may be under construction."""
        start = max(start, self.first)
        oldest = self.oldest
        fresh = start < oldest or start <= self.first
        window_start = oldest if fresh else start
        frame = sequence_frame(window_start)
        log = self._log
        low, high = 0, len(log)
        while low < high:
            middle = (low + high) // 2
            if log[middle].stamp[:8] < frame:
                low = middle + 1
            else:
                high = middle
        entries = list(islice(log, low, None))
        unknown_age = fresh and start > self.first and self._tombstones is not None
        return Cut(
            start=start,
            first=self.first,
            last=self.next - 1,
            window_start=window_start,
            fresh=fresh,
            sole=self.sole,
            start_stamp=self._start_stamp,
            entries=entries,
            live=self._nodes.copy() if fresh else self._needed(entries),
            tombstones=self._tombstones.entries() if unknown_age and self._tombstones is not None else [],
            incomplete=unknown_age and self.tombstones_discarded > 0,
            stamp=pack_stamp(max(self.next - 1, 0), self._clock()),
        )

    def _needed(self, entries: list[LogEntry]) -> dict[Ident, Node]:
        """Return the announced blocks among the changed ones and among their ancestors, up to an unchanged one."""
        nodes = self._nodes
        flipped = {ident for entry in entries for ident in entry.flips}
        needed: dict[Ident, Node] = {}
        seen: set[Node] = set()
        stack = [nodes[ident] for ident in flipped if ident in nodes]
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            live = nodes.get(node.ident)
            if live is not None:
                needed[node.ident] = live
                if node.ident not in flipped:
                    continue
                if live is not node:
                    stack.append(live)
            if node.parent is not None:
                stack.append(node.parent)
        return needed

    def _make_room(self) -> None:
        if len(self._batch) >= MAX_EVENTS or self._batch.size_bytes >= MAX_BATCH_BYTES:
            self.seal()

    def _stamp_of_batch(self) -> bytes:
        if self._stamp is None:
            self._stamp = pack_stamp(self.next, self._clock())
        return self._stamp

    def _trim(self) -> None:
        log = self._log
        floor = sequence_frame(max(self.next - self._window, self.first))
        while log and (log[0].stamp[:8] < floor or self._logged_changes > _MAX_LOGGED_CHANGES):
            entry = log.popleft()
            self._logged_changes -= len(entry.flips)
            self._oldest = stamp_sequence(entry.stamp) + 1
