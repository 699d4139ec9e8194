"""`kvoffload run --dry`: options, output, what is wrong."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from kvoffload.cli.main import main
from kvoffload.events.publisher import FeedPublisher

ROOT = Path(__file__).parents[3]
SHM = Path("/dev/shm")
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


def test_a_skipped_file_without_a_good_line_says_what_was_wrong(tmp_path, capsys):
    path = tmp_path / "t.jsonl"
    path.write_text("oops\n")
    assert main(["run", str(path), "--skip-bad-lines"]) == 2
    assert f"no requests; skipped 1 line(s), the first: {path}:1: not JSON" in capsys.readouterr().err


def test_prompts_without_blocks_are_refused(tmp_path, capsys):
    path = tmp_path / "t.jsonl"
    path.write_text(LINE.replace("[1, 2]", "[]"))
    assert main(["run", str(path), "--dry", "--capacity", "10"]) == 2
    assert "no prompt has a block" in capsys.readouterr().err


def test_a_trace_that_can_be_read_only_once_is_refused(capsys):
    with socket.socket() as pipe:
        assert main(["run", f"/proc/self/fd/{pipe.fileno()}", "--dry"]) == 2
    assert "No such device" in capsys.readouterr().err
    assert main(["run", "/dev/null", "--dry"]) == 2
    assert "not a regular file" in capsys.readouterr().err


def test_sizes_beyond_any_machine_are_one_clear_line(capsys):
    assert main(["run", "--dry", "--requests", "5", "--cpu-bytes", "9" * 30, "--block-bytes", "8"]) == 1
    err = capsys.readouterr().err
    assert "does not fit into memory" in err
    assert main(["run", "--dry", "--requests", "5", "--gpu-blocks", "1000000000000"]) == 0


def test_a_gpu_pool_below_the_longest_prompt_is_raised_to_it(capsys):
    assert main(["run", "--dry", "--requests", "5", "--gpu-blocks", "1", "--capacity", "100"]) == 0
    assert "--gpu-blocks is raised" in capsys.readouterr().err


def test_a_metrics_file_that_cannot_be_written_is_refused_before_the_run(tmp_path, capsys):
    assert main(["run", "--requests", "5", "--metrics-dump", str(tmp_path)]) == 2
    assert f"cannot write {tmp_path}: Is a directory" in capsys.readouterr().err


@pytest.mark.parametrize("output", [[], ["--json"]])
def test_a_full_disk_under_standard_output_is_one_clear_line(output):
    command = [sys.executable, "-c", "import sys; from kvoffload.cli.main import main; sys.exit(main())"]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [*command, "run", "--dry", "--requests", "5", "--capacity", "500", *output],
            check=False, stdout=full, stderr=subprocess.PIPE, cwd=ROOT, text=True,
        )  # fmt: skip
    assert ended.returncode == 1
    assert ended.stderr == (
        "kvoffload: standard output cannot be written: no space left; make room there, or send it elsewhere\n"
    )


def test_without_standard_error_the_output_is_still_one_object():
    code = "import sys; sys.stderr = None; from kvoffload.cli.main import main; sys.exit(main())"
    ended = subprocess.run(
        [sys.executable, "-c", code, "run", "--dry", "--requests", "5", "--capacity", "1", "--json"],
        stdout=subprocess.PIPE, cwd=ROOT, text=True, check=True,
    )  # fmt: skip
    assert json.loads(ended.stdout)["requests"] == 5


def test_memory_below_one_block_is_refused_with_both_numbers(capsys):
    assert main(["run", "--dry", "--cpu-bytes", "1KiB", "--block-bytes", "4KiB"]) == 2
    assert "block of 4096 bytes (--block-bytes 4096 x --block-size-factor 1); got 1024" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--capacity", "0"],
        ["--capacity", "-5%"],
        ["--capacity", "x"],
        ["--capacity", "nan%"],
        ["--capacity", "1e308%"],
        ["--capacity", "9" * 23],
        ["--requests", "9" * 20],
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


FIELDS = {
    "requests", "requested_blocks", "prefix_hit_ratio", "stored_blocks", "loaded_blocks", "evicted_blocks",
    "bytes_stored", "bytes_loaded", "verified_blocks", "corrupt_blocks", "store_gbps", "load_gbps", "load_latency_ms",
    "max_loop_lag_ms", "failures", "leaked",
}  # fmt: skip


def test_a_run_of_the_service_reports_every_field(capsys):
    arguments = ["run", "--requests", "60", "--block-bytes", "1KiB", "--capacity", "50%", "--json"]
    assert main(arguments) == 0
    values = json.loads(capsys.readouterr().out)
    assert values.keys() >= FIELDS
    assert values["load_latency_ms"].keys() == {"p50", "p99"}
    assert values["leaked"] == {"pins": 0, "jobs": 0, "tasks": 0, "threads": 0, "shm": 0}
    assert values["corrupt_blocks"] == 0
    assert values["verified_blocks"] == values["loaded_blocks"] > 0


def test_a_run_of_the_service_prints_a_table(capsys):
    assert main(["run", "--requests", "20", "--block-bytes", "1KiB", "--gpu-blocks", "300", "--no-verify"]) == 0
    out = capsys.readouterr().out
    assert "leaked" in out
    assert "pins 0, jobs 0, tasks 0, threads 0, shm 0" in out


def test_a_corrupt_block_is_a_failure(monkeypatch, capsys):
    monkeypatch.setattr("kvoffload.simulate.gpu_memory.SimulatedGpu.count_wrong", lambda *_: 1)
    assert main(["run", "--requests", "30", "--block-bytes", "1KiB", "--capacity", "80%"]) == 1


@pytest.mark.parametrize("arguments", [["--speed", "0"], ["--speed", "fast"], ["--concurrency", "0"]])
def test_wrong_run_options_are_usage_mistakes(arguments):
    with pytest.raises(SystemExit) as stop:
        main(["run", *arguments])
    assert stop.value.code == 2


@pytest.mark.parametrize(
    ("number", "ignored"),
    [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGTERM, True)],
    ids=["ctrl-c", "sigterm", "sigterm-in-the-background"],
)
def test_interrupt_exits_with_its_own_code_and_leaves_nothing(tmp_path, number, ignored):
    """A script's `&` starts programs that ignore SIGINT; `timeout` and containers send SIGTERM."""
    before = set(SHM.iterdir())
    code = (
        f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN if {ignored} else signal.default_int_handler);"
        "import sys; from kvoffload.cli.main import main; sys.exit(main(['run', '--speed', '1', '--capacity', '500']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as process:  # fmt: skip
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and len(list(Path(f"/proc/{process.pid}/task").iterdir())) < 4:
            time.sleep(0.02)  # until its copy threads run
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    told = (130, b"", "interrupted") if number == signal.SIGINT else (143, b"", "terminated")
    assert (process.returncode, out, err.decode().strip()) == told
    assert {path for path in set(SHM.iterdir()) - before if f"{process.pid}" in path.name} == set()
    assert list(tmp_path.iterdir()) == []


