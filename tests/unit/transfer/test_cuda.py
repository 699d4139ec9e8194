"""Every trap of the CUDA driver, on a driver library that records what it is asked."""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import os
import signal
import threading
import weakref

import numpy as np
import pytest
from fakes.cuda import CAPTURED_EVENT, ComputeEvent, FakeCuda

from kvoffload.errors import TransferError, UnsupportedError, UsageError
from kvoffload.manager.specs import CPULoadStoreSpec, GPULoadStoreSpec
from kvoffload.memory.block_tensor import BlockTensor
from kvoffload.memory.canonical import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kvoffload.memory.pinning import PinnedRange, pin
from kvoffload.transfer import cuda, cuda_batch, directional
from kvoffload.transfer.base import AllReady
from kvoffload.transfer.cuda_driver import ORDER_ANY, ORDER_STREAM, CudaDevice, CudaDriver, MemcpyAttributes
from kvoffload.transfer.directional import CpuGpuOffloadingHandlers
from kvoffload.transfer.plan import Descriptors


@pytest.fixture
def rig(make_rig):
    return make_rig("cuda")


def orders(fake):
    return [arguments for name, arguments in fake.calls if name == "order"]


def test_attributes_have_the_drivers_size_and_one_entry_for_all_copies(rig):
    assert ctypes.sizeof(MemcpyAttributes) == 24
    rig.store([0, 5], [1, 7])
    rig.drain(rig.stores)
    rig.load([0, 5], [1, 7])
    rig.drain(rig.loads)
    assert orders(rig.fake) == [(ORDER_STREAM, 1, 0), (ORDER_ANY, 1, 0)]


def test_batch_function_is_resolved_for_12_8_on_every_newer_driver(rig):
    ((_, (symbol, _, version, flags, _)),) = rig.fake.named("cuGetProcAddress_v2")
    assert (symbol, version, flags) == (b"cuMemcpyBatchAsync", 12080, 0)


def test_copies_go_out_in_pieces_that_the_driver_survives(rig):
    src, dst = np.arange(1, 21, dtype=np.int8), np.zeros(20, np.int8)
    descriptors = Descriptors(
        src.ctypes.data + np.arange(0, 20, 2), dst.ctypes.data + np.arange(0, 20, 2), np.ones(10, np.int64)
    )
    with rig.cuda.device.current() as driver:
        stream = rig.cuda.device.new_stream()
        cuda_batch.copy_descriptors(driver, descriptors, ORDER_STREAM, stream, 4)
        event = rig.cuda.device.new_event()
        driver.call("cuEventRecord", event, stream)
        driver.call("cuEventSynchronize", event)
    assert [arguments[0] for name, arguments in rig.fake.calls if name == "batch"] == [4, 4, 2]
    assert dst[::2].tolist() == src[::2].tolist()
    assert cuda_batch.MAX_BATCH == 8192


def test_copies_of_no_bytes_are_left_out():
    descriptors = Descriptors(np.array([1, 2, 3]), np.array([4, 5, 6]), np.array([8, 0, 8]))
    assert [column.tolist() for column in cuda_batch.non_empty(descriptors)] == [[1, 3], [4, 6], [8, 8]]


@pytest.mark.parametrize("host_is_source", [True, False])
def test_no_copy_crosses_from_one_page_locked_piece_into_the_next(host_is_source):
    host, device, sizes = np.array([1000, 2000, 2600]), np.array([50_000, 70_000, 90_000]), np.array([500, 600, 100])
    cuts = [1000, 1500, 2100, 2300, 2700]
    sides = (host, device) if host_is_source else (device, host)
    cut = cuda_batch.cut_at(cuts, Descriptors(*sides, sizes), host_is_source=host_is_source)
    host_side, device_side = (cut.src, cut.dst) if host_is_source else (cut.dst, cut.src)
    assert host_side.tolist() == [1000, 2000, 2100, 2300, 2600]
    assert device_side.tolist() == [50_000, 70_000, 70_100, 70_300, 90_000]
    assert cut.sizes.tolist() == [500, 100, 200, 300, 100]
    assert all(column.flags.c_contiguous and column.dtype == np.int64 for column in cut)


def test_copies_are_cut_where_the_pinned_region_is(rig, monkeypatch):
    """A run of neighbouring blocks is one copy, except over the end of a registration, which the driver refuses."""
    host = rig.cpu[0]
    first, middle = host.ctypes.data, host.ctypes.data + host.nbytes // 2
    rig.fake.registered.update({first: middle - first, middle: middle - first})
    blocks = list(range(len(host)))
    with pytest.raises(TransferError, match="at descriptor 0"):
        rig.stores.transfer_async(1, rig.specs(blocks, blocks), "host-visible")
    monkeypatch.setattr(rig.stores._stream, "_cuts", [middle])
    rig.store(blocks, blocks)
    rig.drain(rig.stores)
    assert (host == rig.gpu[0][: len(host)]).all()
    rig.fake.registered.clear()


