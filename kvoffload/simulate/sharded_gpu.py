"""`ShardedGpu`: the GPU memory of several ranks, in one file without a name that the rank processes map as well.

Each rank holds its share of every block, with pages of its own: bytes that a rank got from another one's share show.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

from kvoffload.errors import ConfigError
from kvoffload.memory.preflight import check_memory
from kvoffload.simulate.gpu_memory import SimulatedGpu, place_layers


class ShardedGpu:
    """Blocks of `block_bytes`, cut in equal parts over the ranks.

    Args:
        num_blocks: Blocks.
        block_bytes: Bytes of one block over all ranks, a multiple of 8 per rank.
        world_size: Ranks.

    Attributes:
        fd: The memory, for `RankLauncher(pass_fds=)`.
        arguments: What a rank process needs to know of it.

    Raises:
        ConfigError: `block_bytes` cannot be cut that way.
        NoSpaceError: The machine has less memory.
    """

    def __init__(self, num_blocks: int, block_bytes: int, world_size: int) -> None:
        if block_bytes % (8 * world_size):
            raise ConfigError(
                f"block_bytes must be a multiple of {8 * world_size} for {world_size} workers; got {block_bytes}"
            )
        shard = block_bytes // world_size
        check_memory(num_blocks * block_bytes, f"the simulated GPUs of {num_blocks} blocks of {block_bytes} bytes")
        self.world_size = world_size
        self.fd = os.memfd_create("simulated-gpu", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self.fd, 0, num_blocks * block_bytes)
            memory = memoryview(mmap.mmap(self.fd, num_blocks * block_bytes))
        except BaseException:
            os.close(self.fd)
            raise
        parts = [memory[rank * num_blocks * shard :][: num_blocks * shard] for rank in range(world_size)]
        self.ranks = [
            SimulatedGpu(num_blocks, shard, seed=rank, layers=place_layers(num_blocks, shard, part))
            for rank, part in enumerate(parts)
        ]
        self.arguments = {"fd": self.fd, "num_blocks": num_blocks, "shard_bytes": shard}

    def compute(self, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        """Write what a prefill would, on every rank."""
        for gpu in self.ranks:
            gpu.compute(blocks, names)

    def count_wrong(self, blocks: Sequence[int], names: Sequence[bytes]) -> int:
        """Return how many of `blocks` hold a wrong byte on some rank."""
        wrong: set[int] = set()
        for gpu in self.ranks:
            wrong.update(gpu.find_wrong(blocks, names))
        return len(wrong)

    def close(self) -> None:
        """Give the file back; the memory goes with the last mapping."""
        os.close(self.fd)
