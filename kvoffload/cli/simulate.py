"""Hit ratios of cache policies over capacities: how much memory, which policy, what a hint is worth.

Drives the production manager with request traces, without moving bytes. `belady` is the clairvoyant bound. A hint says
what the embedder could have told about each request: finished:SAID:WRONG (the share of finished conversations said to
be finished, and of living ones wrongly so), return:SIGMA (return times, each wrong by a factor exp(N(0, SIGMA))), noise
or none. Policies that do not listen to hints (lru, arc, belady) are run once, without.

Examples:
  kvoffload simulate TRACE.jsonl --policy lru,adaptive,belady --capacity 1%,2%,5%,10%,20%
  kvoffload simulate TRACE.jsonl --policy adaptive --hint none --hint finished:0.8:0.02 --json
  kvoffload simulate --policy lru,adaptive --plot hits.png
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from kvoffload.cli.progress import progress_bar
from kvoffload.cli.values import Capacity, add_json, add_workload, capacity, listed, positive, whole
from kvoffload.errors import ConfigError

if TYPE_CHECKING:
    from kvoffload.simulate.simulator import SimulationResult

_DEFAULT_CAPACITIES = "1%,2%,5%,10%,20%"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("traces", nargs="*", type=Path, metavar="TRACE", help="request traces, JSON lines (default built-in chats)")
    add(
        "--policy",
        type=_policies,
        default="lru,arc,adaptive,belady",
        metavar="POLICY,...",
        help="cache policies (default %(default)s)",
    )
    add(
        "--capacity",
        type=_capacities,
        default=_DEFAULT_CAPACITIES,
        metavar="N|N%,...",
        help="host memory in blocks, or in %% of each trace's unique blocks (default "
        + _DEFAULT_CAPACITIES.replace("%", "%%")
        + ")",
    )
    add(
        "--warmup",
        type=_share,
        default=0.5,
        metavar="SHARE",
        help="share of the trace's time not counted (default 0.5)",
    )
    add(
        "--hint",
        action="append",
        type=_hint,
        metavar="HINT",
        help="hint given at each request's end; may be repeated (default none)",
    )
    add(
        "--metric",
        choices=("prefix", "block"),
        default="prefix",
        help="which hits the table and the plot show (default prefix)",
    )
    add_workload(parser)
    add("--seed", type=whole, default=0, metavar="N", help="seed of the built-in chats and of the hints (default 0)")
    add("--processes", "--jobs", type=positive, metavar="N", help="processes (default as many as there are CPUs)")
    add_json(parser, "print a JSON list")
    add(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="draw hit ratio over capacity; needs kvoffload[plot] (default no picture)",
    )


def run(args: argparse.Namespace) -> int:
    """Check everything that was asked for, simulate, report."""
    from kvoffload.simulate.plot import plot
    from kvoffload.simulate.simulator import DEAF
    from kvoffload.simulate.sweep import Cell, TraceSource, run_cells

    hints = list(dict.fromkeys(args.hint or ["none"]))
    if args.plot is not None:
        _check_plot(args.plot)
    cells = []
    for path in args.traces or [None]:
        source = TraceSource(
            path,
            keep_partial=args.partial_blocks == "keep",
            seed=args.seed,
            limit=args.requests,
            skip_bad_lines=args.skip_bad_lines,
        )
        loaded = source.load()
        unique = loaded.unique_blocks
        if loaded.bad_lines:
            print(f"skipped {loaded.bad_lines} line(s), the first: {loaded.first_error}", file=sys.stderr)
        del loaded  # a long trace is not held twice
        sizes = list(dict.fromkeys(max(1, size.resolve(unique)) for size in args.capacity))
        cells += [
            Cell(source, policy, hint, size, args.warmup, args.store_step)
            for policy in args.policy
            for hint in (hints if policy not in DEAF else ["none"])
            for size in sizes
        ]
    processes = args.processes or len(os.sched_getaffinity(0))
    with progress_bar("simulate", len(cells), unit="cells") as progress:
        results = run_cells(cells, processes, progress)
    if args.plot is not None:
        plot(results, args.metric, args.plot)
        print(f"wrote {args.plot}", file=sys.stderr)
    if args.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        for trace in dict.fromkeys(result.trace for result in results):
            _print_table([result for result in results if result.trace == trace], args.metric)
    return 0


def _print_table(results: Sequence[SimulationResult], metric: str) -> None:
    """Print one trace's figures: a row per policy and hint, a column per capacity, hits (%) and blocks stored."""
    sizes = sorted({result.capacity_blocks for result in results})
    rows: dict[str, dict[int, SimulationResult]] = {}
    for result in results:
        name = f"{result.policy}, {result.hint}" if result.hint else result.policy
        rows.setdefault(name, {})[result.capacity_blocks] = result
    width = max(map(len, [*rows, "host memory (blocks)"]))
    print(f"{results[0].trace}\n")
    print(f"{'host memory (blocks)':{width}}", *(f"{size:>9,}" for size in sizes))
    print(f"\n{metric} hits (%)")
    for name, row in rows.items():
        ratios = (getattr(row[size], f"{metric}_hit_ratio") for size in sizes)
        print(f"{name:{width}}", *(f"{100 * ratio:9.2f}" for ratio in ratios))
    print("\nblocks stored")
    for name, row in rows.items():
        print(f"{name:{width}}", *(f"{row[size].stored_blocks:9,}" for size in sizes))
    print()


def _check_plot(path: Path) -> None:
    """Refuse a picture that could not be drawn, before the time is spent."""
    from kvoffload.simulate.plot import formats

    if path.suffix[1:].lower() not in formats():
        raise ConfigError(f"--plot must end in one of .{', .'.join(formats())}; got {str(path)!r}")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}; make it, or name another")


def _policies(text: str) -> list[str]:
    from kvoffload.simulate.simulator import check_policy

    names = listed(text)
    try:
        for name in names:
            check_policy(name)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return names


def _hint(text: str) -> str:
    from kvoffload.simulate.hints import parse_hint

    try:
        return parse_hint(text).text
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _capacities(text: str) -> list[Capacity]:
    return [capacity(part.strip()) for part in text.split(",")]


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be a share of at least 0 and below 1, such as 0.5; got {text!r}")
    return value
