"""`kvoffload run --dry`: options, output, what is wrong."""

import json

import pytest

from kvoffload.cli.main import main

LINE = '{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}\n'


def test_json_is_one_object_on_standard_output(capsys):
    assert main(["run", "--dry", "--requests", "50", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["requests"] == 50
    assert 0 <= values["prefix_hit_ratio"] <= 1
    assert values["stored_blocks"] > 0


def test_table_names_what_was_run(capsys):
    assert main(["run", "--dry", "--requests", "20", "--policy", "arc", "--store-threshold", "2"]) == 0
    out = capsys.readouterr().out
    assert "arc" in out
    assert "prefix hit ratio" in out


def test_unknown_policy_names_the_known_ones(capsys):
    assert main(["run", "--dry", "--policy", "mru"]) == 2
    assert "known are" in capsys.readouterr().err


def test_bad_trace_line_is_one_clear_line_and_exit_code_2(tmp_path, capsys):
    path = tmp_path / "t.jsonl"
    path.write_text(LINE + "{oops\n" + LINE)
    assert main(["run", str(path), "--dry"]) == 2
    err = capsys.readouterr().err
    assert f"{path}:2: not JSON" in err
    assert err.count("\n") == 1
    assert main(["run", str(path), "--dry", "--skip-bad-lines", "--capacity", "100%", "--json"]) == 0
    captured = capsys.readouterr()
    assert "skipped 1 line" in captured.err
    assert json.loads(captured.out)["skipped_lines"] == 1


def test_capacity_below_one_request_works_and_says_so(tmp_path, capsys):
    path = tmp_path / "t.jsonl"
    path.write_text(LINE * 2)
    assert main(["run", str(path), "--dry", "--capacity", "1", "--store-step", "1", "--json"]) == 0
    captured = capsys.readouterr()
    assert "less than the longest prompt" in captured.err
    assert json.loads(captured.out)["stored_blocks"] > 0


def test_memory_below_one_block_is_refused_with_both_numbers(capsys):
    assert main(["run", "--dry", "--cpu-bytes", "1KiB", "--block-bytes", "4KiB"]) == 2
    assert "1024 bytes, a block has 4096" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--capacity", "0"],
        ["--capacity", "-5%"],
        ["--capacity", "x"],
        ["--cpu-bytes", "ten"],
        ["--cpu-bytes", "1GiB", "--capacity", "5%"],
        ["--store-step", "0"],
        ["--gpu-blocks", "-1"],
        ["--requests", "0"],
        ["--partial-blocks", "maybe"],
    ],
)
def test_wrong_option_values_are_usage_mistakes(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["run", "--dry", *arguments])
    assert stop.value.code == 2
    assert arguments[0].lstrip("-") in capsys.readouterr().err
