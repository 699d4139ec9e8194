"""What an engine tells about itself: why blocks are not served, and its counters."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload.keys import OffloadKey
from kvoffload.service.board import TransferBoard
from kvoffload.service.core import Core, FirstLook, found_at
from kvoffload.service.jobs import JobState
from kvoffload.service.results import BlockReport, Stats


def explain(core: Core, per_group: Sequence[Sequence[OffloadKey]], looks: Sequence[FirstLook]) -> list[BlockReport]:
    """Say for each offloaded block of a request whether it is served, what last happened to it, what was found."""
    now = core.clock()
    reports = []
    for group_idx, group in enumerate(core.geometry.groups):
        reachable = True
        for index, key in enumerate(per_group[group_idx]):
            found = core.manager.match([key])
            state, age = "ready" if found.ready else "pending", None
            if not reachable and found.ready:
                state = "unreachable"
            elif found.ready and not core.serving:
                state = "unserved"
            reachable = reachable and bool(found.ready or found.pending)
            if not found.ready and not found.pending:
                fate = core.history.fate(key)
                state, age = (fate[0], now - fate[1]) if fate else ("never offered", None)
            first = found_at(looks[group_idx], index) if looks else None
            reports.append(BlockReport(index * group.factor, group_idx, state, age, first))
    return reports


def collect_stats(core: Core, board: TransferBoard) -> Stats:
    """Return what the manager, the books and the board count."""
    hung = [job for job in board.unended_jobs() if job.state is JobState.HUNG]
    return Stats(
        manager=core.manager.stats(),
        running_loads=board.num_running("load"),
        running_stores=board.num_running("store"),
        hung_jobs=len(hung),
        inflight_load_bytes=board.inflight_bytes["load"],
        inflight_store_bytes=board.inflight_bytes["store"],
        busy_gpu_blocks=core.book.num_busy,
        deferred_gpu_blocks=core.book.num_deferred,
        quarantined_gpu_blocks=len({block for job in hung for block in job.gpu_blocks}),
        generation=core.generation,
        debug_violations=core.checks.violations,
    )
