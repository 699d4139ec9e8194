"""The blocks of host memory by number: which are free. Reference, chapter 4.1."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvoffload.errors import UsageError


def check_block_count(name: str, count: int) -> None:
    """Refuse what is no number of blocks, under the name that the caller knows it by; numpy's integers are taken, too.

    Raises:
        UsageError: It is no whole number, or negative.
    """
    if isinstance(count, bool) or not hasattr(count, "__index__"):
        raise UsageError(f"{name} must be a whole number, got {count!r}")
    if count < 0:
        raise UsageError(f"{name} must not be negative, got {count}")


class BlockPool:
    """Hands out block ids `0 .. num_blocks - 1`: never used ones first, in order, then the last one freed.

    A pool of a million blocks costs nothing until it is used. Freeing is the manager's decision; the pool does not
    check for double frees, the manager's states exclude them.
    """

    __slots__ = ("_freed", "_fresh", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        check_block_count("num_blocks", num_blocks)
        self.num_blocks = num_blocks
        self._fresh = 0
        self._freed: list[int] = []

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return self.num_blocks - self._fresh + len(self._freed)

    def allocate(self, count: int) -> list[int]:
        """Return `count` block ids.

        Raises:
            UsageError: Fewer are free; none is taken.
        """
        if count > self.num_free:
            raise UsageError(f"{count} blocks asked for, {self.num_free} free")
        fresh = min(count, self.num_blocks - self._fresh)
        ids = list(range(self._fresh, self._fresh + fresh))
        self._fresh += fresh
        reused = count - fresh
        if reused:
            freed = self._freed
            ids += freed[: -reused - 1 : -1]
            del freed[-reused:]
        return ids

    def free(self, block_ids: Iterable[int]) -> None:
        """Take blocks back."""
        self._freed.extend(block_ids)

    def taken_except(self, block_ids: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the blocks that are handed out, without those of `block_ids`, lowest first."""
        taken = np.ones(self._fresh, np.bool_)
        taken[self._freed] = False
        taken[list(block_ids)] = False
        return taken.nonzero()[0]
