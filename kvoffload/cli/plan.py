"""Compute how many bytes an offloaded block takes, per group and rank, and how many blocks a configuration holds.

Nothing is allocated. CONFIG is a TOML or JSON file (`docs/configuration.md`); variables `KVOFFLOAD_*` win over it.
Layers of different groups that share one tensor are counted once: give them to one group only.

Examples:
  kvoffload plan kvoffload.toml --layers 32 --kv-heads 8 --head-dim 128
  kvoffload plan kvoffload.toml --layers 61 --token-bytes 1152          (MLA: 576 values of 2 bytes per token and layer)
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from kvoffload.cli.report import report
from kvoffload.cli.values import positive, size
from kvoffload.config import OffloadConfig
from kvoffload.errors import ConfigError
from kvoffload.memory import preflight
from kvoffload.spec.base import KVCacheConfig
from kvoffload.spec.cpu import CPUOffloadingSpec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True)
class Plan:
    """What a configuration means in bytes.

    Attributes:
        group_bytes: Bytes of one engine block on one rank, per KV-cache group.
        rank_block_bytes: Bytes of one offloaded block on one rank.
        block_bytes: Bytes of one offloaded block over all ranks.
        num_blocks: Offloaded blocks.
        rank_bytes: Host memory of one rank.
        total_bytes: Host memory of all ranks.
        unused_bytes: What is left of `cpu_bytes_to_use`.
        tokens: Tokens that all blocks hold together, if they are all of group 0.
    """

    group_bytes: tuple[int, ...]
    rank_block_bytes: int
    block_bytes: int
    num_blocks: int
    rank_bytes: int
    total_bytes: int
    unused_bytes: int
    tokens: int


def make_plan(config: OffloadConfig, layers: list[int], token_bytes: int) -> Plan:
    """Compute the plan.

    Args:
        config: The configuration.
        layers: Layers per KV-cache group.
        token_bytes: Bytes of one token in one layer on one rank.

    Raises:
        ConfigError: The groups do not fit the configuration, or not one block fits the memory.
    """
    sizes = config.gpu_block_sizes
    sizes = sizes * len(layers) if len(sizes) == 1 else sizes
    if len(layers) != len(sizes):
        raise ConfigError(f"--layers must name {len(sizes)} groups, as gpu_block_size {list(sizes)}; got {layers}")
    pages = tuple(count * tokens * token_bytes for count, tokens in zip(layers, sizes, strict=True))
    spec = CPUOffloadingSpec(config, KVCacheConfig(0, pages, sizes))
    total = spec.num_blocks * spec.offloaded_block_bytes
    return Plan(
        group_bytes=pages,
        rank_block_bytes=spec.offloaded_block_bytes // config.world_size,
        block_bytes=spec.offloaded_block_bytes,
        num_blocks=spec.num_blocks,
        rank_bytes=total // config.world_size,
        total_bytes=total,
        unused_bytes=config.cpu_bytes_to_use - total,
        tokens=spec.num_blocks * sizes[0] * config.block_size_factor,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("config", type=Path, metavar="CONFIG", help="configuration file (.toml or .json)")
    add("--layers", required=True, type=positive, nargs="+", metavar="N", help="layers, per KV-cache group")
    add("--kv-heads", type=positive, metavar="N", help="KV heads of the model; the ranks share them")
    add("--head-dim", type=positive, metavar="N", help="values of one head")
    add("--dtype", choices=sorted(DTYPE_BYTES), default="bfloat16", help="of the KV cache (bfloat16)")
    add(
        "--token-bytes", type=size, metavar="SIZE", help="bytes of one token in one layer on one rank, instead of heads"
    )
    add("--json", action="store_true", help="one JSON object on standard output")


def run(args: argparse.Namespace) -> int:
    """Report the plan; 1 when this machine cannot hold it."""
    config = OffloadConfig.load(args.config)
    plan = make_plan(config, args.layers, _token_bytes(args, config.world_size))
    limits = (preflight.available_memory_bytes(), preflight.cgroup_available_bytes())
    available = min((limit for limit in limits if limit is not None), default=None)
    fits = available is None or plan.total_bytes <= available
    values: dict[str, object] = {
        "tokens_per_engine_block": ", ".join(map(str, config.gpu_block_sizes)),
        "engine_blocks_per_offloaded_block": config.block_size_factor,
        "ranks": config.world_size,
        "bytes_per_engine_block_and_rank": {
            f"group_{index}_bytes": size_bytes for index, size_bytes in enumerate(plan.group_bytes)
        },
        "bytes_per_offloaded_block_and_rank": plan.rank_block_bytes,
        "bytes_per_offloaded_block": plan.block_bytes,
        "offloaded_blocks": plan.num_blocks,
        "tokens": plan.tokens,
        "bytes_per_rank": plan.rank_bytes,
        "total_bytes": plan.total_bytes,
        "unused_bytes": plan.unused_bytes,
        "available_bytes": available,
        "fits_this_machine": fits,
    }
    report(f"kvoffload plan {args.config}", values, as_json=args.json)
    return 0 if fits else 1


def _token_bytes(args: argparse.Namespace, ranks: int) -> int:
    if args.token_bytes is not None:
        return int(args.token_bytes)
    if args.kv_heads is None or args.head_dim is None:
        raise ConfigError("give --kv-heads and --head-dim, or --token-bytes")
    heads = max(1, -(-args.kv_heads // ranks))  # fewer heads than ranks: each rank holds one
    return int(2 * heads * args.head_dim * DTYPE_BYTES[args.dtype])
