"""The adaptive policy's own claims, one at a time."""

import numpy as np
import pytest
from reference.adaptive_laws import check_adaptive

from kvoffload.keys import make_offload_key
from kvoffload.manager.base import ReqContext, RequestOutcome
from kvoffload.manager.cpu import CPUOffloadingManager
from kvoffload.manager.policies.adaptive import AdaptiveCachePolicy
from kvoffload.manager.policies.base import BlockStatus


def keys(names, group=0):
    """One key per name; a longer word is a longer prefix."""
    return [make_offload_key(names[: i + 1].encode(), group) for i in range(len(names))]


class Requests:
    """Serves whole requests, one after the other, a second apart."""

    def __init__(self, capacity, block_tokens=512):
        self.manager = CPUOffloadingManager(capacity, "adaptive", enable_events=True, block_tokens=block_tokens)
        self.policy = self.manager._policy
        self.now = 0.0
        self.number = 0

    def wait(self, seconds):
        """Let blocks age: other requests come meanwhile."""
        for _ in range(10):
            self.now += seconds / 10
            self.manager.touch([], ReqContext("other", started_seconds=self.now))
            self.manager.finish_request(ReqContext("other"))

    def begin(self, names, *, after=1.0, **context):
        self.now += after
        self.number += 1
        request = ReqContext(f"r{self.number}", started_seconds=self.now, **context)
        self.manager.touch(keys(names), request)
        return request

    def store(self, names, request, first=0):
        output = self.manager.prepare_store(keys(names)[first:], request)
        if output is not None and output.ticket is not None:
            self.manager.complete_store(output.keys_to_store, ticket=output.ticket)
        return output

    def serve(self, names, *, after=1.0, priority=0, **outcome):
        request = self.begin(names, after=after, priority=priority)
        ready = self.manager.match(keys(names)).ready
        self.store(names, request, ready)
        self.manager.finish_request(request, RequestOutcome(now_seconds=self.now, **outcome), keys(names))
        check_adaptive(self.policy)
        return ready

    def held(self, names):
        return self.manager.match(keys(names)).ready


def test_a_prefix_leaves_from_its_end():
    requests = Requests(6)
    requests.serve("abcdef")
    requests.wait(60)
    output = requests.store("xyz", requests.begin("xyz"))
    assert output.evicted_keys == keys("abcdef")[:2:-1]
    assert requests.held("abcdef") == 3


def test_a_shared_prefix_outlives_its_branches():
    requests = Requests(6)
    requests.serve("abcd")
    requests.serve("abxy")
    requests.wait(60)
    requests.store("pq", requests.begin("pq"))
    assert (requests.held("ab"), requests.held("pq")) == (2, 2)


def test_pinned_blocks_and_what_is_above_them_stay():
    requests = Requests(4)
    requests.serve("abcd")
    spec = requests.manager.prepare_load(keys("abcd")[:2], ReqContext())
    requests.wait(60)
    request = requests.begin("uvwxyz")
    assert requests.store("uvw", request) is None
    assert set(requests.store("uv", request).evicted_keys) == set(keys("abcd")[2:])
    requests.manager.complete_load(keys("abcd")[:2], ticket=spec.ticket)
    check_adaptive(requests.policy)


def test_a_store_never_evicts_the_prefix_that_it_continues():
    requests = Requests(4)
    requests.serve("abcd")
    request = requests.begin("abcdef")
    assert requests.store("abcdef", request, 4) is None
    assert requests.held("abcd") == 4


def test_a_refused_eviction_changes_nothing():
    nothing = np.empty(0, np.int64)
    orders = []
    for refused in (False, True):
        requests = Requests(8)
        for names in ("abc", "xy", "pqr"):
            requests.serve(names)
        spec = requests.manager.prepare_load(keys("xy"), ReqContext())
        if refused:
            assert requests.policy.evict_for((), nothing, 7) is None
            check_adaptive(requests.policy)
        requests.manager.complete_load(keys("xy"), ticket=spec.ticket)
        orders.append(requests.policy.evict_for((), nothing, 8).tolist())
    assert orders[0] == orders[1]


