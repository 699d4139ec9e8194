"""Check what kvoffload needs of this machine, and say what to do about each thing that is missing.

Looks at memory, the cgroup, /dev/shm, the limit of locked memory, kernel features, the GPU and its driver, leftovers of
dead processes, and the ports of the events feed. The exit code is 1 when something would fail.

Examples:
  kvoffload doctor
  kvoffload doctor offload.toml --json
  kvoffload doctor --clean
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from kvoffload.cli.machine_checks import FAILURE, NOTE, WARNING, Finding, Machine, check_all
from kvoffload.cli.main import FAILED, OK
from kvoffload.cli.report import print_json
from kvoffload.cli.values import add_json
from kvoffload.config import OffloadConfig

_MARKS = {FAILURE: "[red]✗", WARNING: "[yellow]![/]", NOTE: "·"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add(
        "config",
        nargs="?",
        type=Path,
        metavar="CONFIG",
        help="check for this configuration, .toml or .json (default the machine alone)",
    )
    add("--clean", action="store_true", help="remove shared memory of dead processes; what is in use is left alone")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Check and report."""
    config = OffloadConfig.load(args.config) if args.config is not None else None
    findings = list(check_all(Machine(), config, clean=args.clean))
    failed = any(finding.status == FAILURE for finding in findings)
    if args.json:
        print_json({"ok": not failed, "checks": [asdict(finding) for finding in findings]})
    else:
        _print(findings)
    return FAILED if failed else OK


def _print(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="kvoffload doctor", title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column()
    table.add_column(style="bold")
    table.add_column()
    for finding in findings:
        table.add_row(_MARKS.get(finding.status, "[green]✓"), finding.name, escape(finding.found))
        if finding.advice:
            table.add_row("", "", f"[dim]→ {escape(finding.advice)}")
    Console().print(table)
