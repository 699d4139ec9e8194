"""The rule that keeps bytes right when commands and steps travel on different channels: store what has come back."""

import time

import numpy as np
import pytest
from service.harness import tokens
from service.ranks.world import until

import kvoffload as kv
from kvoffload.service.ranks.channel import RankChannel


@pytest.fixture
def delayed(monkeypatch):
    """A command channel that is held until told otherwise; returns how to let it go."""
    held = []

    def hold(self):
        held.append(self)

    send = RankChannel.send
    monkeypatch.setattr("kvoffload.service.ranks.channel.RankChannel.send", hold)

    def release():
        while held:
            send(held.pop())

    return release


class Steps:
    """The engine's own channel: a step writes blocks on every rank, and its result comes back."""

    def __init__(self, world, engine):
        self.world, self.engine, self.number = world, engine, 0

    def run(self, blocks, value):
        self.number += 1
        for number, rank in enumerate(self.world.ranks):
            np.asarray(rank.kv_caches.tensors[0].view)[blocks] = value + number
            rank.note_step(self.number)
        self.engine.note_step(self.number)

    def holds(self, blocks, value):
        arrays = [np.asarray(rank.kv_caches.tensors[0].view) for rank in self.world.ranks]
        return all((array[blocks] == value + number).all() for number, array in enumerate(arrays))


def result_of(engine, job):
    (result,) = [done.result for done in engine.wait([job], 10) if done.job_id == job]
    return result


@pytest.fixture
def joined(make_world):
    world = make_world()
    world.config = world.make_config(debug_checks=True)
    for rank in (0, 1):
        world.join(world.rank(rank))
    with world.engine() as engine:
        world.settle()
        engine.begin("a", kv.BlockChain(engine.geometry.groups, tokens(16)))
        yield world, engine, Steps(world, engine)


def test_commands_that_come_steps_later_store_the_right_bytes(delayed, joined):
    _, engine, steps = joined
    steps.run([1, 2], 10)
    job = engine.submit_store("a", kv.GPULoadStoreSpec([1, 2], [2], [0]), "host-visible")
    for later in range(5):  # what the request does next touches other blocks
        steps.run([3 + later], 50)
    assert engine.busy_gpu_blocks([1, 2, 3]) == [1, 2], "nobody else gets them before the late copy has ended"
    delayed()
    assert result_of(engine, job).stored == 2
    steps.run([1, 2], 90)
    job = engine.submit_load("a", kv.GPULoadStoreSpec([20, 21], [2], [0]))
    delayed()
    assert result_of(engine, job).outcome is kv.LoadOutcome.LOADED
    assert steps.holds([20, 21], 10)


def test_store_before_its_step_came_back_is_refused_by_every_rank(joined):
    _, engine, steps = joined
    steps.run([1], 10)
    engine.note_step(2)  # the caller says that step 2 came back, but the ranks have not done it
    broken = result_of(engine, engine.submit_store("a", kv.GPULoadStoreSpec([1], [1], [0]), "host-visible"))
    assert broken.failed == 1
    assert "store only after the step's result came back" in str(broken.error)
    assert engine.match("a").ready_blocks == 0


def test_rank_that_dies_before_its_late_commands_fails_the_job_and_frees_its_blocks(delayed, joined):
    world, engine, steps = joined
    steps.run([1], 10)
    job = engine.submit_store("a", kv.GPULoadStoreSpec([1], [1], [0]), "host-visible")
    world.ranks[1].close()
    until(lambda: world.workers.absent() is not None)
    delayed()
    assert result_of(engine, job).failed == 1
    assert engine.busy_gpu_blocks([1]) == []
    world.join(world.ranks[1])
    until(lambda: (engine.poll(), time.sleep(0.001)) and engine.health().ok)
    steps.run([1], 30)
    job = engine.submit_store("a", kv.GPULoadStoreSpec([1], [1], [0]), "host-visible")
    delayed()
    assert result_of(engine, job).stored == 1
