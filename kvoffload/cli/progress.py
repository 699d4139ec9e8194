"""A progress bar on a terminal; nothing where nobody looks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Advance(Protocol):
    """Moves the bar one step; `note` is shown beside it."""

    def __call__(self, note: str = "") -> None:
        """Move on."""


def _nothing(note: str = "") -> None:
    """Stand in for a bar that nobody sees."""


@contextmanager
def progress_bar(title: str, total: int, *, unit: str = "requests") -> Iterator[Advance]:
    """Show a bar on standard error while the block runs; yield what to call after each step."""
    if not sys.stderr.isatty():
        yield _nothing
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", style="cyan"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total, note="")

        def advance(note: str = "") -> None:
            progress.update(task, advance=1, note=note)

        yield advance
