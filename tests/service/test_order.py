"""A store waits for the event that was recorded after the last write, and a load for its destination: fake streams."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from service.harness import BLOCK, ScriptedSpec, tokens

import kvoffload as kv
from kvoffload.manager.specs import CPULoadStoreSpec
from kvoffload.transfer.directional import CpuGpuOffloadingHandlers
from kvoffload.transfer.host import HostStream
from kvoffload.transfer.host_copy import copy_plan
from kvoffload.transfer.stream import CopyStream


class HostSpec(ScriptedSpec):
    """The scripted harness's manager over threads that really copy, with the copies noted."""

    def __init__(self, config, kv_caches, capacity):
        super().__init__(config, kv_caches, capacity)
        self.log: list[str] = []

        def stream(name, on_done) -> CopyStream:
            def copier(plan):
                self.log.append(f"{name} copies")
                copy_plan(plan)

            return HostStream(name, on_done, copier)

        self.pair = CpuGpuOffloadingHandlers(kv_caches, config.block_size_factor, capacity, make_stream=stream)

    def get_handlers(self, kv_caches):
        yield kv.GPULoadStoreSpec, CPULoadStoreSpec, self.pair.gpu_to_cpu_handler
        yield CPULoadStoreSpec, kv.GPULoadStoreSpec, self.pair.cpu_to_gpu_handler


class ComputeStream:
    """A fake device stream: its event is waited for by copies, and recorded as such."""

    def __init__(self, log):
        self.log = log
        self.written = threading.Event()

    def wait(self, timeout=None):
        done = self.written.wait(timeout)
        if done:
            self.log.append("waited for compute")
        return done


@pytest.fixture
def made():
    gpu = np.zeros((32, 64), np.int8)
    caches = kv.CanonicalKVCaches.from_layers({"layer": gpu}, block_dim=0)
    config = kv.OffloadConfig(cpu_bytes_to_use=1 << 20, gpu_block_size=BLOCK)
    spec = HostSpec(config, caches, 8)
    return gpu, spec, kv.OffloadService(config, caches, spec=spec)


async def test_store_copies_only_after_the_compute_stream_has_written(made):
    """A-H2, without a GPU: the event precedes the copy, and what it announces is what is stored."""
    gpu, spec, service = made
    async with service:
        compute = ComputeStream(spec.log)
        async with service.request("w", service.chain(tokens(8)), gpu_blocks=[0, 1], free=lambda _: None) as request:
            job = request.store(computed_tokens=8, ready=compute)
            await asyncio.sleep(0.02)
            assert spec.log == []
            assert not job.done
            gpu[[0, 1]] = 0x5A
            compute.written.set()
            assert (await job).stored == 2
        assert spec.log == ["waited for compute", "kvoffload-store copies"]
        async with service.request(
            "r", service.chain(tokens(9)), gpu_blocks=[10, 11, 12], free=lambda _: None
        ) as request:
            assert (await request.load()).num_tokens == 8
            assert (gpu[[10, 11]] == 0x5A).all()


async def test_load_overwrites_its_destination_only_after_the_callers_pending_work_on_it(made):
    gpu, spec, service = made
    async with service:
        gpu[[0, 1]] = 7
        async with service.request("w", service.chain(tokens(8)), gpu_blocks=[0, 1], free=lambda _: None) as request:
            await request.store(computed_tokens=8, ready="host-visible")
        spec.log.clear()
        compute = ComputeStream(spec.log)
        async with service.request(
            "r", service.chain(tokens(9)), gpu_blocks=[10, 11, 12], free=lambda _: None
        ) as request:
            load = asyncio.create_task(request.load(after=compute))
            await asyncio.sleep(0.02)
            assert not load.done()
            gpu[[10, 11]] = 99  # a kernel of the blocks' last owner
            compute.written.set()
            assert (await load).num_tokens == 8
            assert (gpu[[10, 11]] == 7).all()
        assert spec.log == ["waited for compute", "kvoffload-load copies"]


async def test_stores_of_one_tick_wait_for_each_of_their_events(made):
    _, spec, service = made
    async with service:
        streams = [ComputeStream(spec.log), ComputeStream(spec.log)]
        jobs = []
        for index, stream in enumerate(streams):
            async with service.request(
                f"r{index}", service.chain(tokens(4, index)), gpu_blocks=[index], free=lambda _: None
            ) as request:
                jobs.append(request.store(computed_tokens=4, ready=stream))
        streams[0].written.set()
        await asyncio.sleep(0.02)
        assert "kvoffload-store copies" not in spec.log
        streams[1].written.set()
        assert [(await job).stored for job in jobs] == [1, 1]
        assert spec.log.count("kvoffload-store copies") == 1


@pytest.mark.parametrize("ready", [None, True, "now", 3.0, object()])
async def test_ready_has_no_default_and_nothing_is_guessed(made, ready):
    _, _, service = made
    table = [0, 1]
    async with service, service.request("r", service.chain(tokens(8)), gpu_blocks=table, free=None) as request:
        with pytest.raises(TypeError):
            request.store(computed_tokens=8)
        with pytest.raises(kv.UsageError, match="host-visible"):
            request.store(computed_tokens=8, ready=ready)
        assert service.stats().manager.reserved == 0


async def test_copy_that_raises_in_its_thread_is_a_result_and_others_go_on(made, monkeypatch):
    """A-H3, with threads."""
    _, spec, service = made
    async with service:
        stream = spec.pair.gpu_to_cpu_handler._stream
        copier, calls = stream._copier, []

        def fails_once(plan):
            calls.append(plan)
            if len(calls) == 1:
                raise OSError("link down")
            copier(plan)

        monkeypatch.setattr(stream, "_copier", fails_once)
        results = []
        for name in ("a", "b"):
            async with service.request(
                name, service.chain(tokens(8)), gpu_blocks=[0, 1], free=lambda _: None
            ) as request:
                results.append(await request.store(computed_tokens=8, ready="host-visible"))
        assert [(r.stored, r.failed, r.reason) for r in results] == [(0, 2, "copy_failed"), (2, 0, None)]
        assert str(results[0].error) == "link down"
        assert service.health().ok