def test_directions_have_streams_of_their_own_and_none_is_the_default_one(rig):
    rig.store([0], [0])
    rig.load([1], [1])
    rig.drain(rig.stores)
    rig.drain(rig.loads)
    streams = {arguments[1] for name, arguments in rig.fake.calls if name == "batch"}
    assert len(streams) == 2
    assert not streams & {0, 1, 2}
    assert all(flags == 1 for _, (_, flags) in rig.fake.named("cuStreamCreate"))


def test_store_waits_on_the_device_for_the_callers_event_before_its_copy(rig):
    """A-H2: the wait precedes the copy on the same stream, and the host never waits."""
    event = ComputeEvent(rig.fake)
    job = rig.store([0], [0], ready=event)
    names = [name for name, _ in rig.fake.named("cuStreamWaitEvent", "cuMemcpyBatchAsync")]
    assert names == ["cuStreamWaitEvent", "cuMemcpyBatchAsync"]
    assert rig.fake.named("cuStreamWaitEvent")[0][1][1] == event.cuda_event
    assert not rig.stores.wait({job}, 0.02)
    rig.gpu[0][0] = 0x5A
    event.set()
    rig.drain(rig.stores)
    assert (rig.cpu[0][0] == 0x5A).all()


def test_merged_store_waits_for_every_event_that_has_not_happened(rig):
    events = [ComputeEvent(rig.fake) for _ in range(3)]
    events[1].set()
    rig.store([0], [0], ready=AllReady(events))
    assert [args[1] for _, args in rig.fake.named("cuStreamWaitEvent")] == [events[0].cuda_event, events[2].cuda_event]
    for event in events:
        event.set()
    rig.drain(rig.stores)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda fake: ComputeEvent(fake, recorded=False), "never recorded"),
        (lambda fake: ComputeEvent(fake, device=1), "event is of device 1, the KV caches are on device 0"),
        (lambda fake: ComputeEvent(fake, captured=True), "CUDA graph capture"),
        (lambda _: threading.Event(), r"recorded torch.cuda.Event"),
    ],
)
def test_event_that_cannot_order_the_copy_is_refused_and_nothing_is_queued(rig, make, message):
    with pytest.raises(UsageError, match=message):
        rig.stores.transfer_async(1, rig.specs([0], [0]), make(rig.fake))
    assert rig.stores.pending_jobs() == []
    assert rig.fake.named("cuMemcpyBatchAsync") == []
    assert CAPTURED_EVENT in cuda.CAPTURE_ERRORS


def test_transfer_during_a_graph_capture_is_refused(rig):
    rig.fake.capturing = True
    with pytest.raises(UsageError, match="graph capture is going on"):
        rig.stores.transfer_async(1, rig.specs([0], [0]))
    rig.fake.capturing = False
    rig.store([0], [0])
    assert rig.drain(rig.stores)[0].success


def test_transfers_neither_fail_nor_spoil_a_graph_capture_of_another_thread(rig):
    rig.fake.captured_elsewhere = True
    event = ComputeEvent(rig.fake)
    rig.store([0], [0], ready=event)
    event.set()
    assert rig.drain(rig.stores)[0].success
    assert rig.fake.modes[threading.get_ident()] == 0, "the caller's mode is what it was"


def test_ready_event_of_a_pageable_copy_lives_until_its_stream_waits_for_it(make_rig):
    rig = make_rig("cuda-pageable")
    first, second = ComputeEvent(rig.fake), ComputeEvent(rig.fake)
    rig.store([0], [0], ready=first)
    rig.store([1], [1], ready=second)
    held = weakref.ref(second)
    handle = second.cuda_event
    del second
    gc.collect()
    assert held() is not None
    first.set()
    rig.fake.reach(handle)
    assert all(result.success for result in rig.drain(rig.stores))
    gc.collect()
    assert held() is None


def test_driver_without_batches_copies_one_by_one_and_warns_once(make_rig, caplog):
    cuda._warned_versions.clear()
    with caplog.at_level(logging.WARNING, "kvoffload"):
        rig = make_rig("cuda-old")
        rig.store([3, 8, 20], [0, 5, 9])
        assert rig.drain(rig.stores)[0].success
    assert len(rig.fake.named("cuMemcpyAsync")) == 3
    assert sum("one by one" in record.message for record in caplog.records) == 1