def test_the_metrics_at_the_end_are_written_to_a_file(tmp_path, capsys):
    dump = tmp_path / "metrics.txt"
    assert main(["run", "--requests", "20", "--json", "--metrics-dump", str(dump)]) == 0
    report = json.loads(capsys.readouterr().out)
    lines = dict(line.rsplit(" ", 1) for line in dump.read_text().splitlines() if not line.startswith("#"))
    labels = 'engine="0",model_name="simulated"'
    assert float(lines[f"kvoffload_requests_total{{{labels}}}"]) == report["requests"]
    loaded = lines[f'kvoffload_transfer_bytes_total{{direction="load",{labels}}}']
    assert float(loaded) == report["bytes_loaded"]
    saved = float(lines[f"kvoffload_prefill_seconds_saved_total{{{labels}}}"])
    assert saved == pytest.approx(float(lines[f"kvoffload_loaded_tokens_total{{{labels}}}"]) / 10_000)


def test_a_run_without_end_serves_metrics_until_it_is_told_to_stop():
    command = [sys.executable, "-c", "import sys; from kvoffload.cli.main import main; sys.exit(main(sys.argv[1:]))"]
    options = ["run", "--forever", "--requests", "10", "--speed", "1000", "--http", "127.0.0.1:0", "--json"]
    with subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            where = next(line for line in process.stderr if line.startswith("metrics on "))
            url = where.removeprefix("metrics on ").strip()
            served = 0.0
            while served <= 10:  # more than one round of the workload
                try:
                    with urllib.request.urlopen(url, timeout=10) as reply:
                        found = [line for line in reply if line.startswith(b"kvoffload_requests_total{")]
                        served = float(found[0].rsplit(b" ", 1)[1])
                except urllib.error.HTTPError as error:  # not ready yet
                    error.close()
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0, err
    assert json.loads(out)["requests"] >= served


