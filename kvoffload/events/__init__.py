"""TELLS other processes what the cache holds, over ZeroMQ.

`subscribe` and `ResidencyIndex` read feeds; `FeedPublisher` publishes one. They are imported on first use.
"""

from __future__ import annotations

import importlib

_PUBLIC = {
    "FeedPublisher": "kvoffload.events.publisher",
    "create_publisher": "kvoffload.events.publisher",
    "ResidencyIndex": "kvoffload.events.index",
    "TierMatch": "kvoffload.events.index",
    "SourceStatus": "kvoffload.events.index",
    "Subscription": "kvoffload.events.subscriber",
    "subscribe": "kvoffload.events.subscriber",
    "Synced": "kvoffload.events.subscriber",
    "SourceReset": "kvoffload.events.subscriber",
    "GapRecovered": "kvoffload.events.subscriber",
    "Unrecoverable": "kvoffload.events.subscriber",
}

__all__ = list(_PUBLIC)


def __getattr__(name: str) -> object:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'kvoffload.events' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value
