"""Two rank processes execute what one engine decides; any of them may die."""

from __future__ import annotations

import time

import pytest
from service.harness import check_books, tokens

import kvoffload as kv


def _spec(blocks, first=0):
    return kv.GPULoadStoreSpec(blocks, [len(blocks)], [first])


def _chain(engine, count, seed=0):
    return kv.BlockChain(engine.geometry.groups, tokens(count, seed))


class Steps:
    """Runs an engine's jobs over either transport."""

    def __init__(self, ranks, engine, transport):
        self.ranks, self.engine, self.transport = ranks, engine, transport
        assert all(ranks.up(rank) == "up" for rank in ranks.processes)

    def run(self, *jobs, seconds=20.0):
        """Step until the given jobs have been reported; return their results in that order."""
        results, deadline = {}, time.monotonic() + seconds
        while set(jobs) - set(results):
            assert time.monotonic() < deadline, "a job did not end"
            if self.transport == "piggyback":
                commands = self.engine.take_commands()
                for rank in self.ranks.processes:
                    self.engine.apply_results(rank, bytes.fromhex(self.ranks.say(rank, commands.hex())))
            done = self.engine.wait(jobs, 0.05) if self.transport == "zmq" else self.engine.poll()
            results |= {item.job_id: item.result for item in done}
        return [results[job] for job in jobs]


@pytest.fixture(params=["zmq", "piggyback"])
def transport(request):
    return request.param


def test_both_ranks_store_and_load_their_own_bytes(make_ranks, transport):
    ranks = make_ranks(transport=transport)
    ranks.spawn_all()
    with kv.OffloadEngine(ranks.config, workers=ranks.workers) as engine:
        steps = Steps(ranks, engine, transport)
        assert engine.stats().manager.capacity == 16
        engine.begin("a", _chain(engine, 12))
        ranks.fill([1, 2, 3], 0)
        (stored,) = steps.run(engine.submit_store("a", _spec([1, 2, 3]), "host-visible"))
        assert stored.stored == 3
        engine.finish("a")
        engine.begin("b", _chain(engine, 13))
        (loaded,) = steps.run(engine.submit_load("b", _spec([20, 21, 22, 23])))
        assert (loaded.outcome, loaded.num_tokens) == (kv.LoadOutcome.LOADED, 12)
        assert ranks.holds([20, 21, 22], 0)
        engine.finish("b")
        check_books(engine.spec.get_manager(), idle=True)


def test_killed_rank_turns_hits_into_misses_until_it_rejoins_and_then_hits_again(make_ranks):
    ranks = make_ranks()
    ranks.spawn_all()
    with kv.OffloadEngine(ranks.config, workers=ranks.workers) as engine:
        steps = Steps(ranks, engine, "zmq")
        engine.begin("a", _chain(engine, 8))
        ranks.fill([1, 2], 3)
        steps.run(engine.submit_store("a", _spec([1, 2]), "host-visible"))
        ranks.kill(1)
        deadline = time.monotonic() + 10
        while engine.match("a").ready_blocks and time.monotonic() < deadline:
            engine.wait([-1], 0.0)
            engine.poll()
            time.sleep(0.005)
        assert engine.match("a").ready_blocks == 0
        assert engine.health() == kv.Health(ok=False, reason="ranks [1] of 2 are missing")
        (refused,) = steps.run(engine.submit_store("a", _spec([1, 2]), "host-visible"))
        assert (refused.stored, refused.reason) == (0, "unhealthy")
        ranks.spawn(1)
        assert ranks.up(1) == "up"
        while not engine.health().ok and time.monotonic() < deadline + 10:
            engine.poll()
            time.sleep(0.005)
        assert engine.match("a").ready_blocks == 2
        (loaded,) = steps.run(engine.submit_load("a", _spec([9, 10])))
        assert loaded.outcome is kv.LoadOutcome.LOADED
        assert ranks.holds([9, 10], 3), "the rank's share of the region outlived its process"


