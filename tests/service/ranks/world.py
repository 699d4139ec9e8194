"""An instance whose ranks live in threads of the test's process."""

import os
import threading
import time

import numpy as np
from service.harness import tokens

import kvoffload as kv
from kvoffload.service.ranks import meeting
from kvoffload.service.ranks.wire import PROTOCOL, Hello, encode

PAGE, BLOCKS = 256, 32


class World:
    """An instance and its ranks, all in this process.

    Attributes:
        outcomes: What `start` raised, per call of `join`.
    """

    def __init__(self, world_size=2, *, address="ipc", transport="zmq", join_timeout=20.0):
        self.workers = kv.RemoteWorkers(world_size, address=address, transport=transport, join_timeout=join_timeout)
        self.config = self.make_config(world_size)
        self.ranks, self.threads, self.outcomes, self.engines = [], [], [], []

    @staticmethod
    def make_config(world_size=2, **changes):
        values = {"cpu_bytes_to_use": world_size * PAGE * 16, "gpu_block_size": 4, "world_size": world_size, **changes}
        return kv.OffloadConfig(**values)

    def rank(self, rank, *, blocks=BLOCKS, page=PAGE, **options):
        caches = kv.CanonicalKVCaches.from_layers({"layer": np.zeros((blocks, page), np.int8)}, block_dim=0)
        address = self.workers.address
        worker = kv.OffloadRankWorker(self.config, caches, rank=rank, address=address, timeout=20, **options)
        self.ranks.append(worker)
        return self.ranks[-1]

    def join(self, worker):
        """Start a rank in a thread of its own."""
        place = len(self.outcomes)
        self.outcomes.append(None)

        def start():
            try:
                worker.start()
            except kv.KVOffloadError as error:
                self.outcomes[place] = error

        self.threads.append(threading.Thread(target=start))
        self.threads[-1].start()
        return worker

    def raw(self, rank, **changes):
        """Connect as a process that says it is a rank, and does nothing more."""
        sock, pidfd = meeting.connect(self.workers.address, 5)
        os.close(pidfd)
        fields = {
            "protocol": PROTOCOL, "version": kv.__version__, "rank": rank, "world_size": 2, "pid": 0,
            "incarnation": 7, "num_blocks": BLOCKS, "page_sizes": [PAGE], "group_page_sizes": [[PAGE]],
            "gpu_block_sizes": [4], "block_size_factor": 1, "device": "cpu",
        }  # fmt: skip
        sock.send(encode(Hello(**{**fields, **changes})))
        sock.settimeout(10)
        return sock

    def engine(self):
        self.engines.append(kv.OffloadEngine(self.config, workers=self.workers))
        return self.engines[-1]

    def settle(self):
        """Wait for every `join`."""
        while self.threads:
            self.threads.pop().join(20)

    def close(self):
        for engine in self.engines:
            engine.close()
        self.workers.shutdown()
        self.settle()
        for rank in self.ranks:
            rank.close()


def until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def store_and_load(world, engine, seed):
    """Store two blocks on every rank and load them elsewhere; return whether the bytes are right."""
    chain = kv.BlockChain(engine.geometry.groups, tokens(8, seed))
    engine.begin(str(seed), chain)
    caches = [rank.kv_caches.tensors[0].view for rank in world.ranks if not rank.lost]
    arrays = [np.asarray(view) for view in caches]
    for number, array in enumerate(arrays):
        array[[1, 2]] = seed % 50 + number + 1
        array[[8, 9]] = 0
    job = engine.submit_store(str(seed), kv.GPULoadStoreSpec([1, 2], [2], [0]), "host-visible")
    (stored,) = [done.result for done in engine.wait([job], 10) if done.job_id == job]
    assert stored.stored == 2, stored
    job = engine.submit_load(str(seed), kv.GPULoadStoreSpec([8, 9], [2], [0]))
    engine.wait([job], 10)
    engine.finish(str(seed))
    return all((array[[8, 9]] == seed % 50 + number + 1).all() for number, array in enumerate(arrays))
