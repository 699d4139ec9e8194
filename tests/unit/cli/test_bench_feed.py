"""`kvoffload bench feed` measures everything it promises, in one run."""

from __future__ import annotations

import json

from kvoffload.cli.main import main


def test_bench_feed_reports_each_figure_as_json_and_warns_of_nothing(capsys, caplog):
    assert main(["bench", "feed", "--json", "--blocks", "800", "--repeat", "1"]) == 0
    result = json.loads(capsys.readouterr().out)
    for name in (
        "delivered_ratio", "publish_ratio", "encoding_ratio", "publish_to_receive_p99_microseconds",
        "bare_socket_p99_microseconds", "payload_bytes_per_block",
    ):  # fmt: skip
        assert result[name] > 0, name
    assert caplog.text == ""
    assert 0 < result["journal_bytes_per_block"] <= 300