def test_what_ended_leaves_before_what_lives():
    requests = Requests(400)
    for chat in range(300):
        word = chr(0x100 + chat)
        requests.serve(word * 4, conversation_ended=chat % 2 == 0)
        if chat % 2:
            requests.serve(word * 4 + "b", after=3.0)  # the living ones return at once
    held = [requests.held(chr(0x100 + chat) * 4) for chat in range(300)]
    assert sum(held[1::2]) > 3 * sum(held[::2])


def test_a_higher_priority_stays_longer():
    requests = Requests(24)
    for round_ in range(40):
        requests.serve(chr(0x100 + round_) * 4, priority=2 * (round_ % 2))
    held = [requests.held(chr(0x100 + round_) * 4) for round_ in range(40)]
    assert sum(held[1::2]) > 2 * sum(held[::2])


def test_blocks_stored_without_a_request_can_be_evicted():
    manager = CPUOffloadingManager(3, "adaptive")
    for name in "abcdef":
        output = manager.prepare_store([make_offload_key(name.encode() * 4, 0)], ReqContext())
        manager.complete_store(output.keys_to_store, ticket=output.ticket)
    assert manager.stats().evicted == 3
    check_adaptive(manager._policy)


def test_requests_without_times_count_as_a_second_each():
    manager = CPUOffloadingManager(100, "adaptive")
    for number in range(10):
        manager.touch(keys("ab"), ReqContext(f"r{number}"))
        manager.finish_request(ReqContext(f"r{number}"), None, keys("ab"))
    assert manager._policy._reuse.now == 10.0


def test_a_touch_without_a_request_ends_at_the_next_one():
    manager = CPUOffloadingManager(100, "adaptive")
    for _ in range(5):
        manager.touch(keys("abc"))
    assert manager.stats().policy["finished_requests"] == 4
    assert manager.stats().policy["open_requests"] == 1


def test_requests_that_never_end_are_bounded():
    manager = CPUOffloadingManager(16, "adaptive")
    for number in range(1100):
        manager.touch(keys("ab" + chr(0x100 + number)), ReqContext(f"r{number}"))
    assert manager.stats().policy["open_requests"] == 1024
    assert manager.stats().policy["finished_requests"] == 1100 - 1024


def begun_again(first, then):
    """A full memory of one request that came twice, and ended with the keys of its second touch."""
    r = Requests(4)
    request = ReqContext("again")
    r.manager.touch(first, request)
    output = r.manager.prepare_store(first, request)
    r.manager.complete_store(output.keys_to_store, ticket=output.ticket)
    r.manager.touch(then, request)
    check_adaptive(r.policy)
    r.manager.finish_request(request, None, then)
    check_adaptive(r.policy)
    return r


@pytest.mark.parametrize("then", [keys("AB"), keys("ABX"), keys("AB", group=1), []])
def test_what_a_request_that_comes_again_names_no_more_can_be_evicted(then):
    first = keys("AB") + keys("AB", group=1)
    r = begun_again(first, then)
    output = r.manager.prepare_store(keys("EFGH"), ReqContext())
    assert sorted(output.evicted_keys) == sorted(first)


def test_a_request_that_comes_again_without_keys_can_store_into_a_full_memory():
    r = Requests(4)
    r.serve("ABCD")
    request = r.begin("EF")
    r.manager.touch([], request)
    assert r.store("EF", request) is not None
    check_adaptive(r.policy)


def test_answer_blocks_continue_their_prompt():
    requests = Requests(10)
    request = requests.begin("abc")
    requests.store("abc", request)
    requests.store("abcde", request, 3)
    node_of = requests.policy._tree.node_of
    assert node_of[keys("abcde")[4]] is node_of[keys("abcd")[3]]
    assert node_of[keys("abcd")[3]].parent is node_of[keys("abc")[2]]
    requests.manager.finish_request(request, None, keys("abcde"))
    check_adaptive(requests.policy)
    assert requests.serve("abcdef") == 5


