"""`SingleDirectionOffloadingHandler` and the pair of them, `CpuGpuOffloadingHandlers`. Reference, chapter 7.

The handler checks and plans a transfer and keeps the job table; a device back end (`CopyStream`) moves the bytes.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvoffload.errors import ClosedError, UnsupportedError, UsageError
from kvoffload.memory.block_tensor import TensorLike, as_block_tensor
from kvoffload.memory.canonical import CanonicalKVCacheRef, CanonicalKVCaches
from kvoffload.memory.host_memory import allocate_host_tensors
from kvoffload.memory.pinning import PinMode
from kvoffload.transfer.base import HOST_VISIBLE, OffloadingHandler, Ready, TransferResult, TransferSpec, TransferType
from kvoffload.transfer.checks import OwnerProcess
from kvoffload.transfer.cuda import CudaBackend
from kvoffload.transfer.host import HostStream
from kvoffload.transfer.plan import TransferLayout
from kvoffload.transfer.stream import BlockOrder, CopyEvent, MakeStream


class _Job(NamedTuple):
    job_id: int
    event: CopyEvent
    num_bytes: int


class SingleDirectionOffloadingHandler(OffloadingHandler):
    """Moves blocks from GPU to CPU tensors, or back, one transfer after the other.

    Args:
        gpu_tensors: One per canonical tensor, shape `(num_blocks, page_size_bytes)`.
        cpu_tensors: The same number, shape `(num_cpu_blocks, page_size_bytes * block_size_factor)`; rows may be
            strided.
        block_size_factor: Engine blocks in an offloaded block.
        kv_cache_groups_data_refs: Per group, the tensors its layers use.
        gpu_to_cpu: The direction.
        order: Shared with the other direction's handler; None orders this direction alone.
        make_stream: The device back end.

    Raises:
        LayoutError: CPU rows are not `block_size_factor` GPU rows.
    """

    def __init__(
        self,
        gpu_tensors: Sequence[TensorLike],
        cpu_tensors: Sequence[TensorLike],
        block_size_factor: int,
        kv_cache_groups_data_refs: Sequence[Sequence[CanonicalKVCacheRef]],
        gpu_to_cpu: bool,
        *,
        order: BlockOrder | None = None,
        make_stream: MakeStream = HostStream,
    ) -> None:
        layout = TransferLayout(gpu_tensors, cpu_tensors, block_size_factor, kv_cache_groups_data_refs)
        self.gpu_to_cpu = gpu_to_cpu
        self.transfer_type: TransferType = ("GPU", "CPU") if gpu_to_cpu else ("CPU", "GPU")
        self.src_block_size_factor = 1 if gpu_to_cpu else block_size_factor
        self.dst_block_size_factor = block_size_factor if gpu_to_cpu else 1
        self._layout: TransferLayout | None = layout
        self._order = order or BlockOrder(layout.num_gpu_blocks)
        self._process = OwnerProcess(f"this {self.transfer_type[0]} to {self.transfer_type[1]} handler")
        self._lock = threading.Lock()
        self._jobs: deque[_Job] = deque()
        self._ids: set[int] = set()
        this = weakref.ref(self)
        name = "kvoffload-store" if gpu_to_cpu else "kvoffload-load"
        self._stream = make_stream(name, lambda: _notify(this()))
        weakref.finalize(self, self._stream.close).atexit = False

    def transfer_async(self, job_id: int, spec: TransferSpec, ready: Ready = HOST_VISIBLE) -> bool:
        """Check, plan and queue one transfer; see `OffloadingHandler`."""
        self._process.check()
        layout = self._layout
        if layout is None:
            raise ClosedError(f"the {self.transfer_type[0]} to {self.transfer_type[1]} handler is shut down")
        if job_id in self._ids:
            raise UsageError(f"job {job_id} has not been fetched yet: ids must be unique among unfinished jobs")
        plan = layout.plan(*spec, gpu_to_cpu=self.gpu_to_cpu)
        event = self._stream.submit(plan, ready, self._order.must_wait_for(self.gpu_to_cpu, plan.gpu_blocks))
        self._order.add(self.gpu_to_cpu, plan.gpu_blocks, event)
        self._ids.add(job_id)
        with self._lock:
            self._jobs.append(_Job(job_id, event, plan.num_bytes))
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return what ended since the last call, in order of submission."""
        self._process.check()
        results: list[TransferResult] = []
        with self._lock:
            for job_id, event, num_bytes in self._take_ended():
                self._ids.discard(job_id)
                error = event.error
                results.append(
                    TransferResult(
                        job_id=job_id,
                        success=error is None,
                        transfer_size=num_bytes,
                        transfer_time=event.copy_seconds,
                        transfer_type=self.transfer_type,
                        queue_time=event.queue_seconds,
                        error=error,
                    )
                )
        return results

    def wait(self, job_ids: set[int], timeout: float | None = None) -> bool:
        """Block until the given jobs have ended; see `OffloadingHandler`."""
        self._process.check()
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            events = [job.event for job in self._jobs if job.job_id in job_ids]
        return all(event.wait(None if deadline is None else max(0.0, deadline - time.monotonic())) for event in events)

    def pending_jobs(self) -> list[int]:
        """Return the ids of jobs whose copy has not ended, in order of submission."""
        with self._lock:
            return [job.job_id for job in self._jobs if not job.event.query()]

    def shutdown(self, timeout: float = 10.0) -> None:
        """Let queued copies end and drop the tensors; see `OffloadingHandler`."""
        self._process.check()
        if self._layout is None:
            return
        self._layout = None
        self._stream.shutdown(timeout)

    def _take_ended(self) -> list[_Job]:
        """Remove ended jobs from the table, under the lock. Copies end in order until a shutdown fails queued ones."""
        if self._layout is None:
            ended = [job for job in self._jobs if job.event.query()]
            self._jobs = deque(job for job in self._jobs if job not in ended)
            return ended
        ended = []
        while self._jobs and self._jobs[0].event.query():
            ended.append(self._jobs.popleft())
        return ended


