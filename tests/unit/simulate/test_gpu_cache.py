"""The simulated GPU prefix cache."""

from kvoffload.simulate.gpu_cache import GpuPrefixCache

A, B, C, D = b"a", b"b", b"c", b"d"


def served(cache, *contents):
    table = cache.acquire(contents)
    for block, content in zip(table.blocks, contents, strict=True):
        cache.commit(block, content)
    return table


def test_a_later_request_shares_the_longest_prefix():
    cache = GpuPrefixCache(6, reuse=True)
    first = served(cache, A, B, C)
    second = cache.acquire((A, B, D))
    assert (second.cached, second.blocks[:2]) == (2, first.blocks[:2])
    assert cache.in_use == 4


def test_without_reuse_nothing_is_found():
    cache = GpuPrefixCache(6, reuse=False)
    cache.release(served(cache, A, B).blocks)
    assert cache.acquire((A, B)).cached == 0


def test_no_room_changes_nothing():
    cache = GpuPrefixCache(4, reuse=True)
    first = served(cache, A, B)
    assert cache.acquire((A, B, C, D, b"e")) is None
    assert cache.in_use == 2
    cache.release(first.blocks)
    assert cache.in_use == 0
    assert cache.acquire((A, B, C, D)).cached == 2


def test_held_blocks_are_never_given_away_and_idle_tails_go_first():
    cache = GpuPrefixCache(4, reuse=True)
    held = served(cache, A)
    cache.release(served(cache, B, C).blocks)
    served(cache, D, b"e")
    assert cache.acquire((A,)).blocks == held.blocks
    assert cache.acquire((B,)).cached == 1


def test_a_block_shared_by_two_requests_is_idle_after_both():
    cache = GpuPrefixCache(2, reuse=True)
    first, second = served(cache, A), cache.acquire((A,))
    cache.release(first.blocks)
    assert cache.in_use == 1
    cache.release(second.blocks)
    assert cache.in_use == 0


def test_uncommitted_content_is_not_kept():
    cache = GpuPrefixCache(2, reuse=True)
    table = cache.acquire((A, B))
    cache.commit(table.blocks[0], A)
    cache.release(table.blocks)
    assert cache.acquire((A, B)).cached == 1
