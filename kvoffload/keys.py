r"""Names of blocks: `OffloadKey`, `hash_blocks`, and `BlockInfo`, what an indexer must know of one.

Theory of operation. An *engine block* is `block_size` tokens. Its hash covers its tokens and everything before them, so
equal hashes mean equal prefixes. An *offloaded block* is `factor` engine blocks; its key is the hash of its **last**
engine block followed by the 4-byte KV-cache group index. Only full blocks have hashes; a tail has none.

The hash chain, byte for byte (`enc` is the canonical encoding of :func:`encode_extra`)::

    root     = sha256(b"kvoffload.chain.v1\0" + enc(lora_name) + enc(cache_salt))
    hash[i]  = sha256(parent + tokens[i] as little-endian uint32 each + enc(extra_keys[i]))
    parent   = the hash before; root for block 0
    a hash whose last 8 bytes are all zero gets 1 as its last byte: 0 is not a block hash on the events feed
"""

from __future__ import annotations

import array
import hashlib
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NewType, SupportsIndex

from kvoffload.errors import UsageError

OffloadKey = NewType("OffloadKey", bytes)
"""Block hash followed by the KV-cache group index, 4 bytes big-endian. Reference, chapter 1.1."""

BlockHash = NewType("BlockHash", bytes)
"""Hash of one engine block and all before it: 32 bytes from `hash_blocks`, or an engine's own bytes."""

_GROUP_BYTES = 4
_MAX_TOKEN = 0xFFFF_FFFF
_CHAIN_TAG = b"kvoffload.chain.v1\0"


def make_offload_key(block_hash: bytes, group_idx: int) -> OffloadKey:
    """Pack a block hash and a group index into an `OffloadKey`.

    Raises:
        UsageError: `group_idx` does not fit in an unsigned 32-bit integer, or `block_hash` is no bytes.
    """
    try:
        return OffloadKey(block_hash + group_idx.to_bytes(_GROUP_BYTES, "big"))
    except (TypeError, AttributeError, OverflowError):
        if not isinstance(block_hash, bytes):
            raise UsageError(f"block_hash must be bytes, such as one of hash_blocks(); got {block_hash!r}") from None
        if isinstance(group_idx, SupportsIndex) and 0 <= operator.index(group_idx) <= _MAX_TOKEN:  # numpy's, say
            return make_offload_key(block_hash, operator.index(group_idx))
        raise UsageError(f"group_idx must be a whole number of 0 to {_MAX_TOKEN}; got {group_idx!r}") from None


def get_offload_block_hash(key: OffloadKey) -> BlockHash:
    """Return the block hash inside `key`."""
    return BlockHash(key[:-_GROUP_BYTES])


def get_offload_group_idx(key: OffloadKey) -> int:
    """Return the KV-cache group index inside `key`."""
    return int.from_bytes(key[-_GROUP_BYTES:], "big")


def encode_extra(value: object) -> bytes:
    """Encode what else identifies a block (salt, LoRA name, multimodal hashes), the same in every process.

    `None` is `N`, a bool `T`/`F`, an int `I`, a float `D`, text `S`, bytes `B`, a tuple or list `L`; all but the first
    three carry a 4-byte big-endian length (of items for a list).

    Raises:
        UsageError: `value` holds a type that has no stable encoding.
    """
    if value is None:
        return b"N"
    if value is True:
        return b"T"
    if value is False:
        return b"F"
    if isinstance(value, int):
        return _framed(b"I", str(int(value)).encode())
    if isinstance(value, float):
        return _framed(b"D", value.hex().encode())
    if isinstance(value, str):
        return _framed(b"S", value.encode())
    if isinstance(value, bytes | bytearray | memoryview):
        return _framed(b"B", bytes(value))
    if isinstance(value, tuple | list):
        return b"L" + len(value).to_bytes(4, "big") + b"".join(encode_extra(item) for item in value)
    raise UsageError(f"extra_keys must hold None, bool, int, float, str, bytes or tuples of them; got {value!r}")


def _framed(tag: bytes, body: bytes) -> bytes:
    return tag + len(body).to_bytes(4, "big") + body


