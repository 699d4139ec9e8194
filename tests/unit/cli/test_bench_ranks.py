"""`kvoffload bench ranks` reports what commands, a start and attaching cost."""

import json

from kvoffload.cli.main import main


def test_bench_ranks_reports_round_trips_lag_and_what_grew(capsys):
    arguments = ["bench", "ranks", "--rounds", "20", "--region", "8MiB", "--attach", "20", "--json"]
    assert main(arguments) == 0
    values = json.loads(capsys.readouterr().out)
    for kind in ("bare_us", "bare_all_us", "command_us", "with_copy_us"):
        assert 0 < values[kind]["p50"] <= values[kind]["p99"]
    assert values["command_over_bare_p50"] > 0
    assert values["region_progress_reports"] >= 2
    assert values["grown"]["fds"] == values["grown"]["threads"] == 0
