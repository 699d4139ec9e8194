"""Every command in a console block of README and docs runs as it stands, or runs elsewhere, and it is said where."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ELSEWHERE = {
    "pip install . && kvoffload run": ".ci/run installs; tests/unit/cli/test_run.py runs it",
    "pip install '.[test]' && pytest": "this is it",
    "kvoffload run --forever --speed 10 --events": "tests/integration/test_dynamo_tools.py, with the real indexer",
    "kvoffload run --forever --speed 10 --policy adaptive --http": "tests/integration/test_prometheus_compose.py",
    "sed s/kvoffload:9464/": "tests/integration/test_prometheus_compose.py replaces the name too",
    "prometheus --config.file=": "tests/integration/test_prometheus_compose.py",
    "python -m dynamo.indexer": "tests/integration/test_dynamo_tools.py",
    "kvoffload feed": "tests/integration/test_dynamo_tools.py, which takes the lines from the page",
    "python -m vllm_router.launch_router": "tests/integration/test_vllm_router.py",
    "python -m tests.reference.adaptive_compare": "tests/property/test_adaptive_reference.py runs it",
    "PYTHONPATH=tests kvoffload simulate": "tests/property/test_adaptive_reference.py loads that policy",
    "vllm serve MODEL": "tests/integration/test_vllm_server.py takes it from the page",
    "python=$(.ci/vllm.sh /tmp/vllm-cpu)": ".ci/run does the same",
    "KVOFFLOAD_VLLM_PYTHON=$python python -m pytest": ".ci/run does the same",
    "kubectl ": "a cluster is needed; tests/docs/test_kubernetes.py runs the manifest's command and asks its probes",
}


def commands(page):
    for block in re.findall(r"^ *```console\n(.*?)^ *```", page.read_text(), re.MULTILINE | re.DOTALL):
        text = re.sub(r"'[^']*'", lambda quoted: quoted[0].replace("\n", " "), block.replace("\\\n", " "))
        for line in text.splitlines():
            if command := line.split("  #")[0].strip():
                yield command


ALL = [(page, command) for page in PAGES for command in commands(page)]
HERE = [
    pytest.param(page, command, id=f"{page.stem}: {command[:60]}")
    for page, command in ALL
    if not command.startswith(tuple(ELSEWHERE))
]


@pytest.fixture
def folder(tmp_path):
    """A folder of a user: the command on the path, and a trace of 120 requests with shared prefixes."""
    program = tmp_path / "bin" / "kvoffload"
    program.parent.mkdir()
    code = "import sys; from kvoffload.cli.main import main; sys.exit(main())"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}:$PYTHONPATH" exec "{sys.executable}" -c "{code}" "$@"\n')
    program.chmod(0o755)
    requests = (
        {"timestamp": 500 * at, "input_length": 512 * 6, "output_length": 8, "hash_ids": [at % 10, *range(10, 15)]}
        for at in range(120)
    )
    (tmp_path / "TRACE.jsonl").write_text("".join(json.dumps(request) + "\n" for request in requests))
    return tmp_path


@pytest.mark.parametrize(("page", "command"), HERE)
def test_a_command_runs_as_it_stands(page, command, folder):
    for module, code in re.findall(r"^```python\n# (\w+\.py)\b(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        (folder / module).write_text("#" + code)
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"},
    )  # fmt: skip
    fits_or_not = {0, 1} if command.startswith("kvoffload plan") else {0}  # 1: this machine has less memory now
    assert done.returncode in fits_or_not, done.stdout + done.stderr
    assert done.stdout


def test_what_is_said_to_run_elsewhere_is_still_on_a_page():
    commands_of_pages = [command for _, command in ALL]
    unused = [start for start in ELSEWHERE if not any(command.startswith(start) for command in commands_of_pages)]
    assert unused == []
