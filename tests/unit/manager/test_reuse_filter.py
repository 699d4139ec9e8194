"""`FilterReusedOffloadingManager` (reference, chapter 3)."""

import pytest

from kvoffload.errors import ConfigError
from kvoffload.manager.base import Match, ReqContext
from kvoffload.manager.request_book import RequestBook
from kvoffload.manager.reuse_filter import FilterReusedOffloadingManager

A, B, C, D, E = b"A", b"B", b"C", b"D", b"E"


def test_key_is_stored_from_its_threshold_on(make_filtered, policy):
    s, _ = make_filtered(4, threshold=3, policy=policy)
    for stored in ([], [], [A]):
        s.seen("A")
        output = s.offer("A")
        assert output.keys_to_store == stored
        assert output.filtered_keys == ([] if stored else [A])
    assert s.stats().filtered == 2


def test_without_request_ids_each_lookup_counts_and_nothing_else(make_filtered):
    s, _ = make_filtered(4)
    s.offer("A")
    s.offer("A")
    assert s.offer("A").keys_to_store == []
    s.seen("AA")
    assert s.manager.counts == {A: 2}
    assert s.offer("A").keys_to_store == [A]


def test_request_counts_a_key_once_over_lookups_and_offers(make_filtered):
    s, _ = make_filtered(4)
    for name, stored in (("r1", []), ("r2", [A, B])):
        ctx = ReqContext(name)
        s.manager.lookup(A, ctx)
        s.manager.lookup(A, ctx)
        assert s.offer("AB", ctx).keys_to_store == stored
        assert s.offer("AB", ctx).keys_to_store == []
        s.manager.finish_request(ctx)


def test_batch_lookup_counts_up_to_the_first_miss(make_filtered):
    s, backing = make_filtered(4)
    backing.store("A")
    backing.offer("B")
    assert s.manager.lookup_prefix([A, B, C, D], ReqContext()) == Match(1, 1)
    assert s.manager.counts == {A: 1, B: 1, C: 1}


def test_tracker_forgets_the_key_counted_longest_ago(make_filtered):
    s, _ = make_filtered(4, tracker=2)
    for name, round_ in (("A", "r1"), ("B", "r2"), ("A", "r3"), ("C", "r4")):
        s.manager.lookup(name.encode(), ReqContext(round_))
    assert s.manager.counts == {A: 2, C: 1}


@pytest.mark.parametrize("ids", [True, False])
def test_offer_larger_than_the_tracker_makes_progress(make_filtered, policy, ids):
    """A-M10."""
    s, _ = make_filtered(8, tracker=3, policy=policy)
    stored = set()
    for number in range(3):
        ctx = ReqContext(f"r{number}" if ids else None)
        for key in (A, B, C, D):
            s.manager.lookup(key, ctx)
            assert len(s.manager.counts) <= 3
        stored.update(s.store("ABCD", ctx).keys_to_store)
    assert len(stored) >= 3


@pytest.mark.parametrize("ids", [("r1", "r2"), (None, None)])
def test_resident_key_of_the_offer_is_protected_although_it_is_below_the_threshold(make_filtered, ids):
    """A-M11."""
    s, backing = make_filtered(4)
    backing.store("ABCD")
    for name in ids:
        s.manager.lookup(E, ReqContext(name))
    output = s.offer("AE")
    assert output.keys_to_store == [E]
    assert output.evicted_keys == [B]


def test_everything_else_reaches_the_manager_behind(make_filtered):
    s, backing = make_filtered(4)
    s.seen("ABAB")
    s.store("AB")
    spec = s.load("A")
    assert backing.stats().pinned == 1
    s.manager.complete_load([A], ticket=spec.ticket)
    s.touch("A")
    assert s.manager.match([A, B]) == Match(2, 0)
    assert s.manager.held([A, C]) == {A}
    assert s.events() == ["+AB"]
    s.manager.abandon(s.load("A").ticket)
    assert s.manager.discard([B]) == 1
    assert s.manager.reset_cache() == 1
    s.manager.finish_request(ReqContext("r"))
    s.manager.shutdown()
    assert s.stats().free == 4


@pytest.mark.parametrize(("threshold", "tracker"), [(1, 10), (0, 10), (2, 0)])
def test_settings_that_filter_nothing_are_refused(make, threshold, tracker):
    with pytest.raises(ConfigError, match="must be at least"):
        FilterReusedOffloadingManager(make(1).manager, threshold, tracker)


def test_request_book_is_bounded():
    book = RequestBook(max_requests=2, max_keys=4)
    assert book.book("r1", [A, A, B]) == [A, B]
    assert book.book("r1", [B, C]) == [C]
    assert book.booked("r1") == {A, B, C}
    book.book("r2", [A])
    assert len(book) == 2
    book.book("r3", [A])
    assert len(book) == 2
    assert book.booked("r1") == set()
    book.book("r3", [B, C, D, E])
    assert len(book) == 0
    book.forget("r3")
