"""What a service counts is what happened, whoever asks and from whatever thread."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from service.harness import BLOCK, ManualClock, Rig, chain, tokens

import kvoffload as kv
from kvoffload.errors import NoSpaceError
from kvoffload.metrics.recorder import MetricsRecorder
from kvoffload.metrics.snapshot import SnapshotRelay
from kvoffload.service.feed_view import FEED_FIELDS, feed_values
from kvoffload.service.ledger import LoadLedger


class Numbers:
    """A scrape, by name and labels."""

    def __init__(self, text: bytes | str) -> None:
        text = text.decode() if isinstance(text, bytes) else text
        self.samples = [s for family in text_string_to_metric_families(text) for s in family.samples]

    def __call__(self, name: str, **labels: str) -> float:
        name = "kvoffload_" + name
        return sum(s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items())


async def scrape(service) -> Numbers:
    return Numbers((await service.metrics.render_in_thread())[0])


async def store(rig, service, blocks, *, seed=0, name="store"):
    count = len(blocks) * BLOCK
    rig.fill(blocks, seed)
    chain_ = service.chain(tokens(count, seed))
    async with service.request(name, chain_, gpu_blocks=list(blocks), free=None) as request:
        return await request.store(computed_tokens=count, ready="host-visible")


async def load(service, count, blocks, *, seed=0, name="load", **options):
    chain_ = service.chain(tokens(count, seed))
    async with service.request(name, chain_, gpu_blocks=list(blocks), free=None) as request:
        return await request.load(**options)


async def test_a_store_and_a_load_are_counted_in_blocks_tokens_and_bytes():
    rig = Rig(model_name="llama", instance_id="pod-3")
    async with rig.service() as service:
        await store(rig, service, [0, 1, 2])
        assert (await load(service, 13, [4, 5, 6, 7])).num_tokens == 12
        now = await scrape(service)
        assert now("requests_total", model_name="llama", engine="pod-3") == 2
        assert (now("requested_blocks_total"), now("hit_blocks_total"), now("hit_tokens_total")) == (6, 3, 12)
        assert now("miss_blocks_total", cause="new") == now("miss_blocks_total") == 3
        assert now("store_blocks_total", outcome="stored") == now("store_blocks_total") == 3
        block_bytes = now("cache_block_bytes")
        assert now("transfer_bytes_total", direction="store") == 3 * block_bytes
        assert now("transfer_bytes_total", direction="load") == 3 * block_bytes
        assert now("transfers_total", direction="load") == 1
        assert now("loads_total", outcome="loaded") == now("loads_total") == 1
        assert now("loaded_tokens_total") == 12
        assert now("load_seconds_count") == now("load_pending_seconds_count") == 1
        assert now("cache_blocks", state="ready") == 3
        assert now("cache_blocks") == now("cache_capacity_blocks") == rig.capacity
        assert now("healthy") == now("enabled") == now("ranks_up") == now("ranks_expected") == 1
        assert now("block_tokens") == BLOCK
        assert now("start_time_seconds") > 1.6e9
        assert now("metrics_errors_total") == 0


async def test_misses_by_cause_add_up_with_hits_and_pending_to_what_was_requested():
    rig = Rig(capacity=4, threshold=2)
    rng_blocks = list(range(4))
    async with rig.service() as service:
        for round_ in range(30):
            seed = (round_ * 7) % 5
            await load(service, 16, [10, 11, 12, 13], seed=seed, name=f"load-{round_}")
            await store(rig, service, rng_blocks, seed=seed, name=f"store-{round_}")
            if round_ == 20:
                await service.reset_cache()
            now = await scrape(service)
            looked = now("hit_blocks_total") + now("pending_blocks_total") + now("miss_blocks_total")
            assert looked == now("requested_blocks_total")
            assert now("cache_blocks") == rig.capacity
        for cause in ("new", "evicted", "filtered", "reset"):
            assert now("miss_blocks_total", cause=cause) > 0, cause
        assert now("metrics_errors_total") == 0


async def test_a_held_block_behind_a_missing_one_is_an_unreachable_miss_and_one_being_written_is_pending():
    rig = Rig()
    async with rig.service() as service:
        await store(rig, service, [0, 1, 2])
        keys = service.chain(tokens(12)).keys()
        service.engine.discard(keys[:1])
        await load(service, 12, [4, 5, 6], name="behind a gap")
        now = await scrape(service)
        assert now("miss_blocks_total", cause="discarded") == 1
        assert now("miss_blocks_total", cause="unreachable") == 2
        rig.stores.hold()
        job = asyncio.ensure_future(store(rig, service, [5, 6], seed=9, name="slow"))
        while not rig.stores.pending_jobs():
            await asyncio.sleep(0)
        await load(service, 8, [7, 8], seed=9, name="early", timeout=0.0)
        now = await scrape(service)
        assert now("pending_blocks_total") == 2
        rig.stores.resume()
        await job


async def test_evictions_are_counted_by_reason_with_idle_time_and_whether_they_were_used():
    clock = ManualClock()
    rig = Rig(capacity=2)
    async with rig.service(clock=clock) as service:
        await store(rig, service, [0], seed=1, name="a")
        await store(rig, service, [1], seed=2, name="b")
        clock.advance(5)
        await load(service, 5, [3, 4], seed=1, name="uses a")
        clock.advance(20)
        await store(rig, service, [5, 6], seed=3, name="pushes both out")
        now = await scrape(service)
        assert now("removed_blocks_total", reason="evicted") == now("removed_blocks_total") == 2
        assert now("evicted_unused_blocks_total") == 1
        assert now("eviction_idle_seconds_sum") == 20 + 25
        assert now("eviction_idle_seconds_count") == 2
        await service.reset_cache()
        now = await scrape(service)
        assert now("removed_blocks_total", reason="reset") == 2
        assert now("eviction_idle_seconds_count") == 2
        assert now("resets_total") == 1
        assert len(service.engine._core.last_use) == 0


async def test_a_quarantined_block_is_in_the_scrape_and_states_still_sum_to_capacity():
    """A-P5."""
    clock = ManualClock()
    rig = Rig(capacity=4, store_deadline_seconds=3.0)
    async with rig.service(clock=clock) as service:
        rig.stores.hold()
        job = asyncio.ensure_future(store(rig, service, [0]))
        while not rig.stores.pending_jobs():
            await asyncio.sleep(0)
        clock.advance(4)
        service.engine.poll()
        assert (await job).failed == 1
        now = await scrape(service)
        assert now("cache_blocks", state="quarantined") == now("gpu_blocks", state="quarantined") == 1
        assert now("cache_blocks") == now("cache_capacity_blocks") == 4
        assert now("hung_jobs") == now("deadlines_total", direction="store") == 1
        assert now("store_blocks_total", outcome="failed") == now("unstored_blocks_total", reason="deadline") == 1
        assert "quarantined" in service.health().reason
        rig.stores.resume()
        rig.stores.finish_all()
        assert await service.drain(5)
        now = await scrape(service)
        assert now("cache_blocks", state="quarantined") == now("hung_jobs") == 0
        assert now("late_completions_total", direction="store") == 1


async def test_a_failed_copy_counts_one_failure_and_a_reset_counts_none():
    rig = Rig()
    async with rig.service() as service:
        await store(rig, service, [0, 1])
        rig.loads.fail_next(OSError("bad link"))
        assert (await load(service, 9, [4, 5, 6])).outcome is kv.LoadOutcome.FAILED
        rig.stores.fail_next(OSError("bad link"))
        assert (await store(rig, service, [7], seed=5, name="fails")).failed == 1
        rig.stores.refuse_next(OSError("no queue"))
        assert (await store(rig, service, [8], seed=6, name="refused")).failed == 1
        now = await scrape(service)
        assert now("transfer_failures_total", direction="load") == 1
        assert now("transfer_failures_total", direction="store") == 2
        assert now("loads_total", outcome="failed") == now("unserved_loads_total", reason="copy_failed") == 1
        assert now("unstored_blocks_total", reason="copy_failed") == 2
        rig.loads.hold()
        running = asyncio.ensure_future(load(service, 9, [4, 5, 6], name="overtaken"))
        while not rig.loads.pending_jobs():
            await asyncio.sleep(0)
        await service.reset_cache()
        rig.loads.resume()
        rig.loads.finish_all()
        assert (await running).reason == "reset"
        now = await scrape(service)
        assert now("transfer_failures_total", direction="load") == 1
        assert now("unserved_loads_total", reason="reset") == 1


@pytest.mark.parametrize("way", ["stored", "copy_failed", "deadline", "aborted"])
async def test_blocks_rejected_for_want_of_space_keep_that_reason_whatever_becomes_of_the_rest(way):
    clock = ManualClock()
    rig = Rig(capacity=2, store_deadline_seconds=3.0)
    async with rig.service(clock=clock) as service:
        rig.stores.hold()
        if way == "copy_failed":
            rig.stores.fail_next(OSError("bad link"))
        chain_ = service.chain(tokens(4 * BLOCK))
        async with service.request("half", chain_, gpu_blocks=[0, 1, 2, 3], free=None) as request:
            job = request.store(computed_tokens=4 * BLOCK, ready="host-visible")
            if way == "aborted":
                service.abort("half")
            else:
                while not rig.stores.pending_jobs():
                    await asyncio.sleep(0)
            if way == "deadline":
                clock.advance(4)
                service.engine.poll()
            rig.stores.resume()
            rig.stores.finish_all()
            await job
        now = await scrape(service)
        assert now("unstored_blocks_total", reason="no_space") == 2
        rest = 0 if way == "stored" else 2
        assert now("unstored_blocks_total") == 2 + rest
        assert now("unstored_blocks_total", reason=way) == rest
        assert now("store_blocks_total") == 4


async def test_an_unhealthy_service_says_so_in_its_gauge():
    """A-P6, the gauge; the probes are the ASGI application's."""
    rig = Rig()
    async with rig.service() as service:
        service.engine.break_down("the completion bridge failed", OSError("eventfd"))
        assert (await load(service, 8, [0, 1])).outcome is kv.LoadOutcome.UNHEALTHY
        now = await scrape(service)
        assert now("healthy") == 0
        assert now("loads_total", outcome="unhealthy") == 1


