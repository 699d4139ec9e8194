"""The scripted backend does what a test tells it to."""

import threading

import numpy as np
import pytest

from kvoffload.errors import ClosedError, TransferError, UsageError
from kvoffload.manager.specs import CPULoadStoreSpec, GPULoadStoreSpec
from kvoffload.memory.canonical import CanonicalKVCaches
from kvoffload.transfer.scripted import ScriptedOffloadingHandler, ScriptedOffloadingHandlers


def store(gpu: int, cpu: int):
    return GPULoadStoreSpec([gpu], [1], [0]), CPULoadStoreSpec([cpu])


def load(gpu: int, cpu: int):
    return CPULoadStoreSpec([cpu]), GPULoadStoreSpec([gpu], [1], [0])


@pytest.fixture
def cache():
    return np.arange(4 * 16, dtype=np.int8).reshape(4, 16)


@pytest.fixture
def handlers(cache):
    return ScriptedOffloadingHandlers.over(CanonicalKVCaches.from_layers({"a": cache}), 1, 4)


def test_jobs_end_at_once_by_default_and_notify():
    handler, news = ScriptedOffloadingHandler(), []
    handler.notify = lambda: news.append(1)
    assert handler.transfer_async(1, store(0, 0))
    assert [(r.job_id, r.success) for r in handler.get_finished()] == [(1, True)]
    assert news == [1]


def test_held_job_ends_when_told_and_moves_bytes_then(handlers, cache):
    handlers.hold()
    handlers.gpu_to_cpu_handler.transfer_async(1, store(2, 3))
    row = np.asarray(handlers.layout.cpu[0])[3]
    assert not row.any()
    assert handlers.gpu_to_cpu_handler.pending_jobs() == [1]
    handlers.gpu_to_cpu_handler.finish(1)
    assert (row == cache[2]).all()


def test_copy_now_writes_and_leaves_the_job_pending(handlers, cache):
    handlers.hold()
    handlers.gpu_to_cpu_handler.transfer_async(1, store(2, 3))
    handlers.gpu_to_cpu_handler.copy_now(1)
    assert (np.asarray(handlers.layout.cpu[0])[3] == cache[2]).all()
    assert handlers.gpu_to_cpu_handler.get_finished() == []


def test_jobs_can_end_out_of_order(handlers):
    handlers.hold()
    handler = handlers.gpu_to_cpu_handler
    for job_id in (1, 2):
        handler.transfer_async(job_id, store(job_id, job_id))
    handler.finish(2)
    handler.finish(1)
    assert [r.job_id for r in handler.get_finished()] == [2, 1]


def test_failures_at_submit_and_in_flight(handlers, cache):
    handler = handlers.gpu_to_cpu_handler
    handler.refuse_next()
    handler.refuse_next(OSError("no device"))
    assert handler.transfer_async(1, store(0, 0)) is False
    with pytest.raises(OSError, match="no device"):
        handler.transfer_async(2, store(0, 0))
    handler.fail_next(OSError("link down"))
    assert handler.transfer_async(3, store(1, 1))
    (result,) = handler.get_finished()
    assert (result.job_id, result.success, str(result.error)) == (3, False, "link down")
    assert not np.asarray(handlers.layout.cpu[0])[1].any()
    handler.hold()
    handler.transfer_async(4, store(0, 0))
    handler.fail(4)
    assert isinstance(handler.get_finished()[0].error, TransferError)


def test_hung_job_survives_finish_all_and_shutdown(handlers):
    handlers.hold()
    handler = handlers.gpu_to_cpu_handler
    handler.transfer_async(1, store(0, 0))
    handler.transfer_async(2, store(1, 1))
    handler.hang(1)
    handler.finish_all()
    handler.shutdown(timeout=0)
    assert handler.pending_jobs() == [1]
    with pytest.raises(ClosedError):
        handler.transfer_async(3, store(2, 2))
    handler.finish(1)
    assert [r.job_id for r in handler.get_finished()] == [2, 1]


def test_load_waits_for_an_overlapping_held_store(handlers):
    handlers.gpu_to_cpu_handler.hold()
    handlers.gpu_to_cpu_handler.transfer_async(1, store(2, 0))
    handlers.cpu_to_gpu_handler.transfer_async(2, load(2, 1))
    handlers.cpu_to_gpu_handler.transfer_async(3, load(3, 1))
    assert handlers.cpu_to_gpu_handler.get_finished() == []
    news = threading.Event()
    handlers.cpu_to_gpu_handler.notify = news.set
    handlers.gpu_to_cpu_handler.finish(1)
    assert news.is_set()
    assert [r.job_id for r in handlers.cpu_to_gpu_handler.get_finished()] == [2, 3]


def test_naming_a_job_that_is_not_pending_is_a_usage_error(handlers):
    with pytest.raises(UsageError, match="job 9 is not pending"):
        handlers.gpu_to_cpu_handler.finish(9)
