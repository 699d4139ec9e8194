"""The life of an engine: its parts are built, polled, and closed so that no copy outlives its memory unnoticed.

Closing has steps, so that an event loop can run the slow ones in a thread and still call back on its own: refuse and
take back (`begin_close`), wait for copies, stop the handlers (slow), book what that ended (`settle_close`), drop the
cache (slow), and say what could not be closed in order.
"""

from __future__ import annotations

import select
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvoffload.config import OffloadConfig
from kvoffload.errors import UndrainedCopies, UsageError
from kvoffload.manager.base import EventSink, MetricsSink
from kvoffload.memory.canonical import CanonicalKVCaches
from kvoffload.metrics.recorder import MetricsRecorder
from kvoffload.metrics.snapshot import MetricsSnapshot
from kvoffload.service.arguments import check_timeout, deadline_after
from kvoffload.service.board import TransferBoard
from kvoffload.service.bridge import CompletionBridge
from kvoffload.service.checks import DebugChecks
from kvoffload.service.core import Core
from kvoffload.service.geometry import BlockGeometry
from kvoffload.service.leases import LeaseDesk
from kvoffload.service.ledger import LoadLedger
from kvoffload.service.loads import LoadDesk
from kvoffload.service.opening import Ground
from kvoffload.service.owner import SingleOwner
from kvoffload.service.results import Stats
from kvoffload.service.roster import Roster
from kvoffload.service.settling import FAULT_POLL_SECONDS, Settler
from kvoffload.service.stores import StoreDesk
from kvoffload.service.telemetry import Telemetry
from kvoffload.spec.base import OffloadingSpec
from kvoffload.transfer.base import TransferWorker

if TYPE_CHECKING:
    from kvoffload.events.publisher import FeedPublisher
    from kvoffload.metrics.exposition import MetricsExposition
    from kvoffload.service.ranks.remote import RemoteWorkers

_undrained: list[object] = []
"""What copies that outlived their engine still use; it stays alive, and mapped, on purpose."""