async def test_a_cancelled_load_is_counted_as_cancelled():
    rig = Rig()
    async with rig.service() as service:
        await store(rig, service, [0, 1])
        rig.loads.hold()
        task = asyncio.ensure_future(load(service, 9, [4, 5, 6]))
        while not rig.loads.pending_jobs():
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        rig.loads.resume()
        rig.loads.finish_all()
        now = await scrape(service)
        assert now("loads_total", outcome="cancelled") == now("loads_total") == 1


async def test_prefill_seconds_saved_follow_the_configured_rate():
    rig = Rig(prefill_tokens_per_second=8.0)
    async with rig.service() as service:
        await store(rig, service, [0, 1])
        await load(service, 9, [4, 5, 6])
        now = await scrape(service)
        assert now("prefill_seconds_saved_total") == 1.0
        assert now("prefill_tokens_per_second") == 8.0


async def test_prefill_seconds_saved_follow_what_requests_report_and_price_earlier_loads_too():
    rig = Rig()
    async with rig.service() as service:
        await store(rig, service, [0, 1])
        await load(service, 9, [4, 5, 6])
        assert (await scrape(service))("prefill_seconds_saved_total") == 0
        async with service.request("r", service.chain(tokens(4, 7)), gpu_blocks=[9], free=None) as request:
            request.prefilled(40, 10.0)
            odd = ((None, 1.0), (1, "soon"), (10**400, 1.0), (1e308, 1e-308), (-1, -1.0))
            for wrong in ((0, 1.0), (1, 0.0), (1, float("nan")), (1, float("inf")), *odd):
                with pytest.raises(kv.UsageError):
                    request.prefilled(*wrong)
        now = await scrape(service)
        assert now("prefill_tokens_per_second") == 4.0
        assert now("prefill_seconds_saved_total") == 2.0


