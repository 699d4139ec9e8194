"""Ranks come, go and come again at every point; here they live in threads of this process."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import zmq
from service.harness import tokens
from service.ranks.world import PAGE, store_and_load, until

import kvoffload as kv
from kvoffload.errors import NoSpaceError
from kvoffload.service.ranks import meeting
from kvoffload.service.ranks.wire import decode_welcome
from kvoffload.spec.cpu import CPUOffloadingSpec
from kvoffload.transfer.scripted import ScriptedOffloadingHandlers


def test_two_that_claim_one_rank_before_the_start_are_told_apart(make_world):
    world = make_world()
    world.join(world.rank(0))
    until(lambda: 0 in world.workers._channel.hellos)
    second = world.raw(0)
    refusal = decode_welcome(second.recv(4096)).refusal
    assert "rank 0 is process" in refusal
    assert "two processes cannot be one rank" in refusal
    second.close()
    world.join(world.rank(1))
    with world.engine() as engine:
        world.settle()
        assert world.outcomes == [None, None]
        assert store_and_load(world, engine, 1)


def test_rank_that_is_gone_before_the_region_is_replaced(make_world):
    world = make_world()
    gone = world.raw(0, page_sizes=[PAGE * 2])
    until(lambda: 0 in world.workers._channel.hellos)
    gone.close()
    until(lambda: 0 not in world.workers._channel.hellos)
    for rank in (0, 1):
        world.join(world.rank(rank))
    with world.engine() as engine:
        assert store_and_load(world, engine, 1), "the dead one's page size is nobody's measure"


def test_death_of_a_rank_is_seen_though_its_child_holds_the_connection(make_world):
    """The connection does not end with the process; its pidfd tells."""
    world = make_world()
    code = """if True:
        import subprocess, sys
        from service.ranks.world import World
        world = World.__new__(World)
        world.workers = type("Workers", (), {"address": sys.argv[1]})
        sock = world.raw(0)
        child = subprocess.Popen(["sleep", "60"], pass_fds=[sock.fileno()], stdout=subprocess.DEVNULL)
        print(child.pid, flush=True)
        sys.stdin.read()
    """
    rank = subprocess.Popen(
        [sys.executable, "-c", code, world.workers.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    child = os.pidfd_open(int(rank.stdout.readline()))
    until(lambda: 0 in world.workers._channel.hellos)
    rank.kill()
    rank.communicate()
    until(lambda: 0 not in world.workers._channel.hellos)
    assert not meeting.has_ended(child)
    signal.pidfd_send_signal(child, signal.SIGKILL)
    os.close(child)


def test_rank_that_ends_without_reading_its_welcome_breaks_nothing(make_world):
    world = make_world()
    unread = world.raw(0)
    world.join(world.rank(1))
    engine = world.engine()
    starting = threading.Thread(target=engine.start)
    starting.start()
    until(lambda: world.workers._channel._region is not None)
    unread.recv(1, socket.MSG_PEEK)
    unread.close()  # with unread data: the other end is reset, not just closed
    until(lambda: 0 not in world.workers._channel.hellos)
    world.join(world.rank(0))
    starting.join(20)
    engine.adopt()
    world.settle()
    assert world.outcomes == [None, None]
    assert world.workers._channel.broken is None
    world.ranks.reverse()
    assert store_and_load(world, engine, 1)


@pytest.mark.parametrize("nonsense", [b"GET / HTTP/1.1", b""])
def test_strangers_are_dropped(make_world, nonsense):
    world = make_world()
    sock, pidfd = meeting.connect(world.workers.address, 5)
    os.close(pidfd)
    if nonsense:
        sock.send(nonsense)
        assert sock.recv(10) == b""
    sock.close()
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(world.workers._channel._endpoint)
    dealer.send(b"nonsense")
    until(lambda: world.workers._channel.dropped == 1)
    dealer.close()
    context.term()
    for rank in (0, 1):
        world.join(world.rank(rank))
    with world.engine() as engine:
        assert store_and_load(world, engine, 1)


def test_shutdown_ends_every_wait_at_once(make_world):
    world = make_world()
    world.join(world.rank(0))
    until(lambda: 0 in world.workers._channel.hellos)
    errors = []

    def gather():
        try:
            world.workers.gather(world.config)
        except kv.ClosedError as error:
            errors.append(str(error))

    waiting = threading.Thread(target=gather)
    waiting.start()
    began = time.monotonic()
    world.workers.shutdown()
    waiting.join(10)
    world.settle()
    assert time.monotonic() - began < 5
    assert errors == ["the ranks were shut down while they joined"]
    assert isinstance(world.outcomes[0], kv.ClosedError)
    assert "went away" in str(world.outcomes[0])


async def test_service_whose_start_is_cancelled_waits_no_longer_for_its_ranks(make_world):
    """It waited for `join_timeout` on, with its thread, sockets and address."""
    world = make_world(join_timeout=120.0)
    world.join(world.rank(0))
    until(lambda: 0 in world.workers._channel.hellos)
    start = asyncio.create_task(kv.OffloadService(world.config, workers=world.workers).__aenter__())
    await asyncio.sleep(0)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    until(
        lambda: (
            not [thread for thread in threading.enumerate() if thread.name in {"kvoffload-start", "kvoffload-ranks"}]
        )
    )
    world.settle()
    assert isinstance(world.outcomes[0], kv.ClosedError)
    meeting.listen(world.workers.address).close()


def test_region_that_nobody_wants_any_more_is_not_reserved_to_its_end(make_world):
    world = make_world()
    done = []

    def shut_down_at_the_first_piece(so_far, total):
        done.append((so_far, total))
        world.workers.give_up()

    world.workers._progress = shut_down_at_the_first_piece
    world.config = world.make_config(cpu_bytes_to_use="600MiB")
    for rank in (0, 1):
        world.join(world.rank(rank, page=1 << 20, blocks=4))
    with pytest.raises(kv.ClosedError, match="shut down while their region was made"):
        world.engine().start()
    world.settle()
    assert done == [(256 << 20, 600 << 20)]


def test_ranks_join_the_next_deciding_process(make_world):
    address = f"@kvoffload-test-{os.getpid()}"
    world = make_world(address=address)
    for life in range(3):
        for rank in (0, 1):
            world.join(world.ranks[rank] if life else world.rank(rank))
        with world.engine() as engine:
            world.settle()
            assert world.outcomes[-2:] == [None, None]
            assert store_and_load(world, engine, life)
            assert not world.ranks[0].wait_until_lost(0.0)
        assert all(rank.wait_until_lost(10) for rank in world.ranks)
        world.workers = kv.RemoteWorkers(2, address=address, join_timeout=20)


def test_rank_that_comes_again_gets_the_commands_of_its_own_life_only(make_world):
    """With the piggyback transport all ranks get the same message."""
    world = make_world(transport="piggyback")
    for rank in (0, 1):
        world.join(world.rank(rank))
    with world.engine() as engine:
        world.settle()
        engine.begin("a", kv.BlockChain(engine.geometry.groups, tokens(16)))

        def step():
            commands = engine.take_commands()
            for number, rank in enumerate(world.ranks):
                if not rank.lost:
                    engine.apply_results(number, rank.execute(commands))
            return [done.result for done in engine.poll()]

        def steps():
            until(lambda: results.extend(step()) or results)
            return results.pop()

        results = []
        engine.submit_store("a", kv.GPULoadStoreSpec([1], [1], [0]), "host-visible")
        assert steps().stored == 1
        engine.submit_store("a", kv.GPULoadStoreSpec([2], [1], [1]), "host-visible")
        world.ranks[1].close()
        until(lambda: world.workers.absent() is not None)
        world.join(world.ranks[1])
        world.settle()
        until(lambda: world.workers.absent() is None)
        engine.poll()
        engine.submit_store("a", kv.GPULoadStoreSpec([3], [1], [2]), "host-visible")
        first, second = steps(), steps()
        assert {(first.stored, first.failed), (second.stored, second.failed)} == {(0, 1), (1, 0)}


def test_blocks_are_explained_as_unserved_while_a_rank_is_missing(make_world):
    world = make_world()
    for rank in (0, 1):
        world.join(world.rank(rank))
    with world.engine() as engine:
        world.settle()
        assert store_and_load(world, engine, 1)
        assert [report.state for report in engine.explain("1")] == ["ready", "ready"]
        world.ranks[1].close()
        until(lambda: engine.poll() == [] and not engine.health().ok)
        assert [report.state for report in engine.explain("1")] == ["unserved", "unserved"]
        world.join(world.ranks[1])
        world.settle()
        until(lambda: engine.poll() == [] and engine.health().ok)
        assert [report.state for report in engine.explain("1")] == ["ready", "ready"]


def test_rank_with_fewer_gpu_blocks_may_not_take_the_place(make_world):
    world = make_world()
    for rank in (0, 1):
        world.join(world.rank(rank))
    with world.engine():
        world.settle()
        world.ranks[1].close()
        until(lambda: world.workers.absent() is not None)
        with pytest.raises(kv.ConfigError, match="rank 1 has 16 GPU blocks, the instance was started with 32"):
            world.rank(1, blocks=16).start()
        world.rank(1, blocks=40).start()
        until(lambda: world.workers.absent() is None)


def test_deciding_process_with_another_block_size_is_named(make_world):
    world = make_world()
    for rank in (0, 1):
        world.join(world.rank(rank))
    world.config = world.make_config(block_size=8)
    with pytest.raises(kv.ConfigError, match="the ranks have block_size_factor 1, the deciding process 2"):
        world.engine().start()


def test_rank_with_a_running_copy_keeps_its_blocks_and_cannot_join_again(make_world):
    world = make_world(1, transport="piggyback")
    handlers = ScriptedOffloadingHandlers()
    handlers.hold()
    rank = world.join(world.rank(0, make_handlers=lambda *_: handlers))
    with world.engine() as engine:
        world.settle()
        engine.begin("a", kv.BlockChain(engine.geometry.groups, tokens(8)))
        job = engine.submit_store("a", kv.GPULoadStoreSpec([1, 2], [2], [0]), "host-visible")
        rank.execute(engine.take_commands())
        rank.close(0.05)
        until(lambda: world.workers.absent() is not None)
        engine.poll()
        assert engine.busy_gpu_blocks([1, 2]) == [1, 2], "the copy still runs"
        assert not rank.lost
        world.workers._channel.stop(10)
        rank._timeout = 0.1
        with pytest.raises(kv.UndrainedCopies, match="rank 0 cannot join: its copies"):
            rank.start()
        handlers.gpu_to_cpu_handler.finish_all()
        rank.close()
        engine._ranks()._book.leave(0, "its channel was stopped by the test")
        engine.wait([job], 10)
        assert engine.busy_gpu_blocks([1, 2]) == []


def test_socket_file_of_a_dead_process_is_replaced_and_goes_at_the_end(make_world, tmp_path):
    path = tmp_path / "ranks.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(str(path))
    world = make_world(address=str(path))
    with pytest.raises(kv.UsageError, match="use another address"):
        kv.RemoteWorkers(2, address=str(path))
    for rank in (0, 1):
        world.join(world.rank(rank))
    with world.engine() as engine:
        assert store_and_load(world, engine, 1)
    assert not path.exists()


def test_joining_and_leaving_leaves_no_descriptors_and_no_threads(make_world):
    world = make_world()
    for rank in (0, 1):
        world.join(world.rank(rank))

    def left():
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), _num_maps()

    with world.engine() as engine:
        world.settle()
        before = None
        for number in range(12):
            world.ranks[1].close()
            until(lambda: world.workers.absent() is not None)
            world.ranks[1].start()
            until(lambda: world.workers.absent() is None)
            engine.poll()
            if number == 3:
                before = left()
        until(lambda: left()[:2] <= before[:2])
        assert left()[2] <= before[2] + 4
        assert store_and_load(world, engine, 1)


def _num_maps():
    return len(Path("/proc/self/maps").read_text().splitlines())


def test_region_that_does_not_fit_is_said_and_no_rank_waits_for_it(make_world):
    """A-S2: the needed and the available bytes are named, and the ranks that wait learn of it at once."""
    world = make_world()
    for rank in (0, 1):
        world.join(world.rank(rank, page=1 << 20, blocks=4))
    world.config = world.make_config(cpu_bytes_to_use=1 << 40)
    with pytest.raises(NoSpaceError, match="bytes needed") as caught:
        world.engine().start()
    failed = time.monotonic()
    world.settle()
    assert time.monotonic() - failed < 2
    assert caught.value.requested_bytes > caught.value.available_bytes > 0
    assert all(isinstance(outcome, kv.ClosedError) for outcome in world.outcomes)


def test_absurd_size_is_refused_before_the_managers_tables_are_made(make_world, monkeypatch):
    """100 TiB of small blocks took half a minute and gigabytes of tables before the region said no."""
    world = make_world()
    for rank in (0, 1):
        world.join(world.rank(rank))
    world.config = world.make_config(cpu_bytes_to_use="100TiB")
    monkeypatch.setattr(CPUOffloadingSpec, "get_manager", lambda _: pytest.fail("the manager was made"))
    with pytest.raises(NoSpaceError, match=r"bytes needed, .* available") as caught:
        world.engine().start()
    assert caught.value.requested_bytes == 100 << 40
    assert 0 < caught.value.available_bytes < 100 << 40
    world.settle()
    assert all(isinstance(outcome, kv.ClosedError) for outcome in world.outcomes)


def test_empty_address_is_refused():
    """The kernel would choose one that nobody knows, and every rank would wait in vain."""
    with pytest.raises(kv.UsageError, match="address where ranks meet is empty"):
        kv.RemoteWorkers(2, address="")
