"""The CUDA back end on a real device: bytes, order, errors, and the service on top."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import kvoffload as kv
from kvoffload.manager.specs import CPULoadStoreSpec, GPULoadStoreSpec
from kvoffload.memory.canonical import CanonicalKVCaches
from kvoffload.transfer.directional import CpuGpuOffloadingHandlers

torch = pytest.importorskip("torch")
BLOCKS, PAGE = 64, 4096


@pytest.fixture
def gpu():
    return torch.randint(-128, 128, (BLOCKS, PAGE), dtype=torch.int8, device="cuda")


@pytest.fixture(params=["auto", "never"], ids=["pinned", "pageable"])
def pair(request, gpu):
    handlers = CpuGpuOffloadingHandlers(
        CanonicalKVCaches.from_layers({"layer": gpu}, block_dim=0), 1, BLOCKS, pin_memory=request.param
    )
    yield handlers
    handlers.shutdown(10)


def store_spec(gpu_ids, cpu_ids):
    return GPULoadStoreSpec(gpu_ids, [len(gpu_ids)], [0]), CPULoadStoreSpec(cpu_ids)


def finish(handler, job):
    assert handler.wait({job}, 30)
    (result,) = handler.get_finished()
    assert result.success, result.error


def store(pair, job, gpu_ids, cpu_ids, ready="host-visible"):
    assert pair.gpu_to_cpu_handler.transfer_async(job, store_spec(gpu_ids, cpu_ids), ready)
    finish(pair.gpu_to_cpu_handler, job)


def load(pair, job, gpu_ids, cpu_ids):
    assert pair.cpu_to_gpu_handler.transfer_async(job, store_spec(gpu_ids, cpu_ids)[::-1])
    finish(pair.cpu_to_gpu_handler, job)


def test_bytes_come_back_after_a_store_and_a_load(pair, gpu):
    rng = np.random.default_rng(0)
    gpu_ids, cpu_ids = rng.permutation(BLOCKS), rng.permutation(BLOCKS)
    wanted = gpu.clone()
    torch.cuda.synchronize()
    store(pair, 1, gpu_ids, cpu_ids)
    gpu.zero_()
    torch.cuda.synchronize()
    load(pair, 2, gpu_ids, cpu_ids)
    assert torch.equal(gpu, wanted)


def test_store_sees_what_a_slow_kernel_wrote_before_its_event(pair, gpu):
    """A-H2: 100 times a sleeping kernel, then a fill, then at once the store."""
    for turn in range(100):
        value = 0x5A if turn % 2 else 0x25
        torch.cuda._sleep(20_000_000)
        gpu[3].fill_(value)
        event = torch.cuda.Event(blocking=True)
        event.record()
        store(pair, turn + 1, [3], [7], event)
        gpu[5].zero_()
        torch.cuda.synchronize()
        load(pair, turn + 1, [5], [7])
        assert bool((gpu[5] == value).all())


def test_event_of_a_side_stream_in_another_thread_orders_the_store(pair, gpu):
    events: list = []

    def forward():
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(50_000_000)
            gpu[9].fill_(0x11)
            events.append(torch.cuda.Event())
            events[0].record()

    thread = threading.Thread(target=forward)
    thread.start()
    thread.join()
    store(pair, 1, [9], [9], events[0])
    load(pair, 2, [10], [9])
    assert bool((gpu[10] == 0x11).all())


def test_load_into_blocks_of_an_unfinished_store_does_not_change_what_is_stored(pair, gpu):
    torch.cuda._sleep(100_000_000)
    gpu[1].fill_(0x33)
    event = torch.cuda.Event()
    event.record()
    assert pair.gpu_to_cpu_handler.transfer_async(1, store_spec([1], [1]), event)
    load(pair, 2, [1], [2])
    finish(pair.gpu_to_cpu_handler, 1)
    load(pair, 3, [4], [1])
    assert bool((gpu[4] == 0x33).all())


def test_event_that_was_never_recorded_is_refused(pair):
    with pytest.raises(kv.UsageError, match="never recorded"):
        pair.gpu_to_cpu_handler.transfer_async(1, store_spec([0], [0]), torch.cuda.Event())


def test_event_of_a_graph_capture_is_refused_and_the_handler_goes_on(gpu):
    pair = CpuGpuOffloadingHandlers(CanonicalKVCaches.from_layers({"layer": gpu}, block_dim=0), 1, BLOCKS)
    graph, captured = torch.cuda.CUDAGraph(), torch.cuda.Event()
    before = torch.cuda.current_stream()
    refused = []
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            gpu[0].fill_(1)
            captured.record()
            with pytest.raises(kv.UsageError, match="capture") as caught:
                pair.gpu_to_cpu_handler.transfer_async(1, store_spec([0], [0]), captured)
            refused.append(caught.value)
    except RuntimeError:  # asking such an event may end the capture as well, and torch then says so
        pass
    finally:
        torch.cuda.set_stream(before)
    assert refused
    store(pair, 2, [0], [0])
    pair.shutdown(10)


LAYOUTS = {"kv first": ((2, 32, 16, 8, 64), 1), "kv second": ((32, 2, 16, 8, 64), 0), "mla": ((32, 16, 576), 0)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("factor", [1, 4])
async def test_service_stores_and_loads_every_layout_on_the_device(layout, factor):
    shape, block_dim = LAYOUTS[layout]
    layers = {f"layer.{i}": torch.randn(shape, dtype=torch.bfloat16, device="cuda") for i in range(4)}
    config = kv.OffloadConfig(cpu_bytes_to_use="64MiB", gpu_block_size=16, block_size=16 * factor)
    async with kv.OffloadService(config, CanonicalKVCaches.from_layers(layers, block_dim=block_dim)) as service:
        tokens = list(range(16 * 8 + 1))
        ready = torch.cuda.Event()
        ready.record()
        async with service.request("a", service.chain(tokens), gpu_blocks=list(range(9)), free=None) as request:
            assert (await request.store(computed_tokens=128, ready=ready)).stored == 8
        async with service.request("b", service.chain(tokens), gpu_blocks=list(range(20, 29)), free=None) as request:
            assert (await request.load()).num_tokens == 128
        for layer in layers.values():
            blocks = layer.movedim(block_dim, 0)
            assert torch.equal(blocks[20:28], blocks[0:8])
