"""How many bytes a configuration takes, before anything is mapped: per block, group, rank and in total.

The model's geometry comes from its config.json, or from options: there are no tensors yet. The exit code is 1 when this
machine or its cgroup has less memory available.

Examples:
  kvoffload plan offload.toml --model MODEL/config.json
  kvoffload plan offload.toml --layers 32 --kv-heads 8 --head-dim 128
  kvoffload plan --set cpu_bytes_to_use=64GiB --set gpu_block_size=16 --set world_size=4 --group 80:8:128
  kvoffload plan offload.toml --group 61:mla:576 --json
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvoffload.cli.main import FAILED, OK
from kvoffload.cli.model_geometry import DTYPE_BYTES, LayerGroup, ModelGeometry, parse_group, read_model
from kvoffload.cli.report import report
from kvoffload.cli.values import add_json, positive
from kvoffload.config import OffloadConfig
from kvoffload.errors import ConfigError
from kvoffload.memory import preflight
from kvoffload.spec.cpu import CPUOffloadingSpec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add(
        "config",
        nargs="?",
        type=Path,
        metavar="CONFIG",
        help="configuration file, .toml or .json (default only --set)",
    )
    add(
        "--set",
        action="append",
        default=[],
        type=_setting,
        metavar="KEY=VALUE",
        help="set a key of the configuration; may be repeated (default as in CONFIG)",
    )
    add("--model", type=Path, metavar="FILE", help="the model's config.json (default the options below)")
    add("--layers", type=positive, metavar="N", help="layers, all in one KV-cache group (default as in --model)")
    add(
        "--kv-heads",
        type=positive,
        metavar="N",
        help="with --layers: heads of K and of V, over all ranks (default none)",
    )
    add("--head-dim", type=positive, metavar="N", help="with --layers: numbers per head (default none)")
    add(
        "--latent-dim",
        type=positive,
        metavar="N",
        help="with --layers: numbers per token of a latent (MLA) cache, instead of heads (default none)",
    )
    add(
        "--group",
        action="append",
        default=[],
        type=_group,
        metavar="LAYERS:KV_HEADS:HEAD_DIM",
        help="the same for one of several KV-cache groups, once per group; LAYERS:mla:LATENT_DIM for a latent cache "
        "(default none)",
    )
    add(
        "--dtype", choices=sorted(DTYPE_BYTES), help="type of the KV cache's numbers (default the model's, or bfloat16)"
    )
    add("--shared-tensors", action="store_true", help="the groups' layers share tensors")
    add_json(parser)


def _setting(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (equals and key.strip()):
        raise argparse.ArgumentTypeError(f"must be KEY=VALUE, such as world_size=4; got {text!r}")
    return key.strip(), value.strip()


def _group(text: str) -> LayerGroup:
    try:
        return parse_group(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be LAYERS:KV_HEADS:HEAD_DIM or LAYERS:mla:LATENT_DIM, such as 32:8:128; got {text!r}"
        ) from None


def run(args: argparse.Namespace) -> int:
    """Compute and report."""
    config = OffloadConfig.load(args.config, **dict(args.set))
    values = plan(config, _geometry(args))
    report("kvoffload plan", values, as_json=args.json)
    return OK if values["fits"] else FAILED


def _geometry(args: argparse.Namespace) -> ModelGeometry:
    ways = {"--model": args.model, "--group": args.group, "--layers": args.layers}
    given = [name for name, value in ways.items() if value]
    if len(given) != 1:
        raise ConfigError(
            "say what the model's KV cache looks like, in one way: --model config.json, --layers with --kv-heads and "
            f"--head-dim, or --group 32:8:128; got {' and '.join(given) or 'none of them'}"
        )
    groups, dtype_bytes = tuple(args.group), DTYPE_BYTES["bfloat16"]
    if args.model is not None:
        group, dtype_bytes = read_model(args.model)
        groups = (group,)
    if args.layers is not None:
        groups = (_one_group(args),)
    if args.dtype is not None:
        dtype_bytes = DTYPE_BYTES[args.dtype]
    return ModelGeometry(groups, dtype_bytes, args.shared_tensors)


def _one_group(args: argparse.Namespace) -> LayerGroup:
    if args.latent_dim is not None:
        if args.kv_heads is not None or args.head_dim is not None:
            raise ConfigError(
                f"--latent-dim {args.latent_dim} describes a cache without heads: leave --kv-heads and --head-dim out"
            )
        return LayerGroup(args.layers, latent_dim=args.latent_dim)
    if args.kv_heads is None or args.head_dim is None:
        raise ConfigError(f"--layers {args.layers} needs --kv-heads and --head-dim, or --latent-dim")
    return LayerGroup(args.layers, args.kv_heads, args.head_dim)


def plan(
    config: OffloadConfig, geometry: ModelGeometry, system: preflight.SystemPaths = preflight.SYSTEM
) -> dict[str, object]:
    """Return what the configuration takes, with the arithmetic that the service itself uses.

    Raises:
        ConfigError: Not one block fits, or configuration and model disagree.
    """
    cache = geometry.cache_config(config)
    spec = CPUOffloadingSpec(config, cache)
    factor, ranks = config.block_size_factor, config.world_size
    block_tokens = config.hash_block_size * factor
    groups = len(geometry.groups)
    total = spec.host_bytes
    limits = {
        "memory_available_bytes": preflight.available_memory_bytes(system),
        "cgroup_available_bytes": preflight.cgroup_available_bytes(system),
    }
    return {
        "ranks": ranks,
        "tokens_per_engine_block": list(cache.gpu_block_sizes),
        "tokens_per_offloaded_block": [size * factor for size in cache.gpu_block_sizes],
        "engine_block_bytes_per_rank": cache.bytes_per_block,
        "group_block_bytes_per_rank": [sum(pages) * factor for pages in geometry.group_pages(config)],
        "offloaded_block_bytes_per_rank": cache.bytes_per_block * factor,
        "offloaded_block_bytes": spec.offloaded_block_bytes,
        "offloaded_blocks": spec.num_blocks,
        "tokens_held": spec.num_blocks // groups * block_tokens,
        "rank_bytes": total // ranks,
        "total_bytes": total,
        "budget_bytes": config.cpu_bytes_to_use,
        "unused_bytes": config.cpu_bytes_to_use - total,
        **limits,
        "shm_free_bytes": _shm(system),
        "needs_shm": False if ranks == 1 else "only where ranks meet by a name",
        "fits": all(available is None or total <= available for available in limits.values()),
    }


def _shm(system: preflight.SystemPaths) -> int | None:
    try:
        return preflight.shm_available_bytes(system)
    except OSError:
        return None
