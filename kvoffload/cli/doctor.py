"""Check this machine: memory, cgroup, /dev/shm, memlock, kernel, GPU driver, ports, and what dead processes left.

With CONFIG the checks are against what it asks for. The exit code is 1 when there is a problem.

Examples:
  kvoffload doctor
  kvoffload doctor kvoffload.toml --json
  kvoffload doctor --clean
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from kvoffload.cli.machine import Finding, examine
from kvoffload.cli.report import print_json
from kvoffload.config import OffloadConfig

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG", help="configuration file (.toml or .json)")
    parser.add_argument("--clean", action="store_true", help="remove files in /dev/shm that dead processes left")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def run(args: argparse.Namespace) -> int:
    """Look at everything and report."""
    config = OffloadConfig.load(args.config) if args.config is not None else None
    findings = list(examine(config, clean=args.clean))
    problems = sum(finding.state == "problem" for finding in findings)
    if args.json:
        print_json({"problems": problems, "findings": [asdict(finding) for finding in findings]})
    else:
        _print(findings)
    return 1 if problems else 0


def _print(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for finding in findings:
        state = f"[{_STYLES[finding.state]}]{finding.state}[/]"
        remedy = f"\n[dim]{finding.remedy}[/]" if finding.remedy else ""
        table.add_row(state, f"[bold]{finding.name}[/]", finding.found + remedy)
    Console().print(table)
