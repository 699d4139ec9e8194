"""Token and block arithmetic of one model: groups, offloaded blocks, bytes.

Lengths that all groups agree on are tokens. A *span* is the tokens of one offloaded block of a group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

from kvoffload.chain import GroupLayout
from kvoffload.config import OffloadConfig
from kvoffload.errors import UsageError
from kvoffload.keys import OffloadKey
from kvoffload.manager.specs import GPULoadStoreSpec

Tables = Sequence[Sequence[int]]
"""GPU block ids per group."""


class BlockGeometry:
    """How sequences are cut into blocks, per KV-cache group.

    Args:
        groups: Layout of each group.
        block_bytes: Bytes of one engine block of each group, over all its layers.
        num_gpu_blocks: GPU blocks per tensor; ids must be below; None when unknown.
    """

    def __init__(
        self, groups: Sequence[GroupLayout], block_bytes: Sequence[int], num_gpu_blocks: int | None = None
    ) -> None:
        self.groups = tuple(groups)
        self.block_bytes = tuple(block_bytes)
        self.num_gpu_blocks = num_gpu_blocks
        self.align_tokens = math.lcm(*(group.block_size for group in self.groups))
        self.spans = tuple(group.block_size * group.factor for group in self.groups)

    @classmethod
    def of(
        cls, config: OffloadConfig, group_page_sizes: Sequence[Sequence[int]], num_gpu_blocks: int, num_ranks: int = 1
    ) -> Self:
        """Return the geometry of KV caches under a configuration; one configured block size serves all groups.

        Args:
            config: Block sizes.
            group_page_sizes: Bytes of a page of each layer, per group, on one rank.
            num_gpu_blocks: GPU blocks per tensor.
            num_ranks: Ranks that each hold such pages.

        Raises:
            UsageError: The configuration names another number of groups than the KV caches have.
        """
        groups, num_groups = config.group_layouts(), len(group_page_sizes)
        if len(groups) == 1:
            groups *= num_groups
        if len(groups) != num_groups:
            raise UsageError(
                f"gpu_block_size names {len(groups)} groups, the KV caches have {num_groups}: give one size for each"
            )
        return cls(groups, [sum(pages) * num_ranks for pages in group_page_sizes], num_gpu_blocks)

    @property
    def block_size(self) -> int:
        """Tokens in an engine block of group 0."""
        return self.groups[0].block_size

    def cut(self, tokens: int) -> int:
        """Return `tokens` rounded down to whole engine blocks of every group."""
        return tokens - tokens % self.align_tokens

    def tables(self, gpu_blocks: Sequence[int] | Tables) -> Tables:
        """Return one table per group; a flat list serves a model with one group.

        Raises:
            UsageError: They are no sequences, or the number of tables is not the number of groups.
        """
        if not isinstance(gpu_blocks, Sequence) or isinstance(gpu_blocks, str | bytes):
            kind = type(gpu_blocks).__name__
            raise UsageError(f"a block table is a list of block ids, or one such list for each group; got {kind}")
        if len(self.groups) == 1 and (not gpu_blocks or not isinstance(gpu_blocks[0], Sequence)):
            return [gpu_blocks]  # type: ignore[list-item]  # narrowed by hand: a flat table
        if len(gpu_blocks) != len(self.groups):
            raise UsageError(f"expected a block table for each of {len(self.groups)} groups, got {len(gpu_blocks)}")
        return gpu_blocks  # type: ignore[return-value]  # a table per group

    def split(self, spec: GPULoadStoreSpec) -> tuple[Tables, list[int]]:
        """Return the block table of each group of `spec` and the token at which each starts.

        Raises:
            UsageError: It names no GPU blocks, or has another number of groups.
        """
        if not isinstance(spec, GPULoadStoreSpec):
            raise UsageError(f"GPU blocks are named by a GPULoadStoreSpec, got {spec!r}")
        if len(spec.group_sizes) != len(self.groups):
            raise UsageError(
                f"group_sizes must be one count for each of {len(self.groups)} groups; got {list(spec.group_sizes)}"
            )
        tables, starts, at = [], [], 0
        ids = spec.block_ids.tolist()
        for size, index, group in zip(spec.group_sizes, spec.block_indices, self.groups, strict=True):
            tables.append(ids[at : at + size])
            starts.append(index * group.block_size)
            at += size
        return tables, starts

    def common_start(self, tables: Tables, starts: Sequence[int]) -> int:
        """Return the token at which every non-empty group starts.

        Raises:
            UsageError: The groups do not start at the same token.
        """
        used = {start for table, start in zip(tables, starts, strict=True) if table}
        if len(used) > 1:
            raise UsageError(f"block_indices must start all groups at one token; got tokens {sorted(used)}")
        return used.pop() if used else 0

    def key_range(self, group_idx: int, first_token: int, end_token: int) -> range:
        """Return the offloaded blocks of a group that tokens `[first_token, end_token)` touch."""
        span = self.spans[group_idx]
        return range(first_token // span, -(-end_token // span))

    def keys(self, per_group: Sequence[Sequence[OffloadKey]], first_token: int, end_token: int) -> list[OffloadKey]:
        """Return the keys that tokens `[first_token, end_token)` touch, group after group."""
        keys: list[OffloadKey] = []
        for group_idx, group_keys in enumerate(per_group):
            wanted = self.key_range(group_idx, first_token, end_token)
            keys += group_keys[wanted.start : wanted.stop]
        return keys

    def spec(self, tables: Tables, first_token: int, end_token: int) -> GPULoadStoreSpec:
        """Return the GPU side of a transfer of tokens `[first_token, end_token)`.

        Args:
            tables: Per group, the GPU blocks from `first_token` on.
            first_token: Multiple of every engine block size.
            end_token: Multiple of every engine block size.
        """
        ids: list[int] = []
        sizes, indices = [], []
        for table, group in zip(tables, self.groups, strict=True):
            count = (end_token - first_token) // group.block_size
            ids += table[:count]
            sizes.append(count)
            indices.append(first_token // group.block_size)
        return GPULoadStoreSpec(ids, sizes, indices)

    def num_bytes(self, group_sizes: Sequence[int]) -> int:
        """Return the bytes of `group_sizes` engine blocks per group."""
        return sum(count * size for count, size in zip(group_sizes, self.block_bytes, strict=True))

    def check_ids(self, tables: Tables) -> None:
        """Refuse GPU block ids that the KV cache does not have.

        Raises:
            UsageError: An id is no number, negative or too large.
        """
        limit = self.num_gpu_blocks
        for table in tables:
            try:
                wrong = table and (min(table) < 0 or (limit is not None and max(table) >= limit))
            except TypeError:
                raise UsageError(f"GPU block ids are whole numbers, got {table!r}") from None
            if wrong:
                raise UsageError(f"GPU block ids must be in [0, {limit}), got {min(table)}..{max(table)}")

    def check_distinct(self, tables: Tables) -> None:
        """Refuse GPU blocks that are named twice: one cannot hold the bytes of two.

        Raises:
            UsageError: Some are.
        """
        blocks = [block for table in tables for block in table]
        if len(set(blocks)) < len(blocks):
            raise UsageError(f"a GPU block is named twice: each must be another one; got {blocks}")
