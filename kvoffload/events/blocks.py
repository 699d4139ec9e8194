"""What the feed remembers of a block: `Unit` before it is announced, `Node` after; `Tiers` and identities.

An *identity* is a hash within one tier (medium and group). It is a single integer (the tier above the 64-bit hash), or
bytes in `bytes` mode, because millions of them are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvoffload.events.wire import BlockStored, Codec, Hash

Ident = int | bytes


@dataclass(frozen=True, slots=True)
class Unit:
    """Consecutive blocks of one sequence in one tier, with what an indexer must know of them."""

    tier: int
    hashes: tuple[Hash, ...]
    parent: Hash | None
    token_ids: Sequence[int]
    block_size: int
    lora_name: str | None = None
    extra_keys: Sequence[Any] | None = None
    kind: str | None = "full_attention"
    sliding_window: int | None = None
    lora_id: int | None = None

    def part(self, start: int, stop: int) -> Unit:
        """Return blocks `start` to `stop` alone."""
        if start == 0 and stop == len(self.hashes):
            return self
        size = self.block_size
        return Unit(
            self.tier,
            self.hashes[start:stop],
            self.hashes[start - 1] if start else self.parent,
            self.token_ids[start * size : stop * size],
            size,
            self.lora_name,
            None if self.extra_keys is None else self.extra_keys[start:stop],
            self.kind,
            self.sliding_window,
            self.lora_id,
        )


class Node(msgspec.Struct, weakref=True, eq=False):
    """One announced engine block. Nothing but `refs` changes, so that a replay can read it in another thread.

    Children hold their parent: a removed block stays in memory exactly as long as a described block needs it.

    Attributes:
        ident: Its identity.
        event: The encoded event that stored it, shared by all blocks of that event.
        stamp: Number and time of the batch that stored it (16 bytes).
        parent: The block before it; None for the first of a sequence.
        index: Its position in the event.
        count: Blocks in the event.
        refs: Offloaded blocks that contain it.
    """

    ident: Ident
    event: bytes
    stamp: bytes
    parent: Node | None
    index: int = 0
    count: int = 1
    refs: int = 1


class Tiers:
    """Numbers the (medium, group) pairs in the order of their first use, and makes identities from them."""

    def __init__(self) -> None:
        self._names: list[tuple[str, int | None]] = []
        self._index: dict[tuple[str, int | None], int] = {}

    def index(self, medium: str, group: int | None) -> int:
        """Return the number of a tier."""
        found = self._index.get((medium, group))
        if found is None:
            found = self._index[medium, group] = len(self._names)
            self._names.append((medium, group))
        return found

    def name(self, tier: int) -> tuple[str, int | None]:
        """Return medium and group of a tier."""
        return self._names[tier]

    def of_medium(self, medium: str) -> frozenset[int]:
        """Return the tiers of one medium."""
        return frozenset(i for i, name in enumerate(self._names) if name[0] == medium)

    def of_group(self, group: int | None) -> list[int]:
        """Return the tiers of one group."""
        return [i for i, name in enumerate(self._names) if name[1] == group]

    def beside(self, tier: int) -> list[int]:
        """Return the tiers that hold the same group in other media, `tier` itself first."""
        group = self._names[tier][1]
        return [tier, *(i for i, name in enumerate(self._names) if i != tier and name[1] == group)]

    def ident(self, tier: int, name: Hash) -> Ident:
        """Return the identity of a hash in a tier."""
        if isinstance(name, int):
            return name | tier << 64
        return tier.to_bytes(2, "big") + name

    def tier_of(self, ident: Ident) -> int:
        """Return the tier of an identity."""
        return ident >> 64 if isinstance(ident, int) else int.from_bytes(ident[:2], "big")

    def hash_of(self, ident: Ident) -> Hash:
        """Return the hash of an identity."""
        return ident & 0xFFFF_FFFF_FFFF_FFFF if isinstance(ident, int) else ident[2:]


class EventList:
    """The events of one batch under construction; neighbouring removals of a tier become one event."""

    MAX_HASHES = 512
    """Hashes in one removal event."""

    def __init__(self, codec: Codec, tiers: Tiers) -> None:
        self._codec = codec
        self._tiers = tiers
        self.events: list[bytes] = []
        self._removed: list[Hash] = []
        self._removed_tier = -1
        self.has_removals = False
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self.events) + self.has_removals

    def add(self, event: bytes) -> None:
        """Append an encoded event."""
        if self.has_removals:
            self.flush()
        self.events.append(event)
        self.size_bytes += len(event)

    def remove(self, ident: Ident) -> None:
        """Append the removal of one block."""
        tier = self._tiers.tier_of(ident)
        if self.has_removals and (tier != self._removed_tier or len(self._removed) >= self.MAX_HASHES):
            self.flush()
        self._removed_tier = tier
        self.has_removals = True
        self._removed.append(self._tiers.hash_of(ident))

    def store(self, nodes: Sequence[Node]) -> None:
        """Append the stores of `nodes`; neighbours of one event that are complete give its very bytes again."""
        start = 0
        for i in range(1, len(nodes) + 1):
            last = nodes[i - 1]
            if i == len(nodes) or nodes[i].event is not last.event or nodes[i].index != last.index + 1:
                self._store_run(nodes[start], last)
                start = i

    def _store_run(self, first: Node, last: Node) -> None:
        if first.index == 0 and last.index == last.count - 1:
            self.add(first.event)
        else:
            self.add(self._codec.part(first.event, first.index, last.index + 1))

    def take(self) -> list[bytes]:
        """Return the events and start anew."""
        if self.has_removals:
            self.flush()
        events, self.events, self.size_bytes = self.events, [], 0
        return events

    def flush(self) -> None:
        """Turn the collected removals into an event."""
        medium, group = self._tiers.name(self._removed_tier)
        event = self._codec.removed(self._removed, medium, group)
        self._removed = []
        self.has_removals = False
        self.events.append(event)
        self.size_bytes += len(event)


def encode_unit(codec: Codec, tiers: Tiers, unit: Unit) -> bytes:
    """Encode the store of `unit`.

    Raises:
        WireError: It has no encoding.
    """
    medium, group = tiers.name(unit.tier)
    return codec.stored(
        BlockStored(
            list(unit.hashes),
            unit.parent,
            list(unit.token_ids),
            unit.block_size,
            unit.lora_id,
            medium,
            unit.lora_name,
            None if unit.extra_keys is None else list(unit.extra_keys),
            group,
            unit.kind,
            unit.sliding_window,
        )
    )
