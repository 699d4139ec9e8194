"""Names of blocks: the documented bytes, and whatever identifies a block is in its name."""

import array
import hashlib
import struct

import pytest

from kvoffload.errors import UsageError
from kvoffload.keys import chain_root, encode_extra, hash_blocks, make_offload_key

TOKENS = list(range(64))


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


def test_keys_hold_hash_and_group():
    key = make_offload_key(b"hash", 7)
    assert key == b"hash\0\0\0\x07"
    for wrong in (-1, 2**32):
        with pytest.raises(UsageError, match="0 to 4294967295"):
            make_offload_key(b"hash", wrong)
    with pytest.raises(UsageError, match="block_size"):
        hash_blocks(TOKENS, 0)
