"""The chaos itself: quiet on the real service, loud on a broken one."""

from __future__ import annotations

import asyncio
import json

import pytest
import uvloop

from kvoffload.cli.main import main
from kvoffload.service.loads import LoadDesk
from kvoffload.service.ownership import GPUBlockBook
from kvoffload.service.room import RoomLine
from kvoffload.simulate.chaos.driver import ChaosDriver


def _violations(ops, seed, loop_factory=None):
    driver = ChaosDriver(seed)
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(driver.run(ops))
    return driver.violations


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_thousands_of_random_operations_violate_nothing(loop_factory, caplog):
    assert _violations(2000, 7, loop_factory) == []


def test_command_reports_counts_and_growth(capsys, caplog):
    assert main(["bench", "chaos", "--ops", "1100", "--seed", "4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["ops"], report["violations"]) == (1100, 0)
    assert {"seconds", "rss_growth_bytes"} <= set(report)


def _free_at_once(monkeypatch):
    monkeypatch.setattr(
        GPUBlockBook, "give_back", lambda book, blocks, free: free and book._pass(free, list(dict.fromkeys(blocks)))
    )


def _free_when_hung(monkeypatch):
    answer = LoadDesk.answer_early

    def answer_and_free(desk, job, reason, error):
        answer(desk, job, reason, error)
        desk._core.book.unhold(job.gpu_blocks)
        job.gpu_blocks = ()

    monkeypatch.setattr(LoadDesk, "answer_early", answer_and_free)


def _lose_turns(monkeypatch):
    monkeypatch.setattr(RoomLine, "next", lambda line: None)


@pytest.mark.parametrize("fault", [_free_at_once, _free_when_hung, _lose_turns])
def test_broken_service_is_found_out(fault, monkeypatch, caplog):
    fault(monkeypatch)
    assert any(_violations(1000, seed) for seed in range(3, 7))  # what meets what depends on the machine's pace
