"""What launched ranks run in tests."""

import numpy as np

import kvoffload as kv
from kvoffload.service.ranks.launcher import RankStart, serve_rank


def run(start: RankStart) -> None:
    """Serve over 32 blocks of 256 bytes."""
    config = kv.OffloadConfig(cpu_bytes_to_use="1MiB", gpu_block_size=4, world_size=start.world_size)
    caches = kv.CanonicalKVCaches.from_layers({"layer": np.zeros((32, 256), np.int8)}, block_dim=0)
    serve_rank(start, config, caches)
