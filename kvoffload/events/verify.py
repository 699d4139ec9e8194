"""Checks a consumer against the publisher: does it find what is resident, and if not, why."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvoffload.events.settings import PRESETS, is_loopback, reachable, tcp_port
from kvoffload.events.snippets import host_of
from kvoffload.events.wire import BlockRemoved, BlockStored, Hash, decode_batch

_LOCAL_HOSTS = {"127.0.0.1", "localhost", "::1"}


@dataclass(frozen=True, slots=True)
class Finding:
    """A likely reason, by name, and what to do."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Probe:
    """A resident prefix: its tokens, and how many of them the tiers hold (the lower tier includes the higher)."""

    token_ids: tuple[int, ...]
    gpu: int
    cpu: int


def probes(payloads: Sequence[bytes], limit: int) -> tuple[list[Probe], int]:
    """Return resident prefixes from a snapshot, longest first, and how many blocks cannot be asked for by tokens."""
    blocks: dict[Hash, tuple[Hash | None, tuple[int, ...]]] = {}
    media: dict[Hash, set[str]] = {}
    special = 0
    for payload in payloads:
        for event in decode_batch(payload).events:
            if isinstance(event, BlockRemoved) and event.group_idx in (None, 0):
                for name in event.block_hashes:  # a dead parent, told only so that its children can be placed
                    media.get(name, set()).discard(event.medium or "GPU")
                continue
            if not isinstance(event, BlockStored) or event.group_idx not in (None, 0):
                continue
            if event.lora_name is not None or any(event.extra_keys or ()):
                special += len(event.block_hashes)
                continue
            parent, size = event.parent_block_hash, event.block_size
            for index, name in enumerate(event.block_hashes):
                blocks[name] = (parent, tuple(event.token_ids[index * size : (index + 1) * size]))
                media.setdefault(name, set()).add(event.medium or "GPU")
                parent = name
    parents = {parent for parent, _ in blocks.values()}
    found: list[Probe] = []
    for leaf in (name for name in blocks if name not in parents):
        chain: list[Hash] = []
        current: Hash | None = leaf
        while current is not None and current in blocks:
            chain.append(current)
            current = blocks[current][0]
        if current is None:
            chain.reverse()
            held = next((i for i, each in enumerate(chain) if not media[each]), len(chain))
            if not held:
                continue
            chain = chain[:held]
            size = len(blocks[leaf][1])
            on_gpu = next((i for i, each in enumerate(chain) if "GPU" not in media[each]), len(chain))
            tokens = tuple(token for each in chain for token in blocks[each][1])
            found.append(Probe(tokens, on_gpu * size, len(chain) * size))
    found.sort(key=lambda probe: -probe.cpu)
    return found[:limit], special


def diagnose(
    description: Mapping[str, Any],
    *,
    consumer: str,
    indexer_url: str | None = None,
    workers: Sequence[Mapping[str, Any]] | None = None,
    model: str | None = None,
    missing: bool = False,
    instance: int | None = None,
    host: str | None = None,
) -> list[Finding]:
    """Return the likely reasons why a consumer does not find what is resident.

    Args:
        description: What the publisher says of itself.
        consumer: Whom the feed is for.
        indexer_url: Where the consumer runs, if known.
        workers: Registrations with Dynamo's indexer, if it was asked.
        model: The model that requests name; default: the publisher's.
        missing: The consumer found less than is resident.
        instance: Number under which this publisher is, or would be, registered.
        host: Host at which the publisher was reached. Both tell registrations with the same port apart.
    """
    findings = list(_feed_findings(description, consumer, indexer_url))
    if workers is not None:
        named = model or description["model_name"] or "model"
        findings += _registration_findings(description, workers, named, instance, host)
    if not missing or findings:
        return findings
    if consumer == "dynamo" and description["sequence_start"] == "zero":
        return [
            Finding(
                "stale watermark",
                "this life's numbers begin at 0, and Dynamo ignores numbers below the highest it saw: use consumer "
                "'dynamo' (epoch), or `kvoffload feed register`",
            )
        ]
    clock = ""
    if description["sequence_start"] == "epoch":
        clock = " Or was the clock set back since the last life? Then `kvoffload feed register`"
    return [
        Finding(
            "port",
            f"the registration fits, but blocks are missing: is its replay endpoint {description['replay_endpoint']}?"
            f"{clock}",
        )
    ]


