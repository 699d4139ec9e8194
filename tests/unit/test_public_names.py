"""The public names: resolved at run time, and known to type checkers."""

import ast
import importlib
from pathlib import Path

import pytest

import kvoffload


@pytest.mark.parametrize("name", sorted(kvoffload._PUBLIC))
def test_every_public_name_is_where_the_table_says(name):
    assert getattr(kvoffload, name) is getattr(importlib.import_module(kvoffload._PUBLIC[name]), name)


def test_type_checkers_see_the_same_names():
    stub = ast.parse(Path(kvoffload.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    stubbed = {alias.asname: node.module for node in imports for alias in node.names}
    assert stubbed == kvoffload._PUBLIC, "kvoffload/__init__.pyi must import what _PUBLIC in __init__.py names"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Nope'"):
        kvoffload.Nope  # noqa: B018
