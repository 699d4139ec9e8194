"""A service publishes what it holds on the feed of its configuration, and closes the feed with itself."""

from __future__ import annotations

import asyncio
import threading

import msgspec
import pytest
import zmq
import zmq.asyncio
from service.harness import BLOCK, Rig, tokens

import kvoffload as kv

FEED = {
    "endpoint": "tcp://127.0.0.1:0",
    "replay_endpoint": None,
    "batch_window_seconds": 0.0,
    "heartbeat_seconds": 0.05,
}


async def _next(subscriber, wanted):
    """Return the next event of a type, whatever comes in between."""
    async with asyncio.timeout(10):
        while True:
            _, _, payload = await subscriber.recv_multipart()
            for event in msgspec.msgpack.decode(payload)[1]:
                if event["type"] == wanted:
                    return event


async def test_stores_evictions_and_closing_reach_a_subscriber():
    threads = threading.active_count()
    rig = Rig(capacity=1, events=FEED)
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.subscribe(b"")
        await check_feed(rig, subscriber)
    assert threading.active_count() <= threads


async def check_feed(rig, subscriber):
    async with rig.service() as service:
        feed = service.events
        subscriber.connect(feed.endpoints[0])
        while not feed.stats().subscribers:
            await asyncio.sleep(0.01)
        async with service.request("a", service.chain(tokens(BLOCK)), gpu_blocks=[0], free=None) as request:
            await request.store(computed_tokens=BLOCK, ready="host-visible")
        stored = await _next(subscriber, "BlockStored")
        assert (stored["medium"], stored["token_ids"], stored["block_size"]) == ("CPU", tokens(BLOCK), BLOCK)
        async with service.request("b", service.chain(tokens(BLOCK, 7)), gpu_blocks=[1], free=None) as request:
            await request.store(computed_tokens=BLOCK, ready="host-visible")
        removed = await _next(subscriber, "BlockRemoved")
        assert removed["block_hashes"] == stored["block_hashes"]
        assert service.engine.metrics_snapshot()["values"]["feed_enabled"] == {"": 1}
        assert service.engine.metrics_snapshot()["values"]["feed_subscribers"] == {"": 1}
    assert (await _next(subscriber, "BlockRemoved"))["medium"] == "CPU", "a closed cache holds nothing"


async def test_taken_port_is_named_at_the_start_and_nothing_is_left():
    taken = zmq.Context.instance().socket(zmq.PUB)
    port = taken.bind_to_random_port("tcp://127.0.0.1")
    rig = Rig(events={**FEED, "endpoint": f"tcp://127.0.0.1:{port}"})
    with pytest.raises(kv.ConfigError, match=str(port)):
        async with rig.service():
            pass
    taken.close()
