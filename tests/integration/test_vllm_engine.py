"""A real vLLM 0.32 CPU engine with a tiny random model offloads through kvoffload.

The engine lives in a virtual environment of its own: `KVOFFLOAD_VLLM_PYTHON=$(.ci/vllm.sh DIRECTORY)`.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

PYTHON = os.environ.get("KVOFFLOAD_VLLM_PYTHON", "")
HERE = Path(__file__).parent
ROOT = HERE.parents[1]

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON, reason="KVOFFLOAD_VLLM_PYTHON names no Python with vLLM: run .ci/vllm.sh"),
]


def vllm(*arguments, multiprocessing=0, timeout=600):
    """Run a program in vLLM's environment and return what it found."""
    env = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(multiprocessing),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.TemporaryDirectory(prefix="vllm-") as sockets:  # vLLM leaves its sockets behind
        done = subprocess.run(
            [PYTHON, *map(str, arguments)], env=env | {"TMPDIR": sockets, "VLLM_RPC_BASE_PATH": sockets},
            capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    if line is None:
        pytest.fail(f"{arguments}: exit status {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    return json.loads(line.removeprefix("RESULT "))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    program = "import sys, pathlib, vllm_model; vllm_model.make_model(pathlib.Path(sys.argv[1])); print('RESULT {}')"
    vllm("-c", program, folder)
    return folder


@pytest.fixture(scope="module")
def without_offloading(model):
    return vllm(HERE / "vllm_engine.py", model, "proof", "offload=none")


def scenario(model, name, **options):
    multiprocessing = options.pop("multiprocessing", 0)
    words = [f"{key}={value}" for key, value in options.items()]
    return vllm(HERE / "vllm_engine.py", model, name, *words, multiprocessing=multiprocessing)


def test_every_vllm_name_that_the_adapter_uses_is_there():
    """A-K1."""
    found = vllm("-c", "import json, kvoffload.integrations.vllm as v; print('RESULT ' + json.dumps(v.VLLM_VERSION))")
    assert found.startswith("0.32")


def test_without_offloading_the_fillers_evict_the_prompt(without_offloading):
    assert without_offloading["cached"] == 0
    assert without_offloading["again"] == without_offloading["first"]


@pytest.mark.parametrize(("policy", "blocks_per_chunk"), [("lru", 1), ("arc", 2)])
def test_the_prompt_comes_back_from_host_memory_with_identical_output(
    model, without_offloading, policy, blocks_per_chunk
):
    found = scenario(model, "proof", eviction_policy=policy, blocks_per_chunk=blocks_per_chunk)
    assert found["cached"] == 192
    assert found["first"] == found["again"] == without_offloading["first"]
    assert found["stats"]["loads"] == 1
    assert found["stats"]["hits"] == 192 // 32 // blocks_per_chunk


def test_the_adaptive_policy_works_in_the_engine_too(model, without_offloading):
    found = scenario(model, "proof", eviction_policy="adaptive")
    assert found["cached"] == 192
    assert found["again"] == without_offloading["first"]


def test_engine_core_in_its_own_process(model, without_offloading):
    found = scenario(model, "proof", multiprocessing=1)
    assert found["cached"] == 192
    assert found["first"] == found["again"] == without_offloading["first"]


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need a core each")
def test_two_tensor_parallel_ranks_each_copy_their_share(model, without_offloading):
    found = scenario(model, "proof", multiprocessing=1, ranks=2)
    assert found["cached"] == 192
    assert found["first"] == found["again"] == without_offloading["first"]


def test_corrupted_loads_change_the_output(model, without_offloading):
    found = scenario(model, "proof", fault="CorruptedLoads")
    assert found["cached"] == 192
    assert found["first"] == without_offloading["first"]
    assert found["again"] != without_offloading["first"]


def test_a_failed_load_is_recomputed_and_its_blocks_are_dropped(model, without_offloading):
    found = scenario(model, "failing", fault="FailingLoads", policy="recompute")
    assert found["left"] == 0
    assert found["first"] == found["again"] == found["third"] == without_offloading["first"]
    assert found["after_second"]["failed_loads"] == 1
    assert found["after_second"]["discarded"] == 6


def test_a_failed_load_fails_its_request_alone_where_vllm_is_told_so(model, without_offloading):
    found = scenario(model, "failing", fault="FailingLoads", policy="fail")
    assert found["again"] == []
    assert found["third"] == without_offloading["first"]


def test_a_failed_store_never_becomes_readable_and_the_engine_lives(model, without_offloading):
    found = scenario(model, "failing", fault="FailingStores")
    assert found["after_first"]["failed_stores"] == 1
    assert found["after_first"]["ready"] == 0
    assert found["after_first"]["free"] == found["after_first"]["capacity"]
    assert found["cached"] == 0
    assert found["cached_third"] == 192
    assert found["first"] == found["again"] == found["third"] == without_offloading["first"]


@pytest.mark.parametrize(("policy", "blocks_per_chunk"), [("lru", 1), ("arc", 2)])
def test_many_requests_with_aborts_leave_the_books_balanced_and_a_reset_empties_them(model, policy, blocks_per_chunk):
    found = scenario(model, "burst", eviction_policy=policy, blocks_per_chunk=blocks_per_chunk, events="own")
    before, after = found["before"], found["after"]
    assert found["aborted"] > 20
    assert set(found["answers"].values()) == {1}  # each prompt was answered the same way every time
    assert before["loads"] > 5
    assert before["evicted"] > 10
    assert found["open"] == before["writing"] == before["pinned"] == before["detached"] == 0
    assert before["free"] + before["ready"] == before["capacity"]
    assert found["reset"] is True
    assert after["free"] == after["capacity"]
    assert found["cached_after_reset"] == 0
    assert found["feed_before"] == before["ready"] * blocks_per_chunk
    assert found["feed_after"] == 0
    assert found["feed_wrong"] == []
    assert found["first_blocks"]
    assert all(found["first_blocks"])


def test_a_reset_with_running_copies_gives_their_memory_back(model, without_offloading):
    found = scenario(model, "reset_with_running_copies")
    assert found["during"]["writing"] > 0
    assert found["after"]["detached"] == found["during"]["writing"]
    assert found["after"]["ready"] == 0
    assert found["rest"]["detached"] == 0
    assert found["cached"] == 192
    assert found["first"] == found["again"] == without_offloading["first"]


@pytest.mark.parametrize("threshold", [0, 2])
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_decides_as_vllms_own_manager_over_50000_steps(policy, threshold):
    found = vllm(
        HERE / "vllm_steps.py", "differential", "--policy", policy, "--threshold", threshold, "--steps", 50_000
    )
    assert found["steps"] == 50_000
    assert found["evicted"] > 10_000
    assert found["hits"] > 10_000
    assert found["pending"] > 500
    assert found["resets"] > 5


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_scheduler_step_costs_no_more_than_with_vllms_own_manager(policy):
    found = vllm(HERE / "vllm_steps.py", "cost", "--policy", policy, "--steps", 200)
    assert found["ratio"] <= 1.0, found
