"""NVIDIA Dynamo's indexer, unmodified, reads the feed: its answers equal what the publisher announces."""

from __future__ import annotations

import random
import subprocess
import sys
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
import zmq
from consumers import BLOCK, DYNAMO, chain, dynamo, free_port, publisher, remove, store, wait_for

from kvoffload.events.wire import BlockStored, Codec, pack_stamp

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not DYNAMO, reason="KVOFFLOAD_DYNAMO_PYTHON names no Python with ai-dynamo-runtime"),
]
_models = count()


@pytest.fixture(scope="module")
def indexer(tmp_path_factory):
    with dynamo(tmp_path_factory.mktemp("dynamo") / "log") as found:
        yield found


@contextmanager
def registered(indexer, **options):
    """A feed that the indexer follows, under a model name of its own."""
    model = f"model-{next(_models)}"
    with publisher("dynamo", **options) as feed:
        indexer.register(feed, model)
        wait_for(lambda: feed.stats().subscribers == 1)
        yield feed, lambda tokens: indexer.matched(tokens, model)
        indexer.unregister(model)


def cpu_blocks(ask, blocks):
    return lambda: ask(blocks.token_ids)["cpu"] == BLOCK * blocks.num_blocks


def test_store_and_remove_are_followed_block_by_block(indexer):
    with registered(indexer) as (feed, ask):
        a = chain(1, 8)
        store(feed, a)
        wait_for(cpu_blocks(ask, a))
        remove(feed, a, 6)
        wait_for(lambda: ask(a.token_ids)["cpu"] == 6 * BLOCK)
        remove(feed, a, 2, 3)
        wait_for(lambda: ask(a.token_ids)["cpu"] == 2 * BLOCK)
        store(feed, a, 6)  # its parent is there, but an ancestor is not
        store(feed, a, 2, 3)
        wait_for(cpu_blocks(ask, a))


def test_a_block_stored_after_its_parent_was_removed_is_found_when_the_parent_returns(indexer):
    with registered(indexer) as (feed, ask):
        a = chain(1, 5)
        store(feed, a, 0, 4)
        remove(feed, a, 2, 3)
        remove(feed, a, 3, 4)
        store(feed, a, 3, 4)
        store(feed, a, 4, 5)
        wait_for(lambda: ask(a.token_ids)["cpu"] == 2 * BLOCK)
        store(feed, a, 2, 3)
        wait_for(cpu_blocks(ask, a))


def test_an_offloaded_block_of_several_engine_blocks_is_found_in_engine_blocks(indexer):
    with registered(indexer) as (feed, ask):
        a = chain(1, 8, factor=4)
        store(feed, a)
        wait_for(lambda: ask(a.token_ids[: 3 * BLOCK])["cpu"] == 3 * BLOCK)


def test_tiers_are_told_apart_and_cumulate(indexer):
    with registered(indexer) as (feed, ask):
        a = chain(1, 6)
        feed.gpu_stored(a, 0, 2)
        store(feed, a)
        wait_for(lambda: ask(a.token_ids) == {"longest_matched": 96, "gpu": 32, "cpu": 96, "disk": 96})
        feed.gpu_removed(a.block_hashes()[:2])
        wait_for(lambda: ask(a.token_ids)["gpu"] == 0)
        assert ask(a.token_ids)["cpu"] == 96


def test_a_gap_is_recovered_by_replay(indexer):
    with registered(indexer) as (feed, ask):
        a, b, c = chain(1, 4), chain(2, 4), chain(3, 4)
        store(feed, a)
        wait_for(cpu_blocks(ask, a))
        lane = feed.lanes[0]
        send, lane.send = lane.send, lambda batches: None
        store(feed, b)
        remove(feed, a)
        feed.flush()
        lane.send = send
        store(feed, c)
        wait_for(cpu_blocks(ask, c))
        wait_for(cpu_blocks(ask, b))
        assert ask(a.token_ids)["cpu"] == 0


def test_a_lost_tail_is_revealed_by_the_heartbeat(indexer):
    with registered(indexer) as (feed, ask):
        a = chain(1, 4)
        lane = feed.lanes[0]
        send, lane.send = lane.send, lambda batches: None
        store(feed, a)
        feed.flush()
        lane.send = send
        wait_for(cpu_blocks(ask, a))


