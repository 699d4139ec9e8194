"""`CPUOffloadingManager` as the reference describes it (chapter 4), and what goes beyond it."""

import subprocess
import sys
from dataclasses import replace

import pytest

from kvoffload.errors import UsageError
from kvoffload.manager.base import Match, ReqContext
from kvoffload.manager.cpu import CPUOffloadingManager
from kvoffload.manager.policies.lru import LRUCachePolicy
from kvoffload.manager.policies.registry import load_policy

CTX = ReqContext()
A, B, C = b"A", b"B", b"C"


# ---- chapter 4: the reference's behaviour


def test_block_is_readable_only_after_its_store_completed(make, policy):
    s = make(2, policy)
    assert s.seen("A") == [False]
    output = s.offer("A")
    assert s.seen("A") == [None]
    s.manager.complete_store(output.keys_to_store)
    assert s.seen("A") == [True]


def test_store_filters_what_is_held_and_names_blocks_in_offer_order(make, policy):
    s = make(4, policy)
    s.store("B")
    output = s.offer("ABC")
    assert output.keys_to_store == [A, C]
    assert output.evicted_keys == []
    assert len(set(output.store_spec.block_ids.tolist())) == 2
    assert output.store_spec.medium() == "CPU"


def test_offer_of_held_keys_alone_reserves_nothing(make, policy):
    s = make(2, policy)
    s.store("AB")
    output = s.offer("AB")
    assert (output.keys_to_store, output.evicted_keys, output.ticket) == ([], [], None)
    assert output.store_spec.block_ids.tolist() == []


def test_failed_store_gives_the_block_back_and_announces_nothing(make, policy):
    s = make(1, policy)
    output = s.offer("A")
    s.manager.complete_store(output.keys_to_store, success=False)
    assert s.seen("A") == [False]
    assert s.stats().free == 1
    assert s.events() == []
    s.store("B")


def test_eviction_makes_room_and_protects_the_offered_keys(make):
    s = make(3)
    s.store("ABC")
    output = s.store("CD")
    assert output.keys_to_store == [b"D"]
    assert output.evicted_keys == [C] or output.evicted_keys == [A]
    assert s.seen("C") == [True]


def test_pinned_block_is_never_evicted(make, policy):
    s = make(2, policy)
    s.store("AB")
    spec = s.load("A")
    assert s.store("C").evicted_keys == [B]
    assert s.offer("DE") is None
    s.manager.complete_load([A], ticket=spec.ticket)
    assert sorted(s.store("DE").evicted_keys) == [A, C]


def test_unfinished_store_is_never_evicted(make, policy):
    s = make(2, policy)
    s.offer("A")
    s.store("B")
    assert s.store("C").evicted_keys == [B]
    assert s.offer("DE") is None


def test_events_come_removed_before_stored_and_only_when_readable(make):
    s = make(2)
    s.store("AB")
    output = s.offer("CD")
    assert s.events() == ["+AB", "-BA"] or s.events() == []
    s.manager.complete_store(output.keys_to_store)
    assert s.events() == ["+CD"]
    assert s.events() == []


def test_events_are_off_unless_asked_for():
    manager = CPUOffloadingManager(1)
    manager.complete_store(manager.prepare_store([A], CTX).keys_to_store)
    assert list(manager.take_events()) == []


# ---- acceptance cases


def test_store_that_cannot_get_its_blocks_changes_nothing(make, policy):
    """A-M1."""
    s = make(4, policy)
    s.store("ABCD")
    s.events()
    s.load("A")
    before = s.stats()
    assert s.offer("EFGH") is None
    assert s.seen("ABCD") == [True] * 4
    assert s.stats().free == 0
    assert s.events() == []
    assert replace(s.stats(), lookups=0, hits=0, refused=0) == before
    s.manager.complete_load([A])
    output = s.offer("EFGH")
    assert sorted(output.evicted_keys) == s.keys("ABCD")


def test_key_given_twice_gets_one_block(make, policy):
    """A-M3."""
    s = make(4, policy)
    output = s.offer("AA")
    assert output.keys_to_store == [A]
    assert len(output.store_spec.block_ids) == 1
    s.manager.complete_store([A, A])
    assert s.stats().free == 3
    assert s.events() == ["+A"]
    s.manager.reset_cache()
    assert s.stats().free == 4


