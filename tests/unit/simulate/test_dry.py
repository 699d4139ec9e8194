"""A workload through the manager alone."""

import os
from pathlib import Path

import pytest

from kvoffload.manager.cpu import CPUOffloadingManager
from kvoffload.manager.reuse_filter import FilterReusedOffloadingManager
from kvoffload.simulate.dry import run_dry
from kvoffload.simulate.gpu_cache import GpuPrefixCache
from kvoffload.simulate.workload import Workload, WorkloadRequest

BESIDE = Path(__file__).parents[4] / "shared" / "traces"


def requests(*blocks):
    return [
        WorkloadRequest(number, float(number), [bytes([ord(name)]) * 16 for name in names], len(names), 1)
        for number, names in enumerate(blocks)
    ]


def hit_ratio(result):
    return result.prefix_hit_blocks / result.requested_blocks


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_only_the_unbroken_prefix_counts_as_hit(policy):
    result = run_dry(requests("abcd", "abxd", "abxd"), CPUOffloadingManager(16, policy))
    assert (result.requests, result.requested_blocks, result.prefix_hit_blocks) == (3, 12, 2 + 4)


def test_capacity_below_one_request_stores_what_fits():
    manager = CPUOffloadingManager(2)
    result = run_dry(requests("abcd", "abcd"), manager, store_step=1)
    assert result.stats.stored == 8
    assert result.stats.evicted == 6
    refused = run_dry(requests("abcd"), CPUOffloadingManager(2), store_step=4)
    assert (refused.refused_stores, refused.stats.stored) == (1, 0)


def test_offloaded_blocks_of_two_engine_blocks_count_in_engine_blocks():
    result = run_dry(requests("abcde", "abcdx"), CPUOffloadingManager(8), factor=2)
    assert result.stats.stored == 2
    assert result.prefix_hit_blocks == 4


def test_blocks_on_the_gpu_are_not_asked_of_host_memory():
    gpu = GpuPrefixCache(4, reuse=True)
    result = run_dry(requests("abcd", "abcd", "wxyz", "abcd"), CPUOffloadingManager(16), gpu=gpu)
    assert result.gpu_hit_blocks == 4
    assert result.prefix_hit_blocks == 4


def test_the_filter_stores_what_two_requests_asked_for():
    manager = FilterReusedOffloadingManager(CPUOffloadingManager(16), 2, 100)
    assert run_dry(requests("abcd", "abcd", "abcd"), manager).prefix_hit_blocks == 4


def test_events_do_not_pile_up():
    manager = CPUOffloadingManager(2, enable_events=True)
    run_dry(requests("ab", "cd", "ef"), manager)
    assert list(manager.take_events()) == []


def test_lru_on_the_built_in_chats_is_reproducible():
    workload = Workload(limit=300, seed=1)
    capacity = workload.measure().unique_blocks // 5
    first, second = (run_dry(workload, CPUOffloadingManager(capacity)) for _ in range(2))
    assert hit_ratio(first) == hit_ratio(second)
    assert 0.3 < hit_ratio(first) < 0.7


@pytest.mark.parametrize(("name", "expected"), [("conversation", 0.196), ("synthetic", 0.157)])
def test_lru_at_five_percent_matches_published_ratios_on_mooncake_traces(name, expected):
    path = Path(os.environ.get("TRACES_DIR", BESIDE)) / f"{name}_trace.jsonl"
    if not path.exists():
        pytest.skip(f"no {path.name}: set TRACES_DIR to a folder with Mooncake's traces")
    workload = Workload([path], keep_partial=True)
    manager = CPUOffloadingManager(workload.measure().unique_blocks * 5 // 100)
    assert hit_ratio(run_dry(workload, manager)) == pytest.approx(expected, abs=0.005)
