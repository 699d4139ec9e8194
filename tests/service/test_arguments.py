"""What a confused caller passes: a typed error at the door, and nothing has changed."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from service.harness import BLOCK, Rig, check_books, store_prefix, tokens

import kvoffload as kv

TABLE = [0, 1, 2, 3]


@pytest.mark.parametrize(
    "table", [np.arange(4), {0, 1, 2, 3}, iter(TABLE), "0123", None, [[0, 1], [2, 3]]], ids=lambda t: type(t).__name__
)
async def test_block_table_of_a_wrong_kind_is_refused_on_entering(table):
    rig = Rig()
    async with rig.service() as service:
        chain = service.chain(tokens(4 * BLOCK))
        with pytest.raises(kv.UsageError, match="block table"):
            async with service.request("r", chain, gpu_blocks=table, free=rig.free):
                pass
        async with service.request("r", chain, gpu_blocks=TABLE, free=rig.free):
            pass  # the id was not taken
        check_books(rig.spec.cpu_manager)


@pytest.mark.parametrize("wrong", [{"context": None}, {"context": 5}, {"chain": [1, 2]}, {"free": 5}], ids=str)
async def test_request_made_of_wrong_parts_is_refused(wrong):
    rig = Rig()
    async with rig.service() as service:
        parts = {
            "context": "r",
            "chain": service.chain(tokens(4 * BLOCK)),
            "gpu_blocks": TABLE,
            "free": rig.free,
            **wrong,
        }
        with pytest.raises(kv.UsageError):
            service.request(parts.pop("context"), parts.pop("chain"), **parts)


@pytest.mark.parametrize(
    "ready",
    [None, True, "ready", threading.Event, asyncio.Event(), object()],
    ids=["None", "bool", "word", "class", "asyncio event", "object"],
)
async def test_event_that_cannot_be_waited_for_is_refused_in_both_directions(ready):
    rig = Rig()
    async with rig.service() as service:
        async with service.request(
            "r", service.chain(tokens(4 * BLOCK)), gpu_blocks=list(TABLE), free=rig.free
        ) as request:
            with pytest.raises(kv.UsageError, match="ready must be"):
                request.store(computed_tokens=4 * BLOCK, ready=ready)
            assert (await request.store(computed_tokens=4 * BLOCK, ready="host-visible")).stored == 4
            with pytest.raises(kv.UsageError, match="after must be"):
                await request.load(after=ready)
            async with request.lease() as lease:
                with pytest.raises(kv.UsageError, match="after must be"):
                    await lease.load(kv.GPULoadStoreSpec([0], [1], [0]), after=ready)
        check_books(rig.spec.cpu_manager)


async def test_counts_are_whole_numbers_of_any_library():
    rig = Rig()
    async with rig.service() as service:
        async with service.request(
            "r", service.chain(tokens(4 * BLOCK)), gpu_blocks=list(TABLE), free=rig.free
        ) as request:
            for wrong in (4.0 * BLOCK, "8", None, -1):
                with pytest.raises(kv.UsageError, match="computed_tokens"):
                    request.store(computed_tokens=wrong, ready="host-visible")
                with pytest.raises(kv.UsageError, match="first_block"):
                    await request.load(first_block=wrong)
                with pytest.raises(kv.UsageError, match="leave_tokens"):
                    await request.load(leave_tokens=wrong)
            stored = await request.store(computed_tokens=np.int64(4 * BLOCK), ready="host-visible")
            assert stored == kv.StoreResult(stored=4)
            assert type(stored.already_present) is int
            assert (await request.load(first_block=np.int32(1), leave_tokens=np.int8(1))).num_blocks == 2
        check_books(rig.spec.cpu_manager)


async def test_store_of_two_blocks_from_one_gpu_block_is_refused_and_may_be_made_good():
    rig = Rig()
    async with rig.service() as service:
        table = [0, 0, 2, 3]
        async with service.request("r", service.chain(tokens(4 * BLOCK)), gpu_blocks=table, free=rig.free) as request:
            with pytest.raises(kv.UsageError, match="named twice"):
                request.store(computed_tokens=4 * BLOCK, ready="host-visible")
            with pytest.raises(kv.UsageError, match="named twice"):
                request.store_blocks(kv.GPULoadStoreSpec([5, 5], [2], [0]), ready="host-visible")
            table[1] = 1
            assert (await request.store(computed_tokens=4 * BLOCK, ready="host-visible")).stored == 4
        check_books(rig.spec.cpu_manager)


@pytest.mark.parametrize(
    "wrong",
    [
        {"output_tokens": "x"},
        {"output_tokens": -1},
        {"expected_return_seconds": "soon"},
        {"expected_return_seconds": float("nan")},
    ],
    ids=str,
)
async def test_wrong_hint_of_one_request_does_not_end_the_service_for_all(wrong):
    rig = Rig(policy="adaptive")
    async with rig.service() as service:
        async with service.request("r", service.chain(tokens(8)), gpu_blocks=[0, 1], free=rig.free) as request:
            with pytest.raises(kv.UsageError, match=next(iter(wrong))):
                request.finished(**wrong)
        assert service.health().ok


@pytest.mark.parametrize("wrong", [{"priority": "high"}, {"priority": None}, {"started_seconds": "now"}], ids=str)
async def test_context_with_a_wrong_value_is_refused(wrong):
    rig = Rig(policy="adaptive")
    async with rig.service() as service:
        with pytest.raises(kv.UsageError, match=next(iter(wrong))):
            service.request(kv.ReqContext("r", **wrong), service.chain(tokens(8)), gpu_blocks=[0, 1], free=None)
        with pytest.raises(kv.UsageError, match=next(iter(wrong))):
            service.engine.begin(kv.ReqContext("r", **wrong), service.chain(tokens(8)))
        assert service.health().ok


def test_discarding_what_is_no_key_changes_nothing():
    with Rig().engine() as engine:
        for wrong in ("abc", [None], [5], None):
            with pytest.raises(kv.UsageError, match="keys must be"):
                engine.discard(wrong)
        assert engine.health().ok


@pytest.mark.parametrize("timeout", [float("nan"), "5", 10**400])
async def test_a_timeout_that_is_no_number_of_seconds_is_refused_by_every_call_that_waits(timeout):
    rig = Rig()
    service = rig.service()
    async with service:
        async with service.request("r", service.chain(tokens(BLOCK)), gpu_blocks=[0], free=rig.free) as request:
            with pytest.raises(kv.UsageError, match="timeout must be a number"):
                await request.load(timeout=timeout)
            with pytest.raises(kv.UsageError, match="timeout must be a number"):
                async with request.lease(timeout=timeout):
                    pass
        with pytest.raises(kv.UsageError, match="timeout must be a number"):
            await service.drain(timeout)
        with pytest.raises(kv.UsageError, match="timeout must be a number"):
            await service.aclose(timeout)
        assert service.is_open, "a refused close has closed nothing"
    rig.check(freed=[0])


def test_a_stepping_engine_refuses_a_timeout_that_is_no_number_and_stays_open():
    with Rig().engine() as engine:
        for call in (lambda: engine.wait([], "5"), lambda: engine.close(float("nan"))):
            with pytest.raises(kv.UsageError, match="timeout must be a number"):
                call()
        assert engine.poll() == []


async def test_a_free_that_would_have_to_be_awaited_is_refused_before_it_loses_blocks():
    rig = Rig()

    async def free(blocks):
        rig.free(blocks)

    async with rig.service() as service:
        chain = service.chain(tokens(BLOCK))
        with pytest.raises(kv.UsageError, match="plain function"):
            service.request("r", chain, gpu_blocks=[0], free=free)
        async with service.request("r", chain, gpu_blocks=[0], free=rig.free) as request:
            for callback in (free, None):
                with pytest.raises(kv.UsageError, match="callback"):
                    request.when_released([0], callback)
    rig.check(freed=[0])


async def test_a_block_table_of_things_that_are_no_numbers_is_refused_by_load_and_store():
    rig = Rig()
    async with rig.service() as service:
        chain = service.chain(tokens(BLOCK + 1))
        async with service.request("r", chain, gpu_blocks=[None], free=None) as request:
            with pytest.raises(kv.UsageError, match="whole numbers"):
                await request.load()
            with pytest.raises(kv.UsageError, match="whole numbers"):
                request.store(computed_tokens=BLOCK, ready="host-visible")
    rig.check()


async def test_a_lease_that_is_entered_twice_is_refused_and_pins_once():
    rig = Rig()
    async with rig.service() as service:
        await store_prefix(rig, service, [0, 1])
        chain = service.chain(tokens(2 * BLOCK))
        async with service.request("r", chain, gpu_blocks=[0, 1], free=rig.free) as request:
            lease = request.lease()
            async with lease:
                with pytest.raises(kv.UsageError, match="entered once"):
                    async with lease:
                        pass
            assert (service.engine.pins(), service.stats().leases) == ({}, 0)


async def test_pausing_stores_takes_only_a_bool():
    async with Rig().service() as service:
        with pytest.raises(kv.UsageError, match="paused must be True or False"):
            service.pause_stores("no")


def test_a_service_of_things_of_another_kind_is_refused_when_it_is_made():
    rig = Rig()
    with pytest.raises(kv.UsageError, match="config must be an OffloadConfig"):
        kv.OffloadService({"gpu_block_size": 4}, rig.kv_caches)
    with pytest.raises(kv.UsageError, match="from_layers"):
        kv.OffloadService(rig.config, rig.gpu)
