"""`GpuPrefixCache`: a simulated engine's block allocator with a prefix cache in front of host memory.

Blocks that no request uses stay readable, oldest reused first, as in paged engines. Without reuse every block is
scratch: a request finds nothing on the GPU, and all its hits come from host memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuTable:
    """Blocks given to one request.

    Attributes:
        blocks: One GPU block per block of the request.
        cached: How many from the start hold its content already.
    """

    blocks: list[int]
    cached: int


class GpuPrefixCache:
    """Reference-counted GPU blocks, kept by the id of their content. Single-threaded.

    Args:
        num_blocks: Blocks in the pool.
        reuse: Keep content for later requests.
    """

    def __init__(self, num_blocks: int, *, reuse: bool) -> None:
        self.num_blocks = num_blocks
        self.reuse = reuse
        self._free: list[int] = []
        self._fresh = 0  # blocks from here on were never used
        self._users: dict[int, int] = {}
        self._content: dict[int, bytes] = {}
        self._by_content: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def in_use(self) -> int:
        """Blocks that a request holds."""
        return self._fresh - len(self._free) - len(self._idle)

    @property
    def _num_free(self) -> int:
        return self.num_blocks - self._fresh + len(self._free)

    def acquire(self, contents: Sequence[bytes]) -> GpuTable | None:
        """Give one block per content, sharing the longest prefix that is held; None, changing nothing, without room."""
        cached: list[int] = []
        for content in contents:
            block = self._by_content.get(content)
            if block is None:
                break
            cached.append(block)
        idle_hits = sum(block in self._idle for block in cached)
        if len(contents) - len(cached) > self._num_free + len(self._idle) - idle_hits:
            return None
        for block in cached:
            self._users[block] += 1
            self._idle.pop(block, None)
        fresh = [self._take() for _ in range(len(contents) - len(cached))]
        return GpuTable(cached + fresh, len(cached))

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        elif self._fresh < self.num_blocks:
            block = self._fresh
            self._fresh += 1
        else:
            block, _ = self._idle.popitem(last=False)
            del self._by_content[self._content.pop(block)]
        self._users[block] = 1
        return block

    def commit(self, block: int, content: bytes) -> None:
        """Say that a block now holds a content; the first block with it serves later requests."""
        if self.reuse and content not in self._by_content and block not in self._content:
            self._by_content[content] = block
            self._content[block] = content

    def release(self, blocks: Sequence[int]) -> None:
        """Take blocks back from one request; the last ones are reused first."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block]:
                continue
            if block in self._content:
                self._idle[block] = None
            else:
                self._free.append(block)
