"""Chains: the same keys in every process, and the same however a sequence grows."""

import array
import itertools
import pickle
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload.chain import BlockChain, GroupLayout
from kvoffload.errors import UsageError
from kvoffload.keys import get_offload_block_hash, get_offload_group_idx, hash_blocks

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
