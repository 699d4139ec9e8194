"""What only the host backend can show: real threads, failing and hanging copies, memory that is left mapped."""

import functools
import gc
import threading
import time

import numpy as np
import pytest

from kvoffload.errors import ClosedError, LayoutError, UnsupportedError, UsageError
from kvoffload.manager.specs import CPULoadStoreSpec, GPULoadStoreSpec
from kvoffload.memory.block_tensor import BlockTensor
from kvoffload.memory.canonical import CanonicalKVCaches
from kvoffload.transfer.directional import CpuGpuOffloadingHandlers, SingleDirectionOffloadingHandler
from kvoffload.transfer.host import HostStream
from kvoffload.transfer.host_copy import copy_plan


def copying_with(copier):
    return functools.partial(HostStream, copier=copier)


def test_copy_that_raises_is_a_failed_result_and_other_jobs_go_on(make_rig):
    """A-H3, in flight, for stores and loads."""

    def copier(plan):
        if 3 in plan.gpu_blocks:
            raise OSError("link down")
        copy_plan(plan)

    rig = make_rig("host", make_stream=copying_with(copier))
    for submit, handler in ((rig.store, rig.stores), (rig.load, rig.loads)):
        jobs = [submit([block], [block]) for block in (2, 3, 4)]
        results = rig.drain(handler)
        assert [(r.job_id, r.success, str(r.error)) for r in results] == [
            (jobs[0], True, "None"),
            (jobs[1], False, "link down"),
            (jobs[2], True, "None"),
        ]
    assert np.array_equal(rig.cpu[0][4], rig.gpu[0][4])


def test_copy_that_waited_for_a_failed_one_still_runs(make_rig):
    go = threading.Event()

    def copier(plan):
        if plan.gpu_to_cpu:
            assert go.wait(5)
            raise OSError("link down")
        copy_plan(plan)

    rig = make_rig("host", make_stream=copying_with(copier))
    rig.store([1], [1])
    rig.load([1], [2])
    go.set()
    assert [r.success for r in rig.drain(rig.loads)] == [True]


def test_ready_that_raises_fails_its_job_only(make_rig):
    class Broken:
        def wait(self, timeout):
            raise RuntimeError("device lost")

    rig = make_rig("host")
    rig.store([0], [0], ready=Broken())
    rig.store([1], [1])
    assert [(r.success, str(r.error)) for r in rig.drain(rig.stores)] == [(False, "device lost"), (True, "None")]


def test_running_copy_outlives_shutdown_and_its_memory_stays(make_rig):
    """A-H4: a hung copy stays pending, queued ones fail, memory goes only after the copy ended."""
    go, started = threading.Event(), threading.Event()

    def copier(plan):
        started.set()
        assert go.wait(10)
        copy_plan(plan)

    array = np.ones((4, 16), np.int8)
    pair = CpuGpuOffloadingHandlers(CanonicalKVCaches.from_layers({"a": array}), 1, 4, make_stream=copying_with(copier))
    handler, gpu, cpu = pair.gpu_to_cpu_handler, array.copy(), None
    rig = make_rig("scripted")
    for job_id in (1, 2):
        handler.transfer_async(job_id, rig.specs([job_id], [job_id]))
    assert started.wait(5)
    plan_layout = handler._layout
    cpu = np.asarray(plan_layout.cpu[0])
    del plan_layout
    begin = time.monotonic()
    pair.shutdown(timeout=0.05)
    assert time.monotonic() - begin < 2
    assert pair.pending_jobs() == [1]
    (result,) = handler.get_finished()
    assert (result.job_id, result.success, type(result.error)) == (2, False, ClosedError)
    go.set()
    assert handler.wait({1}, 5)
    assert [(r.job_id, r.success) for r in handler.get_finished()] == [(1, True)]
    assert np.array_equal(cpu[1], gpu[1])


def test_second_handler_is_shut_down_when_the_first_raises():
    """A-H4, variant."""
    pair = CpuGpuOffloadingHandlers(CanonicalKVCaches.from_layers({"a": np.ones((4, 16), np.int8)}), 1, 4)

    def broken(timeout):
        raise RuntimeError("no")

    pair.gpu_to_cpu_handler.shutdown = broken
    with pytest.raises(RuntimeError, match="no"):
        pair.shutdown()
    with pytest.raises(ClosedError):
        pair.cpu_to_gpu_handler.transfer_async(1, ())


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kvoffload-")]


def test_threads_are_named_start_with_the_first_job_and_end_with_shutdown(make_rig):
    rig = make_rig("host")
    assert threads() == []
    rig.store([0], [0])
    assert threads() == ["kvoffload-store"]
    rig.load([0], [0])
    assert sorted(threads()) == ["kvoffload-load", "kvoffload-store"]
    rig.pair.shutdown()
    assert threads() == []


def test_forgotten_handlers_end_their_thread():
    pair = CpuGpuOffloadingHandlers(CanonicalKVCaches.from_layers({"a": np.ones((4, 16), np.int8)}), 1, 4)
    pair.gpu_to_cpu_handler.transfer_async(1, (GPULoadStoreSpec([0], [1], [0]), CPULoadStoreSpec([0])))
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "kvoffload-store"]
    del pair
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_notify_that_raises_is_logged_and_later_jobs_still_end(make_rig, caplog):
    rig = make_rig("host")

    def broken():
        raise RuntimeError("bridge closed")

    rig.stores.notify = broken
    rig.store([0], [0])
    rig.store([1], [1])
    assert len(rig.drain(rig.stores)) == 2
    assert "the callback for ended copies raised" in caplog.text


def test_submitting_never_waits_for_copies(make_rig):
    go = threading.Event()
    rig = make_rig("host")
    rig.store([0], [0], ready=go)
    begin = time.monotonic()
    for _ in range(200):
        rig.store([0], [0])
    assert time.monotonic() - begin < 1
    go.set()
    assert len(rig.drain(rig.stores)) == 201


def test_device_without_a_back_end_is_unsupported_at_the_call():
    """A-K2; CUDA without a driver is `test_cuda`'s."""
    owner = np.zeros((4, 16), np.int8)
    on_device = CanonicalKVCaches.from_layers({"a": BlockTensor(owner.ctypes.data, 4, 16, 16, "xpu:0", owner)})
    with pytest.raises(UnsupportedError, match=r"'xpu:0'.*device 'cpu'"):
        CpuGpuOffloadingHandlers(on_device, 1, 4)


def test_sizes_and_tensors_that_do_not_fit_are_refused():
    caches = CanonicalKVCaches.from_layers({"a": np.zeros((4, 16), np.int8)})
    with pytest.raises(UsageError, match="got 0 and 4"):
        CpuGpuOffloadingHandlers(caches, 0, 4)
    with pytest.raises(LayoutError, match=r"rows of 16 bytes: factor 2 times 16 bytes"):
        CpuGpuOffloadingHandlers(caches, 2, 4, cpu_tensors=[np.zeros((4, 16), np.int8)])
    with pytest.raises(LayoutError, match="one for each of 1 GPU tensors; got 0"):
        SingleDirectionOffloadingHandler([np.zeros((4, 16), np.int8)], [], 1, [], True)
