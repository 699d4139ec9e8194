"""`OffloadService`: the asyncio facade over `OffloadEngine`.

Theory of operation. The loop thread owns the engine. Handler threads ring one eventfd, the loop's reader polls the
engine, and results go to futures in small batches. There is no background task that could die unseen: the reader, one
timer for deadlines and one callback per tick (which submits the tick's stores) are all there is. Leaving a request
never awaits, so it cannot be cancelled half-way.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from types import TracebackType
from typing import Any, Self

from kvoffload.config import OffloadConfig
from kvoffload.errors import ClosedError, KVOffloadError, UsageError
from kvoffload.keys import BlockChain
from kvoffload.manager.base import EventSink, MetricsSink, ReqContext
from kvoffload.memory.canonical import CanonicalKVCaches
from kvoffload.service.engine import OffloadEngine
from kvoffload.service.ownership import Free
from kvoffload.service.request import OffloadRequest
from kvoffload.service.results import BlockReport, Health, Stats
from kvoffload.service.waiting import Resolver, give_up, in_thread
from kvoffload.spec.base import OffloadingSpec

logger = logging.getLogger(__name__)


class OffloadService:
    """Offloads KV-cache blocks inside an asyncio serving process.

    Use as `async with OffloadService(config, kv_caches) as service`. All methods are called on the loop's thread.

    Args:
        config: What to do.
        kv_caches: The GPU side.
        spec: Manager and handlers to use instead of those that `config.spec_name` names.
        events: Where residency changes go, instead of the feed that `config.events` describes.
        metrics: Where counts go.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        config: OffloadConfig,
        kv_caches: CanonicalKVCaches,
        *,
        spec: OffloadingSpec | None = None,
        events: EventSink | None = None,
        metrics: MetricsSink | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.clock = clock
        self.engine = OffloadEngine(config, kv_caches, spec=spec, events=events, metrics=metrics, clock=clock)
        self._open_requests: set[OffloadRequest] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._resolver: Resolver | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._flush_scheduled = False
        self._room_waiters: deque[asyncio.Future[object]] = deque()
        self._idle_waiters: list[asyncio.Future[object]] = []
        self._closing: asyncio.Task[None] | None = None

    # ---- life

    async def __aenter__(self) -> Self:
        if self._loop is not None:
            raise UsageError("an OffloadService is entered once")
        loop = self._loop = asyncio.get_running_loop()
        self._resolver = Resolver(loop)
        started = asyncio.ensure_future(in_thread(self.engine.start, "kvoffload-start"))
        try:
            await asyncio.shield(started)
        except asyncio.CancelledError:
            started.add_done_callback(self._undo_start)
            raise
        self.engine.adopt()
        loop.add_reader(self.engine.fileno(), self._on_readable)
        return self

    def _undo_start(self, started: asyncio.Future[None]) -> None:
        """The entering task was cancelled while the engine started: release what it allocated."""
        if started.cancelled() or started.exception() is not None:
            return
        self.engine.adopt()
        self.engine.close(0.0)

    async def __aexit__(
        self, et: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose(self.config.drain_seconds)

    async def aclose(self, timeout: float = 10.0) -> None:
        """Refuse new work, let copies end, release everything. Idempotent; concurrent calls wait for the same end.

        Cancelling the call does not stop the closing.

        Raises:
            UndrainedCopies: Copies still run after `timeout` seconds: their memory stays mapped on purpose, everything
                else was released.
        """
        if self._loop is None:
            return
        if self._closing is None:
            self._closing = self._loop.create_task(self._close(timeout), name="kvoffload-close")
            self._closing.add_done_callback(_note_undrained)
        await asyncio.shield(self._closing)

    async def _close(self, timeout: float) -> None:
        engine, loop = self.engine, self.loop
        engine.begin_close()
        for request in list(self._open_requests):
            request.leave()
        self._wake_room_waiters(everyone=True)
        try:
            if not engine.idle:
                await self._wait_idle(timeout)
        finally:
            fd = engine.fileno()
            if fd >= 0:
                loop.remove_reader(fd)
            if self._timer is not None:
                self._timer.cancel()
            try:
                await in_thread(engine.finish_close, "kvoffload-close")
            finally:
                for future in self._idle_waiters:
                    self.resolver.resolve(future, True)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that owns the service.

        Raises:
            UsageError: The service was not entered.
        """
        if self._loop is None:
            raise UsageError("the service was not entered: use `async with OffloadService(...) as service`")
        return self._loop

    @property
    def resolver(self) -> Resolver:
        """Resolves this service's futures in batches."""
        if self._resolver is None:
            raise UsageError("the service was not entered: use `async with OffloadService(...) as service`")
        return self._resolver

    def check_open(self) -> None:
        """Refuse calls before `__aenter__` and after `aclose`.

        Raises:
            ClosedError: The service is closing or closed.
            UsageError: It was not entered.
        """
        if self._loop is None:
            raise UsageError("the service was not entered: use `async with OffloadService(...) as service`")
        if self._closing is not None:
            raise ClosedError("the service is closed")

    # ---- requests

    def chain(
        self,
        token_ids: Iterable[int] = (),
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        extra_keys: Sequence[tuple[Any, ...] | None] | None = None,
        block_hashes: Sequence[bytes] | None = None,
    ) -> BlockChain:
        """Return a chain cut for this model; see `BlockChain`."""
        return BlockChain(
            self.engine.geometry.groups,
            token_ids,
            lora_name=lora_name,
            cache_salt=cache_salt,
            extra_keys=extra_keys,
            block_hashes=block_hashes,
        )

    def request(
        self,
        context: ReqContext | str,
        chain: BlockChain,
        *,
        gpu_blocks: MutableSequence[int] | Sequence[MutableSequence[int]],
        free: Free | None,
    ) -> OffloadRequest:
        """Return a request to enter with `async with`; see `OffloadRequest`."""
        return OffloadRequest(self, context, chain, gpu_blocks=gpu_blocks, free=free)

    def abort(self, request_id: str) -> bool:
        """Stop a request in any state: waiting calls end with reason `"aborted"`. False for an unknown id."""
        self.check_open()
        known = self.engine.abort(request_id)
        for request in self._open_requests:
            if request.id == request_id:
                request.interrupt()
        return known

    def add(self, request: OffloadRequest) -> None:
        """Note an entered request, so that closing ends it."""
        self._open_requests.add(request)

    def remove(self, request: OffloadRequest) -> None:
        """Forget a request that has left."""
        self._open_requests.discard(request)

    # ---- the engine's rhythm

    def _on_readable(self) -> None:
        try:
            self.engine.poll()
        except KVOffloadError as error:
            self.engine.break_down("the completion bridge failed", error)
        self._after_poll()

    def _after_poll(self) -> None:
        if self._room_waiters:
            self._wake_room_waiters()
        if self._idle_waiters and self.engine.idle:
            waiters, self._idle_waiters = self._idle_waiters, []
            for future in waiters:
                self.resolver.resolve(future, True)
        self.arm_timer()

    def submitted(self) -> None:
        """Something was reserved: submit this tick's stores when the tick ends, and watch the deadlines."""
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        try:
            self.engine.flush_stores()
        except ClosedError:
            return
        self._after_poll()

    def arm_timer(self) -> None:
        """Poll when the next deadline is due, even if nothing finishes."""
        due = self.engine.next_deadline()
        if due is None or (self._timer is not None and self._timer_at <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = due
        self._timer = self.loop.call_later(max(0.0, due - self.clock()), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._on_readable()

    def _wake_room_waiters(self, *, everyone: bool = False) -> None:
        while self._room_waiters:
            self.resolver.resolve(self._room_waiters.popleft(), True)
            if not everyone:
                return

    async def wait_room(self, seconds: float, interrupts: set[asyncio.Future[object]], *, first: bool) -> bool:
        """Wait in line for a load's turn; False when `seconds` passed or the wait was interrupted.

        Args:
            seconds: Longest wait.
            interrupts: The future is put here while waiting; resolving it with False ends the wait.
            first: Stand at the head of the line: the caller had its turn, but there was no room yet.
        """
        future: asyncio.Future[object] = self.loop.create_future()
        timer = self.loop.call_later(max(0.0, seconds), give_up, future)
        if first:
            self._room_waiters.appendleft(future)
        else:
            self._room_waiters.append(future)
        interrupts.add(future)
        try:
            return bool(await future)
        except asyncio.CancelledError:
            if future not in self._room_waiters:  # it was given its turn and cannot use it
                self._wake_room_waiters()
            raise
        finally:
            timer.cancel()
            interrupts.discard(future)
            if future in self._room_waiters:
                self._room_waiters.remove(future)

    def load_started(self) -> None:
        """A load was submitted: watch its deadline, and let the next in line see whether there is room."""
        self.arm_timer()
        if self._room_waiters:
            self._wake_room_waiters()

    @property
    def room_queue(self) -> int:
        """Loads that wait for their turn."""
        return len(self._room_waiters)

    async def _wait_idle(self, timeout: float | None) -> bool:
        future: asyncio.Future[object] = self.loop.create_future()
        self._idle_waiters.append(future)
        timer = None
        if timeout is not None:
            timer = self.loop.call_later(max(0.0, timeout), give_up, future)
        try:
            return bool(await future)
        finally:
            if timer is not None:
                timer.cancel()
            if future in self._idle_waiters:
                self._idle_waiters.remove(future)

    # ---- the cache as a whole

    async def reset_cache(self) -> int:
        """Drop everything: the content is invalid. Return the engine blocks dropped. Does not wait for copies."""
        self.check_open()
        return self.engine.reset_cache()

    async def drain(self, timeout: float | None = None) -> bool:
        """Wait until no copy runs and no store waits; False when `timeout` seconds passed first."""
        self.check_open()
        if self.engine.idle:
            return True
        return await self._wait_idle(timeout)

    @property
    def enabled(self) -> bool:
        """Loads may hit and stores are taken; switching off drops the cache and announces the removals."""
        return self.engine.enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self.check_open()
        self.engine.enabled = value

    def pause_stores(self, paused: bool = True) -> None:
        """Reject stores until called with False; loads go on."""
        self.check_open()
        self.engine.pause_stores(paused)

    def explain(self, request_id: str) -> list[BlockReport]:
        """Say for each block of a running or recent request why it is, or is not, served."""
        self.check_open()
        return self.engine.explain(request_id)

    def health(self) -> Health:
        """Return whether hits are served, and what is degraded."""
        if self._loop is None:
            return Health(ok=False, reason="not started")
        if self._closing is not None:
            return Health(ok=False, reason="closed")
        return self.engine.health()

    def stats(self) -> Stats:
        """Return counters and occupancy."""
        return self.engine.stats()


def _note_undrained(closing: asyncio.Task[None]) -> None:
    """Log how closing ended, also where nobody waits for it any more."""
    if not closing.cancelled() and (error := closing.exception()) is not None:
        logger.error("closing ended with: %s", error)
