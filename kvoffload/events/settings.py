"""From `EventsConfig` to the settings of each endpoint: consumer presets, topics, and the ports of ranks."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal
from urllib.parse import urlsplit

import zmq

from kvoffload.config import EventsConfig
from kvoffload.errors import ConfigError
from kvoffload.events.wire import Encoding, HashMode

Contiguity = Literal["relaxed", "strict"]
SequenceStart = Literal["zero", "epoch"]


@dataclass(frozen=True, slots=True)
class Preset:
    """What one consumer needs.

    Attributes:
        encodings: What it reads, the default first.
        contiguity: What its replays must be.
        sequence_start: Where a new life's numbers must start.
        pod_topic: The topic must be `kv@<pod>@<model>`.
        empty_topic: The topic frame must be empty, unless the consumer is told another one.
        reannounce_on_join: It has only seconds of patience for a replay, too few for a long strict one: what is
            announced is told again when a subscriber connects.
    """

    encodings: tuple[Encoding, ...]
    contiguity: Contiguity
    sequence_start: SequenceStart
    pod_topic: bool = False
    empty_topic: bool = False
    reannounce_on_join: bool = False


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "vllm": Preset(("map", "array"), "relaxed", "zero"),
        "dynamo": Preset(("map", "array"), "relaxed", "epoch"),
        "llm-d": Preset(("map", "array"), "strict", "zero", pod_topic=True),
        "vllm-router": Preset(("map",), "strict", "zero", empty_topic=True, reannounce_on_join=True),
        "aibrix": Preset(("array",), "strict", "zero"),
    }
)


_FOR_ALL = frozenset(
    {"batch_window_seconds", "heartbeat_seconds", "indexer", "max_queue_size", "merge_from", "merge_replay_from"}
)
"""Settings of the publisher as a whole, not of one endpoint."""


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """Everything that one endpoint needs to know."""

    endpoint: str
    replay_endpoint: str | None
    bind: bool
    topic: str
    rank: int
    media: tuple[str, ...]
    encoding: Encoding
    hash_mode: HashMode
    contiguity: Contiguity
    sequence_start: SequenceStart
    sole_publisher: bool
    start_announcement: bool
    replay_window: int
    max_tombstones: int
    max_sequences: int
    consumers: tuple[str, ...]
    reannounce_on_join: bool


def resolve(config: EventsConfig, *, model_name: str | None, instance_id: str) -> list[EndpointSettings]:
    """Return the settings of `config` and of the endpoints under `also`.

    Raises:
        ConfigError: Presets that exclude each other, a topic that a consumer refuses, or ports of ranks that overlap.
    """
    for other in config.also:
        idle = sorted(_FOR_ALL & other.model_fields_set)
        if idle:
            raise ConfigError(
                f"{', '.join(idle)} below `also` would have no effect: set it beside `also`, for all lanes"
            )
    return [_resolve_one(config, model_name, instance_id)] + [
        item for other in config.also for item in resolve(other, model_name=model_name, instance_id=instance_id)
    ]


def _resolve_one(config: EventsConfig, model_name: str | None, instance_id: str) -> EndpointSettings:
    names = config.consumer or ("vllm",)
    presets = [PRESETS[name] for name in names]
    readable = [e for e in presets[0].encodings if all(e in preset.encodings for preset in presets)]
    if not readable:
        raise ConfigError(
            f"consumer {' and '.join(names)} read no common encoding: give each its own endpoint (`also`)"
        )
    if config.encoding is not None and config.encoding not in readable:
        raise ConfigError(
            f"encoding {config.encoding!r} is not read by consumer {' and '.join(names)}: use {readable[0]}"
        )
    starts: set[SequenceStart] = {
        preset.sequence_start for preset, name in zip(presets, names, strict=True) if name != "vllm"
    } or {"zero"}
    if len(starts) > 1 and config.sequence_start is None:
        raise ConfigError(
            f"consumer {' and '.join(names)} need different sequence starts: give each its own endpoint (`also`)"
        )
    contiguity = config.contiguity or ("strict" if any(p.contiguity == "strict" for p in presets) else "relaxed")
    start: SequenceStart = next(iter(starts)) if config.sequence_start is None else config.sequence_start
    if start == "epoch" and contiguity == "strict":
        raise ConfigError(
            "sequence_start 'epoch' and contiguity 'strict' exclude each other: a replay from 0 would not end; "
            "use 'zero' or 'relaxed'"
        )
    topic = config.topic
    if topic is None:
        empty = any(preset.empty_topic for preset in presets)
        topic = "" if empty else f"kv@{config.pod or instance_id}@{model_name or 'model'}"
    if any(preset.pod_topic for preset in presets) and not re.fullmatch(r"kv@[^@]+@[^@]+", topic):
        raise ConfigError(f"topic {topic!r} is refused by llm-d: it must be kv@<pod>@<model> with exactly two '@'")
    check_ports(config.endpoint, config.replay_endpoint, config.ranks)
    replay = config.replay_endpoint
    return EndpointSettings(
        endpoint=rank_endpoint(config.endpoint, config.dp_rank),
        replay_endpoint=None if replay is None else rank_endpoint(replay, config.dp_rank),
        bind=config.bind if isinstance(config.bind, bool) else _vllm_binds(config.endpoint),
        topic=topic,
        rank=config.dp_rank,
        media=config.media,
        encoding=config.encoding or readable[0],
        hash_mode=config.hash_mode,
        contiguity=contiguity,
        sequence_start=start,
        sole_publisher=config.sole_publisher,
        start_announcement=config.start_announcement,
        replay_window=config.replay_window,
        max_tombstones=config.max_tombstones,
        max_sequences=config.max_sequences,
        consumers=names,
        reannounce_on_join=any(preset.reannounce_on_join for preset in presets),
    )


def _vllm_binds(endpoint: str) -> bool:
    """Tell what vLLM's publisher would do with an endpoint: bind wildcards and local paths, else connect."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def tcp_port(endpoint: str, key: str = "endpoint") -> int | None:
    """Return the port of a tcp endpoint; None for other transports.

    Raises:
        ConfigError: It is no ZeroMQ endpoint.
    """
    scheme, separator, rest = endpoint.partition("://")
    if not separator or scheme not in {"tcp", "ipc", "inproc"} or not rest:
        raise ConfigError(f"{key} {endpoint!r} must look like tcp://host:port, ipc://path or inproc://name")
    if scheme != "tcp":
        return None
    port = rest.rpartition(":")[2]
    if not port.isdigit() or int(port) > 0xFFFF:
        raise ConfigError(f"{key} {endpoint!r} needs a port number of 0 to 65535: use tcp://host:port")
    return int(port)


