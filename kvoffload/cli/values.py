"""Readers of option values, for argparse: a wrong one is a usage mistake that names what is right."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvoffload.errors import ConfigError, KVOffloadError

if TYPE_CHECKING:
    import asyncio

MOST = 10**12
"""The largest count that an option takes: beyond it is a slip of the finger, not a machine."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Host memory in blocks, or in percent of a workload's unique blocks."""

    blocks: int | None = None
    percent: float | None = None

    def resolve(self, unique_blocks: int) -> int:
        """Return the number of engine blocks."""
        if self.blocks is not None:
            return self.blocks
        return int(unique_blocks * (self.percent or 0) / 100)


def capacity(text: str) -> Capacity:
    """Read `5%`, or a number of blocks."""
    number, percent = (text[:-1], True) if text.endswith("%") else (text, False)
    try:
        value = float(number) if percent else int(number)
    except ValueError:
        value = -1
    if not 0 < value <= MOST:
        raise argparse.ArgumentTypeError(
            f"must be a positive number of blocks, or a percentage such as 5%; got {text!r}"
        )
    return Capacity(percent=value) if percent else Capacity(blocks=int(value))


def size(text: str) -> int:
    """Read bytes, with or without a unit."""
    from kvoffload.config_values import parse_bytes

    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("size ")) from None


def speed(text: str) -> float | None:
    """Read `max` (None), or how many times faster than a trace's clock."""
    if text == "max":
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be 'max' or a positive number; got {text!r}")
    return value


def add_json(parser: argparse.ArgumentParser, what: str = "print one JSON object") -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help=f"{what} on standard output, for programs")


def add_check(parser: argparse.ArgumentParser) -> None:
    """Add `--check` to a benchmark."""
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")


def add_repeat(parser: argparse.ArgumentParser, default: int, *aliases: str) -> None:
    """Add `--repeat` to a benchmark."""
    parser.add_argument(
        "--repeat", *aliases, type=positive, default=default, metavar="N",
        help="repetitions, of which the median counts (default %(default)s)",
    )  # fmt: skip


def add_skip_bad_lines(parser: argparse.ArgumentParser) -> None:
    """Add `--skip-bad-lines` to a command that reads traces."""
    parser.add_argument(
        "--skip-bad-lines", action="store_true", help="go on after a trace line that cannot be used, and count it"
    )


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how the requests of a trace are served."""
    add = parser.add_argument
    add(
        "--store-step", type=positive, default=16, metavar="N",
        help="blocks computed and offered at a time (default 16)",
    )  # fmt: skip
    add(
        "--partial-blocks", choices=("drop", "keep"), default="drop",
        help="a prompt's unfinished last block: real engines do not offer it (default drop)",
    )  # fmt: skip
    add("--requests", type=positive, metavar="N", help="stop after N requests (default all of a trace, 2000 built-in)")
    add_skip_bad_lines(parser)


def add_seed(parser: argparse.ArgumentParser) -> None:
    """Add `--seed` to a benchmark."""
    parser.add_argument("--seed", type=whole, default=0, metavar="N", help="seed of what is random (default 0)")


def add_uvloop(parser: argparse.ArgumentParser) -> None:
    """Add `--uvloop` to a benchmark."""
    parser.add_argument("--uvloop", action="store_true", help="run on uvloop instead of asyncio's own loop")


def loop_factory(args: argparse.Namespace) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes the loop that `--uvloop` asks for; None for asyncio's own."""
    if not args.uvloop:
        return None
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def whole(text: str) -> int:
    """Read a whole number."""
    try:
        value = int(text)
    except ValueError:
        value = MOST + 1
    if abs(value) > MOST:
        raise argparse.ArgumentTypeError(f"must be a whole number, such as 7; got {text!r}")
    return value


def seconds(text: str) -> float:
    """Read a positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= MOST:
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, such as 2 or 0.5; got {text!r}")
    return value


def endpoint(text: str) -> str:
    """Read a ZeroMQ endpoint that another process can reach."""
    from kvoffload.events.settings import tcp_port

    if text.startswith("inproc://"):
        raise argparse.ArgumentTypeError(
            f"must be tcp://host:port or ipc://path: inproc stays in a process; got {text!r}"
        )
    return _checked(tcp_port, text)


def url(text: str) -> str:
    """Read the URL of an HTTP server."""
    if not text.startswith(("http://", "https://")) or not text.partition("://")[2]:
        raise argparse.ArgumentTypeError(f"must be a URL, such as http://127.0.0.1:8090; got {text!r}")
    return text


def policy(text: str) -> str:
    """Read the name of a cache policy, and import it."""
    from kvoffload.manager.policies.registry import load_policy

    return _checked(load_policy, text)


def policies(text: str) -> list[str]:
    """Read names of cache policies, separated by commas."""
    return [policy(name) for name in listed(text)]


def listed(text: str) -> list[str]:
    """Read words separated by commas, each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",")))


def some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a reader of words separated by commas, each one of `known`."""

    def read(text: str) -> list[str]:
        words = listed(text)
        wrong = [word for word in words if word not in known]
        if wrong:
            raise argparse.ArgumentTypeError(f"must be some of {','.join(known)}; got {','.join(wrong)!r}")
        return words

    return read


def _checked(check: Callable[[str], object], text: str) -> str:
    """Return `text` after a check, whose errors become argparse's."""
    try:
        check(text)
    except KVOffloadError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    return _at_least(text, 1)


def natural(text: str) -> int:
    """Read a whole number of at least 0."""
    return _at_least(text, 0)


def _at_least(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= MOST:
        limit = f"at least {least}" if value < least else f"at most {MOST}"
        raise argparse.ArgumentTypeError(f"must be a whole number of {limit}; got {text!r}")
    return value


def address(text: str) -> tuple[str, int]:
    """Read `HOST:PORT`."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"must be HOST:PORT, such as 127.0.0.1:9464; got {text!r}")
    return host.strip("[]"), int(port)
