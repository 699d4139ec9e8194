"""`SharedOffloadRegion`: one piece of host memory that all ranks of an instance share. Reference, chapter 8.

Rows are interleaved: row b holds offloaded block b of rank 0, then of rank 1, and so on; inside its share a rank places
its tensors one after the other with `create_next_view`. Memory is reserved before it is used, so no access can SIGBUS.

Named regions meet in `/dev/shm` by instance id (see `shm_file`); unnamed ones are a sealed memfd whose descriptor goes
from a parent to its ranks over a unix socket: no name, no leftovers.
"""

from __future__ import annotations

import fcntl
import json
import logging
import mmap
import os
import socket
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from kvoffload.errors import ClosedError, LayoutError, UsageError
from kvoffload.memory import preflight
from kvoffload.memory.block_tensor import BlockTensor
from kvoffload.memory.mapping import Mapping
from kvoffload.memory.populate import Progress, populate
from kvoffload.memory.shm_file import SharedFile, join_or_create, reserve, shared_file_path

logger = logging.getLogger(__name__)

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MAX_HEADER_BYTES = 1024


class SharedOffloadRegion:
    """A rank's hold on the shared region. Creating it reserves and populates memory: call it in a thread.

    Views keep the memory mapped: after `cleanup` it is unmapped as soon as the last of them is gone.

    Args:
        instance_id: Names the file that the ranks share; None makes or takes an unnamed region (`fd`).
        total_size_bytes: Size of the region, at least `num_blocks * cpu_page_size * num_workers`.
        num_blocks: Rows.
        rank: This process's share, 0 to `num_workers - 1`; None for one that only maps the whole.
        num_workers: Ranks in a row.
        cpu_page_size: Bytes of one rank's share of a row.
        fd: An unnamed region received from another process; it is taken over and closed by `cleanup`.
        timeout: Seconds to wait while another process makes the named file.
        keep_name: Keep the name when all ranks have mapped, so that a later process can join by it.
        progress: Called with done and total bytes while memory is reserved and populated.
        system: Where `/dev/shm` and the kernel's numbers are.

    Attributes:
        is_pinned: The memory is registered with a device.
        mmap_path: The name in `/dev/shm`, or None.

    Raises:
        NoSpaceError: The file system, the machine or the cgroup has less room; nothing is left behind.
        LayoutError: The region of that name or descriptor has another size.
        UsageError: The sizes contradict each other, or a live process holds that rank.
    """

    def __init__(
        self,
        instance_id: str | None,
        total_size_bytes: int,
        num_blocks: int,
        rank: int | None,
        num_workers: int,
        cpu_page_size: int,
        *,
        fd: int | None = None,
        timeout: float = 300.0,
        keep_name: bool = False,
        progress: Progress | None = None,
        system: preflight.SystemPaths = preflight.SYSTEM,
    ) -> None:
        self.total_size_bytes = total_size_bytes
        self.num_blocks = num_blocks
        self.rank = rank
        self.num_workers = num_workers
        self.cpu_page_size = cpu_page_size
        self.is_pinned = False
        self.mmap_path: Path | None = None
        self._row_stride = cpu_page_size * num_workers
        self._worker_offset = (rank or 0) * cpu_page_size
        self._worker_area_end = self._worker_offset + cpu_page_size
        self._file: SharedFile | None = None
        self._fd = -1 if fd is None else fd
        self._mapping: Mapping | None = None
        self._pid = os.getpid()
        try:
            self._check_sizes()
            if instance_id is not None:
                self.mmap_path = shared_file_path(instance_id, system)
                self._file = join_or_create(
                    self.mmap_path,
                    total_size_bytes,
                    rank=rank,
                    num_ranks=num_workers,
                    timeout=timeout,
                    keep_name=keep_name,
                    system=system,
                    progress=progress,
                )
            elif fd is None:
                self._fd = _sealed_memfd(total_size_bytes, system, progress)
            else:
                _check_received(fd, total_size_bytes)
            self._mapping = Mapping.of_file(self.fileno(), total_size_bytes)
            self._populate_own_share(self._mapping, progress)
        except BaseException:
            self._release()
            raise

    def _check_sizes(self) -> None:
        num_blocks, num_workers, rank, page = self.num_blocks, self.num_workers, self.rank, self.cpu_page_size
        if min(num_blocks, num_workers, page) < 1 or not 0 <= (rank or 0) < num_workers:
            raise UsageError(
                f"num_blocks {num_blocks}, num_workers {num_workers} and cpu_page_size {page} must be "
                f"positive, and rank {rank} in 0..{num_workers - 1}"
            )
        needed = num_blocks * page * num_workers
        if self.total_size_bytes < needed:
            raise UsageError(
                f"total_size_bytes must be at least {needed}, for {num_blocks} blocks of {num_workers} x {page} bytes; "
                f"got {self.total_size_bytes}"
            )

    @classmethod
    def receive(cls, sock: socket.socket, rank: int | None, *, progress: Progress | None = None) -> Self:
        """Take an unnamed region from a unix socket on which another process calls `send`.

        Raises:
            ClosedError: The socket was closed before the region came.
            LayoutError: What came is no region, or not as large as it says.
        """
        data, fds, _, _ = socket.recv_fds(sock, _MAX_HEADER_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        if not data:
            raise ClosedError("the socket was closed before a region came")
        try:
            header = {name: int(value) for name, value in json.loads(data).items()}
            geometry = [header[name] for name in ("total_size_bytes", "num_blocks", "num_workers", "cpu_page_size")]
            (fd,) = fds
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            for extra in fds:
                os.close(extra)
            raise LayoutError(f"expected a region's geometry and one descriptor, got {data[:80]!r}, {fds}") from error
        total, num_blocks, num_workers, page = geometry
        return cls(None, total, num_blocks, rank, num_workers, page, fd=fd, progress=progress)

    def send(self, sock: socket.socket) -> None:
        """Hand the region to the process at the other end of a unix socket, as often as ranks join or rejoin.

        Raises:
            ClosedError: The region was cleaned up.
        """
        header = {
            "total_size_bytes": self.total_size_bytes,
            "num_blocks": self.num_blocks,
            "num_workers": self.num_workers,
            "cpu_page_size": self.cpu_page_size,
        }
        socket.send_fds(sock, [json.dumps(header).encode()], [self.fileno()])

    @property
    def is_creator(self) -> bool:
        """Whether this process made the named file."""
        return self._file is not None and self._file.created

    def fileno(self) -> int:
        """Return the file descriptor of the region.

        Raises:
            ClosedError: The region was cleaned up.
        """
        fd = self._fd if self._file is None else self._file.fd
        if fd < 0:
            raise ClosedError("this region was cleaned up: make or attach a new one")
        return fd

    def create_next_view(self, tensor_page_size: int) -> npt.NDArray[np.int8]:
        """Return the rank's next tensor: int8, shape `(num_blocks, tensor_page_size)`, one row's stride apart.

        Raises:
            UsageError: The rank's share of a row has no room for it, or this process has no rank.
            ClosedError: The region was cleaned up.
        """
        mapping = self._open_mapping()
        if self.rank is None:
            raise UsageError(
                "this process maps the region without a rank, so it has no share to take views from: attach with rank"
            )
        end = self._worker_offset + tensor_page_size
        if tensor_page_size < 1 or end > self._worker_area_end:
            raise UsageError(
                f"a tensor with pages of {tensor_page_size} bytes does not fit: rank {self.rank} has "
                f"{self._worker_area_end - self._worker_offset} of its {self.cpu_page_size} bytes a row left"
            )
        view = BlockTensor(
            mapping.address + self._worker_offset,
            self.num_blocks,
            self._row_stride,
            tensor_page_size,
            owner=mapping,
        )
        self._worker_offset = end
        return np.asarray(view)

    def whole(self) -> npt.NDArray[np.int8]:
        """Return all rows: int8, shape `(num_blocks, num_workers * cpu_page_size)`.

        Raises:
            ClosedError: The region was cleaned up.
        """
        mapping = self._open_mapping()
        return np.asarray(
            BlockTensor(mapping.address, self.num_blocks, self._row_stride, self._row_stride, owner=mapping)
        )

    def pin(self, register: Callable[[int, int], Callable[[], None]]) -> None:
        """Register the memory with a device: `register(address, length)` returns how to unregister it.

        It is unregistered right before the pages are unmapped, never under a view.

        Raises:
            ClosedError: The region was cleaned up.
        """
        mapping = self._open_mapping()
        mapping.before_unmap(register(mapping.address, mapping.length))
        self.is_pinned = True

    def cleanup(self) -> bool:
        """Let go of memory, descriptor and name; idempotent. The last process to leave removes the name.

        Returns:
            Whether the memory is unmapped now. False: views are still in use, and it goes with the last of them.
        """
        watch = None if self._mapping is None else weakref.ref(self._mapping)
        self._release()
        still_mapped = watch is not None and watch() is not None
        if still_mapped:
            logger.warning("the shared region is closed, its memory stays mapped until the last view is gone")
        return not still_mapped

    def _release(self) -> None:
        self._mapping = None
        self.is_pinned = False
        file, self._file = self._file, None
        fd, self._fd = self._fd, -1
        if file is not None:
            file.close()
        if fd >= 0:
            os.close(fd)

    def _open_mapping(self) -> Mapping:
        if self._mapping is None:
            raise ClosedError("this region was cleaned up: make or attach a new one")
        if os.getpid() != self._pid:
            raise UsageError(
                f"this region belongs to process {self._pid} and was used in its fork, process {os.getpid()}: "
                "attach after the fork"
            )
        return self._mapping

    def _populate_own_share(self, mapping: Mapping, progress: Progress | None) -> None:
        """Populate the pages of this rank's share, or of everything without a rank; others populate theirs."""
        what = str(self.mmap_path or "shared region")
        if self.rank is None or self.num_workers == 1:
            populate(mapping.address, mapping.length, what, progress, reserved=True)
            return
        total, limit = self.num_blocks * self.cpu_page_size, mapping.address + mapping.length
        done_to = mapping.address
        for block in range(self.num_blocks):
            begin = mapping.address + block * self._row_stride + self._worker_offset
            start = max(begin // mmap.PAGESIZE * mmap.PAGESIZE, done_to)
            done_to = min(-(-(begin + self.cpu_page_size) // mmap.PAGESIZE) * mmap.PAGESIZE, limit)
            if start < done_to:
                populate(start, done_to - start, what, reserved=True)
            if progress is not None and (block % 1024 == 1023 or block + 1 == self.num_blocks):
                progress((block + 1) * self.cpu_page_size, total)


def _sealed_memfd(size_bytes: int, system: preflight.SystemPaths, progress: Progress | None) -> int:
    """Return an unnamed file of reserved memory whose size can never change again."""
    preflight.check_memory(size_bytes, "shared region", system)
    fd = os.memfd_create("kvoffload", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        reserve(fd, size_bytes, "shared region", progress)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_received(fd: int, size_bytes: int) -> None:
    """Refuse a descriptor that could be cut under our feet, or that is of another size."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    size = os.fstat(fd).st_size
    if seals & fcntl.F_SEAL_SHRINK == 0 or size != size_bytes:
        raise LayoutError(f"expected a sealed region of {size_bytes} bytes, got seals {seals:#x} and {size} bytes")
