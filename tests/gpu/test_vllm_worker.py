"""The vLLM adapter's worker over real CUDA tensors, where a CUDA build of vLLM 0.32 is installed."""

from __future__ import annotations

import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="vLLM 0.32 is not installed here")


def test_worker_stores_and_loads_cuda_blocks():
    from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec

    from kvoffload.integrations.vllm_state import HostBlocks
    from kvoffload.integrations.vllm_worker import KVOffloadWorker
    from kvoffload.manager.specs import CPULoadStoreSpec

    gpu = torch.randint(-128, 128, (32, 4096), dtype=torch.int8, device="cuda")
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(gpu, 4096)], [[CanonicalKVCacheRef(0, 4096)]])
    worker = KVOffloadWorker(caches, 1, 16)
    wanted = gpu[3:6].clone()

    def finish(job_id: int) -> None:
        worker.wait({job_id})
        deadline = time.monotonic() + 30
        while not (done := list(worker.get_finished())) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert [(item.job_id, item.success) for item in done] == [(job_id, True)]

    def blocks(ids: list[int]) -> GPULoadStoreSpec:
        return GPULoadStoreSpec(np.array(ids, np.int32), [len(ids)], [0])

    host = HostBlocks.of(CPULoadStoreSpec([0, 1, 2], ticket=1), "request")
    assert worker.submit_store(1, blocks([3, 4, 5]), host)
    finish(1)
    gpu.zero_()
    torch.cuda.synchronize()
    assert worker.submit_load(2, host, blocks([7, 8, 9]))
    finish(2)
    assert torch.equal(gpu[7:10], wanted)
    worker.shutdown()
