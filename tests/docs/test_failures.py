"""Every row of docs/failures.md is caused, here or by a test that is named, and does what it says."""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from service.harness import BLOCK, Rig, store_prefix, tokens

import kvoffload as kv

ROOT = Path(__file__).parents[2]
ROWS = re.findall(r"^\| (.+?) \|", (ROOT / "docs" / "failures.md").read_text(), re.MULTILINE)[1:]
MISS, FAILED, UNHEALTHY = kv.LoadOutcome.MISS, kv.LoadOutcome.FAILED, kv.LoadOutcome.UNHEALTHY
ELSEWHERE = {
    "a rank process dies": "test_killed_rank_turns_hits_into_misses_until_it_rejoins_and_then_hits_again",
    "the front end dies": "test_ranks_join_the_next_front_end_when_theirs_was_killed_at_any_stage",
    "a subscriber is slow": "test_a_full_queue_never_blocks_the_caller_and_the_loss_is_seen_and_recovered",
    "the feed's port or path is taken": "test_a_taken_port_is_named_with_the_next_free_pair",
    "`free`, an events sink": "test_free_that_raises_is_logged_with_the_blocks_and_nothing_else_is_lost",
    "host memory cannot be page-locked": "test_registration_that_fails_half_way_leaves_nothing_registered",
}
CASES = {}


def row(start):
    """Say which row a case causes."""

    def remember(case):
        CASES[start] = case
        return case

    return remember


@asynccontextmanager
async def world(**options):
    """A service with two blocks stored from GPU blocks 0 and 1, and a rig to break it with."""
    rig = Rig(**options)
    async with rig.service() as service:
        assert (await store_prefix(rig, service, [0, 1])).stored == 2
        rig.allocate([0, 1])
        try:
            yield rig, service
        finally:
            rig.loads.resume()
            rig.stores.resume()
        assert await service.drain(1.0)
    assert rig.violations == []


def request(rig, service, blocks, *, seed=0, name="r"):
    chain = service.chain(tokens(len(blocks) * BLOCK, seed))
    return service.request(name, chain, gpu_blocks=list(blocks), free=rig.free)


def new(rig, service, blocks=(4, 5), seed=7):
    """A request whose prompt nobody has stored."""
    return request(rig, service, blocks, seed=seed, name=f"new {seed}")


def offer(r):
    return r.store(computed_tokens=r.chain.num_tokens, ready="host-visible")


async def started(call, handler):
    """A task whose copy runs."""
    before = len(handler.submitted)
    task = asyncio.ensure_future(call)
    while len(handler.submitted) == before:
        await asyncio.sleep(0)
    return task


@row("nothing held")
async def _():
    async with world() as (rig, service), new(rig, service) as r:
        loaded = await r.load()
        assert (loaded.outcome, loaded.reason, loaded.undefined_gpu_blocks) == (MISS, None, ())


@row("blocks are being written")
async def _():
    async with world(pending_wait_seconds=5.0) as (rig, service), new(rig, service, (4, 5, 6)) as r:
        rig.stores.hold()
        offer(r)
        async with request(rig, service, (8, 9, 10), seed=7, name="same") as same:
            load = asyncio.ensure_future(same.load())
            await asyncio.sleep(0)
            assert not load.done()
            await asyncio.to_thread(rig.stores.wait_submitted, 2)
            rig.stores.finish_all()
            assert (await load).num_blocks == 2


@row("a copy fails")
async def _():
    async with world() as (rig, service):
        for fail, undefined in ((rig.loads.fail_next, (4,)), (rig.loads.refuse_next, ())):
            fail(OSError("link down"))
            async with request(rig, service, (4, 5)) as r:
                loaded = await r.load()
                assert (loaded.outcome, loaded.reason) == (FAILED, "copy_failed")
                assert loaded.undefined_gpu_blocks == undefined
                assert r.match().ready_blocks == 2
        for fail in (rig.stores.fail_next, rig.stores.refuse_next):
            fail(OSError("link down"))
            async with new(rig, service) as r:
                stored = await offer(r)
                assert (stored.failed, stored.reason, r.match().ready_blocks) == (2, "copy_failed", 0)
        assert sorted(rig.freed) == [4, 4, 4, 4, 5, 5, 5, 5]


@row("a load takes longer than its timeout")
async def _():
    async with world() as (rig, service):
        rig.loads.hold()
        async with request(rig, service, (4, 5)) as r:
            assert (await r.load(timeout=0.01)).reason == "timeout"
        assert (rig.freed, service.stats().manager.pinned) == ([5], 1)
        rig.loads.finish_all()
        await service.drain(1.0)
        assert (rig.freed, service.stats().manager.pinned) == ([5, 4], 0)


@row("a copy hangs past its deadline")
async def _():
    for timeout, reasons in ((None, {"timeout", "deadline"}), (5.0, {"deadline"})):
        async with world(load_deadline_seconds=0.02, store_deadline_seconds=0.02) as (rig, service):
            rig.loads.hold()
            rig.stores.hold()
            async with request(rig, service, (4, 5)) as r, new(rig, service, (8, 9)) as other:
                loaded = await r.load(timeout=timeout)
                assert loaded.reason in reasons
                assert loaded.undefined_gpu_blocks == (4,)
                stored = await offer(other)
                assert (stored.failed, stored.reason) == (2, "deadline")
            stats = service.stats().manager
            assert (stats.detached, stats.quarantined) == (3, 3)
            assert rig.freed == [5]


