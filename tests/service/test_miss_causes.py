"""Misses by cause, on a real run: they add up, and the evicted share falls with capacity as a simulation predicts."""

from __future__ import annotations

import pytest

from kvoffload.config import OffloadConfig
from kvoffload.manager.cpu import CPUOffloadingManager
from kvoffload.simulate.drive import DriveOptions, drive
from kvoffload.simulate.dry import run_dry
from kvoffload.simulate.workload import Workload

BLOCK_BYTES = 256


async def evicted_share(percent: int) -> tuple[float, float]:
    """The share of misses that are not new: of a real run, and as the decisions alone predict."""
    workload = Workload(seed=3, limit=250, keep_partial=True)
    measured = workload.measure()
    blocks = measured.unique_blocks * percent // 100
    config = OffloadConfig(cpu_bytes_to_use=blocks * BLOCK_BYTES, gpu_block_size=workload.block_tokens)
    options = DriveOptions(block_bytes=BLOCK_BYTES, concurrency=1, verify=False)
    metrics = (await drive(workload, measured, config, options)).metrics
    counters = metrics.read_counters()
    misses = counters["miss_blocks"]
    missed = sum(misses.values())
    found = metrics.value("hit_blocks") + metrics.value("pending_blocks")
    assert found + missed == metrics.value("requested_blocks")
    dry = run_dry(workload, CPUOffloadingManager(blocks, "lru"), store_step=options.store_step)
    dry_missed = dry.requested_blocks - dry.prefix_hit_blocks
    return 1 - misses["new"] / missed, 1 - measured.unique_blocks / dry_missed


@pytest.mark.slow
async def test_the_evicted_share_falls_with_capacity_as_the_simulation_predicts():
    shares = []
    for percent in (5, 15, 40, 100):
        counted, predicted = await evicted_share(percent)
        assert counted == pytest.approx(predicted, abs=0.02), percent
        shares.append(counted)
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.1
    assert shares[-1] == 0
