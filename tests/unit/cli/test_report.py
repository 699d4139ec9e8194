"""Tables show values by their name's unit."""

import pytest

from kvoffload.cli.report import readable


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("wake p50 seconds", 0.0000451, "45.1 µs"),
        ("wake_p99_seconds", 0.00472, "4.72 ms"),
        ("seconds", 6.992, "6.992"),
        ("exit_seconds", 0.0, "0.000"),
        ("hit_ratio", 0.4741, "47.41 %"),
        ("bytes_loaded", 3 << 20, "3.0 MiB"),
        ("load_gbps", 2.5, "2.50 GB/s"),
        ("index_equals_cache", True, "yes"),
        ("rejected", None, "-"),
        ("requests", 2000, "2,000"),
    ],
)
def test_a_value_is_readable(name, value, shown):
    assert readable(name, value) == shown