class EngineLife(SingleOwner, ABC):
    """Starts, owns, polls and closes the parts of an `OffloadEngine`.

    Attributes:
        loads: Starts loads.
        stores: Reserves and submits stores.
        leases: Pins prefixes.
    """

    _MADE_BY_START = frozenset(
        {"_core", "_board", "_roster", "_settler", "bridge", "ledger", "loads", "stores", "leases"}
    )

    def __init__(
        self,
        config: OffloadConfig,
        kv_caches: CanonicalKVCaches | None = None,
        *,
        workers: RemoteWorkers | None = None,
        spec: OffloadingSpec | None = None,
        events: EventSink | None = None,
        metrics: MetricsSink | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.config = config
        self.ground = Ground(config, kv_caches, workers, spec)
        self._given_events, self._clock = events, clock
        self._feed: FeedPublisher | None = None
        self.recorder: MetricsSink = metrics if metrics is not None else MetricsRecorder()
        self.telemetry = Telemetry(config, self.recorder)
        self._exposition: MetricsExposition | None = None
        self._stop_lock = threading.Lock()
        self._stop_error: BaseException | None = None
        self._undrained: UndrainedCopies | None = None
        self._last_stats: Stats | None = None

    # ---- life

    def start(self) -> None:
        """Allocate host memory and start the handlers; may take seconds per 10 GiB. Any thread.

        Raises:
            NoSpaceError: Host memory is too small; nothing is left behind.
        """
        if self._started:
            raise UsageError("the engine was started before: make a new one")
        self.bridge = CompletionBridge()
        worker: TransferWorker | None = None
        try:
            self._feed = self._open_feed()
            worker = self.ground.open()
            self._build(worker)
        except BaseException:
            if worker is not None:
                worker.shutdown(0.0)
                self.spec.shutdown()
            if self._feed is not None:
                self._feed.close()
            self.bridge.close()
            if self._exposition is not None:
                self._exposition.unregister()
            raise
        self._started = True

    def _build(self, worker: TransferWorker) -> None:
        manager = self.spec.get_manager()
        worker.set_notify(self.bridge.notify)
        config = self.config
        capacity = manager.stats().capacity
        core = self._core = Core(
            manager,
            self.geometry,
            capacity=capacity,
            events=self.events,
            metrics=self.recorder,
            clock=self._clock,
            ring=self.bridge.notify,
            checks=DebugChecks(self.geometry, self.ground.kv_caches, capacity) if config.debug_checks else None,
        )
        core.enabled = config.enabled
        core.ranks_expected = core.ranks_up = config.world_size if self.ground.workers is not None else 1
        self._roster = Roster(core)
        self._settler = Settler(core)
        deadlines = {"load": config.load_deadline_seconds, "store": config.store_deadline_seconds}
        board = self._board = TransferBoard(
            worker,
            deadlines,  # type: ignore[arg-type]  # literal keys
            self._clock,
            self._settler.ended,
            self._settler.hung,
        )
        self.loads = LoadDesk(core, board, config.max_inflight_load_bytes, config.max_inflight_jobs)
        self.stores = StoreDesk(
            core, board, self.loads.first_use, config.max_inflight_store_bytes, config.max_inflight_jobs
        )
        self.leases = LeaseDesk(core, config.lease_seconds)
        self._settler.attach(board, self.loads, self.stores)
        self.ledger = LoadLedger(core.metrics, config.prefill_tokens_per_second)
        self.telemetry.link_bytes_per_second = self.ground.measure_link()
        self.telemetry.start(core, self.ledger, self.stats, self.events)
        if self._exposition is None:  # its library takes a while to import: not later, on the loop
            self._exposition = self.metrics

    def _open_feed(self) -> FeedPublisher | None:
        """Return the started publisher of the configuration's feed; None where events go elsewhere or nowhere."""
        if self._given_events is not None or self.config.events is None:
            return None
        from kvoffload.events.publisher import create_publisher

        feed = create_publisher(self.config)
        if feed is not None:
            feed.start()
        return feed

    @property
    def events(self) -> EventSink | None:
        """Where residency changes go: what the caller gave, the configuration's feed once started, or None."""
        return self._given_events if self._given_events is not None else self._feed

    @property
    def feed(self) -> FeedPublisher | None:
        """The configuration's feed, once started; None when it is off or events go elsewhere."""
        return self._feed

    @property
    def spec(self) -> OffloadingSpec:
        """What the configuration means here; with ranks it is known after `start`."""
        if self.ground.spec is None:
            raise UsageError("the engine was not started: its ranks have not joined")
        return self.ground.spec

    @property
    def geometry(self) -> BlockGeometry:
        """How sequences are cut into blocks; with ranks it is known after `start`."""
        if self.ground.geometry is None:
            raise UsageError("the engine was not started: its ranks have not joined")
        return self.ground.geometry

    def __enter__(self) -> Self:
        self.start()
        self.adopt()
        return self

    def __exit__(self, et: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close(self.config.drain_seconds)

    def close(self, timeout: float = 10.0) -> None:
        """Refuse new work, let running copies end, release everything. Idempotent.

        Raises:
            UndrainedCopies: Copies still run after `timeout` seconds: their memory stays mapped on purpose, everything
                else was released.
            TransferError: A handler failed to shut down; everything was released all the same.
        """
        if self._closed or not self._started:
            self._closed = True
            return
        self.check()
        check_timeout(timeout)
        self.begin_close()
        deadline = deadline_after(timeout)
        while not self._board.idle and (left := deadline - time.monotonic()) > 0:
            self._sleep_until_news(left)
            self._poll()
        self.finish_close()

    def finish_close(self) -> None:
        """All that follows `begin_close` and the wait for copies, in one call; blocks while threads end."""
        self.stop_handlers()
        self.settle_close()
        self.drop_cache()
        self.raise_unclean()

    @abstractmethod
    def begin_close(self) -> None:
        """Refuse new work, take queued offers back, end requests and leases."""

    @abstractmethod
    def stats(self) -> Stats:
        """Return counters and occupancy."""

    def stop_handlers(self) -> None:
        """End the handlers' threads: copies that have not started fail, one that runs is left to run. Any thread."""
        with self._stop_lock:
            try:
                self._board.worker.shutdown(0.0 if self._board.unended() else 5.0)
            except Exception as error:  # noqa: BLE001 - told by `raise_unclean`, when everything else is released
                self._stop_error = error

    def settle_close(self) -> None:
        """Book what `stop_handlers` ended and answer what still runs; then the engine is closed."""
        if self._closed:
            return
        self._poll()
        self._settler.answer_running("aborted", None)
        unended = self._board.unended_jobs()
        if unended:
            jobs = [job.id for job in unended]
            blocks = sorted({block for job in unended for block in job.gpu_blocks})
            self._undrained = UndrainedCopies(
                f"copies of jobs {jobs} still run; host memory stays mapped, GPU blocks {blocks} must not be reused",
                jobs=jobs,
            )
            _undrained.append((self.ground, self._board.worker))
        self._last_stats = self.stats()
        self._closed = True

    def drop_cache(self) -> None:
        """Announce the removal of all that was held, and let go of the manager and the bridge. Any thread."""
        with self._stop_lock, ExitStack() as at_last:  # last one first, each also when another raises
            core = self._core
            if self._feed is not None:
                at_last.callback(self._feed.close)
            at_last.callback(self.bridge.close)
            if self._undrained is None:
                at_last.callback(core.manager.shutdown)
                at_last.callback(self.spec.shutdown)
            core.manager.reset_cache()
            core.flush_events(cause="reset")
            self.telemetry.finish(replace(self._last_stats or Stats(), manager=core.manager.stats()))
            if self._exposition is not None:
                self._exposition.unregister()

    def raise_unclean(self) -> None:
        """Say what could not be closed in order.

        Raises:
            UndrainedCopies: Copies still run.
            TransferError: A handler failed to shut down.
        """
        if self._undrained is not None:
            raise self._undrained from self._stop_error
        if self._stop_error is not None:
            raise self._stop_error

    # ---- the rhythm

    def _poll(self) -> None:
        self.take_ended()
        self.tidy_up()

    def take_ended(self) -> None:
        """First half of a poll: settle the copies that ended. Who waits for them can go on before the second half."""
        try:
            self.bridge.consume()
            self._board.poll()
        except Exception as error:  # noqa: BLE001 - whatever a handler raises makes the service unhealthy
            self._core.fail("polling the handlers failed", error)

    def tidy_up(self) -> None:
        """Second half of a poll: what is overdue, who is missing, and the figures."""
        core, worker = self._core, self._board.worker
        core.absent, core.ranks_up = worker.absent(), worker.num_up()
        self._board.check_deadlines()
        self.leases.expire()
        self._settler.settle_fault()
        self._settler.count_ended()
        core.checks.books(core.manager.stats)
        self.telemetry.serve()

    def break_down(self, reason: str, error: BaseException) -> None:
        """Become unhealthy: waiting calls end with `error`, new ones miss; running copies keep their blocks."""
        self._core.fail(reason, error)
        self._settler.settle_fault()

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when `poll` has something to take."""
        return self.bridge.fileno()

    def _sleep_until_news(self, seconds: float) -> None:
        upcoming = self.next_deadline()
        if upcoming is not None:
            seconds = min(seconds, max(0.0, upcoming - self._clock()))
        poller = select.poll()
        poller.register(self.fileno(), select.POLLIN)
        poller.poll(min(seconds, 1.0) * 1000)

    def next_deadline(self) -> float | None:
        """Return when `poll` should be called even if nothing finished, on the engine's clock; None: never."""
        times = [time for time in (self._board.next_deadline(), self.leases.next_deadline()) if time is not None]
        if self._core.fault is not None and not self._board.idle:
            times.append(self._clock() + FAULT_POLL_SECONDS)
        return min(times, default=None)

    # ---- metrics

    @property
    def metrics(self) -> MetricsExposition:
        """The engine's numbers for Prometheus: `render()`, `registry`, `register()`."""
        if self._exposition is None:
            from kvoffload.metrics.exposition import MetricsExposition

            self._exposition = MetricsExposition(self)
        return self._exposition

    def metrics_snapshot(self) -> MetricsSnapshot:
        """Return all numbers as plain data that pickle and JSON carry; from any thread.

        A front end in another process gives it to a `SnapshotRelay` and exports that.
        """
        return self.telemetry.snapshot() if self.owned_here else self.telemetry.ask()
