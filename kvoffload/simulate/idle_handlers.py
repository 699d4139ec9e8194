"""`IdleHandlers`: transfers that end at once and move nothing, for measuring what surrounds them."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload.memory.block_tensor import TensorLike
from kvoffload.memory.canonical import CanonicalKVCaches
from kvoffload.transfer.base import HOST_VISIBLE, OffloadingHandler, Ready, TransferResult, TransferSpec


class IdleHandler(OffloadingHandler):
    """One direction."""

    def __init__(self) -> None:
        self._ended: list[TransferResult] = []

    def transfer_async(self, job_id: int, spec: TransferSpec, ready: Ready = HOST_VISIBLE) -> bool:  # noqa: ARG002
        """Note the job as ended."""
        self._ended.append(TransferResult(job_id, True))
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return what was submitted since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int], timeout: float | None = None) -> bool:  # noqa: ARG002
        """Return True: nothing runs."""
        return True

    def pending_jobs(self) -> list[int]:
        """Return nothing: nothing runs."""
        return []

    def shutdown(self, timeout: float = 10.0) -> None:
        """Do nothing: nothing runs."""


class IdleHandlers:
    """Both directions."""

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,  # noqa: ARG002 - nothing is moved
        block_size_factor: int,  # noqa: ARG002
        num_cpu_blocks: int,  # noqa: ARG002
        cpu_tensors: Sequence[TensorLike],  # noqa: ARG002
    ) -> None:
        self.gpu_to_cpu_handler = IdleHandler()
        self.cpu_to_gpu_handler = IdleHandler()

    def shutdown(self, timeout: float = 10.0) -> None:
        """Do nothing: nothing runs."""
