"""The built-in workload."""

import itertools

from kvoffload.simulate.generator import ChatWorkload, generate_chats


def requests(seed=0, count=400, **shape):
    return list(itertools.islice(generate_chats(seed, ChatWorkload(**shape)), count))


def test_equal_seeds_give_equal_requests_and_others_do_not():
    assert requests(3) == requests(3)
    assert requests(3) != requests(4)


def test_requests_come_in_order_of_time():
    times = [request.arrival_seconds for request in requests()]
    assert times == sorted(times)


def test_each_request_has_one_id_per_begun_block():
    for request in requests(block_tokens=32):
        assert len(request.hash_ids) == -(-request.input_length // 32)
        assert len(set(request.hash_ids)) == len(request.hash_ids)


def test_an_id_always_stands_for_the_same_prefix():
    before = {}
    for request in requests():
        for previous, block in itertools.pairwise((None, *request.hash_ids)):
            assert before.setdefault(block, previous) == previous


def test_chats_grow_and_documents_never_come_back():
    shared = unshared = 0
    seen = set()
    for request in requests(count=1000):
        blocks = request.blocks(64)
        shared += sum(block in seen for block in blocks)
        unshared += sum(block not in seen for block in blocks)
        seen.update(blocks)
    assert 0.5 < shared / (shared + unshared) < 0.9
    documents = [block for r in requests(count=50, document_share=1.0) for block in r.blocks(64)]
    assert len(documents) == len(set(documents))
