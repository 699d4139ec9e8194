"""`RankLauncher`: starts rank processes for those who have no launcher of their own, and ends them with itself.

A rank process runs a function given by name. It reads what it should be from its standard input, which stays open as
long as the launcher lives: when that ends, however hard, so do the ranks.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import msgspec

from kvoffload.config import OffloadConfig
from kvoffload.errors import ClosedError, UsageError
from kvoffload.memory.canonical import CanonicalKVCaches
from kvoffload.service.ranks.rank_worker import MakeHandlers, OffloadRankWorker

logger = logging.getLogger(__name__)

_CHILD = "from kvoffload.service.ranks.launcher import main; main()"


class RankStart(msgspec.Struct, frozen=True):
    """What a rank process is told.

    Attributes:
        target: What it runs, `package.module:function`; called with this object.
        rank: Which one it is.
        world_size: How many there are.
        address: Where the deciding process waits, for `OffloadRankWorker`.
        arguments: Whatever else the function needs; plain JSON values.
    """

    target: str
    rank: int
    world_size: int
    address: str
    arguments: dict[str, Any]


class RankLauncher:
    """Rank processes of one instance, each a fresh Python. `with RankLauncher(...) as launcher: launcher.start()`.

    Args:
        target: What each process runs, `package.module:function`; it is called with a `RankStart`.
        world_size: Ranks.
        address: `RemoteWorkers.address`.
        arguments: Plain JSON values that every rank gets.
        pass_fds: Descriptors that every rank inherits, under the same numbers.
    """

    def __init__(
        self,
        target: str,
        *,
        world_size: int,
        address: str,
        arguments: Mapping[str, Any] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        if ":" not in target:
            raise UsageError(f"target must be 'package.module:function', got {target!r}")
        if not isinstance(world_size, int) or world_size < 1:
            raise UsageError(f"world_size must be a whole number of at least 1; got {world_size!r}")
        self._target, self._address = target, address
        self._arguments = dict(arguments or {})
        self._pass_fds = tuple(pass_fds)
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * world_size
        self._closed = False
        self._lock = threading.Lock()

    @property
    def pids(self) -> list[int | None]:
        """The process of each rank; None where none was started."""
        return [None if process is None else process.pid for process in self._processes]

    def start(self) -> list[int]:
        """Start every rank that does not run, also those that have ended; return which. Takes a few milliseconds each.

        Raises:
            ClosedError: The launcher was closed.
        """
        started = []
        with self._lock:
            if self._closed:
                raise ClosedError("this launcher was closed")
            for rank, process in enumerate(self._processes):
                if process is not None and process.poll() is None:
                    continue
                if process is not None:
                    logger.warning("rank %d ended with code %s; it is started again", rank, process.returncode)
                    _hang_up(process)
                self._processes[rank] = self._spawn(rank)
                started.append(rank)
        return started

    def _spawn(self, rank: int) -> subprocess.Popen[bytes]:
        start = RankStart(self._target, rank, len(self._processes), self._address, self._arguments)
        process = subprocess.Popen(  # noqa: S603 - this interpreter, and a program of our own
            [sys.executable, "-c", _CHILD],
            stdin=subprocess.PIPE,
            pass_fds=self._pass_fds,
            process_group=0,  # Ctrl-C at a terminal is for the launcher: a rank ends when its standard input does
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)},
        )
        if process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(msgspec.to_builtins(start)).encode() + b"\n")
                process.stdin.flush()
        return process

    def ended(self) -> dict[int, int]:
        """Return the exit codes of the ranks that have ended."""
        codes = {rank: process.poll() for rank, process in enumerate(self._processes) if process is not None}
        return {rank: code for rank, code in codes.items() if code is not None}

    def kill(self, rank: int) -> None:
        """End a rank the hard way, and wait until it is gone."""
        process = self._processes[rank]
        if process is not None:
            process.kill()
            process.wait()

    def close(self, timeout: float = 10.0) -> None:
        """Let every rank end; those that still run after `timeout` seconds are killed. Idempotent."""
        deadline = time.monotonic() + timeout
        with self._lock:
            self._closed = True
            running = [process for process in self._processes if process is not None]
            for process in running:
                _hang_up(process)
            for process in running:
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    logger.warning("rank process %d did not end within %s s: killed", process.pid, timeout)
                    process.kill()
                    process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, et: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _hang_up(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()


def serve_rank(
    start: RankStart,
    config: OffloadConfig,
    kv_caches: CanonicalKVCaches,
    *,
    timeout: float = 120.0,
    make_handlers: MakeHandlers | None = None,
) -> None:
    """Join as this rank, over and over: whenever the deciding process has gone, the next one is joined.

    For the zmq transport. Returns when no deciding process came within `timeout` seconds.

    Raises:
        ConfigError: The deciding process refused this rank.
    """
    worker = OffloadRankWorker(
        config, kv_caches, rank=start.rank, address=start.address, timeout=timeout, make_handlers=make_handlers
    )
    try:
        while True:
            try:
                worker.start()
            except ClosedError as error:
                logger.info("rank %d ends: %s", start.rank, error)
                return
            worker.wait_until_lost()
    finally:
        worker.close()


def main() -> None:
    """Be a rank process: read a `RankStart` from standard input, run its target, end when the launcher does."""
    line = sys.stdin.buffer.readline()
    if not line:
        return
    start = msgspec.json.decode(line, type=RankStart)
    threading.Thread(target=_end_with_the_launcher, name="kvoffload-launcher", daemon=True).start()
    module, _, name = start.target.partition(":")
    run: Callable[[RankStart], None] = getattr(importlib.import_module(module), name)
    run(start)


def _end_with_the_launcher() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)
