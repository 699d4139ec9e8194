"""Register a feed with a Dynamo indexer: an existing registration is removed first, with its watermark.

Examples:
  kvoffload feed register --indexer http://indexer:8090
  kvoffload feed register --indexer http://indexer:8090 --instance 7 --slot 1     beside the engine's own feed
"""

from __future__ import annotations

import argparse
import json

from kvoffload.cli.feed import add_identity_arguments, add_replay_argument
from kvoffload.cli.feed_snippet import describe
from kvoffload.cli.report import print_json
from kvoffload.cli.values import add_json, natural, url
from kvoffload.events.register import DynamoIndexer, registered_instance, registration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--indexer", type=url, metavar="URL", required=True, help="Dynamo's indexer (required)")
    add_replay_argument(parser)
    add_identity_arguments(parser)
    parser.add_argument(
        "--slot",
        type=natural,
        metavar="N",
        help="dp_rank slot; take a free one beside the engine's feed (default the rank)",
    )
    parser.add_argument("--unregister", action="store_true", help="only remove the registration")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Register, or unregister."""
    description = describe(args.replay, args.timeout)
    indexer = DynamoIndexer(args.indexer)
    instance = args.instance
    if instance is None:
        instance = registered_instance(indexer.workers(), str(description["endpoint"]))
    body = registration(description, instance=instance, model=args.model, dp_rank=args.slot)
    if args.unregister:
        found = indexer.unregister(body["instance_id"], body["model_name"])
        if args.json:
            print_json({"unregistered": found, "instance_id": body["instance_id"], "model_name": body["model_name"]})
        else:
            print("unregistered" if found else "was not registered")
        return 0
    indexer.register(body)
    if args.json:
        print_json({"registered": body})
    else:
        print(f"registered {json.dumps(body)}")
    return 0
