"""`OffloadService`: the asyncio facade over `OffloadEngine`.

Theory of operation. The loop thread owns the engine. Handler threads ring one eventfd, the loop's reader polls the
engine, and results go to futures in small batches. There is no background task that could die unseen: the reader, one
timer for deadlines and one callback per tick (which submits the tick's stores) are all there is. Leaving a request
never awaits, so it cannot be cancelled half-way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, MutableSequence, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kvoffload.chain import BlockChain
from kvoffload.config import OffloadConfig
from kvoffload.errors import ClosedError, UsageError
from kvoffload.keys import OffloadKey
from kvoffload.manager.base import EventSink, MetricsSink, ReqContext
from kvoffload.memory.canonical import CanonicalKVCaches
from kvoffload.service.arguments import check_timeout
from kvoffload.service.closing import Closing
from kvoffload.service.engine import OffloadEngine
from kvoffload.service.loop_lag import LoopLagProbe
from kvoffload.service.ownership import Free
from kvoffload.service.request import OffloadRequest
from kvoffload.service.results import BlockReport, Health, Stats
from kvoffload.service.room import RoomLine
from kvoffload.service.waiting import Resolver, in_thread, wait_released
from kvoffload.spec.base import OffloadingSpec

if TYPE_CHECKING:
    from kvoffload.metrics.exposition import MetricsExposition
    from kvoffload.service.ranks.remote import RemoteWorkers


class OffloadService:
    """Offloads KV-cache blocks inside an asyncio serving process.

    Use as `async with OffloadService(config, kv_caches) as service`. All methods are called on the loop's thread.

    Args:
        config: What to do.
        kv_caches: The GPU side in this process; None with `workers`.
        workers: Ranks in other processes, which own the GPU side; None with `kv_caches`.
        spec: Manager and handlers to use instead of those that `config.spec_name` names.
        events: Where residency changes go, instead of the feed that `config.events` describes.
        metrics: Where counts go, instead of a recorder of its own.
        clock: Monotonic seconds.
    """

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
        self.config = config
        self.clock = clock
        self.engine = OffloadEngine(
            config, kv_caches, workers=workers, spec=spec, events=events, metrics=metrics, clock=clock
        )
        self._open: dict[str, OffloadRequest] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._flush_scheduled = False
        self._tidy_scheduled = False
        self._entered = False
        self._unwanted = False
        self._closing: Closing | None = None
        self._lag_probe: LoopLagProbe | None = None

    def __repr__(self) -> str:
        return f"<OffloadService, {len(self._open)} requests, {self.health().reason or 'healthy'}>"

    # ---- life

    async def __aenter__(self) -> Self:
        if self._loop is not None:
            raise UsageError("an OffloadService is entered once: make a new one")
        loop = self._loop = asyncio.get_running_loop()
        self.resolver = Resolver(loop)
        self.room = RoomLine(self.resolver)
        # A process that gives up must not wait until 100 GiB, which nobody wants any more, are allocated.
        try:
            await in_thread(self.engine.start, "kvoffload-start", lambda _: self._undo_start(), daemon=True)
        except BaseException:
            self.engine.ground.give_up()
            raise
        if self._unwanted:
            await in_thread(self._undo_start, "kvoffload-close")
            raise ClosedError("the service was closed while it started")
        self.engine.adopt()
        loop.add_reader(self.engine.fileno(), self._on_readable)
        self.engine.telemetry.add(lambda: {"waiting_loads": {"": len(self.room)}})
        self._lag_probe = LoopLagProbe(loop, self.engine.recorder)
        self._lag_probe.start()
        self._entered = True
        return self

    def _undo_start(self) -> None:
        """Entering was cancelled, or closed, while the engine started: release what it allocated, off the loop."""
        self.engine.adopt()
        self.engine.close(0.0)

    async def __aexit__(
        self, et: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose(self.config.drain_seconds)

    async def aclose(self, timeout: float = 10.0) -> None:
        """Refuse new work, let copies end, release everything. Idempotent; concurrent calls wait for the same end.

        Open requests end, but their GPU blocks are their owners' until they leave: only then do they reach `free`.
        Cancelling the call does not stop the closing. When the loop itself ends (`asyncio.run` cancels every task), the
        closing is done at once, without waiting for copies. While the service is being entered, entering then ends with
        `ClosedError`.

        Raises:
            UndrainedCopies: Copies still run after `timeout` seconds: their memory stays mapped on purpose, everything
                else was released.
            TransferError: A handler failed to shut down; everything was released all the same.
            UsageError: `timeout` is no number of seconds, or the caller is on another thread; nothing was closed.
        """
        if not self._entered:
            self._unwanted = self._loop is not None
            return
        if self._closing is None:
            self._check_thread()
            check_timeout(timeout)
            self._closing = Closing(self.engine, self.resolver, self._detach)
            self._closing.start(timeout, [request.interrupt for request in self._open.values()])
        await self._closing.wait()

    def _detach(self) -> None:
        """The engine is closed: stop listening, and end the waits for copies that still run."""
        self.resolver.close()
        fd = self.engine.fileno()
        if fd >= 0 and not self.loop.is_closed():
            self.loop.remove_reader(fd)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._lag_probe is not None:
            self._lag_probe.stop()

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
    def is_open(self) -> bool:
        """It was entered and is not closing."""
        return self._entered and self._closing is None

    def check_open(self) -> None:
        """Refuse calls before `__aenter__`, after `aclose`, from another thread and after fork.

        Raises:
            ClosedError: The service is closing or closed.
            UsageError: It was not entered, or the caller is not on the loop's thread.
        """
        if self._closing is not None:
            raise ClosedError("the service is closed: make a new one")
        self._check_thread()

    def _check_thread(self) -> None:
        if not self._entered:
            raise UsageError("the service was not entered: use `async with OffloadService(...) as service`")
        self.engine.check()

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
        """Return a chain cut for this model; see `BlockChain`.

        Args:
            token_ids: The prompt's tokens, each in [0, 2**32); more come with `extend`.
            lora_name: Adapter name; other adapters make other keys.
            cache_salt: Tenant salt; other salts make other keys.
            extra_keys: Per hash block, what else identifies it (multimodal hashes).
            block_hashes: The engine's own hash per hash block, instead of ours.

        Raises:
            UsageError: A token out of range, or a list of another length than the blocks.
        """
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
        """Return a request to enter with `async with`; see `OffloadRequest`.

        Args:
            context: The request's id, or a `ReqContext` with priority, times and whether to store.
            chain: What `service.chain(token_ids)` made; it may grow while the request runs.
            gpu_blocks: The block table: GPU block ids in the order of the tokens; a list of such for several groups.
            free: Called with the blocks that no copy can touch any more, after the request was left; None: nothing is.

        Raises:
            UsageError: An argument of another type; the block table itself is checked where it is used.
        """
        return OffloadRequest(self, context, chain, gpu_blocks=gpu_blocks, free=free)

    def abort(self, request_id: str) -> bool:
        """Stop a request in any state: waiting calls end with reason `"aborted"`. False for an unknown id."""
        self.check_open()
        known = self.engine.abort(request_id)
        request = self._open.get(request_id)
        if request is not None:
            request.interrupt()
        return known

    def add(self, request: OffloadRequest) -> None:
        """Note an entered request, so that closing ends it."""
        self._open[request.id] = request

    def remove(self, request: OffloadRequest) -> None:
        """Forget a request that has left."""
        self._open.pop(request.id, None)

    # ---- the engine's rhythm

    def _on_readable(self) -> None:
        """Settle what ended; whoever awaited it is resumed before the rest of the poll."""
        self._guarded(self.engine.take_ended)
        self.room.next()
        if not self._tidy_scheduled:
            self._tidy_scheduled = True
            self.loop.call_soon(self._tidy_up)

    def _tidy_up(self) -> None:
        self._tidy_scheduled = False
        self._guarded(self.engine.tidy_up)
        self._after_poll()

    def _guarded(self, step: Callable[[], None]) -> None:
        if self.engine.closed:
            return
        try:
            step()
        except Exception as error:  # noqa: BLE001 - a raising reader would be called for ever
            self.engine.break_down("polling the engine failed", error)

    def _after_poll(self) -> None:
        self.room.next()
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

    # ---- the cache as a whole

    async def reset_cache(self) -> int:
        """Drop everything: the content is invalid. Return the engine blocks dropped. Does not wait for copies."""
        self.check_open()
        return self.engine.reset_cache()

    def discard(self, keys: Collection[OffloadKey]) -> int:
        """Drop some keys, whose content is invalid; return how many were held. See `OffloadEngine.discard`."""
        self.check_open()
        return self.engine.discard(keys)

    async def drain(self, timeout: float | None = None) -> bool:
        """Wait until every copy and store that is on its way now has ended; False when `timeout` seconds passed first.

        Work that arrives meanwhile is not waited for.
        """
        self.check_open()
        check_timeout(timeout)
        return await wait_released(self.resolver, self.engine.unreleased_jobs(), timeout)

    @property
    def events(self) -> EventSink | None:
        """Where residency changes go; the feed of `config.events` is a `FeedPublisher` (`gpu_stored`, `reannounce`)."""
        return self.engine.events

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
        if self._closing is not None:
            return Health(ok=False, reason="closed")
        return self.engine.health()

    @property
    def is_ready(self) -> bool:
        """A server may be sent requests: hits are served, or, with `fail_open`, misses while the cache is sick."""
        return self.is_open and (self.config.fail_open or self.health().ok)

    def stats(self) -> Stats:
        """Return counters and occupancy."""
        return self.engine.stats()

    @property
    def metrics(self) -> MetricsExposition:
        """The service's numbers for Prometheus: `render_in_thread()`, `registry`, `register()`."""
        return self.engine.metrics