def test_load_with_a_missing_key_leaves_no_pin(make, policy):
    """A-M4."""
    s = make(4, policy)
    s.store("A")
    with pytest.raises(UsageError, match="not held"):
        s.load("AZ")
    assert s.stats().pinned == 0
    output = s.offer("BCDE")
    assert output.evicted_keys == [A]


RELEASE_WITHOUT_ACQUIRE = """
from kvoffload.errors import UsageError
from kvoffload.manager.base import ReqContext
from kvoffload.manager.cpu import CPUOffloadingManager
ctx = ReqContext()
manager = CPUOffloadingManager(4)
manager.complete_store(manager.prepare_store([b"A"], ctx).keys_to_store)
manager.prepare_store([b"A2"], ctx)
before = manager.stats()
raised = 0
for key in (b"A", b"A2", b"unknown"):
    try:
        manager.complete_load([key])
    except UsageError:
        raised += 1
assert_free = (raised, manager.stats() == before, manager.lookup(b"A", ctx), manager.lookup(b"A2", ctx))
print(assert_free)
"""


@pytest.mark.parametrize("flags", [[], ["-O"]])
def test_release_without_acquire_raises_and_changes_nothing(flags):
    """A-M5, also under python -O."""
    out = subprocess.run(
        [sys.executable, *flags, "-c", RELEASE_WITHOUT_ACQUIRE], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "(3, True, True, None)"


def test_failed_store_reported_twice_frees_once(make, policy):
    """A-M6."""
    s = make(2, policy)
    output = s.offer("AB")
    for ticket in (output.ticket, output.ticket, None):
        s.manager.complete_store([A, B], success=False, ticket=ticket)
        assert s.stats().free == 2
    assert s.stats().stale_completions == 4
    output = s.offer("CD")
    assert len(set(output.store_spec.block_ids.tolist())) == 2
    assert s.offer("E") is None
    assert s.events() == []


def test_late_report_of_an_abandoned_store_does_not_complete_its_successor(make, policy):
    """A-M7, the manager's half."""
    s = make(2, policy)
    first = s.offer("A")
    s.manager.abandon(first.ticket)
    assert s.seen("A") == [False]
    assert s.stats().free == 2
    second = s.offer("A")
    assert second.keys_to_store == [A]
    s.manager.complete_store([A], success=True, ticket=first.ticket)
    assert s.seen("A") == [None]
    assert s.stats().stale_completions == 1
    s.manager.complete_store([A], success=True, ticket=second.ticket)
    assert s.seen("A") == [True]


def test_tail_of_a_prefix_leaves_before_its_head(make):
    """A-M8."""
    s = make(4)
    s.store("ABCD")
    s.touch("ABCD")
    assert s.store("E").evicted_keys == [b"D"]
    assert s.store("F").evicted_keys == [C]
    assert s.seen("AB") == [True, True]


def test_usage_stays_between_zero_and_one(make, policy):
    """A-P3."""
    s = make(4, policy)
    output = s.offer("AB")
    assert s.stats().write_usage == 0.5
    s.manager.complete_store([A], ticket=output.ticket)
    s.manager.complete_store([B], success=False, ticket=output.ticket)
    assert (s.stats().write_usage, s.stats().usage) == (0.0, 0.25)
    spec = s.load("A")
    assert s.stats().read_usage == 0.25
    s.manager.complete_load([A], ticket=spec.ticket)
    assert s.stats().read_usage == 0.0
    s.manager.reset_cache()
    assert s.stats().usage == 0.0
    assert make(0, policy).stats().usage == 0.0


# ---- tickets and detached memory


def test_reset_while_writing_keeps_the_memory_until_the_copy_ended(make, policy):
    s = make(1, policy)
    old = s.offer("A")
    assert s.manager.reset_cache() == 0
    assert s.offer("A") is None
    assert s.stats().detached == 1
    s.manager.complete_store([A], ticket=old.ticket)
    assert s.stats().free == 1
    assert s.seen("A") == [False]
    assert s.events() == []


def test_reset_while_pinned_keeps_the_memory_until_the_last_load_ended(make, policy):
    s = make(1, policy)
    s.store("A")
    one, two = s.load("A"), s.load("A")
    assert s.manager.reset_cache() == 1
    assert s.events() == ["+A", "-A"]
    s.manager.complete_load([A], ticket=one.ticket)
    assert (s.stats().detached, s.stats().free) == (1, 0)
    s.manager.complete_load([A], ticket=two.ticket)
    assert (s.stats().detached, s.stats().free) == (0, 1)
    assert s.stats().stale_completions == 2


def test_ticketless_completion_means_the_current_reservation_then_the_detached_one(make, policy):
    s = make(2, policy)
    s.offer("A")
    s.manager.reset_cache()
    s.offer("A")
    s.manager.complete_store([A])
    assert s.seen("A") == [True]
    assert s.stats().detached == 1
    s.manager.complete_store([A])
    assert s.stats().detached == 0
    assert s.stats().free == 1


def test_abandoned_store_whose_copy_runs_stays_detached_until_it_ends(make, policy):
    s = make(1, policy)
    output = s.offer("A")
    s.manager.abandon(output.ticket, copy_running=True)
    assert s.seen("A") == [False]
    assert (s.stats().detached, s.stats().quarantined) == (1, 0)
    s.manager.abandon(output.ticket, hung=True)
    assert (s.stats().detached, s.stats().quarantined) == (1, 1)
    s.manager.complete_store([A], ticket=output.ticket)
    assert (s.stats().free, s.stats().quarantined, s.stats().abandoned) == (1, 0, 1)


def test_abandoned_load_gives_its_pins_back(make, policy):
    s = make(1, policy)
    s.store("A")
    spec = s.load("A")
    s.manager.abandon(spec.ticket)
    s.manager.abandon(spec.ticket)
    assert s.stats().pinned == 0
    assert s.store("B").evicted_keys == [A]


def test_abandoned_load_whose_copy_runs_stays_readable_and_pinned(make, policy):
    s = make(1, policy)
    s.store("A")
    spec = s.load("A")
    s.manager.abandon(spec.ticket, copy_running=True)
    assert s.seen("A") == [True]
    assert s.offer("B") is None
    s.manager.complete_load([A], ticket=spec.ticket)
    assert (s.stats().pinned, s.stats().stale_completions) == (0, 0)


def test_hung_load_drops_its_keys_and_quarantines_the_memory(make, policy):
    s = make(1, policy)
    s.store("A")
    spec = s.load("A")
    s.manager.abandon(spec.ticket, hung=True)
    assert s.events() == ["+A", "-A"]
    assert (s.stats().discarded, s.stats().quarantined, s.stats().free) == (1, 1, 0)
    s.manager.complete_load([A], ticket=spec.ticket)
    assert (s.stats().quarantined, s.stats().free) == (0, 1)


def test_discarded_keys_are_announced_when_they_were_readable(make, policy):
    s = make(3, policy)
    s.store("AB")
    pinned = s.load("B")
    writing = s.offer("C")
    assert s.manager.discard([A, A, B, C, b"unknown"]) == 3
    assert s.events() == ["+AB", "-AB"]
    assert (s.stats().free, s.stats().detached, s.stats().discarded, s.stats().abandoned) == (1, 2, 2, 1)
    s.manager.complete_load([B], ticket=pinned.ticket)
    s.manager.complete_store([C], ticket=writing.ticket)
    assert s.stats().free == 3


def test_ticket_of_the_other_kind_is_refused(make):
    s = make(2)
    store = s.offer("A")
    with pytest.raises(UsageError, match="of a store"):
        s.manager.complete_load([A], ticket=store.ticket)
    s.manager.complete_store([A], ticket=store.ticket)
    load = s.load("A")
    with pytest.raises(UsageError, match="of a load"):
        s.manager.complete_store([A], ticket=load.ticket)
    assert s.stats().pinned == 1


def test_shutdown_leaves_nothing_reserved(make, policy):
    s = make(3, policy)
    s.store("AB")
    s.load("A")
    s.offer("C")
    s.manager.shutdown()
    assert s.stats().free == 3
    assert s.events() == []


# ---- match, requests, limits


def test_match_counts_the_ready_prefix_and_what_waits_behind_a_write(make, policy):
    s = make(4, policy)
    s.store("AC")
    s.offer("B")
    before = s.stats()
    assert s.manager.match(s.keys("ABCD")) == Match(1, 2)
    assert s.manager.match(s.keys("DA")) == Match(0, 0)
    assert s.manager.match([]) == Match(0, 0)
    assert s.manager.held(s.keys("ABZ")) == {A, B}
    assert s.stats() == before


def test_retry_of_a_request_is_not_a_second_lookup(make, policy):
    s = make(2, policy)
    ctx = ReqContext("r1")
    output = s.offer("A")
    assert s.manager.lookup(A, ctx) is None
    s.manager.complete_store([A], ticket=output.ticket)
    assert s.manager.lookup_prefix([A, B], ctx) == Match(1, 0)
    stats = s.stats()
    assert (stats.lookups, stats.hits, stats.misses, stats.pending) == (2, 0, 1, 1)
    s.manager.finish_request(ctx)
    s.manager.lookup(A, ctx)
    assert s.stats().hits == 1


def test_request_that_must_not_store_stores_nothing(make, policy):
    s = make(2, policy)
    output = s.offer("AB", ReqContext("r1", store=False))
    assert output.keys_to_store == []
    assert s.stats().free == 2


def test_store_larger_than_the_pool_is_refused_whole(make, policy):
    s = make(2, policy)
    s.store("A")
    assert s.offer("BCD") is None
    assert s.seen("A") == [True]
    assert s.stats().refused == 3


def test_without_capacity_everything_misses(make, policy):
    s = make(0, policy)
    assert s.offer("A") is None
    assert s.seen("A") == [False]
    assert s.offer("").keys_to_store == []
    assert s.manager.reset_cache() == 0


def test_evicted_blocks_that_were_never_loaded_are_counted(make, policy):
    s = make(2, policy)
    s.store("AB")
    s.manager.complete_load([A], ticket=s.load("A").ticket)
    s.store("CD")
    assert (s.stats().evicted, s.stats().evicted_unused) == (2, 1)


def test_a_block_that_was_loaded_counts_as_unused_again_under_its_next_key(make, policy):
    s = make(1, policy)
    s.store("A")
    s.manager.complete_load([A], ticket=s.load("A").ticket)
    s.store("B")
    s.store("C")
    assert (s.stats().evicted, s.stats().evicted_unused) == (2, 1)


def test_what_a_caller_does_to_its_list_or_to_a_spec_changes_nothing_in_the_manager(make, policy):
    s = make(3, policy)
    s.store("ABC")
    keys = s.keys("ABC")
    assert s.manager.match(keys).ready == 3
    keys[:] = s.keys("CBA")
    backwards = s.manager.prepare_load(keys, CTX)
    forwards = s.load("ABC")
    assert backwards.block_ids.tolist() == forwards.block_ids.tolist()[::-1]
    forwards.block_ids[:] = 0
    assert s.load("ABC").block_ids.tolist() == backwards.block_ids.tolist()[::-1]
    s.manager.complete_load(s.keys("ABC"), ticket=forwards.ticket)
    s.manager.complete_load(s.keys("ABC"))
    s.manager.complete_load(s.keys("CBA"))
    assert s.stats().pinned == 0


# ---- constructors


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((1.5,), "num_blocks"),
        ((None,), "num_blocks"),
        ((True,), "num_blocks"),
        ((-1,), "num_blocks"),
        ((4, None), "cache_policy"),
        ((4, int), "cache_policy"),
        ((4, LRUCachePolicy(4)), "cache_policy"),
        ((4, "lru", "yes"), "enable_events"),
        ((4, "lru", None), "enable_events"),
    ],
)
def test_argument_of_a_wrong_kind_is_a_typed_error_that_names_it(arguments, named):
    with pytest.raises(UsageError, match=named):
        CPUOffloadingManager(*arguments)


@pytest.mark.parametrize("tokens", [0, -16, 1.5, "16", True])
def test_block_tokens_must_be_a_positive_whole_number(tokens):
    with pytest.raises(UsageError, match="block_tokens"):
        CPUOffloadingManager(4, "adaptive", block_tokens=tokens)


@pytest.mark.parametrize("capacity", [1.5, None, "4", -1, True])
def test_policy_capacity_that_is_no_number_of_blocks_is_a_typed_error(policy, capacity):
    with pytest.raises(UsageError, match="cache_capacity"):
        load_policy(policy)(cache_capacity=capacity)