@pytest.mark.parametrize(
    "option", [["--forever"], ["--http", "127.0.0.1:0"], ["--metrics-dump", "x"], ["--workers", "2"]]
)
def test_what_needs_the_service_is_refused_with_dry(option, capsys):
    assert main(["run", "--dry", "--requests", "5", *option]) == 2
    assert "--dry" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["9464", ":9464", "host:", "host:99999", "host:x"])
def test_an_address_is_host_and_port(wrong, capsys):
    with pytest.raises(SystemExit):
        main(["run", "--http", wrong])
    assert "HOST:PORT" in capsys.readouterr().err


def test_an_address_that_cannot_be_bound_is_a_mistake_in_the_call(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["run", "--requests", "5", "--http", f"127.0.0.1:{port}"]) == 2
    assert f"127.0.0.1:{port}" in capsys.readouterr().err


def test_a_run_publishes_the_feed_when_asked_for(tmp_path):
    dump = tmp_path / "metrics.txt"
    options = ["--feed", "tcp://127.0.0.1:0", "--metrics-dump", str(dump)]
    assert main(["run", "--requests", "20", "--json", *options]) == 0
    lines = dict(line.rsplit(" ", 1) for line in dump.read_text().splitlines() if not line.startswith("#"))
    labels = '{engine="0",model_name="simulated"}'
    assert float(lines[f"kvoffload_feed_enabled{labels}"]) == 1


def test_a_feed_on_a_local_path_answers_replays_beside_it_and_leaves_no_file(tmp_path, monkeypatch):
    seen = []
    start = FeedPublisher.start

    def started(feed):
        start(feed)
        seen.extend([*feed.endpoints, *feed.replay_endpoints])
        seen.append(sorted(path.name for path in tmp_path.iterdir()))

    monkeypatch.setattr(FeedPublisher, "start", started)
    assert main(["run", "--requests", "20", "--json", "--feed", f"ipc://{tmp_path}/feed"]) == 0
    assert seen == [f"ipc://{tmp_path}/feed", f"ipc://{tmp_path}/feed_replay", ["feed", "feed_replay"]]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", ["5557", "tcp://host", "tcp://host:x"])
def test_a_feeds_endpoint_ends_in_a_port(wrong, capsys):
    with pytest.raises(SystemExit):
        main(["run", "--requests", "5", "--feed", wrong])
    assert "--feed" in capsys.readouterr().err


def test_an_index_in_the_same_process_equals_the_cache_at_the_end(capsys):
    for extra in ([], ["--block-size-factor", "2"], ["--policy", "arc"]):
        assert main(["run", "--requests", "60", "--capacity", "20%", "--json", *extra]) == 0
        feed = json.loads(capsys.readouterr().out)["feed"]
        assert feed["index_equals_cache"] is True
        assert feed["index_blocks"] > 0
        assert feed["received"] == feed["published"]
        assert feed["gaps"] == feed["dropped"] == 0


def test_the_feed_can_be_left_out(capsys):
    assert main(["run", "--requests", "5", "--json", "--no-feed"]) == 0
    assert "feed" not in json.loads(capsys.readouterr().out)
    assert main(["run", "--requests", "5", "--feed-replay", "tcp://127.0.0.1:5558"]) == 2
    assert "--feed ENDPOINT" in capsys.readouterr().err


def test_the_feed_of_a_run_has_no_file_that_a_kill_could_leave_behind(capsys):
    assert main(["run", "--requests", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["feed"]["endpoint"].startswith("ipc://@kvoffload-run-")
