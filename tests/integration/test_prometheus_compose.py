"""The commands of docker-compose.yml, run as written outside containers: only ports in use and host names differ."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from integration.prometheus_tools import ROOT, Prometheus, free_port, program

pytestmark = pytest.mark.integration
SERVICES = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]


def port_map() -> dict[str, str]:
    """Published ports, each replaced by a free one where it is taken."""
    ports = {}
    for service in SERVICES.values():
        for entry in service["ports"]:
            port = entry.rsplit(":", 1)[1]
            with socket.socket() as probe:
                taken = probe.connect_ex(("127.0.0.1", int(port))) == 0
            ports[port] = str(free_port()) if taken else port
    return ports


def command_of(words: list[str], ports: dict[str, str]) -> list[str]:
    """A command with its ports replaced, and this interpreter's programs."""
    for port, other in ports.items():
        words = [word.replace(f":{port}", f":{other}") for word in words]
    if words[0] == "kvoffload":
        return [sys.executable, "-c", "import sys; from kvoffload.cli.main import main; sys.exit(main())", *words[1:]]
    if words[0] == "python":
        return [sys.executable, *words[1:]]
    return words


def healthy(name: str, ports: dict[str, str]) -> bool:
    kind, *words = SERVICES[name]["healthcheck"]["test"]
    assert kind == "CMD"
    if words[0] == "wget" and not shutil.which("wget"):  # the same request
        words = ["python", "-c", f"import urllib.request as r; r.urlopen({words[-1]!r}, timeout=3)"]
    return subprocess.run(command_of(words, ports), capture_output=True, timeout=20, check=False).returncode == 0


@contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, env=environment) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)


def wait_healthy(name: str, ports: dict[str, str], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while not healthy(name, ports):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()


def test_the_composed_programs_run_and_find_each_other(tmp_path: Path):
    ports = port_map()
    etc = tmp_path / "etc"
    etc.mkdir()
    for volume in SERVICES["prometheus"]["volumes"]:
        source, target, *_ = volume.split(":")
        if source.startswith("."):
            shutil.copy(ROOT / source, etc / Path(target).name)
    config = etc / "prometheus.yml"
    config.write_text(config.read_text().replace("kvoffload:9464", f"127.0.0.1:{ports['9464']}").replace("15s", "1s"))
    words = command_of([program("KVOFFLOAD_PROMETHEUS"), *SERVICES["prometheus"]["command"]], ports)
    words = [
        word.replace("/etc/prometheus", str(etc)).replace("=/prometheus", f"={tmp_path / 'data'}") for word in words
    ]
    words.append(f"--web.listen-address=127.0.0.1:{ports['9090']}")
    served, watched = tmp_path / "kvoffload.log", tmp_path / "prometheus.log"
    with running(command_of(SERVICES["kvoffload"]["command"], ports), served) as kvoffload:
        wait_healthy("kvoffload", ports, kvoffload, served)
        with running(words, watched) as server:
            wait_healthy("prometheus", ports, server, watched)
            prometheus = Prometheus(f"http://127.0.0.1:{ports['9090']}")
            prometheus.wait_for('up{job="kvoffload"} == 1')
            prometheus.wait_for("kvoffload_requests_total > 0")
            prometheus.wait_for("kvoffload:cache_used:ratio")
            rules = prometheus.get("rules")["groups"]
            assert all(rule["health"] in ("ok", "unknown") for group in rules for rule in group["rules"])
    assert kvoffload.returncode == 0, served.read_text()
