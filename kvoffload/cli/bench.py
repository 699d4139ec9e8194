"""Measure one part of kvoffload; every figure is a ratio or a rate of one run on this machine.

Examples:
  kvoffload bench host --json
  kvoffload bench manager --help
"""

from __future__ import annotations

from kvoffload.cli.main import CommandParser, add_commands

BENCHES = {
    "host": ("kvoffload.cli.bench_host", "copies between host buffers, as a share of memcpy"),
    "cuda": ("kvoffload.cli.bench_cuda", "copies between GPU and host memory, as a share of the link"),
    "manager": ("kvoffload.cli.bench_manager", "operations of the manager per second, per policy"),
    "feed": ("kvoffload.cli.bench_feed", "events per second, replay and catch-up"),
    "ranks": ("kvoffload.cli.bench_ranks", "commands to rank processes, as a multiple of a bare round trip"),
    "metrics": ("kvoffload.cli.bench_metrics", "cost of a record and of a scrape"),
    "service": ("kvoffload.cli.bench_service", "what the async service adds to a copy; waiters and disconnects"),
    "chaos": ("kvoffload.cli.bench_chaos", "random cancels, failures and hangs, with the books checked"),
}


def add_arguments(parser: CommandParser) -> None:
    """Add one command per benchmark that is installed."""
    add_commands(parser, BENCHES)
