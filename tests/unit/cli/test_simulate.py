"""`kvoffload simulate`: what is asked for is checked first, and each cell is one row."""

import json
from importlib.util import find_spec

import pytest

from kvoffload.cli.main import main
from kvoffload.simulate import plot as plot_module

SMALL = ["simulate", "--requests", "60", "--jobs", "1"]


def rows_of(capsys, *options):
    assert main([*SMALL, "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_has_one_row_per_cell_with_the_documented_fields(capsys):
    rows = rows_of(
        capsys, "--policy", "lru,adaptive,belady", "--capacity", "5%,40", "--hint", "none", "--hint", "noise"
    )
    assert [(row["policy"], row["hint"]) for row in rows[::2]] == [
        ("lru", None), ("adaptive", None), ("adaptive", "noise"), ("belady", None),
    ]  # fmt: skip
    assert rows[1]["capacity_blocks"] == 40
    assert set(rows[0]) == {
        "trace", "policy", "hint", "capacity_blocks", "prefix_hit_ratio", "block_hit_ratio", "stored_blocks",
        "evicted_blocks", "seconds",
    }  # fmt: skip


def test_traces_with_one_file_name_are_told_apart(tmp_path, capsys):
    paths = [tmp_path / name / "t.jsonl" for name in ("a", "b")]
    for path in paths:
        path.parent.mkdir()
        path.write_text('{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}\n')
    rows = rows_of(capsys, *map(str, paths), "--policy", "lru", "--capacity", "5")
    assert [row["trace"] for row in rows] == [str(path) for path in paths]


def test_processes_do_not_change_the_figures(capsys):
    options = ("--policy", "lru,adaptive", "--capacity", "5%,20%")
    alone = rows_of(capsys, *options)
    assert main(["simulate", "--requests", "60", "--jobs", "2", "--json", *options]) == 0
    together = json.loads(capsys.readouterr().out)
    for row in (*alone, *together):
        del row["seconds"]
    assert alone == together


def test_the_table_shows_hits_and_stored_blocks(capsys):
    assert main([*SMALL, "--policy", "lru", "--capacity", "5%", "--metric", "block"]) == 0
    out = capsys.readouterr().out
    assert "block hits (%)" in out
    assert "blocks stored" in out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--policy", "lfu"], "known are adaptive, arc, lru, belady"),
        (["--hint", "finished:80:2"], "between 0 and 1"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_runs(capsys, options, said):
    with pytest.raises(SystemExit):
        main([*SMALL, *options])
    assert said in capsys.readouterr().err


def test_a_bad_line_is_skipped_and_counted_when_asked_for(tmp_path, capsys):
    path = tmp_path / "t.jsonl"
    line = '{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}\n'
    path.write_text(line + "{oops\n" + line)
    options = ["simulate", str(path), "--policy", "lru", "--capacity", "100%", "--warmup", "0", "--json"]
    assert main(options) == 2
    assert "--skip-bad-lines" in capsys.readouterr().err
    assert main([*options, "--skip-bad-lines"]) == 0
    captured = capsys.readouterr()
    assert f"skipped 1 line(s), the first: {path}:2: not JSON" in captured.err
    assert len(json.loads(captured.out)) == 1


@pytest.mark.parametrize("options", [["--capacity", "0%"], ["--capacity", "5%,,"], ["--warmup", "1"]])
def test_values_out_of_range_are_usage_mistakes(capsys, options):
    with pytest.raises(SystemExit) as stop:
        main([*SMALL, *options])
    assert stop.value.code == 2
    assert "must be" in capsys.readouterr().err


def test_a_plot_without_matplotlib_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr(plot_module, "find_spec", lambda _name: None)
    assert main([*SMALL, "--plot", "hits.png"]) == 1
    assert "pip install 'kvoffload[plot]'" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_the_plot_is_written(capsys, tmp_path):
    picture = tmp_path / "hits.png"
    assert main([*SMALL, "--policy", "lru,adaptive,belady", "--capacity", "5%,20%", "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
@pytest.mark.parametrize(("name", "told"), [("x.zzz", "must end in one of ."), ("no/x.png", "there is no folder")])
def test_a_picture_that_could_not_be_drawn_is_refused_before_the_time_is_spent(name, told, tmp_path, capsys):
    assert main([*SMALL, "--plot", str(tmp_path / name)]) == 2
    message = capsys.readouterr().err
    assert "--plot" in message
    assert name in message
    assert told in message
