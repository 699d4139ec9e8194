"""The real Prometheus and promtool, where `.ci/prometheus.sh` has put them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DASHBOARDS = ROOT / "dashboards"


def program(variable: str) -> str:
    """Return a program's path, or skip the test with the reason."""
    path = os.environ.get(variable, "")
    if not path:
        pytest.skip(f"{variable} is not set: run .ci/prometheus.sh DIRECTORY")
    return path


def promtool(*arguments: str | Path, text: str | None = None) -> str:
    """Run promtool, which must be content; return what it said."""
    command = [program("KVOFFLOAD_PROMTOOL"), *map(str, arguments)]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def free_port() -> int:
    """Return a port on loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Prometheus:
    """A running server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **parameters: str) -> Any:
        """Return the data of an API call."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=30) as reply:
            answer = json.load(reply)
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the result of an instant query."""
        result: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return result

    def value(self, expression: str) -> float:
        """Return the only value of an instant query."""
        result = self.query(expression)
        assert len(result) == 1, (expression, result)
        return float(result[0]["value"][1])

    def wait_for(self, expression: str, seconds: float = 60.0) -> None:
        """Wait until an expression has a result."""
        deadline = time.monotonic() + seconds
        while not self.query(expression):
            assert time.monotonic() < deadline, f"no result for {expression}"
            time.sleep(0.1)


@contextmanager
def prometheus(folder: Path, targets: list[str], interval: str = "1s") -> Iterator[Prometheus]:
    """Run Prometheus with the project's own configuration and rules; only targets and intervals are other ones."""
    config = yaml.safe_load((DASHBOARDS / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": interval, "evaluation_interval": interval}
    config["rule_files"] = [str(DASHBOARDS / name) for name in config["rule_files"]]
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": targets}]
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    promtool("check", "config", path)
    address = f"127.0.0.1:{free_port()}"
    command = [
        program("KVOFFLOAD_PROMETHEUS"),
        f"--config.file={path}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--log.level=error",
    ]
    with (folder / "prometheus.log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            server = Prometheus(f"http://{address}")
            _wait_ready(server, process, folder / "prometheus.log")
            yield server
        finally:
            process.terminate()
            process.wait(30)


def _wait_ready(server: Prometheus, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        try:
            with urllib.request.urlopen(f"{server.url}/-/ready", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
