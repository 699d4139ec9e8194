"""The requests of a run."""

import json

import pytest

from kvoffload.errors import ConfigError, TraceError
from kvoffload.simulate.workload import Workload


def trace(path, *requests, **extra):
    lines = [
        {"timestamp": stamp, "input_length": tokens, "output_length": 1, "hash_ids": ids, **extra}
        for stamp, tokens, ids in requests
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_measuring_counts_raw_blocks_and_iterating_drops_unfinished_ones(tmp_path):
    path = trace(tmp_path / "a.jsonl", (0, 1000, [1, 2]), (1000, 1024, [1, 3]))
    workload = Workload([path])
    size = workload.measure()
    assert (size.requests, size.requested_blocks, size.unique_blocks, size.largest_request) == (2, 4, 3, 2)
    assert [len(request.block_hashes) for request in workload] == [1, 2]
    assert [request.num_blocks for request in workload] == [2, 2]
    kept = Workload([path], keep_partial=True)
    kept.measure()
    assert [len(request.block_hashes) for request in kept] == [2, 2]


def test_traces_follow_each_other_and_share_no_names(tmp_path):
    first = trace(tmp_path / "a.jsonl", (0, 512, [1]), (2000, 512, [1]))
    second = trace(tmp_path / "b.jsonl", (500, 512, [1]))
    workload = Workload([first, second])
    assert workload.measure().unique_blocks == 2
    requests = list(workload)
    assert [request.arrival_seconds for request in requests] == [0, 2, 2.5]
    assert requests[0].block_hashes == requests[1].block_hashes != requests[2].block_hashes


def test_traces_with_blocks_of_two_sizes_are_refused(tmp_path):
    first = trace(tmp_path / "a.jsonl", (0, 512, [1]))
    second = trace(tmp_path / "b.jsonl", (0, 16, [1]), chat_id=1, parent_chat_id=-1, turn=1)
    with pytest.raises(ConfigError, match=r"\[16, 512\]"):
        Workload([first, second]).measure()


def test_a_trace_without_requests_is_refused(tmp_path):
    with pytest.raises(TraceError, match="no requests"):
        Workload([trace(tmp_path / "a.jsonl")]).measure()


def test_the_limit_bounds_built_in_chats_and_traces(tmp_path):
    assert Workload().measure().requests == Workload.DEFAULT_CHATS
    assert len(list(Workload(limit=7, seed=3))) == 7
    assert "seed 3" in Workload(seed=3).name