def rank_endpoint(endpoint: str, rank: int) -> str:
    """Return a rank's endpoint: port + rank, or a suffix for ipc and inproc; port 0 stays 0."""
    port = tcp_port(endpoint)
    if rank == 0 or port == 0:
        return endpoint
    if port is None:
        return f"{endpoint}_dp{rank}"
    if port + rank > 0xFFFF:
        raise ConfigError(f"endpoint {endpoint!r} has no port for rank {rank}: {port} must be at most {0xFFFF - rank}")
    return f"{endpoint.rpartition(':')[0]}:{port + rank}"


def check_ports(endpoint: str, replay_endpoint: str | None, ranks: int) -> None:
    """Refuse port ranges of publishing and replay that overlap.

    Raises:
        ConfigError: They do; the message names both.
    """
    if replay_endpoint is None:
        tcp_port(endpoint, "events.endpoint")
        return
    live, replay = tcp_port(endpoint, "events.endpoint"), tcp_port(replay_endpoint, "events.replay_endpoint")
    if live is None or replay is None:
        if endpoint == replay_endpoint:
            raise ConfigError(f"events.endpoint and events.replay_endpoint are both {endpoint!r}: each needs its own")
        return
    if live and replay and abs(live - replay) < ranks:
        raise ConfigError(
            f"events.endpoint {endpoint!r} and events.replay_endpoint {replay_endpoint!r} overlap with {ranks} ranks: "
            f"ports {live} to {live + ranks - 1} and {replay} to {replay + ranks - 1}; use {live} and {live + ranks}"
        )


def allow_ipv6(sock: zmq.Socket[bytes], endpoint: str) -> None:
    """Let a socket use an IPv6 endpoint, such as tcp://[::1]:5557; others stay as they are.

    Raises:
        ConfigError: It is no ZeroMQ endpoint.
    """
    if tcp_port(endpoint) is not None and "[" in endpoint:
        sock.setsockopt(zmq.IPV6, 1)


def reachable(endpoint: str, host: str) -> str:
    """Return a bound endpoint as others dial it: a wildcard address is replaced by `host`."""
    if not endpoint.startswith("tcp://") or (urlsplit(endpoint).hostname or "") not in {"0.0.0.0", "::", "*"}:  # noqa: S104 - read, not bound
        return endpoint
    return f"tcp://{f'[{host}]' if ':' in host else host}:{tcp_port(endpoint)}"


def is_loopback(endpoint: str) -> bool:
    """Tell whether only this host can reach a bound endpoint."""
    if not endpoint.startswith("tcp://"):
        return True
    host = urlsplit(endpoint).hostname or ""
    return host in {"localhost", "::1"} or host.startswith("127.")


def free_pair(start: int) -> tuple[int, int] | None:
    """Return the next two neighbouring ports from `start` on that nobody on this host has bound."""
    for port in range(max(start, 1024), 0xFFFF):
        if _is_free(port) and _is_free(port + 1):
            return port, port + 1
    return None


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def default_instance_id() -> str:
    """Return a name for this process: host and process id."""
    return f"{socket.gethostname().replace('@', '-')}-{os.getpid()}"
