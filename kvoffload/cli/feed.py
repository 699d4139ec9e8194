"""Watch, check and connect the events feed.

Examples:
  kvoffload feed watch
  kvoffload feed snippet --help
"""

from __future__ import annotations

import argparse

from kvoffload.cli.main import CommandParser, add_commands
from kvoffload.cli.values import endpoint, natural, seconds

FEED_COMMANDS = {
    "watch": ("kvoffload.cli.feed_watch", "show what a feed says, for people or as JSON lines"),
    "snippet": ("kvoffload.cli.feed_snippet", "print what to paste into a consumer's configuration"),
    "register": ("kvoffload.cli.feed_register", "register a feed with a Dynamo indexer"),
    "verify": ("kvoffload.cli.feed_verify", "ask a consumer for what is resident, and say why it is not found"),
}


def add_arguments(parser: CommandParser) -> None:
    """Add the commands of the feed."""
    add_commands(parser, FEED_COMMANDS)


def add_replay_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option that names a publisher."""
    parser.add_argument(
        "--replay",
        type=endpoint,
        metavar="ENDPOINT",
        default="tcp://127.0.0.1:5558",
        help="the publisher's replay endpoint, which answers questions (default %(default)s)",
    )
    parser.add_argument(
        "--timeout", type=seconds, default=2.0, metavar="SECONDS", help="patience with it (default %(default)s)"
    )


def add_identity_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say under which name a feed is registered."""
    parser.add_argument(
        "--instance",
        type=natural,
        metavar="N",
        help="the worker's number (default the one registered with this endpoint, else made from the instance id)",
    )
    parser.add_argument("--model", metavar="NAME", help="model name (default the publisher's)")
