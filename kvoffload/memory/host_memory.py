"""Host tensors in one anonymous mapping of exactly the needed size.

An allocator's pinned blocks are rounded up to a power of two (5 GiB become 8); a mapping is rounded to one page.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload.memory import preflight
from kvoffload.memory.block_tensor import BlockTensor
from kvoffload.memory.mapping import Mapping
from kvoffload.memory.populate import Progress, populate

_ALIGN_BYTES = 64


def allocate_host_tensors(
    row_bytes: Sequence[int],
    num_blocks: int,
    *,
    progress: Progress | None = None,
    system: preflight.SystemPaths = preflight.SYSTEM,
) -> list[BlockTensor]:
    """Return populated tensors of `num_blocks` rows, one per entry of `row_bytes`, in one mapping.

    Takes about half a second per GiB without the GIL. The mapping lives as long as any of the tensors;
    their `owner` is its `Mapping`.

    Raises:
        NoSpaceError: Less memory is available (machine or cgroup) than that takes; nothing stays allocated.
    """
    offsets, total = [], 0
    for row in row_bytes:
        offsets.append(total)
        total += -(-row * num_blocks // _ALIGN_BYTES) * _ALIGN_BYTES
    preflight.check_memory(total, "host tensors", system)
    mapping = Mapping.anonymous(total)
    populate(mapping.address, total, "host tensors", progress)
    return [
        BlockTensor(mapping.address + offset, num_blocks, row, row, owner=mapping)
        for offset, row in zip(offsets, row_bytes, strict=True)
    ]
