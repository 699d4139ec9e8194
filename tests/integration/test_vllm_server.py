"""vLLM's OpenAI API server offloads through kvoffload: `/metrics` shows our series, Dynamo's indexer finds the blocks.

The server lives in a virtual environment of its own (`KVOFFLOAD_VLLM_PYTHON=$(.ci/vllm.sh DIRECTORY)`), and so does the
indexer (`KVOFFLOAD_DYNAMO_PYTHON`).
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from consumers import DYNAMO, call, dynamo, free_port, wait_for

PYTHON = os.environ.get("KVOFFLOAD_VLLM_PYTHON", "")
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
_PAGE = (ROOT / "docs/vllm.md").read_text()
THE_PAGES_COMMAND = re.search(r"^```console\n(.*?)^```", _PAGE, re.MULTILINE | re.DOTALL)[1]
BLOCK = 32

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON, reason="KVOFFLOAD_VLLM_PYTHON names no Python with vLLM: run .ci/vllm.sh"),
]


class Server:
    """A running API server with a tiny primary cache."""

    def __init__(self, port, engine_feed, feed, replay):
        self.url = f"http://127.0.0.1:{port}"
        self.engine_feed, self.feed, self.replay = (
            f"tcp://127.0.0.1:{number}" for number in (engine_feed, feed, replay)
        )
        rng = random.Random(0)
        self.a = [rng.randrange(3, 512) for _ in range(200)]
        self.fillers = [[rng.randrange(3, 512) for _ in range(220)] for _ in range(6)]

    def ask(self, prompt):
        """Return text and cached tokens of a greedy answer."""
        body = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 16, "ignore_eos": True}
        answer = call(self.url + "/v1/completions", body, timeout=120)
        details = answer["usage"]["prompt_tokens_details"] or {}
        return answer["choices"][0]["text"], details.get("cached_tokens", 0)

    def series(self):
        """Return the adapter's series by name."""
        text = call(self.url + "/metrics")
        return {
            name: float(value)
            for name, value in re.findall(r"^vllm:kvoffload_(\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE)
            if not name.endswith("_created")
        }


@contextmanager
def running(folder, sockets):
    ports = [free_port() for _ in range(4)]
    server = Server(*ports)
    program, verb, _, option, text = shlex.split(THE_PAGES_COMMAND)
    assert (program, verb, option) == ("vllm", "serve", "--kv-transfer-config")
    transfer = json.loads(text)
    transfer["kv_connector_extra_config"] |= {
        "cpu_bytes_to_use": "32MiB",
        "events": {
            "endpoint": server.feed, "replay_endpoint": server.replay, "consumer": "dynamo",
            "merge_from": [server.engine_feed],
        },
    }  # fmt: skip
    engine_events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{ports[1]}"}
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1"}
    env |= {"TMPDIR": sockets, "VLLM_RPC_BASE_PATH": sockets}
    make = "import sys, pathlib, vllm_model as m; m.make_model(pathlib.Path(sys.argv[1]))"
    subprocess.run([PYTHON, "-c", make, folder / "model"], env=env | {"PYTHONPATH": str(HERE)}, check=True, timeout=120)
    arguments = [
        # `vllm serve` looks for a distribution named vllm, and the CPU build is another: its module is started instead.
        PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", folder / "model", option, json.dumps(transfer),
        "--served-model-name", "tiny",
        "--host", "127.0.0.1", "--port", ports[0], "--block-size", BLOCK, "--num-gpu-blocks-override", 24,
        "--kv-cache-memory-bytes", 64 << 20, "--enforce-eager", "--max-model-len", 512, "--max-num-seqs", 8,
        "--dtype", "float32", "--enable-prompt-tokens-details",
        "--kv-events-config", json.dumps(engine_events),
    ]  # fmt: skip
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen([str(word) for word in arguments], env=env, stdout=output, stderr=output,
                                   start_new_session=True)  # fmt: skip

    def ready():
        assert process.poll() is None, log.read_text()[-6000:]
        try:
            return call(server.url + "/health") is not None
        except OSError:
            return False

    try:
        wait_for(ready, 400, 0.5)
        yield server
        assert process.poll() is None, log.read_text()[-6000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with (
        tempfile.TemporaryDirectory(prefix="vllm-") as sockets,  # vLLM leaves its sockets behind
        running(tmp_path_factory.mktemp("server"), sockets) as server,
    ):
        yield server


@pytest.fixture(scope="module")
def indexer(tmp_path_factory):
    if not DYNAMO:
        pytest.skip("KVOFFLOAD_DYNAMO_PYTHON names no Python with ai-dynamo-runtime")
    with dynamo(tmp_path_factory.mktemp("dynamo") / "log") as found:
        yield found


def test_metrics_show_the_adapters_series_and_the_prompt_comes_back(server):
    first, _ = server.ask(server.a)
    for filler in server.fillers:
        server.ask(filler)
    again, cached = server.ask(server.a)
    assert (again, cached) == (first, 192)
    found = wait_for(lambda: (series := server.series()).get("loads_total") and series, 30)
    assert found["capacity_blocks"] == 1024
    assert found["loads_total"] == 1
    assert found["lookup_hit_blocks_total"] == 6
    assert found["stored_blocks_total"] == found["ready_blocks"] == 42
    assert found["writing_blocks"] == found["pinned_blocks"] == 0


def test_dynamo_finds_the_prompt_in_host_memory_while_the_engine_no_longer_has_it(server, indexer):
    """Our feed has the engine's merged into it; a reset of both tiers leaves nothing."""
    body = {"instance_id": 1, "endpoint": server.feed, "replay_endpoint": server.replay, "model_name": "tiny",
            "block_size": BLOCK, "dp_rank": 0}  # fmt: skip
    call(indexer.url + "/register", body)
    rng = random.Random(7)
    prompt = [rng.randrange(3, 512) for _ in range(200)]

    def tiers():
        found = indexer.matched(prompt, "tiny")
        return found["gpu"], found["cpu"]

    server.ask(prompt)
    wait_for(lambda: tiers() == (192, 192), 60, 0.5)
    for filler in server.fillers:
        server.ask([511 - token + 3 for token in filler])
    wait_for(lambda: tiers() == (0, 192), 60, 0.5)
    assert server.ask(prompt)[1] == 192
    wait_for(lambda: tiers() == (192, 192), 60, 0.5)
    call(server.url + "/reset_prefix_cache", {})
    server.ask([5] * 40)  # the engine publishes at its next step
    wait_for(lambda: tiers() == (0, 192), 60, 0.5)
    call(server.url + "/reset_prefix_cache?reset_external=true", {})
    server.ask([6] * 40)
    wait_for(lambda: tiers() == (0, 0), 60, 0.5)
    assert server.ask(prompt)[1] == 0
