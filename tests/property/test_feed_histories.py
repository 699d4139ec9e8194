"""Random histories of a publisher: after quiescence every model consumer equals the announced set."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("feed_world", Path(__file__).with_name("feed_world.py"))
assert _spec is not None
assert _spec.loader is not None
feed_world = importlib.util.module_from_spec(_spec)
sys.modules["feed_world"] = feed_world
_spec.loader.exec_module(feed_world)

HISTORIES = 4800
CHUNK = 300


def run_history(seed: int) -> None:
    rng = random.Random(seed)
    world = feed_world.World(rng)
    for _ in range(rng.randint(5, 60)):
        world.step()
    world.quiesce()
    announced = world.journal.announced()
    assert world.expected_minimum() <= announced <= world.expected_maximum(), f"seed {seed}: announced set is wrong"
    for consumer in world.consumers:
        held = consumer.held()
        assert held == announced, f"seed {seed}, {consumer.name}: ghosts {held - announced}, missing {announced - held}"
        if consumer.counts:
            assert set(consumer.index.values()) <= {1}, f"seed {seed}, {consumer.name}: counted twice"


@pytest.mark.parametrize("start", range(0, HISTORIES, CHUNK))
def test_every_model_consumer_equals_the_described_set_after_quiescence(start):
    for seed in range(start, start + CHUNK):
        run_history(seed)
