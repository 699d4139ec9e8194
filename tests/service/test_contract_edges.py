"""Sentences of the service's contract at their edges: blocks taken back early, offers of held blocks, late calls."""

from __future__ import annotations

import asyncio

import pytest
from service.harness import CANARY, PAGE, Rig, store_prefix, tokens

from kvoffload.errors import TransferError
from kvoffload.service import checks
from kvoffload.service.results import LoadOutcome


async def turns(count=20):
    for _ in range(count):
        await asyncio.sleep(0)


async def test_load_that_waits_writes_nothing_to_blocks_that_were_taken_back():
    rig = Rig(capacity=16, max_inflight_jobs=1)
    async with rig.service() as service:
        await store_prefix(rig, service, [0, 1], seed=1)
        await store_prefix(rig, service, [2, 3], seed=2)
        rig.freed.clear()
        rig.loads.hold()
        table = [20, 21]
        async with (
            service.request("running", service.chain(tokens(9, 1)), gpu_blocks=[10, 11], free=rig.free) as running,
            service.request("waiting", service.chain(tokens(9, 2)), gpu_blocks=table, free=rig.free) as waiting,
        ):
            first = asyncio.create_task(running.load())
            await turns()
            second = asyncio.create_task(waiting.load())
            await turns()
            taken = table[:]
            table.clear()
            waiting.when_released(taken, rig.free)
            assert rig.freed == [20, 21]
            rig.loads.resume()
            assert (await first).num_tokens == 8
            result = await second
            assert (result.outcome, result.reason) == (LoadOutcome.MISS, "aborted")
            assert all((tensor[20] == CANARY).all() for tensor in rig.gpu)


async def test_offer_of_a_long_held_prefix_is_taken_for_its_new_block_alone():
    rig = Rig(capacity=32, max_inflight_store_bytes=PAGE * 2 * 4)
    async with rig.service() as service:
        await store_prefix(rig, service, [0, 1, 2, 3], seed=1)
        rig.stores.hold()
        async with (
            service.request("other", service.chain(tokens(4, 9)), gpu_blocks=[40], free=rig.free) as other,
            service.request(
                "turn", service.chain(tokens(20, 1)), gpu_blocks=[10, 11, 12, 13, 14], free=rig.free
            ) as turn,
        ):
            in_flight = other.store(computed_tokens=4, ready="host-visible")
            await turns()
            await turn.load()
            job = turn.store(computed_tokens=20, ready="host-visible")
            rig.stores.resume()
            result = await job
            assert (result.stored, result.already_present, result.rejected) == (1, 4, 0)
            assert (await in_flight).stored == 1


@pytest.mark.parametrize("what", ["reset", "discarded"])
async def test_block_that_was_being_written_when_its_content_became_invalid_is_explained(what):
    rig = Rig(capacity=32)
    async with rig.service() as service:
        rig.stores.hold()
        chain = service.chain(tokens(8, 1))
        async with service.request("r", chain, gpu_blocks=[10, 11], free=rig.free) as request:
            job = request.store(computed_tokens=8, ready="host-visible")
            await turns()
            if what == "reset":
                await service.reset_cache()
            else:
                service.discard(chain.keys(0))
            assert [report.state for report in service.explain("r")] == [what, what]
            rig.stores.resume()
            await job
            assert [report.state for report in service.explain("r")] == [what, what]


async def test_block_behind_one_that_is_not_held_is_explained_as_unreachable():
    rig = Rig(capacity=32)
    async with rig.service() as service:
        await store_prefix(rig, service, [0, 1, 2], seed=1)
        chain = service.chain(tokens(13, 1))
        service.discard(chain.keys(0)[:1])
        async with service.request("r", chain, gpu_blocks=[10, 11, 12], free=rig.free) as request:
            assert (await request.load()).num_tokens == 0
            assert [report.state for report in service.explain("r")] == ["discarded", "unreachable", "unreachable"]


async def test_closing_ends_many_waits_over_many_passes_of_the_loop():
    rig = Rig(capacity=32)
    service = rig.service()
    await service.__aenter__()
    await store_prefix(rig, service, [0], seed=1)
    rig.loads.hold()
    requests = [service.request(f"r{i}", service.chain(tokens(5, 1)), gpu_blocks=[10], free=None) for i in range(500)]
    for request in requests:
        await request.__aenter__()
    loads = [asyncio.create_task(request.load()) for request in requests]
    await turns()
    ended, most = 0, 0

    def look() -> None:
        nonlocal ended, most
        now = sum(load.done() for load in loads)
        ended, most = now, max(most, now - ended)
        if now < len(loads):
            service.loop.call_soon(look)

    closing = asyncio.create_task(service.aclose(5))
    look()
    await asyncio.gather(*loads)
    rig.loads.resume()
    await closing
    assert most <= 64


async def test_abort_after_the_end_of_the_service_says_nothing():
    rig = Rig()
    service = rig.service()
    await service.__aenter__()
    request = service.request("r", service.chain(tokens(8)), gpu_blocks=[1, 2], free=rig.free)
    await request.__aenter__()
    await service.aclose(1)
    request.abort()
    await request.__aexit__(None, None, None)
    assert sorted(rig.freed) == [1, 2]


def test_engine_without_a_time_limit_waits_and_closes():
    rig = Rig()
    engine = rig.engine()
    engine.start()
    engine.adopt()
    assert engine.wait([], None) == []
    engine.close(None)
    assert engine.closed


async def test_load_that_breaks_with_the_service_names_its_undefined_blocks_also_as_an_error():
    rig = Rig(capacity=32, fail_open=False)
    async with rig.service() as service:
        await store_prefix(rig, service, [0], seed=1)
        rig.loads.hold()
        async with service.request("r", service.chain(tokens(5, 1)), gpu_blocks=[10], free=rig.free) as request:
            load = asyncio.create_task(request.load())
            await turns()
            service.engine.break_down("a plug-in raised", OSError("broken"))
            with pytest.raises(TransferError) as caught:
                await load
            assert caught.value.undefined_gpu_blocks == (10,)
            rig.loads.resume()


async def test_paint_of_freed_blocks_leaves_out_ids_that_are_no_block(monkeypatch):
    rig = Rig(capacity=8, gpu_blocks=8, debug_checks=True)
    painted = []
    monkeypatch.setattr(checks.ctypes, "memset", lambda address, value, size: painted.append((address, size)))
    async with (
        rig.service() as service,
        service.request("r", service.chain(tokens(8)), gpu_blocks=[1, -1], free=rig.free),
    ):
        pass
    spans = [(tensor.ctypes.data, tensor.ctypes.data + tensor.nbytes) for tensor in rig.gpu]
    assert painted
    assert all(any(low <= address and address + size <= high for low, high in spans) for address, size in painted)