def test_a_reported_rate_moves_slowly_and_a_configured_one_stays():
    learning, fixed = LoadLedger(MetricsRecorder(), None), LoadLedger(MetricsRecorder(), 100.0)
    for ledger in (learning, fixed):
        ledger.prefilled(100, 1.0)
        ledger.prefilled(200, 1.0)
    assert learning.tokens_per_second == pytest.approx(110.0)
    assert fixed.tokens_per_second == 100.0


def test_an_instant_miss_is_no_time_and_a_miss_after_waiting_is():
    recorder = MetricsRecorder()
    ledger = LoadLedger(recorder, None)
    ledger.answered(kv.LoadResult(kv.LoadOutcome.MISS), 0.00001)
    ledger.answered(kv.LoadResult(kv.LoadOutcome.MISS, pending_seconds=0.2), 0.2)
    assert recorder.read_histograms()["load_seconds"][""]["sum"] == 0.2
    assert recorder.value("loads", "miss") == 2


def test_an_engine_counts_its_loads_when_they_are_reported():
    rig = Rig()
    with rig.engine() as engine:
        engine.begin("w", chain(rig, 8))
        engine.submit_store("w", kv.GPULoadStoreSpec([0, 1], [2], [0]), "host-visible")
        engine.poll()
        engine.begin("r", chain(rig, 8))
        assert engine.submit_load("r", kv.GPULoadStoreSpec([4, 5], [2], [0])) is not None
        engine.poll()
        engine.begin("n", chain(rig, 8, seed=3))
        assert engine.submit_load("n", kv.GPULoadStoreSpec([6, 7], [2], [0])) is None
        values = engine.metrics_snapshot()["values"]
        assert (values["loads"]["loaded"], values["loads"]["miss"]) == (1, 1)
        assert values["loaded_tokens"][""] == 8


