"""`OffloadRankWorker`: owns one rank's tensors and its share of the region, and executes numbered commands."""

from __future__ import annotations

import logging
import os
import secrets
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import zmq

import kvoffload
from kvoffload.config import OffloadConfig
from kvoffload.errors import UndrainedCopies, UsageError
from kvoffload.manager.specs import CPULoadStoreSpec, GPULoadStoreSpec
from kvoffload.memory.block_tensor import TensorLike
from kvoffload.memory.canonical import CanonicalKVCaches
from kvoffload.memory.region import SharedOffloadRegion
from kvoffload.service.bridge import CompletionBridge
from kvoffload.service.ranks import meeting
from kvoffload.service.ranks.executor import RankExecutor
from kvoffload.service.ranks.link import Link
from kvoffload.service.ranks.wire import (
    LEAVING,
    PROTOCOL,
    READY,
    Hello,
    Reports,
    Welcome,
    encode,
)
from kvoffload.transfer.base import HOST_VISIBLE, OffloadingHandler, Ready
from kvoffload.transfer.checks import OwnerProcess
from kvoffload.transfer.directional import CpuGpuOffloadingHandlers
from kvoffload.transfer.worker import OffloadingWorker

logger = logging.getLogger(__name__)


class HandlerPair(Protocol):
    """Both directions of one rank, such as `CpuGpuOffloadingHandlers`."""

    @property
    def gpu_to_cpu_handler(self) -> OffloadingHandler:
        """Stores."""

    @property
    def cpu_to_gpu_handler(self) -> OffloadingHandler:
        """Loads."""

    def shutdown(self, timeout: float = 10.0) -> None:
        """Let copies end."""


MakeHandlers = Callable[[CanonicalKVCaches, int, int, Sequence[TensorLike]], HandlerPair]
"""Makes handlers from KV caches, block size factor, number of CPU blocks, and the rank's views of the region."""