def test_submission_that_fails_half_way_waits_for_what_was_queued_and_the_next_one_works(rig):
    rig.fake.fail_next("cuMemcpyBatchAsync", 700)
    with pytest.raises(
        TransferError, match=r"cuMemcpyBatchAsync of 1 copies failed: CUDA_ERROR_ILLEGAL_ADDRESS \(700\)"
    ):
        rig.stores.transfer_async(1, rig.specs([0], [0]))
    assert len(rig.fake.named("cuEventSynchronize")) == 1
    rig.store([0], [0])
    assert rig.drain(rig.stores)[0].success


def test_copy_that_fails_on_the_device_is_a_result(rig):
    rig.fake.fail_next("cuEventSynchronize", 700)
    rig.load([0], [0])
    (result,) = rig.drain(rig.loads)
    assert not result.success
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in str(result.error)


def test_callers_context_is_what_it_was_after_every_call(rig):
    me = threading.get_ident()
    rig.fake.contexts[me] = [0xABC]
    rig.store([0], [0])
    rig.drain(rig.stores)
    with pytest.raises(UsageError):
        rig.stores.transfer_async(9, rig.specs([0], [0]), ComputeEvent(rig.fake, captured=True))
    assert rig.fake.contexts[me] == [0xABC]


def test_waiting_sleeps_in_the_driver_instead_of_polling_and_events_are_pooled(rig):
    event = ComputeEvent(rig.fake)
    job = rig.store([0], [0], ready=event)
    asked = len(rig.fake.named("cuEventQuery"))
    assert not rig.stores.wait({job}, 0.1)
    assert len(rig.fake.named("cuEventQuery")) == asked
    event.set()
    rig.drain(rig.stores)
    for _ in range(10):
        rig.store([0], [0])
        rig.drain(rig.stores)
    created = rig.fake.named("cuEventCreate")
    assert len(created) == 2
    assert all(flags == 1 for _, (_, flags) in created), "synchronize must sleep, not spin"


def test_descriptors_and_tensors_outlive_the_transfer_and_are_let_go_after_it(rig):
    event = ComputeEvent(rig.fake)
    job = rig.store([0, 5], [1, 7], ready=event)
    copy = rig.stores._jobs[0].event
    held = weakref.ref(copy.keep[0].src)
    gc.collect()
    assert held() is not None
    event.set()
    assert rig.stores.wait({job}, 5)
    del copy
    gc.collect()
    assert held() is None
    rig.drain(rig.stores)


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_forked_child_closes_nothing_even_under_a_lock_that_was_held(rig):
    stream = rig.stores._stream
    held, release = threading.Event(), threading.Event()

    def hold():
        with stream._changed:
            held.set()
            release.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(10)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)  # a child that waits for the lock dies of it
        stream.close()
        os._exit(0)
    release.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    rig.store([0], [0])
    assert rig.drain(rig.stores)[0].success


def test_times_come_from_the_device(rig):
    rig.store([0], [0])
    (result,) = rig.drain(rig.stores)
    assert result.transfer_time == pytest.approx(0.25e-3)


def test_machine_without_a_driver_is_refused_at_the_call(monkeypatch):
    """A-K2."""

    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(UnsupportedError, match="no CUDA driver on this machine: libcuda"):
        CudaDriver.load()


def test_device_that_is_not_there_is_refused():
    with pytest.raises(UnsupportedError, match="no CUDA device 3: this machine has 1"):
        CudaDevice(CudaDriver(FakeCuda()), 3)


def test_driver_library_that_lacks_a_function_is_refused():
    fake = FakeCuda()
    del fake.cuStreamIsCapturing
    with pytest.raises(UnsupportedError, match="lacks cuStreamIsCapturing"):
        CudaDriver(fake)


class Locker:
    """Registers nothing; fails from the n-th piece on."""

    def __init__(self, fail_at=None):
        self.fail_at, self.held, self.log = fail_at, {}, []

    def register(self, address, size):
        if self.fail_at is not None and len(self.log) >= self.fail_at:
            raise TransferError("cuMemHostRegister_v2 failed: CUDA_ERROR_OUT_OF_MEMORY (2)")
        self.log.append((address, size))
        self.held[address] = size

    def unregister(self, address):
        del self.held[address]


def test_memory_is_registered_in_pieces_that_end_at_rows_and_pages():
    locker, seen = Locker(), []
    unit = 3 * mmap.PAGESIZE  # of 96-byte rows and pages
    size, most = 5 * unit + 96, 2 * unit + 400
    pinned = PinnedRange(locker, 4096, size, row_bytes=96, max_piece_bytes=most, progress=lambda *a: seen.append(a))
    assert pinned.cuts == list(locker.held)[1:]
    assert locker.log == [(4096, 2 * unit), (4096 + 2 * unit, 2 * unit), (4096 + 4 * unit, unit + 96)]
    assert seen == [(2 * unit, size), (4 * unit, size), (size, size)]
    pinned.close()
    pinned.close()
    assert locker.held == {}


