"""Write what is generated from the configuration's models, or check that the files are in step.

Below ROOT these are `schemas/config.schema.json` and `schemas/events.schema.json` (JSON Schemas), and
`docs/configuration.md` (the reference for people).

Examples:
  kvoffload schema                 writes below the current folder
  kvoffload schema --check         exit code 1 when a file differs from what would be written
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from kvoffload.cli.report import print_json
from kvoffload.cli.values import add_json
from kvoffload.config import EventsConfig, OffloadConfig
from kvoffload.errors import ConfigError
from kvoffload.events.wire import event_schema

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_INTRODUCTION = """\
# Configuration

<!-- Written by `kvoffload schema`; a test checks that it is in step. -->

`OffloadConfig(...)` takes these keys as arguments. `OffloadConfig.load("kvoffload.toml")` reads them from a TOML or
JSON file, then from variables (`KVOFFLOAD_WORLD_SIZE`, `KVOFFLOAD_EVENTS__ENDPOINT`), then from its own arguments;
later ones win. Unknown keys are refused. Sizes are bytes, or text with a unit: `"512MiB"`, `"10GB"`. Times are seconds.
"""


def generated() -> dict[str, str]:
    """Return the text of every generated file, by its path below the root."""
    schema = {**OffloadConfig.model_json_schema(), "$schema": _DIALECT}
    return {
        "schemas/config.schema.json": json.dumps(schema, indent=2, sort_keys=True) + "\n",
        "schemas/events.schema.json": json.dumps(event_schema(), indent=2, sort_keys=True) + "\n",
        "docs/configuration.md": _INTRODUCTION
        + _reference("OffloadConfig", OffloadConfig)
        + _reference("events", EventsConfig),
    }


def _reference(name: str, model: type[BaseModel]) -> str:
    schema = model.model_json_schema()
    schema = schema.get("$defs", {}).get(model.__name__, schema)  # where a model holds itself
    properties: Mapping[str, dict[str, Any]] = schema["properties"]
    lines = [f"\n## `{name}`\n", f"{model.__doc__}\n", "| key | values | default | meaning |", "|---|---|---|---|"]
    for key, field in model.model_fields.items():
        default = "required" if field.is_required() else f"`{json.dumps(field.default)}`"
        meaning = " ".join((field.description or "").split()).replace("|", "\\|")
        lines.append(f"| `{key}` | {_values(properties[key])} | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


def _values(schema: Mapping[str, Any]) -> str:
    """Return in words what a property accepts."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_values(option) for option in schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "$ref" in schema:
        return "table"
    if "pattern" in schema:
        return "size"
    kind = str(schema.get("type"))
    least = schema.get("minimum", schema.get("exclusiveMinimum"))
    if kind == "array":
        return f"list of {_values(schema.get('items', {}))}"
    if least is not None:
        return f"{kind} {'>=' if 'minimum' in schema else '>'} {least}"
    return {"null": "none"}.get(kind, kind)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "root", nargs="?", type=Path, default=Path(), metavar="ROOT", help="the folder they go below (default .)"
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file is not in step")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Write or check the files."""
    written: list[str] = []
    stale: list[str] = []
    for name, text in generated().items():
        path: Path = args.root / name
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        if args.check:
            stale.append(str(path))
            print(f"{path} is not in step: run `kvoffload schema {args.root}`", file=sys.stderr)
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"ROOT {args.root}: {path} cannot be written: {error.strerror or error}; give a folder "
                "that may be written"
            ) from None
        written.append(str(path))
        if not args.json:
            print(f"wrote {path}")
    if args.json:
        print_json({"written": written, "not_in_step": stale})
    return 1 if stale else 0
