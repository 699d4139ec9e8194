"""Hard kills at every stage leave nothing of ours after the next start, and other processes unharmed."""

import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvoffload.memory import preflight
from kvoffload.memory.region import SharedOffloadRegion
from kvoffload.memory.shm_file import find_leftovers

PAGE, BLOCKS = 64 * 1024, 16

CHILD = """
import os, signal, sys, time
from pathlib import Path
from kvoffload.memory import mapping, preflight, region, shm_file

shm, rank, num_workers, stage = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

def after(function):
    def call(*args, **kwargs):
        function(*args, **kwargs)
        die()
    return call

if stage == "before reserve": os.posix_fallocate = die
if stage == "after reserve": os.posix_fallocate = after(os.posix_fallocate)
if stage == "before publish": os.link = die
if stage == "after publish": os.link = after(os.link)
if stage == "before map": mapping._mmap = die
if stage == "after map": mapping._mmap = after(mapping._mmap)
if stage == "before populate": region.populate = die
if stage == "before rank": shm_file.SharedFile.claim_rank = die
if stage == "after rank": shm_file.SharedFile.claim_rank = after(shm_file.SharedFile.claim_rank)
if stage == "during cleanup": shm_file.SharedFile.close = die
if stage == "after cleanup": shm_file.SharedFile.close = after(shm_file.SharedFile.close)
shared = region.SharedOffloadRegion(
    "kill", 65536 * num_workers * 16, 16, rank, num_workers, 65536, system=preflight.SystemPaths(shm=Path(shm))
)
view = shared.create_next_view(65536)
view[:] = 7
if "cleanup" in stage:
    del view
    shared.cleanup()
print("mapped", flush=True)
if stage == "mid copy":
    while True:
        view[:] = 7
if stage == "exit":
    sys.exit(0)
sys.stdin.read()
"""


@pytest.fixture
def system(tmp_path):
    directory = Path("/dev/shm") / f"kvoffload-kills-{os.getpid()}-{tmp_path.name[-8:]}"
    directory.mkdir()
    yield preflight.SystemPaths(shm=directory)
    left = sorted(path.name for path in directory.iterdir())
    shutil.rmtree(directory)
    assert left == []


class Child:
    def __init__(self, system, rank, num_workers, stage):
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(system.shm), str(rank), str(num_workers), stage],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_mapped(self):
        ready, _, _ = select.select([self.process.stdout], [], [], 20)
        assert ready
        assert self.process.stdout.readline() == "mapped\n", self.process.stderr.read()

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        return self.end()

    def end(self):
        out, err = self.process.communicate(timeout=20)
        return self.process.returncode, out, err


def start(system, rank, num_workers=2):
    return SharedOffloadRegion(
        "kill", PAGE * num_workers * BLOCKS, BLOCKS, rank, num_workers, PAGE, timeout=5, system=system
    )


def next_start_works_and_leaves_nothing(system):
    regions = [start(system, rank) for rank in range(2)]
    assert list(system.shm.iterdir()) == []
    assert not regions[0].whole().any()
    for region in regions:
        region.cleanup()
    assert list(system.shm.iterdir()) == []


def test_both_ranks_killed_leave_no_file(system):
    """A-S1."""
    children = [Child(system, rank, 2, "wait") for rank in range(2)]
    for child in children:
        child.wait_mapped()
    for child in children:
        assert child.kill()[0] == -signal.SIGKILL
    assert list(system.shm.iterdir()) == []
    next_start_works_and_leaves_nothing(system)


def test_normal_exit_of_a_joiner_leaves_the_region_usable(system):
    """A-S4."""
    region = start(system, 0)
    code, out, err = Child(system, 1, 2, "exit").end()
    assert (code, out, err) == (0, "mapped\n", "")
    assert (region.whole()[:, PAGE:] == 7).all()
    region.whole()[:] = 1
    region.cleanup()


STAGES = [
    "before reserve", "after reserve", "before publish", "after publish", "before rank", "after rank", "before map",
    "after map", "before populate", "mid copy", "during cleanup", "after cleanup",
]  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_creator_killed_at_any_stage_does_not_hinder_the_next_start(system, stage):
    child = Child(system, 0, 2, stage)
    if stage == "mid copy":
        child.wait_mapped()
        child.kill()
    assert child.end()[0] == -signal.SIGKILL
    next_start_works_and_leaves_nothing(system)


@pytest.mark.parametrize("stage", STAGES[4:])
def test_joiner_killed_at_any_stage_harms_nobody_and_can_come_again(system, stage):
    region = start(system, 0, num_workers=3)
    region.create_next_view(PAGE)[:] = 3
    child = Child(system, 1, 3, stage)
    if stage == "mid copy":
        child.wait_mapped()
        child.kill()
    assert child.end()[0] == -signal.SIGKILL
    assert (region.whole()[:, :PAGE] == 3).all()
    others = [start(system, rank, num_workers=3) for rank in (1, 2)]
    assert list(system.shm.iterdir()) == []
    others[1].whole()[0, 0] = 5
    assert region.whole()[0, 0] == 5
    for other in (*others, region):
        other.cleanup()


def test_leftovers_of_killed_processes_can_be_cleaned_while_others_run(system):
    Child(system, 0, 2, "after publish").end()
    assert [left.path.suffix for left in find_leftovers(system, remove=True)] == [".lock", ".mmap"]
    region = start(system, 0)
    assert find_leftovers(system, remove=True) == []
    region.cleanup()


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_two_hundred_random_kills_leave_nothing(system):
    rng = random.Random(8)
    kills = 0
    while kills < 200:
        pids = [pid for rank in range(4) if (pid := fork_rank(system, rank)) is not None]
        time.sleep(rng.random() * 0.02)
        rng.shuffle(pids)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL  # it did not fail before
            kills += 1
            time.sleep(rng.random() * 0.004)
        if kills % 20 == 0:
            next_start_works_and_leaves_nothing(system)
    find_leftovers(system, remove=True)
    assert list(system.shm.iterdir()) == []


def fork_rank(system, rank):
    """Fork a rank that attaches, writes and detaches until it is killed."""
    pid = os.fork()
    if pid:
        return pid
    try:
        while True:
            region = start(system, rank, num_workers=4)
            region.create_next_view(PAGE)[:] = rank
            region.cleanup()
    except BaseException as error:
        print("rank failed:", repr(error), file=sys.stderr, flush=True)
    finally:
        os._exit(1)
