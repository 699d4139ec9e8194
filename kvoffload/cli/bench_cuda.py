"""Copies between GPU and host memory through the real handlers, beside the link's ceiling in the same run.

The ceiling is one large copy between page-locked and GPU memory; the floor is a `copy_` per block. Also: both
directions at once, the cost of submitting, the time from a copy's end to the awaiting task, and how much a matrix
product beside it slows down; and vLLM's batched copy, where a CUDA build of it is installed. Needs a CUDA device and
torch.

Examples:
  kvoffload bench cuda
  kvoffload bench cuda --json --check
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvoffload.cli.main import FAILED, OK, USAGE
from kvoffload.cli.report import print_json, print_table
from kvoffload.cli.values import add_check, add_json, add_repeat, size
from kvoffload.errors import UnsupportedError
from kvoffload.manager.specs import CPULoadStoreSpec, GPULoadStoreSpec
from kvoffload.memory.canonical import CanonicalKVCaches
from kvoffload.service.bridge import CompletionBridge
from kvoffload.transfer.base import OffloadingHandler, TransferSpec
from kvoffload.transfer.directional import CpuGpuOffloadingHandlers

KIB = 1024
SIZES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 2048 * KIB)
TARGETS = {2048 * KIB: 0.95, 64 * KIB: 0.85}
"""Least share of the ceiling, per block size."""
MAX_SUBMIT_SECONDS, MAX_WAKE_SECONDS, MIN_BOTH, MIN_OVER_PER_BLOCK, MAX_SLOWDOWN = 200e-6, 100e-6, 1.5, 5.0, 0.03


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options."""
    parser.add_argument(
        "--bytes", type=size, default=1 << 30, metavar="SIZE", help="bytes per measurement (default 1GiB)"
    )
    add_repeat(parser, 5)
    add_json(parser)
    add_check(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    try:
        figures = measure(args.bytes, args.repeat)
    except UnsupportedError as error:
        print(f"kvoffload bench cuda: {error}", file=sys.stderr)
        return USAGE
    if args.json:
        print_json(figures)
    else:
        print_table(f"copies on {figures['device']}", figures["blocks"])
        print_json({key: value for key, value in figures.items() if key != "blocks"})
    return FAILED if args.check and figures["missed"] else OK


def _torch() -> Any:  # noqa: ANN401 - torch has no stubs here
    try:
        import torch
    except ImportError as error:
        raise UnsupportedError(f"torch is needed: pip install 'kvoffload[torch]' ({error})") from error
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "torch sees no CUDA device: run this where there is one; `kvoffload doctor` says what it finds"
        )
    return torch


