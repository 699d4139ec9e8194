"""The handler contract, over every backend that runs here."""

import os
import threading
import time

import numpy as np
import pytest

from kvoffload.errors import ClosedError, UsageError
from kvoffload.manager.specs import CPULoadStoreSpec, GPULoadStoreSpec


def check_every_offset_and_length(rig, factor):
    rng = np.random.default_rng(factor)
    for offset in range(factor):
        for length in range(1, min(2 * factor + 2, 24 - factor)):
            rows = -(-(offset + length) // factor)
            for to_cpu in (True, False):
                gpu_ids, cpu_ids = rng.permutation(24)[:length], rng.permutation(12)[:rows]
                rig.check(gpu_ids, cpu_ids, [length], [factor * 3 + offset], to_cpu=to_cpu)


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("factor", range(1, 9))
def test_bytes_are_equal_at_every_offset_and_length(make_rig, backend, factor, strided):
    check_every_offset_and_length(make_rig(backend, factor, strided=strided), factor)


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("factor", range(1, 9))
def test_bytes_of_torch_tensors_are_equal_at_every_offset_and_length(make_rig, host_backend, factor, strided):
    pytest.importorskip("torch")
    check_every_offset_and_length(make_rig(host_backend, factor, strided=strided, torch=True), factor)


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("num_groups", [1, 2, 3])
def test_bytes_are_equal_with_groups_padded_pages_and_empty_groups(make_rig, backend, num_groups, strided):
    groups = (((24, 20), (8, 8)), ((16, 16),), ((5, 3), (40, 40), (8, 1)))[:num_groups]
    for factor in (1, 3, 4):
        rig = make_rig(backend, factor, groups, strided=strided, gpu_blocks=40, cpu_blocks=30)
        rng = np.random.default_rng(num_groups)
        for _ in range(40):
            sizes = rng.integers(0, 10, num_groups).tolist()
            indices = rng.integers(0, 20, num_groups).tolist()
            rows = sum(-(-(i % factor + s) // factor) for s, i in zip(sizes, indices, strict=True) if s)
            gpu_ids, cpu_ids = rng.permutation(40)[: sum(sizes)], rng.permutation(30)[:rows]
            if rng.random() < 0.5:  # runs of neighbours take other paths than scattered blocks
                gpu_ids, cpu_ids = np.arange(sum(sizes)), np.arange(rows)
            rig.check(gpu_ids, cpu_ids, sizes, indices, to_cpu=bool(rng.random() < 0.5))


def test_load_that_starts_inside_a_cpu_block(make_rig, backend):
    """A-H1."""
    rig = make_rig(backend, 4)
    before = rig.gpu[0].copy()
    rig.load([10, 11, 12, 13, 14, 15], [0, 1], [6], [2])
    (result,) = rig.drain(rig.loads)
    subs = rig.cpu[0].reshape(12, 4, 16)
    assert np.array_equal(rig.gpu[0][10:16], np.concatenate([subs[0, 2:], subs[1]]))
    assert np.array_equal(np.delete(rig.gpu[0], range(10, 16), 0), np.delete(before, range(10, 16), 0))
    assert (result.success, result.transfer_size) == (True, 6 * 16)


def test_results_come_in_order_of_submission_with_type_size_and_times(make_rig, backend):
    rig = make_rig(backend)
    jobs = [rig.store([i, i + 1], [i, i + 1]) for i in range(8)]
    results = rig.drain(rig.stores)
    assert [r.job_id for r in results] == jobs
    assert {(r.success, r.transfer_type, r.transfer_size, r.error) for r in results} == {
        (True, ("GPU", "CPU"), 32, None)
    }
    assert all(r.transfer_time >= 0 and r.queue_time >= 0 for r in results)
    assert rig.stores.get_finished() == []


def test_empty_transfer_ends_with_success(make_rig, backend):
    rig = make_rig(backend)
    rig.store([], [], [0])
    assert [(r.success, r.transfer_size) for r in rig.drain(rig.stores)] == [(True, 0)]


def test_ids_are_read_before_the_call_returns(make_rig, backend):
    rig = make_rig(backend)
    go = rig.event()
    gpu, cpu = rig.specs([1, 2], [3, 4])
    wanted = rig.gpu[0][1:3].copy()
    rig.stores.transfer_async(1, (gpu, cpu), go)
    gpu.block_ids[:] = 0
    cpu.block_ids[:] = 0
    go.set()
    rig.drain(rig.stores)
    assert np.array_equal(rig.cpu[0][3:5], wanted)


WRONG = {
    "GPU id out of range": (([24], [0], None, None), r"GPU block ids \[24\] are out of range: there are 24 blocks"),
    "CPU id out of range": (([0], [12], None, None), r"CPU block ids \[12\] are out of range: there are 12 blocks"),
    "too few CPU blocks": (([0, 1, 2], [0], None, None), "need 2 CPU blocks, got 1"),
    "too many CPU blocks": (([0], [0, 1], None, None), "need 1 CPU blocks, got 2"),
    "offset needs one more": (([0, 1], [0], [2], [3]), "need 2 CPU blocks, got 1"),
    "more groups than caches": (([0, 1], [0, 1], [1, 1], [0, 0]), "2 groups, the KV caches have 1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_spec_that_does_not_fit_is_a_usage_error_and_queues_nothing(make_rig, backend, case):
    rig = make_rig(backend, 2)
    (gpu_ids, cpu_ids, sizes, indices), message = WRONG[case]
    gpu, cpu = rig.specs(gpu_ids, cpu_ids, sizes, indices)
    before = [array.copy() for array in rig.gpu + rig.cpu]
    for handler, spec in ((rig.stores, (gpu, cpu)), (rig.loads, (cpu, gpu))):
        with pytest.raises(UsageError, match=message):
            handler.transfer_async(1, spec)
        assert handler.pending_jobs() == []
        assert handler.get_finished() == []
    assert all(np.array_equal(a, b) for a, b in zip(before, rig.gpu + rig.cpu, strict=True))


def test_wrong_direction_is_a_usage_error(make_rig, backend):
    rig = make_rig(backend)
    gpu, cpu = rig.specs([0], [0])
    with pytest.raises(UsageError, match="this handler moves CPU to GPU, got GPU to CPU"):
        rig.loads.transfer_async(1, (gpu, cpu))
    with pytest.raises(UsageError, match="got CPU to CPU"):
        rig.stores.transfer_async(1, (cpu, cpu))


def test_same_id_twice_is_a_usage_error(make_rig, backend):
    rig = make_rig(backend)
    go = rig.event()
    spec = rig.specs([0], [0])
    rig.stores.transfer_async(1, spec, go)
    with pytest.raises(UsageError, match="job 1 has not"):
        rig.stores.transfer_async(1, spec)
    go.set()
    assert len(rig.drain(rig.stores)) == 1


@pytest.mark.parametrize("ready", ["now", None, 3, threading.Event])
def test_ready_that_cannot_be_waited_for_is_a_usage_error(make_rig, backend, ready):
    rig = make_rig(backend)
    ready = object() if ready is threading.Event else ready
    with pytest.raises(UsageError, match=r'(takes|is) "host-visible" or a'):
        rig.stores.transfer_async(1, rig.specs([0], [0]), ready)
    assert rig.stores.pending_jobs() == []


def test_store_waits_until_its_source_is_ready_and_loads_go_on(make_rig, backend):
    """A-H2 without a GPU: the wait on the event precedes the copy."""
    rig = make_rig(backend)
    written = rig.event()
    job = rig.store([1], [1], ready=written)
    other = rig.load([5], [7])
    assert [r.job_id for r in rig.drain(rig.loads)] == [other]
    assert not rig.stores.wait({job}, 0.02)
    assert rig.stores.pending_jobs() == [job]
    rig.gpu[0][1] = 0x5A
    written.set()
    assert [r.job_id for r in rig.drain(rig.stores)] == [job]
    assert (rig.cpu[0][1] == 0x5A).all()


def test_load_into_blocks_of_an_unfinished_store_waits_for_it(make_rig, backend):
    rig = make_rig(backend)
    written = rig.event()
    source, loaded = rig.gpu[0][3].copy(), rig.cpu[0][8].copy()
    rig.store([2, 3], [1, 2], ready=written)
    rig.store([9], [3])
    load = rig.load([3], [8])
    assert not rig.loads.wait({load}, 0.02)
    written.set()
    assert rig.drain(rig.stores)
    assert rig.drain(rig.loads)
    assert np.array_equal(rig.cpu[0][2], source)
    assert np.array_equal(rig.gpu[0][3], loaded)


def test_store_from_blocks_of_an_unfinished_load_waits_for_it(make_rig, backend):
    rig = make_rig(backend)
    go = rig.event()
    wanted = rig.cpu[0][4].copy()
    rig.load([3], [4], ready=go)
    store = rig.store([3], [5])
    free = rig.store([6], [6])
    assert not rig.stores.wait({store}, 0.02)
    go.set()
    assert [r.job_id for r in rig.drain(rig.stores)] == [store, free]
    assert np.array_equal(rig.cpu[0][5], wanted)


def test_notify_is_called_for_every_news(make_rig, backend):
    rig = make_rig(backend)
    news = threading.Semaphore(0)
    rig.stores.notify = news.release
    rig.store([0], [0])
    assert news.acquire(timeout=5)
    assert len(rig.stores.get_finished()) == 1


def test_wait_ignores_unknown_ids_and_keeps_its_timeout(make_rig, backend):
    rig = make_rig(backend)
    assert rig.stores.wait({99})
    go = rig.event()
    job = rig.store([0], [0], ready=go)
    start = time.monotonic()
    assert not rig.stores.wait({job, 99}, 0.05)
    assert time.monotonic() - start < 2
    go.set()
    assert rig.stores.wait({job}, 5)


def test_shutdown_drains_and_is_idempotent(make_rig, backend):
    """A-H4: all copies end before memory goes, a second shutdown does nothing, results can still be read."""
    rig = make_rig(backend)
    jobs = [rig.store([i], [i]) for i in range(8)]
    rig.pair.shutdown(5)
    rig.pair.shutdown(5)
    assert [r.job_id for r in rig.stores.get_finished()] == jobs
    with pytest.raises(ClosedError):
        rig.stores.transfer_async(99, rig.specs([0], [0]))


def test_shutdown_fails_what_never_got_ready_in_bounded_time(make_rig, host_backend):
    rig = make_rig(host_backend)
    before = rig.cpu[0].copy()
    jobs = [rig.store([i], [i], ready=threading.Event()) for i in range(3)]
    start = time.monotonic()
    rig.stores.shutdown(timeout=0.05)
    assert time.monotonic() - start < 2
    assert rig.stores.pending_jobs() == []
    results = rig.stores.get_finished()
    assert [r.job_id for r in results] == jobs
    assert all(isinstance(r.error, ClosedError) and not r.success for r in results)
    assert np.array_equal(rig.cpu[0], before)


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_use_after_fork_is_refused_with_the_pid_named(make_rig, backend):
    rig = make_rig(backend)
    rig.store([0], [0])
    rig.drain(rig.stores)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            rig.stores.transfer_async(2, (GPULoadStoreSpec([0], [1], [0]), CPULoadStoreSpec([0])))
        except UsageError as error:
            code = 0 if str(os.getppid()) in str(error) and str(os.getpid()) in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
