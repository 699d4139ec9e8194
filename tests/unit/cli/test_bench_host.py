"""`kvoffload bench host` measures the real handlers and reports shares of memcpy."""

import json

from kvoffload.cli.main import main


def test_bench_host_reports_every_case_as_a_share(capsys):
    assert main(["bench", "host", "--json", "--bytes", "4MiB", "--job-bytes", "1MiB", "--repeat", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report["cases"]) == [
        "4 KiB random",
        "4 KiB runs of 16",
        "64 KiB random",
        "256 KiB random",
        "2 MiB random",
    ]
    assert all(case["store_ratio"] > 0 and case["load_ratio"] > 0 for case in report["cases"].values())
    assert report["memcpy_gbps"] > 0
    assert report["all_met"] == all(case["met"] for case in report["cases"].values())


def test_bench_host_prints_a_table(capsys):
    main(["bench", "host", "--bytes", "4MiB", "--repeat", "1"])
    assert "share of memcpy" in capsys.readouterr().out
