"""What a user can get wrong on the command line: exit code 2, and a message with key, value and what would be right."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvoffload.cli.main import main

ROOT = Path(__file__).parents[3]
SIZES = "plan --set gpu_block_size=16 --set cpu_bytes_to_use"
MISTAKES = [
    ("plan", "cpu_bytes_to_use is missing"),
    ("plan --set a", "must be KEY=VALUE; got 'a'"),
    ("plan --set nokey=1 --group 1:1:1", "nokey is no known key; known keys: block_size"),
    ("plan --set gpu_block_siz=16", "did you mean gpu_block_size?"),
    ("plan nofile.toml", "nofile.toml cannot be read"),
    ("plan pyproject.cfg --layers 3", "must end in .toml or .json"),
    (f"{SIZES}=64XB --group 80:8:128", "such as 1048576, '512MiB' or '10GB'; got '64XB'"),
    (f"{SIZES}=1GiB --group 80:8", "must be LAYERS:KV_HEADS:HEAD_DIM"),
    ("run nofile", "nofile: No such file"),
    ("run --policy x", "unknown cache policy 'x': known are adaptive, arc, lru"),
    ("run --capacity 0%", "or a percentage such as 5%; got '0%'"),
    ("run --feed abc", "such as tcp://127.0.0.1:5557; got 'abc'"),
    ("run --feed-replay tcp://x:1", "--feed-replay needs --feed ENDPOINT"),
    ("run --consumer dynamo", "--consumer needs --feed ENDPOINT"),
    ("run --http 1", "must be HOST:PORT, such as 127.0.0.1:9464; got '1'"),
    ("run --speed 0", "must be 'max' or a positive number; got '0'"),
    ("run --concurrency 0", "at least 1; got '0'"),
    ("run --forever --dry", "need the service: leave --dry out"),
    ("simulate --policy zzz", "unknown cache policy 'zzz'"),
    ("simulate --hint x", "such as finished:0.8:0.02"),
    ("bench chaos --ops 0", "at least 1; got '0'"),
    ("doctor nofile.toml", "nofile.toml cannot be read"),
]


@pytest.mark.parametrize(("line", "told"), MISTAKES)
def test_a_mistake_is_told_with_its_value_and_what_is_right(line, told, capsys):
    try:
        code = main(line.split())
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert told in captured.err


@pytest.mark.parametrize("line", ["plan --help", "simulate --requests 20", "run --requests 20 --dry"])
def test_a_reader_that_goes_away_gets_no_traceback(line):
    code = "import sys; from kvoffload.cli.main import main; sys.exit(main(sys.argv[1:]))"
    with subprocess.Popen(
        [sys.executable, "-c", code, *line.split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        process.stdout.close()
        told = process.stderr.read()
    assert "Traceback" not in told
    assert "Exception ignored" not in told
