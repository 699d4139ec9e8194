"""Copies between host buffers through the real handlers, as a share of one thread's memcpy in the same run.

Each repetition goes through all cases and measures memcpy right before each copy; the median of the ratios is reported.
On a shared machine only such neighbours compare.

Examples:
  kvoffload bench host
  kvoffload bench host --bytes 64MiB --json --check
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffload.cli.main import FAILED, OK
from kvoffload.cli.report import print_json, print_table, readable_bytes
from kvoffload.cli.values import add_check, add_json, add_repeat, add_seed, size
from kvoffload.errors import ConfigError
from kvoffload.manager.specs import CPULoadStoreSpec, GPULoadStoreSpec
from kvoffload.memory.block_tensor import BlockTensor
from kvoffload.memory.canonical import CanonicalKVCaches
from kvoffload.memory.host_memory import allocate_host_tensors
from kvoffload.transfer.base import OffloadingHandler
from kvoffload.transfer.directional import CpuGpuOffloadingHandlers

KIB = 1024


@dataclass(frozen=True, slots=True)
class Case:
    """One block size and pattern, and the share of memcpy that it must reach.

    Attributes:
        name: As reported.
        block_bytes: Bytes of a block in one tensor.
        run: Blocks that follow each other on both sides.
        target: Least share of memcpy.
    """

    name: str
    block_bytes: int
    run: int
    target: float


CASES = (
    Case("4 KiB random", 4 * KIB, 1, 0.20),
    Case("4 KiB runs of 16", 4 * KIB, 16, 0.35),
    Case("64 KiB random", 64 * KIB, 1, 0.60),
    Case("256 KiB random", 256 * KIB, 1, 0.80),
    Case("2 MiB random", 2048 * KIB, 1, 0.80),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options."""
    add = parser.add_argument
    add("--bytes", type=size, default=256 * KIB * KIB, metavar="SIZE", help="bytes per measurement (default 256MiB)")
    add("--job-bytes", type=size, default=16 * KIB * KIB, metavar="SIZE", help="bytes per transfer (default 16MiB)")
    add_repeat(parser, 7)
    add_seed(parser)
    add_json(parser)
    add_check(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    least, most = min(case.block_bytes for case in CASES), max(case.block_bytes * case.run for case in CASES)
    if args.bytes < most:
        raise ConfigError(f"--bytes must be at least {most}, the bytes of the largest block; got {args.bytes}")
    if args.job_bytes < least:
        raise ConfigError(f"--job-bytes must be at least {least}, the bytes of a block; got {args.job_bytes}")
    memcpy_gbps, cases = measure(args.bytes, args.job_bytes, args.repeat, args.seed)
    all_met = all(case["met"] for case in cases.values())
    if args.json:
        what = {"bytes": args.bytes, "job_bytes": args.job_bytes, "repeat": args.repeat, "memcpy_gbps": memcpy_gbps}
        print_json({**what, "cases": cases, "all_met": all_met})
    else:
        print_table(f"host copies of {readable_bytes(args.bytes)}, share of memcpy's {memcpy_gbps} GB/s", cases)
    return FAILED if args.check and not all_met else OK


def measure(total_bytes: int, job_bytes: int, repeat: int, seed: int) -> tuple[float, dict[str, dict[str, float]]]:
    """Return memcpy's GB/s, and per case the median share of it over `repeat` interleaved measurements."""
    gpu, cpu = (allocate_host_tensors([total_bytes], 1)[0] for _ in range(2))
    rng = np.random.default_rng(seed)
    benches = [_Bench(case, gpu, cpu, job_bytes, rng) for case in CASES]
    memcpy: list[float] = []
    ratios: dict[str, dict[str, list[float]]] = {case.name: {"store": [], "load": []} for case in CASES}
    for _ in range(repeat):
        for bench in benches:
            for direction, shares in ratios[bench.case.name].items():
                memcpy.append(_memcpy_seconds(gpu, cpu))
                seconds = bench.seconds(store=direction == "store") * total_bytes / bench.num_bytes
                shares.append(memcpy[-1] / seconds)
    for bench in benches:
        bench.pair.shutdown()
    cases: dict[str, dict[str, float]] = {}
    for case in CASES:
        store, load = (round(statistics.median(ratios[case.name][direction]), 3) for direction in ("store", "load"))
        met = min(store, load) >= case.target
        cases[case.name] = {"store_ratio": store, "load_ratio": load, "target_ratio": case.target, "met": met}
    return round(total_bytes / statistics.median(memcpy) / 1e9, 2), cases


class _Bench:
    """One case over the shared buffers: handlers, and the same scattered blocks in every repetition."""

    def __init__(
        self, case: Case, gpu: BlockTensor, cpu: BlockTensor, job_bytes: int, rng: np.random.Generator
    ) -> None:
        self.case = case
        runs = max(1, gpu.row_bytes // (case.block_bytes * case.run))
        blocks = runs * case.run
        self.num_bytes = blocks * case.block_bytes
        gpu_rows, cpu_rows = (
            BlockTensor(side.base_address, blocks, case.block_bytes, case.block_bytes, owner=side.owner)
            for side in (gpu, cpu)
        )
        caches = CanonicalKVCaches.from_layers({"layer": gpu_rows}, block_dim=0)
        self.pair = CpuGpuOffloadingHandlers(caches, 1, blocks, cpu_tensors=[cpu_rows])
        gpu_ids, cpu_ids = (_scattered(runs, case.run, rng) for _ in range(2))
        step = max(1, job_bytes // case.block_bytes)
        self._jobs = [
            (GPULoadStoreSpec(gpu_ids[at : at + step], [len(gpu_ids[at : at + step])], [0]), CPULoadStoreSpec(part))
            for at in range(0, blocks, step)
            for part in [cpu_ids[at : at + step]]
        ]

    def seconds(self, *, store: bool) -> float:
        """Return how long all jobs take, from the first submission to the last copy's end."""
        handler: OffloadingHandler = self.pair.gpu_to_cpu_handler if store else self.pair.cpu_to_gpu_handler
        begin = time.perf_counter()
        for job_id, (gpu, cpu) in enumerate(self._jobs):
            handler.transfer_async(job_id, (gpu, cpu) if store else (cpu, gpu))
        handler.wait(set(range(len(self._jobs))))
        seconds = time.perf_counter() - begin
        handler.get_finished()
        return seconds


def _scattered(runs: int, run: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    return (rng.permutation(runs)[:, np.newaxis] * run + np.arange(run)).ravel().astype(np.int64)


def _memcpy_seconds(src: BlockTensor, dst: BlockTensor) -> float:
    begin = time.perf_counter()
    ctypes.memmove(dst.base_address, src.base_address, src.row_bytes)
    return time.perf_counter() - begin
