"""What to paste into a consumer's configuration, from what a publisher says of itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from kvoffload.events.register import registration
from kvoffload.events.settings import tcp_port

CONSUMERS = ("dynamo", "llm-d", "vllm-router", "aibrix")


def snippet(
    consumer: str,
    description: Mapping[str, Any],
    *,
    indexer: str = "http://127.0.0.1:8090",
    worker: str = "http://127.0.0.1:8000",
) -> str:
    """Return commands, YAML or flags for one consumer, ready to paste."""
    port = tcp_port(description["endpoint"])
    replay = tcp_port(description["replay_endpoint"]) if description["replay_endpoint"] else None
    if consumer == "dynamo":
        body = json.dumps(registration(description))
        return f"curl -sS -X POST {indexer}/register -H 'Content-Type: application/json' -d '{body}'"
    if consumer == "vllm-router":
        lines = [
            "--policy kv_aware",
            f"--kv-event-block-size {description['block_size']}",
            f"--kv-event-model {description['model_name'] or 'model'}",
            f"--kv-event-source {worker}={description['endpoint']}",
        ]
        if description["replay_endpoint"]:
            lines.append(f"--kv-event-replay-source {worker}={description['replay_endpoint']}")
        return " \\\n  ".join(lines)
    if consumer == "llm-d":
        replay_line = "" if replay is None else f"\n    replaySocketPort: {replay}"
        return (
            'kvEventsConfig:\n  topicFilter: "kv@"\n  discoverPods: true\n'
            f"  podDiscoveryConfig:\n    socketPort: {port}{replay_line}"
        )
    return (
        "# gateway-plugins needs the variables AIBRIX_PREFIX_CACHE_KV_EVENT_SYNC_ENABLED=true and\n"
        "# AIBRIX_PREFIX_CACHE_USE_REMOTE_TOKENIZER=true\n"
        'metadata:\n  labels:\n    model.aibrix.ai/kv-events-enabled: "true"\n'
        f"# AIBrix dials ports 5557 (events) and 5558 (replay) of the pod; this feed is at {port} and {replay}."
    )


def host_of(endpoint: str) -> str:
    """Return the host of an endpoint or URL."""
    return urlsplit(endpoint).hostname or ""
