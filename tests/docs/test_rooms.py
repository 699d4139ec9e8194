"""README's room map and the import contracts name every room that there is."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {
    path.name
    for path in (ROOT / "kvoffload").iterdir()
    if not path.name.startswith("_") and (path.suffix == ".py" or (path / "__init__.py").exists())
}


def test_the_room_map_of_the_readme_names_every_room_and_no_other():
    table = (ROOT / "README.md").read_text().partition("## Rooms")[2].partition("\n## ")[0]
    first_cells = re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE)
    named = {
        name.removeprefix("kvoffload/").rstrip("/") for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)
    }
    assert named == ROOMS


def test_the_layers_name_every_room_and_no_other():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    named = {room.strip(" ()") for layer in layers for room in layer.split("|")}
    assert named == {room.removesuffix(".py") for room in ROOMS}


def test_no_file_is_too_long_to_be_read_at_once():
    long = [
        f"{path.relative_to(ROOT)}: {lines} lines"
        for folder, most in (("kvoffload", 400), ("dashboards", 400), ("tests", 600))
        for path in (ROOT / folder).rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > most
    ]
    assert long == [], "split where one part has a reason of its own"
