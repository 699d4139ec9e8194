from kvoffload.keys import OffloadKey
from kvoffload.manager.base import ReqContext
from kvoffload.manager.cpu import CPUOffloadingManager

CONTEXT = ReqContext()
KEYS = [OffloadKey(bytes([number]) * 8 + b"\0\0\0\0") for number in range(4)]


def filled(policy: str) -> CPUOffloadingManager:
    manager = CPUOffloadingManager(num_blocks=3, cache_policy=policy)
    output = manager.prepare_store(KEYS[:3], CONTEXT)
    assert output is not None
    manager.complete_store(KEYS[:3], ticket=output.ticket)
    return manager


def test_refreshed_keys_leave_last_and_the_head_of_a_prefix_after_its_tail():
    for policy in ("lru", "arc"):
        manager = filled(policy)
        manager.refresh(KEYS[:2])
        victims = []
        for fresh in range(10, 13):
            key = OffloadKey(bytes([fresh]) * 8 + b"\0\0\0\0")
            output = manager.prepare_store([key], CONTEXT)
            victims += output.evicted_keys
        assert victims == [KEYS[2], KEYS[1], KEYS[0]], policy


def test_refresh_does_not_make_a_key_frequent_in_arc():
    manager = filled("arc")
    manager.refresh(KEYS[:3])
    assert manager.stats().policy["t2"] == 0
    manager.touch(KEYS[:1])
    manager.refresh(KEYS[:1])
    assert manager.stats().policy == {"t1": 2, "t2": 1, "b1": 0, "b2": 0, "target_t1_size": 0}


def test_peek_answers_like_lookup_and_counts_nothing():
    manager = CPUOffloadingManager(num_blocks=2)
    output = manager.prepare_store(KEYS[:1], CONTEXT)
    assert [manager.peek(key) for key in KEYS[:2]] == [None, False]
    manager.complete_store(KEYS[:1], ticket=output.ticket)
    assert manager.peek(KEYS[0]) is True
    assert manager.stats().lookups == 0
