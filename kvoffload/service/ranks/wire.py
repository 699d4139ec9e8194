"""What travels between the deciding process and its ranks, as msgpack.

Commands and reports carry the epoch (one life of the deciding process, drawn at random, so it also keeps strangers out)
and the incarnation (one life of a rank process). Whatever carries another one is dropped and counted.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from kvoffload.errors import UsageError
from kvoffload.manager.specs import CPULoadStoreSpec, GPULoadStoreSpec
from kvoffload.transfer.base import TransferSpec

PROTOCOL = 1
READY, LEAVING = b"ready", b"leaving"
"""What a rank says after its hello: it can take commands; it takes no more, but copies may still run."""


class Hello(msgspec.Struct):
    """What a rank says of itself when it connects."""

    protocol: int
    version: str
    rank: int
    world_size: int
    pid: int
    incarnation: int
    num_blocks: int
    page_sizes: list[int]
    group_page_sizes: list[list[int]]
    gpu_block_sizes: list[int]
    block_size_factor: int
    device: str


class Welcome(msgspec.Struct):
    """What the deciding process answers: go on, or why not. The region's descriptor follows when neither is said.

    Attributes:
        refusal: Why this rank does not fit.
        given_up: Why the deciding process ends; another one may come.
    """

    refusal: str | None = None
    given_up: str | None = None
    epoch: int = 0
    transport: Literal["zmq", "piggyback"] = "zmq"
    endpoint: str = ""
    debug_checks: bool = False


class Command(msgspec.Struct, array_like=True):
    """One transfer to run on every rank; block ids are int64, little-endian."""

    job: int
    store: bool
    gpu: bytes
    group_sizes: list[int]
    block_indices: list[int]
    cpu: bytes
    step: int = 0


class Commands(msgspec.Struct, array_like=True):
    """Commands in order, the same for every rank; `first` is the number of the first one in this epoch.

    Each rank looks at its own entry of `incarnations` (0: it is not up) and of `starts`: commands with a smaller number
    were meant for an earlier life of that rank and have ended there.
    """

    epoch: int
    first: int
    commands: list[Command]
    incarnations: list[int]
    starts: list[int]


class Report(msgspec.Struct, array_like=True):
    """How one transfer ended on one rank."""

    job: int
    success: bool
    size: int
    queue_seconds: float
    copy_seconds: float
    error: str | None = None


class Reports(msgspec.Struct, array_like=True):
    """What ended on one rank since its last reports."""

    epoch: int
    incarnation: int
    rank: int
    reports: list[Report]


def command(job: int, spec: TransferSpec, step: int) -> Command:
    """Return the command for a transfer.

    Raises:
        UsageError: The spec is not between GPU and CPU.
    """
    src, dst = spec
    if isinstance(src, GPULoadStoreSpec) and isinstance(dst, CPULoadStoreSpec):
        gpu, cpu, store = src, dst, True
    elif isinstance(src, CPULoadStoreSpec) and isinstance(dst, GPULoadStoreSpec):
        gpu, cpu, store = dst, src, False
    else:
        raise UsageError(f"ranks move blocks between GPU and CPU, got {src.medium()} to {dst.medium()}")
    return Command(
        job,
        store,
        gpu.block_ids.astype("<i8", copy=False).tobytes(),
        list(gpu.group_sizes),
        list(gpu.block_indices),
        cpu.block_ids.astype("<i8", copy=False).tobytes(),
        step,
    )


def transfer_spec(order: Command) -> TransferSpec:
    """Return the transfer that a command asks for; its specs were checked where it was made.

    Raises:
        ValueError: Block ids are cut off.
    """
    gpu = GPULoadStoreSpec.of_blocks(np.frombuffer(order.gpu, "<i8"))
    gpu.group_sizes, gpu.block_indices = tuple(order.group_sizes), tuple(order.block_indices)
    cpu = CPULoadStoreSpec.of_blocks(np.frombuffer(order.cpu, "<i8"))
    return (gpu, cpu) if order.store else (cpu, gpu)


encode = msgspec.msgpack.Encoder().encode
decode_commands = msgspec.msgpack.Decoder(Commands).decode
decode_reports = msgspec.msgpack.Decoder(Reports).decode
decode_hello = msgspec.msgpack.Decoder(Hello).decode
decode_welcome = msgspec.msgpack.Decoder(Welcome).decode
