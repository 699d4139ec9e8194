"""A manager that recalls what its last lookup found decides as one that looks every key up again, call by call."""

import random

import pytest

from kvoffload.errors import UsageError
from kvoffload.manager import block_states, block_table
from kvoffload.manager.base import ReqContext, RequestOutcome
from kvoffload.manager.block_table import NO_IDS, BlockTable
from kvoffload.manager.cpu import CPUOffloadingManager
from kvoffload.manager.policies.base import CachePolicy
from kvoffload.manager.policies.lru import LRUCachePolicy

STEPS_EACH = 3_000
CAPACITIES = (0, 1, 2, 3, 5, 8, 13)


class Forgetful(BlockTable):
    """A table that looks every key up again."""

    __slots__ = ()

    def recall(self, keys):
        return NO_IDS


class FIFO(CachePolicy):
    """First in, first out, with the reference's five methods alone."""

    def __init__(self, cache_capacity):
        self.entries = {}

    def get(self, key):
        return self.entries.get(key)

    def insert(self, key, block):
        self.entries[key] = block

    def remove(self, key):
        del self.entries[key]

    def touch(self, keys):
        pass

    def evict(self, n, protected):
        idle = [(k, b) for k, b in self.entries.items() if b.ref_cnt == 0 and k not in protected][:n]
        if len(idle) < n:
            return None
        for key, _ in idle:
            del self.entries[key]
        return idle


class WatchedLRU(LRUCachePolicy):
    """An indexed policy that is driven key by key, since it overrides one of the five methods."""

    def get(self, key):
        return super().get(key)


