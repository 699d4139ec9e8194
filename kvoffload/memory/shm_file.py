"""The life of a named file in shared memory that leaves nothing behind.

Processes that can only meet by a name (ranks of an engine that know its id) open one file in `/dev/shm`:

- A lock file serialises "join or create"; flock dies with its holder, so a killed creator blocks nobody.
- The creator works on a file without a name (`O_TMPFILE`), reserves every page (`posix_fallocate`: a clean ENOSPC
  instead of a SIGBUS), and links the name last: what can be opened is complete, and nothing half made can be left over.
- Everybody who uses the file holds `flock(LOCK_SH)` on it from before it has a name. Whoever gets `LOCK_EX` knows that
  nobody does, and only then unlinks. A joiner that finds its file unlinked starts over.
- Each rank holds a lock on its own byte. When all ranks hold theirs, the last one unlinks the name: from then on no
  exit, however hard, can leave a file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvoffload.errors import ClosedError, LayoutError, NoSpaceError, UnsupportedError, UsageError
from kvoffload.memory import preflight
from kvoffload.memory.populate import Progress

PREFIX = "kvoffload_"
SUFFIX = ".mmap"
_LOCK_SUFFIX = ".lock"
_PIECE_BYTES = 256 * 1024 * 1024
_POLL_SECONDS = 0.01
_FLOCK = "hhqqi0q"  # struct flock of 64-bit Linux
_NO_ROOM = {errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT}


def shared_file_path(instance_id: str, system: preflight.SystemPaths = preflight.SYSTEM) -> Path:
    """Return the path of an instance's file.

    Raises:
        UsageError: The id cannot be part of a file name.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", instance_id):
        raise UsageError(f"instance_id {instance_id!r} must be 1 to 128 letters, digits, dots, dashes or underscores")
    return system.shm / f"{PREFIX}{instance_id}{SUFFIX}"


class SharedFile:
    """One process's hold on a shared file; the locks go with `close`, or with the process.

    Attributes:
        path: Its name, while it has one.
        fd: Open for reading and writing.
        created: This process made it.
    """

    def __init__(self, path: Path, fd: int, *, created: bool) -> None:
        self.path = path
        self.fd = fd
        self.created = created
        self._pid = os.getpid()

    def close(self) -> None:
        """Let go; the last one to leave removes the name if it is still there. Idempotent."""
        if self.fd < 0:
            return
        fd, self.fd = self.fd, -1
        try:
            if os.getpid() == self._pid and _lock(fd, fcntl.LOCK_EX):  # a fork shares the parent's locks
                _unlink_if_same(self.path, fd)
        finally:
            os.close(fd)

    def claim_rank(self, rank: int, num_ranks: int, *, keep_name: bool) -> None:
        """Hold a rank's place; the last rank to come removes the name unless it is to be kept.

        Raises:
            UsageError: A live process holds that rank.
        """
        try:
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0))
        except (BlockingIOError, PermissionError) as error:
            raise UsageError(f"{self.path}: rank {rank} is taken by another live process") from error
        if not keep_name and all(other == rank or self._is_taken(other) for other in range(num_ranks)):
            _unlink_if_same(self.path, self.fd)

    def _is_taken(self, rank: int) -> bool:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0)
        answer: bytes = fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, asked)
        return int(struct.unpack(_FLOCK, answer)[0]) != fcntl.F_UNLCK


def join_or_create(
    path: Path,
    size_bytes: int,
    *,
    rank: int | None,
    num_ranks: int,
    timeout: float,
    keep_name: bool = False,
    system: preflight.SystemPaths = preflight.SYSTEM,
    progress: Progress | None = None,
) -> SharedFile:
    """Open the file that live processes share under this name, or make it, and then remove leftovers of dead ones.

    Blocks while another process makes it; call it in a thread.

    Raises:
        NoSpaceError: The file system, the machine or the cgroup has less room; no file is left.
        LayoutError: Live processes share a file of another size under this name.
        UsageError: A live process holds that rank.
        ClosedError: Another process kept the lock longer than `timeout` seconds.
        UnsupportedError: The directory cannot be used, or another user's file has that name.
    """
    try:
        with _only_one(path.with_suffix(_LOCK_SUFFIX), timeout):
            shared = _join(path, size_bytes) or _create(path, size_bytes, system, progress)
            try:
                if rank is not None:
                    shared.claim_rank(rank, num_ranks, keep_name=keep_name)
            except BaseException:
                shared.close()
                raise
            return shared
    except OSError as error:
        if error.errno in _NO_ROOM:
            message = f"{path}: {size_bytes} bytes needed: {error}"
            raise NoSpaceError(message, requested_bytes=size_bytes, available_bytes=0) from error
        raise UnsupportedError(f"{path} cannot be shared: {error}") from error


