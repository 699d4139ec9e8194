"""Per-block state as columns, and the index from key to block.

Theory of operation. A million objects, one a block, cost memory, cache misses and garbage collector time. Here a block
is a row number and each property a numpy column, so a batch of blocks is changed by a few array operations. The index
holds plain ints. None of it is visible to the garbage collector.

The index is cut into shards by the key's hash, none larger than about 16,000 keys: a dict that grows, or that was
churned until it must be rebuilt, is copied inside one insertion; with a million keys in one dict that takes tens of
milliseconds, with a shard less than one.

A key is in the index from the moment its block is reserved for it; whether the block can be read says `refs`.

A request looks its keys up, touches them, then loads them: `match` remembers the readable blocks that it found last,
and `recall` gives them to the next calls with the same keys, which look up only what comes behind. A block that can be
read keeps its key until `withdraw` or `clear`, and both forget what was remembered.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.errors import NoSpaceError
from kvoffload.keys import OffloadKey

Ids = npt.NDArray[np.int64]
NO_IDS: Ids = np.empty(0, np.int64)
SHARD_KEYS = 16_384
MAX_SHARD_BITS = 16

STATE_BYTES = 8 + 4 + 1 + 8 + 1 + 1
"""Bytes of all columns for one block."""

ABSENT = 0
"""`stamp` of a block that is in no order; a column of zeros costs nothing until it is used."""


def make_shards(num_keys: int) -> tuple[tuple[dict[OffloadKey, int], ...], int]:
    """Return empty shards for an index of `num_keys` keys, and the shift that leaves the shard's number of a hash.

    `shards[hash(key) >> shift]` is the one to ask; negative numbers count from the end.
    """
    bits = min((num_keys // SHARD_KEYS).bit_length(), MAX_SHARD_BITS)
    return tuple({} for _ in range(1 << bits)), sys.hash_info.width - bits


class BlockTable:
    """Columns and index of the blocks of one manager (or of one policy that is used without a manager).

    Attributes:
        num_blocks: Rows.
        shards: Keys to their block.
        shift: Of the shards, see `make_shards`.
        keys: Column: the key of a held block.
        refs: Column: -1 while it is written, else the number of loads that hold it.
        used: Column: whether it was loaded since it was stored.
        stamp: Column, of the policy: position in its order, 0 outside.
        parked: Column, of the policy: out of its log because it could not be evicted.
        num_parked: How many are.
        part: Column, of the policy: which of its lists.
        cells: `stamp`, `refs` and `parked` again, for single blocks: an element of a view costs a third of an array's.

    Raises:
        NoSpaceError: The columns do not fit into memory.
    """

    __slots__ = (
        "_recent", "_recent_ids", "_recent_once", "cells", "getters", "keys", "num_blocks", "num_parked", "parked",
        "part", "refs", "shards", "shift", "stamp", "used",
    )  # fmt: skip

    def __init__(self, num_blocks: int) -> None:
        self.shards, self.shift = make_shards(num_blocks)
        self.getters = tuple(shard.get for shard in self.shards)
        self._recent: list[OffloadKey] = []  # readable keys that `match` found last, and their blocks
        self._recent_ids: list[int] | Ids = NO_IDS  # an array once `recall` was asked
        self._recent_once = True  # whether `recall` has seen that no key comes twice
        self.num_blocks = num_blocks
        self.num_parked = 0
        try:
            self.keys: npt.NDArray[np.object_] = np.empty(num_blocks, object)
            self.refs: npt.NDArray[np.int32] = np.zeros(num_blocks, np.int32)
            self.used: npt.NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)
            self.stamp: npt.NDArray[np.int64] = np.zeros(num_blocks, np.int64)
            self.parked: npt.NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)
            self.part: npt.NDArray[np.uint8] = np.zeros(num_blocks, np.uint8)
        except (MemoryError, ValueError, OverflowError) as error:  # the last two from numpy, past what it can index
            message = f"the state of {num_blocks} blocks of host memory does not fit into memory: ask for fewer"
            raise NoSpaceError(message, requested_bytes=num_blocks * STATE_BYTES, available_bytes=0) from error
        self.cells = (self.stamp.data, self.refs.data, self.parked.data)

    def grow(self, num_blocks: int) -> None:
        """Add rows (for policies that are used without a manager)."""
        more = BlockTable(num_blocks - self.num_blocks)
        for column in ("keys", "refs", "used", "stamp", "parked", "part"):
            setattr(self, column, np.concatenate((getattr(self, column), getattr(more, column))))
        self.cells = (self.stamp.data, self.refs.data, self.parked.data)
        self.num_blocks = num_blocks

    # ---- index

    def match(self, keys: Sequence[OffloadKey], *, writing: bool) -> tuple[int, int]:
        """Return how many of `keys`, from the front, can be read, and how many are held; `recall` knows the former.

        Args:
            keys: In prefix order.
            writing: Whether any block is being written; if not, all that is held can be read.
        """
        getters, shift = self.getters, self.shift
        blocks: list[int] = []
        if len(getters) == 1:
            blocks = list(iter(map(getters[0], keys).__next__, None))
        else:
            for key in keys:
                block = getters[hash(key) >> shift](key)
                if block is None:
                    break
                blocks.append(block)
        held = ready = len(blocks)
        ids: list[int] | Ids = blocks
        if writing and held:
            ids = np.array(blocks, np.int64)
            written = self.refs[ids] < 0
            first = int(written.argmax())
            if written[first]:
                ready = first
                ids = ids[:ready]
        self._recent, self._recent_ids, self._recent_once = list(keys[:ready]), ids, False
        return ready, held

    def recall(self, keys: list[OffloadKey]) -> Ids:
        """Return blocks that the last `match` could read, those of the first of `keys`; the caller finds the others.

        There are none if its keys and these differ anywhere as far as both go, or if it was given a key twice; so no
        block comes twice. Do not modify.
        """
        recent = self._recent
        size = min(len(recent), len(keys))
        if (recent if len(recent) == size else recent[:size]) != (keys if len(keys) == size else keys[:size]):
            return NO_IDS
        if not self._recent_once:
            if len(set(recent)) != len(recent):
                self.forget_recent()
                return NO_IDS
            self._recent_once = True
            self._recent_ids = np.asarray(self._recent_ids, np.int64)
        return self._recent_ids[:size]  # type: ignore[return-value] # an array by now

    def forget_recent(self) -> None:
        """Forget what `match` found last: some of it may not be readable any more."""
        self._recent = []
        self._recent_ids = NO_IDS
        self._recent_once = True

    def find(self, keys: Iterable[OffloadKey]) -> list[Any]:
        """Return the block of each key, readable or being written, None for the others."""
        getters = self.getters
        if len(getters) == 1:
            return list(map(getters[0], keys))
        shift = self.shift
        return [getters[hash(key) >> shift](key) for key in keys]

    def get(self, key: OffloadKey) -> int | None:
        """Return the block of one key, readable or being written."""
        return self.shards[hash(key) >> self.shift].get(key)

    def enter(self, keys: Sequence[OffloadKey], blocks: Sequence[int]) -> None:
        """Put keys into the index."""
        shards, shift = self.shards, self.shift
        if len(shards) == 1:
            shards[0].update(zip(keys, blocks, strict=True))
            return
        for key, block in zip(keys, blocks, strict=True):
            shards[hash(key) >> shift][key] = block

    def withdraw(self, keys: Iterable[OffloadKey]) -> None:
        """Take keys out of the index."""
        self.forget_recent()
        shards, shift = self.shards, self.shift
        if len(shards) == 1:
            shard = shards[0]
            for key in keys:
                del shard[key]
            return
        for key in keys:
            del shards[hash(key) >> shift][key]

    def clear(self) -> None:
        """Forget all keys."""
        self.forget_recent()
        for shard in self.shards:
            shard.clear()
        self.stamp.fill(ABSENT)
        self.parked.fill(False)
        self.num_parked = 0
        self.part.fill(0)
        self.keys.fill(None)
