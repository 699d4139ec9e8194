"""Print what to paste into a consumer's configuration; asks the publisher for its ports, model and block size.

Examples:
  kvoffload feed snippet --for dynamo --indexer http://indexer:8090
  kvoffload feed snippet --for vllm-router --worker http://10.0.0.7:8000
"""

from __future__ import annotations

import argparse

import zmq

from kvoffload.cli.feed import add_replay_argument
from kvoffload.cli.report import print_json
from kvoffload.cli.values import add_json, url
from kvoffload.events.client import NoAnswer, ReplayClient
from kvoffload.events.register import dialled
from kvoffload.events.snippets import CONSUMERS, host_of, snippet
from kvoffload.events.verify import diagnose


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--for", "--consumer", dest="consumer", choices=CONSUMERS, required=True, help="whose configuration (required)"
    )
    add_replay_argument(parser)
    parser.add_argument(
        "--indexer",
        type=url,
        metavar="URL",
        default="http://127.0.0.1:8090",
        help="Dynamo's indexer (default %(default)s)",
    )
    parser.add_argument(
        "--worker", type=url, metavar="URL", default="http://127.0.0.1:8000", help="the engine (default %(default)s)"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the snippet, and comments where the feed does not suit the consumer."""
    description = describe(args.replay, args.timeout)
    text = snippet(args.consumer, description, indexer=args.indexer, worker=args.worker)
    findings = diagnose(description, consumer=args.consumer)
    if args.json:
        shown = [{"name": finding.name, "text": finding.text} for finding in findings]
        print_json({"consumer": args.consumer, "snippet": text, "findings": shown, "feed": description})
        return 0
    print(text)
    for finding in findings:
        print(f"# {finding.name}: {finding.text}")
    return 0


def describe(endpoint: str, timeout: float) -> dict[str, object]:
    """Return what the publisher at a replay endpoint says of itself, under the host that `endpoint` names.

    Raises:
        NoAnswer: Nobody answers there, or it is no publisher of ours.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        description = ReplayClient(endpoint, context, timeout).describe()
    finally:
        context.destroy(linger=0)
    if description is None:
        raise NoAnswer(
            f"{endpoint} answers, but does not describe itself: it is no publisher of kvoffload; give --replay the "
            "replay_endpoint of one"
        )
    return dialled(description, host_of(endpoint))
