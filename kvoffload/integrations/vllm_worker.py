"""`KVOffloadWorker`: kvoffload's transfer handlers under vLLM's worker interface. It owns the host memory of its rank.

vLLM 0.32 asserts that every submission and every copy succeeds, so failures take another way. A job that failed is
reported to vLLM as done, and its ticket to kvoffload's manager (`take_failed_tickets`): a failed store never becomes
readable. For a failed load the request is named as well (`take_failed_requests`): its GPU blocks hold undefined bytes,
and vLLM recomputes them or fails the request. They are zeroed first: vLLM gives them to others as they are, and an
attention kernel that weighs the unwritten end of a block with zero still gets NaN from a NaN. `vllm_taps` carries both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from vllm.v1.kv_offload.base import CanonicalKVCaches as VllmCaches
from vllm.v1.kv_offload.base import GPULoadStoreSpec as VllmBlocks
from vllm.v1.kv_offload.base import OffloadingWorker as VllmWorker
from vllm.v1.kv_offload.base import TransferResult as VllmResult

from kvoffload.errors import KVOffloadError
from kvoffload.integrations.vllm_state import HostBlocks
from kvoffload.manager.specs import CPULoadStoreSpec, GPULoadStoreSpec
from kvoffload.memory.canonical import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kvoffload.transfer.base import HOST_VISIBLE, OffloadingHandler, Ready, TransferResult, TransferSpec
from kvoffload.transfer.directional import CpuGpuOffloadingHandlers
from kvoffload.transfer.stream import MakeStream
from kvoffload.transfer.worker import OffloadingWorker

logger = logging.getLogger(__name__)


class _Copy(NamedTuple):
    """One running job: its rows of host memory and, for a load, the engine's blocks that it fills."""

    host: HostBlocks
    target: GPULoadStoreSpec | None = None

    @property
    def kind(self) -> str:
        return "store" if self.target is None else "load"


