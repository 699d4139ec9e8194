"""`debug_checks=True`: canaries on freed GPU blocks, sampled checksums, and the books after each poll."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from service.harness import Rig, store_prefix, tokens

import kvoffload as kv
from kvoffload.service import checks
from kvoffload.service.checks import PAINT


@pytest.fixture(autouse=True)
def _every_key(monkeypatch):
    monkeypatch.setattr(checks, "SAMPLE", 1)


class Unpainted(Rig):
    """A rig whose own paint does not cover the service's."""

    def free(self, blocks):
        self.freed.extend(blocks)


async def test_plain_use_violates_nothing(caplog):
    rig = Unpainted(debug_checks=True, factor=2)
    async with rig.service() as service:
        assert (await store_prefix(rig, service, [0, 1, 2, 3])).stored == 4
        async with service.request(
            "r", service.chain(tokens(17)), gpu_blocks=[0, 1, 2, 3, 4], free=rig.free
        ) as request:
            assert (await request.load(first_block=1)).num_blocks == 3
            assert rig.holds([1, 2, 3], 0, first=1)
        assert service.stats().debug_violations == 0
        assert all((tensor[block] == PAINT - 256).all() for tensor in rig.gpu for block in range(5))
    assert caplog.records == []


async def test_write_to_a_freed_block_is_reported_when_the_block_has_its_next_owner(caplog):
    rig = Unpainted(debug_checks=True)
    async with rig.service() as service:
        await store_prefix(rig, service, [0, 1])
        rig.gpu[1][1, 7] = 1  # what a copy without an owner would do
        async with service.request("r", service.chain(tokens(8)), gpu_blocks=[0, 1], free=rig.free):
            pass
        assert service.stats().debug_violations == 1
    assert "GPU block 1 was written after it was freed" in caplog.text


@pytest.mark.parametrize("table", [[2, 3], [0, 1]], ids=["not its block at all", "its own block"])
async def test_store_of_a_block_that_nobody_wrote_is_reported(table, caplog):
    rig = Unpainted(debug_checks=True)
    async with rig.service() as service:
        await store_prefix(rig, service, [0, 1])
        async with service.request("r", service.chain(tokens(8, 5)), gpu_blocks=table, free=rig.free) as request:
            spec = kv.GPULoadStoreSpec([0], [1], [0])
            await request.store_blocks(spec, ready="host-visible")
        assert service.stats().debug_violations == 1
    assert "GPU block 0 was stored, but nobody wrote to it" in caplog.text


async def test_block_that_is_written_between_its_offer_and_its_ready_event_is_no_violation(caplog):
    rig = Unpainted(debug_checks=True)
    written = threading.Event()
    async with rig.service() as service:
        await store_prefix(rig, service, [0, 1])
        async with service.request("r", service.chain(tokens(8, 5)), gpu_blocks=[0, 1], free=rig.free) as request:
            job = request.store(computed_tokens=8, ready=written)
            rig.fill([0, 1], 3)
            written.set()
            rig.stores.resume()  # looks at the event again
            assert (await job).stored == 2
        assert service.stats().debug_violations == 0
    assert caplog.records == []


@pytest.mark.parametrize("factor", [1, 2])
async def test_load_of_other_bytes_than_were_stored_fails_and_drops_the_key(factor, caplog):
    rig = Unpainted(debug_checks=True, factor=factor)
    async with rig.service() as service:
        await store_prefix(rig, service, [0, 1, 2, 3])
        np.asarray(rig.spec.handlers.layout.cpu[0])[:, -1] += 1
        async with service.request("r", service.chain(tokens(17)), gpu_blocks=[10, 11, 12, 13, 14], free=rig.free) as r:
            loaded = await r.load()
            assert (loaded.outcome, loaded.reason) == (kv.LoadOutcome.FAILED, "copy_failed")
            assert "does not hold what was stored" in str(loaded.error)
            assert r.match().ready_blocks == 0
        assert service.stats().debug_violations == 1


async def test_books_that_do_not_add_up_are_reported_after_the_next_poll(caplog):
    rig = Unpainted(debug_checks=True)
    async with rig.service() as service:
        await store_prefix(rig, service, [0, 1])
        rig.spec.cpu_manager._stats.ready += 1
        service.engine.poll()
        assert service.stats().debug_violations >= 1
        rig.spec.cpu_manager._stats.ready -= 1
    assert "free + writing + ready + detached = capacity: 9 is not 8" in caplog.text


async def test_without_the_option_nothing_is_painted():
    rig = Unpainted()
    async with rig.service() as service:
        await store_prefix(rig, service, [0, 1])
        assert rig.holds([0, 1], 0)
        assert service.stats().debug_violations == 0
