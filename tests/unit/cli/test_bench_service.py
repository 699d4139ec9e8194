"""`kvoffload bench service`: every figure is there, and nothing is lost while it measures."""

import json

import pytest

from kvoffload.cli.main import main


@pytest.mark.parametrize("loop", [[], ["--uvloop"]])
def test_report_has_the_figures_and_serves_every_waiter(loop, capsys):
    assert main(["bench", "service", "--rounds", "50", "--waiters", "1000", "--json", *loop]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["waiters_served"] == 1000
    assert (report["disconnects"], report["disconnect_blocks_freed"]) == (1000, 2000)
    assert report["disconnect_blocks_freed_early"] == 0
    assert report["wake_p50_seconds"] > 0
    assert report["wake_ratio"] > 0
