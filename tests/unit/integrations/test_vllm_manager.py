from __future__ import annotations

import pytest

FOUR = [bytes([number]) * 32 + b"\0\0\0\0" for number in range(1, 5)]


@pytest.fixture
def make(adapter):
    def make(num_blocks=4, policy="lru", **options):
        return adapter.KVOffloadManager(num_blocks, policy, **options)

    return make


def context(fake, name="r", keys=FOUR, **options):
    made = fake.ReqContext(name, **options)
    made._offload_key_positions = {key: 8 * (index + 1) for index, key in enumerate(keys)}
    return made


def store(manager, request, keys):
    output = manager.prepare_store(keys, request)
    manager.complete_store(set(output.keys_to_store), request)
    return output


def books(manager):
    stats = manager.cpu.stats()
    return {"free": stats.free, "writing": stats.writing, "ready": stats.ready, "detached": stats.detached}


def test_lookup_says_miss_then_pending_then_hit(fake, make):
    manager, request = make(), context(fake)
    manager.on_new_request(request)
    assert manager.lookup(FOUR[0], request) is fake.LookupResult.MISS
    output = manager.prepare_store(FOUR[:2], request)
    assert manager.lookup(FOUR[0], request) is fake.LookupResult.HIT_PENDING
    manager.complete_store(set(output.keys_to_store), request)
    assert manager.lookup(FOUR[0], request) is fake.LookupResult.HIT
    assert manager.get_load_source(FOUR[0], request) is fake.CacheHitSource.HOST


def test_a_block_that_stays_unwritten_holds_a_request_up_for_a_bounded_time(fake, make):
    now = [0.0]
    manager = make(pending_wait_seconds=0.2, clock=lambda: now[0])
    writer, reader = context(fake, "w"), context(fake, "r")
    manager.prepare_store(FOUR[:1], writer)
    assert manager.lookup(FOUR[0], reader) is fake.LookupResult.HIT_PENDING
    now[0] = 0.19
    assert manager.lookup(FOUR[0], reader) is fake.LookupResult.HIT_PENDING
    now[0] = 0.2
    assert manager.lookup(FOUR[0], reader) is fake.LookupResult.MISS


def test_a_polled_lookup_is_counted_once(fake, make):
    manager, request = make(), context(fake)
    for _ in range(1000):
        manager.lookup(FOUR[0], request)
    assert manager.cpu.stats().misses == 1


def test_completions_name_unordered_keys_and_may_come_after_the_request_finished(fake, make):
    manager, request = make(), context(fake)
    output = manager.prepare_store(FOUR, request)
    manager.on_request_finished(request)
    manager.complete_store(set(output.keys_to_store), request)
    assert books(manager) == {"free": 0, "writing": 0, "ready": 4, "detached": 0}


def test_two_stores_of_one_request_end_in_any_order(fake, make):
    manager, request = make(), context(fake)
    first, second = manager.prepare_store(FOUR[:2], request), manager.prepare_store(FOUR[2:], request)
    manager.complete_store(set(second.keys_to_store), request)
    assert [manager.lookup(key, request).name for key in FOUR] == ["HIT_PENDING"] * 2 + ["HIT"] * 2
    manager.complete_store(set(first.keys_to_store), request)
    assert books(manager)["ready"] == 4


def test_a_store_that_failed_on_a_worker_never_becomes_readable_although_vllm_calls_it_complete(fake, make):
    manager, request = make(), context(fake)
    output = manager.prepare_store(FOUR[:2], request)
    manager.note_failed({output.store_spec.ticket})
    manager.complete_store(set(output.keys_to_store), request, success=True)
    assert manager.lookup(FOUR[0], request) is fake.LookupResult.MISS
    assert books(manager) == {"free": 4, "writing": 0, "ready": 0, "detached": 0}
    assert manager.metrics.failed_stores == 1


def test_blocks_whose_load_failed_are_dropped(fake, make):
    manager, request = make(), context(fake)
    store(manager, request, FOUR)
    spec = manager.prepare_load(FOUR[:2], request)
    manager.note_failed({spec.ticket})
    manager.complete_load(set(FOUR[:2]), request)
    assert [manager.lookup(key, request).name for key in FOUR] == ["MISS", "MISS", "HIT", "HIT"]
    assert books(manager) == {"free": 2, "writing": 0, "ready": 2, "detached": 0}


def test_an_offer_that_finds_no_room_is_refused_with_none(fake, make):
    manager, request = make(num_blocks=1), context(fake)
    manager.prepare_store(FOUR[:1], request)
    assert manager.prepare_store(FOUR[1:2], request) is None
    assert manager.metrics.refused_stores == 1


