"""Which rank processes may join: pure rules, no socket, no thread. Both sides are named in a refusal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

import kvoffload
from kvoffload.service.ranks.wire import PROTOCOL, Hello

_EQUAL = ("page_sizes", "group_page_sizes", "gpu_block_sizes", "block_size_factor")


def why_refused(hello: Hello, world_size: int, others: Mapping[int, Hello], agreed: Hello | None) -> str | None:
    """Return why a rank may not join; None: it may.

    Args:
        hello: What it says of itself.
        world_size: Ranks of the instance.
        others: The ranks that wait or are up now.
        agreed: What the ranks had in common when the instance started; None before that.
    """
    if hello.protocol != PROTOCOL or hello.version != kvoffload.__version__:
        return (
            f"rank {hello.rank} runs kvoffload {hello.version} (protocol {hello.protocol}), the deciding process runs "
            f"{kvoffload.__version__} (protocol {PROTOCOL}): install the same version"
        )
    if hello.world_size != world_size:
        return f"rank {hello.rank} has world_size {hello.world_size}, the deciding process {world_size}"
    if not 0 <= hello.rank < world_size:
        return f"rank {hello.rank} is not in 0..{world_size - 1}"
    first = agreed or next((other for rank, other in others.items() if rank != hello.rank), hello)
    for name in _EQUAL:
        mine, theirs = getattr(hello, name), getattr(first, name)
        if mine != theirs:
            return f"rank {hello.rank} has {name} {mine}, rank {first.rank} has {theirs}: they must be equal"
    if agreed is not None and hello.num_blocks < agreed.num_blocks:
        return (
            f"rank {hello.rank} has {hello.num_blocks} GPU blocks, the instance was started with {agreed.num_blocks}: "
            "restart the deciding process"
        )
    return None


def agree(hellos: Sequence[Hello]) -> Hello:
    """Return what ranks have in common: their geometry, with the smallest number of GPU blocks."""
    first = min(hellos, key=lambda hello: hello.rank)
    return msgspec.structs.replace(first, num_blocks=min(hello.num_blocks for hello in hellos))