def test_a_snapshot_from_another_thread_is_made_by_the_owner_at_its_next_poll():
    rig = Rig()
    with rig.engine() as engine:
        made_by = []
        engine.telemetry.add(lambda: made_by.append(threading.get_ident()) or {})
        got = []
        asker = threading.Thread(target=lambda: got.append(engine.metrics_snapshot()))
        asker.start()
        while not got:
            engine.wait([], 0.01)
            engine.poll()
        asker.join()
        assert set(made_by) <= {threading.get_ident(), asker.ident}
        assert got[0]["values"]["healthy"] == {"": 1}


def test_an_owner_that_does_not_poll_does_not_hold_a_scrape_up():
    rig = Rig()
    with rig.engine() as engine:
        got = []
        asker = threading.Thread(target=lambda: got.append(engine.metrics.render()[0]))
        asker.start()
        asker.join(10)
        assert Numbers(got[0])("healthy") == 1
        assert not engine.telemetry._desk._asking


def test_the_snapshot_of_an_engine_core_is_exported_by_a_front_end():
    rig = Rig(instance_id="core-7")
    relay = SnapshotRelay()
    with rig.engine() as engine:
        engine.begin("w", chain(rig, 8))
        engine.loads.first_use(engine.state("w"))
        relay.update(json.loads(json.dumps(engine.metrics_snapshot())))
    from kvoffload.metrics.exposition import MetricsExposition

    assert Numbers(MetricsExposition(relay).render()[0])("requests_total", engine="core-7") == 1


async def test_three_lives_and_two_alive_at_once_share_the_applications_registry():
    """A-P2."""
    registry = CollectorRegistry()
    for life in range(3):
        rig = Rig()
        async with rig.service() as service:
            service.metrics.register(registry)
            await store(rig, service, [0])
            text = await asyncio.to_thread(generate_latest, registry)
            assert Numbers(text)("requests_total") == 1, life
        assert Numbers(generate_latest(registry)).samples == []
    one, two = Rig(), Rig()
    async with one.service() as first, two.service() as second:
        first.metrics.register(registry)
        second.metrics.register(registry)
        await store(one, first, [0])
        now = Numbers(await asyncio.to_thread(generate_latest, registry))
        assert (now("requests_total", engine="0"), now("requests_total", engine="0-2")) == (1, 0)


async def test_a_service_that_could_not_start_leaves_the_applications_registry():
    registry = CollectorRegistry()
    rig = Rig()
    rig.config = kv.OffloadConfig(cpu_bytes_to_use="1000TiB", gpu_block_size=BLOCK)
    service = kv.OffloadService(rig.config, rig.kv_caches)
    service.metrics.register(registry)
    with pytest.raises(NoSpaceError):
        await service.__aenter__()
    assert Numbers(generate_latest(registry)).samples == []


