"""What the async service adds to a copy: wake-ups, waits and exits, beside what the machine itself takes.

`wake_ratio` is the median time from the end of one 64 KiB copy to the resumption of the coroutine that awaits the load,
as a multiple of a bare eventfd round trip from a thread to a coroutine in the same run. `waiters_*` is about ten
thousand loads that wait for a hundred prefixes, `disconnect_*` about a thousand clients cancelled during their copies.

Examples:
  kvoffload bench service
  kvoffload bench service --uvloop --json
"""

from __future__ import annotations

import argparse
import asyncio
from functools import partial

from kvoffload.cli.main import OK
from kvoffload.cli.report import print_json, print_table
from kvoffload.cli.values import add_json, add_uvloop, loop_factory, positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--rounds`, `--waiters`, `--uvloop` and `--json`."""
    parser.add_argument(
        "--rounds", type=positive, default=2000, metavar="N", help="loads and round trips that are timed (default 2000)"
    )
    parser.add_argument(
        "--waiters", type=positive, default=10_000, metavar="N", help="loads that wait at once (default 10000)"
    )
    add_uvloop(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    from kvoffload.simulate.service_bench import measure_disconnects, measure_waiters, measure_wake_ups

    values: dict[str, object] = {"loop": "uvloop" if args.uvloop else "asyncio", "rounds": args.rounds}
    measures = (
        partial(measure_wake_ups, args.rounds),
        partial(measure_waiters, args.waiters, 100),
        partial(measure_disconnects, 1000),
    )
    for measure in measures:  # begun one by one: an interrupt leaves none that was never awaited
        with asyncio.Runner(loop_factory=loop_factory(args)) as runner:
            values |= runner.run(measure())
    if args.json:
        print_json(values)
    else:
        print_table("service", values)
    return OK
