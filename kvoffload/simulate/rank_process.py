"""A rank of a simulated engine: its GPU memory is a slice of a file that the driver fills and checks."""

from __future__ import annotations

import mmap

from kvoffload.config import OffloadConfig
from kvoffload.memory.canonical import CanonicalKVCaches
from kvoffload.service.ranks.launcher import RankStart, serve_rank
from kvoffload.simulate.gpu_memory import place_layers
from kvoffload.simulate.idle_handlers import IdleHandlers

TARGET = "kvoffload.simulate.rank_process:run_rank"


def run_rank(start: RankStart) -> None:
    """Serve as one rank; `arguments` are those of `ShardedGpu.arguments`, `config`, and `idle` to copy nothing."""
    values = start.arguments
    blocks, shard_bytes = values["num_blocks"], values["shard_bytes"]
    memory = memoryview(mmap.mmap(values["fd"], start.world_size * blocks * shard_bytes))
    own = memory[start.rank * blocks * shard_bytes :][: blocks * shard_bytes]
    layers = place_layers(blocks, shard_bytes, own)
    config = OffloadConfig(**values["config"])
    caches = CanonicalKVCaches.from_layers(layers, block_dim=0)
    serve_rank(start, config, caches, make_handlers=IdleHandlers if values.get("idle") else None)
