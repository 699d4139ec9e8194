"""The example of the README runs as it stands."""

import importlib.util
import json
import sys
import threading
from pathlib import Path

import httpx
import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "embed.py"


@pytest.fixture
def embed():
    spec = importlib.util.spec_from_file_location("embed", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["embed"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["embed"]


def lines(response):
    assert response.status_code == 200
    data = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return json.loads(data[0])["loaded_tokens"], [int(token) for token in data[1:]]


async def test_the_second_turn_of_a_chat_loads_the_first_and_generates_the_same(embed):
    prompt = list(range(1, 101))
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app=embed.app), base_url="http://test")
    async with embed.lifespan(embed.app), client:
        body = {"token_ids": prompt, "max_tokens": 40}
        loaded, tokens = lines(await client.post("/generate", json=body))
        assert (loaded, len(tokens)) == (0, 40)
        assert await embed.app.state.service.drain(10)
        for layer in embed.layers.values():
            layer[:] = np.float16(-1)  # what is right now came back from host memory
        loaded, again = lines(await client.post("/generate", json=body))
        assert (loaded, again) == (96, tokens)
        loaded, _ = lines(await client.post("/generate", json={"token_ids": prompt + tokens + [7], "max_tokens": 1}))
        assert loaded == 128
        assert await embed.app.state.service.drain(10)
        assert sorted(embed.pool) == list(range(embed.BLOCKS))


async def test_a_request_whose_load_is_late_computes_into_other_blocks_and_none_is_lost(embed):
    embed.config = embed.config.model_copy(update={"load_deadline_seconds": 0.05})
    body = {"token_ids": list(range(1, 101)), "max_tokens": 4}
    go = threading.Event()
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app=embed.app), base_url="http://test")
    async with embed.lifespan(embed.app), client:
        service = embed.app.state.service
        _, tokens = lines(await client.post("/generate", json=body))
        assert await service.drain(10)
        stream = service.engine.spec._handlers.cpu_to_gpu_handler._stream
        copy = stream._copier
        stream._copier = lambda plan: (go.wait(30), copy(plan))
        loaded, again = lines(await client.post("/generate", json=body))
        assert (loaded, again) == (0, tokens)
        assert len(embed.pool) == embed.BLOCKS - 6, "the copy still holds its blocks"
        go.set()
        assert await service.drain(10)
        assert sorted(embed.pool) == list(range(embed.BLOCKS))


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= 60
