"""Configuration models: frozen, unknown keys refused, sizes with units.

`OffloadConfig` is the one object that says how a service behaves. It is checked as a whole when it is made; what is
wrong raises `ConfigError`, never pydantic's own error. `OffloadConfig.load` reads a file, then `KVOFFLOAD_*` variables,
then arguments; later ones win.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema, model_validator

from kvoffload.chain import GroupLayout
from kvoffload.config_errors import Places, config_error, shown
from kvoffload.config_sources import merge, read_env, read_file
from kvoffload.config_values import SIZE, block_sizes, integer, items, real, size_in_bytes, switch
from kvoffload.errors import ConfigError

Size = Annotated[
    int,
    BeforeValidator(size_in_bytes),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "exclusiveMinimum": 0}, {"type": "string", "pattern": SIZE.pattern}]}
    ),
]
Integer = Annotated[int, BeforeValidator(integer)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(real)]
Names = Annotated[tuple[str, ...], BeforeValidator(items)]
Consumer = Literal["vllm", "dynamo", "llm-d", "vllm-router", "aibrix"]
Medium = Literal["GPU", "CPU", "STORAGE"]


class _Model(BaseModel):
    """Frozen model that knows its keys, and whose errors are `ConfigError`."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True, validate_default=False
    )

    if not TYPE_CHECKING:  # each model tells checkers what its keys accept: text with units, lists, tables

        def __init__(self, **data: object) -> None:
            try:
                super().__init__(**data)
            except ValidationError as error:
                raise config_error(type(self), error) from None

    @classmethod
    def model_validate(cls, obj: object, **_options: object) -> Self:
        """Return a checked model from a mapping, or the model itself; pydantic's options change nothing here.

        Raises:
            ConfigError: A key or value is wrong.
        """
        if isinstance(obj, cls):
            return obj
        if not isinstance(obj, Mapping):
            raise ConfigError(f"{cls.__name__} needs a mapping of keys to values, got {shown(obj)}")
        return cls(**obj)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **_options: object) -> Self:
        """Return a checked model from a JSON object; pydantic's options change nothing here.

        Raises:
            ConfigError: It is no JSON, or a key or value is wrong.
        """
        try:
            return cls.model_validate(json.loads(json_data))
        except (ValueError, TypeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{cls.__name__} needs a JSON object: {error}") from None

    if not TYPE_CHECKING:  # checkers know that a frozen model takes no values

        def __setattr__(self, name: str, value: object) -> None:
            if name in type(self).model_fields:
                raise ConfigError(f"{name} cannot be set to {value!r}: {type(self).__name__} is frozen; make a new one")
            super().__setattr__(name, value)


class EventsConfig(_Model):
    """The events feed: where it is published and for whom."""

    endpoint: str = "tcp://127.0.0.1:5557"
    """ZeroMQ endpoint of the feed; the rank is added to the port."""
    replay_endpoint: str | None = "tcp://127.0.0.1:5558"
    """ZeroMQ endpoint that answers replay requests; None: no replay."""
    bind: bool | Literal["auto"] = True
    """True binds, False connects, "auto" follows vLLM: it connects unless the host is a wildcard or the path local."""
    consumer: Annotated[tuple[Consumer, ...], BeforeValidator(items)] = ("vllm",)
    """Whom this endpoint must suit; sets encoding, topic, contiguity and sequence start where they are not given."""
    pod: str | None = None
    """Name of this pod in the topic; default: the instance id."""
    topic: str | None = None
    """Topic frame; default `kv@<pod>@<model>`."""
    dp_rank: Integer = Field(default=0, ge=0)
    """Data-parallel rank in each batch; added to the ports."""
    ranks: Integer = Field(default=1, ge=1)
    """Data-parallel ranks on this host: their ports must not overlap."""
    media: Annotated[tuple[Medium, ...], BeforeValidator(items)] = ("GPU", "CPU")
    """Media that are announced."""
    merge_from: Names = ()
    """Feeds of the engine that are merged into this one."""
    merge_replay_from: Names = ()
    """Replay endpoints of those feeds, in the same order."""
    encoding: Literal["map", "array"] | None = None
    """How an event is packed; default: what the consumer reads."""
    hash_mode: Literal["uint64", "bytes"] = "uint64"
    """Block hashes as unsigned 64-bit integers, or as their full bytes."""
    contiguity: Literal["relaxed", "strict"] | None = None
    """Whether a replay may skip long runs of dead numbers; default: what the consumer bears."""
    sequence_start: Literal["zero", "epoch"] | None = None
    """Where a new life's numbers start; default: what the consumer needs."""
    sole_publisher: bool = True
    """This is the only feed its consumers have of this worker; False beside the engine's own feed."""
    batch_window_seconds: Seconds = 0.05
    """How long events are collected into one batch."""
    heartbeat_seconds: Seconds = 1.0
    """Silence after which an empty batch is sent; 0: none."""
    start_announcement: bool = True
    """Take the first number to tell that a new life began."""
    replay_window: Integer = Field(default=10_000, ge=1)
    """Sequence numbers that can be replayed one by one."""
    max_queue_size: Integer = Field(default=100_000, ge=1)
    """Publications that may wait for the sender; beyond it sends are dropped, changes are not."""
    max_tombstones: Integer = Field(default=1_000_000, ge=0)
    """Removed blocks remembered for consumers that come back after the window."""
    max_sequences: Integer = Field(default=5_000_000, ge=1)
    """Numbers after which a strict feed starts a new life."""
    indexer: str | None = None
    """URL of a Dynamo indexer where the feed registers itself at start and close."""
    also: tuple[EventsConfig, ...] = ()
    """Further endpoints of the same events, each with its own consumer, numbers and journal."""

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            endpoint: str = ...,
            replay_endpoint: str | None = ...,
            bind: bool | Literal["auto"] = ...,
            consumer: Consumer | Sequence[Consumer] = ...,
            pod: str | None = ...,
            topic: str | None = ...,
            dp_rank: int = ...,
            ranks: int = ...,
            media: Medium | Sequence[Medium] = ...,
            merge_from: str | Sequence[str] = ...,
            merge_replay_from: str | Sequence[str] = ...,
            encoding: Literal["map", "array"] | None = ...,
            hash_mode: Literal["uint64", "bytes"] = ...,
            contiguity: Literal["relaxed", "strict"] | None = ...,
            sequence_start: Literal["zero", "epoch"] | None = ...,
            sole_publisher: bool = ...,
            batch_window_seconds: float = ...,
            heartbeat_seconds: float = ...,
            start_announcement: bool = ...,
            replay_window: int = ...,
            max_queue_size: int = ...,
            max_tombstones: int = ...,
            max_sequences: int = ...,
            indexer: str | None = ...,
            also: Sequence[EventsConfig | Mapping[str, Any]] = ...,
        ) -> None: ...


