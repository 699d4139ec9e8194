"""What several feeds merged into one hold, when one of them is cleared."""

from feedkit import BLOCK, Reader, apply, chain, names, publisher, stored, wait_for

from kvoffload.events.merge import MergeReader
from kvoffload.events.wire import BlockRemoved, BlockStored


def follow(reader: Reader, index: set, expected: set) -> None:
    """Read until the index is as expected, and see that it stays so."""

    def equal() -> bool:
        while not reader.silent(0.05):
            apply(index, reader.next()[2])
        return index == expected

    wait_for(equal)


def merging(*engines, **options):
    return publisher(
        merge_from=[engine.endpoints[0] for engine in engines],
        merge_replay_from=[engine.replay_endpoints[0] for engine in engines],
        **options,
    )


def test_a_clear_of_one_merged_engine_leaves_what_the_others_hold():
    """Both engines hold blocks on the GPU, one of them also in host memory, and so does the cache itself."""
    own, first, second = chain(1, 3), chain(2, 3), chain(3, 3)
    with publisher() as one, publisher() as two, merging(one, two) as feed, Reader(feed) as reader:
        index: set = set()
        one.gpu_stored(first, 0, 3)
        one.publish(*stored(first))
        two.gpu_stored(second, 0, 3)
        feed.publish(*stored(own))
        everything = names(first, medium="GPU") | names(first) | names(second, medium="GPU") | names(own)
        follow(reader, index, everything)
        one.gpu_cleared()
        follow(reader, index, everything - names(first, medium="GPU"))


def test_a_removal_before_a_clear_is_not_removed_twice():
    own, first, second = chain(1, 3), chain(2, 3), chain(3, 3)
    with publisher() as one, publisher() as two, merging(one, two) as feed, Reader(feed) as reader:
        index: set = set()
        one.gpu_stored(first, 0, 3)
        two.gpu_stored(first, 0, 3)
        two.gpu_stored(second, 0, 3)
        feed.publish(*stored(own))
        follow(reader, index, names(first, medium="GPU") | names(second, medium="GPU") | names(own))
        two.gpu_removed(first.block_hashes()[2:3])
        two.gpu_removed(second.block_hashes()[2:3])
        follow(reader, index, names(first, medium="GPU") | names(second, 0, 2, medium="GPU") | names(own))
        two.gpu_cleared()
        follow(reader, index, names(first, medium="GPU") | names(own))


def test_an_engine_that_removes_what_it_never_told_takes_nothing_from_another():
    blocks = chain(1, 2)
    hashes = [int.from_bytes(name[-8:], "big") for name in blocks.block_hashes()]
    with publisher() as feed:
        first = MergeReader("tcp://127.0.0.1:1", None, feed._intake.command, alone=False)
        second = MergeReader("tcp://127.0.0.1:2", None, feed._intake.command, alone=False)
        second._take(BlockStored(list(hashes), None, list(blocks.token_ids), BLOCK, None, "GPU", None))
        first._take(BlockRemoved(list(hashes), "GPU"))
        assert feed.flush()
        assert len(feed.lanes[0].journal) == 2
        second._take(BlockRemoved(list(hashes), "GPU"))
        assert feed.flush()
        assert len(feed.lanes[0].journal) == 0


def test_the_only_merged_engine_clears_its_tier_and_what_the_cache_holds_is_told_again():
    own, first = chain(1, 3), chain(2, 3)
    with publisher() as one, merging(one) as feed, Reader(feed) as reader:
        index: set = set()
        one.gpu_stored(first, 0, 3)
        feed.publish(*stored(own))
        follow(reader, index, names(first, medium="GPU") | names(own))
        one.gpu_cleared()
        follow(reader, index, names(own))