def test_memory_of_copies_that_a_reset_overtook_comes_back_at_the_next_schedule(fake, make):
    manager, request = make(), context(fake)
    store(manager, request, FOUR[:2])
    manager.prepare_load(FOUR[:1], request)
    manager.prepare_store(FOUR[2:3], request)
    manager.reset_cache()
    assert books(manager) == {"free": 2, "writing": 0, "ready": 0, "detached": 2}
    assert manager.has_pending_work()
    manager.on_schedule_end(fake.ScheduleEndContext())
    assert books(manager) == {"free": 4, "writing": 0, "ready": 0, "detached": 0}
    assert not manager.has_pending_work()


def test_late_completions_of_a_reset_cache_change_nothing(fake, make):
    manager, request = make(), context(fake)
    output = manager.prepare_store(FOUR[:2], request)
    manager.reset_cache()
    manager.complete_store(set(output.keys_to_store), request)
    assert manager.lookup(FOUR[0], request) is fake.LookupResult.MISS
    manager.on_schedule_end(fake.ScheduleEndContext())
    assert books(manager)["free"] == 4


def test_a_finished_request_makes_the_head_of_its_prefix_the_last_to_leave(fake, make):
    for policy in ("lru", "arc"):
        manager, request = make(policy=policy), context(fake)
        store(manager, request, FOUR[2:])
        store(manager, request, FOUR[:2])
        manager.on_request_finished(request)
        other = context(fake, "other", [bytes([9 + number]) * 32 + b"\0\0\0\0" for number in range(4)])
        evicted = [store(manager, other, [key]).evicted_keys[0] for key in other._offload_key_positions]
        assert evicted == FOUR[::-1], policy


def test_a_block_that_was_only_stored_does_not_become_frequent_and_a_reused_one_does(fake, make):
    manager, writer, reader = make(policy="arc"), context(fake, "w"), context(fake, "r")
    store(manager, writer, FOUR)
    manager.on_request_finished(writer)
    assert manager.cpu.stats().policy["t2"] == 0
    manager.prepare_load(FOUR[:2], reader)
    manager.complete_load(set(FOUR[:2]), reader)
    manager.on_request_finished(reader)
    assert manager.cpu.stats().policy["t2"] == 2


def test_a_request_that_is_refused_again_and_again_makes_nothing_popular(fake, make):
    manager = make(num_blocks=4, store_threshold=2)
    request = context(fake)
    for _ in range(5):
        assert manager.prepare_store(FOUR[:1], request).keys_to_store == []
    assert manager.prepare_store(FOUR[:1], context(fake, "second")).keys_to_store == FOUR[:1]


def test_lookups_do_not_count_as_offers(fake, make):
    manager = make(store_threshold=2)
    for name in "abc":
        manager.lookup(FOUR[0], context(fake, name))
    assert manager.prepare_store(FOUR[:1], context(fake, "d")).keys_to_store == []


def test_a_request_may_keep_away_from_host_memory(fake, make):
    manager = make()
    store(manager, context(fake, "w"), FOUR)
    request = context(fake, load_tier_filter=fake.TierFilter(False))
    manager.on_new_request(request)
    assert manager.lookup(FOUR[0], request) is fake.LookupResult.MISS
    assert manager.lookup(FOUR[0], context(fake, "other")) is fake.LookupResult.HIT
    manager.on_request_finished(request)
    assert manager.lookup(FOUR[0], request) is fake.LookupResult.HIT


def test_a_request_may_ask_not_to_be_stored(fake, make):
    request = context(fake, kv_transfer_params={"kvoffload": {"store": False, "priority": 3}})
    assert make().prepare_store(FOUR, request).keys_to_store == []


def test_any_policy_hears_of_a_request_at_its_start_and_its_end(fake, make):
    manager, request = make(policy="adaptive"), context(fake)
    store(manager, request, FOUR)
    manager.on_request_finished(request)
    again = context(fake, "again")
    manager.prepare_load(FOUR, again)
    manager.complete_load(set(FOUR), again)
    manager.on_request_finished(again)
    assert books(manager)["ready"] == 4


def test_stats_are_differences_and_nothing_when_nothing_changed(fake, make):
    manager, request = make(), context(fake)
    store(manager, request, FOUR[:2])
    report = manager.get_stats()
    assert report.counters["vllm:kvoffload_stored_blocks"] == 2
    assert report.gauges["vllm:kvoffload_ready_blocks"] == 2
    assert manager.get_stats() is None
    store(manager, request, FOUR[2:3])
    report = manager.get_stats()
    assert report.counters["vllm:kvoffload_stored_blocks"] == 1
    assert report.gauges["vllm:kvoffload_ready_blocks"] == 3


def test_every_series_that_is_reported_is_declared(adapter, fake, make):
    manager, request = make(num_blocks=2), context(fake)
    store(manager, request, FOUR[:2])
    spec = manager.prepare_load(FOUR[:2], request)
    manager.note_failed({spec.ticket})
    manager.complete_load(set(FOUR[:2]), request)
    manager.reset_cache()
    report = manager.get_stats()
    declared = adapter.KVOffloadSpec.build_metric_definitions({})
    assert set(report.counters) | set(report.gauges) <= set(declared)
    assert all(name.startswith("vllm:") for name in declared)
