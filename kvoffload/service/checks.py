"""What `debug_checks=True` does: canaries on freed GPU blocks, sampled checksums, and the books after each poll.

*Canaries.* A GPU block is painted just before it is passed to `free`, and looked at when a request that has it in its
table is entered, and when a store of it has ended: paint that was scratched before anybody owned the block means that a
copy (or the engine) wrote to freed memory; paint that is still whole under a store means that the engine stored what it
never wrote. This holds if every user of the GPU blocks goes through requests and enters them before it writes.

*Checksums.* Of every eighth key (by its hash) the CRC-32 of each engine block is noted when its store has ended, and
compared when a load has: a difference fails the load and drops the key.

*Cost*, on the owner's thread: one pass over every freed block (about 5 to 10 GB/s), one CRC-32 pass (about 1 GB/s) over
an eighth of what is stored and loaded, and some 30 microseconds a poll. It is meant for tests and canary instances.
Bytes are only looked at where the KV caches are host memory; on other devices and with ranks the books are checked, and
ranks refuse stores that run ahead of their step.
"""

from __future__ import annotations

import ctypes
import logging
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvoffload.keys import OffloadKey, get_offload_group_idx
from kvoffload.manager.base import ManagerStats
from kvoffload.memory.canonical import CanonicalKVCaches
from kvoffload.service.geometry import BlockGeometry
from kvoffload.service.jobs import Job
from kvoffload.service.laws import broken_laws

logger = logging.getLogger(__name__)

PAINT = 0xC5
SAMPLE = 8
"""One key in so many is checked."""


class Checks:
    """The checks of an engine without `debug_checks`: none."""

    violations = 0

    def freed(self, blocks: Sequence[int]) -> None:
        """GPU blocks are about to be passed to `free`."""

    def owned(self, blocks: Iterable[int]) -> None:
        """GPU blocks have an owner again."""

    def stored(self, job: Job) -> None:
        """A store has ended well; its source is still held."""

    def wrong_load(self, job: Job) -> str | None:  # noqa: ARG002 - for those who check
        """Return what is wrong with the bytes of a load that has ended well; None when nothing is."""
        return None

    def books(self, stats: Callable[[], ManagerStats]) -> None:
        """A poll is over."""


class DebugChecks(Checks):
    """Looks at the books after each poll, and at bytes where they are host memory.

    Args:
        geometry: How sequences are cut into blocks.
        kv_caches: The GPU side; None with ranks.
        capacity: Offloaded blocks; as many checksums are kept at most.
    """

    def __init__(self, geometry: BlockGeometry, kv_caches: CanonicalKVCaches | None, capacity: int) -> None:
        self.violations = 0
        self._geometry = geometry
        self._kv_caches = kv_caches if kv_caches is not None and kv_caches.device == "cpu" else None
        self._capacity = capacity
        self._painted: set[int] = set()
        self._unwritten: set[int] = set()
        self._sums: OrderedDict[OffloadKey, tuple[int, ...]] = OrderedDict()

    def freed(self, blocks: Sequence[int]) -> None:
        """Paint them."""
        if self._kv_caches is None:
            return
        limit = self._kv_caches.num_blocks
        blocks = [block for block in blocks if 0 <= block < limit]  # tables are padded with ids that are none
        for address, size in self._pages(blocks):
            ctypes.memset(address, PAINT, size)
        self._painted.update(blocks)
        self._unwritten.update(blocks)

    def owned(self, blocks: Iterable[int]) -> None:
        """Look whether the paint is whole."""
        for block in self._painted.intersection(blocks):
            self._painted.discard(block)
            if not self._is_painted(block):
                self._unwritten.discard(block)
                self._complain(f"GPU block {block} was written after it was freed, before its next owner had it")

    def stored(self, job: Job) -> None:
        """Look whether the paint is gone, since somebody must have written what was stored; note sampled checksums."""
        if self._kv_caches is None:
            return
        for block in self._unwritten.intersection(job.gpu_blocks):
            self._unwritten.discard(block)
            self._painted.discard(block)
            if self._is_painted(block):
                self._complain(f"GPU block {block} was stored, but nobody wrote to it since it was freed")
        factor = self._geometry.groups[0].factor
        for at, key in enumerate(job.keys):
            if _is_sampled(key):
                blocks = job.gpu_blocks[at * factor : (at + 1) * factor]
                group_idx = get_offload_group_idx(key)
                self._sums.pop(key, None)
                self._sums[key] = tuple(self._checksum(block, group_idx) for block in blocks)
        while len(self._sums) > self._capacity:
            self._sums.popitem(last=False)

    def wrong_load(self, job: Job) -> str | None:
        """Compare the checksums of sampled keys."""
        if self._kv_caches is None:
            return None
        for key, part, block in self._loaded_blocks(job):
            sums = self._sums.get(key)
            if sums is not None and sums[part] != self._checksum(block, get_offload_group_idx(key)):
                what = f"GPU block {block} does not hold what was stored as part {part} of key {key.hex()}"
                self._complain(what)
                return what
        return None

    def _loaded_blocks(self, job: Job) -> Iterator[tuple[OffloadKey, int, int]]:
        """Yield key, place in the offloaded block, and GPU block of what a load filled, for sampled keys."""
        geometry = self._geometry
        end_token = job.first_token + job.num_tokens
        keys_at = blocks_at = 0
        for group_idx, group in enumerate(geometry.groups):
            first, last = job.first_token // group.block_size, end_token // group.block_size
            wanted = geometry.key_range(group_idx, job.first_token, end_token)
            for offset, index in enumerate(range(first, last)):
                key = job.keys[keys_at + index // group.factor - wanted.start]
                if _is_sampled(key):
                    yield key, index % group.factor, job.gpu_blocks[blocks_at + offset]
            keys_at += len(wanted)
            blocks_at += last - first

    def books(self, stats: Callable[[], ManagerStats]) -> None:
        """Hold the manager's counters to their laws."""
        for law in broken_laws(stats()):
            self._complain(law)

    def _pages(self, blocks: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Yield address and size of every page of `blocks` in every tensor."""
        tensors = self._kv_caches.tensors if self._kv_caches is not None else ()
        for tensor in tensors:
            view = tensor.view
            for block in blocks:
                yield view.base_address + block * view.row_stride_bytes, view.row_bytes

    def _is_painted(self, block: int) -> bool:
        return all(ctypes.string_at(address, size) == bytes((PAINT,)) * size for address, size in self._pages((block,)))

    def _checksum(self, block: int, group_idx: int) -> int:
        """Return the CRC-32 of what a group's layers keep in one GPU block."""
        crc = 0
        if self._kv_caches is not None:
            for ref in self._kv_caches.group_data_refs[group_idx]:
                view = self._kv_caches.tensors[ref.tensor_idx].view
                address = view.base_address + block * view.row_stride_bytes
                crc = zlib.crc32(ctypes.string_at(address, ref.page_size_bytes), crc)
        return crc

    def _complain(self, what: str) -> None:
        self.violations += 1
        if self.violations <= 100:  # each is a bug; a thousandth line tells nothing new
            logger.error("debug check: %s", what)


def _is_sampled(key: OffloadKey) -> bool:
    return key[-5] % SAMPLE == 0
