"""The simulator: figures of the production manager after the warm-up."""

import json

import pytest

from kvoffload.errors import ConfigError
from kvoffload.simulate.hints import parse_hint
from kvoffload.simulate.simulator import SimulatedTrace, check_policy, simulate


@pytest.fixture
def trace(tmp_path):
    """Twice the same prompt of two full blocks and a partial one, then another prompt twice."""
    lines = [(0, [1, 2, 3]), (1000, [1, 2, 4]), (2000, [5, 6]), (4000, [5, 6])]
    path = tmp_path / "tiny.jsonl"
    path.write_text(
        "".join(
            json.dumps({"timestamp": at, "input_length": 512 * len(ids) - 1, "output_length": 9, "hash_ids": ids})
            + "\n"
            for at, ids in lines
        )
    )
    return path


@pytest.mark.parametrize("policy", ["lru", "arc", "adaptive", "belady"])
def test_figures_are_those_after_the_warm_up(trace, policy):
    loaded = SimulatedTrace(trace)
    assert loaded.unique_blocks == 6
    whole = simulate(loaded, policy, 100, warmup=0.0)
    assert whole.prefix_hit_ratio == pytest.approx(
        3 / 10
    )  # blocks 1, 2 and 5; unfinished ones are asked for, never kept
    assert whole.block_hit_ratio == whole.prefix_hit_ratio
    assert whole.stored_blocks == 3
    half = simulate(loaded, policy, 100, warmup=0.5)
    assert half.prefix_hit_ratio == pytest.approx(1 / 4)
    assert half.stored_blocks == 1
    assert (half.trace, half.policy, half.hint, half.capacity_blocks) == (
        str(trace),
        policy,
        None,
        100,
    )


def test_partial_blocks_can_be_kept(trace):
    assert simulate(SimulatedTrace(trace, keep_partial=True), "lru", 100, warmup=0).prefix_hit_ratio == pytest.approx(
        0.4
    )


def test_evictions_are_counted(trace):
    result = simulate(SimulatedTrace(trace), "lru", 2, warmup=0)
    assert (result.stored_blocks, result.evicted_blocks) == (3, 1)


def test_no_policy_beats_belady_and_hints_help():
    chats = SimulatedTrace(None, limit=700)
    capacity = chats.unique_blocks // 50
    bound = simulate(chats, "belady", capacity).prefix_hit_ratio
    results = {name: simulate(chats, name, capacity).prefix_hit_ratio for name in ("lru", "arc", "adaptive")}
    told = simulate(chats, "adaptive", capacity, hint=parse_hint("finished:1:0"))
    assert told.hint == "finished:1:0"
    assert max(*results.values(), told.prefix_hit_ratio) <= bound
    assert results["lru"] < results["adaptive"] < told.prefix_hit_ratio


def test_unknown_policies_are_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="adaptive, arc, lru, belady"):
        check_policy("lfu")
    with pytest.raises(ConfigError):
        check_policy("lru:x:y")
