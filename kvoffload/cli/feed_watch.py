"""Show what a feed says, until interrupted; and when it falls silent, though it should beat.

Examples:
  kvoffload feed watch tcp://127.0.0.1:5557
  kvoffload feed watch tcp://10.0.0.7:5557 --json --seconds 10 | jq .
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from typing import Any

from kvoffload.cli.values import add_json, endpoint, seconds
from kvoffload.events.subscriber import GapRecovered, Item, SourceReset, Subscription, Synced
from kvoffload.events.wire import AllBlocksCleared, BlockRemoved, BlockStored


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add(
        "endpoint",
        nargs="?",
        type=endpoint,
        default="tcp://127.0.0.1:5557",
        metavar="ENDPOINT",
        help="the feed (default %(default)s)",
    )
    add(
        "--replay",
        type=_replay,
        metavar="ENDPOINT",
        default="next",
        help="the publisher's replay endpoint, which answers questions (default the port after the feed's)",
    )
    add("--topic", default="", metavar="PREFIX", help="prefix of the topics to show (default all)")
    add("--seconds", type=seconds, metavar="SECONDS", help="stop after that long (default never)")
    add_json(parser, "print one JSON object a line")


def _replay(text: str) -> str:
    return text if text == "next" else endpoint(text)


def run(args: argparse.Namespace) -> int:
    """Print items as they come."""
    deadline = None if args.seconds is None else time.monotonic() + args.seconds
    silent = False
    told: deque[dict[str, Any]] = deque(maxlen=2)  # a publisher that is not there yet is asked again and again

    def show(values: dict[str, Any]) -> None:
        if values["event"] in {"reset", "unrecoverable"} and values in told:
            return
        told.append(values)
        print(json.dumps(values) if args.json else as_text(values), flush=True)

    with Subscription(args.endpoint, args.replay, topic=args.topic) as subscription:
        while deadline is None or time.monotonic() < deadline:
            for item in subscription.poll(0.2):
                show(describe_item(item, subscription.sequence))
            if subscription.silent is not silent:
                silent = subscription.silent
                seconds = round(subscription.silent_seconds, 1)
                show({"event": "silent", "seconds": seconds} if silent else {"event": "heard again"})
    return 0


def describe_item(item: Item, sequence: int) -> dict[str, Any]:
    """Return an item as plain values."""
    if isinstance(item, BlockStored):
        return {
            "event": "stored", "sequence": sequence, "medium": item.medium, "group": item.group_idx,
            "blocks": len(item.block_hashes), "tokens": len(item.token_ids), "parent": _hex(item.parent_block_hash),
            "hashes": [_hex(name) for name in item.block_hashes],
        }  # fmt: skip
    if isinstance(item, BlockRemoved):
        return {
            "event": "removed", "sequence": sequence, "medium": item.medium, "group": item.group_idx,
            "blocks": len(item.block_hashes), "hashes": [_hex(name) for name in item.block_hashes],
        }  # fmt: skip
    if isinstance(item, AllBlocksCleared):
        return {"event": "cleared", "sequence": sequence}
    if isinstance(item, Synced):
        return {"event": "synced", "sequence": item.sequence}
    if isinstance(item, SourceReset):
        return {"event": "reset", "reason": item.reason}
    if isinstance(item, GapRecovered):
        return {"event": "gap recovered", "numbers": item.numbers}
    return {"event": "unrecoverable", "reason": item.why}


def as_text(shown: dict[str, Any]) -> str:
    """Return an item for people: one line, hashes shortened."""
    hashes = shown.get("hashes", [])
    parts = [f"{shown['event']:<14}"]
    parts += [f"{name} {value}" for name, value in shown.items() if name not in ("event", "hashes", "parent")]
    if hashes:
        parts.append(hashes[0][-8:] + (f" .. {hashes[-1][-8:]}" if len(hashes) > 1 else ""))
    return "  ".join(parts)


def _hex(name: int | bytes | None) -> str | None:
    if name is None:
        return None
    return f"{name:016x}" if isinstance(name, int) else name.hex()
