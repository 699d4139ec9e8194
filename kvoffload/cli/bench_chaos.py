"""Random stores, loads, leases, cancels, aborts, resets, failures and hangs; after each, the books and every byte.

Two small services are driven in turn: one over copies that end, fail or hang by script, one over threads that really
copy. Nothing but a contract's own answers may come back, the conservation laws hold, no copy touches a freed block, and
every loaded block holds what was stored. Exit code 1 when anything was violated.

Examples:
  kvoffload bench chaos
  kvoffload bench chaos --ops 200000 --seed 7 --json
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import resource
import time
from pathlib import Path

from kvoffload.cli.main import FAILED, OK
from kvoffload.cli.report import print_json, print_table
from kvoffload.cli.values import add_json, add_seed, add_uvloop, loop_factory, positive

_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--ops`, `--seed`, `--uvloop` and `--json`."""
    parser.add_argument("--ops", type=positive, default=20_000, metavar="N", help="operations (default 20000)")
    add_seed(parser)
    add_uvloop(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the chaos and report; 1 when something was violated."""
    from kvoffload.simulate.chaos.driver import ChaosDriver

    new_loop = loop_factory(args)
    log = logging.getLogger("kvoffload.service")
    level = log.level
    log.setLevel(logging.CRITICAL)  # faults are the point here
    resident: list[tuple[int, int]] = []

    def note(done: int) -> None:
        resident.append((done, resident_bytes()))

    driver = ChaosDriver(args.seed, note)
    began, cpu = time.perf_counter(), time.process_time()
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(driver.run(args.ops))
    finally:
        log.setLevel(level)
    values: dict[str, object] = {
        "ops": args.ops,
        "seed": args.seed,
        "violations": len(driver.violations),
        "seconds": round(time.perf_counter() - began, 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
        "rss_growth_bytes": _second_half_growth(resident, args.ops),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "first_violations": driver.violations[:_SHOWN],
    }
    if args.json:
        print_json(values)
    else:
        print_table("chaos", {name: value for name, value in values.items() if name != "first_violations"})
        for violation in driver.violations[:_SHOWN]:
            print(violation)
    return FAILED if driver.violations else OK


def resident_bytes() -> int:
    """Return the process's resident memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def _second_half_growth(resident: list[tuple[int, int]], ops: int) -> int:
    half = [size for done, size in resident if done >= ops // 2]
    return half[-1] - half[0] if len(half) > 1 else 0