class KVOffloadWorker(VllmWorker):  # type: ignore[misc] # vLLM is untyped here
    """Copies of one rank. Called by the rank's worker thread alone.

    Args:
        kv_caches: vLLM's KV caches of this rank.
        block_size_factor: Engine blocks in an offloaded block.
        num_cpu_blocks: Offloaded blocks in host memory.
        make_stream: Device back end; None chooses by the caches' device.

    Raises:
        UnsupportedError: There is no back end for the caches' device.
        NoSpaceError: The host has not enough memory.
    """

    def __init__(
        self,
        kv_caches: VllmCaches,
        block_size_factor: int,
        num_cpu_blocks: int,
        make_stream: MakeStream | None = None,
    ) -> None:
        caches = canonical_caches(kv_caches)
        self._ready = _ready_maker(caches.device)
        self._handlers = CpuGpuOffloadingHandlers(caches, block_size_factor, num_cpu_blocks, make_stream=make_stream)
        self._worker = OffloadingWorker()
        self._register(GPULoadStoreSpec, CPULoadStoreSpec, self._handlers.gpu_to_cpu_handler)
        self._register(CPULoadStoreSpec, GPULoadStoreSpec, self._handlers.cpu_to_gpu_handler)
        self._caches: CanonicalKVCaches | None = caches
        self._jobs: dict[int, _Copy] = {}
        self._refused: list[int] = []
        self._failed_tickets: set[int] = set()
        self._failed_requests: set[str] = set()

    def _register(self, source: type[Any], destination: type[Any], handler: OffloadingHandler) -> None:
        self._worker.register_handler(source, destination, handler)

    def submit_store(self, job_id: int, src_spec: VllmBlocks, dst_spec: HostBlocks) -> bool:
        """Queue a copy from vLLM's blocks to host memory; a refused one is reported as failed by `get_finished`."""
        return self._submit(job_id, (_gpu_spec(src_spec), dst_spec), _Copy(dst_spec))

    def submit_load(self, job_id: int, src_spec: HostBlocks, dst_spec: VllmBlocks) -> bool:
        """Queue a copy from host memory to vLLM's blocks; a refused one is reported as failed by `get_finished`."""
        target = _gpu_spec(dst_spec)
        return self._submit(job_id, (src_spec, target), _Copy(src_spec, target))

    def _submit(self, job_id: int, spec: TransferSpec, copy: _Copy) -> bool:
        self._jobs[job_id] = copy
        if not self._worker.transfer_async(job_id, spec, self._ready()):
            error = self._worker.take_submit_error(job_id)
            logger.error("%s job %d was refused: %s", copy.kind, job_id, error)
            self._refused.append(job_id)
        return True

    def get_finished(self) -> list[VllmResult]:
        """Return jobs that ended, all of them as successes: what failed is told through the two `take_` methods."""
        finished = [self._ended(result) for result in self._worker.get_finished()]
        finished += [self._ended(TransferResult(job_id, success=False)) for job_id in self._refused]
        self._refused.clear()
        return finished

    def _ended(self, result: TransferResult) -> VllmResult:
        copy = self._jobs.pop(result.job_id)
        if result.success:
            return VllmResult(
                job_id=result.job_id,
                success=True,
                transfer_size=result.transfer_size,
                transfer_time=result.transfer_time,
            )
        if result.error is not None:
            logger.error("%s job %d failed: %r", copy.kind, result.job_id, result.error)
        if copy.host.ticket is not None:
            self._failed_tickets.add(copy.host.ticket)
        if copy.target is not None:
            self._failed_requests.add(copy.host.req_id)
            if result.error is not None:
                self._zero(copy.target)
        return VllmResult(job_id=result.job_id, success=True)

    def _zero(self, target: GPULoadStoreSpec) -> None:
        """Overwrite what a load that broke off left in the engine's blocks, on the stream that uses them next."""
        if self._caches is None:
            return
        block_ids, start = target.block_ids.tolist(), 0
        for size, refs in zip(target.group_sizes, self._caches.group_data_refs, strict=True):
            rows, start = block_ids[start : start + size], start + size
            for ref in refs if rows else ():
                tensor: Any = self._caches.tensors[ref.tensor_idx].tensor
                tensor[rows, : ref.page_size_bytes] = 0

    def take_failed_tickets(self) -> set[int]:
        """Return, once, the tickets of jobs that failed."""
        taken, self._failed_tickets = self._failed_tickets, set()
        return taken

    def take_failed_requests(self) -> set[str]:
        """Return, once, the requests whose load failed."""
        taken, self._failed_requests = self._failed_requests, set()
        return taken

    def wait(self, job_ids: set[int]) -> None:
        """Block until these jobs ended: vLLM is about to use their GPU blocks again."""
        self._worker.wait(job_ids)

    def shutdown(self) -> None:
        """Let queued copies end and release the host memory; idempotent."""
        self._caches = None
        try:
            self._worker.shutdown()
        except KVOffloadError:
            logger.exception("the transfer handlers did not shut down cleanly")


def canonical_caches(kv_caches: VllmCaches) -> CanonicalKVCaches:
    """Return vLLM's KV caches as kvoffload's: the same memory."""
    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(entry.tensor, entry.page_size_bytes) for entry in kv_caches.tensors],
        [
            [CanonicalKVCacheRef(ref.tensor_idx, ref.page_size_bytes) for ref in refs]
            for refs in kv_caches.group_data_refs
        ],
    )


def _gpu_spec(spec: VllmBlocks) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(spec.block_ids, spec.group_sizes, spec.block_indices)


def _ready_maker(device: str) -> Callable[[], Ready]:
    """Return what says when a copy may touch the engine's blocks: at once on the CPU, after the stream's work on CUDA.

    vLLM submits from the thread that launched the forward pass, so an event on the current stream stands for the last
    write to a store's source and for the zeroing of a load's destination.
    """
    if device == "cpu":
        return lambda: HOST_VISIBLE
    import torch

    def record() -> Ready:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch leaves it untyped
        event.record(torch.cuda.current_stream(torch.device(device)))
        return event

    return record
