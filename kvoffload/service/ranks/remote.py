"""`RemoteWorkers`: the deciding process's side of its ranks; an engine uses it in place of an `OffloadingWorker`.

Theory of operation. Ranks meet this process at a unix socket (`meeting`). A join runs in a thread of its own: hello,
checks, region, ready. One thread serves the channel: it sends the commands that the owner queued in the `RankBook`,
books reports, and watches each rank's process and connection. The owner only touches the book, under a lock. With the
piggyback transport the channel is the engine's own step message, and the thread only watches.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import zmq

import kvoffload
from kvoffload.errors import ClosedError, ConfigError, KVOffloadError, TransferError, UsageError
from kvoffload.memory.region import SharedOffloadRegion
from kvoffload.service.bridge import CompletionBridge
from kvoffload.service.ranks import meeting
from kvoffload.service.ranks.book import RankBook
from kvoffload.service.ranks.wire import Hello, Welcome, command, decode_reports, encode
from kvoffload.transfer.base import HOST_VISIBLE, Ready, TransferResult, TransferSpec, TransferType
from kvoffload.transfer.checks import OwnerProcess

logger = logging.getLogger(__name__)

Transport = Literal["zmq", "piggyback"]
_HELLO_SECONDS = 5.0


@dataclass(slots=True, eq=False)
class _Peer:
    """A connected rank process."""

    hello: Hello
    sock: socket.socket
    pidfd: int
    identity: bytes

    def close(self) -> None:
        self.sock.close()
        os.close(self.pidfd)


class RemoteWorkers:
    """The ranks of one instance, each in its own process.

    Args:
        world_size: Ranks that must join.
        address: Where ranks connect: `"ipc"` makes an unused abstract address, see `address`.
        transport: `"zmq"`: commands go over ZeroMQ ipc at once; a store may only be asked for after the step that wrote
            its blocks has come back, and is then `"host-visible"`. `"piggyback"`: `take_commands` and `apply_results`
            travel in the engine's own step messages.
        join_timeout: Seconds to wait for all ranks at the start.

    Attributes:
        address: What to give to each `OffloadRankWorker`.
    """

    def __init__(
        self, world_size: int, *, address: str = "ipc", transport: Transport = "zmq", join_timeout: float = 120.0
    ) -> None:
        if world_size < 1:
            raise UsageError(f"world_size must be at least 1, got {world_size}")
        if transport not in {"zmq", "piggyback"}:
            raise UsageError(f'transport must be "zmq" or "piggyback", got {transport!r}')
        self.world_size = world_size
        self.transport: Transport = transport
        self.join_timeout = join_timeout
        self.address = meeting.new_address() if address == "ipc" else address
        self.debug_checks = False
        self._process = OwnerProcess("this RemoteWorkers")
        self._lock = threading.Condition()
        self._book = RankBook(world_size, secrets.randbits(63) | 1)
        self._step = 0
        self._peers: dict[int, _Peer] = {}
        self._greeted: set[bytes] = set()
        self._first: Hello | None = None
        self._hellos: dict[int, Hello] = {}
        self._refusals: list[str] = []
        self._region: SharedOffloadRegion | None = None
        self._notify: Callable[[], None] | None = None
        self._errors: dict[int, BaseException] = {}
        self._closing = False
        self._wake = CompletionBridge()
        self._context = zmq.Context()
        self._endpoint = f"ipc://@kvoffload-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener = meeting.listen(self.address)
        self._thread = threading.Thread(target=self._serve, name="kvoffload-ranks", daemon=True)
        self._thread.start()

    # ---- start

    def gather(self, *, debug_checks: bool = False) -> Hello:
        """Wait until every rank has connected; return the geometry they share, with the smallest number of GPU blocks.

        Raises:
            ConfigError: A rank does not fit the others, or did not come in time.
        """
        self._process.check()
        self.debug_checks = debug_checks
        deadline = time.monotonic() + self.join_timeout
        with self._lock:
            while len(self._hellos) < self.world_size and not self._refusals:
                left = deadline - time.monotonic()
                if left <= 0:
                    absent = sorted(set(range(self.world_size)) - set(self._hellos))
                    raise ConfigError(f"ranks {absent} of {self.world_size} did not join within {self.join_timeout} s")
                self._lock.wait(left)
            if self._refusals:
                raise ConfigError(self._refusals[0])
            smallest = min(hello.num_blocks for hello in self._hellos.values())
            first = self._hellos[0]
        return Hello(**{**{f: getattr(first, f) for f in first.__struct_fields__}, "num_blocks": smallest})

    def provide(self, num_cpu_blocks: int) -> None:
        """Make the shared region and let the ranks in; returns when all can take commands. Takes long: use a thread.

        Raises:
            NoSpaceError: There is less memory than the region needs.
            ConfigError: A rank did not get ready in time.
        """
        with self._lock:
            first = self._hellos[0]
        page = sum(first.page_sizes) * first.block_size_factor
        total = page * self.world_size * num_cpu_blocks
        region = SharedOffloadRegion(None, total, num_cpu_blocks, None, self.world_size, page)
        deadline = time.monotonic() + self.join_timeout
        with self._lock:
            self._region = region
            self._lock.notify_all()
            while self._book.missing():
                left = deadline - time.monotonic()
                if left <= 0 or self._refusals:
                    why = self._refusals[0] if self._refusals else f"not ready within {self.join_timeout} s"
                    raise ConfigError(f"ranks {self._book.missing()}: {why}")
                self._lock.wait(left)

    # ---- what an engine uses

    def set_notify(self, callback: Callable[[], None] | None) -> None:
        """Call `callback` from a thread whenever `get_finished` has news, or a rank came or went."""
        self._notify = callback

    def transfer_async(self, job_id: int, spec: TransferSpec, ready: Ready = HOST_VISIBLE) -> bool:
        """Send one transfer to every rank; False while one is missing."""
        self._process.check()
        try:
            if not (isinstance(ready, str) and ready == HOST_VISIBLE):
                self._refuse_event(ready)
            with self._lock:
                self._book.submit(command(job_id, spec, self._step))
        except KVOffloadError as error:
            self._errors[job_id] = error
            return False
        if self.transport == "zmq":
            self._wake.notify()
        return True

    @staticmethod
    def _refuse_event(ready: Ready) -> None:
        raise UsageError(
            f'ready={ready!r}: an event cannot go to another process; store after the step came back, as "host-visible"'
        )

    def note_step(self, step: int) -> None:
        """Say that the results of step `step` came back; with `debug_checks` ranks refuse stores of a later step."""
        self._step = step

    def take_submit_error(self, job_id: int) -> BaseException | None:
        """Return why a transfer was refused, once."""
        return self._errors.pop(job_id, None)

    def take_handler_errors(self) -> dict[TransferType, BaseException]:
        """Return nothing: a broken rank is a missing rank."""
        return {}

    def get_finished(self) -> list[TransferResult]:
        """Return what has ended on every rank since the last call."""
        with self._lock:
            return self._book.take_ended()

    def absent(self) -> str | None:
        """Return which ranks are missing; None when all are up."""
        with self._lock:
            missing = self._book.missing()
        return f"ranks {missing} of {self.world_size} are missing" if missing else None

    def num_up(self) -> int:
        """Return how many ranks are up."""
        with self._lock:
            return self._book.num_up()

    @property
    def stale_reports(self) -> int:
        """Reports of an earlier life, dropped."""
        return self._book.stale_reports

    def pending_jobs(self) -> list[int]:
        """Return the jobs that a rank still owes a report for."""
        with self._lock:
            return self._book.pending()

    def take_commands(self) -> bytes:
        """Return what every rank has to do next; goes into the step message to each rank.

        Raises:
            UsageError: The transport is not piggyback.
        """
        self._process.check()
        if self.transport != "piggyback":
            raise UsageError(f"take_commands belongs to the piggyback transport, this one is {self.transport}")
        with self._lock:
            return self._book.take_common()

    def apply_results(self, rank: int, results: bytes) -> None:
        """Take what `OffloadRankWorker.execute` returned on a rank.

        Raises:
            UsageError: These are no reports.
        """
        if results:
            self._book_reports(results, f"rank {rank}")

    def _book_reports(self, data: bytes, source: str) -> None:
        try:
            reports = decode_reports(data)
        except ValueError as error:
            raise UsageError(f"{source} sent no reports: {error}") from error
        with self._lock:
            self._book.report(reports)
        self._ring()

    def shutdown(self, timeout: float = 10.0) -> None:
        """Stop the channel, let the ranks go, unmap the region; idempotent.

        Ranks learn of it by the end of their connection, finish their copies and wait for a new deciding process.
        """
        self._process.check()
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._lock.notify_all()
        self._wake.notify()
        self._thread.join(timeout)
        if self._region is not None:
            self._region.cleanup()

    # ---- the serving thread

    def _serve(self) -> None:
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.LINGER, 0)
        router.bind(self._endpoint)
        poller = zmq.Poller()
        for source in (router, self._wake.fileno(), self._listener.fileno()):
            poller.register(source, zmq.POLLIN)
        watched: dict[int, int] = {}
        try:
            while not self._closing:
                self._watch(poller, watched)
                for source, _ in poller.poll(1000):
                    if source is router:
                        self._receive(router)
                    elif source == self._listener.fileno():
                        self._accept()
                    elif source == self._wake.fileno():
                        self._wake.consume()
                    elif source in watched:
                        self._look_at(watched[source], source)
                if self.transport == "zmq":
                    self._send(router)
        except Exception:
            logger.exception("the channel to the ranks broke: they count as gone")
            with self._lock:
                for rank in range(self.world_size):
                    self._book.leave(rank, "the channel broke")
            self._ring()
        finally:
            router.close()
            self._context.term()
            self._listener.close()
            self._wake.close()
            with self._lock:
                peers, self._peers = list(self._peers.values()), {}
            for peer in peers:
                peer.close()

    def _watch(self, poller: zmq.Poller, watched: dict[int, int]) -> None:
        """Poll exactly the descriptors of the ranks that are connected now."""
        with self._lock:
            wanted = {fd: rank for rank, peer in self._peers.items() for fd in (peer.pidfd, peer.sock.fileno())}
        for fd in [fd for fd in watched if fd not in wanted]:
            poller.unregister(fd)
            del watched[fd]
        for fd, rank in wanted.items():
            if fd not in watched:
                poller.register(fd, zmq.POLLIN)
            watched[fd] = rank

    def _look_at(self, rank: int, fd: int) -> None:
        """A rank's process ended, or its connection did."""
        with self._lock:
            peer = self._peers.get(rank)
            if peer is None or fd not in {peer.pidfd, peer.sock.fileno()}:
                return
            if fd != peer.pidfd:
                with suppress(BlockingIOError):
                    if peer.sock.recv(64, socket.MSG_DONTWAIT):
                        return
            del self._peers[rank]
            self._greeted.discard(peer.identity)
            why = f"process {peer.hello.pid} {'ended' if fd == peer.pidfd else 'closed its connection'}"
            self._book.leave(rank, why)
        peer.close()
        logger.warning("rank %d is gone: %s", rank, why)
        self._ring()

    def _send(self, router: zmq.Socket[bytes]) -> None:
        with self._lock:
            batches = [(peer, self._book.take(rank)) for rank, peer in self._peers.items()]
        for peer, batch in batches:
            if batch is None:
                continue
            try:
                router.send_multipart([peer.identity, batch])
            except zmq.ZMQError as error:  # its connection ended a moment ago; _look_at hears of it next
                logger.warning("commands to rank %d were not sent: %s", peer.hello.rank, error)

    def _receive(self, router: zmq.Socket[bytes]) -> None:
        while True:
            try:
                identity, data = router.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._greet(identity)
            try:
                self._book_reports(data, "a rank")
            except UsageError:
                logger.warning("dropped a message that is no report", exc_info=True)
            self._ring()

    def _greet(self, identity: bytes) -> None:
        """A rank's channel works: its first message came."""
        with self._lock:
            if identity not in self._greeted:
                self._greeted.add(identity)
                for peer in self._peers.values():
                    if peer.identity == identity:
                        self._bring_up(peer)

    def _bring_up(self, peer: _Peer) -> None:
        """Let a rank take commands once it is ready and, with zmq, its channel works; under the lock."""
        if self.transport == "zmq" and peer.identity not in self._greeted:
            return
        self._book.join(peer.hello.rank, peer.hello.incarnation)
        self._lock.notify_all()
        logger.info("rank %d is up: process %d", peer.hello.rank, peer.hello.pid)

    def _ring(self) -> None:
        if self._notify is not None:
            self._notify()

    # ---- joining, each in a thread of its own

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        threading.Thread(target=self._join, args=(sock,), name="kvoffload-rank-joins", daemon=True).start()

    def _join(self, sock: socket.socket) -> None:
        try:
            self._admit(sock)
        except (KVOffloadError, OSError) as error:
            logger.warning("a rank could not join: %s", error)
            sock.close()
            with self._lock:
                self._lock.notify_all()

    def _admit(self, sock: socket.socket) -> None:
        pid = meeting.peer_pid(sock)
        hello = meeting.receive_hello(sock, _HELLO_SECONDS)
        hello.pid = pid
        refusal = self._check(hello)
        if refusal is not None:
            sock.send(encode(Welcome(refusal=refusal)))
            with self._lock:
                if self._region is None:
                    self._refusals.append(refusal)
                self._lock.notify_all()
            raise TransferError(refusal)
        pidfd = meeting.open_pidfd(pid)
        peer = _Peer(hello, sock, pidfd, hello.incarnation.to_bytes(8, "big"))
        try:
            self._let_in(peer)
        except BaseException:
            with self._lock:
                self._hellos.pop(hello.rank, None) if self._region is None else None
            os.close(pidfd)
            raise

    def _check(self, hello: Hello) -> str | None:
        with self._lock:
            if self._first is None:
                self._first = hello
            if hello.world_size != self.world_size:
                return f"rank {hello.rank} has world_size {hello.world_size}, the deciding process {self.world_size}"
            refusal = meeting.why_refused(hello, self._first, kvoffload.__version__)
            holder = self._peers.get(hello.rank)
            if refusal is None and holder is not None:
                refusal = f"rank {hello.rank} is up as process {holder.hello.pid}: two processes cannot be one rank"
            if refusal is None:
                self._hellos[hello.rank] = hello
                self._lock.notify_all()
            return refusal

    def _let_in(self, peer: _Peer) -> None:
        deadline = time.monotonic() + self.join_timeout
        with self._lock:
            while self._region is None and not self._closing:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise ClosedError("the region was not made in time")
                self._lock.wait(left)
            if self._closing:
                raise ClosedError("the deciding process is shutting down")
            region = self._region
        welcome = Welcome(
            epoch=self._book.epoch,
            transport=self.transport,
            endpoint=self._endpoint,
            debug_checks=self.debug_checks,
        )
        peer.sock.send(encode(welcome))
        if region is not None:
            region.send(peer.sock)
        peer.sock.settimeout(self.join_timeout)
        if peer.sock.recv(64) != b"ready":
            raise ClosedError(f"rank {peer.hello.rank} left while it mapped the region")
        peer.sock.settimeout(None)
        with self._lock:
            self._peers[peer.hello.rank] = peer
            self._bring_up(peer)
        self._wake.notify()
        self._ring()
