"""What `kvoffload run` shows on a terminal while it runs: a small table, drawn over itself twice a second.

The loop only reads counters and formats a few numbers; writing, which a slow terminal can hold up, is a thread's work.
"""

from __future__ import annotations

import asyncio
import os
import queue
import shutil
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TextIO

from kvoffload.cli.report import readable_bytes
from kvoffload.service.results import Stats
from kvoffload.service.service import OffloadService
from kvoffload.service.waiting import in_thread
from kvoffload.simulate.drive import DriveResult

PERIOD_SECONDS = 0.5
_BAR = 24
_LABEL = 10


def wanted(*, as_json: bool, env: Mapping[str, str] = os.environ) -> bool:
    """Return whether somebody looks: both streams are terminals that can move the cursor, and no program reads."""
    return not as_json and sys.stdout.isatty() and sys.stderr.isatty() and env.get("TERM", "dumb") != "dumb"


@dataclass(frozen=True, slots=True)
class Sample:
    """The counters at one time; rates are differences of two.

    Attributes:
        at: Seconds of the loop's clock.
        result: Counters of the requests served so far, as (requests, requested blocks, loaded blocks, wrong blocks).
        stats: Counters and occupancy of the service.
        feed: Publications that wait for the sender, and seconds since it last took one; None: no feed.
    """

    at: float
    result: tuple[int, int, int, int]
    stats: Stats
    feed: tuple[int, float] | None


class LiveTable:
    """Draws a run's state over itself until the run ends, then wipes it.

    Args:
        total: Requests of the workload.
        factor: Engine blocks in an offloaded block.
        forever: The workload begins anew, so that there is no end to estimate.
        out: Where to draw; default: standard error.
        env: Variables; `NO_COLOR` is obeyed.
    """

    def __init__(
        self,
        total: int,
        factor: int,
        *,
        forever: bool = False,
        out: TextIO | None = None,
        env: Mapping[str, str] = os.environ,
    ) -> None:
        self._total, self._factor, self._forever = total, factor, forever
        self._out = sys.stderr if out is None else out
        self._bold, self._plain = ("", "") if env.get("NO_COLOR") else ("\x1b[1m", "\x1b[0m")
        self._result = DriveResult()
        self._drawn = 0
        self._frames: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def advance(self, so_far: DriveResult) -> None:
        """Take note of the result so far; nothing is drawn."""
        self._result = so_far

    @asynccontextmanager
    async def beside(self, service: OffloadService) -> AsyncIterator[None]:
        """Draw `service` and its requests while the block runs."""
        writer = threading.Thread(target=self._write_all, name="kvoffload-live", daemon=True)
        writer.start()  # once: the start of a thread waits for it, which a busy process makes long
        drawing = asyncio.get_running_loop().create_task(self._draw_often(service))
        try:
            yield
        finally:
            drawing.cancel()
            await asyncio.gather(drawing, return_exceptions=True)
            self._frames.put(self._wipe())
            self._frames.put(None)
            self._drawn = 0
            await in_thread(writer.join, "kvoffload-live-end")

    async def _draw_often(self, service: OffloadService) -> None:
        first = before = self._sample(service)
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            now = self._sample(service)
            if self._frames.empty():  # a terminal that takes nothing gets no backlog
                self._frames.put(self.frame(first, before, now))
            before = now

    def _sample(self, service: OffloadService) -> Sample:
        so_far, feed = self._result, service.engine.feed
        waiting = None if feed is None else feed.stats()
        return Sample(
            asyncio.get_running_loop().time(),
            (so_far.requests, so_far.requested_blocks, so_far.loaded_blocks, so_far.corrupt_blocks),
            service.stats(),
            None if waiting is None else (waiting.lag, waiting.lag_seconds),
        )

    def frame(self, first: Sample, before: Sample, now: Sample) -> str:
        """Return what draws the table over the one before: rates are of the time between the last two samples."""
        lines = [
            f"{self._bold}{label:<{_LABEL}}{self._plain}{value[: self._columns() - _LABEL]}"
            for label, value in self._rows(first, before, now)
        ]
        text = self._wipe() + "\n".join(lines) + "\n"
        self._drawn = len(lines)
        return text

    def _rows(self, first: Sample, before: Sample, now: Sample) -> list[tuple[str, str]]:
        _, requested, loaded, wrong = now.result
        seconds, blocks, last = max(now.at - before.at, 1e-9), now.stats.manager, before.stats
        stored_rate = (now.stats.stored_bytes - last.stored_bytes) / seconds / 1e9
        loaded_rate = (now.stats.loaded_bytes - last.loaded_bytes) / seconds / 1e9
        evicted_rate = (blocks.evicted - last.manager.evicted) * self._factor / seconds
        used, capacity = blocks.capacity - blocks.free, max(1, blocks.capacity)
        evicted, wrong_note = blocks.evicted * self._factor, f", {wrong:,} WRONG" if wrong else ""
        rows = [
            ("requests", self._progress(first, now)),
            (
                "occupancy",
                f"{_bar(used / capacity)} {100 * used / capacity:5.1f} % of {capacity * self._factor:,} blocks",
            ),
            ("hit ratio", f"{100 * loaded / max(1, requested):.1f} % of {requested:,} blocks{wrong_note}"),
            ("store", f"{stored_rate:6.2f} GB/s, {readable_bytes(now.stats.stored_bytes)} so far"),
            ("load", f"{loaded_rate:6.2f} GB/s, {readable_bytes(now.stats.loaded_bytes)} so far"),
            ("evictions", f"{evicted_rate:,.0f} blocks/s, {evicted:,} so far"),
        ]
        if now.feed is not None:
            waiting, lag = now.feed
            rows.append(("feed lag", f"{1000 * lag:.0f} ms, {waiting:,} waiting"))
        return rows

    def _progress(self, first: Sample, now: Sample) -> str:
        done, seconds = now.result[0], now.at - first.at
        rate = (done - first.result[0]) / max(seconds, 1e-9)
        if self._forever:
            return f"{done:,}, {rate:,.0f}/s, {_clock(seconds)}"
        left = f", {_clock((self._total - done) / rate)} left" if rate else ""
        return f"{_bar(done / max(1, self._total))} {done:,} of {self._total:,}, {rate:,.0f}/s{left}"

    def _wipe(self) -> str:
        return f"\x1b[{self._drawn}A\r\x1b[J" if self._drawn else ""

    def _columns(self) -> int:
        return max(_LABEL + 1, shutil.get_terminal_size().columns - 1)

    def _write_all(self) -> None:
        while (text := self._frames.get()) is not None:
            with suppress(OSError):  # when the terminal goes away, the run goes on
                self._out.write(text)
                self._out.flush()


def _bar(share: float) -> str:
    full = round(_BAR * min(1.0, max(0.0, share)))
    return "#" * full + "-" * (_BAR - full)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
