"""Specs for vLLM whose copies go wrong on purpose; vLLM loads them by `spec_module_path`, as it loads the real one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from kvoffload.integrations.vllm import KVOffloadSpec
from kvoffload.transfer.host import HostStream
from kvoffload.transfer.host_copy import copy_plan
from kvoffload.transfer.plan import CopyPlan

FAILURES = {"left": 0}
"""How many more copies of the failing kind fail; set by the program that runs the engine."""


def _zero(plan: CopyPlan) -> None:
    copy_plan(plan)
    if not plan.gpu_to_cpu:
        for segment in plan.segments():
            for address, size in zip(segment.dst.tolist(), segment.sizes.tolist(), strict=True):
                ctypes.memset(address, 0, size)


def _fail(gpu_to_cpu: bool) -> Callable[[CopyPlan], None]:
    def copy(plan: CopyPlan) -> None:
        if plan.gpu_to_cpu is gpu_to_cpu and FAILURES["left"] > 0:
            FAILURES["left"] -= 1
            for segment in plan.segments():  # what a copy that broke off may leave behind
                ctypes.memset(int(segment.dst[0]), 0xFF, int(segment.sizes[0]))
            raise OSError("copy failed on purpose")
        copy_plan(plan)

    return copy


class CorruptedLoads(KVOffloadSpec):
    """Loads bring zeros and say that all went well."""

    @staticmethod
    def make_stream(name: str, on_done: Callable[[], None]) -> HostStream:
        return HostStream(name, on_done, copier=_zero)


class FailingLoads(KVOffloadSpec):
    """Loads fail as long as `FAILURES` says."""

    @staticmethod
    def make_stream(name: str, on_done: Callable[[], None]) -> HostStream:
        return HostStream(name, on_done, copier=_fail(gpu_to_cpu=False))


class FailingStores(KVOffloadSpec):
    """Stores fail as long as `FAILURES` says."""

    @staticmethod
    def make_stream(name: str, on_done: Callable[[], None]) -> HostStream:
        return HostStream(name, on_done, copier=_fail(gpu_to_cpu=True))
