"""The reading order in docs/concepts.md: every file and function is there, and each is called by one above it."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

import kvoffload

PACKAGE = Path(kvoffload.__file__).parent
PAGE = Path(__file__).resolve().parents[2] / "docs" / "concepts.md"
SECTION = PAGE.read_text().partition("## Read the code")[2]
STEP = re.compile(r"^\d+\. `([\w/]+\.py)` `([\w.]+)`", re.MULTILINE)
PARTS = [steps for part in re.split(r"\n\n(?=\D)", SECTION) if (steps := STEP.findall(part))]


def function(file, name):
    found = importlib.import_module("kvoffload." + file.removesuffix(".py").replace("/", "."))
    for part in name.split("."):
        found = getattr(found, part)
    assert Path(inspect.getsourcefile(found)).relative_to(PACKAGE) == Path(file), f"{name} is not defined in {file}"
    return inspect.getsource(found)


def test_the_section_has_its_parts():
    assert [len(part) for part in PARTS] == [8, 9, 2, 12, 8, 11, 5]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part[0][1])
def test_each_step_exists_and_is_called_by_one_before_it(part):
    above = function("service/life.py", "EngineLife._build") + function(*part[0])
    for file, name in part[1:]:
        called = name.rpartition(".")[2]
        assert re.search(rf"\b{called}\b", above), f"nothing above {name} calls it"
        above += function(file, name)


def test_every_step_and_file_named_beside_the_lists_exists():
    for file, name in re.findall(r"`([\w/]+\.py)` `([\w.]+)`", SECTION):
        assert function(file, name)
    for file in re.findall(r"`([\w/]+\.py)`", SECTION):
        assert (PACKAGE / file).is_file()