class OffloadRankWorker:
    """One rank of a tensor-parallel instance, in the process that owns its KV caches.

    Call `start()` (both transports), then, with the piggyback transport, `execute` in each step. When the deciding
    process goes away, running copies end and `start()` may be called again to join the next one.

    Args:
        config: The same settings as the deciding process's.
        kv_caches: This rank's tensors.
        rank: 0 to `config.world_size - 1`.
        address: `RemoteWorkers.address`.
        timeout: Seconds to wait for the deciding process and its region.
        make_handlers: Makes both directions' handlers over the rank's share of the region; None: those of the KV
            caches' device.
    """

    def __init__(
        self,
        config: OffloadConfig,
        kv_caches: CanonicalKVCaches,
        *,
        rank: int,
        address: str,
        timeout: float = 120.0,
        make_handlers: MakeHandlers | None = None,
    ) -> None:
        if not isinstance(rank, int) or not 0 <= rank < config.world_size:
            raise UsageError(f"rank must be 0 to {config.world_size - 1}, below world_size; got {rank!r}")
        self.config = config
        self.kv_caches = kv_caches
        self.rank = rank
        self.address = address
        self._timeout = timeout
        self._make_handlers = make_handlers or self._handlers_of_device
        self._process = OwnerProcess(f"rank {rank}'s worker")
        self._link: Link | None = None
        self._handlers: HandlerPair | None = None
        self._worker = OffloadingWorker()
        self._executor: RankExecutor | None = None
        self._thread: threading.Thread | None = None
        self._wake: CompletionBridge | None = None
        self._closing = False

    def start(self) -> None:
        """Join the deciding process: map the region, make the handlers and, with zmq, start the thread. Takes long.

        Raises:
            ConfigError: The deciding process refused this rank; the message names both sides.
            ClosedError: There is no deciding process, or it did not let this rank in in time.
            UsageError: It was started and is still joined.
            UndrainedCopies: Copies of the time before still run.
        """
        self._process.check()
        if self._executor is not None and not self.lost:
            raise UsageError(f"rank {self.rank} has joined already: close() it first")
        self.close(min(10.0, self._timeout))
        if self._handlers is not None:
            jobs = self._worker.pending_jobs()
            raise UndrainedCopies(f"rank {self.rank} cannot join: its copies {jobs} still run", jobs=jobs)
        self._closing = False
        incarnation = secrets.randbits(63) | 1
        link = self._link = Link(*meeting.connect(self.address, self._timeout))
        try:
            welcome, link.region = meeting.introduce(link.sock, self._hello(incarnation), self._timeout)
            self._open(welcome, link.region, incarnation)
            link.say(READY)
        except BaseException:
            self.close()
            raise

    def _hello(self, incarnation: int) -> Hello:
        caches, config = self.kv_caches, self.config
        return Hello(
            protocol=PROTOCOL,
            version=kvoffload.__version__,
            rank=self.rank,
            world_size=config.world_size,
            pid=os.getpid(),
            incarnation=incarnation,
            num_blocks=caches.num_blocks,
            page_sizes=[tensor.page_size_bytes for tensor in caches.tensors],
            group_page_sizes=[[ref.page_size_bytes for ref in refs] for refs in caches.group_data_refs],
            gpu_block_sizes=list(config.gpu_block_sizes),
            block_size_factor=config.block_size_factor,
            device=caches.device,
        )

    def _open(self, welcome: Welcome, region: SharedOffloadRegion, incarnation: int) -> None:
        factor = self.config.block_size_factor
        views = [region.create_next_view(tensor.page_size_bytes * factor) for tensor in self.kv_caches.tensors]
        self._handlers = self._make_handlers(self.kv_caches, factor, region.num_blocks, views)
        worker = self._worker = OffloadingWorker()
        worker.register_handler(GPULoadStoreSpec, CPULoadStoreSpec, self._handlers.gpu_to_cpu_handler)
        worker.register_handler(CPULoadStoreSpec, GPULoadStoreSpec, self._handlers.cpu_to_gpu_handler)
        self._executor = RankExecutor(worker, welcome, self.rank, incarnation)
        if welcome.transport == "zmq":
            self._wake = CompletionBridge()
            worker.set_notify(self._wake.notify)
            connected = threading.Event()
            self._thread = threading.Thread(
                target=self._serve, args=(welcome, incarnation, connected), name="kvoffload-rank", daemon=True
            )
            self._thread.start()
            connected.wait()

    def _handlers_of_device(
        self, kv_caches: CanonicalKVCaches, factor: int, num_cpu_blocks: int, views: Sequence[TensorLike]
    ) -> CpuGpuOffloadingHandlers:
        return CpuGpuOffloadingHandlers(
            kv_caches, factor, num_cpu_blocks, cpu_tensors=views, pin_memory=self.config.pin_memory
        )

    @property
    def lost(self) -> bool:
        """The deciding process has gone away, or there was none; `start()` joins the next one."""
        link = self._link
        return link is None or link.is_down()

    def wait_until_lost(self, timeout: float | None = None) -> bool:
        """Block until the deciding process has gone away; False when `timeout` seconds passed first."""
        link = self._link
        return link is None or link.wait_down(timeout)

    def note_step(self, step: int) -> None:
        """Say that this rank has finished step `step`; with `debug_checks` a store of a later step is refused."""
        if self._executor is not None:
            self._executor.step = step

    def execute(self, commands: bytes, ready: Ready = HOST_VISIBLE) -> bytes:
        """Run the commands that came with a step; return what ended, for the step's answer (piggyback transport).

        Args:
            commands: What `take_commands` returned; may be empty.
            ready: Event recorded after this rank's last write to its KV caches; copies start after it.

        Raises:
            UsageError: Not joined, another transport, lost messages, or a forked process.
        """
        self._process.check()
        executor = self._executor
        if executor is None or self._thread is not None:
            raise UsageError("execute needs a joined rank with the piggyback transport: call start() first")
        if commands:
            executor.run(commands, ready)
        return executor.reports()

    def _serve(self, welcome: Welcome, incarnation: int, connected: threading.Event) -> None:
        executor, wake, link, worker = self._executor, self._wake, self._link, self._worker
        if executor is None or wake is None or link is None:
            connected.set()
            return
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        try:
            dealer.setsockopt(zmq.IDENTITY, incarnation.to_bytes(8, "big"))
            dealer.setsockopt(zmq.LINGER, 200)
            dealer.setsockopt(zmq.SNDHWM, 0)  # bounded by the jobs in flight
            dealer.setsockopt(zmq.RCVHWM, 0)
            dealer.connect(welcome.endpoint)
            dealer.send(encode(Reports(welcome.epoch, incarnation, self.rank, [])))
            connected.set()
            poller = select.poll()
            for source in (int(dealer.getsockopt(zmq.FD)), wake.fileno(), link.sock.fileno(), link.pidfd):
                poller.register(source, select.POLLIN)
            while not self._closing:
                while int(dealer.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # its descriptor tells of news once
                    executor.run(dealer.recv(zmq.DONTWAIT))
                self._send_reports(dealer, executor)
                if int(dealer.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                    continue
                news = [fd for fd, _ in poller.poll(1000)]
                if wake.fileno() in news:
                    wake.consume()
                if (link.pidfd in news or link.sock.fileno() in news) and link.is_down():
                    return
            self._send_reports(dealer, executor)
        except Exception:
            logger.exception("rank %d leaves: its channel broke", self.rank)
            link.say(LEAVING)
            while pending := worker.pending_jobs():  # until then its GPU blocks must not be given to others
                worker.wait(set(pending), 1.0)
            link.hang_up()
        finally:
            connected.set()
            dealer.close()
            context.term()

    @staticmethod
    def _send_reports(dealer: zmq.Socket[bytes], executor: RankExecutor) -> None:
        reports = executor.reports()
        if reports:
            dealer.send(reports)

    def close(self, timeout: float = 10.0) -> None:
        """Let copies end, then leave and unmap; idempotent. The deciding process hears of it only after the copies.

        When copies still run after `timeout` seconds, connection and memory stay, and the next call tries again.
        """
        self._process.check()
        self._closing = True
        deadline = time.monotonic() + timeout
        handlers, link = self._handlers, self._link
        if link is not None:
            link.say(LEAVING)
        if handlers is not None:
            handlers.shutdown(timeout)
            self._worker.wait(set(self._worker.pending_jobs()), max(0.0, deadline - time.monotonic()))
        if self._wake is not None:
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(max(1.0, deadline - time.monotonic()))
        if handlers is not None and (pending := self._worker.pending_jobs()):
            logger.error(
                "rank %d: copies %s still run, its memory stays mapped and its connection open", self.rank, pending
            )
            return
        self._thread = self._executor = self._handlers = None
        if self._wake is not None:
            self._wake.close()
            self._wake = None
        self._link = None
        if link is not None:
            link.close()
