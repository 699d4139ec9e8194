"""GPU blocks whose owner is known and whose bytes are checked whenever they change hands."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from kvoffload.simulate.gpu_memory import SimulatedGpu


class OwnedBlocks:
    """An allocator that paints what it is given back, and looks at the paint before it hands it out again.

    Args:
        num_blocks: Blocks.
        block_bytes: Bytes of each.
        complain: Told what must never happen.
    """

    def __init__(self, num_blocks: int, block_bytes: int, complain: Callable[[str], None]) -> None:
        self.gpu = SimulatedGpu(num_blocks, block_bytes)
        self._complain = complain
        self._free = list(range(num_blocks))
        self._owned = [False] * num_blocks
        self._paint(self._free)

    @property
    def num_owned(self) -> int:
        """Blocks that somebody owns."""
        return sum(self._owned)

    def allocate(self, count: int, rng: random.Random) -> list[int] | None:
        """Hand out `count` random free blocks; None when there are fewer."""
        if count > len(self._free):
            return None
        taken = []
        for _ in range(count):
            at = rng.randrange(len(self._free))
            self._free[at], self._free[-1] = self._free[-1], self._free[at]
            taken.append(self._free.pop())
        self._look(taken)
        for block in taken:
            self._owned[block] = True
        return taken

    def free(self, blocks: Sequence[int]) -> None:
        """Take blocks back; what the service calls."""
        for block in blocks:
            if not self._owned[block]:
                self._complain(f"block {block} was freed twice")
                continue
            self._owned[block] = False
            self._free.append(block)
        self._paint(blocks)

    def look(self, count: int, rng: random.Random) -> None:
        """Look at some free blocks: nobody may have written to them."""
        if self._free:
            self._look([rng.choice(self._free) for _ in range(count)])

    def look_at_all(self) -> None:
        """Look at every free block."""
        self._look(self._free)

    def _look(self, blocks: Sequence[int]) -> None:
        if self.gpu.count_wrong(blocks, [_paint_of(block) for block in blocks]):
            self._complain(f"somebody wrote to freed blocks, one of {list(blocks)}")

    def _paint(self, blocks: Sequence[int]) -> None:
        self.gpu.compute(blocks, [_paint_of(block) for block in blocks])


def _paint_of(block: int) -> bytes:
    return b"paint %d" % block
