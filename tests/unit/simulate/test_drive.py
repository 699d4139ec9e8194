"""A workload through the real service."""

import asyncio
import json
import os
import signal
import threading
from contextlib import asynccontextmanager, nullcontext

import pytest

from kvoffload.config import OffloadConfig
from kvoffload.manager.cpu import CPUOffloadingManager
from kvoffload.simulate.drive import DriveOptions, RunMetrics, drive
from kvoffload.simulate.dry import run_dry
from kvoffload.simulate.gpu_memory import SimulatedGpu
from kvoffload.simulate.workload import Workload

BLOCK = 1024
CLEAN = {"pins": 0, "jobs": 0, "tasks": 0, "threads": 0, "shm": 0}


async def driven(
    workload, *, blocks, factor=1, progress=lambda _: None, beside=lambda _: nullcontext(), stop=None, **options
):
    measured = workload.measure()
    config = OffloadConfig(
        cpu_bytes_to_use=blocks * BLOCK * factor,
        gpu_block_size=workload.block_tokens,
        block_size=workload.block_tokens * factor,
        world_size=options.get("workers") or 1,
    )
    options = DriveOptions(block_bytes=BLOCK, **options)
    return await drive(workload, measured, config, options, progress=progress, beside=beside, stop=stop)


async def test_one_request_at_a_time_decides_as_the_manager_alone():
    workload = Workload(limit=150, keep_partial=True)
    result = await driven(workload, blocks=300, concurrency=1)
    dry = run_dry(workload, CPUOffloadingManager(300))
    assert result.requested_blocks == dry.requested_blocks
    assert result.loaded_blocks == pytest.approx(dry.prefix_hit_blocks, rel=0.02)
    assert result.stored_blocks == pytest.approx(dry.stats.stored, rel=0.02)


@pytest.mark.parametrize("options", [{}, {"gpu_blocks": 400}, {"factor": 3}, {"gpu_blocks": 400, "factor": 2}])
async def test_every_loaded_block_is_right_and_nothing_is_left(options):
    result = await driven(Workload(limit=200), blocks=200, concurrency=16, **options)
    assert result.requests == 200
    assert result.verified_blocks == result.loaded_blocks > 0
    assert (result.corrupt_blocks, result.failures) == (0, 0)
    assert result.leaked == CLEAN
    assert (result.gpu_hit_blocks > 0) == ("gpu_blocks" in options)
    assert len(result.load_seconds) > 0
    assert result.metrics.rate("store") > 0
    assert result.stats.stored_bytes == result.stored_blocks * BLOCK


async def test_a_wrong_byte_is_found(monkeypatch):
    compute = SimulatedGpu.compute

    def compute_wrong(self, blocks, names):
        compute(self, blocks, names)
        for array in self.layers.values():
            array[list(blocks), -1] += 1

    monkeypatch.setattr(SimulatedGpu, "compute", compute_wrong)
    result = await driven(Workload(limit=60), blocks=500)
    assert result.corrupt_blocks == result.loaded_blocks > 0


async def test_without_verification_nothing_is_checked():
    result = await driven(Workload(limit=60), blocks=500, verify=False)
    assert result.loaded_blocks > 0
    assert result.verified_blocks == 0


async def test_requests_wait_for_their_time(tmp_path):
    lines = [
        {"timestamp": stamp, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]} for stamp in (0, 40, 80)
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    timed = await driven(Workload([path]), blocks=4, speed=1.0)
    assert timed.seconds >= 0.08
    assert timed.loaded_blocks == 2  # one block of each prompt is left to compute


async def test_a_request_shorter_than_a_block_is_served(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 100, "output_length": 1, "hash_ids": [1]}\n' * 2)
    result = await driven(Workload([path]), blocks=4)
    assert (result.requests, result.requested_blocks, result.stored_blocks, result.leaked) == (2, 2, 0, CLEAN)


async def test_an_interrupted_run_leaves_nothing():
    tasks, threads = asyncio.all_tasks(), set(threading.enumerate())
    served = asyncio.Event()
    run = asyncio.ensure_future(driven(Workload(limit=3000), blocks=500, progress=lambda _: served.set()))
    await served.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert asyncio.all_tasks() == tasks
    for thread in set(threading.enumerate()) - threads:
        thread.join(5)
        assert not thread.is_alive()


def test_rates_are_bytes_over_the_time_of_copies():
    metrics = RunMetrics()
    assert metrics.rate("store") == 0.0
    metrics.count("transfer_bytes", 3_000_000_000, "store")
    metrics.observe("transfer_copy_seconds", 0.5, "store")
    metrics.observe("transfer_copy_seconds", 1.0, "store")
    assert metrics.rate("store") == 2.0


async def test_ranks_serve_what_one_process_serves():
    one = await driven(Workload(limit=80), blocks=200, concurrency=1)
    two = await driven(Workload(limit=80), blocks=200, concurrency=1, workers=2)
    assert (two.corrupt_blocks, two.failures, two.leaked) == (0, 0, CLEAN)
    assert two.verified_blocks == two.loaded_blocks == pytest.approx(one.loaded_blocks, rel=0.02)
    assert two.stored_blocks == pytest.approx(one.stored_blocks, rel=0.02)


async def test_a_killed_rank_costs_hits_until_it_is_back():
    """The service goes on; what the others hold, and the dead one's share of the region, is served again."""
    stop, seen = asyncio.Event(), {}

    @asynccontextmanager
    async def beside(service):
        seen["service"] = service
        yield

    def progress(result):
        service = seen["service"]
        if "killed" not in seen:
            if result.loaded_blocks > 20:
                seen["killed"] = result.loaded_blocks
                os.kill(service.engine.ground.workers._channel.hellos[1].pid, signal.SIGKILL)
        elif not service.health().ok:
            seen.setdefault("missing", set()).add(result.loaded_blocks)
        elif "missing" in seen:
            seen.setdefault("back", result.loaded_blocks)
            if result.loaded_blocks > seen["back"] + 20:
                stop.set()

    workload = Workload(limit=100)
    result = await driven(
        workload, blocks=600, progress=progress, beside=beside, stop=stop, workers=2, forever=True, concurrency=2
    )
    assert result.corrupt_blocks == 0
    assert result.leaked == CLEAN
    assert len(seen["missing"]) <= 2, "nothing hits while a rank is missing, but for what was under way when it died"
    assert result.loaded_blocks > seen["back"] + 20
    assert result.stats.manager.quarantined == 0
