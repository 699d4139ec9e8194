"""A small world for the feed: a manager's random life, a lossy wire, and model consumers that only read payloads."""

from __future__ import annotations

import random
from collections import Counter

from kvoffload.events.compaction import compact
from kvoffload.events.fold import Fold
from kvoffload.events.journal import Journal, SealedBatch
from kvoffload.events.replay import fill
from kvoffload.events.residency import Residency
from kvoffload.events.wire import AllBlocksCleared, BlockStored, Codec, decode_batch
from kvoffload.keys import BlockInfo, OffloadKey, make_offload_key
from kvoffload.manager.base import OffloadingEvent

Place = tuple[str, int | None, object]


class Consumer:
    """Reads one source: live batches in order with losses, replays on a gap.

    Args:
        counts: Counts references per block (llm-d); otherwise a set (Dynamo, vllm-router).
        needs_parents: Drops children of parents it does not hold, and forgets removed ones.
        stops_early: Ends a replay at the number before the live batch at hand, as vLLM's example subscriber does.
        watermark: Ignores numbers below the highest it saw (Dynamo); else a lower number is a new life.
    """

    def __init__(self, name, *, counts=False, needs_parents=False, stops_early=False, watermark=False):
        self.name = name
        self.counts, self.needs_parents = counts, needs_parents
        self.stops_early, self.watermark = stops_early, watermark
        self.expected = 0
        self.life = 0
        self.inbox: list[tuple[int, SealedBatch]] = []
        self.index: Counter[Place] = Counter()

    def held(self) -> set[Place]:
        return {place for place, count in self.index.items() if count > 0}

    def apply(self, payload: bytes) -> None:
        batch = decode_batch(payload)
        assert batch.skipped == 0
        assert isinstance(batch.data_parallel_rank, int)
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.index.clear()
            elif isinstance(event, BlockStored):
                parent = event.parent_block_hash
                if self.needs_parents and parent is not None and not self._knows(event.group_idx, parent):
                    continue
                assert len(event.token_ids) == event.block_size * len(event.block_hashes)
                for name in event.block_hashes:
                    place = (event.medium, event.group_idx, name)
                    self.index[place] = self.index[place] + 1 if self.counts else 1
            else:
                for name in event.block_hashes:
                    place = (event.medium, event.group_idx, name)
                    if self.index[place] > 1:
                        self.index[place] -= 1
                    else:
                        del self.index[place]

    def _knows(self, group, parent) -> bool:
        return any((medium, group, parent) in self.index for medium in ("GPU", "CPU"))

    def read(self, world: World) -> None:
        """Process the inbox; replays see the publisher as it is now, however old the live batch is."""
        while self.inbox:
            life, batch = self.inbox.pop(0)
            number = int.from_bytes(batch.sequence, "big")
            if life != self.life and not self.watermark:
                self.life, self.expected = life, 0  # the connection broke
            if number < self.expected:
                continue
            if number > self.expected:
                self._replay(world, number)
            if number >= self.expected:
                self.apply(batch.payload)
                self.expected = number + 1

    def _replay(self, world: World, number: int) -> None:
        # Ending early is right as long as the live batch at hand is not older than the publisher's window.
        stops_early = self.stops_early and number >= world.journal.oldest
        for _, frame, payload in world.replay(self.expected, strict=stops_early or world.strict):
            sequence = int.from_bytes(frame, "big")
            if sequence < self.expected:
                continue
            if stops_early and sequence >= number:
                break
            self.apply(payload)
            self.expected = sequence + 1


