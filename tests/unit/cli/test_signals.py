"""Ctrl-C and SIGTERM at a command that works: its own exit code, one word, no traceback, and nothing is left."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

COMMANDS = [
    "run --requests 100000",
    "run --workers 2 --block-bytes 4KiB --requests 100000",
    "run --dry --requests 1000000",
    "run --speed 1 --http 127.0.0.1:0 --feed tcp://127.0.0.1:0",
    "simulate --requests 100000 --processes 1",
    "simulate --requests 4000 --processes 2",
    "feed watch tcp://127.0.0.1:1",
    "feed verify --timeout 60 --replay tcp://127.0.0.1:1",
    "feed snippet --for dynamo --timeout 60 --replay tcp://127.0.0.1:1",
    "feed register --indexer http://127.0.0.1:1 --timeout 60 --replay tcp://127.0.0.1:1",
    "bench host --repeat 1000",
    "bench manager --blocks 100000 --repeat 1000",
    "bench feed --blocks 20000 --repeat 1000",
    "bench ranks --rounds 1000000",
    "bench metrics --repeat 1000",
    "bench service --rounds 1000000",
    "bench chaos --ops 10000000",
]
CHILD = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from kvoffload.cli import main as cli
inner = cli._run
def outer(args):
    print("begins", file=sys.stderr, flush=True)
    return inner(args)
cli._run = outer
sys.exit(cli.main(sys.argv[1:]))
"""
WITH_PROCESSES = ("run --workers", "simulate --requests 4000", "bench ranks")


def moments(line):
    """Return how long a command has worked when the signal comes: while its processes start, and when they work."""
    return (0.2, 0.6, 2.0) if line.startswith(WITH_PROCESSES) else (0.4,)


def marked(mark):
    """Return the processes that were started with `mark` in their environment, and what they run."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                if mark.encode() in (folder / "environ").read_bytes():
                    found[int(folder.name)] = (folder / "cmdline").read_bytes()
            except OSError:  # it ended, or is somebody else's
                continue
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
@pytest.mark.parametrize(("line", "working"), [(line, seconds) for line in COMMANDS for seconds in moments(line)])
def test_a_signal_ends_a_command_with_its_code_and_nothing_is_left(line, number, working, tmp_path):
    mark = uuid.uuid4().hex
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, *line.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(tmp_path), "TEST_MARK": mark},
    ) as process:
        try:
            assert process.stderr.readline() == "begins\n"
            deadline = time.monotonic() + working
            while time.monotonic() < deadline and process.poll() is None:
                time.sleep(0.01)
            shared = {path.name for path in Path("/dev/shm").iterdir() if str(process.pid) in path.name}
            if number == signal.SIGINT:
                os.killpg(process.pid, number)  # as a terminal does: to all processes of the command
            else:
                process.send_signal(number)
            _, told = process.communicate(timeout=60)
            left = marked(mark)
        finally:
            for pid in marked(mark):
                os.kill(pid, signal.SIGKILL)
    lines = [text for text in told.splitlines() if not text.startswith(("note: ", "metrics on ", "feed "))]
    expected = (130, ["interrupted"]) if number == signal.SIGINT else (143, ["terminated"])
    assert (process.returncode, lines) == expected, told
    assert left == {}
    assert list(tmp_path.iterdir()) == []
    assert {name for name in shared if Path("/dev/shm", name).exists()} == set()
