"""The command line's frame: help, exit codes, one clear line for what is wrong."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvoffload.cli import main as cli
from kvoffload.cli import schema
from kvoffload.cli.bench import BENCHES
from kvoffload.cli.feed import FEED_COMMANDS

ROOT = Path(__file__).parents[3]
LEAVES = (
    [(name,) for name in cli.COMMANDS]
    + [("bench", name) for name in BENCHES]
    + [("feed", name) for name in FEED_COMMANDS]
)


def test_help_is_fast_and_loads_nothing_heavy():
    code = (
        "import sys\nfrom kvoffload.cli.main import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'zmq', 'pydantic', 'numpy', 'rich'} & set(sys.modules)))"
    )
    start = time.perf_counter()
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert time.perf_counter() - start < 2.0  # 0.1 s on an idle machine; the claim is what is not loaded
    assert out.stdout.rstrip().endswith("[]")


def test_help_lists_only_commands_that_are_installed(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    listed = set(re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE))
    assert listed == set(cli.existing(cli.COMMANDS))
    assert "schema" in listed
    assert cli.existing({"none": ("kvoffload.cli.none", "")}) == {}


@pytest.mark.parametrize("name", sorted(cli.existing(cli.COMMANDS)))
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0
    assert len(capsys.readouterr().out) > 100


@pytest.mark.parametrize("path", sorted(LEAVES, key=str))
def test_every_command_shows_examples(path, capsys):
    with pytest.raises(SystemExit):
        cli.main([*path, "--help"])
    assert f"Examples:\n  kvoffload {' '.join(path)}" in capsys.readouterr().out


def test_the_exit_codes_are_in_the_help(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    shown = capsys.readouterr().out
    for code in (cli.OK, cli.FAILED, cli.USAGE, cli.INTERRUPTED):
        assert f"\n  {code} " in shown


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["schema", "--nonsense"]])
def test_usage_mistakes_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2


def test_generated_files_are_in_step(capsys):
    assert cli.main(["schema", str(ROOT), "--check"]) == 0


def test_schema_writes_what_it_checks(tmp_path, capsys):
    assert cli.main(["schema", str(tmp_path / "new"), "--check"]) == 1
    assert cli.main(["schema", str(tmp_path / "new")]) == 0
    assert cli.main(["schema", str(tmp_path / "new"), "--check"]) == 0
    assert all((tmp_path / "new" / name).read_text() == text for name, text in schema.generated().items())


def test_schema_as_json_is_one_object(tmp_path, capsys):
    root = str(tmp_path / "new")
    assert cli.main(["schema", root, "--check", "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["not_in_step"]) == len(schema.generated())
    assert cli.main(["schema", root, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["written"]) == len(schema.generated())
    assert cli.main(["schema", root, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"written": [], "not_in_step": []}


@pytest.mark.parametrize(
    "line",
    [
        "run --dry --requests 20",
        "simulate --requests 20 --processes 1",
        "plan --set gpu_block_size=16 --set cpu_bytes_to_use=1GiB --group 32:8:128",
        "doctor",
        "schema --check",
        "bench chaos --ops 20",
    ],
)
def test_what_goes_into_a_pipe_has_no_colours(line):
    code = "import sys; from kvoffload.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *line.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert "\x1b" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
