"""Many simulations: every policy, hint and capacity over every trace, in as many processes as were allowed."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import active_children, get_context
from pathlib import Path

from kvoffload.simulate.hints import parse_hint
from kvoffload.simulate.simulator import SimulatedTrace, SimulationResult, simulate


@dataclass(frozen=True, slots=True)
class TraceSource:
    """Where requests come from: a file, or the built-in chats."""

    path: Path | None
    keep_partial: bool = False
    seed: int = 0
    limit: int | None = None
    skip_bad_lines: bool = False

    def load(self) -> SimulatedTrace:
        """Read it."""
        return SimulatedTrace(
            self.path,
            keep_partial=self.keep_partial,
            seed=self.seed,
            limit=self.limit,
            skip_bad_lines=self.skip_bad_lines,
        )


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulation to run."""

    source: TraceSource
    policy: str
    hint: str
    capacity: int
    warmup: float
    store_step: int


def run_cells(
    cells: Sequence[Cell], jobs: int = 1, progress: Callable[[], None] = lambda: None
) -> list[SimulationResult]:
    """Return the results in the order of `cells`; `progress` is called after each."""
    results: list[SimulationResult | None] = [None] * len(cells)
    for index, result in _completed(cells, jobs):
        results[index] = result
        progress()
    return [result for result in results if result is not None]


def _completed(cells: Sequence[Cell], jobs: int) -> Iterator[tuple[int, SimulationResult]]:
    if min(jobs, len(cells)) <= 1:
        yield from ((index, run_cell(cell)) for index, cell in enumerate(cells))
        return
    others = set(active_children())
    pool = ProcessPoolExecutor(min(jobs, len(cells)), mp_context=get_context("spawn"), initializer=_leave_interrupts)
    try:
        with _signals_held():  # a process that is being started must not see the parent go
            running = {pool.submit(run_cell, cell): index for index, cell in enumerate(cells)}
        for future in as_completed(running):
            yield running[future], future.result()
    except BaseException:  # nobody waits for cells whose results nobody takes
        for process in set(active_children()) - others:
            process.terminate()
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()


@contextmanager
def _signals_held() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait while the block runs; processes started in it begin with both held."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave_interrupts() -> None:
    """In a process of the pool: Ctrl-C is the parent's affair, which ends this process by SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})


def run_cell(cell: Cell) -> SimulationResult:
    """Run one simulation; the trace stays loaded for the next one."""
    return simulate(
        _loaded(cell.source),
        cell.policy,
        cell.capacity,
        hint=parse_hint(cell.hint),
        warmup=cell.warmup,
        store_step=cell.store_step,
    )


@lru_cache(maxsize=1)
def _loaded(source: TraceSource) -> SimulatedTrace:
    trace = source.load()
    gc.collect()
    gc.freeze()  # the requests live as long as the process: no collection needs to look at them
    return trace