def _events(value: object) -> object:
    """Accept a switch where only the defaults are wanted."""
    on = switch(value)
    if on is None:
        return value
    return EventsConfig() if on else None


class OffloadConfig(_Model):
    """How kvoffload offloads: memory, blocks, policy, waits, feed. Frozen and checked as a whole."""

    cpu_bytes_to_use: Size
    """Host memory for all ranks together, in bytes or with a unit ("8GiB", "10GB")."""
    gpu_block_size: Annotated[int | tuple[int, ...], BeforeValidator(block_sizes)]
    """Tokens in one of the engine's own blocks; one number for each KV-cache group where they differ."""
    block_size: Integer | None = None
    """Tokens in one offloaded block, a multiple of gpu_block_size; default: as gpu_block_size."""
    world_size: Integer = Field(default=1, ge=1)
    """Ranks that share the host memory."""
    eviction_policy: str = Field(default="lru", min_length=1)
    """Cache policy: lru, arc, adaptive, or module.path:Class for your own."""
    store_threshold: Integer = Field(default=0, ge=0)
    """Requests that must have asked for a block before it is stored; 0 and 1 store everything."""
    max_tracker_size: Integer = Field(default=64_000, ge=1)
    """Blocks whose requests are counted for store_threshold."""
    spec_name: str = Field(default="CPUOffloadingSpec", min_length=1)
    """What makes manager and handlers: a registered name, or a class in spec_module_path."""
    spec_module_path: str | None = None
    """Module that holds a spec which is not registered."""
    model_name: str | None = None
    """Model served: a metrics label and a part of the feed's topic."""
    instance_id: str | None = None
    """Name of this instance; default: made from host and process, in metrics `0`, as they carry no host names."""
    pin_memory: Literal["auto", "require", "never"] = "auto"
    """Page-locked host memory: try and fall back, insist, or never."""
    pending_wait_seconds: Seconds = 0.2
    """How long a load waits for blocks that are being written."""
    load_deadline_seconds: Seconds = 5.0
    """How long a caller waits for a load altogether; a copy that takes longer counts as hung."""
    store_deadline_seconds: Seconds = 30.0
    """How long a store's copy may take before it counts as hung."""
    lease_seconds: Seconds = 60.0
    """How long a lease may hold its blocks."""
    drain_seconds: Seconds = 10.0
    """How long closing waits for running copies."""
    max_inflight_store_bytes: Size = 1 << 30
    """Bytes of stores that may be queued or running."""
    max_inflight_load_bytes: Size = 1 << 30
    """Bytes of loads that may be queued or running."""
    max_inflight_jobs: Integer = Field(default=1024, ge=1)
    """Jobs per direction that may be queued or running."""
    fail_open: bool = True
    """An unhealthy service serves misses and rejects stores instead of raising."""
    enabled: bool = True
    """False starts the service switched off: lookups miss, nothing is stored."""
    prefill_tokens_per_second: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Prefill speed of the engine: turns loaded tokens into saved seconds."""
    debug_checks: bool = False
    """Check the books after each step, paint freed GPU blocks and compare checksums (host memory); slow."""
    events: Annotated[EventsConfig | None, BeforeValidator(_events)] = None
    """The events feed; true: with its defaults, None: off."""

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            cpu_bytes_to_use: int | str,
            gpu_block_size: int | Sequence[int],
            block_size: int | None = ...,
            world_size: int = ...,
            eviction_policy: str = ...,
            store_threshold: int = ...,
            max_tracker_size: int = ...,
            spec_name: str = ...,
            spec_module_path: str | None = ...,
            model_name: str | None = ...,
            instance_id: str | None = ...,
            pin_memory: Literal["auto", "require", "never"] = ...,
            pending_wait_seconds: float = ...,
            load_deadline_seconds: float = ...,
            store_deadline_seconds: float = ...,
            lease_seconds: float = ...,
            drain_seconds: float = ...,
            max_inflight_store_bytes: int | str = ...,
            max_inflight_load_bytes: int | str = ...,
            max_inflight_jobs: int = ...,
            fail_open: bool = ...,
            enabled: bool = ...,
            prefill_tokens_per_second: float | None = ...,
            debug_checks: bool = ...,
            events: EventsConfig | Mapping[str, Any] | bool | None = ...,
        ) -> None: ...

    @model_validator(mode="after")
    def _check_blocks(self) -> Self:
        sizes = self.gpu_block_sizes
        unaligned = next((size for size in sizes if size % min(sizes)), None)
        if unaligned is not None:
            raise ConfigError(f"gpu_block_size must hold multiples of its smallest, {min(sizes)}; got {unaligned}")
        if self.block_size is None:
            return self
        if len(set(sizes)) > 1:
            shown = " and ".join(str(size) for size in dict.fromkeys(sizes))
            raise ConfigError(
                f"block_size {self.block_size} needs KV-cache groups of one gpu_block_size, got {shown}: leave it out"
            )
        unit = sizes[0]
        if self.block_size < unit or self.block_size % unit:
            below = max(unit, self.block_size // unit * unit)
            raise ConfigError(
                f"block_size must be a positive multiple of gpu_block_size {unit}, such as {below} or {below + unit}; "
                f"got {self.block_size}"
            )
        return self

    @property
    def gpu_block_sizes(self) -> tuple[int, ...]:
        """Tokens in an engine block, per KV-cache group."""
        return (self.gpu_block_size,) if isinstance(self.gpu_block_size, int) else self.gpu_block_size

    @property
    def block_size_factor(self) -> int:
        """Engine blocks in one offloaded block."""
        return 1 if self.block_size is None else self.block_size // self.gpu_block_sizes[0]

    @property
    def hash_block_size(self) -> int:
        """Tokens per hash: the smallest engine block of all groups."""
        return min(self.gpu_block_sizes)

    def group_layouts(self) -> tuple[GroupLayout, ...]:
        """Return how each KV-cache group cuts a sequence."""
        return tuple(GroupLayout(size, self.block_size_factor) for size in self.gpu_block_sizes)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str] | None = None, *, env: Mapping[str, str] | None = None, **override: object
    ) -> Self:
        """Return the configuration from a file, then `KVOFFLOAD_*` variables, then arguments; later ones win.

        Args:
            path: A TOML or JSON file, told apart by its suffix.
            env: Variables; default: the process's. `KVOFFLOAD_EVENTS__ENDPOINT` is `endpoint` of `events`; lists are
                separated by commas; `none` is None.
            **override: Keys of this model. A mapping for `events` is merged into what file and variables say.

        Raises:
            ConfigError: The file cannot be read, or a key or value is wrong.
        """
        if not isinstance(path, str | os.PathLike | None):
            raise ConfigError(f"path must be the path of a .toml or .json file; got {path!r}")
        values: dict[str, Any] = {}
        file = read_file(Path(path)) if path is not None else {}
        variables = read_env(os.environ if env is None else env, cls.model_fields, EventsConfig.model_fields)
        for source in (file, variables, override):
            merge(values, source)
        try:
            return cls(**values)
        except ConfigError as error:
            raise Places(path, file, variables, override).tell(error) from None
