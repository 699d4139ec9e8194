"""The fast path of plain blocks gives the very bytes and the very journal of the general one."""

from __future__ import annotations

import pytest
from feedkit import BLOCK, chain

from kvoffload.events.journal import Journal
from kvoffload.events.residency import Residency
from kvoffload.events.wire import Codec
from kvoffload.keys import BlockInfo, make_offload_key


def world(encoding):
    journal = Journal(Codec(encoding), clock=lambda: 1.0)
    return journal, Residency(journal)


@pytest.mark.parametrize("encoding", ["map", "array"])
@pytest.mark.parametrize("options", [{}, {"lora_name": "adapter"}, {"cache_salt": "tenant"}])
def test_stores_at_once_equal_stores_one_by_one_byte_for_byte(encoding, options):
    blocks = [chain(1, 6, **options), chain(2, 3, **options)]
    infos = {key: c.info(i) for c in blocks for i, key in enumerate(c.keys())}
    keys = list(infos)
    (fast, fast_residency), (slow, slow_residency) = world(encoding), world(encoding)
    fast_residency.store_all(keys, "CPU", infos)
    for key in keys:
        slow_residency.store(key, "CPU", infos[key])
    fast.seal()
    slow.seal()
    assert fast.take_sealed() == slow.take_sealed()
    assert fast.announced() == slow.announced()
    assert fast.encoded_events() == slow.encoded_events()


@pytest.mark.parametrize("name", [0, 1, 5, 2**32 - 1, 2**32, 2**63 + 5])
def test_small_and_zero_hashes_take_the_same_form_on_both_ways(name):
    block_hash = bytes(24) + name.to_bytes(8, "big")
    key = make_offload_key(block_hash, 0)
    info = BlockInfo((block_hash,), None, tuple(range(BLOCK)), BLOCK)
    (fast, fast_residency), (slow, slow_residency) = world("map"), world("map")
    fast_residency.store_all([key], "CPU", {key: info})
    fast_residency.remove(key, "CPU")
    fast_residency.store_all([key], "CPU", {key: info})
    slow_residency.store(key, "CPU", info)
    slow_residency.remove(key, "CPU")
    slow_residency.store(key, "CPU", info)
    fast.seal()
    slow.seal()
    assert fast.take_sealed() == slow.take_sealed()
    assert fast.announced() == {("CPU", 0, name or 1)}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token_ids": (1, 2)}, "malformed"),
        ({"token_ids": tuple([2**70] * BLOCK)}, "unencodable"),
        ({"block_hashes": (b"other" * 6,)}, "malformed"),
        ({"block_size": 0}, "malformed"),
        ({"parent_hash": b"p" * 32}, "orphan"),
        ({"salted": True}, "salted"),
        ({"extra_keys": ((object(),),)}, "unencodable"),
        ({"lora_name": object()}, "unencodable"),
    ],
)
def test_what_cannot_be_announced_is_withheld_on_the_fast_way_too(changes, reason):
    from dataclasses import replace

    c = chain(1, 1)
    key = c.keys()[0]
    journal, residency = world("map")
    residency.store_all([key], "CPU", {key: c.info(0)})
    residency.remove(key, "CPU")
    residency.store_all([key], "CPU", {key: replace(c.info(0), **changes)})
    assert residency.withheld.sizes()[reason] == 1
    assert journal.announced() == set()
