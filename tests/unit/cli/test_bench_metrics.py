"""`kvoffload bench metrics` reports what counting and scraping cost."""

import json

from kvoffload.cli.main import main


def test_bench_metrics_reports_shares_and_lags(capsys):
    assert main(["bench", "metrics", "--json", "--jobs", "20", "--repeat", "2", "--scrapes", "3"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert 0 < report["transfer_record_share"] < report["records_share"] < 1
    assert report["series"] > 200
    assert report["scrape_ms"] > 0
    assert report["scrape_loop_lag_p99_ms"] >= 0


def test_bench_metrics_prints_a_table(capsys):
    main(["bench", "metrics", "--jobs", "4", "--repeat", "1", "--scrapes", "1"])
    assert "cost of metrics" in capsys.readouterr().out
