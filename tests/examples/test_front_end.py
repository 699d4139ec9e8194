"""The front end of docs/examples over real HTTP: streams, shared prefixes, clients that disconnect anywhere."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import socket
import sys
import threading
from pathlib import Path

import httpx
import pytest
import uvicorn

from kvoffload.manager.policies.adaptive import AdaptiveCachePolicy

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "front_end.py"


@pytest.fixture(params=["asyncio", "uvloop"])
def server(request):
    """The example's module and the URL where uvicorn serves it, in a thread with a loop of its own."""
    spec = importlib.util.spec_from_file_location("front_end", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["front_end"] = module
    spec.loader.exec_module(module)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(module.app, loop=request.param, log_level="error", timeout_graceful_shutdown=5)
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield module, f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        running.should_exit = True
        thread.join(15)
        listener.close()
        del sys.modules["front_end"]
    assert not thread.is_alive()


def expected(token_ids, max_tokens):
    """What the toy model answers when every byte of its KV data is right."""
    token_ids, answer = list(token_ids), []
    for _ in range(max_tokens):
        total = sum(2 * token * (position % 7 + 1) for position, token in enumerate(token_ids))
        answer.append(total % 9973)
        token_ids.append(answer[-1])
    return answer


async def ready(client):
    while True:
        try:
            response = await client.get("/kvoffload/readyz")
        except httpx.ConnectError:
            response = None
        if response is not None and response.status_code == 200:
            return
        await asyncio.sleep(0.02)


async def ask(client, token_ids, max_tokens, stop_after=None):
    """Stream an answer; disconnect after `stop_after` events."""
    got = []
    async with client.stream("POST", "/generate", json={"token_ids": token_ids, "max_tokens": max_tokens}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                got.append(int(line.removeprefix("data: ")))
            if stop_after is not None and len(got) >= stop_after:
                return got
    return got


async def test_streams_are_right_and_blocks_come_back_though_clients_disconnect_anywhere(server):
    module, url = server
    rng = random.Random(5)
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=url, timeout=30, limits=limits) as client:
        await ready(client)
        prefixes = [[family * 7 + position for position in range(100)] for family in range(4)]

        async def one(index):
            token_ids = rng.choice(prefixes)[: rng.randrange(16, 100)]
            max_tokens = rng.randrange(4, 40)
            stop_after = rng.choice([None, None, 0, 1, 3])
            got = await ask(client, token_ids, max_tokens, stop_after)
            want = expected(token_ids, max_tokens)
            assert got == want[: len(got)]
            assert stop_after is not None or got == want

        await asyncio.gather(*(one(index) for index in range(60)))
        while len(module.allocator.blocks) < module.BLOCKS:
            await asyncio.sleep(0.02)
        assert sorted(module.allocator.blocks) == list(range(module.BLOCKS))
        metrics = (await client.get("/kvoffload/metrics")).text
        hits = [line for line in metrics.splitlines() if line.startswith("kvoffload_hit_tokens_total")]
        assert float(hits[0].split()[-1]) > 0
        state = (await client.get("/kvoffload/state")).json()
        assert (state["health"]["ok"], state["stats"]["requests"], state["jobs"]) == (True, 0, [])
        assert "token" not in json.dumps(state["jobs"])
        assert (await client.get("/kvoffload/livez")).status_code == 200
        assert (await client.post("/kvoffload/admin/reset")).status_code == 404, "only where it was asked for"


async def test_a_token_that_no_chain_takes_is_refused_before_the_stream_begins(server):
    module, url = server
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        await ready(client)
        for token in (-1, 2**32):
            assert (await client.post("/generate", json={"token_ids": [token]})).status_code == 422
        assert len(module.allocator.blocks) == module.BLOCKS


async def test_what_the_front_end_knows_of_an_end_reaches_the_policy(server, monkeypatch):
    outcomes = []
    learn = AdaptiveCachePolicy.on_request_finished

    def listen(policy, keys, context, outcome):
        outcomes.append((outcome.output_tokens, outcome.conversation_ended, outcome.expected_return_seconds))
        learn(policy, keys, context, outcome)

    monkeypatch.setattr(AdaptiveCachePolicy, "on_request_finished", listen)
    _, url = server
    token_ids = list(range(40))
    calls_a_tool = expected(token_ids, 8)[5]
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        await ready(client)
        for extra in ({}, {"closes_session": True}, {"tool_seconds": {calls_a_tool: 3.5}}):
            answer = await client.post("/generate", json={"token_ids": token_ids, "max_tokens": 8, **extra})
            assert answer.text.count("data: ") == (6 if "tool_seconds" in extra else 8)
        metrics = (await client.get("/kvoffload/metrics")).text
    assert outcomes == [(8, False, None), (8, True, None), (6, False, 3.5)]
    assert 'kvoffload_policy_value{engine="0",model_name="toy",name="finished_requests"} 3.0' in metrics
