"""Names of blocks: the same in every process, and the same however a sequence grows."""

import array
import hashlib
import itertools
import pickle
import struct
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload.chain import BlockChain, GroupLayout
from kvoffload.errors import UsageError
from kvoffload.keys import (
    chain_root,
    encode_extra,
    get_offload_block_hash,
    get_offload_group_idx,
    hash_blocks,
    make_offload_key,
)

TOKENS = list(range(64))


def test_two_processes_derive_the_same_keys():
    """A-C5."""
    code = (
        "from kvoffload.chain import BlockChain, GroupLayout\n"
        "chain = BlockChain([GroupLayout(16)], range(64), extra_keys=[None, ('image', 7), None])\n"
        "print([bytes(key).hex() for key in chain.keys(0)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PATH": "", "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    here = BlockChain([GroupLayout(16)], TOKENS, extra_keys=[None, ("image", 7), None])
    assert outputs.pop().strip() == repr([bytes(key).hex() for key in here.keys(0)])


def test_the_hash_chain_is_what_the_module_documents():
    """The documented format, written down a second time."""
    parent = hashlib.sha256(b"kvoffload.chain.v1\0" + b"S\0\0\0\x04lora" + b"N").digest()
    expected = []
    for begin in range(0, 64, 16):
        tokens = struct.pack("<16I", *TOKENS[begin : begin + 16])
        extra = b"L\0\0\0\x01S\0\0\0\x01x" if begin == 16 else b"N"
        parent = hashlib.sha256(parent + tokens + extra).digest()
        expected.append(parent)
    assert hash_blocks(TOKENS, 16, lora_name="lora", extra_keys=[None, ("x",)]) == expected


def test_golden_vector_of_a_plain_chain():
    assert chain_root().hex() == "4206872f5deb290cc02457361e491604296f1a92bb5586f4c7be28b7b85ba4bb"
    assert [value.hex() for value in hash_blocks(TOKENS, 32)] == [
        "e25976f2adabd5471c6b28ac1a724224dd153af3934e5a2d2503a757efb82cf4",
        "7b49f99039791d89f43d27d8c2fa0679cd7ccea909522a776cbc64cade5d24b9",
    ]


def test_absent_and_missing_extra_keys_are_one_thing():
    """A-C5."""
    assert (
        hash_blocks(TOKENS, 16)
        == hash_blocks(TOKENS, 16, extra_keys=[None] * 4)
        == hash_blocks(array.array("I", TOKENS), 16)
    )


@pytest.mark.parametrize(
    "changes", [{"lora_name": "a"}, {"cache_salt": "a"}, {"cache_salt": b"a"}, {"extra_keys": [("a",)]}]
)
def test_whatever_identifies_a_block_changes_all_hashes_after_it(changes):
    assert not set(hash_blocks(TOKENS, 16)) & set(hash_blocks(TOKENS, 16, **changes))


def test_values_of_different_types_never_encode_alike():
    values = [None, True, False, 0, 1, "1", b"1", 1.0, (), ("1",), (b"1",), ((),), -1, "", b""]
    assert len({encode_extra(value) for value in values}) == len(values)
    with pytest.raises(UsageError, match="object"):
        encode_extra(object())


@settings(deadline=None)  # the claim is about keys, not about the speed of a loaded machine
@given(st.lists(st.integers(0, 2**32 - 1), max_size=70), st.lists(st.integers(0, 70), max_size=5), st.integers(1, 3))
def test_a_chain_grown_in_pieces_equals_one_made_at_once(tokens, cuts, factor):
    groups = [GroupLayout(4, factor), GroupLayout(8, factor)]
    whole = BlockChain(groups, tokens)
    grown, completed = BlockChain(groups), []
    points = sorted({min(cut, len(tokens)) for cut in cuts} | {0, len(tokens)})
    for begin, end in itertools.pairwise(points):
        completed += grown.extend(tokens[begin:end])
    assert completed == list(range(len(tokens) // 4))
    for group in (0, 1):
        assert list(grown.keys(group)) == list(whole.keys(group))
    assert grown.num_tokens == len(tokens)


def test_an_offloaded_block_is_named_by_its_last_engine_block():
    hashes = hash_blocks(TOKENS, 8)
    chain = BlockChain([GroupLayout(8, 3)], TOKENS)
    assert [get_offload_block_hash(key) for key in chain.keys(0)] == [hashes[2], hashes[5]]
    info = chain.info(1)
    assert (info.block_hashes, info.parent_hash) == (tuple(hashes[3:6]), hashes[2])
    assert info.token_ids == tuple(TOKENS[24:48])
    assert chain.info(2) is None


def test_groups_are_told_apart_by_their_index_alone():
    chain = BlockChain([GroupLayout(16), GroupLayout(16)], TOKENS)
    for first, second in zip(chain.keys(0), chain.keys(1), strict=True):
        assert get_offload_block_hash(first) == get_offload_block_hash(second)
        assert (get_offload_group_idx(first), get_offload_group_idx(second)) == (0, 1)


def test_a_groups_larger_block_is_named_by_its_last_hash_block():
    chain = BlockChain([GroupLayout(16), GroupLayout(32)], TOKENS)
    assert chain.block_hashes(1) == chain.block_hashes(0)[1::2]
    assert chain.num_blocks_of(1) == 2


def test_an_engines_own_hashes_are_taken_as_they_are():
    hashes = [bytes([number]) * 8 for number in range(1, 5)]
    chain = BlockChain([GroupLayout(16, 2)], block_hashes=hashes[:3])
    assert [get_offload_block_hash(key) for key in chain.keys(0)] == [hashes[1]]
    assert chain.num_tokens == 48
    assert chain.extend([], block_hashes=hashes[3:]) == range(3, 4)
    assert len(chain.keys()) == 2
    assert chain.info(0) is None


def test_a_chain_survives_pickling_and_goes_on():
    chain = BlockChain([GroupLayout(16)], TOKENS[:20], cache_salt="tenant")
    copy = pickle.loads(pickle.dumps(chain))
    copy.extend(TOKENS[20:])
    chain.extend(TOKENS[20:])
    assert list(copy.keys()) == list(chain.keys())


def test_extra_keys_given_with_later_tokens_name_the_later_blocks():
    whole = BlockChain([GroupLayout(16)], TOKENS, extra_keys=[None, None, ("image", 7), ("image", 8)])
    grown = BlockChain([GroupLayout(16)], TOKENS[:40])
    grown.extend(TOKENS[40:], extra_keys=[("image", 7), ("image", 8)])
    assert grown.keys() == whole.keys()
    assert grown.info(2).extra_keys == (("image", 7),)
    assert grown.keys() != BlockChain([GroupLayout(16)], TOKENS).keys()


@pytest.mark.parametrize("tokens", [array.array("q", TOKENS), array.array("H", TOKENS), bytes(TOKENS), iter(TOKENS)])
def test_tokens_are_numbers_whatever_holds_them(tokens):
    assert BlockChain([GroupLayout(16)], tokens).keys() == BlockChain([GroupLayout(16)], TOKENS).keys()


def test_the_salt_is_an_extra_key_of_the_first_block_only():
    chain = BlockChain([GroupLayout(16)], TOKENS, lora_name="adapter", cache_salt="tenant", extra_keys=[None, (7,)])
    first, second = chain.info(0), chain.info(1)
    assert (first.extra_keys, first.salted) == ((("adapter", "tenant"),), True)
    assert (second.extra_keys, second.salted) == ((("adapter", 7),), False)


def test_mistakes_change_nothing():
    chain = BlockChain([GroupLayout(16)], TOKENS)
    before = list(chain.keys())
    for call in (
        lambda: chain.extend([-1]),
        lambda: chain.extend([2**32]),
        lambda: chain.extend(["a"]),
        lambda: chain.extend([1], block_hashes=[b"x"]),
        lambda: chain.extend(range(16), extra_keys=[(object(),)]),
        lambda: chain.extend(range(16), extra_keys=["image"]),
    ):
        with pytest.raises(UsageError):
            call()
    assert (list(chain.keys()), chain.num_tokens) == (before, 64)
    given_hashes = BlockChain([GroupLayout(16)], block_hashes=[b"x"])
    with pytest.raises(UsageError, match="non-empty bytes"):
        given_hashes.extend([], block_hashes=[b"y", b""])
    assert len(given_hashes.keys()) == 1


@pytest.mark.parametrize("groups", [[], [GroupLayout(0)], [GroupLayout(16, 0)], [GroupLayout(16), GroupLayout(24)]])
def test_groups_that_cannot_be_cut_are_refused(groups):
    with pytest.raises(UsageError):
        BlockChain(groups)


def test_keys_hold_hash_and_group():
    key = make_offload_key(b"hash", 7)
    assert key == b"hash\0\0\0\x07"
    for wrong in (-1, 2**32):
        with pytest.raises(UsageError, match="0 to 4294967295"):
            make_offload_key(b"hash", wrong)
    with pytest.raises(UsageError, match="block_size"):
        hash_blocks(TOKENS, 0)
