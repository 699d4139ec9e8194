"""LRU and ARC through the five methods of the reference (chapter 5)."""

import pytest

from kvoffload.manager.policies.arc import ARCCachePolicy
from kvoffload.manager.policies.base import BlockStatus
from kvoffload.manager.policies.lru import LRUCachePolicy

CAPACITY = 4


def filled(policy_cls, names, capacity=CAPACITY):
    policy = policy_cls(cache_capacity=capacity)
    for block_id, name in enumerate(names):
        block = BlockStatus(block_id)
        policy.insert(name.encode(), block)
        block.ref_cnt = 0
    return policy


def keys(names):
    return [name.encode() for name in names]


def victims(policy, n, protected=""):
    found = policy.evict(n, set(keys(protected)))
    return None if found is None else "".join(key.decode() for key, _ in found)


def test_new_block_is_not_ready():
    block = BlockStatus(7)
    assert (block.block_id, block.ref_cnt, block.is_ready) == (7, -1, False)
    block.ref_cnt = 0
    assert block.is_ready


@pytest.mark.parametrize("policy_cls", [LRUCachePolicy, ARCCachePolicy])
class TestBoth:
    def test_get_returns_the_status_of_held_keys(self, policy_cls):
        policy = filled(policy_cls, "AB")
        assert policy.get(b"B").block_id == 1
        assert policy.get(b"B").is_ready
        assert policy.get(b"Z") is None

    def test_victims_come_with_their_blocks(self, policy_cls):
        policy = filled(policy_cls, "AB")
        ((key, block),) = policy.evict(1, set())
        assert (key, block.block_id) == (b"A", 0)
        assert policy.get(b"A") is None

    def test_too_few_victims_means_none_and_no_change(self, policy_cls):
        policy = filled(policy_cls, "ABC")
        policy.get(b"A").ref_cnt = 1
        policy.get(b"B").ref_cnt = -1
        assert victims(policy, 2) is None
        assert victims(policy, 1, "C") is None
        assert victims(policy, 0) == ""
        assert victims(policy, 1) == "C"

    def test_removed_key_is_gone(self, policy_cls):
        policy = filled(policy_cls, "AB")
        policy.remove(b"A")
        assert policy.get(b"A") is None
        assert victims(policy, 2) is None
        assert victims(policy, 1) == "B"

    def test_pinned_block_keeps_its_place_in_the_order(self, policy_cls):
        policy = filled(policy_cls, "ABCD")
        policy.get(b"A").ref_cnt = 2
        assert victims(policy, 1) == "B"
        policy.get(b"A").ref_cnt = 0
        assert victims(policy, 2) == "AC"

    def test_clear_forgets_everything(self, policy_cls):
        policy = filled(policy_cls, "ABC")
        victims(policy, 1)
        policy.clear()
        assert policy.get(b"B") is None
        assert victims(policy, 1) is None


def test_lru_orders_by_last_touch_with_the_prefix_head_newest():
    policy = filled(LRUCachePolicy, "ABCD")
    policy.touch(keys("ABZ"))
    assert list(policy.blocks) == keys("CDBA")
    assert len(policy.blocks) == 4
    assert policy.blocks[b"A"].block_id == 0
    assert b"Z" not in policy.blocks
    assert victims(policy, 4) == "CDBA"
    assert not policy.blocks


def test_arc_promotes_a_ready_block_that_is_touched_and_not_one_being_written():
    policy = filled(ARCCachePolicy, "AB")
    policy.insert(b"C", BlockStatus(2))
    policy.touch(keys("CA"))
    assert list(policy.t1) == keys("BC")
    assert list(policy.t2) == keys("A")
    assert policy.t1[b"C"].block_id == 2


def test_arc_takes_from_t1_while_it_is_at_or_above_its_target():
    policy = filled(ARCCachePolicy, "ABCD")
    policy.touch(keys("AB"))
    assert victims(policy, 3) == "CDB"
    assert list(policy.b1) == keys("CD")
    assert list(policy.b2) == keys("B")


def test_arc_ghost_hits_move_the_target():
    policy = filled(ARCCachePolicy, "ABCD")
    policy.touch(keys("AB"))
    victims(policy, 3)
    policy.touch(keys("C"))
    assert policy.target_t1_size == 1.0
    policy.touch(keys("D"))
    assert policy.target_t1_size == 2.0
    assert list(policy.b1) == keys("CD")
    policy.touch(keys("B"))
    assert policy.target_t1_size == 0.0


def test_arc_stores_a_ghost_into_t1_and_drops_the_ghost():
    policy = filled(ARCCachePolicy, "AB")
    victims(policy, 1)
    policy.insert(b"A", BlockStatus(0))
    assert list(policy.t1) == keys("BA")
    assert not policy.b1


def test_arc_falls_back_to_t1_when_every_frequent_block_is_pinned(make):
    """A-M2."""
    s = make(4, "arc")
    s.store("AB")
    s.touch("AB")
    s.store("CD")
    s.store("EF")
    for name in "CDCD":
        s.touch(name)
    s.load("AB")
    output = s.offer("G")
    assert output.evicted_keys == [b"E"]
    assert s.seen("AB") == [True, True]


def test_arc_ghosts_and_target_stay_within_the_capacity(make):
    """A-M9."""
    s = make(2, "arc")
    policy = s.manager._policy
    names = [f"{n:03}" for n in range(100)]

    def bounded():
        return len(policy.b1) <= 2 and len(policy.b2) <= 2 and 0 <= policy.target_t1_size <= 2

    for name in names:
        s.store([name])
        assert bounded()
    for name in names[-52:-2]:
        s.touch([name])
        assert bounded()
