"""The live table of `kvoffload run`."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

from kvoffload.cli.live_table import LiveTable, Sample, wanted
from kvoffload.manager.base import ManagerStats
from kvoffload.service.results import Stats

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-c", "import sys; from kvoffload.cli.main import main; sys.exit(main(sys.argv[1:]))"]
RUN = ["run", "--requests", "60", "--speed", "40", "--capacity", "500"]


def sample(at, requests, *, evicted=0, stored_bytes=0, feed=None, wrong=0):
    manager = ManagerStats(capacity=100, free=50, evicted=evicted)
    return Sample(at, (requests, 1000, 250, wrong), Stats(manager=manager, stored_bytes=stored_bytes), feed)


def on_terminal(arguments, *, env=None, enough=None, output=None):
    """Run on a pseudo-terminal; return the exit code and what was drawn. At the text `enough`, Ctrl-C is sent."""
    outer, inner = pty.openpty()
    drawn = b""
    with subprocess.Popen(
        [*COMMAND, *arguments], stdout=output or inner, stderr=inner, cwd=ROOT,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", **(env or {})},
    ) as process:  # fmt: skip
        os.close(inner)
        while True:
            try:
                part = os.read(outer, 65536)
            except OSError:  # the other side is closed
                break
            drawn += part
            if enough is not None and enough in drawn:
                enough = None
                process.send_signal(signal.SIGINT)
    os.close(outer)
    return process.returncode, drawn.decode()


def test_rates_are_of_the_time_between_two_samples():
    table = LiveTable(100, 4, env={})
    start = sample(0.0, 0)
    text = table.frame(start, sample(1.0, 10), sample(2.0, 20, evicted=3, stored_bytes=2 * 10**9, feed=(7, 0.25)))
    assert "20 of 100, 10/s, 0:08 left" in text
    assert "50.0 % of 400 blocks" in text
    assert "25.0 % of 1,000 blocks" in text
    assert "2.00 GB/s, 1.9 GiB so far" in text
    assert "12 blocks/s, 12 so far" in text
    assert "250 ms, 7 waiting" in text


def test_the_next_frame_is_drawn_over_the_one_before():
    table = LiveTable(100, 1, env={})
    first = table.frame(sample(0, 0), sample(0, 0), sample(1, 1))
    second = table.frame(sample(0, 0), sample(1, 1), sample(2, 2))
    assert not first.startswith("\x1b[6A")
    assert second.startswith(f"\x1b[{first.count(chr(10))}A")


def test_no_line_is_wider_than_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    text = LiveTable(100, 1, env={"NO_COLOR": "1"}).frame(sample(0, 0), sample(0, 0), sample(1, 1, feed=(1, 1.0)))
    assert max(len(line) for line in text.splitlines()) < 30


def test_wrong_blocks_stand_out():
    assert "3 WRONG" in LiveTable(9, 1).frame(sample(0, 0), sample(0, 0), sample(1, 1, wrong=3))


def test_a_program_and_a_pipe_get_no_table():
    assert not wanted(as_json=True, env={"TERM": "xterm"})
    assert not wanted(as_json=False, env={"TERM": "xterm"})  # what pytest captures is no terminal


def test_a_terminal_shows_the_table_and_it_is_gone_at_the_end():
    code, drawn = on_terminal(RUN)
    assert code == 0
    for label in ("requests", "occupancy", "hit ratio", "store", "load", "evictions", "feed lag"):
        assert f"\x1b[1m{label}" in drawn, label
    assert "\x1b[7A\r\x1b[J" in drawn
    assert drawn.rindex("\x1b[7A\r\x1b[J") > drawn.rindex("feed lag")
    assert drawn.rindex("kvoffload run") > drawn.rindex("feed lag")


def test_no_color_is_obeyed():
    assert "\x1b[1m" not in on_terminal(RUN, env={"NO_COLOR": "1"})[1]


def test_json_and_a_redirected_output_show_nothing_on_the_terminal():
    assert "\x1b" not in on_terminal([*RUN, "--json"])[1]
    assert on_terminal(RUN, output=subprocess.DEVNULL) == (0, "")


def test_ctrl_c_leaves_one_line_below_the_table():
    code, drawn = on_terminal(["run", "--speed", "1", "--capacity", "500"], enough=b"feed lag")
    assert code == 130
    assert drawn.split("\x1b[J")[-1].strip() == "interrupted"