def _join(path: Path, size_bytes: int) -> SharedFile | None:
    """Return the file if a live process uses it; remove it if none does."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        keep = False
        try:
            if _lock(fd, fcntl.LOCK_EX):
                _unlink_if_same(path, fd)
                continue
            if not _lock(fd, fcntl.LOCK_SH):  # somebody removes it right now
                time.sleep(_POLL_SECONDS)
                continue
            stat = os.fstat(fd)
            if stat.st_nlink == 0:
                continue
            if stat.st_size != size_bytes:
                raise LayoutError(
                    f"{path} is shared by live processes and has {stat.st_size} bytes, this process expects "
                    f"{size_bytes}: give every rank the same configuration, or this instance another instance_id"
                )
            keep = True
            return SharedFile(path, fd, created=False)
        finally:
            if not keep:
                os.close(fd)


def _create(path: Path, size_bytes: int, system: preflight.SystemPaths, progress: Progress | None) -> SharedFile:
    find_leftovers(system, remove=True)  # an engine's id is another in each life: nobody else comes for them
    preflight.check_shm(size_bytes, str(path), system)
    preflight.check_memory(size_bytes, str(path), system)
    try:
        fd = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UnsupportedError(
            f"{path.parent} has no files without a name (O_TMPFILE): {error}; it must be a tmpfs"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        reserve(fd, size_bytes, str(path), progress)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=directory, follow_symlinks=True)  # linkat, as it has to be
        finally:
            os.close(directory)
    except BaseException:
        os.close(fd)
        raise
    return SharedFile(path, fd, created=True)


def reserve(fd: int, size_bytes: int, what: str, progress: Progress | None = None) -> None:
    """Give a file its size and all of its pages.

    Raises:
        NoSpaceError: There is not that much room.
    """
    done = 0
    while done < size_bytes:
        piece = min(_PIECE_BYTES, size_bytes - done)
        try:
            os.posix_fallocate(fd, done, piece)
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise NoSpaceError(
                    f"{what}: {size_bytes} bytes needed, room for {done} found: {error.strerror}: enlarge the file "
                    "system or the memory limit, or ask for less",
                    requested_bytes=size_bytes,
                    available_bytes=done,
                ) from error
            raise
        done += piece
        if progress is not None:
            progress(done, size_bytes)


@contextmanager
def _only_one(lock_path: Path, timeout: float) -> Iterator[None]:
    """Hold the lock file; it is gone again afterwards."""
    deadline = time.monotonic() + timeout
    while True:
        fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            held = _lock(fd, fcntl.LOCK_EX) and _is_same(lock_path, fd)  # it may have been unlinked meanwhile
            if held:
                try:
                    yield
                finally:
                    _unlink_if_same(lock_path, fd)
                return
        finally:
            os.close(fd)
        if time.monotonic() >= deadline:
            raise ClosedError(
                f"{lock_path} was held by another process for more than {timeout} seconds: end it, or try again"
            )
        time.sleep(_POLL_SECONDS)


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file of ours that no live process uses."""

    path: Path
    size_bytes: int


def find_leftovers(system: preflight.SystemPaths = preflight.SYSTEM, *, remove: bool = False) -> list[Leftover]:
    """Return our files in shared memory that no process holds; remove them if asked. Files in use are left alone."""
    found: list[Leftover] = []
    for path in sorted(system.shm.glob(f"{PREFIX}*")):
        if path.suffix not in {SUFFIX, _LOCK_SUFFIX}:
            continue
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            if _lock(fd, fcntl.LOCK_EX) and _is_same(path, fd):
                found.append(Leftover(path, os.fstat(fd).st_size))
                if remove:
                    _unlink_if_same(path, fd)
        finally:
            os.close(fd)
    return found


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_same(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def _unlink_if_same(path: Path, fd: int) -> None:
    if _is_same(path, fd):
        with suppress(FileNotFoundError):
            path.unlink()
