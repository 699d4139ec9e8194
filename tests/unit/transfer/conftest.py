"""`Rig`: KV caches full of random bytes under a backend, and a model of each transfer in plain loops."""

from __future__ import annotations

import itertools
import os
import threading
from functools import partial

import numpy as np
import pytest
from fakes.cuda import ComputeEvent, FakeCuda
from fakes.device import Device

from kvoffload.manager.specs import CPULoadStoreSpec, GPULoadStoreSpec
from kvoffload.memory.block_tensor import BlockTensor
from kvoffload.memory.canonical import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kvoffload.transfer.base import HOST_VISIBLE
from kvoffload.transfer.cuda import CudaBackend, CudaStream
from kvoffload.transfer.cuda_driver import CudaDriver
from kvoffload.transfer.directional import CpuGpuOffloadingHandlers
from kvoffload.transfer.plan import TransferLayout
from kvoffload.transfer.scripted import ScriptedOffloadingHandlers


class Rig:
    """One rank: `groups` gives per group the (page, used bytes) of each of its tensors."""

    def __init__(
        self, backend, factor=1, groups=(((16, 16),),), *, strided=False, torch=False, gpu_blocks=24, cpu_blocks=12,
        make_stream=None,
    ):  # fmt: skip
        self.factor, self.backend = factor, backend
        rng = np.random.default_rng(0)
        pages = [page for group in groups for page, _ in group]
        self.gpu = [rng.integers(-128, 128, (gpu_blocks, page), np.int8) for page in pages]
        tensors = self.gpu
        if torch:
            import torch as torch_module

            tensors = [torch_module.from_numpy(array) for array in self.gpu]
        count = itertools.count()
        self.refs = [[CanonicalKVCacheRef(next(count), used) for _, used in group] for group in groups]
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(t, p) for t, p in zip(tensors, pages, strict=True)], self.refs
        )
        if backend == "device":
            self.device = Device()
            self.cuda = self.device.backend
            make_stream = partial(CudaStream, device=self.cuda.device, pinned=False)
            self.gpu = [self.device.array(array) for array in self.gpu]
            caches = on_device(self.gpu, pages, self.refs)
        elif backend.startswith("cuda"):
            self.fake = FakeCuda(11080 if backend == "cuda-old" else 13000)
            self.cuda = CudaBackend("cuda:0", CudaDriver(self.fake))
            make_stream = partial(CudaStream, device=self.cuda.device, pinned=backend != "cuda-pageable")
            caches = on_device(self.gpu, pages, self.refs)
        rows = [page * factor for page in pages]
        if strided:  # one row of all tensors after the other, as ranks share a region, plus a foreign share
            whole = rng.integers(-128, 128, (cpu_blocks, sum(rows) + 32), np.int8)
            ends = list(itertools.accumulate(rows))
            self.cpu = [whole[:, end - row : end] for end, row in zip(ends, rows, strict=True)]
        else:
            self.cpu = [rng.integers(-128, 128, (cpu_blocks, row), np.int8) for row in rows]
        if backend != "scripted":
            self.pair = CpuGpuOffloadingHandlers(
                caches, factor, cpu_blocks, cpu_tensors=self.cpu, make_stream=make_stream
            )
        else:
            self.pair = ScriptedOffloadingHandlers(TransferLayout(self.gpu, self.cpu, factor, self.refs))
        self.stores, self.loads = self.pair.gpu_to_cpu_handler, self.pair.cpu_to_gpu_handler
        self.ids = itertools.count(1)

    def event(self):
        """Return what a caller records after its last write; `set()` says that the write has ended."""
        if self.backend == "device":
            return self.device.event()
        return ComputeEvent(self.fake) if self.backend.startswith("cuda") else threading.Event()

    def close(self):
        self.pair.shutdown(5)
        assert self.stores.pending_jobs() == self.loads.pending_jobs() == []
        if self.backend == "device":
            self.cuda.close()
        if self.backend.startswith("cuda"):
            self.cuda.close()
            self.fake.close()

    def specs(self, gpu_ids, cpu_ids, sizes=None, indices=None):
        sizes = [len(gpu_ids)] if sizes is None else sizes
        return GPULoadStoreSpec(gpu_ids, sizes, indices or [0] * len(sizes)), CPULoadStoreSpec(cpu_ids)

    def store(self, gpu_ids, cpu_ids, sizes=None, indices=None, ready=HOST_VISIBLE):
        gpu, cpu = self.specs(gpu_ids, cpu_ids, sizes, indices)
        job_id = next(self.ids)
        assert self.stores.transfer_async(job_id, (gpu, cpu), ready)
        return job_id

    def load(self, gpu_ids, cpu_ids, sizes=None, indices=None, ready=HOST_VISIBLE):
        gpu, cpu = self.specs(gpu_ids, cpu_ids, sizes, indices)
        job_id = next(self.ids)
        assert self.loads.transfer_async(job_id, (cpu, gpu), ready)
        return job_id

    def drain(self, handler):
        assert handler.wait(set(handler.pending_jobs()), 10)
        return handler.get_finished()

    def model(self, gpu_ids, cpu_ids, sizes, indices, to_cpu):
        """Return (gpu, cpu) as they must be after the transfer, made with plain loops."""
        gpu, cpu = [array.copy() for array in self.gpu], [array.copy() for array in self.cpu]
        gpu_at = cpu_at = 0
        for size, index, refs in zip(sizes, indices, self.refs, strict=True):
            if not size:
                continue
            skip = index % self.factor
            for place in range(size):
                row, sub = divmod(skip + place, self.factor)
                for ref in refs:
                    page, used = gpu[ref.tensor_idx].shape[1], ref.page_size_bytes
                    here = gpu[ref.tensor_idx][gpu_ids[gpu_at + place], :used]
                    there = cpu[ref.tensor_idx][cpu_ids[cpu_at + row], sub * page : sub * page + used]
                    if to_cpu:
                        there[:] = here
                    else:
                        here[:] = there
            gpu_at += size
            cpu_at += -(-(skip + size) // self.factor)
        return gpu, cpu

    def check(self, gpu_ids, cpu_ids, sizes, indices, *, to_cpu):
        """Run one transfer and compare every byte of both sides with the model."""
        wanted = self.model(gpu_ids, cpu_ids, sizes, indices, to_cpu)
        (self.store if to_cpu else self.load)(gpu_ids, cpu_ids, sizes, indices)
        (result,) = self.drain(self.stores if to_cpu else self.loads)
        assert result.success, result.error
        assert result.transfer_size == sum(
            size * sum(ref.page_size_bytes for ref in refs) for size, refs in zip(sizes, self.refs, strict=True)
        )
        for got, want in zip(self.gpu + self.cpu, wanted[0] + wanted[1], strict=True):
            assert np.array_equal(got, want)


def on_device(arrays, pages, refs):
    """Return KV caches over arrays as if they lay on a device."""
    tensors = [BlockTensor(a.ctypes.data, a.shape[0], a.strides[0], a.shape[1], "cuda:0", a) for a in arrays]
    return CanonicalKVCaches([CanonicalKVCacheTensor(t, p) for t, p in zip(tensors, pages, strict=True)], refs)


@pytest.fixture
def make_rig():
    """Make rigs that are shut down at the end of the test."""
    rigs = []

    def make(*args, **kwargs):
        rigs.append(Rig(*args, **kwargs))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


BACKENDS = ["host", "scripted", "cuda", "cuda-pageable", "cuda-old"]
if os.environ.get("KVOFFLOAD_TEST_GPU") == "1":
    BACKENDS.append(pytest.param("device", marks=pytest.mark.gpu))


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.fixture(params=["host", "scripted"])
def host_backend(request):
    """The backends whose copies can be given up before they start; a device's cannot."""
    return request.param
