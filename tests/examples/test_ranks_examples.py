"""The examples with two ranks run as they stand."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from examples.test_embed import lines

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def test_the_stepping_engine_loads_on_both_ranks_what_they_computed():
    root = str(EXAMPLES.parents[1])
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "step_engine.py")], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": root},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = dict(re.findall(r"^(.+): loaded (\d+) tokens, generated", done.stdout, re.MULTILINE))
    assert said == {"first": "0", "first, other": "0", "again": "96", "again, other": "96"}


@pytest.fixture
def embed_ranks(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module("embed_ranks")
    del sys.modules["embed_ranks"]


async def test_the_front_end_over_two_ranks_loads_the_first_turn_and_generates_the_same(embed_ranks):
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app=embed_ranks.app), base_url="http://test")
    async with embed_ranks.lifespan(embed_ranks.app), client:
        body = {"token_ids": list(range(1, 101)), "max_tokens": 20}
        loaded, tokens = lines(await client.post("/generate", json=body))
        assert (loaded, len(tokens)) == (0, 20)
        assert await embed_ranks.app.state.service.drain(10)
        embed_ranks.pool.reverse()  # other GPU blocks: what is right there came from host memory
        loaded, again = lines(await client.post("/generate", json=body))
        assert (loaded, again) == (96, tokens)
        assert await embed_ranks.app.state.service.drain(10)
        assert sorted(embed_ranks.pool) == list(range(embed_ranks.BLOCKS))