class CpuGpuOffloadingHandlers:
    """Both directions between one rank's KV caches and its host tensors.

    Allocating and populating the host tensors takes about half a second per GiB and lets go of the GIL: an event loop
    calls this constructor in a thread.

    Args:
        kv_caches: The engine's side. On the host back end it is host memory, too.
        block_size_factor: Engine blocks in an offloaded block.
        num_cpu_blocks: Rows of the host tensors.
        cpu_tensors: Host tensors made elsewhere (a shared region's views), `num_cpu_blocks` rows each; None allocates
            exactly as many bytes as needed.
        make_stream: The device back end; None chooses by the KV caches' device.
        pin_memory: Whether host memory allocated here is page-locked for a GPU: try, insist, or never.
        progress: Called with populated and total bytes while memory is allocated.

    Raises:
        UnsupportedError: There is no back end for the KV caches' device on this machine.
        NoSpaceError: Less memory is available than the host tensors need.
        LayoutError: The given `cpu_tensors` do not fit.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        block_size_factor: int,
        num_cpu_blocks: int,
        *,
        cpu_tensors: Sequence[TensorLike] | None = None,
        make_stream: MakeStream | None = None,
        pin_memory: PinMode = "auto",
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        backend = None if make_stream is not None else open_backend(kv_caches.device)
        if block_size_factor < 1 or num_cpu_blocks < 1:
            raise UsageError(
                f"block_size_factor and num_cpu_blocks must be at least 1, got {block_size_factor} and {num_cpu_blocks}"
            )
        if cpu_tensors is None:
            row_bytes = [tensor.page_size_bytes * block_size_factor for tensor in kv_caches.tensors]
            cpu_tensors = allocate_host_tensors(row_bytes, num_cpu_blocks, progress=progress)
        if isinstance(backend, CudaBackend):
            backend.pin([as_block_tensor(tensor) for tensor in cpu_tensors], pin_memory, progress)
        self._backend = backend
        make_stream = make_stream or (backend.make_stream if backend is not None else HostStream)
        gpu_tensors = [tensor.view for tensor in kv_caches.tensors]
        order = BlockOrder(kv_caches.num_blocks)
        self.gpu_to_cpu_handler, self.cpu_to_gpu_handler = (
            SingleDirectionOffloadingHandler(
                gpu_tensors,
                cpu_tensors,
                block_size_factor,
                kv_caches.group_data_refs,
                gpu_to_cpu,
                order=order,
                make_stream=make_stream,
            )
            for gpu_to_cpu in (True, False)
        )

    def pending_jobs(self) -> list[int]:
        """Return the ids of jobs of both directions whose copy has not ended: their memory must stay mapped."""
        return self.gpu_to_cpu_handler.pending_jobs() + self.cpu_to_gpu_handler.pending_jobs()

    def shutdown(self, timeout: float = 10.0) -> None:
        """Shut both handlers down, the second one also if the first one fails; idempotent.

        Host memory allocated here is unmapped when the last copy that uses it has ended.
        """
        deadline = time.monotonic() + timeout
        try:
            self.gpu_to_cpu_handler.shutdown(timeout)
        finally:
            self.cpu_to_gpu_handler.shutdown(max(0.0, deadline - time.monotonic()))
        if self._backend is not None and not self.pending_jobs():
            self._backend.close()
            self._backend = None


def open_backend(device: str) -> CudaBackend | None:
    """Return the back end for KV caches on a device; None for the host back end.

    Raises:
        UnsupportedError: This machine or build has none.
    """
    if device == "cpu":
        return None
    if device.partition(":")[0] == "cuda":
        try:
            return CudaBackend(device)
        except UnsupportedError as error:
            raise UnsupportedError(f"KV caches on {device!r}: {error}") from error
    raise UnsupportedError(
        f"KV caches on {device!r}: there is no back end for this device here; host memory (device 'cpu') always works"
    )


def _notify(handler: SingleDirectionOffloadingHandler | None) -> None:
    if handler is not None and handler.notify is not None:
        handler.notify()
