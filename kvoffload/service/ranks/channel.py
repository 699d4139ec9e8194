"""`RankChannel`: the one thread that meets ranks, talks to them and notices that they are gone.

A connection is a *stranger* until its hello came, then a *peer*: it waits for the region, is invited (welcome and
region are sent), says that it is ready, and is up when, with zmq, its first message came on the channel. Everything
happens on this thread, so two processes cannot become one rank, and a peer that ends at any point is let go at the same
place. What others read (the book, the roll of peers) is changed under one lock.

Only sending is done by the owner as well, which saves a change of threads: a second lock lets one thread at a time use
the zmq socket. Its descriptor tells of news once, so whoever used the socket looks for messages afterwards.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

import zmq

from kvoffload.errors import KVOffloadError, UsageError
from kvoffload.memory.region import SharedOffloadRegion
from kvoffload.service.bridge import CompletionBridge
from kvoffload.service.ranks import meeting
from kvoffload.service.ranks.admission import why_refused
from kvoffload.service.ranks.book import RankBook
from kvoffload.service.ranks.peers import Peer, Stranger, note_listener
from kvoffload.service.ranks.wire import LEAVING, READY, Hello, Reports, Welcome, decode_reports, encode

logger = logging.getLogger(__name__)

Transport = Literal["zmq", "piggyback"]
_HELLO_SECONDS = 5.0
_IDLE_MILLISECONDS = 1000
_BACK_OFF_SECONDS = 0.1
_MESSAGES_AT_A_TIME = 32


class RankChannel:
    """Serves one life of the deciding process from `start` to `stop`.

    Args:
        address: Where ranks connect.
        transport: Who carries commands and reports.
        book: Commands to send and reports to book.
        lock: Guards the book and everything below that says so; notified when ranks came, went or were refused.
        ring: Called when there is something for the owner to poll.

    Attributes:
        hellos: What the ranks that are connected say of themselves; under the lock.
        refusals: Why ranks were refused before the region was made; under the lock.
        agreed: What the ranks had in common when all had come; under the lock.
        dropped: Messages on the zmq channel that were no reports of a rank.
        broken: Why the thread ended early; None while it serves.

    Raises:
        UsageError: The address is taken.
    """

    def __init__(
        self, address: str, transport: Transport, book: RankBook, lock: threading.Condition, ring: Callable[[], None]
    ) -> None:
        self.address = address
        self.hellos: dict[int, Hello] = {}
        self.refusals: list[str] = []
        self.agreed: Hello | None = None
        self.dropped = 0
        self.broken: BaseException | None = None
        self.debug_checks = False
        self._transport: Transport = transport
        self._book, self._lock, self._ring = book, lock, ring
        self._peers: dict[int, Peer] = {}
        self._strangers: dict[int, Stranger] = {}
        self._region: SharedOffloadRegion | None = None
        self._stopping = False
        self._given_up: str | None = None
        self._listener = meeting.listen(address)
        note_listener(self._listener)
        self._wake = CompletionBridge()
        self._context = zmq.Context()
        self._socket_lock = threading.Lock()
        self._router: zmq.Socket[bytes] | None = None
        self._poller = select.poll()
        self._watched: dict[int, Peer] = {}
        self._changed = True
        self._endpoint = f"ipc://@kvoffload-{os.getpid()}-{secrets.token_hex(8)}"
        self._thread = threading.Thread(target=self._run, name="kvoffload-ranks", daemon=True)
        self._thread.start()

    # ---- called by others

    def send(self) -> None:
        """Send each rank what the book has for it; from any thread."""
        if self._transport != "zmq":
            return
        with self._socket_lock:
            router = self._router
            if router is None:
                return
            self._send(router)
            if int(router.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._wake.notify()

    def open(self, region: SharedOffloadRegion) -> None:
        """Let ranks in: those that wait, and any that comes later and fits."""
        self._region = region
        self._wake.notify()

    def stop(self, timeout: float, why: str | None = None) -> None:
        """End the thread and every connection; ranks that wait to be let in are told why. Idempotent."""
        self._given_up = self._given_up or why
        self._stopping = True
        self._wake.notify()
        self._thread.join(timeout)

    # ---- the thread

    def _run(self) -> None:
        try:
            router = self._context.socket(zmq.ROUTER)
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            router.setsockopt(zmq.LINGER, 0)
            router.setsockopt(zmq.SNDHWM, 0)  # bounded by the jobs in flight; a full queue would block every rank
            router.setsockopt(zmq.RCVHWM, 0)
            router.bind(self._endpoint)
            self._router = router
            self._router_fd = int(router.getsockopt(zmq.FD))
            while not self._stopping:
                self._serve_once(router)
        except Exception as error:
            logger.exception("the channel to the ranks broke: they get no more commands")
            with self._lock:
                self.broken = error
                for rank in range(self._book.world_size):
                    self._book.retire(rank)  # their copies may still run, so nothing they owe has ended
                self._lock.notify_all()
            self._ring()
        finally:
            with self._socket_lock:
                self._router = None
            self._context.destroy(linger=0)
            self._listener.close()
            meeting.remove(self.address)
            self._wake.close()
            self._say_why()
            for stranger in self._strangers.values():
                stranger.sock.close()
            for peer in self._peers.values():
                peer.close()

    def _say_why(self) -> None:
        """Tell ranks that wait to be let in why nobody will."""
        if self._given_up is None:
            return
        goodbye = encode(Welcome(given_up=self._given_up))
        waiting = [peer.sock for peer in self._peers.values() if not peer.invited]
        for sock in (*waiting, *(stranger.sock for stranger in self._strangers.values())):
            with suppress(OSError):  # it has gone, too
                sock.send(goodbye)

    def _serve_once(self, router: zmq.Socket[bytes]) -> None:
        """Take what is there, then wait for news of those that are connected."""
        self._receive(router)
        if self._region is not None:
            for peer in [peer for peer in self._peers.values() if not peer.invited]:
                self._invite(peer, self._region)
        if self._changed:
            self._watch()
        news = [fd for fd, _ in self._poller.poll(_IDLE_MILLISECONDS)]
        for fd in news:  # ends before beginnings: a rank that comes back finds its place free
            if fd in self._watched:
                self._look_at(self._watched[fd])
            elif fd in self._strangers:
                self._meet(self._strangers.pop(fd))
        if self._wake.fileno() in news:
            self._wake.consume()
        if self._listener.fileno() in news:  # last: what it opens may have the number of what was closed above
            self._accept()
        if self._strangers:
            self._forget_silent_strangers()

    def _watch(self) -> None:
        """Poll exactly what is open now."""
        self._changed = False
        self._watched = {fd: peer for peer in self._peers.values() for fd in (peer.pidfd, peer.sock.fileno())}
        self._poller = select.poll()
        mine = (self._wake.fileno(), self._listener.fileno(), self._router_fd)
        for fd in (*mine, *self._strangers, *self._watched):
            self._poller.register(fd, select.POLLIN)

    # ---- joining

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:
            logger.exception("a rank's connection was not accepted")
            time.sleep(_BACK_OFF_SECONDS)  # out of descriptors: the listener stays readable
            return
        try:
            sock.setblocking(False)
            stranger = Stranger(sock, meeting.peer_pid(sock), time.monotonic() + _HELLO_SECONDS)
        except (KVOffloadError, OSError) as error:
            logger.warning("a connection was refused: %s", error)
            sock.close()
            return
        self._strangers[sock.fileno()] = stranger
        self._changed = True

    def _forget_silent_strangers(self) -> None:
        now = time.monotonic()
        for fd in [fd for fd, stranger in self._strangers.items() if stranger.until_seconds < now]:
            stranger = self._strangers.pop(fd)
            self._changed = True
            logger.warning("process %d connected but is no rank: it said nothing", stranger.pid)
            stranger.sock.close()

    def _meet(self, stranger: Stranger) -> None:
        sock = stranger.sock
        self._changed = True
        try:
            hello = meeting.read_hello(sock)
            hello.pid = stranger.pid
            holder = self._peers.get(hello.rank)
            if holder is not None:
                self._look_at(holder)  # it may have ended a moment ago
            refusal = self._judge(hello)
            if refusal is None:
                pidfd = meeting.open_pidfd(hello.pid)
            else:
                sock.send(encode(Welcome(refusal=refusal)))
                raise UsageError(refusal)
        except (KVOffloadError, OSError) as error:
            logger.warning("process %d could not join: %s", stranger.pid, error)
            sock.close()
            return
        with self._lock:
            self._peers[hello.rank] = Peer(hello, sock, pidfd, hello.incarnation.to_bytes(8, "big"))
            self.hellos[hello.rank] = hello
            self._lock.notify_all()

    def _judge(self, hello: Hello) -> str | None:
        holder = self._peers.get(hello.rank)
        if holder is not None:
            return f"rank {hello.rank} is process {holder.hello.pid}: two processes cannot be one rank"
        with self._lock:
            refusal = why_refused(hello, self._book.world_size, self.hellos, self.agreed)
            if refusal is not None and self._region is None:
                self.refusals.append(refusal)
                self._lock.notify_all()
        return refusal

    def _invite(self, peer: Peer, region: SharedOffloadRegion) -> None:
        welcome = Welcome(
            epoch=self._book.epoch,
            transport=self._transport,
            endpoint=self._endpoint,
            debug_checks=self.debug_checks,
        )
        try:
            peer.sock.send(encode(welcome))
            region.send(peer.sock)
        except OSError as error:
            self._let_go(peer, f"it could not be let in: {error}")
        peer.invited = True

    def _bring_up(self, peer: Peer) -> None:
        """Let a rank take commands once it is ready and, with zmq, its channel works."""
        if not peer.ready or not (peer.greeted or self._transport == "piggyback"):
            return
        with self._lock:
            self._book.join(peer.hello.rank, peer.hello.incarnation)
            self._lock.notify_all()
        logger.info("rank %d is up: process %d", peer.hello.rank, peer.hello.pid)
        self._ring()

    # ---- leaving

    def _look_at(self, peer: Peer) -> None:
        """A rank's connection or process has news: it is ready, leaves, or has gone."""
        rank = peer.hello.rank
        if self._peers.get(rank) is not peer:
            return
        if meeting.has_ended(peer.pidfd):
            self._let_go(peer, f"process {peer.hello.pid} ended")
            return
        try:
            said = peer.sock.recv(64)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not said:
            self._let_go(peer, f"process {peer.hello.pid} closed its connection")
        elif said == READY and peer.invited and not peer.ready:
            peer.ready = True
            self._bring_up(peer)
        elif said == LEAVING:
            with self._lock:
                self._book.retire(rank)
                self._lock.notify_all()
            logger.info("rank %d is leaving: process %d", rank, peer.hello.pid)
            self._ring()

    def _let_go(self, peer: Peer, why: str) -> None:
        rank = peer.hello.rank
        self._changed = True
        with self._lock:
            del self._peers[rank]
            self.hellos.pop(rank, None)
            self._book.leave(rank, why)
            self._lock.notify_all()
        peer.close()
        logger.warning("rank %d is gone: %s", rank, why)
        self._ring()

    # ---- commands and reports

    def _send(self, router: zmq.Socket[bytes]) -> None:
        with self._lock:
            batches = [(self._peers[rank], batch) for rank, batch in self._book.take_each().items()]
        for peer, batch in batches:
            try:
                router.send(peer.identity, zmq.SNDMORE | zmq.DONTWAIT)
                router.send(batch, zmq.DONTWAIT)
            except zmq.ZMQError as error:  # its end closed a moment ago; its connection tells that next
                logger.warning("commands to rank %d were not sent: %s", peer.hello.rank, error)
                with self._lock:
                    self._book.retire(peer.hello.rank)

    def _receive(self, router: zmq.Socket[bytes]) -> None:
        messages: list[tuple[bytes, bytes]] = []
        more = True
        while more:
            messages.clear()
            with self._socket_lock:  # for some messages at a time: the owner may wait for it
                while more and len(messages) < _MESSAGES_AT_A_TIME:
                    more = bool(int(router.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
                    if more:
                        first, *_, last = router.recv_multipart(zmq.DONTWAIT)
                        messages.append((first, last))
            for identity, data in messages:
                self._take(identity, data)

    def _take(self, identity: bytes, data: bytes) -> None:
        """Book one message; anybody can connect, so only what fits a peer counts."""
        try:
            reports = decode_reports(data)
        except ValueError:
            self._drop()
            return
        peer = self._peers.get(reports.rank)
        if peer is None or identity != peer.identity or reports.epoch != self._book.epoch:
            self._drop(reports)
            return
        if not peer.greeted:
            peer.greeted = True
            self._bring_up(peer)
        if reports.reports:
            with self._lock:
                self._book.report(reports)
                ended = self._book.has_ended
            if ended:
                self._ring()

    def _drop(self, reports: Reports | None = None) -> None:
        self.dropped += 1
        if reports is not None and reports.reports:
            with self._lock:
                self._book.stale_reports += len(reports.reports)
        if self.dropped == 1:
            logger.warning("dropped a message that is no report of a rank; further ones are only counted")
