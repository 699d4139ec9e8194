"""Rank processes that end with the test, over GPU memory that the test can read and write."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from service.ranks.world import World

import kvoffload as kv

PAGE, BLOCKS = 256, 32
SCRIPT = Path(__file__).with_name("rank_process.py")


class Ranks:
    """Processes of one instance.

    Attributes:
        gpu: int8, shape `(world_size, blocks, page)`: the ranks' GPU memory.
    """

    def __init__(self, world_size: int = 2, transport: str = "zmq", **options) -> None:
        self.world_size, self.options = world_size, options
        self.workers = kv.RemoteWorkers(world_size, transport=transport, join_timeout=20)
        self.fd = os.memfd_create("gpu")
        os.ftruncate(self.fd, world_size * BLOCKS * PAGE)
        self._memory = mmap.mmap(self.fd, world_size * BLOCKS * PAGE)
        self.gpu = np.frombuffer(self._memory, np.int8).reshape(world_size, BLOCKS, PAGE)
        self.processes: dict[int, subprocess.Popen] = {}
        self.config = kv.OffloadConfig(
            cpu_bytes_to_use=world_size * PAGE * 16, gpu_block_size=4, world_size=world_size, **options
        )

    def spawn(self, rank: int, **changes) -> subprocess.Popen:
        arguments = [self.workers.address, rank, changes.pop("world_size", self.world_size), self.fd]
        arguments += [changes.pop("blocks", BLOCKS), changes.pop("page", PAGE)]
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *map(str, arguments), json.dumps({**self.options, **changes})],
            pass_fds=[self.fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        self.processes[rank] = process
        return process

    def spawn_all(self) -> None:
        for rank in range(self.world_size):
            self.spawn(rank)

    def say(self, rank: int, line: str) -> str:
        """Send a line to a rank and return its answer."""
        process = self.processes[rank]
        process.stdin.write(line + "\n")
        process.stdin.flush()
        return process.stdout.readline().strip()

    def up(self, rank: int) -> str:
        return self.processes[rank].stdout.readline().strip()

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()
        self.end(self.processes.pop(rank))

    @staticmethod
    def end(process: subprocess.Popen) -> None:
        process.stdin.close()
        process.wait(20)
        process.stdout.close()

    def fill(self, blocks, seed: int) -> None:
        for rank in range(self.world_size):
            for position, block in enumerate(blocks):
                self.gpu[rank, block] = (seed * 37 + position * 5 + rank * 11) % 127 + 1

    def holds(self, blocks, seed: int) -> bool:
        return all(
            (self.gpu[rank, block] == (seed * 37 + position * 5 + rank * 11) % 127 + 1).all()
            for rank in range(self.world_size)
            for position, block in enumerate(blocks)
        )

    def close(self) -> None:
        self.workers.shutdown()
        for process in self.processes.values():
            self.end(process)
        del self.gpu
        self._memory.close()
        os.close(self.fd)


@pytest.fixture
def make_ranks():
    made: list[Ranks] = []

    def make(*args, **kwargs) -> Ranks:
        made.append(Ranks(*args, **kwargs))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()


@pytest.fixture
def make_world():
    worlds: list[World] = []

    def make(*args, **kwargs) -> World:
        worlds.append(World(*args, **kwargs))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()
