"""Residency: from what a manager or engine reports to what is announced, as transitions.

A block is announced when it becomes present and removed when it ceases to be, once each, however many offloaded blocks
contain it. It is *withheld* as long as an indexer could not use it or would be misled: no description, a salt without
the extra keys that tell tenants apart, a value with no encoding, or a parent that is not announced (consumers drop such
a child, or cannot reach it). A withheld block is announced as soon as what it lacks arrives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvoffload.events.blocks import Ident, Node, Unit, encode_unit
from kvoffload.events.journal import Journal
from kvoffload.events.wire import MEDIA, BlockStored, Hash, WireError
from kvoffload.events.withheld import Reason, WithheldBlocks
from kvoffload.keys import BlockInfo, OffloadKey, get_offload_block_hash, get_offload_group_idx

_CHECK_BYTES = 1 << 20


class Residency:
    """Keeps the announced set equal to the present, described set. Pure: its owner locks and sends.

    Args:
        journal: Where transitions go.
        media: Media to announce; others are ignored.
    """

    def __init__(self, journal: Journal, media: Iterable[str] = MEDIA) -> None:
        self.journal = journal
        self._media = frozenset(media)
        self.withheld = WithheldBlocks(journal.tiers)
        self._factors: dict[int, int] = {}

    # What the manager says: offloaded blocks by key.

    def store(self, key: OffloadKey, medium: str, info: BlockInfo | None) -> None:
        """An offloaded block became readable."""
        if medium not in self._media:
            return
        tier = self.journal.tiers.index(medium, get_offload_group_idx(key))
        ident = self.journal.tiers.ident(tier, self.journal.codec.hash_of(get_offload_block_hash(key)))
        held = self.withheld.blocks.get(ident)
        if held is not None:
            held.count += 1
            if info is not None:
                self._describe(ident, key, tier, info)
            return
        self._admit(ident, *self._unit(key, tier, info))

    def store_all(self, keys: Sequence[OffloadKey], medium: str, infos: Mapping[OffloadKey, BlockInfo]) -> None:
        """Offloaded blocks became readable: as `store` for each, but several times faster for plain ones.

        Plain is a described block of one engine block without extra keys, whose parent is announced.
        """
        if medium not in self._media or not keys:
            return
        if self.journal.codec.hash_mode != "uint64":
            for key in keys:
                self.store(key, medium, infos.get(key))
            return
        journal, withheld, waiting = self.journal, self.withheld.blocks, self.withheld.orphans
        nodes, number, get_info, encode_into = journal.nodes, int.from_bytes, infos.get, journal.codec.encode_into
        encoded, join = bytearray(), b"".join
        tier, group_bytes, base, factor = self._tier(keys[0], medium)
        size, lora, kind, window = -1, None, "", None
        head = parent_mark = tokens_mark = no_parent = tail = b""
        last_hash: bytes | None = None
        last_node: Node | None = None
        room, written = 0, 0
        for key in keys:
            info = get_info(key)
            plain = info is not None and factor == 1 and len(info.block_hashes) == 1
            if info is None or not plain or info.salted or info.extra_keys is not None:
                room, written = self._store_slowly(key, medium, info, written)
                factor = factor or self._factors.get(tier, 0)
                continue
            block_hash, parent_hash, tokens = info.block_hashes[0], info.parent_hash, info.token_ids
            if key != block_hash + group_bytes:
                if key[-4:] != group_bytes:
                    tier, group_bytes, base, factor = self._tier(key, medium)
                    size = -1
                if factor != 1 or key != block_hash + group_bytes:
                    room, written = self._store_slowly(key, medium, info, written)
                    continue
            name = block_hash[-8:]
            ident = number(name, "big") | base
            if parent_hash is None:
                parent = None
            elif parent_hash == last_hash:
                parent = last_node
            else:
                parent = nodes.get(number(parent_hash[-8:], "big") | base)
            try:
                if (
                    info.block_size != size
                    or info.lora_name != lora
                    or info.kind != kind
                    or (info.sliding_window != window)
                ):
                    size, lora, kind, window = info.block_size, info.lora_name, info.kind, info.sliding_window
                    head, parent_mark, tokens_mark, no_parent, tail = journal.codec.template(
                        medium, get_offload_group_idx(key), size, lora, kind, window
                    )
                encode_into(tokens, encoded)
                usable = len(tokens) == size
            except (TypeError, ValueError, OverflowError):
                size, usable = -1, False
            if (
                not usable
                or ident in nodes
                or (parent is None and parent_hash is not None)
                or not any(name)
                or (withheld and ident in withheld)
                or journal.removed(ident) is not None
            ):
                room, written = self._store_slowly(key, medium, info, written)
                continue
            if parent_hash is None:
                event = join((head, name, no_parent, encoded, tail))
            else:
                event = join((head, name, parent_mark, parent_hash[-8:], tokens_mark, encoded, tail))
            if room == 0 or written > _CHECK_BYTES:
                journal.note_bytes(written)
                stamp, live, flips, events, room = journal.open_batch()
                written = 0
            last_node = live[ident] = Node(ident, event, stamp, parent)
            flips.append(ident)
            events.append(event)
            written += len(event)
            room -= 1
            last_hash = block_hash
            if waiting:
                journal.note_bytes(written)
                self._release(self._unit(key, tier, info)[0])
                room, written = 0, 0
        journal.note_bytes(written)

    def _store_slowly(self, key: OffloadKey, medium: str, info: BlockInfo | None, written: int) -> tuple[int, int]:
        """Store a block the general way; an open batch ends: return no room and no bytes."""
        self.journal.note_bytes(written)
        self.store(key, medium, info)
        return 0, 0

    def _tier(self, key: OffloadKey, medium: str) -> tuple[int, bytes, int, int]:
        """Return a key's tier, its group's bytes, the tier's part of an identity, and its factor (0: not known yet)."""
        tier = self.journal.tiers.index(medium, get_offload_group_idx(key))
        return tier, key[-4:], tier << 64, self._factors.get(tier, 0)

    def remove(self, key: OffloadKey, medium: str) -> None:
        """An offloaded block ceased to be readable."""
        if medium not in self._media:
            return
        tier = self.journal.tiers.index(medium, get_offload_group_idx(key))
        ident = self.journal.tiers.ident(tier, self.journal.codec.hash_of(get_offload_block_hash(key)))
        if self.withheld.remove(ident):
            return
        self._retract(ident)

    def describe(self, infos: Mapping[OffloadKey, BlockInfo]) -> None:
        """Announce withheld blocks whose description arrived late."""
        if not self.withheld.blocks:
            return
        tiers, codec = self.journal.tiers, self.journal.codec
        for key, info in infos.items():
            name = codec.hash_of(get_offload_block_hash(key))
            for tier in tiers.of_group(get_offload_group_idx(key)):
                ident = tiers.ident(tier, name)
                if ident in self.withheld.blocks:
                    self._describe(ident, key, tier, info)

    def _describe(self, ident: Ident, key: OffloadKey, tier: int, info: BlockInfo) -> None:
        held = self.withheld.blocks[ident]
        if held.unit is not None:
            return
        unit, reason = self._unit(key, tier, info)
        if reason is not None:
            return
        self.withheld.take(ident)
        self._admit(ident, unit, None, held.count)

    # What an engine says: events of its own feed, or of `gpu_stored`.

    def engine_stored(self, event: BlockStored, default_group: int | None = 0) -> None:
        """Engine blocks became present."""
        medium = event.medium or "GPU"
        if medium not in self._media:
            return
        tiers = self.journal.tiers
        tier = tiers.index(medium, default_group if event.group_idx is None else event.group_idx)
        hashes = tuple(event.block_hashes)
        wanted = int if self.journal.codec.hash_mode == "uint64" else bytes
        described = event.block_size > 0 and len(event.token_ids) == len(hashes) * event.block_size
        if not hashes or any(type(name) is not wanted for name in hashes):
            self.withheld.total["malformed"] += len(hashes)
            return
        unit = Unit(
            tier,
            hashes,
            event.parent_block_hash,
            event.token_ids,
            event.block_size,
            event.lora_name,
            event.extra_keys,
            event.kv_cache_spec_kind,
            event.kv_cache_spec_sliding_window,
            event.lora_id,
        )
        idents = [tiers.ident(tier, name) for name in hashes]
        withheld = [ident in self.withheld.blocks for ident in idents]
        if described and not any(withheld) and self._reason(unit) is None:
            self._admit(idents[-1], unit, None)
            return
        for index, ident in enumerate(idents):
            held = self.withheld.blocks.get(ident)
            if held is not None:
                held.count += 1
            if described:
                part = unit.part(index, index + 1)
                if held is None:
                    self._admit(ident, part, None)
                elif held.unit is None:
                    self.withheld.take(ident)
                    self._admit(ident, part, None, held.count)
            elif held is None:
                self._admit(ident, None, "no_info")

    def engine_removed(self, hashes: Sequence[Hash], medium: str, group: int | None = 0) -> None:
        """Engine blocks ceased to be present."""
        if medium not in self._media:
            return
        tiers = self.journal.tiers
        tier = tiers.index(medium, group)
        for name in hashes:
            ident = tiers.ident(tier, name)
            if not self.withheld.remove(ident):
                self._retract(ident)

    def engine_cleared(self, medium: str = "GPU") -> None:
        """An engine cleared its tier: consumers clear every tier, so what other media hold is announced again."""
        gone = self.journal.tiers.of_medium(medium)
        for ident in [i for i in self.withheld.blocks if self.journal.tiers.tier_of(i) in gone]:
            self.withheld.take(ident)
        if self.journal.sole:
            nodes = self.journal.clear()
            self.journal.restore(n for n in nodes if self.journal.tiers.tier_of(n.ident) not in gone)
        else:
            for node in self.journal.nodes_of(gone):
                self.journal.retire(node)
            self.journal.reannounce()

    # Inside.

    def _unit(self, key: OffloadKey, tier: int, info: BlockInfo | None) -> tuple[Unit | None, Reason | None]:
        if info is None:
            return None, "no_info"
        if info.salted and not any(info.extra_keys or ()):
            return None, "salted"
        count = len(info.block_hashes)
        factor = self._factors.setdefault(tier, count)
        if (
            count < 1
            or count != factor
            or info.block_size < 1
            or len(info.token_ids) != count * info.block_size
            or info.block_hashes[-1] != get_offload_block_hash(key)
            or (info.extra_keys is not None and len(info.extra_keys) != count)
            or self.journal.tiers.name(tier)[0] not in MEDIA
        ):
            return None, "malformed"
        hash_of = self.journal.codec.hash_of
        return Unit(
            tier,
            tuple([hash_of(h) for h in info.block_hashes]),
            None if info.parent_hash is None else hash_of(info.parent_hash),
            info.token_ids,
            info.block_size,
            info.lora_name,
            info.extra_keys,
            info.kind,
            info.sliding_window,
        ), None

    def _admit(self, ident: Ident, unit: Unit | None, reason: Reason | None, count: int = 1) -> None:
        """Announce a unit, and then what waited for it; or withhold it."""
        reason = reason or (None if unit is None else self._reason(unit))
        if unit is None or reason is not None:
            if self.journal.live(ident) is None:
                self.withheld.add(ident, unit, reason or "no_info", count)
            for node in self._block(ident):
                node.refs += count
            return
        if not self._announce(unit, count):
            self.withheld.add(ident, None, "unencodable", count)
            return
        if self.withheld.orphans:
            self._release(unit)

    def _release(self, unit: Unit | None) -> None:
        """Announce what waited for `unit`, and for that in turn."""
        if unit is None:
            return
        for waiting in self.withheld.waiting_for(unit):
            held = self.withheld.blocks[waiting]
            child = held.unit
            if child is None or self._reason(child) is not None:
                continue
            self.withheld.take(waiting)
            if not self._announce(child, held.count):
                self.withheld.add(waiting, None, "unencodable", held.count)

    def _reason(self, unit: Unit) -> Reason | None:
        if unit.parent is None or self.journal.known(unit.tier, unit.parent) is not None:
            return None
        return "orphan"

    def _announce(self, unit: Unit, count: int) -> bool:
        """Announce the blocks of `unit` that are absent; False when they have no encoding (nothing has changed)."""
        journal, tier = self.journal, unit.tier
        idents = [journal.tiers.ident(tier, name) for name in unit.hashes]
        absent = [journal.live(ident) is None for ident in idents]
        runs: list[tuple[int, int, bytes]] = []
        start = 0
        try:
            while start < len(idents):
                stop = start + 1
                if absent[start]:
                    while stop < len(idents) and absent[stop]:
                        stop += 1
                    runs.append((start, stop, encode_unit(journal.codec, journal.tiers, unit.part(start, stop))))
                start = stop
        except WireError:
            return False
        for start, stop, event in runs:
            parent: Node | None = None
            if start:
                parent = journal.live(idents[start - 1])
            elif unit.parent is not None:
                parent = journal.known(tier, unit.parent)
            journal.announce(tier, unit.hashes[start:stop], event, parent)
        for ident, new in zip(idents, absent, strict=True):
            node = journal.live(ident)
            if node is not None:
                node.refs += count - 1 if new else count
        return True

    def _block(self, ident: Ident) -> list[Node]:
        """Return the announced engine blocks of the offloaded block that ends at `ident`, the last one first."""
        nodes: list[Node] = []
        node = self.journal.live(ident)
        for _ in range(self._factors.get(self.journal.tiers.tier_of(ident), 1)):
            if node is None:
                break
            nodes.append(node)
            node = None if node.parent is None else self.journal.live(node.parent.ident)
        return nodes

    def _retract(self, ident: Ident) -> None:
        """Remove the offloaded block that ends at `ident`: those of its blocks that no other one contains."""
        for node in self._block(ident):
            node.refs -= 1
            if node.refs <= 0:
                self.journal.retire(node)
