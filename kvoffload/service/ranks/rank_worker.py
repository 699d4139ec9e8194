"""`OffloadRankWorker`: owns one rank's tensors and its share of the region, and executes numbered commands."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time

import zmq

import kvoffload
from kvoffload.config import OffloadConfig
from kvoffload.errors import ClosedError, KVOffloadError, UsageError
from kvoffload.manager.specs import CPULoadStoreSpec, GPULoadStoreSpec
from kvoffload.memory.canonical import CanonicalKVCaches
from kvoffload.memory.region import SharedOffloadRegion
from kvoffload.service.bridge import CompletionBridge
from kvoffload.service.ranks import meeting
from kvoffload.service.ranks.wire import (
    PROTOCOL,
    Command,
    Hello,
    Report,
    Reports,
    Welcome,
    decode_commands,
    encode,
    transfer_spec,
)
from kvoffload.transfer.base import HOST_VISIBLE, Ready
from kvoffload.transfer.checks import OwnerProcess
from kvoffload.transfer.directional import CpuGpuOffloadingHandlers
from kvoffload.transfer.worker import OffloadingWorker

logger = logging.getLogger(__name__)


class RankExecutor:
    """Runs commands on a worker and gathers reports; one thread at a time.

    Args:
        worker: Moves the bytes of this rank.
        welcome: The deciding process's life and settings.
        rank: This rank.
        incarnation: This life of the rank.

    Attributes:
        stale_commands: Commands of another epoch, or seen before, dropped.
    """

    def __init__(self, worker: OffloadingWorker, welcome: Welcome, rank: int, incarnation: int) -> None:
        self._worker = worker
        self._welcome = welcome
        self._rank = rank
        self._incarnation = incarnation
        self._next = 1
        self._reports: list[Report] = []
        self.stale_commands = 0
        self.step = 0

    def run(self, data: bytes, ready: Ready = HOST_VISIBLE) -> None:
        """Submit a batch of commands.

        Raises:
            UsageError: These are no commands, or some were lost on the way.
        """
        try:
            batch = decode_commands(data)
        except ValueError as error:
            raise UsageError(f"these are no commands: {error}") from error
        if batch.epoch != self._welcome.epoch:
            self.stale_commands += len(batch.commands)
            return
        if batch.first > self._next:
            raise UsageError(f"commands {self._next}..{batch.first - 1} were lost: every rank must get every message")
        seen = self._next - batch.first
        self.stale_commands += min(seen, len(batch.commands))
        for order in batch.commands[seen:]:
            self._next += 1
            self._submit(order, ready)

    def _submit(self, order: Command, ready: Ready) -> None:
        error: str | None = None
        if self._welcome.debug_checks and order.store and order.step > self.step:
            error = (
                f"a store of step {order.step} came while this rank is at step {self.step}: "
                "store only after the step's result came back"
            )
        elif not self._worker.transfer_async(order.job, transfer_spec(order), ready):
            error = repr(self._worker.take_submit_error(order.job) or "refused")
        if error is not None:
            self._reports.append(Report(order.job, False, 0, 0.0, 0.0, error))

    def reports(self) -> bytes:
        """Return what ended since the last call, encoded; empty when nothing did."""
        for result in self._worker.get_finished():
            self._reports.append(
                Report(
                    result.job_id,
                    result.success,
                    result.transfer_size or 0,
                    result.queue_time or 0.0,
                    result.transfer_time or 0.0,
                    None if result.success else repr(result.error),
                )
            )
        if not self._reports:
            return b""
        reports, self._reports = self._reports, []
        return encode(Reports(self._welcome.epoch, self._incarnation, self._rank, reports))


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
    """

    def __init__(
        self, config: OffloadConfig, kv_caches: CanonicalKVCaches, *, rank: int, address: str, timeout: float = 120.0
    ) -> None:
        if not 0 <= rank < config.world_size:
            raise UsageError(f"rank {rank} is not in 0..{config.world_size - 1} (world_size)")
        self.config = config
        self.kv_caches = kv_caches
        self.rank = rank
        self.address = address
        self._timeout = timeout
        self._process = OwnerProcess(f"rank {rank}'s worker")
        self._sock: socket.socket | None = None
        self._region: SharedOffloadRegion | None = None
        self._handlers: CpuGpuOffloadingHandlers | None = None
        self._executor: RankExecutor | None = None
        self._thread: threading.Thread | None = None
        self._wake: CompletionBridge | None = None
        self._closing = False

    def start(self) -> None:
        """Join the deciding process: map the region, make the handlers and, with zmq, start the thread. Takes long.

        Raises:
            ConfigError: The deciding process refused this rank; the message names both sides.
            ClosedError: There is no deciding process.
            UsageError: It was started and is still joined.
        """
        self._process.check()
        if self._executor is not None and not self.lost:
            raise UsageError(f"rank {self.rank} has joined already")
        self.close()
        self._closing = False
        incarnation = secrets.randbits(63) | 1
        self._sock = meeting.connect(self.address, self._timeout)
        try:
            welcome, self._region = meeting.introduce(self._sock, self._hello(incarnation), self._timeout)
            self._open(welcome, incarnation)
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

    def _open(self, welcome: Welcome, incarnation: int) -> None:
        region, sock = self._region, self._sock
        if region is None or sock is None:
            raise ClosedError("this rank is not connected")
        factor = self.config.block_size_factor
        views = [region.create_next_view(tensor.page_size_bytes * factor) for tensor in self.kv_caches.tensors]
        self._handlers = CpuGpuOffloadingHandlers(
            self.kv_caches, factor, region.num_blocks, cpu_tensors=views, pin_memory=self.config.pin_memory
        )
        worker = OffloadingWorker()
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
            connected.wait(self._timeout)
        sock.send(b"ready")

    @property
    def lost(self) -> bool:
        """The deciding process has gone away; `start()` joins the next one."""
        sock = self._sock
        if sock is None:
            return True
        with contextlib.suppress(BlockingIOError):
            return not sock.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        return False

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
        executor, wake, sock = self._executor, self._wake, self._sock
        if executor is None or wake is None or sock is None:
            return
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.IDENTITY, incarnation.to_bytes(8, "big"))
        dealer.setsockopt(zmq.LINGER, 200)
        dealer.connect(welcome.endpoint)
        dealer.send(encode(Reports(welcome.epoch, incarnation, self.rank, [])))
        connected.set()
        poller = zmq.Poller()
        for source in (dealer, wake.fileno(), sock.fileno()):
            poller.register(source, zmq.POLLIN)
        try:
            while not self._closing:
                for source, _ in poller.poll(1000):
                    if source is dealer:
                        self._take_all(dealer, executor)
                    elif source == wake.fileno():
                        wake.consume()
                    elif self.lost:
                        return
                reports = executor.reports()
                if reports:
                    dealer.send(reports)
        except (KVOffloadError, zmq.ZMQError, OSError):
            logger.exception("rank %d leaves: its channel broke", self.rank)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        finally:
            dealer.close()
            context.term()

    @staticmethod
    def _take_all(dealer: zmq.Socket[bytes], executor: RankExecutor) -> None:
        while True:
            try:
                executor.run(dealer.recv(zmq.DONTWAIT))
            except zmq.Again:
                return

    def close(self, timeout: float = 10.0) -> None:
        """Let copies end, then leave and unmap; idempotent. The deciding process hears of it only after the copies."""
        self._process.check()
        self._closing = True
        deadline = time.monotonic() + timeout
        handlers, self._handlers = self._handlers, None
        if handlers is not None:
            handlers.shutdown(timeout)
        if self._wake is not None:
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(max(0.0, deadline - time.monotonic()))
            self._thread = None
        if self._wake is not None:
            self._wake.close()
            self._wake = None
        self._executor = None
        if handlers is not None and handlers.pending_jobs():
            logger.error("rank %d: copies still run, its memory stays mapped and its connection open", self.rank)
            return
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        if self._region is not None:
            self._region.cleanup()
            self._region = None
