"""What a command to rank processes costs, beside a bare ZeroMQ round trip of the same run; and the start of a region.

A round trip of the command path begins with the owner's submit and ends when it took the result that the last rank
reported; the ranks' handlers end each job at once, so that only the path counts. `with_copy` is the same over real
handlers and one small block. The bare round trip is a message that another process echoes; `bare_all`, one to as many
processes as there are ranks. All alternate, so that what else the machine does meets each of them.

Examples:
  kvoffload bench ranks
  kvoffload bench ranks --workers 4 --region 1GiB --json
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import select
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import zmq

from kvoffload.cli.main import FAILED, OK
from kvoffload.cli.report import print_json, print_table
from kvoffload.cli.values import add_check, add_json, natural, positive, size
from kvoffload.config import OffloadConfig
from kvoffload.errors import ConfigError
from kvoffload.manager.specs import CPULoadStoreSpec, GPULoadStoreSpec
from kvoffload.memory.region import SharedOffloadRegion
from kvoffload.service.bridge import CompletionBridge
from kvoffload.service.ranks.launcher import RankLauncher
from kvoffload.service.ranks.remote import RemoteWorkers
from kvoffload.service.waiting import in_thread
from kvoffload.simulate.rank_process import TARGET
from kvoffload.simulate.sharded_gpu import ShardedGpu

RATIO = 3.0
LAG_MS = 20.0
_BLOCKS, _SHARD_BYTES = 64, 1024
_LEAST_REGION = 64 << 10
_ECHO = """
import os, sys, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.rcvtimeo = 500
socket.connect(sys.argv[1])
socket.send(b"here")
while os.getppid() == int(sys.argv[2]):  # a parent that was interrupted while it started this does not know of it
    try:
        socket.send(socket.recv())
    except zmq.Again:
        pass
os._exit(0)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options."""
    add = parser.add_argument
    add("--workers", type=positive, default=2, metavar="N", help="rank processes (default 2)")
    add("--rounds", type=positive, default=2000, metavar="N", help="round trips of each kind (default 2000)")
    add("--region", type=size, default=4 << 30, metavar="SIZE", help="region whose start is watched (default 4GiB)")
    add(
        "--attach",
        type=natural,
        default=1000,
        metavar="N",
        help="times a region is attached and detached (default 1000)",
    )
    add_json(parser)
    add_check(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    if args.region < _LEAST_REGION:
        raise ConfigError(f"--region must be at least {_LEAST_REGION} bytes, one block; got {args.region}")
    values: dict[str, object] = {"workers": args.workers, "rounds": args.rounds}
    times = measure_round_trips(args.workers, args.rounds)
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    ratio = median["command"] / median["bare"]
    values |= {f"{name}_us": _microseconds(seconds) for name, seconds in times.items()}
    values |= {
        "command_over_bare_p50": round(ratio, 2),
        "command_over_bare_all_p50": round(median["command"] / median["bare_all"], 2),
    }
    values |= {"region_bytes": args.region, **asyncio.run(measure_start(args.region))}
    grown = measure_attach(args.attach) if args.attach else {}
    values |= {"attach_detach": args.attach, "grown": grown}
    flat = not grown or (grown["fds"] <= 0 and grown["maps"] <= 2 and grown["rss_bytes"] < 4 << 20)
    lag: object = values["region_start_max_loop_lag_ms"]
    met = ratio <= RATIO and isinstance(lag, float) and lag <= LAG_MS and flat
    values["all_met"] = met
    if args.json:
        print_json(values)
    else:
        print_table("rank processes", values)
    return FAILED if args.check and not met else OK


def _microseconds(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "p50": round(1e6 * statistics.median(ordered), 1),
        "p99": round(1e6 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 1),
    }


def measure_round_trips(world_size: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round trip, by kind."""
    with (
        _echoes(1) as bare,
        _echoes(world_size) as bare_all,
        _ranks(world_size, idle=True) as command,
        _ranks(world_size, idle=False) as with_copy,
    ):
        trips = {"bare": bare, "bare_all": bare_all, "command": command, "with_copy": with_copy}
        times: dict[str, list[float]] = {name: [] for name in trips}
        warm_up = rounds // 10
        for number in range(rounds + warm_up):
            for name, trip in trips.items():
                began = time.perf_counter()
                trip(number)
                times[name].append(time.perf_counter() - began)
        return {name: seconds[warm_up:] for name, seconds in times.items()}


