"""`BlockChain`: one sequence cut in blocks, from tokens to keys; `kvoffload.keys` says how blocks are named."""

from __future__ import annotations

import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvoffload.errors import UsageError
from kvoffload.keys import (
    BlockHash,
    BlockInfo,
    OffloadKey,
    chain_root,
    encode_extra,
    hash_blocks,
    make_offload_key,
    token_array,
)


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """How one KV-cache group cuts a sequence: tokens per engine block, and engine blocks per offloaded block."""

    block_size: int
    factor: int = 1
    kind: str = "full_attention"
    sliding_window: int | None = None


class BlockChain:
    """Token ids of one sequence, cut in engine blocks, with their keys, parents and `BlockInfo`.

    Append-only, pure and picklable; derived once, so the lists of one sequence cannot disagree. Counts are engine
    blocks of group 0 unless a group is named. With `block_hashes` the engine's own hashes are taken (one for each
    `hash_block_size` tokens, where that is the smallest block size of all groups) and nothing is hashed here.

    Args:
        groups: Layout per KV-cache group; every block size must be a multiple of the smallest.
        token_ids: First tokens; more come with `extend`.
        lora_name: Adapter name, part of every hash.
        cache_salt: Tenant salt, part of every hash.
        extra_keys: Per hash block, what else identifies it (multimodal hashes).
        block_hashes: The engine's own hash per hash block, instead of ours.

    Raises:
        UsageError: Groups that cannot be aligned, tokens out of range, or a hash that is no bytes.
    """

    __slots__ = (
        "_extra", "_given", "_group_keys", "_hashes", "_root", "_tokens", "cache_salt", "groups", "hash_block_size",
        "lora_name",
    )  # fmt: skip

    def __init__(
        self,
        groups: Sequence[GroupLayout],
        token_ids: Iterable[int] = (),
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        extra_keys: Sequence[tuple[Any, ...] | None] | None = None,
        block_hashes: Sequence[bytes] | None = None,
    ) -> None:
        if (
            not isinstance(groups, Sequence)
            or not groups
            or not all(isinstance(group, GroupLayout) for group in groups)
        ):
            raise UsageError(f"groups must hold at least one GroupLayout, such as GroupLayout(16); got {groups!r}")
        self.groups = tuple(groups)
        self.hash_block_size = min(group.block_size for group in self.groups)
        for group in self.groups:
            if group.factor < 1 or group.block_size < 1 or group.block_size % self.hash_block_size:
                raise UsageError(
                    f"block_size must be a positive multiple of the smallest group's, {self.hash_block_size}, and "
                    f"factor at least 1; got {group}"
                )
        self.lora_name = lora_name
        self.cache_salt = cache_salt
        self._extra: list[tuple[Any, ...] | None] = []
        self._root = chain_root(lora_name, cache_salt)
        self._tokens: array.array[int] = array.array("I")
        self._hashes: list[BlockHash] = []
        self._given = block_hashes is not None
        self._group_keys: list[list[OffloadKey]] = [[] for _ in self.groups]
        self.extend(token_ids, block_hashes=block_hashes, extra_keys=extra_keys)

    def extend(
        self,
        token_ids: Iterable[int],
        *,
        block_hashes: Sequence[bytes] | None = None,
        extra_keys: Sequence[tuple[Any, ...] | None] | None = None,
    ) -> range:
        """Append tokens; return the indices of the engine blocks (group 0) that this call completed.

        Args:
            token_ids: Next tokens of the sequence.
            block_hashes: Next hashes, for a chain made with the engine's own.
            extra_keys: Extra keys of the next hash blocks, from the first on that was neither complete nor given any.

        Raises:
            UsageError: Tokens out of range, extra keys that are no tuples or cannot be encoded, a hash that is no
                bytes, hashes for a chain that hashes itself, or the reverse. The chain is unchanged.
        """
        fresh = token_array(token_ids)
        for name, values in (("block_hashes", block_hashes), ("extra_keys", extra_keys)):
            if values is not None and not isinstance(values, Iterable):
                raise UsageError(f"{name} must be a list with an item for each hash block; got {values!r}")
        if block_hashes is not None and not self._given:
            raise UsageError(
                "this chain hashes its tokens itself: leave block_hashes out, or give them from the first token on"
            )
        done, before = len(self._hashes), self.num_blocks
        extra = self._extra if extra_keys is None else self._extra_with(extra_keys)
        hashes: list[BlockHash] = []
        if self._given:
            hashes = [self._checked_hash(value) for value in block_hashes or ()]
        else:
            tail = self._tokens[done * self.hash_block_size :]
            tail.extend(fresh)
            if len(tail) >= self.hash_block_size:
                parent = self._hashes[-1] if done else self._root
                hashes = hash_blocks(tail, self.hash_block_size, extra_keys=extra[done:], parent=parent)
        self._extra = extra
        self._tokens.extend(fresh)
        self._hashes += hashes
        self._grow_keys()
        return range(before, self.num_blocks)

    def _extra_with(self, extra_keys: Sequence[tuple[Any, ...] | None]) -> list[tuple[Any, ...] | None]:
        """Return the extra keys per hash block once those of the next blocks are there."""
        added = list(extra_keys)
        wrong = next((item for item in added if item is not None and not isinstance(item, tuple | list)), None)
        if wrong is not None:
            raise UsageError(f"extra_keys must hold a tuple or None for each hash block; got {wrong!r}")
        encode_extra(added)
        return self._extra + [None] * (len(self._hashes) - len(self._extra)) + added

    @staticmethod
    def _checked_hash(value: bytes) -> BlockHash:
        if not isinstance(value, bytes) or not value:
            raise UsageError(f"block_hashes must hold non-empty bytes, one for each full block; got {value!r}")
        return BlockHash(value)

    def _grow_keys(self) -> None:
        for group_idx, (group, keys) in enumerate(zip(self.groups, self._group_keys, strict=True)):
            per_key = group.factor * (group.block_size // self.hash_block_size)
            for index in range(len(keys), len(self._hashes) // per_key):
                keys.append(make_offload_key(self._hashes[(index + 1) * per_key - 1], group_idx))

    def __repr__(self) -> str:
        return f"<BlockChain, {self.num_tokens} tokens, {len(self.groups)} groups>"

    @property
    def num_tokens(self) -> int:
        """Tokens so far, the unfinished tail included; what the hashes cover when no tokens were given."""
        return max(len(self._tokens), len(self._hashes) * self.hash_block_size)

    @property
    def num_blocks(self) -> int:
        """Full engine blocks of group 0."""
        return self.num_blocks_of(0)

    def num_blocks_of(self, group_idx: int) -> int:
        """Return the number of full engine blocks of one group."""
        return len(self._hashes) * self.hash_block_size // self.groups[group_idx].block_size

    @property
    def token_ids(self) -> Sequence[int]:
        """Tokens so far (empty for a chain made of hashes alone)."""
        return self._tokens

    def keys(self, group_idx: int = 0) -> Sequence[OffloadKey]:
        """Return the keys of all full *offloaded* blocks of one group, in order. Do not modify.

        Raises:
            UsageError: There is no such group.
        """
        try:
            return self._group_keys[group_idx]
        except (IndexError, TypeError):
            last = len(self.groups) - 1
            raise UsageError(f"group_idx must be a group of this chain, 0 to {last}; got {group_idx!r}") from None

    def block_hashes(self, group_idx: int = 0) -> list[BlockHash]:
        """Return the hash of each full engine block of one group."""
        step = self.groups[group_idx].block_size // self.hash_block_size
        return self._hashes[step - 1 :: step]

    def info(self, index: int, group_idx: int = 0) -> BlockInfo | None:
        """Return what describes offloaded block `index` of a group; None when the chain has no tokens for it."""
        group = self.groups[group_idx]
        step = group.block_size // self.hash_block_size
        first, count = index * group.factor, group.factor
        tokens = self._tokens[first * group.block_size : (first + count) * group.block_size]
        if not 0 <= index < len(self._group_keys[group_idx]) or len(tokens) < count * group.block_size:
            return None
        hashes = self._hashes
        extras = tuple(self._extra_of(block, step) for block in range(first, first + count))
        return BlockInfo(
            block_hashes=tuple(hashes[(block + 1) * step - 1] for block in range(first, first + count)),
            parent_hash=hashes[first * step - 1] if first else None,
            token_ids=tuple(tokens),
            block_size=group.block_size,
            lora_name=self.lora_name,
            extra_keys=extras if any(extra is not None for extra in extras) else None,
            salted=self.cache_salt is not None and first == 0,
            kind=group.kind,
            sliding_window=group.sliding_window,
        )

    def extra_keys_of(self, block: int, group_idx: int = 0) -> tuple[Any, ...] | None:
        """Return the extra keys of one engine block of a group, in vLLM's order; None when it has none."""
        return self._extra_of(block, self.groups[group_idx].block_size // self.hash_block_size)

    def _extra_of(self, block: int, step: int) -> tuple[Any, ...] | None:
        """Return the extra keys of one engine block in vLLM's order: adapter, multimodal, salt (first block only)."""
        parts: list[Any] = [self.lora_name] if self.lora_name is not None else []
        for extra in self._extra[block * step : (block + 1) * step]:
            parts.extend(extra or ())
        if block == 0 and self.cache_salt is not None:
            parts.append(self.cache_salt)
        return tuple(parts) or None