class Bench:
    """One block size: GPU tensor, page-locked host rows and scattered blocks."""

    def __init__(self, torch: Any, block_bytes: int, total_bytes: int) -> None:  # noqa: ANN401 - torch
        self.count = max(1, total_bytes // block_bytes)
        self.block_bytes = block_bytes
        self.gpu = torch.zeros((self.count, block_bytes), dtype=torch.int8, device="cuda")
        self.pair = CpuGpuOffloadingHandlers(
            CanonicalKVCaches.from_layers({"layer": self.gpu}, block_dim=0), 1, self.count, pin_memory="require"
        )
        rng = np.random.default_rng(0)
        self.gpu_ids, self.cpu_ids = rng.permutation(self.count), rng.permutation(self.count)
        self._job = 0

    def spec(self, *, store: bool, count: int | None = None) -> TransferSpec:
        """Return a transfer of `count` blocks: a store's first ones, a load's last ones.

        Up to half of all, the two share no block; otherwise one direction would wait for the other.
        """
        count = count or self.count
        part = slice(count) if store else slice(self.count - count, None)
        gpu = GPULoadStoreSpec(self.gpu_ids[part], [count], [0])
        cpu = CPULoadStoreSpec(self.cpu_ids[part])
        return (gpu, cpu) if store else (cpu, gpu)

    def handler(self, *, store: bool) -> OffloadingHandler:
        """Return the handler of a direction."""
        return self.pair.gpu_to_cpu_handler if store else self.pair.cpu_to_gpu_handler

    def submit(self, *, store: bool, count: int | None = None) -> int:
        """Submit one transfer and return its id."""
        self._job += 1
        self.handler(store=store).transfer_async(self._job, self.spec(store=store, count=count))
        return self._job

    def seconds(self, *, store: bool) -> float:
        """Return the device's time for one transfer of everything."""
        handler = self.handler(store=store)
        handler.wait({self.submit(store=store)})
        (result,) = handler.get_finished()
        if not result.success:
            raise UnsupportedError(f"the copy failed: {result.error}")
        return result.transfer_time or 1e-9

    def close(self) -> None:
        """Release everything."""
        self.pair.shutdown()


def _timed(torch: Any, work: Callable[[], None]) -> float:  # noqa: ANN401 - torch
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


def measure(total_bytes: int, repeat: int) -> dict[str, Any]:
    """Return all figures; `missed` names the targets that were not met."""
    torch = _torch()
    big = torch.zeros(total_bytes, dtype=torch.int8, device="cuda")
    host = torch.zeros(total_bytes, dtype=torch.int8, pin_memory=True)
    ceiling = {"load": 0.0, "store": 0.0}
    blocks: dict[str, dict[str, float]] = {}
    missed: list[str] = []
    for direction, work in (
        ("load", lambda: big.copy_(host, non_blocking=True)),
        ("store", lambda: host.copy_(big, non_blocking=True)),
    ):
        ceiling[direction] = total_bytes / statistics.median(_timed(torch, work) for _ in range(repeat)) / 1e9
    for block_bytes in SIZES:
        bench = Bench(torch, block_bytes, total_bytes)
        moved = bench.count * block_bytes
        row: dict[str, float] = {}
        for direction in ("load", "store"):
            store = direction == "store"
            rate = moved / statistics.median(bench.seconds(store=store) for _ in range(repeat)) / 1e9
            row[f"{direction}_gbps"], row[f"{direction}_share"] = round(rate, 2), round(rate / ceiling[direction], 3)
            if row[f"{direction}_share"] < TARGETS.get(block_bytes, 0.0):
                missed.append(f"{block_bytes} {direction}")
        if block_bytes == 16 * KIB:
            row["over_per_block_copy"] = round(_over_per_block(torch, bench, host, row["load_gbps"]), 1)
            if row["over_per_block_copy"] < MIN_OVER_PER_BLOCK:
                missed.append("per-block copy_")
        op = _vllm_op()
        if op is not None:
            row["load_over_vllm_op"] = round(row["load_gbps"] / _op_gbps(torch, op, bench, host, repeat), 2)
        blocks[f"{block_bytes // KIB} KiB"] = row
        bench.close()
    extra = _other_figures(torch, min(total_bytes, 1 << 29), repeat)
    missed += [name for name, met in extra.pop("met").items() if not met]
    figures = {"device": torch.cuda.get_device_name(), "bytes": total_bytes, "ceiling_gbps": ceiling, "blocks": blocks}
    return {**figures, **extra, "missed": missed}


def _over_per_block(torch: Any, bench: Bench, host: Any, load_gbps: float) -> float:  # noqa: ANN401 - torch
    count = min(bench.count, 4096)
    rows = host[: count * bench.block_bytes].view(count, bench.block_bytes)

    def copy() -> None:
        for index in range(count):
            bench.gpu[index].copy_(rows[index], non_blocking=True)

    copy()
    return load_gbps / (count * bench.block_bytes / _timed(torch, copy) / 1e9)


def _vllm_op() -> Any | None:  # noqa: ANN401 - a torch operator
    """Return vLLM's batched copy, if a CUDA build of vLLM is installed here."""
    try:
        from vllm._custom_ops import swap_blocks_batch
    except Exception:  # noqa: BLE001 - whatever an engine's import raises: there is no peer to measure
        return None
    return swap_blocks_batch


def _op_gbps(torch: Any, op: Any, bench: Bench, host: Any, repeat: int) -> float:  # noqa: ANN401 - torch
    """Return the GB/s of the operator for the same scattered load, from page-locked memory of the same size."""
    step, count = bench.block_bytes, bench.count
    sources = torch.from_numpy(host.data_ptr() + bench.cpu_ids.astype(np.int64) * step)
    destinations = torch.from_numpy(bench.gpu.data_ptr() + bench.gpu_ids.astype(np.int64) * step)
    sizes = torch.full((count,), step, dtype=torch.int64)
    seconds = statistics.median(_timed(torch, lambda: op(sources, destinations, sizes)) for _ in range(repeat))
    return count * step / seconds / 1e9


def _other_figures(torch: Any, total_bytes: int, repeat: int) -> dict[str, Any]:  # noqa: ANN401 - torch
    bench = Bench(torch, 2048 * KIB, total_bytes)
    one = statistics.median(_wall(bench, store=(True,)) for _ in range(repeat))
    both = statistics.median(_wall(bench, store=(True, False)) for _ in range(repeat))
    left = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    products = 40

    def multiply() -> None:
        for _ in range(products):
            torch.mm(left, left)

    multiply()
    torch.cuda.synchronize()
    alone = statistics.median(_timed(torch, multiply) for _ in range(repeat))
    half = bench.count // 2
    rounds = int(alone / one) + 2  # copies go on in both directions for as long as the products do
    beside = []
    for _ in range(repeat):
        jobs = {store: {bench.submit(store=store, count=half) for _ in range(rounds)} for store in (True, False)}
        beside.append(_timed(torch, multiply))
        for store, ids in jobs.items():
            bench.handler(store=store).wait(ids)
            bench.handler(store=store).get_finished()
    wake = asyncio.run(_wake_seconds(bench))
    bench.close()
    small = Bench(torch, 4 * KIB, 10_000 * 4 * KIB)
    submits: list[float] = []
    for _ in range(20):
        spec = small.spec(store=True)
        began = time.perf_counter()
        small.pair.gpu_to_cpu_handler.transfer_async(-1 - len(submits), spec)
        submits.append(time.perf_counter() - began)
        small.pair.gpu_to_cpu_handler.wait({-len(submits)})
        small.pair.gpu_to_cpu_handler.get_finished()
    small.close()
    slowdown = statistics.median(beside) / alone - 1
    submit = statistics.median(submits)
    return {
        "both_directions_over_one": round(2 * one / both, 2),
        "matmul_slowdown": round(slowdown, 4),
        "submit_10000_descriptors_us": round(submit * 1e6, 1),
        "copy_end_to_task_p50_us": round(wake * 1e6, 1),
        "met": {
            "both directions": 2 * one / both >= MIN_BOTH,
            "matmul slowdown": slowdown <= MAX_SLOWDOWN,
            "submit": submit <= MAX_SUBMIT_SECONDS,
            "completion": wake <= MAX_WAKE_SECONDS,
        },
    }


def _wall(bench: Bench, store: tuple[bool, ...]) -> float:
    began = time.perf_counter()
    jobs = [(direction, bench.submit(store=direction, count=bench.count // 2)) for direction in store]
    for direction, job in jobs:
        bench.handler(store=direction).wait({job})
        bench.handler(store=direction).get_finished()
    return time.perf_counter() - began


async def _wake_seconds(bench: Bench, rounds: int = 200) -> float:
    """Return the median time from the end of a copy on the device to the awaiting task, the copy subtracted."""
    loop, bridge = asyncio.get_running_loop(), CompletionBridge()
    handler = bench.handler(store=False)
    handler.notify = bridge.notify
    times = []
    for _ in range(rounds):
        woken: asyncio.Future[float] = loop.create_future()
        loop.add_reader(bridge.fileno(), _note_time, woken)
        began = time.perf_counter()
        bench.submit(store=False, count=1)
        at = await woken
        loop.remove_reader(bridge.fileno())
        bridge.consume()
        (result,) = handler.get_finished()
        times.append(at - began - (result.transfer_time or 0.0))
    handler.notify = None
    bridge.close()
    return statistics.median(times)


def _note_time(woken: asyncio.Future[float]) -> None:
    if not woken.done():
        woken.set_result(time.perf_counter())
