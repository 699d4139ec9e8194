"""The synchronous engine, as a stepping scheduler uses it."""

from __future__ import annotations

import threading

import pytest
from service.harness import ManualClock, Rig, chain, check_books, tokens

import kvoffload as kv
from kvoffload.service.jobs import Job, JobState


def _spec(blocks, first=0):
    return kv.GPULoadStoreSpec(blocks, [len(blocks)], [first])


def test_step_loop_stores_loads_and_polls():
    rig = Rig()
    with rig.engine() as engine:
        engine.begin(kv.ReqContext("a"), chain(rig, 8))
        rig.fill([0, 1], 0)
        stored = engine.submit_store("a", _spec([0, 1]), "host-visible")
        (done,) = engine.poll()
        assert (done.job_id, done.request_id, done.kind, done.result.stored) == (stored, "a", "store", 2)
        engine.finish("a")
        engine.begin("b", chain(rig, 9))
        loading = engine.submit_load("b", _spec([10, 11, 12]))
        (done,) = engine.wait([loading], 1.0)
        assert (done.kind, done.result.num_tokens, done.result.outcome) == ("load", 8, kv.LoadOutcome.LOADED)
        assert rig.holds([10, 11], 0)
        assert engine.submit_load("b", _spec([12], first=2)) is None
        assert engine.busy_gpu_blocks([10, 11, 12]) == []
    check_books(rig.spec.cpu_manager, idle=True)


def test_unfinished_jobs_keep_their_blocks_busy_until_the_copy_has_ended():
    rig = Rig()
    with rig.engine() as engine:
        engine.begin("a", chain(rig, 8))
        rig.stores.hold()
        engine.submit_store("a", _spec([4, 5]), "host-visible")
        engine.finish("a")
        assert engine.busy_gpu_blocks([3, 4, 5]) == [4, 5]
        rig.stores.finish_all()
        engine.poll()
        assert engine.busy_gpu_blocks([3, 4, 5]) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.match("nobody"), "nobody"),
        (lambda e: e.begin("a", e.state("a").chain), "begun already"),
        (lambda e: e.begin("", None), "req_id"),
        (lambda e: e.submit_load("a", _spec([99])), r"\[0, 64\)"),
        (lambda e: e.submit_load("a", kv.GPULoadStoreSpec([1, 2], [1, 1], [0, 0])), "each of 1 groups"),
        (lambda e: e.submit_store("a", _spec([1, 2, 3]), "host-visible"), "not all in the chain"),
        (lambda e: e.submit_store("a", _spec([1]), "soon"), "host-visible"),
        (lambda e: e.submit_store("a", _spec([1]), object()), "host-visible"),
    ],
)
def test_callers_bugs_are_typed_errors_and_change_nothing(call, message):
    rig = Rig()
    with rig.engine() as engine:
        engine.begin("a", chain(rig, 8))
        before = engine.stats()
        with pytest.raises(kv.UsageError, match=message):
            call(engine)
        assert engine.stats() == before


def test_store_that_starts_inside_an_offloaded_block_is_refused():
    rig = Rig(factor=2)
    with rig.engine() as engine:
        engine.begin("a", chain(rig, 16))
        with pytest.raises(kv.UsageError, match=r"block_indices\[0\] is 1, not a multiple of 2"):
            engine.submit_store("a", _spec([1, 2], first=1), "host-visible")
        assert engine.stats().manager.reserved == 0


def test_load_may_start_and_end_inside_an_offloaded_block():
    rig = Rig(factor=4)
    with rig.engine() as engine:
        engine.begin("a", chain(rig, 32))
        rig.fill(range(8), 3)
        engine.submit_store("a", _spec(list(range(8))), "host-visible")
        engine.poll()
        engine.finish("a")
        engine.begin("b", chain(rig, 32))
        job = engine.submit_load("b", _spec([20, 21, 22, 23, 24], first=2))
        (done,) = [d for d in engine.wait([job], 1.0) if d.kind == "load"]
        assert done.result.num_blocks == 5
        for offset in range(5):
            assert (rig.gpu[0][20 + offset] == rig.gpu[0][2 + offset]).all()


def test_offer_larger_than_the_pool_stores_a_prefix_and_says_so():
    rig = Rig(capacity=3)
    with rig.engine() as engine:
        engine.begin("a", chain(rig, 40))
        engine.submit_store("a", _spec(list(range(10))), "host-visible")
        (done,) = engine.poll()
        assert (done.result.stored, done.result.rejected, done.result.reason) == (2, 8, "no_space")
        assert engine.match("a").ready_blocks == 2
    check_books(rig.spec.cpu_manager, idle=True)