def test_streams_of_a_backend_know_where_its_pinned_pieces_end(rig):
    rig.cuda._pinned.append(PinnedRange(Locker(), 4096, 40_000, row_bytes=4096, max_piece_bytes=12_288))
    stream = rig.cuda.make_stream("stores", lambda: None)
    assert list(stream._cuts) == [4096 + 12_288, 4096 + 24_576, 4096 + 36_864]
    stream.shutdown(1.0)


def test_registration_that_fails_half_way_leaves_nothing_registered(caplog):
    locker = Locker(fail_at=2)
    with pytest.raises(TransferError):
        PinnedRange(locker, 4096, 100_000, row_bytes=96, max_piece_bytes=12_288)
    assert locker.held == {}
    assert pin("auto", Locker(fail_at=0), 4096, 1000) is None
    assert "pageable memory" in caplog.text
    with pytest.raises(UnsupportedError, match=r"pin_memory='require': 1000 bytes .* `ulimit -l"):
        pin("require", Locker(fail_at=0), 4096, 1000)
    assert pin("never", Locker(), 4096, 1000) is None


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_forked_child_unregisters_nothing():
    locker = Locker()
    pinned = PinnedRange(locker, 4096, 1000)
    pid = os.fork()
    if pid == 0:
        pinned.close()
        os._exit(0 if locker.held else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    pinned.close()
    assert locker.held == {}


@pytest.fixture
def machine(monkeypatch):
    """A machine with one CUDA device and KV caches on it."""
    fake = FakeCuda()
    monkeypatch.setattr(CudaDriver, "load", classmethod(lambda cls: cls(fake)))
    gpu = np.random.default_rng(1).integers(-128, 128, (16, 64), np.int8)
    tensor = BlockTensor(gpu.ctypes.data, 16, 64, 64, "cuda:0", gpu)
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(tensor, 64)], [[CanonicalKVCacheRef(0, 64)]])
    yield fake, gpu, caches
    fake.close()


@pytest.mark.parametrize(("mode", "registered"), [("auto", 1), ("require", 1), ("never", 0)])
def test_host_memory_is_registered_before_the_first_copy_and_unregistered_after_the_last(machine, mode, registered):
    fake, gpu, caches = machine
    pair = CpuGpuOffloadingHandlers(caches, 1, 8, pin_memory=mode)
    assert len(fake.registered) == registered
    wanted = gpu[3].copy()
    assert pair.gpu_to_cpu_handler.transfer_async(1, (GPULoadStoreSpec([3], [1], [0]), CPULoadStoreSpec([5])))
    assert pair.gpu_to_cpu_handler.wait({1}, 5)
    gpu[3] = 0
    assert pair.cpu_to_gpu_handler.transfer_async(2, (CPULoadStoreSpec([5]), GPULoadStoreSpec([3], [1], [0])))
    assert pair.cpu_to_gpu_handler.wait({2}, 5)
    assert np.array_equal(gpu[3], wanted)
    pair.shutdown(5)
    pair.shutdown(5)
    assert fake.registered == {}
    names = [name for name, _ in fake.calls]
    if registered:
        assert names.index("cuMemHostRegister_v2") < names.index("cuMemcpyBatchAsync")
        assert names.index("cuMemHostUnregister") > len(names) - 1 - names[::-1].index("cuEventSynchronize")
    assert names.count("cuDevicePrimaryCtxRetain") == names.count("cuDevicePrimaryCtxRelease_v2") == 1
    assert names.count("cuStreamCreate") == names.count("cuStreamDestroy_v2") == 2
    assert names.count("cuEventCreate") == names.count("cuEventDestroy_v2")


def test_refused_registration_falls_back_to_pageable_copies_that_do_not_block_the_caller(machine):
    fake, _, caches = machine
    fake.fail_next("cuMemHostRegister_v2", 2)
    pair = CpuGpuOffloadingHandlers(caches, 1, 8)
    me = threading.get_ident()
    owners = []
    real = CudaDriver.copy_batch

    def spy(self, *arguments):
        owners.append(threading.get_ident())
        real(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaDriver, "copy_batch", spy)
        assert pair.gpu_to_cpu_handler.transfer_async(1, (GPULoadStoreSpec([3], [1], [0]), CPULoadStoreSpec([5])))
        assert pair.gpu_to_cpu_handler.wait({1}, 5)
    assert owners
    assert me not in owners
    pair.shutdown(5)
    assert fake.registered == {}


def test_kv_caches_on_an_unknown_device_are_refused():
    with pytest.raises(UnsupportedError, match="'xpu:0'"):
        directional.open_backend("xpu:0")