def test_groups_are_chains_of_their_own():
    manager = CPUOffloadingManager(8, "adaptive")
    both = keys("abcd") + keys("abcd", 1)
    manager.touch(both, ReqContext("r"))
    output = manager.prepare_store(both, ReqContext("r"))
    manager.complete_store(both, ticket=output.ticket)
    manager.finish_request(ReqContext("r"), RequestOutcome(now_seconds=1.0), both)
    tree = manager._policy._tree
    assert {len(tree.node_of[key].keys) for key in both} == {4}
    assert tree.node_of[both[0]] is not tree.node_of[both[4]]
    for second in range(10, 100, 10):  # blocks age when requests come
        manager.touch([], ReqContext(f"s{second}", started_seconds=float(second)))
    manager.touch(keys("x"), ReqContext("s", started_seconds=99.0))
    assert manager.prepare_store(keys("xy"), ReqContext("s")).evicted_keys[0] in (both[3], both[7])


def test_a_failed_store_leaves_what_was_there_evictable():
    requests = Requests(4)
    requests.serve("ab")
    request = requests.begin("abcd")
    output = requests.manager.prepare_store(keys("abcd")[2:], request)
    requests.manager.complete_store(output.keys_to_store, False, ticket=output.ticket)
    check_adaptive(requests.policy)
    requests.manager.finish_request(request, None, keys("abcd"))
    requests.wait(60)
    assert set(requests.store("wxyz", requests.begin("wxyz")).evicted_keys) == set(keys("ab"))


def test_a_reset_forgets_content_and_keeps_what_was_learnt():
    requests = Requests(8)
    for _ in range(20):
        requests.serve("abc")
    learnt = requests.policy._reuse.get((3, 5, 0, 0)).asked.copy()
    open_one = requests.begin("abcd")
    requests.manager.reset_cache()
    check_adaptive(requests.policy)
    assert requests.held("abc") == 0
    assert requests.policy._reuse.get((3, 5, 0, 0)).asked == learnt
    requests.manager.finish_request(open_one, None, keys("abcd"))
    check_adaptive(requests.policy)
    assert requests.serve("abc") == 0
    assert requests.serve("abc") == 3


def test_the_guard_falls_back_to_lru_and_says_so():
    policy = AdaptiveCachePolicy(4)
    for _ in range(3000):
        policy._guard.count(own_hits=1, lru_hits=2, asked=4)
    assert policy.stats()["guard_plain_lru"] == 1.0
    assert policy.stats()["guard_switches"] == 1
    assert policy.stats()["lru_prefix_hit_blocks"] == 6000
    for _ in range(1100):
        policy._guard.count(own_hits=1, lru_hits=2, asked=4)
    assert policy.stats()["guard_plain_lru"] == 0.0


def test_the_shadow_counts_what_plain_lru_would_hit():
    requests = Requests(4)
    requests.serve("abc")
    requests.serve("abc")
    requests.serve("xyz")
    requests.serve("abc")
    assert requests.policy.stats()["lru_prefix_hit_blocks"] == 3


@pytest.mark.parametrize("hint", [float("nan"), float("inf"), -3.0, 0.0, 1e308])
def test_any_return_time_is_taken(hint):
    requests = Requests(8)
    requests.serve("abc", expected_return_seconds=hint)
    assert requests.serve("abc") == 3


def test_it_works_alone_through_the_references_five_methods():
    policy = AdaptiveCachePolicy(4)
    policy.touch(keys("abcd"))
    for number, key in enumerate(keys("abcd")):
        status = BlockStatus(number)
        policy.insert(key, status)
        status.ref_cnt = 0
    assert policy.get(keys("ab")[1]).block_id == 1
    assert policy.evict(5, set()) is None
    policy.get(keys("abcd")[3]).ref_cnt = 1
    assert policy.evict(1, set()) is None  # the end of the only run is held
    policy.get(keys("abcd")[3]).ref_cnt = 0
    assert [key for key, _ in policy.evict(2, {keys("ab")[1]})] == keys("abcd")[:1:-1]
    policy.remove(keys("ab")[1])
    assert dict(policy.blocks).keys() == {keys("a")[0]}
