"""`RemoteWorkers`: the deciding process's side of its ranks; an engine uses it in place of an `OffloadingWorker`.

Theory of operation. One thread (`RankChannel`) meets the ranks, sends the commands that the owner put in the
`RankBook`, books reports, and watches each rank's process and connection. The owner only touches the book, under a
lock. With the piggyback transport the channel is the engine's own step message, and the thread only meets and watches.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable

from kvoffload.config import OffloadConfig
from kvoffload.errors import ClosedError, ConfigError, KVOffloadError, UsageError
from kvoffload.memory.populate import Progress
from kvoffload.memory.region import SharedOffloadRegion
from kvoffload.service.ranks import meeting
from kvoffload.service.ranks.admission import agree
from kvoffload.service.ranks.book import RankBook
from kvoffload.service.ranks.channel import RankChannel, Transport
from kvoffload.service.ranks.wire import Hello, command, decode_reports
from kvoffload.transfer.base import HOST_VISIBLE, Ready, TransferResult, TransferSpec, TransferType
from kvoffload.transfer.checks import OwnerProcess

logger = logging.getLogger(__name__)


class RemoteWorkers:
    """The ranks of one instance, each in its own process.

    Args:
        world_size: Ranks that must join.
        address: Where ranks connect: `"ipc"` makes an unused abstract address, see `address`.
        transport: `"zmq"`: commands go over ZeroMQ ipc at once; a store may only be asked for after the step that wrote
            its blocks has come back, and is then `"host-visible"`. `"piggyback"`: `take_commands` and `apply_results`
            travel in the engine's own step messages.
        join_timeout: Seconds to wait for all ranks at the start.
        progress: Called from a thread with done and total bytes while the shared region is reserved and populated.

    Attributes:
        address: What to give to each `OffloadRankWorker`.
    """

    def __init__(
        self,
        world_size: int,
        *,
        address: str = "ipc",
        transport: Transport = "zmq",
        join_timeout: float = 120.0,
        progress: Progress | None = None,
    ) -> None:
        if not isinstance(world_size, int) or world_size < 1:
            raise UsageError(f"world_size must be a whole number of at least 1; got {world_size!r}")
        if transport not in {"zmq", "piggyback"}:
            raise UsageError(f'transport must be "zmq" or "piggyback", got {transport!r}')
        if not isinstance(address, str):
            raise UsageError(f'address must be "ipc", a path, or "@" and a name; got {address!r}')
        self.world_size = world_size
        self.transport: Transport = transport
        self.join_timeout = join_timeout
        self.address = meeting.new_address() if address == "ipc" else address
        self._progress = progress
        self._process = OwnerProcess("this RemoteWorkers")
        self._lock = threading.Condition()
        self._book = RankBook(world_size, secrets.randbits(63) | 1)
        self._step = 0
        self._region: SharedOffloadRegion | None = None
        self._notify: Callable[[], None] | None = None
        self._errors: dict[int, BaseException] = {}
        self._closing = False
        self._channel = RankChannel(self.address, transport, self._book, self._lock, self._ring)

    # ---- start

    def gather(self, config: OffloadConfig) -> Hello:
        """Wait until every rank has connected; return the geometry they share, with the smallest number of GPU blocks.

        Raises:
            ConfigError: A rank does not fit the others or this process's configuration, or did not come in time.
            ClosedError: `shutdown` was called meanwhile.
        """
        self._process.check()
        channel = self._channel
        channel.debug_checks = config.debug_checks
        with self._lock:
            self._wait_for(lambda: len(channel.hellos) == self.world_size, self._absent_at_start)
            agreed = channel.agreed = agree(list(channel.hellos.values()))
        for name, theirs, mine in (
            ("block_size_factor", agreed.block_size_factor, config.block_size_factor),
            ("gpu_block_sizes", tuple(agreed.gpu_block_sizes), config.gpu_block_sizes),
        ):
            if theirs != mine:
                raise ConfigError(f"the ranks have {name} {theirs}, the deciding process {mine}: they must be equal")
        return agreed

    def provide(self, num_cpu_blocks: int) -> None:
        """Make the shared region and let the ranks in; returns when all can take commands. Takes long: use a thread.

        Raises:
            NoSpaceError: There is less memory than the region needs.
            ConfigError: A rank did not get ready in time.
            ClosedError: `shutdown` was called meanwhile.
        """
        agreed = self._channel.agreed
        if agreed is None:
            raise UsageError("the ranks have not joined: call gather() first")
        page = sum(agreed.page_sizes) * agreed.block_size_factor
        total = page * self.world_size * num_cpu_blocks
        region = SharedOffloadRegion(None, total, num_cpu_blocks, None, self.world_size, page, progress=self._go_on)
        with self._lock:
            if self._closing:
                region.cleanup()
                raise ClosedError("the ranks were shut down while their region was made")
            self._region = region
        self._channel.open(region)
        with self._lock:
            self._wait_for(
                lambda: not self._book.missing(),
                lambda: f"ranks {self._book.missing()} were not ready within {self.join_timeout} s",
            )

    def give_up(self) -> None:
        """Let `gather` and `provide` end soon, with `ClosedError`; returns at once. Nothing can join afterwards."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()

    @property
    def is_shut_down(self) -> bool:
        """Nothing can join any more."""
        return self._closing

    def _go_on(self, done: int, total: int) -> None:
        """Pass on how far the region is; nobody waits until 100 GiB that nobody wants any more are reserved."""
        if self._closing:
            raise ClosedError("the ranks were shut down while their region was made")
        if self._progress is not None:
            self._progress(done, total)

    def _absent_at_start(self) -> str:
        absent = sorted(set(range(self.world_size)) - set(self._channel.hellos))
        return f"ranks {absent} of {self.world_size} did not join within {self.join_timeout} s"

    def _wait_for(self, done: Callable[[], bool], complaint: Callable[[], str]) -> None:
        """Wait, under the lock, until something is so."""
        channel, deadline = self._channel, time.monotonic() + self.join_timeout
        while not done():
            if channel.refusals:
                raise ConfigError(channel.refusals[0])
            if self._closing or channel.broken is not None:
                raise ClosedError("the ranks were shut down while they joined") from channel.broken
            left = deadline - time.monotonic()
            if left <= 0:
                raise ConfigError(complaint())
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
        self._channel.send()
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
            raise UsageError(
                f"take_commands belongs to the piggyback transport, this one is "
                f"{self.transport}: make RemoteWorkers with it"
            )
        with self._lock:
            return self._book.take_common()

    def apply_results(self, rank: int, results: bytes) -> None:
        """Take what `OffloadRankWorker.execute` returned on a rank.

        Raises:
            UsageError: These are no reports.
        """
        if not results:
            return
        try:
            reports = decode_reports(results)
        except ValueError as error:
            raise UsageError(f"rank {rank} sent no reports: {error}") from error
        with self._lock:
            self._book.report(reports)
        self._ring()

    def shutdown(self, timeout: float = 10.0, why: str | None = None) -> None:
        """Stop the channel, let the ranks go, unmap the region; idempotent.

        Ranks learn of it by the end of their connection, finish their copies and wait for a new deciding process.

        Args:
            timeout: Seconds to wait for the thread.
            why: What ranks that still wait to be let in are told.
        """
        self._process.check()
        self.give_up()
        with self._lock:
            region, self._region = self._region, None
        self._channel.stop(timeout, why)
        if region is not None:
            region.cleanup()

    def _ring(self) -> None:
        if self._notify is not None:
            self._notify()