def chain_root(lora_name: str | None = None, cache_salt: str | bytes | None = None) -> BlockHash:
    """Return the parent of block 0: it keeps LoRA adapters and salted tenants apart."""
    return BlockHash(hashlib.sha256(_CHAIN_TAG + encode_extra(lora_name) + encode_extra(cache_salt)).digest())


def hash_blocks(
    token_ids: Sequence[int] | array.array[int],
    block_size: int,
    *,
    lora_name: str | None = None,
    cache_salt: str | bytes | None = None,
    extra_keys: Sequence[tuple[Any, ...] | None] | None = None,
    parent: bytes | None = None,
) -> list[BlockHash]:
    """Return the hash of each full block of `token_ids`; the format is in the module's docstring.

    Args:
        token_ids: Tokens of the whole sequence, or of its continuation when `parent` is given.
        block_size: Tokens in one block.
        lora_name: Adapter name; part of the root, so ignored when `parent` is given.
        cache_salt: Tenant salt; part of the root, so ignored when `parent` is given.
        extra_keys: Per block, what else identifies it (multimodal hashes); missing entries count as None.
        parent: Hash of the block before `token_ids[0]`.

    Raises:
        UsageError: `block_size` is not positive, or a token is not an integer in [0, 2**32).
    """
    if not isinstance(block_size, SupportsIndex) or operator.index(block_size) < 1:
        raise UsageError(f"block_size must be a positive whole number of tokens, such as 16; got {block_size!r}")
    if not isinstance(extra_keys, Sequence | None):
        raise UsageError(f"extra_keys must be a list with a tuple or None for each block; got {extra_keys!r}")
    raw = _token_bytes(token_ids)
    extras = extra_keys or ()
    step = 4 * block_size
    current = bytes(parent) if parent is not None else chain_root(lora_name, cache_salt)
    hashes: list[BlockHash] = []
    for index in range(len(raw) // step):
        extra = extras[index] if index < len(extras) else None
        current = hashlib.sha256(current + raw[index * step : (index + 1) * step] + encode_extra(extra)).digest()
        if not any(current[-8:]):
            current = current[:-1] + b"\x01"
        hashes.append(BlockHash(current))
    return hashes


def token_array(token_ids: Iterable[int]) -> array.array[int]:
    """Return the tokens as an array of unsigned ints, the argument itself if it is one."""
    if isinstance(token_ids, array.array) and token_ids.typecode == "I":
        return token_ids
    if isinstance(token_ids, bytes | bytearray):  # tokens of a byte-level model, not the memory of an array
        token_ids = list(token_ids)
    try:
        return array.array("I", token_ids)
    except (TypeError, OverflowError, ValueError) as error:
        raise UsageError(f"token_ids must be integers in [0, 2**32), got {_shown_tokens(token_ids)}: {error}") from None


def _shown_tokens(token_ids: object) -> str:
    """Return the first value that is no token, or the whole where it is no list."""
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, str):
        return repr(token_ids)[:80]
    wrong = (value for value in token_ids if not isinstance(value, int) or not 0 <= value <= _MAX_TOKEN)
    return repr(next(wrong, token_ids))[:80]


def _token_bytes(token_ids: Sequence[int] | array.array[int]) -> bytes:
    tokens = token_array(token_ids)
    if _BIG_ENDIAN:
        tokens = array.array("I", tokens)
        tokens.byteswap()
    return tokens.tobytes()


_BIG_ENDIAN = array.array("I", [1]).tobytes()[0] == 0


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """What an indexer must know to index one offloaded block by its tokens.

    Attributes:
        block_hashes: Hashes of its engine blocks, in order; the last one names the offloaded block.
        parent_hash: Hash of the engine block before the first one; None for the first of a sequence.
        token_ids: Tokens of all its engine blocks: `len(block_hashes) * block_size` of them.
        block_size: Tokens in one *engine* block.
        lora_name: Adapter name.
        extra_keys: Per engine block what else went into its hash (LoRA name, multimodal hashes, salt); None: nothing.
        salted: A cache salt went into the chain: without `extra_keys` such a block is never announced.
        kind: KV cache spec kind of its group, as vLLM names it.
        sliding_window: Window in tokens, for sliding-window groups.
    """

    block_hashes: tuple[bytes, ...]
    parent_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_name: str | None = None
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    salted: bool = False
    kind: str = "full_attention"
    sliding_window: int | None = None