async def test_a_closed_service_expects_no_rank_and_is_not_on_so_that_nobody_is_paged():
    rig = Rig()
    async with rig.service() as service:
        pass
    now = await scrape(service)
    assert now("ranks_expected") == now("ranks_up") == now("enabled") == 0


async def test_a_closed_service_exports_an_empty_unhealthy_cache():
    rig = Rig()
    async with rig.service() as service:
        await store(rig, service, [0, 1])
    now = await scrape(service)
    assert now("healthy") == now("enabled") == now("cache_blocks", state="ready") == 0
    assert now("store_blocks_total", outcome="stored") == 2
    assert now("cache_blocks") == now("cache_capacity_blocks")


async def test_a_service_that_was_not_entered_exports_zeros():
    rig = Rig()
    service = rig.service()
    now = await scrape(service)
    assert now("healthy") == now("requests_total") == 0


async def test_the_loops_lag_is_observed_and_the_probe_ends_with_the_service():
    rig = Rig()
    async with rig.service() as service:
        probe = service._lag_probe
        probe.stop()
        probe._due = service.loop.time() - 0.3
        probe._observe()
        now = await scrape(service)
        assert now("loop_lag_seconds_count") == 1
        assert now("loop_lag_seconds_sum") >= 0.3
    assert probe._timer is None


async def test_aborts_expired_leases_and_waiting_loads_are_counted():
    clock = ManualClock()
    rig = Rig(lease_seconds=10.0)
    async with rig.service(clock=clock) as service:
        await store(rig, service, [0, 1])
        async with service.request("r", service.chain(tokens(9)), gpu_blocks=[4, 5, 6], free=None) as request:
            async with request.lease():
                now = await scrape(service)
                assert (now("leases"), now("active_requests"), now("cache_blocks", state="pinned")) == (1, 1, 2)
                clock.advance(11)
                service.engine.poll()
            request.abort()
        now = await scrape(service)
        assert (now("expired_leases_total"), now("aborts_total"), now("leases")) == (1, 1, 0)
        assert now("waiting_loads") == 0


def test_feed_statistics_become_feed_series():
    stats = SimpleNamespace(**{field: number + 1 for number, field in enumerate(FEED_FIELDS.values())})
    values = feed_values(SimpleNamespace(stats=lambda: stats))
    assert values["feed_enabled"] == {"": 1}
    assert [values[name][""] for name in FEED_FIELDS] == list(range(1, len(FEED_FIELDS) + 1))
    assert feed_values(object()) == {"feed_enabled": {"": 0}}


def test_load_results_of_every_outcome_are_counted():
    recorder = MetricsRecorder()
    ledger = LoadLedger(recorder, None)
    for outcome in kv.LoadOutcome:
        ledger.answered(kv.LoadResult(outcome), 0.0)
    assert recorder.value("metrics_errors") == 0
    assert all(recorder.value("loads", outcome.value) == 1 for outcome in kv.LoadOutcome)


@pytest.mark.parametrize("seconds", [None, float("nan"), -1.0, "soon"])
async def test_a_handler_that_reports_nonsense_harms_neither_the_load_nor_the_metrics(seconds, monkeypatch):
    """A-P1."""
    rig = Rig()
    async with rig.service() as service:
        await store(rig, service, [0, 1])
        honest = rig.loads.get_finished

        def nonsense():
            results = honest()
            for result in results:
                result.transfer_time = result.queue_time = seconds
                result.transfer_size = seconds
            return results

        monkeypatch.setattr(rig.loads, "get_finished", nonsense)
        assert (await load(service, 9, [4, 5, 6])).num_tokens == 8
        now = await scrape(service)
        assert now("transfer_bytes_total", direction="load") == 2 * now("cache_block_bytes")
        assert now("transfer_copy_seconds_count", direction="load") == 0
        assert now("metrics_errors_total") == (0 if seconds is None else 2)
        assert now("healthy") == 1
