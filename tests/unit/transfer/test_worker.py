"""The worker routes by medium, isolates broken handlers, and remembers why a submission was refused."""

import threading

import pytest

from kvoffload.errors import TransferError, UsageError
from kvoffload.manager.specs import CPULoadStoreSpec, GPULoadStoreSpec
from kvoffload.transfer.scripted import ScriptedOffloadingHandler
from kvoffload.transfer.worker import OffloadingWorker

STORE = (GPULoadStoreSpec([0], [1], [0]), CPULoadStoreSpec([0]))
LOAD = (STORE[1], STORE[0])


@pytest.fixture
def handlers():
    return ScriptedOffloadingHandler(("GPU", "CPU")), ScriptedOffloadingHandler(("CPU", "GPU"))


@pytest.fixture
def worker(handlers):
    worker = OffloadingWorker()
    worker.register_handler(GPULoadStoreSpec, CPULoadStoreSpec, handlers[0])
    worker.register_handler(CPULoadStoreSpec, GPULoadStoreSpec, handlers[1])
    return worker


def test_transfers_go_to_the_handler_of_their_direction(worker, handlers):
    assert worker.transfer_async(1, STORE)
    assert worker.transfer_async(2, LOAD)
    assert [[job.job_id for job in handler.submitted] for handler in handlers] == [[1], [2]]
    assert [(r.job_id, r.transfer_type) for r in worker.get_finished()] == [(1, ("GPU", "CPU")), (2, ("CPU", "GPU"))]


def test_second_handler_for_a_direction_is_refused(worker, handlers):
    with pytest.raises(UsageError, match="GPU to CPU already have a handler"):
        worker.register_handler(GPULoadStoreSpec, CPULoadStoreSpec, handlers[0])


def test_unknown_direction_is_refused_and_the_known_ones_named(worker):
    with pytest.raises(UsageError, match="no handler for transfers CPU to CPU; registered: CPU to GPU, GPU to CPU"):
        worker.transfer_async(1, (STORE[1], STORE[1]))
    with pytest.raises(UsageError, match="registered: none"):
        OffloadingWorker().transfer_async(1, STORE)


def test_copy_that_raises_at_submit_is_a_refusal_with_its_error(worker, handlers):
    """A-H3, at submit: other jobs go on."""
    error = OSError("no device")
    handlers[0].refuse_next(error)
    handlers[0].refuse_next()
    assert not worker.transfer_async(1, STORE)
    assert not worker.transfer_async(2, STORE)
    assert worker.transfer_async(3, STORE)
    assert worker.take_submit_error(1) is error
    assert worker.take_submit_error(1) is None
    assert worker.take_submit_error(2) is None
    assert [r.job_id for r in worker.get_finished()] == [3]


def test_refusals_that_nobody_asks_about_do_not_pile_up(worker, handlers):
    for job_id in range(1100):
        handlers[0].refuse_next(OSError())
        worker.transfer_async(job_id, STORE)
    assert worker.take_submit_error(0) is None
    assert worker.take_submit_error(1099) is not None


class BrokenHandler(ScriptedOffloadingHandler):
    def get_finished(self):
        raise RuntimeError("poll failed")

    def shutdown(self, timeout=10.0):
        raise RuntimeError("shutdown failed")


def test_handler_that_raises_at_poll_does_not_hide_the_others(caplog):
    """A-H3, at poll: logged once, kept for the owner."""
    worker = OffloadingWorker()
    worker.register_handler(GPULoadStoreSpec, CPULoadStoreSpec, BrokenHandler())
    worker.register_handler(CPULoadStoreSpec, GPULoadStoreSpec, ScriptedOffloadingHandler(("CPU", "GPU")))
    worker.transfer_async(1, LOAD)
    assert [r.job_id for r in worker.get_finished()] == [1]
    worker.get_finished()
    assert len(caplog.records) == 1
    assert {kind: str(error) for kind, error in worker.take_handler_errors().items()} == {("GPU", "CPU"): "poll failed"}
    assert worker.take_handler_errors() == {}
    worker.get_finished()
    assert len(caplog.records) == 1, "it is still broken: no news"


def test_handler_that_fails_to_shut_down_does_not_stop_the_rest():
    """A-H4: the second handler is shut down, and then the failure is told."""
    worker, second = OffloadingWorker(), ScriptedOffloadingHandler(("CPU", "GPU"))
    worker.register_handler(GPULoadStoreSpec, CPULoadStoreSpec, BrokenHandler())
    worker.register_handler(CPULoadStoreSpec, GPULoadStoreSpec, second)
    with pytest.raises(TransferError, match="shutdown failed") as caught:
        worker.shutdown()
    assert isinstance(caught.value.__cause__, ExceptionGroup)
    assert not worker.transfer_async(1, LOAD)
    assert "shut down" in str(worker.take_submit_error(1))


def test_wait_and_pending_jobs_cover_all_handlers(worker, handlers):
    for handler in handlers:
        handler.hold()
    worker.transfer_async(1, STORE)
    worker.transfer_async(2, LOAD)
    assert worker.pending_jobs() == [1, 2]
    assert not worker.wait({1, 2}, 0.02)
    for handler in handlers:
        handler.finish_all()
    assert worker.wait({1, 2}, 5)
    assert worker.pending_jobs() == []


def test_notify_reaches_handlers_registered_before_and_after(handlers):
    worker, news = OffloadingWorker(), threading.Semaphore(0)
    worker.register_handler(GPULoadStoreSpec, CPULoadStoreSpec, handlers[0])
    worker.set_notify(news.release)
    worker.register_handler(CPULoadStoreSpec, GPULoadStoreSpec, handlers[1])
    worker.transfer_async(1, STORE)
    worker.transfer_async(2, LOAD)
    assert news.acquire(blocking=False)
    assert news.acquire(blocking=False)
