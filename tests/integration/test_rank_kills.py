"""Front ends and ranks killed at every stage: the others notice, go on or join the next one, and nothing is left."""

import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvoffload.service.ranks import meeting

ZYGOTE = Path(__file__).with_name("rank_zygote.py")
SHM = Path("/dev/shm")


class Instance:
    """A front end and two ranks, forked on demand."""

    def __init__(self):
        self.address = f"@kvoffload-kills-{os.getpid()}-{random.randrange(1 << 30):x}"
        self.shm = {path.name for path in SHM.iterdir()}
        self.process = subprocess.Popen(
            [sys.executable, str(ZYGOTE), self.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        self.alive: dict[str, tuple[int, int]] = {}
        self.said: list[str] = []
        self._rest = b""

    def fork(self, role, stage="none"):
        self.process.stdin.write(f"{role} {stage}\n".encode())
        self.process.stdin.flush()
        pid = int(self.hear("forked").split()[1])
        self.alive[role] = (pid, os.pidfd_open(pid))

    def hear(self, word, seconds=60):
        """Wait for a line that begins with a word; what it was."""
        deadline = time.monotonic() + seconds
        while True:
            for place, line in enumerate(self.said):
                if line.startswith(word):
                    del self.said[: place + 1]
                    return line
            assert time.monotonic() < deadline, f"nobody said {word!r}, but {self.said[-9:]}"
            readable, _, _ = select.select([self.process.stdout], [], [], 0.5)
            if readable:
                self._read()

    def _read(self):
        *lines, self._rest = (self._rest + os.read(self.process.stdout.fileno(), 1 << 16)).split(b"\n")
        self.said += [line.decode() for line in lines]
        wrong = [line for line in self.said if line.startswith(("corrupt", "failed"))]
        assert wrong == []

    def forget(self):
        """Forget what was said until now."""
        while select.select([self.process.stdout], [], [], 0)[0]:
            self._read()
        self.said = [line for line in self.said if not line.startswith("served")]

    def gone(self, role, seconds=60):
        """Wait until a process has ended."""
        pidfd = self.alive.pop(role)[1]
        ended, _, _ = select.select([pidfd], [], [], seconds)
        os.close(pidfd)
        assert ended, f"{role} did not end"

    def send(self, role, number):
        signal.pidfd_send_signal(self.alive[role][1], number)

    def stop(self):
        """End everything in order; the front end's address is free afterwards, and nothing is left."""
        for role in ("rank 0", "rank 1", "front"):
            self.send(role, signal.SIGTERM)
            self.gone(role)
        self.hear("front closed")
        meeting.listen(self.address).close()
        left = {path.name for path in SHM.iterdir()} - self.shm
        assert {name for name in left if str(self.process.pid) in name} == set()

    def close(self):
        for role in list(self.alive):
            self.send(role, signal.SIGKILL)
            self.gone(role)
        self.process.stdin.close()
        self.process.wait(20)
        self.process.stdout.close()


@pytest.fixture
def instance():
    instance = Instance()
    yield instance
    instance.close()


RANK_STAGES = [
    "before hello", "before map", "after map", "before ready", "after ready", "mid copy", "during cleanup",
]  # fmt: skip
FRONT_STAGES = [
    "before reserve", "after reserve", "before map", "after map", "before publish", "after publish", "mid copy",
    "during cleanup",
]  # fmt: skip


@pytest.mark.parametrize("stage", RANK_STAGES)
def test_rank_killed_at_any_stage_is_replaced_and_the_front_end_goes_on(instance, stage):
    """A-S1 with ranks."""
    instance.fork("rank 0")
    instance.fork("rank 1", stage)
    instance.fork("front")
    if stage == "during cleanup":
        instance.hear("served")
        instance.send("rank 1", signal.SIGTERM)
    instance.gone("rank 1")
    instance.fork("rank 1")
    instance.forget()
    instance.hear("served")
    instance.stop()


@pytest.mark.parametrize("stage", FRONT_STAGES)
def test_ranks_join_the_next_front_end_when_theirs_was_killed_at_any_stage(instance, stage):
    """A-S1 with a front end."""
    for role in ("rank 0", "rank 1"):
        instance.fork(role)
    instance.fork("front", stage)
    if stage in {"mid copy", "during cleanup"}:
        instance.hear("served")
        instance.send("front", signal.SIGKILL if stage == "mid copy" else signal.SIGTERM)
    instance.gone("front")
    instance.fork("front")
    instance.forget()
    instance.hear("front up")
    instance.hear("served")
    instance.stop()


def test_fork_of_a_killed_front_end_holds_nobody_back(instance):
    """Its copies of the connections and of the listening socket neither hide the death nor keep the address."""
    for role in ("rank 0", "rank 1"):
        instance.fork(role)
    instance.fork("front", "with a fork")
    held = os.pidfd_open(int(instance.hear("held").split()[1]))
    instance.hear("served")
    instance.send("front", signal.SIGKILL)
    instance.gone("front")
    instance.fork("front")
    instance.forget()
    instance.hear("served")
    assert not meeting.has_ended(held)
    instance.stop()
    signal.pidfd_send_signal(held, signal.SIGKILL)
    os.close(held)


@pytest.mark.slow
def test_two_hundred_random_kills_corrupt_nothing_and_leave_nothing(instance):
    rng = random.Random(8)
    roles = ["front", "rank 0", "rank 1"]
    for kill in range(200):
        for role in roles:
            if role not in instance.alive:
                instance.fork(role)
        if kill % 10 == 0:
            instance.forget()
            instance.hear("served")
        time.sleep(rng.random() * 0.05)
        role = rng.choice(roles)
        instance.send(role, signal.SIGKILL)
        instance.gone(role)
    for role in roles:
        if role not in instance.alive:
            instance.fork(role)
    instance.forget()
    instance.hear("served")
    instance.stop()
