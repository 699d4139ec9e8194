"""The clairvoyant bound on sequences small enough to check by hand."""

from itertools import combinations

from kvoffload.simulate.belady import NEVER, BeladyCache, next_uses


def serve_all(lists, capacity):
    cache, hits = BeladyCache(capacity), 0
    for keys, uses in zip(lists, next_uses(lists), strict=True):
        hits += cache.held(keys)[0]
        cache.serve(keys, uses)
        assert len(cache) <= capacity
    return hits, cache


def best_hits(lists, capacity, held=frozenset()):
    """Return the most prefix hits that any choice of what to keep can reach."""
    if not lists:
        return 0
    keys, rest = lists[0], lists[1:]
    hits = next((i for i, key in enumerate(keys) if key not in held), len(keys))
    pool = sorted(held | set(keys))
    choices = [frozenset(kept) for size in range(min(capacity, len(pool)) + 1) for kept in combinations(pool, size)]
    return hits + max(best_hits(rest, capacity, kept) for kept in choices)


def test_next_uses_name_the_next_request_that_asks():
    assert next_uses([[b"a", b"b"], [b"a"], [b"a", b"b"]]) == [[1, 2], [2], [NEVER, NEVER]]


def test_what_is_never_asked_for_again_is_never_stored():
    hits, cache = serve_all([[b"a", b"b"], [b"c"], [b"a"]], 1)
    assert (hits, cache.stored, cache.evicted) == (1, 1, 1)


def test_hits_equal_the_best_of_all_choices():
    chats = [[b"a", b"b"], [b"a", b"c"], [b"d"], [b"a", b"b"], [b"d"], [b"a", b"c"]]
    for capacity in (1, 2, 3):
        assert serve_all(chats, capacity)[0] == best_hits(chats, capacity)