def _feed_findings(description: Mapping[str, Any], consumer: str, indexer_url: str | None) -> list[Finding]:
    preset = PRESETS[consumer]
    findings: list[Finding] = []
    encoding, topic = description["encoding"], description["topic"]
    if encoding not in preset.encodings:
        findings.append(
            Finding("profile", f"{consumer} does not read the {encoding} profile: use {preset.encodings[0]}")
        )
    elif consumer == "dynamo" and description["hash_mode"] != "uint64":
        findings.append(Finding("profile", "dynamo refuses hashes as bytes: use hash_mode 'uint64'"))
    if preset.contiguity == "strict" and description["contiguity"] != "strict":
        findings.append(
            Finding("contiguity", f"{consumer} needs every number of a replay: use consumer {consumer!r} or 'strict'")
        )
    if preset.pod_topic and not re.fullmatch(r"kv@[^@]+@[^@]+", topic):
        findings.append(Finding("topic", f"{consumer} needs the topic kv@<pod>@<model>, got {topic!r}"))
    if preset.empty_topic and topic:
        findings.append(Finding("topic", f"{consumer} reads only an empty topic from a static source, got {topic!r}"))
    if indexer_url and is_loopback(description["endpoint"]) and host_of(indexer_url) not in _LOCAL_HOSTS:
        findings.append(
            Finding(
                "loopback", f"the feed is bound to {description['endpoint']}: {host_of(indexer_url)} cannot reach it"
            )
        )
    salted = description["withheld"].get("salted", 0)
    if salted:
        findings.append(
            Finding(
                "salt", f"{salted} salted blocks are withheld: their infos lack the extra keys that tell tenants apart"
            )
        )
    bare = description["withheld"].get("no_info", 0)
    if bare:
        findings.append(
            Finding(
                "tokens",
                f"{bare} blocks are withheld: chains made of block_hashes alone carry no tokens to find them by; make "
                "them from token_ids",
            )
        )
    return findings


def _registration_findings(
    description: Mapping[str, Any],
    workers: Sequence[Mapping[str, Any]],
    model: str,
    instance: int | None,
    host: str | None,
) -> list[Finding]:
    port = tcp_port(description["endpoint"])
    ours = [w for w in workers if any(tcp_port(e) == port for e in _endpoints(w))]
    if len({w.get("instance_id") for w in ours}) > 1 and (instance is not None or host is not None):
        endpoint = description["endpoint"] if host is None else reachable(description["endpoint"], host)
        same_port = ours
        ours = [w for w in same_port if w.get("instance_id") == instance or endpoint in _endpoints(w)]
        if not ours:
            where = ", ".join(sorted({e for w in same_port for e in _endpoints(w) if tcp_port(e) == port}))
            return [Finding("port", f"the feed is at {endpoint}, registered with its port are other hosts: {where}")]
    if not ours:
        others = [e for w in workers if w.get("model_name") == model for e in _endpoints(w)]
        if not others:
            remedy = "`kvoffload feed register`, or paste what `kvoffload feed snippet --for dynamo` prints"
            return [Finding("registration", f"nothing is registered for the model {model!r}: {remedy}")]
        return [Finding("port", f"the feed is at {description['endpoint']}, registered is {', '.join(others)}")]
    named = [w for w in ours if w.get("model_name") == model]
    if not named:
        return [Finding("model", f"requests name {model!r}, registered is {ours[0].get('model_name')!r}")]
    sizes = {w.get("block_size") for w in named}
    if description["block_size"] is not None and sizes != {description["block_size"]}:
        registered = ", ".join(str(size) for size in sizes)
        return [
            Finding("block size", f"the feed's blocks have {description['block_size']} tokens, registered {registered}")
        ]
    return []


def _endpoints(worker: Mapping[str, Any]) -> list[str]:
    """Return the endpoints of a registration, one for each slot."""
    return [str(endpoint) for endpoint in (worker.get("endpoints") or {}).values()]