@row("a copy is hung and another comes")
async def _():
    async with world(load_deadline_seconds=0.02, store_deadline_seconds=0.02) as (rig, service):
        rig.loads.hold()
        rig.stores.hold()
        async with request(rig, service, (4, 5)) as r, new(rig, service, (8, 9)) as other:
            await r.load()
            await offer(other)
        async with new(rig, service, (12, 13), seed=8) as late:
            assert ((await late.load()).reason, (await offer(late)).reason) == ("deadline", "deadline")
        assert rig.freed[-2:] == [12, 13]


@row("no room in the pool")
async def _():
    async with world(capacity=3) as (rig, service), request(rig, service, (4, 5)) as r, r.lease():
        async with new(rig, service, (8, 9)) as other:
            stored = await offer(other)
            assert (stored.stored, stored.rejected, stored.reason) == (1, 1, "no_space")
        assert rig.freed == [8, 9]


@row("too many bytes in flight")
async def _():
    async with world(max_inflight_load_bytes=1, max_inflight_store_bytes=1) as (rig, service):
        rig.loads.hold()
        rig.stores.hold()
        async with request(rig, service, (4, 5)) as r, new(rig, service, (8, 9)) as other:
            load, store = await started(r.load(), rig.loads), offer(other)
            async with request(rig, service, (12, 13), name="late") as late, new(rig, service, (6, 7), 9) as more:
                assert (await late.load(timeout=0.01)).reason == "backpressure"
                assert (await offer(more)).reason == "backpressure"
            rig.loads.resume()
            rig.stores.resume()
            assert ((await load).num_blocks, (await store).stored) == (1, 2)


@row("a lease is held longer")
async def _():
    async with world(lease_seconds=0.01) as (rig, service), request(rig, service, (4, 5)) as r, r.lease() as lease:
        while service.stats().manager.pinned:
            await asyncio.sleep(0.005)
        loaded = await lease.load(kv.GPULoadStoreSpec([4], [1], [0]))
        assert (loaded.outcome, loaded.reason) == (MISS, "expired")


@row("stores are paused")
async def _():
    async with world() as (rig, service), request(rig, service, (4, 5)) as r, new(rig, service, (8, 9)) as other:
        service.pause_stores()
        assert (await offer(other)).reason == "paused"
        assert (await r.load()).num_blocks == 1


@row("the client disconnects")
async def _():
    async with world() as (rig, service):
        rig.loads.hold()

        async def handler():
            async with request(rig, service, (4, 5)) as r:
                await r.load()

        task = await started(handler(), rig.loads)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert rig.freed == [5]
        rig.loads.finish_all()
        await service.drain(1.0)
        assert rig.freed == [5, 4]


@row("`abort(request_id)`")
async def _():
    async with world() as (rig, service):
        rig.loads.hold()
        async with request(rig, service, (4, 5)) as r, new(rig, service, (8, 9)) as other:
            load, store = await started(r.load(), rig.loads), offer(other)
            assert (service.abort("r"), service.abort("new 7")) == (True, True)
            assert ((await load).reason, (await store).reason) == ("aborted", "aborted")
            assert rig.stores.submitted[1:] == []


@row("`reset_cache()`")
async def _():
    async with world() as (rig, service):
        rig.loads.hold()
        rig.stores.hold()
        async with request(rig, service, (4, 5)) as r, new(rig, service, (8, 9)) as other:
            store, load = offer(other), await started(r.load(), rig.loads)
            while not rig.stores.pending_jobs():
                await asyncio.sleep(0)
            await service.reset_cache()
            assert service.stats().manager.ready == 0
            assert service.engine.busy_gpu_blocks([4, 5, 8, 9]) == [4, 8, 9]
            rig.loads.resume()
            rig.stores.resume()
            assert ((await load).reason, (await load).outcome, (await store).reason) == ("reset", FAILED, "reset")


@row("switched off")
async def _():
    async with world() as (rig, service), request(rig, service, (4, 5)) as r:
        service.enabled = False
        assert ((await r.load()).reason, (await offer(r)).reason) == ("disabled", "disabled")
        assert service.stats().manager.ready == 0


@row("a handler or the completion path breaks")
async def _():
    async with world() as (rig, service):
        rig.loads.hold()
        async with request(rig, service, (4, 5)) as r:
            load = await started(r.load(), rig.loads)
            service.engine.break_down("a test", OSError("device lost"))
            assert isinstance((await load).error, OSError)
            assert ((await r.load()).outcome, (await offer(r)).reason) == (UNHEALTHY, "unhealthy")
        assert rig.freed == [5]


@row("closing while copies run")
async def _():
    rig = Rig()
    service = rig.service()
    await service.__aenter__()
    rig.stores.hold()
    async with new(rig, service) as r:
        job = offer(r)
        await started(job._result(), rig.stores)
        with pytest.raises(kv.UndrainedCopies) as caught:
            await service.aclose(0.0)
        assert caught.value.jobs == (job.id,)
    assert rig.freed == []
    rig.stores.finish_all()


@row("too little memory")
async def _():
    caches = kv.CanonicalKVCaches.from_layers({"layer": Rig().gpu[0]}, block_dim=0)
    service = kv.OffloadService(kv.OffloadConfig(cpu_bytes_to_use="1000TiB", gpu_block_size=4), caches)
    with pytest.raises(kv.NoSpaceError) as caught:
        async with service:
            pass
    assert caught.value.requested_bytes > caught.value.available_bytes > 0


@pytest.mark.parametrize("start", CASES)
async def test_a_row_says_what_happens(start):
    await CASES[start]()


def test_every_row_is_caused():
    starts = (*CASES, *ELSEWHERE)
    assert [text for text in ROWS if sum(text.startswith(start) for start in starts) != 1] == []
    tests = {
        name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert set(ELSEWHERE.values()) <= tests
