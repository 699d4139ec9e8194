"""The manifest in the guide fits the PodMonitor, and its command answers its probes."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import yaml

from kvoffload.config import OffloadConfig

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
MANIFEST = yaml.safe_load(re.search(r"^```yaml\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)[1])
POD = MANIFEST["spec"]["template"]
CONTAINER = POD["spec"]["containers"][0]
PORTS = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}


def test_the_pod_monitor_finds_the_pod():
    monitor = yaml.safe_load((ROOT / "dashboards" / "kubernetes" / "podmonitor.yml").read_text())["spec"]
    assert monitor["selector"]["matchLabels"].items() <= POD["metadata"]["labels"].items()
    assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} <= PORTS.keys()
    assert MANIFEST["spec"]["selector"]["matchLabels"].items() <= POD["metadata"]["labels"].items()


def test_the_image_is_the_composed_one_and_the_pod_outlives_the_drain():
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert CONTAINER["image"] == compose["services"]["kvoffload"]["image"]
    config = OffloadConfig(cpu_bytes_to_use=1, gpu_block_size=1)
    assert POD["spec"]["terminationGracePeriodSeconds"] > config.drain_seconds


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_its_command_answers_the_probes_and_listens_where_the_ports_say():
    served, feed = free_port(), free_port()
    line = " ".join(CONTAINER["command"])
    assert f"0.0.0.0:{PORTS['metrics']}" in line
    assert f"tcp://*:{PORTS['kv-events']}" in line
    assert PORTS["kv-replay"] == PORTS["kv-events"] + 1  # where `run` answers replays
    words = line.replace(f"0.0.0.0:{PORTS['metrics']}", f"127.0.0.1:{served}")
    words = words.replace(f"*:{PORTS['kv-events']}", f"127.0.0.1:{feed}").split()[1:]
    code = "import sys; from kvoffload.cli.main import main; sys.exit(main())"
    with subprocess.Popen(
        [sys.executable, "-c", code, *words, "--feed-replay", f"tcp://127.0.0.1:{free_port()}"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:  # fmt: skip
        try:
            for probe in ("readinessProbe", "livenessProbe"):
                target = CONTAINER[probe]["httpGet"]
                assert target["port"] == "metrics"
                assert answer(f"http://127.0.0.1:{served}{target['path']}", process) == 200
        finally:
            process.terminate()
            out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out.decode()


def answer(url, process):
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as reply:
                return reply.status
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{url} does not answer")
            time.sleep(0.05)
