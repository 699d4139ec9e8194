"""Each cause of a hit rate of 0 is made, and what `explain` says of it is a row of docs/guides/hit-rate-zero.md."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path

import numpy as np
import pytest

import kvoffload as kv

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "hit-rate-zero.md"
ROWS = re.findall(r"^\| (.*?) \| (.*?) ?\| (.*?) \|$", PAGE.read_text(), re.MULTILINE)[1:]
BLOCK, PROMPT, OTHER = 4, list(range(16)), list(range(100, 116))


def advice(found, state):
    """What the guide says where `explain` shows this; the row that names the state, where one does."""
    name = f"`{found}`" if found else "None"
    rows = [row for row in ROWS if (name in row[0] or "any" in row[0].split()) and row[1] in ("", f"`{state}`")]
    rows = [row for row in rows if row[1]] or rows
    assert len(rows) == 1, (found, state, rows)
    return rows[0][2]


def make(blocks=64, **options):
    caches = kv.CanonicalKVCaches.from_layers({"layer": np.zeros((32, 64), np.int8)}, block_dim=0)
    config = kv.OffloadConfig(cpu_bytes_to_use=64 * blocks, gpu_block_size=BLOCK, **options)
    return kv.OffloadService(config, caches)


async def turn(service, name, token_ids=PROMPT, *, store=True, ready="host-visible", table=(0, 1, 2, 3), **chain):
    async with service.request(name, service.chain(token_ids, **chain), gpu_blocks=list(table), free=None) as request:
        loaded = await request.load()
        if store:
            await request.store(computed_tokens=len(token_ids), ready=ready)
    return loaded


async def never_stored(service):
    await turn(service, "first", store=False)


async def not_of_this_request(service):
    await turn(service, kv.ReqContext("first", store=False))


async def under_another_salt(service):
    await turn(service, "first", cache_salt="other")


async def behind_a_timestamp(service):
    await turn(service, "first", [9, *PROMPT[:-1]])


async def evicted(service):
    await turn(service, "first")
    await turn(service, "other", OTHER)


async def once(service):
    await turn(service, "first")


async def paused(service):
    service.pause_stores()
    await turn(service, "first")
    service.pause_stores(False)


async def failed(service):
    class Broken:
        def wait(self, timeout):
            raise OSError("device lost")

    await turn(service, "first", ready=Broken())


async def reset(service):
    await turn(service, "first")
    await service.reset_cache()


async def discarded(service):
    await turn(service, "first")
    service.discard(service.chain(PROMPT).keys(0))


CAUSES = [
    (never_stored, {}, False, "new", "never offered", "`store` is not called"),
    (not_of_this_request, {}, False, "new", "never offered", "`ReqContext(store=False)`"),
    (under_another_salt, {}, True, "new", "ready", "A salt"),
    (behind_a_timestamp, {}, True, "new", "ready", "a timestamp in front"),
    (evicted, {"blocks": 4}, False, "evicted", "evicted", "Too little memory"),
    (once, {"store_threshold": 3}, True, "filtered", "filtered", "`store_threshold`"),
    (paused, {}, True, "rejected", "ready", "stores paused"),
    (failed, {}, True, "failed", "ready", "A copy failed"),
    (reset, {}, True, "reset", "ready", "`reset_cache`"),
    (discarded, {}, True, "discarded", "ready", "`discard`"),
]


@pytest.mark.parametrize(
    ("cause", "options", "store", "found", "state", "says"), CAUSES, ids=lambda v: getattr(v, "__name__", "")
)
async def test_the_cause_of_a_miss_is_named_and_the_guide_knows_it(cause, options, store, found, state, says):
    async with make(**options) as service:
        await cause(service)
        assert (await turn(service, "again", store=store)).num_tokens == 0
        first = service.explain("again")[0]
        assert (first.found, first.state) == (found, state)
        assert says in advice(found, state)
        counted = service.metrics.render()[0].decode()
        assert re.search(rf'^kvoffload_miss_blocks_total{{cause="{found}",.*}} [1-9]', counted, re.MULTILINE)


async def test_a_prompt_shorter_than_a_block_has_no_blocks_to_explain():
    async with make(block_size=8 * BLOCK) as service:
        await turn(service, "first")
        assert (await turn(service, "again")).num_tokens == 0
        assert service.explain("again") == []
    assert ("no blocks at all", "") in {row[:2] for row in ROWS}


async def test_a_block_behind_a_gap_is_unreachable():
    async with make() as service:
        await turn(service, "first")
        service.discard(service.chain(PROMPT).keys(0)[:1])
        assert (await turn(service, "again", store=False)).num_tokens == 0
        assert [block.found for block in service.explain("again")][1:] == ["unreachable"] * 3
    assert "first gap" in advice("unreachable", "unreachable")


async def test_a_block_that_is_being_written_is_pending():
    written = threading.Event()
    async with make(pending_wait_seconds=0.0) as service:
        storing = asyncio.ensure_future(turn(service, "first", ready=written))
        while not service.engine.unreleased_jobs():
            await asyncio.sleep(0)
        assert (await turn(service, "again", store=False)).num_tokens == 0
        assert service.explain("again")[0].found == "pending"
        written.set()
        await storing
    assert "`pending_wait_seconds`" in advice("pending", "pending")


@pytest.mark.parametrize(("tokens", "table"), [(PROMPT, ()), (PROMPT[:BLOCK], (0,))], ids=["empty table", "one block"])
async def test_held_blocks_that_are_not_loaded_are_ready(tokens, table):
    async with make() as service:
        await turn(service, "first")
        assert (await turn(service, "again", tokens, store=False, table=table)).num_tokens == 0
        assert service.explain("again")[0].found == "ready"
    assert "`leave_tokens`" in advice("ready", "ready")


@pytest.mark.parametrize("looked", [False, True])
async def test_blocks_of_a_sick_service_are_unserved(looked, caplog):
    async with make() as service:
        await turn(service, "first")
        if looked:
            await turn(service, "again", store=False)
        service.engine.break_down("a test", OSError("device lost"))
        name = "again" if looked else "late"
        if not looked:
            assert (await turn(service, name, store=False)).outcome is kv.LoadOutcome.UNHEALTHY
        block = service.explain(name)[0]
        assert (block.found, block.state) == ("ready" if looked else None, "unserved")
        assert "`service.health()`" in advice(block.found, block.state)


async def test_a_load_that_was_refused_has_found_nothing():
    async with make(enabled=False) as service:
        assert (await turn(service, "first", store=False)).reason == "disabled"
        block = service.explain("first")[0]
        assert "`disabled`" in advice(block.found, block.state)