def test_hung_store_is_answered_at_its_deadline_and_released_when_its_copy_ends():
    clock = ManualClock()
    rig = Rig(store_deadline_seconds=30.0)
    with rig.engine(clock=clock) as engine:
        engine.begin("a", chain(rig, 8))
        rig.stores.hold()
        engine.submit_store("a", _spec([4, 5]), "host-visible")
        assert engine.next_deadline() == clock.now + 30.0
        clock.advance(30.0)
        (done,) = engine.poll()
        assert (done.result.failed, done.result.reason) == (2, "deadline")
        stats = engine.stats()
        assert (stats.manager.quarantined, stats.quarantined_gpu_blocks) == (2, 2)
        assert engine.busy_gpu_blocks([4, 5]) == [4, 5]
        assert "hung" in engine.health().reason
        rig.stores.finish_all()
        assert engine.poll() == []
        assert engine.busy_gpu_blocks([4, 5]) == []
        assert engine.match("a").ready_blocks == 0
        assert engine.stats().manager.free == rig.capacity


def test_backpressure_refuses_stores_and_loads_beyond_the_limit():
    rig = Rig(max_inflight_store_bytes=300, max_inflight_load_bytes=300)
    with rig.engine() as engine:
        engine.begin("a", chain(rig, 16))
        rig.stores.hold()
        engine.submit_store("a", _spec([0, 1]), "host-visible")
        engine.submit_store("a", _spec([2, 3], first=2), "host-visible")
        (refused,) = engine.poll()
        assert (refused.result.rejected, refused.result.reason) == (2, "backpressure")
        rig.stores.finish_all()
        engine.poll()
        rig.loads.hold()
        assert engine.submit_load("a", _spec([10, 11])) is not None
        assert engine.submit_load("a", _spec([12, 13])) is None
        rig.loads.finish_all()


def test_explain_names_what_happened_to_each_block():
    clock = ManualClock()
    rig = Rig(capacity=2)
    with rig.engine(clock=clock) as engine:
        engine.begin("a", chain(rig, 12, seed=1))
        engine.submit_store("a", _spec([0, 1]), "host-visible")
        engine.poll()
        engine.begin("b", chain(rig, 4, seed=2))
        engine.submit_store("b", _spec([5]), "host-visible")
        engine.poll()
        clock.advance(7.0)
        states = [(r.first_block, r.state, r.seconds_ago) for r in engine.explain("a")]
        assert states == [(0, "evicted", 7.0), (1, "unreachable", None), (2, "never offered", None)] or states == [
            (0, "ready", None),
            (1, "evicted", 7.0),
            (2, "never offered", None),
        ]
        engine.finish("b")
        assert [r.state for r in engine.explain("b")] == ["ready"]


def test_explain_tells_what_a_request_found_from_what_is_so_now():
    rig = Rig(capacity=8)
    with rig.engine() as engine:
        engine.begin("a", chain(rig, 8))
        assert [r.found for r in engine.explain("a")] == [None, None]
        assert engine.submit_load("a", _spec([0, 1])) is None
        engine.submit_store("a", _spec([0, 1]), "host-visible")
        engine.poll()
        engine.finish("a")
        assert [(r.state, r.found) for r in engine.explain("a")] == [("ready", "new"), ("ready", "new")]
        rig.stores.hold()
        engine.begin("b", chain(rig, 12))
        engine.begin("c", chain(rig, 16))
        engine.submit_store("b", _spec([0, 1, 2]), "host-visible")
        engine.discard(chain(rig, 4).keys(0))
        engine.submit_load("c", _spec([4, 5, 6, 7]))
        assert [r.found for r in engine.explain("b")] == ["ready", "ready", "new"]
        assert [r.found for r in engine.explain("c")] == ["discarded", "unreachable", "unreachable", "new"]
        engine.state("c").chain.extend(range(4))
        assert [r.found for r in engine.explain("c")][4] is None
        rig.stores.resume()


def test_switching_off_drops_the_cache_and_rejects_stores():
    rig = Rig()
    with rig.engine() as engine:
        engine.begin("a", chain(rig, 8))
        engine.submit_store("a", _spec([0, 1]), "host-visible")
        engine.poll()
        engine.enabled = False
        assert engine.match("a").ready_blocks == 0
        engine.submit_store("a", _spec([0, 1]), "host-visible")
        assert engine.poll()[0].result.reason == "disabled"
        engine.enabled = True
        assert engine.match("a").ready_blocks == 0
        engine.pause_stores()
        engine.submit_store("a", _spec([0, 1]), "host-visible")
        assert engine.poll()[0].result.reason == "paused"
        engine.pause_stores(False)
        engine.submit_store("a", _spec([0, 1]), "host-visible")
        assert engine.poll()[0].result.stored == 2


