"""Ask a consumer for what is resident, and say why it is not found.

Takes resident prefixes from the publisher's snapshot, asks Dynamo's indexer for each, and prints found and expected
tokens per tier. Without --indexer only the feed itself is checked against what the consumer needs.

Examples:
  kvoffload feed verify --indexer http://indexer:8090
  kvoffload feed verify --for llm-d
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import zmq

from kvoffload.cli.feed import add_identity_arguments, add_replay_argument
from kvoffload.cli.values import add_json, positive, seconds, url
from kvoffload.events.client import NoAnswer, ReplayClient
from kvoffload.events.register import DynamoIndexer, IndexerError, registered_instance, registration
from kvoffload.events.settings import PRESETS, reachable
from kvoffload.events.snippets import host_of
from kvoffload.events.verify import Finding, Probe, diagnose, probes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--indexer", type=url, metavar="URL", help="Dynamo's indexer (default nobody is asked)")
    parser.add_argument(
        "--for",
        "--consumer",
        dest="consumer",
        choices=sorted(PRESETS),
        default="dynamo",
        help="consumer (default %(default)s)",
    )
    add_replay_argument(parser)
    add_identity_arguments(parser)
    parser.add_argument(
        "--samples", type=positive, default=20, metavar="N", help="prefixes to ask for (default %(default)s)"
    )
    parser.add_argument(
        "--wait", type=seconds, default=1.0, metavar="SECONDS", help="patience with the indexer (default %(default)s)"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Verify; 0 when everything is found and nothing is wrong."""
    result = verify(args)
    if args.json:
        print(json.dumps(result))
    else:
        if not args.indexer:
            print("no consumer was asked (--indexer URL): only the feed's own settings were checked")
        elif result["prefixes"]:
            for tier in ("gpu", "cpu"):
                print(f"{tier}: {result['found'][tier]} of {result['expected'][tier]} tokens found")
        elif result["prefixes"] is not None:
            print("nothing was asked for: no announced block can be found by its tokens alone")
        for finding in result["findings"]:
            print(f"{finding['name']}: {finding['text']}")
        print("ok" if result["ok"] else "NOT ok")
    return 0 if result["ok"] else 1


def verify(args: argparse.Namespace) -> dict[str, Any]:
    """Return found and expected tokens per tier, and the findings."""
    nothing = {"gpu": 0, "cpu": 0}
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        client = ReplayClient(args.replay, context, args.timeout)
        description = client.describe()
        payloads = [] if description is None else client.snapshot()[1]
    except NoAnswer as error:
        return _result(nothing, nothing, [Finding("port", str(error))])
    finally:
        context.destroy(linger=0)
    if description is None:
        return _result(nothing, nothing, [Finding("port", f"{args.replay} is no publisher of kvoffload")])
    asked, special = probes(payloads, args.samples)
    workers, found, expected, problems = None, dict(nothing), dict(nothing), []
    instance = args.instance
    if args.indexer:
        indexer = DynamoIndexer(args.indexer)
        expected = {"gpu": sum(p.gpu for p in asked), "cpu": sum(p.cpu for p in asked)}
        try:
            workers = indexer.workers()
            body = registration(description, instance=_instance(args, description, workers), model=args.model)
            instance = body["instance_id"]
            found = _ask_until(indexer, asked, body, expected, args.wait)
        except IndexerError as error:
            problems = [Finding("indexer", str(error))]
    if special and not asked:
        problems.append(
            Finding(
                "salt",
                "every announced chain carries extra keys (salt, LoRA name, multimodal content): only requests with "
                "the same keys find it",
            )
        )
    missing = not problems and any(found[tier] < expected[tier] for tier in found)
    findings = diagnose(
        description,
        consumer=args.consumer,
        indexer_url=args.indexer,
        workers=workers,
        model=args.model,
        missing=missing,
        instance=instance,
        host=host_of(args.replay) or None,
    )
    return {**_result(found, expected, problems + findings), "prefixes": len(asked), "not_asked": special}


def _result(found: dict[str, int], expected: dict[str, int], findings: list[Finding]) -> dict[str, Any]:
    return {
        "ok": found == expected and not findings,
        "found": found,
        "expected": expected,
        "prefixes": None,
        "findings": [{"name": finding.name, "text": finding.text} for finding in findings],
    }


def _ask_until(
    indexer: DynamoIndexer, asked: list[Probe], body: dict[str, Any], expected: dict[str, int], wait: float
) -> dict[str, int]:
    """Ask until everything is found, or the time is over."""
    deadline = time.monotonic() + wait
    while True:
        found = _ask(indexer, asked, body)
        if found == expected or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def _ask(indexer: DynamoIndexer, asked: list[Probe], body: dict[str, Any]) -> dict[str, int]:
    total = {"gpu": 0, "cpu": 0}
    for probe in asked:
        answer = indexer.query(probe.token_ids, body["model_name"], body["instance_id"])
        for tier in total:
            total[tier] += answer[tier]
    return total


def _instance(args: argparse.Namespace, description: dict[str, Any], workers: list[dict[str, Any]]) -> int | None:
    """Return the given instance, or the one that is registered with the feed's endpoint."""
    if args.instance is not None:
        return int(args.instance)
    return registered_instance(workers, reachable(description["endpoint"], host_of(args.replay)))
