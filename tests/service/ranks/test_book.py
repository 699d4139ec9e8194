"""Commands are numbered, reports are joined, strangers and ghosts are dropped."""

from __future__ import annotations

import pytest

from kvoffload.errors import TransferError
from kvoffload.service.ranks.book import RankBook
from kvoffload.service.ranks.wire import Command, Report, Reports, decode_commands

COMMAND = Command(7, True, b"", [0], [0], b"")


def _report(book, rank, *, success=True, incarnation=None, epoch=None, job=7):
    report = Report(job, success, 10, 0.1 * (rank + 1), 0.2, None if success else "link down")
    return Reports(epoch or book.epoch, incarnation or rank + 100, rank, [report])


@pytest.fixture
def book():
    book = RankBook(2, 42)
    book.join(0, 100)
    book.join(1, 101)
    return book


def test_job_ends_when_every_rank_has_reported_and_sizes_add_up(book):
    book.submit(COMMAND)
    book.report(_report(book, 1))
    assert book.take_ended() == []
    book.report(_report(book, 0))
    (result,) = book.take_ended()
    assert (result.job_id, result.success, result.transfer_size, result.queue_time) == (7, True, 20, 0.2)
    assert book.pending() == []


def test_one_failure_fails_the_job_but_it_ends_only_with_the_last_report(book):
    book.submit(COMMAND)
    book.report(_report(book, 0, success=False))
    assert book.take_ended() == []
    book.report(_report(book, 1))
    (result,) = book.take_ended()
    assert not result.success
    assert str(result.error) == "rank 0: link down"


@pytest.mark.parametrize("change", [{"epoch": 41}, {"incarnation": 999}, {"job": 8}])
def test_reports_of_another_life_are_dropped_and_counted(book, change):
    book.submit(COMMAND)
    book.report(_report(book, 0, **change))
    book.report(_report(book, 1))
    assert book.take_ended() == []
    assert book.stale_reports == 1


def test_second_report_of_a_rank_is_dropped(book):
    book.submit(COMMAND)
    book.report(_report(book, 0))
    book.report(_report(book, 0))
    assert (book.take_ended(), book.stale_reports) == ([], 1)


def test_missing_rank_refuses_new_jobs_and_ends_what_it_owed(book):
    book.submit(COMMAND)
    book.report(_report(book, 0))
    book.leave(1, "process 5 ended")
    (result,) = book.take_ended()
    assert str(result.error) == "rank 1 is gone: process 5 ended"
    with pytest.raises(TransferError, match="rank 1 of 2 is missing"):
        book.submit(COMMAND)
    book.join(1, 201)
    book.submit(COMMAND)
    late = decode_commands(book.take(1))
    assert (late.first, late.starts) == (2, [1, 2]), "a new process starts behind what its predecessor owed"
    assert decode_commands(book.take(0)).first == 1
    assert book.take(0) is None


def test_one_message_serves_a_rank_that_stayed_and_one_that_came_again(book):
    book.submit(COMMAND)
    book.leave(1, "process 5 ended")
    book.join(1, 201)
    book.submit(COMMAND)
    batch = decode_commands(book.take_common())
    assert (batch.first, len(batch.commands)) == (1, 2)
    assert (batch.incarnations, batch.starts) == ([100, 201], [1, 2])
    assert book.take_common() == b""


def test_retired_rank_gets_nothing_new_but_its_copies_have_not_ended(book):
    book.submit(COMMAND)
    book.take(0), book.take(1)
    book.report(_report(book, 0))
    book.retire(1)
    assert book.take_ended() == []
    with pytest.raises(TransferError, match="rank 1 of 2 is missing"):
        book.submit(COMMAND)
    book.report(_report(book, 1))
    assert [result.success for result in book.take_ended()] == [True]


def test_commands_that_all_ranks_got_are_forgotten(book):
    for _ in range(100):
        book.submit(COMMAND)
        book.take(0), book.take(1)
    assert len(book._unsent) == 0
    book.leave(1, "process 5 ended")
    book.join(1, 201)
    book.submit(COMMAND)
    assert len(decode_commands(book.take(1)).commands) == len(decode_commands(book.take(0)).commands) == 1


def test_commands_are_numbered_in_order(book):
    book.submit(COMMAND)
    assert decode_commands(book.take(0)).first == 1
    book.submit(COMMAND)
    book.submit(COMMAND)
    batch = decode_commands(book.take(0))
    assert (batch.first, len(batch.commands), batch.epoch) == (2, 2, 42)
    assert len(decode_commands(book.take(1)).commands) == 3


def test_ranks_that_lack_the_same_get_the_same_message(book):
    book.submit(COMMAND)
    both = book.take_each()
    assert both[0] is both[1]
    assert book.take_each() == {}
    book.submit(COMMAND)
    book.take(0)
    book.submit(COMMAND)
    each = {rank: decode_commands(batch) for rank, batch in book.take_each().items()}
    assert {rank: (batch.first, len(batch.commands)) for rank, batch in each.items()} == {0: (3, 1), 1: (2, 2)}
