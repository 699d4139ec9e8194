"""The rank processes of a simulated engine: started again when they end, but not after a start that failed."""

from __future__ import annotations

import asyncio

import pytest

from kvoffload.simulate import rank_rig
from kvoffload.simulate.rank_rig import RankRig


class Launcher:
    """Ranks that have always just ended."""

    def __init__(self):
        self.starts = self.looks = 0

    def start(self):
        self.starts += 1

    def ended(self):
        self.looks += 1
        return {0: 0}

    def close(self):
        pass


class Workers:
    def __init__(self, is_shut_down):
        self.is_shut_down = is_shut_down

    def shutdown(self):
        pass


@pytest.mark.parametrize("failed", [True, False])
async def test_ranks_that_ended_are_started_again_unless_the_start_failed(monkeypatch, failed):
    """Else the log of a failed start begins with ranks that ended, and not with the cause."""
    monkeypatch.setattr(rank_rig, "_LOOK_SECONDS", 0.001)
    rig = RankRig.__new__(RankRig)
    rig.launcher, rig.workers = Launcher(), Workers(failed)
    async with rig.running():
        while rig.launcher.looks < 4:
            await asyncio.sleep(0.001)
    assert (rig.launcher.starts > 1) is not failed
