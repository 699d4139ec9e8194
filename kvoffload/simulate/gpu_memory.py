"""`SimulatedGpu`: real bytes for a simulated engine, with contents that can be checked.

What a prefill would write into a block is a fixed random page plus a number made from the block's name, word by word.
So any word that is lost, stale or in the wrong place shows, and neither writing nor checking needs a copy of the data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvoffload.errors import ConfigError
from kvoffload.memory.preflight import check_memory

Buffer = memoryview | npt.NDArray[np.int8]
Words = npt.NDArray[np.int64]


class SimulatedGpu:
    """Layers of an engine's KV cache as numpy arrays of shape `(num_blocks, words)`.

    Args:
        num_blocks: Blocks.
        block_bytes: Bytes of one block over all layers, a multiple of 8.
        seed: Seed of the fixed pages.
        layers: Arrays made by `place_layers`, in memory that others share; None: made here.

    Attributes:
        layers: Arrays by layer name, for `CanonicalKVCaches.from_layers(layers, block_dim=0)`.

    Raises:
        ConfigError: `block_bytes` is no multiple of 8.
        NoSpaceError: The machine has less memory.
    """

    def __init__(
        self, num_blocks: int, block_bytes: int, *, seed: int = 0, layers: dict[str, Words] | None = None
    ) -> None:
        if block_bytes < 8 or block_bytes % 8:
            raise ConfigError(f"block_bytes must be a multiple of 8, such as 65536; got {block_bytes}")
        if layers is None:
            size = num_blocks * block_bytes
            check_memory(size, f"the simulated GPU of {num_blocks} blocks of {block_bytes} bytes")
            layers = place_layers(num_blocks, block_bytes, np.zeros(size, np.int8))
        self.layers = layers
        words = next(iter(layers.values())).shape[1]
        rng = np.random.default_rng(seed)
        pages = [rng.integers(np.iinfo(np.int64).min, np.iinfo(np.int64).max, words, np.int64) for _ in self.layers]
        self._parts = list(zip(self.layers.values(), pages, strict=True))
        self._scratch = np.empty(words, np.int64)

    def compute(self, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        """Write what a prefill would: the content that `names` stand for."""
        for block, name in zip(blocks, names, strict=True):
            number = _number(name)
            for array, page in self._parts:
                np.add(page, number, out=array[block])

    def count_wrong(self, blocks: Sequence[int], names: Sequence[bytes]) -> int:
        """Return how many of `blocks` do not hold the content that their name stands for, in every word."""
        return len(self.find_wrong(blocks, names))

    def find_wrong(self, blocks: Sequence[int], names: Sequence[bytes]) -> list[int]:
        """Return the positions in `blocks` that `count_wrong` counts."""
        wrong = []
        scratch = self._scratch
        for position, (block, name) in enumerate(zip(blocks, names, strict=True)):
            number = _number(name)
            for array, page in self._parts:
                np.add(page, number, out=scratch)
                if not np.array_equal(scratch, array[block]):
                    wrong.append(position)
                    break
        return wrong


def place_layers(num_blocks: int, block_bytes: int, memory: Buffer) -> dict[str, Words]:
    """Return the layers of `num_blocks` blocks as arrays over memory of exactly their size."""
    num_layers = 2 if block_bytes % 16 == 0 else 1
    words = block_bytes // 8 // num_layers
    arrays = np.frombuffer(memory, np.int64).reshape(num_layers, num_blocks, words)
    return {f"layer.{index}": array for index, array in enumerate(arrays)}


def _number(name: bytes) -> np.int64:
    return np.int64(int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big", signed=True))
