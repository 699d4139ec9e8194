"""The command `kvoffload`: finds the command that was asked for, and imports nothing else.

A command is a module with `add_arguments(parser)` and `run(args) -> int`; its docstring is its description. `run`
returns 0 (fine), 1 (a failure was found) or 2 (what was given cannot be used). A group of commands has no `run`.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import kvoffload
from kvoffload.cli.signals import Signals
from kvoffload.errors import (
    ConfigError,
    ExtensionAttributeError,
    ExtensionImportError,
    ExtensionTypeError,
    KVOffloadError,
    TraceError,
)

COMMANDS = {
    "run": ("kvoffload.cli.run", "drive the service with a trace or the built-in chats, and verify every byte"),
    "simulate": ("kvoffload.cli.simulate", "hit ratios of policies over capacities, on a trace"),
    "plan": ("kvoffload.cli.plan", "bytes per block, group, rank and in total, before anything is allocated"),
    "doctor": ("kvoffload.cli.doctor", "check this machine: memory, /dev/shm, limits, GPU, ports, leftovers"),
    "bench": ("kvoffload.cli.bench", "measure one part"),
    "schema": ("kvoffload.cli.schema", "write the JSON Schemas of configuration and events"),
    "feed": ("kvoffload.cli.feed", "watch, check and connect the events feed"),
}
OK, FAILED, USAGE, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143
EXIT_CODES = (
    "Exit codes:\n  0    fine\n  1    a failure was found, or something went wrong\n"
    "  2    what was given cannot be used\n  130  interrupted (Ctrl-C)\n  143  terminated (SIGTERM)"
)
_GIVEN_WRONG = (ConfigError, TraceError, ExtensionImportError, ExtensionAttributeError, ExtensionTypeError)


class CommandParser(argparse.ArgumentParser):
    """A parser that learns its arguments from a command's module, when it is used."""

    module_path: str | None = None
    commands: Sequence[str] = ()
    """Names of the commands below this one."""

    def parse_known_args(  # type: ignore[override]  # the base class's overloads are about namespaces of other types
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Import the module, then parse."""
        if self.module_path is not None:
            module = importlib.import_module(self.module_path)
            self.module_path = None
            self.description = (module.__doc__ or "").strip()
            self.set_defaults(run_command=getattr(module, "run", None), parser=self)  # a group has no `run`
            module.add_arguments(self)
        return super().parse_known_args(args, namespace)

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Exit because of arguments that this command does not have; name those that look like them."""
        known = [option for action in self._actions for option in action.option_strings]
        parts = []
        for word in unknown:
            name = word.partition("=")[0]
            close = difflib.get_close_matches(name, known, n=1) if name.startswith("-") else []
            parts.append(f"{word} (did you mean {close[0]}?)" if close else word)
        self.error(f"unrecognized arguments: {' '.join(parts)}")

    def error(self, message: str) -> NoReturn:
        """Exit with code 2; the message ends in what to do."""
        if message.endswith("required: COMMAND"):
            message = f"a COMMAND is missing (choose from {', '.join(self.commands)})"
        super().error(f"{message}; see `{self.prog} --help`")


def existing(table: Mapping[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """Return the commands of a table whose module is installed; none is imported."""
    return {name: entry for name, entry in table.items() if importlib.util.find_spec(entry[0]) is not None}


def add_commands(parser: CommandParser, table: Mapping[str, tuple[str, str]]) -> None:
    """Add the commands of a table to `parser`; a module is imported when its command is the one that runs."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=CommandParser)
    parser.commands = tuple(existing(table))
    for name, (module_path, summary) in existing(table).items():
        command = commands.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        command.module_path = module_path


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # started with the descriptor closed: printing would go to the other stream
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - open as long as the process
    parser = make_parser()
    with Signals() as signals:
        try:
            args, unknown = parser.parse_known_args(argv)
            if unknown:
                args.parser.refuse(unknown)
            return _run(args)
        except _GIVEN_WRONG as error:
            return _complain(parser, error, USAGE)
        except KVOffloadError as error:
            return _complain(parser, error, FAILED)
        except BrokenPipeError:  # the reader of a pipe went away: nobody is left to tell
            _drop_output()
            return FAILED
        except (OSError, MemoryError) as error:
            _drop_output()
            return _complain(parser, _why(error), FAILED)
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package == "kvoffload":
                raise
            extra = f"kvoffload[{package}]" if package in {"torch", "uvloop"} else "kvoffload"
            return _complain(parser, f"the package {package!r} is not installed: pip install '{extra}'", FAILED)
        except KeyboardInterrupt:
            print("terminated" if signals.terminated else "interrupted", file=sys.stderr)
            return TERMINATED if signals.terminated else INTERRUPTED


def make_parser() -> CommandParser:
    """Return the parser of the whole command line; the commands' own arguments come with their modules."""
    parser = CommandParser(
        prog="kvoffload",
        description="Moves an LLM engine's KV-cache blocks to host memory and back.",
        epilog="Examples:\n  kvoffload run\n  kvoffload run TRACE.jsonl --policy arc --capacity 5% --json\n\n"
        + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(parser=parser)
    parser.add_argument("--version", action="version", version=f"kvoffload {kvoffload.__version__}")
    add_commands(parser, COMMANDS)
    return parser


def _run(args: argparse.Namespace) -> int:
    code = int(args.run_command(args))
    sys.stdout.flush()  # here, where a full disk or a closed pipe can still be told
    return code


def _drop_output() -> None:
    """What cannot be written to standard output now could not be written at exit either."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _why(error: Exception) -> Exception | str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:  # from a print
        return "standard output cannot be written: no space left; make room there, or send it elsewhere"
    return error if str(error) else "not enough memory"


def _complain(parser: argparse.ArgumentParser, error: Exception | str, code: int) -> int:
    print(f"{parser.prog}: {error}", file=sys.stderr)
    return code