def test_job_of_a_dead_rank_fails_and_its_blocks_stay_busy_until_the_others_have_reported(make_ranks):
    ranks = make_ranks(transport="piggyback")
    ranks.spawn_all()
    with kv.OffloadEngine(ranks.config, workers=ranks.workers) as engine:
        assert [ranks.up(rank) for rank in range(2)] == ["up", "up"]
        engine.begin("a", _chain(engine, 8))
        job = engine.submit_store("a", _spec([4, 5]), "host-visible")
        commands = engine.take_commands()
        ranks.kill(1)
        while ranks.workers.absent() is None:
            time.sleep(0.005)
        assert engine.poll() == []
        assert engine.busy_gpu_blocks([4, 5]) == [4, 5]
        answer, deadline = "", time.monotonic() + 10
        done = []
        while not done and time.monotonic() < deadline:
            answer = ranks.say(0, commands.hex())
            commands = b""
            engine.apply_results(0, bytes.fromhex(answer))
            done = list(engine.poll())
        assert [(item.job_id, item.result.failed, item.result.reason) for item in done] == [(job, 2, "copy_failed")]
        assert "rank 1 is gone" in str(done[0].result.error)
        assert engine.busy_gpu_blocks([4, 5]) == []


def test_rank_with_other_pages_is_refused_with_both_sides_named(make_ranks):
    ranks = make_ranks()
    ranks.spawn(0)
    while 0 not in ranks.workers._channel.hellos:
        time.sleep(0.005)
    ranks.spawn(1, page=128)
    engine = kv.OffloadEngine(ranks.config, workers=ranks.workers)
    with pytest.raises(kv.ConfigError, match=r"rank 1 has page_sizes \[128\], rank 0 has \[256\]"):
        engine.start()
    assert "rank 1 has page_sizes [128], rank 0 has [256]" in ranks.up(1)
    assert "went away: its start failed: rank 1 has page_sizes [128]" in ranks.up(0)


def test_smallest_number_of_gpu_blocks_counts(make_ranks):
    ranks = make_ranks()
    ranks.spawn(0)
    ranks.spawn(1, blocks=16)
    with kv.OffloadEngine(ranks.config, workers=ranks.workers) as engine:
        engine.begin("a", _chain(engine, 8))
        with pytest.raises(kv.UsageError, match=r"\[0, 16\)"):
            engine.submit_store("a", _spec([15, 16]), "host-visible")


def test_rank_that_does_not_come_is_named_in_time():
    workers = kv.RemoteWorkers(2, join_timeout=0.1)
    config = kv.OffloadConfig(cpu_bytes_to_use=1 << 20, gpu_block_size=4, world_size=2)
    with pytest.raises(kv.ConfigError, match=r"ranks \[0, 1\] of 2 did not join within 0.1 s"):
        kv.OffloadEngine(config, workers=workers).start()


def test_store_ahead_of_its_step_is_detected_with_debug_checks(make_ranks):
    """Breaking the rule "store only after the step's result came back"."""
    ranks = make_ranks(debug_checks=True)
    ranks.spawn_all()
    with kv.OffloadEngine(ranks.config, workers=ranks.workers) as engine:
        steps = Steps(ranks, engine, "zmq")
        for rank in range(2):
            assert ranks.say(rank, "step 6") == "ok"
        engine.begin("a", _chain(engine, 8))
        engine.note_step(7)
        (early,) = steps.run(engine.submit_store("a", _spec([1]), "host-visible"))
        assert early.failed == 1
        assert "store only after the step's result came back" in str(early.error)
        for rank in range(2):
            ranks.say(rank, "step 7")
        (stored,) = steps.run(engine.submit_store("a", _spec([1]), "host-visible"))
        assert stored.stored == 1


async def test_service_over_ranks_serves_requests(make_ranks):
    ranks = make_ranks()
    ranks.spawn_all()
    freed: list[int] = []
    async with kv.OffloadService(ranks.config, workers=ranks.workers) as service:
        ranks.fill([1, 2], 5)
        async with service.request("a", service.chain(tokens(8)), gpu_blocks=[1, 2], free=freed.extend) as request:
            assert (await request.store(computed_tokens=8, ready="host-visible")).stored == 2
        async with service.request("b", service.chain(tokens(9)), gpu_blocks=[8, 9, 10], free=freed.extend) as request:
            assert (await request.load()).num_tokens == 8
        assert ranks.holds([8, 9], 5)
    assert sorted(freed) == [1, 2, 8, 9, 10]


def test_event_cannot_go_to_another_process(make_ranks):
    ranks = make_ranks()
    ranks.spawn_all()
    import threading

    with kv.OffloadEngine(ranks.config, workers=ranks.workers) as engine:
        engine.begin("a", _chain(engine, 8))
        engine.submit_store("a", _spec([1]), threading.Event())
        (done,) = engine.poll()
        assert "cannot go to another process" in str(done.result.error)