@contextmanager
def _echoes(count: int) -> Iterator[Callable[[int], None]]:
    """Yield a round trip to processes that echo."""
    endpoints = [f"ipc://@kvoffload-bench-{os.getpid()}-{secrets.token_hex(4)}" for _ in range(count)]
    context = zmq.Context()
    sockets = [context.socket(zmq.DEALER) for _ in endpoints]
    for socket, endpoint in zip(sockets, endpoints, strict=True):
        socket.bind(endpoint)
    processes: list[subprocess.Popen[bytes]] = []

    def trip(_number: int) -> None:
        for socket in sockets:
            socket.send(b"x" * 100)
        for socket in sockets:
            socket.recv()

    try:
        processes.extend(
            subprocess.Popen([sys.executable, "-c", _ECHO, endpoint, str(os.getpid())], process_group=0)  # noqa: S603
            for endpoint in endpoints
        )
        for socket in sockets:
            socket.recv()
        yield trip
    finally:
        for process in processes:
            process.kill()
            process.wait()
        context.destroy(linger=0)


@contextmanager
def _ranks(world_size: int, *, idle: bool) -> Iterator[Callable[[int], None]]:
    """Yield a transfer over rank processes."""
    config = OffloadConfig(cpu_bytes_to_use="16MiB", gpu_block_size=16, world_size=world_size)
    gpu = ShardedGpu(_BLOCKS, _SHARD_BYTES * world_size, world_size)
    workers = RemoteWorkers(world_size)
    bridge = CompletionBridge()
    poller = select.poll()
    poller.register(bridge.fileno(), select.POLLIN)
    arguments = {**gpu.arguments, "config": config.model_dump(mode="json"), "idle": idle}
    with RankLauncher(
        TARGET, world_size=world_size, address=workers.address, arguments=arguments, pass_fds=[gpu.fd]
    ) as launcher:
        try:
            launcher.start()
            workers.gather(config)
            workers.provide(_BLOCKS)
            workers.set_notify(bridge.notify)

            specs = [(GPULoadStoreSpec([b], [1], [0]), CPULoadStoreSpec([b])) for b in range(_BLOCKS)]

            def command(number: int) -> None:
                workers.transfer_async(number, specs[number % _BLOCKS])
                while True:
                    poller.poll(10_000)
                    bridge.consume()
                    if workers.get_finished():
                        return

            yield command
        finally:
            workers.shutdown()
        bridge.close()
        gpu.close()


async def measure_start(num_bytes: int) -> dict[str, float]:
    """Make a region beside a loop that ticks, then let the loop tick as long with nothing beside it."""
    reports: list[int] = []
    clock = asyncio.get_running_loop().time

    async def tick(lags: list[float]) -> None:
        while True:
            due = clock() + 0.001
            await asyncio.sleep(0.001)
            lags.append(clock() - due)

    def make() -> None:
        page = 64 * 1024
        blocks = num_bytes // page
        region = SharedOffloadRegion(
            None, blocks * page, blocks, None, 1, page, progress=lambda done, _total: reports.append(done)
        )
        region.cleanup()

    async def watch(work: Awaitable[object]) -> list[float]:
        lags: list[float] = []
        ticker = asyncio.create_task(tick(lags))
        await work
        ticker.cancel()
        return sorted(lags)

    began = clock()
    beside = await watch(in_thread(make, "kvoffload-bench"))
    seconds = clock() - began
    alone = await watch(asyncio.sleep(seconds))
    return {
        "region_start_seconds": round(seconds, 2),
        "region_start_max_loop_lag_ms": round(1000 * beside[-1], 2),
        "region_start_p99_loop_lag_ms": round(1000 * beside[int(0.99 * len(beside))], 2),
        "idle_max_loop_lag_ms": round(1000 * alone[-1], 2),
        "idle_p99_loop_lag_ms": round(1000 * alone[int(0.99 * len(alone))], 2),
        "region_progress_reports": len(reports),
    }


def measure_attach(times: int) -> dict[str, int]:
    """Attach a region and detach from it; return what grew meanwhile."""
    page, blocks = 4096, 64
    region = SharedOffloadRegion(None, 2 * page * blocks, blocks, 0, 2, page)
    before: dict[str, int] = {}
    for number in range(times + 20):
        other = SharedOffloadRegion(None, 2 * page * blocks, blocks, 1, 2, page, fd=os.dup(region.fileno()))
        other.create_next_view(page)[:] = 1
        other.cleanup()
        if number == 19:
            before = _held()
    after = _held()
    region.cleanup()
    return {name: after[name] - before[name] for name in after}


def _held() -> dict[str, int]:
    proc = Path("/proc/self")
    rss = int((proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    return {
        "fds": len(list((proc / "fd").iterdir())),
        "maps": len((proc / "maps").read_text().splitlines()),
        "rss_bytes": rss,
        "threads": threading.active_count(),
    }