def test_another_thread_is_refused():
    rig = Rig()
    caught: list[BaseException] = []
    with rig.engine() as engine:

        def call():
            try:
                engine.poll()
            except kv.UsageError as error:
                caught.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert "belongs to thread" in str(caught[0])


def test_abort_in_any_state_is_idempotent_and_leaves_nothing():
    """A-Y2."""
    rig = Rig()
    with rig.engine() as engine:
        assert engine.abort("unknown") is False
        engine.begin("known", chain(rig, 8))
        assert engine.abort("known")
        assert engine.abort("known")
        engine.finish("known")
        engine.begin("looked", chain(rig, 8))
        engine.match("looked")
        engine.abort("looked")
        engine.finish("looked")
        engine.begin("r2", chain(rig, 8))
        engine.submit_store("r2", _spec([0, 1]), "host-visible")
        assert engine.poll()[0].result.stored == 2
        engine.finish("r2")
        assert engine.stats().requests == 0
    check_books(rig.spec.cpu_manager, idle=True)


def test_job_that_makes_an_illegal_move_is_refused_and_unchanged():
    job = Job(1, "r", "load", kv.ReqContext("r"))
    job.move(JobState.DONE)
    with pytest.raises(kv.KVOffloadError, match="cannot go from done to running"):
        job.move(JobState.RUNNING)
    assert job.state is JobState.DONE


def test_several_groups_match_to_the_common_length():
    import numpy as np

    layers = {"a": np.zeros((32, 64), np.int8), "b": np.zeros((32, 32), np.int8)}
    caches = kv.CanonicalKVCaches.from_layers(layers, block_dim=0, groups=[["a"], ["b"]])
    config = kv.OffloadConfig(cpu_bytes_to_use=1 << 20, gpu_block_size=(4, 8))
    from service.harness import ScriptedSpec

    spec = ScriptedSpec(config, caches, 16)
    with kv.OffloadEngine(config, caches, spec=spec) as engine:
        sequence = kv.BlockChain(config.group_layouts(), tokens(16))
        engine.begin("a", sequence)
        layers["a"][[0, 1, 2, 3]] = [[1], [2], [3], [4]]
        layers["b"][[8, 9]] = [[5], [6]]
        engine.submit_store("a", kv.GPULoadStoreSpec([0, 1, 2, 3, 8], [4, 1], [0, 0]), "host-visible")
        assert engine.poll()[0].result.stored == 5
        assert engine.match("a") == kv.PrefixMatch(2, 0, 8)
        job = engine.submit_load("a", kv.GPULoadStoreSpec([20, 21, 22, 23, 24, 25], [4, 2], [0, 0]))
        (done,) = engine.wait([job], 1.0)
        assert (done.result.num_tokens, done.result.outcome) == (8, kv.LoadOutcome.PARTIAL)
        assert (layers["a"][20, 0], layers["a"][21, 0], layers["a"][22, 0]) == (1, 2, 0)
        assert (layers["b"][24, 0], layers["b"][25, 0]) == (5, 0)


@pytest.mark.parametrize(
    "call",
    [
        lambda engine: engine.fileno(),
        lambda engine: engine.enabled,
        lambda engine: engine.idle,
        lambda engine: engine.pins(),
        lambda engine: engine.fault,
        lambda engine: engine.next_deadline(),
        lambda engine: engine.give_back([1], print),
        lambda engine: engine.poll(),
    ],
)
def test_engine_that_was_not_started_says_so(call):
    engine = Rig().engine()
    with pytest.raises(kv.UsageError, match="was not started"):
        call(engine)
    assert not hasattr(type(engine), "no_such_thing")
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = engine.no_such_thing


def test_switch_takes_only_a_bool_and_a_store_only_gpu_blocks():
    rig = Rig()
    with rig.engine() as engine:
        engine.begin("a", chain(rig, 8))
        with pytest.raises(kv.UsageError, match="enabled must be True or False; got 'no'"):
            engine.enabled = "no"
        with pytest.raises(kv.UsageError, match="GPULoadStoreSpec"):
            engine.submit_store("a", kv.CPULoadStoreSpec([1]), "host-visible")
