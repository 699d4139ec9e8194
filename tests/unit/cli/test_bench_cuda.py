"""What `kvoffload bench cuda` asks for, as far as it shows without a device."""

from __future__ import annotations

import numpy as np

from kvoffload.cli.bench_cuda import Bench


def test_directions_that_run_at_once_share_no_block():
    bench = Bench.__new__(Bench)
    bench.count, bench.gpu_ids, bench.cpu_ids = 10, np.arange(10), np.arange(10)
    stored, _ = bench.spec(store=True, count=5)
    _, loaded = bench.spec(store=False, count=5)
    assert not set(stored.block_ids.tolist()) & set(loaded.block_ids.tolist())
    assert len(bench.spec(store=False)[1].block_ids) == 10
