"""vllm-router with `--policy kv_aware`, unmodified, routes by the feed.

Seen: the topic frame must equal the configured one (empty for static sources), and a replay ends at its first hole.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from consumers import ROUTER, Worker, chain, free_port, publisher, remove, router, store, wait_for

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not ROUTER, reason="KVOFFLOAD_VLLM_ROUTER_PYTHON names no Python with vllm-router"),
]


@contextmanager
def two_workers(tmp_path, **options):
    """Two stub workers with a feed each, and the router before them; yields feeds and where(chain) -> 0 or 1."""
    with (
        Worker() as one,
        Worker() as two,
        publisher("vllm-router", **options) as first,
        publisher("vllm-router", **options) as second,
        router(tmp_path / "log", (one, two), (first, second)) as running,
    ):
        wait_for(lambda: first.stats().subscribers and second.stats().subscribers)
        yield first, second, lambda blocks: {one.port: 0, two.port: 1}[running.route(blocks.token_ids)]


def test_it_routes_to_the_worker_that_holds_the_prefix_in_its_cpu_tier_and_follows_removal(tmp_path):
    with two_workers(tmp_path) as (first, second, where):
        a, b = chain(1, 8), chain(2, 8)
        store(first, a)
        store(second, b)
        wait_for(lambda: (where(a), where(b)) == (0, 1))
        assert [where(a) for _ in range(4)] == [0] * 4
        assert [where(b) for _ in range(4)] == [1] * 4
        remove(first, a)
        store(second, a)
        remove(second, b)
        store(first, b)
        wait_for(lambda: (where(a), where(b)) == (1, 0))
        assert [where(a) for _ in range(4)] == [1] * 4


def test_it_survives_10_000_events_without_a_wipe(tmp_path):
    with two_workers(tmp_path) as (first, second, where):
        a, b = chain(1, 8), chain(2, 8)
        store(first, a)
        store(second, b)
        wait_for(lambda: (where(a), where(b)) == (0, 1))
        for number in range(2500):
            for feed in (first, second):
                store(feed, chain(10 + number, 1))
                remove(feed, chain(10 + number, 1))
            if number % 100 == 0:
                first.flush()
                second.flush()
        last = chain(9000, 4)
        store(first, last)
        wait_for(lambda: where(last) == 0)
        assert [where(a), where(b)] * 3 == [0, 1] * 3
        assert first.stats().published_events + second.stats().published_events > 10_000


def test_a_router_that_starts_late_knows_what_was_stored_before(tmp_path):
    with (
        Worker() as one,
        Worker() as two,
        publisher("vllm-router") as first,
        publisher("vllm-router") as second,
    ):
        chains = [chain(seed, 4) for seed in range(1, 7)]
        for seed, blocks in enumerate(chains):
            store(first if seed % 2 else second, blocks)
        first.flush()
        second.flush()
        with router(tmp_path / "log", (one, two), (first, second)) as running:
            ports = {one.port: 1, two.port: 0}
            wait_for(lambda: [ports[running.route(c.token_ids)] for c in chains] == [0, 1] * 3)


def lose_3_000_numbers(feed, gone, come):
    """Publish a removal and a store far apart in numbers, none of which is sent live."""
    lane = feed.lanes[0]
    send, lane.send = lane.send, lambda batches: None
    for change, blocks in ((remove, gone), (store, come)):
        change(feed, blocks)
        assert feed.flush()
        with lane.lock:
            for _ in range(1500):
                lane.journal.seal(empty=True)
            lane.journal.take_sealed()
    lane.send = send


def test_a_gap_of_3_000_numbers_is_recovered_by_a_strict_replay(tmp_path):
    with two_workers(tmp_path) as (first, second, where):
        a, b, c = chain(1, 4), chain(2, 4), chain(3, 4)
        store(first, a)
        store(second, b)
        wait_for(lambda: (where(a), where(b)) == (0, 1))
        sent = first.stats().replay_messages
        lose_3_000_numbers(first, a, c)
        store(second, a)
        wait_for(lambda: (where(a), where(b), where(c)) == (1, 1, 0))
        assert first.stats().replay_messages - sent > 3000


def test_holes_in_a_relaxed_replay_end_it_so_the_preset_is_strict(tmp_path):
    """Recorded: vllm-router 0.1.17 stops reading a replay at the first hole."""
    with two_workers(tmp_path, contiguity="relaxed") as (first, _, where):
        a, c = chain(1, 4), chain(3, 4)
        store(first, a)
        wait_for(lambda: where(a) == 0)
        lose_3_000_numbers(first, a, c)
        wait_for(lambda: "noncontiguous seq" in (tmp_path / "log").read_text())


def test_kill_9_and_restart_of_the_publisher_is_right_again_without_a_call(tmp_path):
    ports = (f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}")

    class Feed:
        endpoints, replay_endpoints = [ports[0]], [ports[1]]

    def start(*seeds):
        script = Path(__file__).with_name("feed_process.py")
        process = subprocess.Popen(
            [sys.executable, str(script), "vllm-router", *ports, *map(str, seeds)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout.readline() == "ready\n"
        return process

    def stop(process):
        process.kill()
        process.communicate()

    with Worker() as one, Worker() as two, publisher("vllm-router") as second:
        running_process = start(1, 2)
        try:
            with router(tmp_path / "log", (one, two), (Feed, second)) as running:

                def where(seed):
                    return {one.port: 0, two.port: 1}[running.route(chain(seed, 8).token_ids)]

                store(second, chain(4, 8))
                wait_for(lambda: [where(seed) for seed in (1, 2, 4)] == [0, 0, 1])
                stop(running_process)
                store(second, chain(1, 4))  # half of it: only better when the first worker lost its blocks
                running_process = start(2, 3)
                wait_for(lambda: [where(seed) for seed in (1, 2, 3, 4)] == [1, 0, 0, 1], 20)
        finally:
            stop(running_process)
