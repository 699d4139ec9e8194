"""Write the JSON Schemas of kvoffload's configuration into a folder, or check that the folder is in step.

Examples:
  kvoffload schema                 writes schemas/
  kvoffload schema --check         exit code 1 when a file differs from what would be written
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from kvoffload.config import OffloadConfig


def schemas() -> dict[str, dict[str, Any]]:
    """Return every schema by its file name."""
    return {"config.schema.json": {**OffloadConfig.model_json_schema(), "$schema": _DIALECT}}


_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("folder", nargs="?", type=Path, default=Path("schemas"), help="where they go (schemas/)")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file is not in step")


def run(args: argparse.Namespace) -> int:
    """Write or check the files."""
    stale = 0
    for name, schema in schemas().items():
        path: Path = args.folder / name
        text = json.dumps(schema, indent=2, sort_keys=True) + "\n"
        current = path.read_text(encoding="utf-8") if path.is_file() else None
        if args.check:
            if current != text:
                stale += 1
                print(f"{path} is not in step: run `kvoffload schema {args.folder}`", file=sys.stderr)
        elif current != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path}")
    return 1 if stale else 0