class Twins:
    """Two managers called alike; one recalls."""

    def __init__(self, policy, capacity, seed, monkeypatch):
        self.one = CPUOffloadingManager(capacity, policy, enable_events=True)
        with monkeypatch.context() as patch:
            patch.setattr(block_states, "BlockTable", Forgetful)
            self.two = CPUOffloadingManager(capacity, policy, enable_events=True)
        assert type(self.two._table) is Forgetful
        self.rng = random.Random(seed)
        # two groups of one sequence, as the service passes them
        self.keys = [f"{n:03}".encode() + bytes((0, 0, 0, n % 3 == 2)) for n in range(2 * capacity + 4)]
        self.stores, self.loads = [], []
        self.recalled = 0

    def both(self, call):
        results = []
        for manager in (self.one, self.two):
            try:
                results.append(call(manager))
            except UsageError as error:
                results.append(str(error))
        return results

    def some(self, most=6):
        start, size = self.rng.randrange(len(self.keys)), self.rng.randint(0, most)
        run = (self.keys + self.keys)[start : start + size]
        roll = self.rng.random()
        if roll < 0.1:
            return self.rng.choices(self.keys, k=size)
        return run + run[:2] if roll < 0.15 else run

    def held_first(self):
        """Return keys of which the first ones are held, and mostly readable."""
        unwanted = (False,) if self.rng.random() < 0.2 else (False, None)
        held = [key for key in self.keys if self.two.peek(key) not in unwanted]
        start = self.rng.randrange(len(held) + 1)
        return held[start : start + self.rng.randint(0, 5)] + (self.some(3) if self.rng.random() < 0.5 else [])

    def like(self, keys):
        """Return a list near `keys`: a part, more, another order, other objects, another kind of sequence."""
        rng, near = self.rng, list(keys)
        roll = rng.random()
        if roll < 0.2:
            near = near[: rng.randint(0, len(near))]
        elif roll < 0.3:
            near = near[rng.randint(0, len(near)) :]
        elif roll < 0.45:
            near += self.some(3)
        elif roll < 0.55:
            near += near[:2]
        elif roll < 0.6:
            rng.shuffle(near)
        elif roll < 0.65 and near:
            near[rng.randrange(len(near))] = rng.choice(self.keys)
        elif roll < 0.75:
            near = [bytes(bytearray(key)) for key in near]
        return tuple(near) if rng.random() < 0.3 else near

    # ---- calls

    def step(self):
        rng = self.rng
        keys, context = self.held_first(), ReqContext(rng.choice([None, "r0", "r1", "r2"]))
        looked = tuple(keys) if rng.random() < 0.3 else list(keys)
        one, two = self.both(lambda m: m.match(looked))
        assert one == two
        if isinstance(looked, list) and rng.random() < 0.3:
            looked[:] = self.some()
        for _ in range(rng.choice((0, 0, 1, 2))):
            self.meanwhile(keys)
        self.end_load(keys)
        for _ in range(rng.choice((1, 1, 2, 3))):
            self.use(self.like(keys), context)
        self.check()

    def meanwhile(self, keys):
        """Do one of the things after which a block that was found is not what it was."""
        part = self.like(keys) if self.rng.random() < 0.5 else self.some()
        self.rng.choice([
            self.offer, self.offer, self.offer, self.end_store, self.end_store, self.end_store, self.end_load,
            self.discard, self.abandon, self.reset, self.finish,
        ])(part)  # fmt: skip

    def use(self, keys, context):
        roll = self.rng.random()
        if roll < 0.4:
            self.both(lambda m: m.touch(keys, context))
        elif roll < 0.5:
            self.both(lambda m: m.refresh(keys))
        elif roll < 0.55:
            self.offer(keys)
        else:
            one, two = self.both(lambda m: m.prepare_load(keys, context))
            if isinstance(two, str):
                assert one == two
                return
            assert (one.block_ids.tolist(), one.ticket) == (two.block_ids.tolist(), two.ticket)
            if one.ticket is not None:
                self.recalled += len(self.one._table.recall(list(keys))) == len(keys)
                self.loads.append((one.ticket, list(dict.fromkeys(keys))))

    def offer(self, keys):
        context = ReqContext(self.rng.choice([None, "r0", "r1"]))
        one, two = self.both(lambda m: m.prepare_store(keys, context))
        assert (one is None) == (two is None)
        if one is not None:
            assert (one.keys_to_store, one.evicted_keys, one.ticket, one.filtered_keys) == (
                two.keys_to_store, two.evicted_keys, two.ticket, two.filtered_keys,
            )  # fmt: skip
            assert one.store_spec.block_ids.tolist() == two.store_spec.block_ids.tolist()
            if one.ticket is not None:
                self.stores.append((one.ticket, one.keys_to_store))

    def end_store(self, _):
        if self.stores:
            ticket, keys = self.stores.pop(self.rng.randrange(len(self.stores)))
            success, ticketless = self.rng.random() < 0.85, self.rng.random() < 0.2
            self.both(lambda m: m.complete_store(keys, success, ticket=None if ticketless else ticket))

    def end_load(self, _):
        if self.loads:
            ticket, keys = self.loads.pop(self.rng.randrange(len(self.loads)))
            self.both(lambda m: m.complete_load(keys, ticket=ticket))

    def discard(self, keys):
        one, two = self.both(lambda m: m.discard(keys[:2]))
        assert one == two

    def abandon(self, _):
        pending = self.rng.choice((self.stores, self.loads))
        if pending:
            running, hung = self.rng.random() < 0.5, self.rng.random() < 0.2
            ticket, _ = pending[-1] if running or hung else pending.pop()
            self.both(lambda m: m.abandon(ticket, copy_running=running, hung=hung))

    def reset(self, _):
        if self.rng.random() < 0.1:
            one, two = self.both(lambda m: m.reset_cache())
            assert one == two

    def finish(self, keys):
        context = ReqContext(self.rng.choice(["r0", "r1", "r2"]))
        self.both(lambda m: m.finish_request(context, RequestOutcome(output_tokens=len(keys)), keys))

    def check(self):
        one, two = self.both(lambda m: (m.stats(), m.take_events(), [m.peek(key) for key in self.keys]))
        assert one == two
        assert self.one._table.refs.tolist() == self.two._table.refs.tolist()
        if isinstance(self.one._policy, LRUCachePolicy):
            assert list(self.one._policy.blocks) == list(self.two._policy.blocks)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "arc", "adaptive", FIFO, WatchedLRU])
def test_what_a_lookup_found_never_changes_a_decision(policy, monkeypatch):
    recalled = 0
    for capacity in CAPACITIES:
        monkeypatch.setattr(block_table, "SHARD_KEYS", 4 if capacity % 2 else 16_384)
        twins = Twins(policy, capacity, f"{policy} {capacity}", monkeypatch)
        for _ in range(STEPS_EACH):
            twins.step()
        recalled += twins.recalled
    assert recalled > 1_000  # loads that needed no second look: often enough to be a test of them
