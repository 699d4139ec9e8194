"""What is exported obeys the conservation laws after every step of the manager."""

import random

import numpy as np
import pytest

from kvoffload.keys import make_offload_key
from kvoffload.manager.base import ManagerStats, ReqContext
from kvoffload.manager.cpu import CPUOffloadingManager
from kvoffload.manager.reuse_filter import FilterReusedOffloadingManager
from kvoffload.metrics.catalog import BY_NAME
from kvoffload.metrics.manager_view import manager_values

CONTEXT = ReqContext()


def keys(*numbers):
    return [make_offload_key(bytes([number]) * 32, 0) for number in numbers]


def check(values):
    """The laws, on exported numbers alone."""
    blocks, looked_up = values["cache_blocks"], values["lookups"]
    stores, removed = values["manager_store_blocks"], values["removed_blocks"]
    assert sum(blocks.values()) == values["cache_capacity_blocks"][""]
    assert min(blocks.values()) >= 0
    assert stores["stored"] - sum(removed.values()) == blocks["ready"] + blocks["pinned"]
    assert values["evicted_unused_blocks"][""] <= removed["evicted"]
    for name, numbers in values.items():
        assert name == "policy_value" or set(numbers) == set(BY_NAME[name].values), name
        assert all(number >= 0 for number in numbers.values()), name
    return sum(looked_up.values())


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("threshold", [0, 2])
def test_exported_values_obey_the_conservation_laws_after_every_step(policy, threshold):
    rng = random.Random(f"{policy}{threshold}")
    inner = CPUOffloadingManager(6, policy, enable_events=True)
    manager = FilterReusedOffloadingManager(inner, threshold) if threshold else inner
    stores, loads, looked_up, before = [], [], 0, manager_values(manager.stats())
    for _ in range(4000):
        some = keys(*{rng.randrange(12) for _ in range(rng.randrange(1, 4))})
        action = rng.randrange(9)
        if action == 0:
            out = manager.prepare_store(some, CONTEXT)
            if out is not None and out.ticket is not None:
                stores.append((out.keys_to_store, out.ticket))
        elif action == 1 and stores:
            done, ticket = stores.pop(rng.randrange(len(stores)))
            manager.complete_store(done, rng.random() < 0.8, ticket=ticket)
        elif action == 2:
            ready = [key for key in some if manager.match([key]).ready]
            if ready:
                loads.append((ready, manager.prepare_load(ready, CONTEXT).ticket))
        elif action == 3 and loads:
            done, ticket = loads.pop(rng.randrange(len(loads)))
            manager.complete_load(done, ticket=ticket)
        elif action == 4:
            for key in some:
                manager.lookup(key, CONTEXT)
            looked_up += len(some)
        elif action == 5:
            manager.discard(some)
        elif action == 6 and stores and rng.random() < 0.5:
            manager.abandon(rng.choice(stores)[1], copy_running=True, hung=rng.random() < 0.5)
        elif action == 7 and rng.random() < 0.1:
            manager.reset_cache()
        else:
            manager.touch(some)
        values = manager_values(manager.stats())
        assert check(values) == looked_up
        for name, numbers in values.items():  # counters never fall
            if name in BY_NAME and BY_NAME[name].kind == "counter":
                assert all(number >= before[name][label] for label, number in numbers.items()), name
        before = values
    assert all(before["removed_blocks"].values())
    assert before["manager_store_blocks"]["abandoned"]


def test_usage_returns_to_zero_and_never_leaves_0_to_1():
    """A-P3."""
    manager = CPUOffloadingManager(4, "lru")

    def usage(state):
        values = manager_values(manager.stats())
        check(values)
        share = values["cache_blocks"][state] / values["cache_capacity_blocks"][""]
        stats = manager.stats()
        for ratio in (stats.usage, stats.write_usage, stats.read_usage):
            assert 0.0 <= ratio <= 1.0
        return share

    out = manager.prepare_store(keys(1, 2), CONTEXT)
    assert usage("writing") == 0.5
    manager.complete_store(keys(1), True, ticket=out.ticket)
    manager.complete_store(keys(2), False, ticket=out.ticket)
    assert (usage("writing"), usage("ready")) == (0.0, 0.25)
    ticket = manager.prepare_load(keys(1), CONTEXT).ticket
    assert (usage("pinned"), usage("ready")) == (0.25, 0.0)
    manager.complete_load(keys(1), ticket=ticket)
    assert usage("pinned") == 0.0
    manager.reset_cache()
    assert usage("free") == 1.0
    assert CPUOffloadingManager(0, "lru").stats().usage == 0.0


def test_policy_figures_are_bounded_and_finite():
    stats = ManagerStats(policy={f"figure_{number}": float(number) for number in range(100)} | {"bad": float("nan")})
    figures = manager_values(stats)["policy_value"]
    assert len(figures) == 32
    assert "bad" not in figures


def test_policy_figures_that_are_no_numbers_or_names_that_do_not_encode_spoil_no_scrape():
    policy = {"none": None, "text": "x", "array": np.zeros(2), "huge": 10**400, 5: 1.0, "\ud800": 2.0, "good": 3}
    assert manager_values(ManagerStats(policy=policy))["policy_value"] == {"5": 1.0, "?": 2.0, "good": 3}