class World:
    """A publisher's pure part under random operations."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = 1000.0
        self.sole = rng.random() < 0.6
        self.strict = rng.random() < 0.5
        self.epoch = rng.random() < 0.5
        self.window = rng.choice((2, 5, 20, 1000))
        self.factor = rng.choice((1, 1, 2, 3))
        self.codec = Codec(rng.choice(("map", "array")), rng.choice(("uint64", "bytes")))
        self.relaxed_run = rng.choice((0, 3, 1000))
        self.lives: list[int] = []
        self.tree()
        self.start()
        self.consumers = [
            Consumer("set", watermark=self.epoch),
            Consumer("set, stops early", stops_early=True, watermark=self.epoch),
            Consumer("counts", counts=True),
            Consumer("counts, stops early", counts=True, stops_early=True),
            Consumer("needs parents", needs_parents=True, counts=True),
            Consumer("needs parents, stops early", needs_parents=True, stops_early=True),
        ]

    def tree(self) -> None:
        """Make random prefix trees: engine hashes with parents, cut in offloaded blocks that share engine blocks."""
        rng, size = self.rng, 2
        self.infos: dict[OffloadKey, BlockInfo] = {}
        self.parents: dict[OffloadKey, OffloadKey | None] = {}
        keys: list[OffloadKey] = []
        for number in range(rng.randint(3, 14)):
            parent_key = rng.choice(keys) if keys and rng.random() < 0.8 else None
            parent = None if parent_key is None else self.infos[parent_key].block_hashes[-1]
            shared: tuple[bytes, ...] = ()
            twins = [k for k in keys if self.parents[k] == parent_key]
            if self.factor > 1 and twins and rng.random() < 0.5:
                shared = self.infos[rng.choice(twins)].block_hashes[: rng.randint(1, self.factor - 1)]
            fresh = tuple(rng.randbytes(32) for _ in range(self.factor - len(shared)))
            hashes = shared + fresh
            key = make_offload_key(hashes[-1], 0)
            self.infos[key] = BlockInfo(
                block_hashes=hashes,
                parent_hash=parent,
                token_ids=tuple(number * 100 + i for i in range(self.factor * size)),
                block_size=size,
                salted=rng.random() < 0.03,
            )
            self.parents[key] = parent_key
            keys.append(key)
        self.keys = keys
        self.readable: dict[OffloadKey, BlockInfo | None] = {}
        self.gpu: dict[bytes, OffloadKey] = {}

    def start(self) -> None:
        """Begin a life of the publisher; what the manager held is gone."""
        first = (self.lives[-1] + 100_000 if self.lives else 5_000) if self.epoch else 0
        self.lives.append(first)
        self.now += 1
        self.journal = Journal(
            self.codec,
            first_sequence=first,
            replay_window=self.window,
            sole_publisher=self.sole,
            max_tombstones=1000,
            clock=lambda: self.now,
        )
        self.residency = Residency(self.journal)
        self.fold: Fold | None = None
        self.readable = {}
        self.described: set[OffloadKey] = set()
        self.gpu = {}
        self.journal.start_life()

    def replay(self, start: int, *, strict: bool):
        self.journal.seal()
        cut = self.journal.cut(start)
        batches = compact(cut, self.codec, self.journal.tiers)
        return fill(cut, batches, self.codec, skip_runs_over=None if strict else self.relaxed_run)

    # Operations.

    def publish(self, events: list[OffloadingEvent], infos: dict[OffloadKey, BlockInfo]) -> None:
        self.described.update(infos)
        if self.fold is not None:
            self.fold.add(events, infos)
            return
        for event in events:
            for key in event.keys:
                if event.removed:
                    self.residency.remove(key, event.medium)
            if not event.removed:
                self.residency.store_all(event.keys, event.medium, infos)

    def store(self) -> None:
        wanted = [
            k for k in self.rng.sample(self.keys, self.rng.randint(1, min(4, len(self.keys)))) if k not in self.readable
        ]
        if self.rng.random() < 0.7:
            wanted.sort(key=self.keys.index)
        wanted = [k for k in wanted if self.parents[k] in self.readable or self.rng.random() < 0.6]
        infos = {k: self.infos[k] for k in wanted if self.rng.random() < 0.9}
        for key in wanted:
            self.readable[key] = infos.get(key)
        self.publish([OffloadingEvent(wanted, "CPU", False)], infos)

    def evict(self) -> None:
        gone = [k for k in self.readable if self.rng.random() < 0.4]
        for key in gone:
            del self.readable[key]
        self.publish([OffloadingEvent(gone, "CPU", True)], {})

    def reset(self) -> None:
        gone = list(self.readable)
        self.readable.clear()
        self.publish([OffloadingEvent(gone, "CPU", True)], {})

    def describe(self) -> None:
        infos = {k: self.infos[k] for k in self.readable if self.rng.random() < 0.5}
        if self.fold is None:
            self.residency.describe(infos)
            self.described.update(infos)
            for key, info in infos.items():
                self.readable[key] = self.readable[key] or info

    def reannounce(self) -> None:
        self.journal.reannounce()

    def gpu_store(self) -> None:
        hash_of = self.codec.hash_of
        for key in self.rng.sample(self.keys, min(3, len(self.keys))):
            info = self.infos[key]
            if any(h in self.gpu for h in info.block_hashes):
                continue
            self.gpu.update(dict.fromkeys(info.block_hashes, key))
            parent = None if info.parent_hash is None else hash_of(info.parent_hash)
            names = [hash_of(h) for h in info.block_hashes]
            event = BlockStored(names, parent, list(info.token_ids), info.block_size, None, "GPU", None, group_idx=0)
            self.residency.engine_stored(event)

    def gpu_remove(self) -> None:
        gone = [h for h in self.gpu if self.rng.random() < 0.4]
        for name in gone:
            del self.gpu[name]
        self.residency.engine_removed([self.codec.hash_of(h) for h in gone], "GPU")

    def gpu_clear(self) -> None:
        self.gpu.clear()
        self.residency.engine_cleared()

    def lose(self) -> None:
        self.fold = self.fold or Fold()

    def recover(self) -> None:
        if self.fold is not None and self.fold.lost:
            self.journal.seal()
            self.send()
            fold, self.fold = self.fold, None
            self.journal.skip(fold.lost - 1)
            fold.apply(self.residency)
            self.journal.seal(empty=True)
            self.journal.take_sealed()
        self.fold = None

    def restart(self) -> None:
        self.recover()
        self.send()
        self.start()
        if not self.sole:  # beside another publisher nobody may clear: the operator registers the worker anew
            for consumer in self.consumers:
                consumer.index.clear()
                consumer.inbox.clear()
                consumer.expected = 0

    def heartbeat(self) -> None:
        self.journal.seal(empty=True)

    def late_join(self) -> None:
        consumer = self.rng.choice(self.consumers)
        consumer.index.clear()
        consumer.inbox.clear()
        consumer.expected = 0

    def send(self, loss: float = 0.0) -> None:
        for batch in self.journal.take_sealed():
            for consumer in self.consumers:
                if self.rng.random() >= loss:
                    consumer.inbox.append((len(self.lives), batch))

    def step(self) -> None:
        self.now += 0.01
        weights = (
            (self.store, 10), (self.evict, 5), (self.reset, 0.3), (self.describe, 1), (self.reannounce, 0.5),
            (self.gpu_store, 2), (self.gpu_remove, 1.5), (self.gpu_clear, 0.3), (self.lose, 0.7), (self.recover, 1.5),
            (self.restart, 0.3), (self.heartbeat, 1), (self.late_join, 0.7),
        )  # fmt: skip
        operation = self.rng.choices([w[0] for w in weights], [w[1] for w in weights])[0]
        if self.fold is not None and operation in {self.gpu_store, self.gpu_remove, self.gpu_clear, self.reannounce}:
            operation = self.recover
        operation()
        if self.rng.random() < 0.8:
            self.journal.seal()
            self.send(self.rng.choice((0.0, 0.0, 0.2, 0.9)))
        for consumer in self.consumers:
            if self.rng.random() < 0.4:
                consumer.read(self)

    def quiesce(self) -> None:
        self.recover()
        self.journal.seal()
        self.journal.seal(empty=True)
        self.send()
        for consumer in self.consumers:
            consumer.read(self)

    def expected_minimum(self) -> set[Place]:
        """What must be announced by any reading: readable blocks whose whole line of parents is readable, described."""

        def good(key: OffloadKey | None) -> bool:
            if key is None:
                return True
            info = self.readable.get(key)
            return info is not None and not info.salted and good(self.parents[key])

        names = {h for key in self.readable if good(key) for h in self.infos[key].block_hashes}
        return {("CPU", 0, self.codec.hash_of(name)) for name in names}

    def expected_maximum(self) -> set[Place]:
        """What may be announced: readable blocks that were once described, and the engine's."""
        allowed = [k for k in self.readable if k in self.described and not self.infos[k].salted]
        names = {h for key in allowed for h in self.infos[key].block_hashes}
        hash_of = self.codec.hash_of
        return {("CPU", 0, hash_of(name)) for name in names} | {("GPU", 0, hash_of(name)) for name in self.gpu}
