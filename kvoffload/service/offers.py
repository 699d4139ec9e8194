"""What a request offers to store: a run of offloaded blocks of each group, checked, with their keys and GPU blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvoffload.errors import UsageError
from kvoffload.keys import OffloadKey
from kvoffload.manager.specs import GPULoadStoreSpec
from kvoffload.service.arguments import check_ready
from kvoffload.service.core import RequestState
from kvoffload.service.geometry import BlockGeometry, Tables
from kvoffload.transfer.base import Ready


@dataclass(slots=True)
class Offer:
    """Offloaded blocks that a request offers; each list has an entry per group.

    Attributes:
        request: Whose.
        tables: GPU blocks of the run.
        starts: First offloaded block of the run.
        counts: Offloaded blocks in the run.
        ready: What has happened when the GPU blocks hold their final bytes.
    """

    request: RequestState
    tables: Tables
    starts: Sequence[int]
    counts: Sequence[int]
    ready: Ready

    @property
    def sizes(self) -> list[int]:
        """Engine blocks per group."""
        groups = self.request.chain.groups
        return [count * group.factor for count, group in zip(self.counts, groups, strict=True)]

    @property
    def num_blocks(self) -> int:
        """Engine blocks in all groups."""
        return sum(self.sizes)

    def keys_of(self, group_idx: int) -> Sequence[OffloadKey]:
        """Return the keys of one group's run."""
        start = self.starts[group_idx]
        return self.request.chain.keys(group_idx)[start : start + self.counts[group_idx]]

    def keys(self) -> list[OffloadKey]:
        """Return all keys, group after group."""
        return [key for group_idx in range(len(self.counts)) for key in self.keys_of(group_idx)]

    def halved(self) -> Offer:
        """Return the first half of each run."""
        return Offer(self.request, self.tables, self.starts, [count // 2 for count in self.counts], self.ready)

    def keys_behind(self, part: Offer) -> list[OffloadKey]:
        """Return the keys that `part`, a head of this offer, leaves out."""
        return [key for group_idx, count in enumerate(part.counts) for key in self.keys_of(group_idx)[count:]]


def computed_offer(
    geometry: BlockGeometry, request: RequestState, tables: Tables, computed_tokens: int, ready: Ready
) -> Offer:
    """Return the complete offloaded blocks below `computed_tokens` that were not offered before, and note them.

    Raises:
        UsageError: `computed_tokens` shrank or exceeds the chain, or a table is too short or has a wrong id.
    """
    chain = request.chain
    if computed_tokens < request.computed_tokens:
        raise UsageError(
            f"computed_tokens of request {request.context.req_id!r} shrank "
            f"from {request.computed_tokens} to {computed_tokens}: it counts all tokens so far"
        )
    if computed_tokens > chain.num_tokens:
        raise UsageError(
            f"computed_tokens must be at most the chain's {chain.num_tokens}; got {computed_tokens}: "
            "extend the chain first"
        )
    starts, counts, parts = list(request.offered), [], []
    for group_idx, (group, span) in enumerate(zip(geometry.groups, geometry.spans, strict=True)):
        upto = min(computed_tokens // span, len(chain.keys(group_idx)))
        first, last = starts[group_idx] * group.factor, upto * group.factor
        if len(tables[group_idx]) < last:
            raise UsageError(
                f"group {group_idx} has {len(tables[group_idx])} GPU blocks, {computed_tokens} tokens need {last}: "
                "append to gpu_blocks first"
            )
        counts.append(max(0, upto - starts[group_idx]))
        parts.append(tables[group_idx][first:last])
    geometry.check_ids(parts)
    geometry.check_distinct(parts)
    check_ready(ready)
    request.computed_tokens = computed_tokens
    request.offered = [start + count for start, count in zip(starts, counts, strict=True)]
    return Offer(request, parts, starts, counts, ready)


def explicit_offer(geometry: BlockGeometry, request: RequestState, spec: GPULoadStoreSpec, ready: Ready) -> Offer:
    """Return the offloaded blocks that explicit GPU blocks fill; a tail that fills none is left out.

    Raises:
        UsageError: A group does not start at an offloaded block, or reaches beyond the chain.
    """
    chain = request.chain
    tables, _ = geometry.split(spec)
    starts, counts = [], []
    for group_idx, (group, index) in enumerate(zip(geometry.groups, spec.block_indices, strict=True)):
        if index % group.factor:
            raise UsageError(
                f"a store starts at an offloaded block: block_indices[{group_idx}] is {index}, "
                f"not a multiple of {group.factor}"
            )
        start, count = index // group.factor, len(tables[group_idx]) // group.factor
        if count and start + count > len(chain.keys(group_idx)):
            raise UsageError(
                f"group {group_idx}: offloaded blocks {start}..{start + count - 1} are not all in the chain, "
                f"which has {len(chain.keys(group_idx))}: extend the chain first"
            )
        starts.append(start)
        counts.append(count)
    geometry.check_ids(tables)
    geometry.check_distinct(tables)
    check_ready(ready)
    return Offer(request, tables, starts, counts, ready)
