"""Rank processes begin and end with their launcher."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kvoffload as kv
from kvoffload.service.ranks.launcher import RankLauncher
from kvoffload.service.ranks.meeting import has_ended, open_pidfd

TARGET = "service.ranks.launched:run"  # tests/service/ranks/launched.py


def _config(**changes):
    return kv.OffloadConfig(cpu_bytes_to_use="1MiB", gpu_block_size=4, world_size=2, **changes)


def test_launched_ranks_serve_and_end_with_the_launcher():
    workers = kv.RemoteWorkers(2, join_timeout=30)
    with RankLauncher(TARGET, world_size=2, address=workers.address) as launcher:
        assert launcher.start() == [0, 1]
        with kv.OffloadEngine(_config(), workers=workers) as engine:
            assert engine.health().ok
            launcher.kill(1)
            assert launcher.ended() == {1: -signal.SIGKILL}
            assert launcher.start() == [1]
            deadline = time.monotonic() + 30
            while workers.absent() is not None or engine.poll():
                assert time.monotonic() < deadline
                time.sleep(0.01)
        pids = launcher.pids
    assert launcher.ended() == {0: 0, 1: 0}
    assert all(not Path(f"/proc/{pid}").exists() for pid in pids)
    with pytest.raises(kv.ClosedError, match="this launcher was closed"):
        launcher.start()


def test_ranks_end_when_their_launcher_is_killed():
    code = (
        "import sys\n"
        "from kvoffload.service.ranks.launcher import RankLauncher\n"
        f"launcher = RankLauncher({TARGET!r}, world_size=2, address='@kvoffload-nobody')\n"
        "launcher.start()\n"
        "print(*launcher.pids, flush=True)\n"
        "sys.stdin.read()\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as parent:
        pidfds = [open_pidfd(int(pid)) for pid in parent.stdout.readline().split()]
        parent.kill()
    deadline = time.monotonic() + 30
    while not all(map(has_ended, pidfds)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for pidfd in pidfds:
        os.close(pidfd)


def test_a_target_without_a_function_is_refused():
    with pytest.raises(kv.UsageError, match=r"package\.module:function"):
        RankLauncher("package.module", world_size=1, address="@x")