def test_late_join_after_20_000_numbers_finds_200_of_200_and_no_dead_block(indexer):
    rng = random.Random(1)
    with publisher("dynamo", batch_window_seconds=0.0) as feed:
        live: list[int] = []
        for number in range(20_000):
            if len(live) >= 200:
                remove(feed, chain(live.pop(rng.randrange(len(live))), 1))
            store(feed, chain(number, 1))
            live.append(number)
            if number % 2:
                feed.flush()
        feed.flush()
        first = feed.lanes[0].journal.first
        while feed.lanes[0].journal.next - first < 20_000:
            store(feed, chain(50_000, 1))
            feed.flush()
            remove(feed, chain(50_000, 1))
            feed.flush()
        before = feed.stats().replay_bytes
        indexer.register(feed, "late")
        wait_for(lambda: indexer.matched(chain(live[-1], 1).token_ids, "late")["cpu"] == BLOCK, 20)
        found = sum(indexer.matched(chain(seed, 1).token_ids, "late")["cpu"] == BLOCK for seed in live)
        dead = rng.sample(sorted(set(range(20_000)) - set(live)), 200)
        ghosts = sum(indexer.matched(chain(seed, 1).token_ids, "late")["cpu"] > 0 for seed in dead)
        sent = feed.stats().replay_bytes - before
        indexer.unregister("late")
    print(f"late join: {found} of {len(live)} live, {ghosts} dead, {sent} bytes")
    assert (found, len(live), ghosts) == (200, 200, 0)
    assert sent < 1 << 20


def test_kill_9_and_restart_with_preset_dynamo_is_right_again_without_a_call(indexer):
    ports = (f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}")

    def start(*seeds):
        script = Path(__file__).with_name("feed_process.py")
        process = subprocess.Popen(
            [sys.executable, str(script), "dynamo", *ports, *map(str, seeds)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout.readline() == "ready\n"
        return process

    class Feed:
        endpoints, replay_endpoints = [ports[0]], [ports[1]]

    first = start(1, 2)
    try:
        indexer.register(Feed, "killed")
        wait_for(lambda: indexer.matched(chain(2, 8).token_ids, "killed")["cpu"] == 128)
    finally:
        first.kill()
        first.communicate()
    second = start(2, 3)
    try:
        wait_for(lambda: indexer.matched(chain(3, 8).token_ids, "killed")["cpu"] == 128, 20)
        assert indexer.matched(chain(2, 8).token_ids, "killed")["cpu"] == 128
        assert indexer.matched(chain(1, 8).token_ids, "killed")["cpu"] == 0
    finally:
        second.kill()
        second.communicate()
        indexer.unregister("killed")


def test_reset_of_the_cpu_tier_leaves_the_gpu_tier_alone(indexer):
    with registered(indexer) as (feed, ask):
        a = chain(1, 6)
        feed.gpu_stored(a, 0, 2)
        store(feed, a)
        wait_for(cpu_blocks(ask, a))
        remove(feed, a)
        wait_for(lambda: ask(a.token_ids)["cpu"] == 32)  # what the GPU holds
        assert ask(a.token_ids)["gpu"] == 32


class Engine:
    """An engine's own feed: a bare PUB socket."""

    def __init__(self, context):
        self.sock = context.socket(zmq.PUB)
        self.endpoints = [f"tcp://127.0.0.1:{self.sock.bind_to_random_port('tcp://127.0.0.1')}"]
        self.replay_endpoints = [None]
        self.codec = Codec()
        self.next = 0

    def send(self, *events):
        stamp = pack_stamp(self.next, 1.0)
        self.next += 1
        self.sock.send_multipart([b"kv@pod@m", stamp[:8], self.codec.payload(stamp[8:], events)])

    def stored(self, chain, medium="GPU"):
        names = [self.codec.hash_of(h) for h in chain.block_hashes()]
        self.send(self.codec.stored(BlockStored(names, None, list(chain.token_ids), BLOCK, None, medium, None)))


def test_beside_the_engines_feed_both_tiers_are_merged_and_reannounce_heals_its_clear(indexer):
    model = "merged"
    context = zmq.Context()
    engine = Engine(context)
    try:
        with publisher("dynamo", sole_publisher=False) as feed:
            indexer.register(engine, model, rank=0)
            indexer.register(feed, model, rank=1)  # another slot; its batches carry the worker's rank 0
            wait_for(lambda: feed.stats().subscribers == 1)
            a = chain(1, 6)
            store(feed, a)

            def engine_heard():
                engine.stored(chain(1, 2))
                return indexer.matched(a.token_ids, model)["gpu"] == 32

            wait_for(engine_heard, step=0.2)
            wait_for(lambda: indexer.matched(a.token_ids, model)["cpu"] == 96)
            engine.send(engine.codec.cleared)
            wait_for(lambda: indexer.matched(a.token_ids, model)["cpu"] == 0)
            feed.reannounce()
            wait_for(lambda: indexer.matched(a.token_ids, model)["cpu"] == 96, 1.5)
            assert indexer.matched(a.token_ids, model)["gpu"] == 0
            indexer.unregister(model)
    finally:
        context.destroy(linger=0)
