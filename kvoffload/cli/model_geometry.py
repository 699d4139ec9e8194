"""The bytes of a model's KV cache from its numbers, since before the start there are no tensors to look at."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvoffload.config import OffloadConfig
from kvoffload.errors import ConfigError
from kvoffload.spec.base import KVCacheConfig

DTYPE_BYTES = {
    "float32": 4, "float16": 2, "bfloat16": 2, "half": 2, "fp16": 2, "bf16": 2, "fp8": 1, "float8_e4m3fn": 1,
    "float8_e5m2": 1, "int8": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one KV-cache group, all alike.

    Attributes:
        layers: How many.
        kv_heads: Heads of K and of V, over all ranks; unused with `latent_dim`.
        head_dim: Numbers per head.
        latent_dim: Numbers per token of a latent (MLA) cache, which every rank holds whole; 0: K and V.
    """

    layers: int
    kv_heads: int = 1
    head_dim: int = 1
    latent_dim: int = 0

    def token_bytes(self, dtype_bytes: int, world_size: int) -> int:
        """Return the bytes of one token in one layer of one rank."""
        if self.latent_dim:
            return self.latent_dim * dtype_bytes
        if self.kv_heads % world_size and world_size % self.kv_heads:
            raise ConfigError(
                f"{self.kv_heads} KV heads cannot be cut over world_size {world_size}: one must divide the other; set "
                "world_size to a divisor or a multiple of the heads"
            )
        return 2 * max(1, self.kv_heads // world_size) * self.head_dim * dtype_bytes


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """A model's KV cache.

    Attributes:
        groups: Its KV-cache groups.
        dtype_bytes: Bytes of one number.
        shared_tensors: The groups' layers share tensors, the first of each group one, and so on.
    """

    groups: tuple[LayerGroup, ...]
    dtype_bytes: int = 2
    shared_tensors: bool = False

    def group_pages(self, config: OffloadConfig) -> list[list[int]]:
        """Return the bytes of one engine block in each layer of one rank, per group.

        Raises:
            ConfigError: The configuration has another number of groups, or the heads cannot be cut over the ranks.
        """
        sizes = config.gpu_block_sizes
        if len(sizes) == 1:
            sizes *= len(self.groups)
        if len(sizes) != len(self.groups):
            raise ConfigError(
                f"gpu_block_size {list(sizes)} names {len(sizes)} KV-cache groups, the model was described with "
                f"{len(self.groups)}: give one --group for each, or one gpu_block_size for all"
            )
        return [
            [group.token_bytes(self.dtype_bytes, config.world_size) * tokens] * group.layers
            for group, tokens in zip(self.groups, sizes, strict=True)
        ]

    def cache_config(self, config: OffloadConfig) -> KVCacheConfig:
        """Return the sizes that a spec needs."""
        pages = self.group_pages(config)
        if self.shared_tensors:
            most = max(map(len, pages))
            tensors = [max(group[index] for group in pages if index < len(group)) for index in range(most)]
        else:
            tensors = [page for group in pages for page in group]
        sizes = config.gpu_block_sizes
        return KVCacheConfig(0, tuple(tensors), sizes * len(pages) if len(sizes) == 1 else sizes)


def read_model(path: Path) -> tuple[LayerGroup, int]:
    """Return one group of all layers, and the bytes of a number, from a model's `config.json` as Hugging Face has it.

    Raises:
        ConfigError: It cannot be read, or does not say what is needed.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"--model {path} cannot be read: {why}; give the model's config.json") from None
    if not isinstance(values, Mapping):
        raise ConfigError(f"--model {path} must hold a JSON object of keys and values; give the model's config.json")
    inner = values.get("text_config")
    values = {**values, **inner} if isinstance(inner, Mapping) else values
    dtype = str(values.get("torch_dtype") or values.get("dtype") or "bfloat16")
    if dtype not in DTYPE_BYTES:
        raise ConfigError(
            f"--model {path}: torch_dtype {dtype!r} is not known; give --dtype, one of {', '.join(DTYPE_BYTES)}"
        )
    layers = _number(values, path, "num_hidden_layers")
    if values.get("kv_lora_rank"):
        latent = _number(values, path, "kv_lora_rank") + _number(values, path, "qk_rope_head_dim")
        return LayerGroup(layers, latent_dim=latent), DTYPE_BYTES[dtype]
    heads = _number(values, path, "num_attention_heads")
    kv_heads = _number(values, path, "num_key_value_heads") if values.get("num_key_value_heads") else heads
    if values.get("head_dim"):
        return LayerGroup(layers, kv_heads, _number(values, path, "head_dim")), DTYPE_BYTES[dtype]
    hidden = _number(values, path, "hidden_size")
    if hidden < heads:
        raise ConfigError(f"--model {path}: hidden_size {hidden} is below num_attention_heads {heads}; give --group")
    return LayerGroup(layers, kv_heads, hidden // heads), DTYPE_BYTES[dtype]


def _number(values: Mapping[str, Any], path: Path, name: str) -> int:
    value = values.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            f"--model {path}: {name} must be a positive whole number, got {value!r}; or give --group instead"
        )
    return value


def parse_group(text: str) -> LayerGroup:
    """Read `LAYERS:KV_HEADS:HEAD_DIM`, or `LAYERS:mla:LATENT_DIM`.

    Raises:
        ValueError: It is neither.
    """
    parts: Sequence[str] = text.split(":")
    if len(parts) != 3:
        raise ValueError(text)
    layers, size = int(parts[0]), int(parts[2])
    group = LayerGroup(layers, latent_dim=size) if parts[1] == "mla" else LayerGroup(layers, int(parts[1]), size)
    if min(group.layers, group.kv_heads, group.head_dim, size) < 1:
        raise ValueError(text)
    return group
