"""The fast policies decide as the plain ones on OrderedDicts: same victims, same order, same learnt state."""

import random

import pytest
from reference.plain_policies import PlainARC, PlainLRU

from kvoffload.errors import UsageError
from kvoffload.manager import block_table
from kvoffload.manager.base import ReqContext
from kvoffload.manager.cpu import CPUOffloadingManager
from kvoffload.manager.policies import ghosts, recency
from kvoffload.manager.policies.arc import ARCCachePolicy
from kvoffload.manager.policies.base import BlockStatus
from kvoffload.manager.policies.lru import LRUCachePolicy

PLAIN = {"lru": PlainLRU, "arc": PlainARC}
FAST = {"lru": LRUCachePolicy, "arc": ARCCachePolicy}
CTX = ReqContext()


@pytest.fixture(params=[8, 4096], ids=["small-chunks-and-shards", "usual-chunks-and-shards"])
def chunk(request, monkeypatch):
    monkeypatch.setattr(recency, "CHUNK", request.param)
    if request.param == 8:
        monkeypatch.setattr(block_table, "SHARD_KEYS", 4)
        monkeypatch.setattr(ghosts, "_CHUNK", 8)


def order_of(policy):
    lists = ("t1", "t2", "b1", "b2") if hasattr(policy, "t1") else ("blocks",)
    return [list(getattr(policy, name)) for name in lists], getattr(policy, "target_t1_size", None)


class Pair:
    """One manager with a fast policy and one with its plain twin, called alike."""

    def __init__(self, policy, capacity):
        self.fast = CPUOffloadingManager(capacity, policy, enable_events=True)
        self.plain = CPUOffloadingManager(capacity, PLAIN[policy], enable_events=True)
        self.stores, self.loads = [], []

    def both(self, call):
        results = []
        for manager in (self.fast, self.plain):
            try:
                results.append(call(manager))
            except UsageError:
                results.append(UsageError)
        return results

    def store(self, keys):
        one, two = self.both(lambda m: m.prepare_store(keys, CTX))
        assert (one is None) == (two is None)
        if one is not None:
            assert (one.keys_to_store, one.evicted_keys, one.ticket) == (
                two.keys_to_store, two.evicted_keys, two.ticket,
            )  # fmt: skip
            assert one.store_spec.block_ids.tolist() == two.store_spec.block_ids.tolist()
            if one.ticket is not None:
                self.stores.append((one.ticket, one.keys_to_store))

    def load(self, keys):
        one, two = self.both(lambda m: m.prepare_load(keys, CTX))
        assert (one is UsageError) == (two is UsageError)
        if one is not UsageError and one.ticket is not None:
            self.loads.append((one.ticket, list(dict.fromkeys(keys))))

    def check(self):
        one, two = self.both(lambda m: m.stats())
        one.policy, two.policy = {}, {}
        assert one == two
        assert order_of(self.fast._policy) == order_of(self.plain._policy)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_managers_agree_step_by_step(policy, chunk):
    rng = random.Random(f"{policy} {recency.CHUNK}")
    for capacity in (1, 5, 24, 60):
        universe = [f"{n:04}".encode() for n in range(capacity * 3 + 2)]
        pair = Pair(policy, capacity)
        for step in range(7_000):
            start = rng.randrange(len(universe))
            run = universe[start : start + rng.randint(1, max(3, capacity // 3))]
            if rng.random() < 0.1:
                run = rng.choices(universe, k=4)
            roll = rng.random()
            if roll < 0.22:
                pair.both(lambda m, run=run: m.touch(run))
            elif roll < 0.25:
                pair.both(lambda m, run=run: m.refresh(run))
            elif roll < 0.5:
                pair.store(run)
            elif roll < 0.7 and pair.stores:
                ticket, keys = pair.stores.pop(rng.randrange(len(pair.stores)))
                success = rng.random() < 0.9
                pair.both(lambda m, t=ticket, k=keys, s=success: m.complete_store(k, s, ticket=t))
            elif roll < 0.8:
                ready = [key for key in run if pair.plain.peek(key)]
                pair.load(ready if rng.random() < 0.95 else run)
            elif roll < 0.95 and pair.loads:
                ticket, keys = pair.loads.pop(rng.randrange(len(pair.loads)))
                pair.both(lambda m, t=ticket, k=keys: m.complete_load(k, ticket=t))
            elif roll < 0.97:
                pair.both(lambda m, run=run: m.discard(run[:2]))
            elif roll < 0.972:
                pair.both(lambda m: m.reset_cache())
            elif pair.loads:
                ticket, _ = pair.loads.pop()
                pair.both(lambda m, t=ticket: m.abandon(t, hung=False))
            if step % 5 == 0:
                pair.check()
        one, two = pair.both(lambda m: m.take_events())
        assert [(e.removed, e.keys if not e.removed else sorted(e.keys)) for e in one] == [
            (e.removed, e.keys if not e.removed else sorted(e.keys)) for e in two
        ]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_five_methods_of_the_reference_agree_without_a_manager(policy, chunk):
    rng = random.Random(f"{policy} {recency.CHUNK} alone")
    capacity = 20
    universe = [f"{n:04}".encode() for n in range(50)]
    fast, plain = FAST[policy](cache_capacity=capacity), PLAIN[policy](cache_capacity=capacity)
    for step in range(10_000):
        roll = rng.random()
        held = [key for key in universe if plain.get(key) is not None]
        if roll < 0.35:
            keys = rng.choices(universe, k=rng.randint(0, 6))
            fast.touch(keys)
            plain.touch(keys)
        elif roll < 0.6 and len(held) < capacity:
            key = rng.choice([key for key in universe if key not in held])
            block = BlockStatus(step)
            fast.insert(key, block)
            plain.insert(key, block)
        elif roll < 0.8 and held:
            plain.get(rng.choice(held)).ref_cnt = rng.choice([-1, 0, 0, 0, 1])
        elif roll < 0.97:
            count, protected = rng.randint(0, 4), set(rng.choices(universe, k=3))
            one, two = fast.evict(count, protected), plain.evict(count, protected)
            assert (one is None) == (two is None)
            if one is not None:
                assert [(key, block.block_id) for key, block in one] == [(key, block.block_id) for key, block in two]
        elif held:
            key = rng.choice(held)
            fast.remove(key)
            plain.remove(key)
        if step % 4 == 0:
            assert order_of(fast) == order_of(plain)


def test_statuses_read_beside_a_manager_are_live_views():
    manager = CPUOffloadingManager(2, "lru")
    output = manager.prepare_store([b"A"], CTX)
    status = manager._policy.get(b"A")
    assert isinstance(status, BlockStatus)
    assert not status.is_ready
    manager.complete_store([b"A"], ticket=output.ticket)
    assert status.is_ready
    manager.prepare_load([b"A"], CTX)
    assert status.ref_cnt == 1
    assert status.block_id == output.store_spec.block_ids[0]


def test_subclass_that_overrides_a_method_of_the_reference_is_asked():
    class NewestFirst(LRUCachePolicy):
        def evict(self, n, protected):
            chosen = [key for key in reversed(list(self.blocks)) if self.blocks[key].ref_cnt == 0][:n]
            victims = [(key, self.get(key)) for key in chosen]
            for key in chosen:
                self.remove(key)
            return victims

    manager = CPUOffloadingManager(2, NewestFirst)
    for key in (b"A", b"B"):
        manager.complete_store(manager.prepare_store([key], CTX).keys_to_store)
    assert manager.prepare_store([b"C"], CTX).evicted_keys == [b"B"]
