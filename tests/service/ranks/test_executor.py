"""A rank runs each command of its own life once."""

import pytest

from kvoffload.errors import UsageError
from kvoffload.service.ranks.executor import RankExecutor
from kvoffload.service.ranks.wire import Command, Commands, Welcome, decode_reports, encode

EPOCH, ME = 42, 101


class Worker:
    """Takes note of what it is asked to move."""

    def __init__(self):
        self.jobs = []

    def transfer_async(self, job_id, spec, ready):
        self.jobs.append(job_id)
        return True

    def take_submit_error(self, job_id):
        return None

    def get_finished(self):
        return []


@pytest.fixture
def worker():
    return Worker()


@pytest.fixture
def executor(worker):
    return RankExecutor(worker, Welcome(epoch=EPOCH), 1, ME)


def _batch(first, *jobs, epoch=EPOCH, incarnation=ME, start=1, gpu=b""):
    commands = [Command(job, True, gpu, [len(gpu) // 8], [0], gpu) for job in jobs]
    return encode(Commands(epoch, first, commands, [0, incarnation], [0, start]))


def test_commands_seen_before_run_once(executor, worker):
    executor.run(_batch(1, 7, 8))
    executor.run(_batch(2, 8, 9))
    assert (worker.jobs, executor.stale_commands) == ([7, 8, 9], 1)


@pytest.mark.parametrize("change", [{"epoch": 41}, {"incarnation": 99}, {"incarnation": 0}])
def test_commands_for_another_life_are_dropped_and_counted(executor, worker, change):
    executor.run(_batch(1, 7, **change))
    assert (worker.jobs, executor.stale_commands) == ([], 1)


def test_commands_of_a_predecessor_are_skipped(executor, worker):
    executor.run(_batch(5, 7, 8, 9, start=7))
    assert worker.jobs == [9]
    executor.run(_batch(8, 10, start=7))
    assert worker.jobs == [9, 10]


@pytest.mark.parametrize(("first", "start"), [(2, 1), (9, 8)])
def test_lost_commands_are_noticed(executor, worker, first, start):
    with pytest.raises(UsageError, match="were lost: every rank must get every message"):
        executor.run(_batch(first, 7, start=start))
    assert worker.jobs == []


def test_command_that_cannot_begin_fails_alone(executor, worker):
    executor.run(_batch(1, 7, gpu=b"not a multiple of eight"))
    executor.run(_batch(2, 8))
    (report,) = decode_reports(executor.reports()).reports
    assert (report.job, report.success) == (7, False)
    assert worker.jobs == [8]
