"""`RankRig`: the rank processes of a simulated tensor-parallel engine; one that dies is started again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvoffload.config import OffloadConfig
from kvoffload.service.ranks.launcher import RankLauncher
from kvoffload.service.ranks.remote import RemoteWorkers
from kvoffload.service.waiting import in_thread
from kvoffload.simulate.rank_process import TARGET
from kvoffload.simulate.sharded_gpu import ShardedGpu

_LOOK_SECONDS = 0.1


class RankRig:
    """Ranks over a `ShardedGpu`, in processes of their own.

    Args:
        config: The service's configuration; its `world_size` ranks are started.
        gpu: Their memory.

    Attributes:
        workers: For `OffloadService(config, workers=...)`.
        launcher: The processes.
    """

    def __init__(self, config: OffloadConfig, gpu: ShardedGpu) -> None:
        self.workers = RemoteWorkers(config.world_size)
        self.launcher = RankLauncher(
            TARGET,
            world_size=config.world_size,
            address=self.workers.address,
            arguments={**gpu.arguments, "config": config.model_dump(mode="json")},
            pass_fds=[gpu.fd],
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the ranks running while the block runs; it holds the service's whole life."""
        keeping = asyncio.create_task(self._keep_running())
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await in_thread(self._end, "kvoffload-ranks-end")

    async def _keep_running(self) -> None:
        await in_thread(self.launcher.start, "kvoffload-ranks-start")
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if self.launcher.ended() and not self.workers.is_shut_down:  # else the start failed: its error tells why
                await in_thread(self.launcher.start, "kvoffload-ranks-start")

    def _end(self) -> None:
        self.workers.shutdown()
        self.launcher.close()
