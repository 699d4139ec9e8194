"""What `kvoffload bench cuda` asks for, as far as it shows without a device."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np

from kvoffload.cli.bench_cuda import Bench


def test_directions_that_run_at_once_share_no_block():
    bench = Bench.__new__(Bench)
    bench.count, bench.gpu_ids, bench.cpu_ids = 10, np.arange(10), np.arange(10)
    stored, _ = bench.spec(store=True, count=5)
    _, loaded = bench.spec(store=False, count=5)
    assert not set(stored.block_ids.tolist()) & set(loaded.block_ids.tolist())
    assert len(bench.spec(store=False)[1].block_ids) == 10


def run_checks(folder, python):
    """Run tests/gpu/run.sh with a stand-in for Python; return what it printed and its exit code."""
    (folder / "python").write_text(f"#!/bin/sh\n{python}\n")
    (folder / "python").chmod(0o755)
    script = Path(__file__).parents[3] / "tests/gpu/run.sh"
    environment = {"PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", script, folder], env=environment, capture_output=True, text=True, timeout=30, check=False
    )


def test_gpu_checks_refuse_a_machine_without_a_device(tmp_path):
    ended = run_checks(tmp_path, f'echo "$@" >> {tmp_path}/calls; exit 1')
    assert (ended.returncode, "no CUDA device" in ended.stderr) == (2, True)
    assert "pytest" not in (tmp_path / "calls").read_text()


def test_gpu_checks_measure_even_if_a_test_failed_and_say_so(tmp_path):
    ended = run_checks(tmp_path, 'case "$*" in *pytest*gpu*) exit 1;; *bench*) echo figures;; esac')
    assert ended.returncode == 1
    assert (tmp_path / "bench-cuda.json").read_text() == "figures\n"
