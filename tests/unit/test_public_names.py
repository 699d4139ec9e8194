"""The public names: resolved at run time, known to type checkers, and changed only on purpose.

`public_names.txt` lists each public name with its bases, its parameters and its members. After an intended change (see
docs/compatibility.md for what that takes) write it anew: `python -m tests.unit.test_public_names`.
"""

import ast
import dataclasses
import enum
import functools
import importlib
import inspect
from pathlib import Path

import pytest

import kvoffload

SNAPSHOT = Path(__file__).with_name("public_names.txt")


def parameters(function):
    """The parameters without annotations, which each Python writes in its own way; long defaults as `...`."""
    parts = []
    for parameter in inspect.signature(function).parameters.values():
        default = parameter.default
        if default is not inspect.Parameter.empty and not isinstance(default, bool | int | float | str | None):
            default = ...
        parts.append(parameter.replace(default=default, annotation=inspect.Parameter.empty))
    return str(inspect.Signature(parts)).replace("Ellipsis", "...")


def members(cls):
    """Public members of a class that the package itself defines, inherited ones too."""
    found = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("kvoffload"):
            found |= {name: value for name, value in vars(base).items() if not name.startswith("_")}
            found |= dict.fromkeys(getattr(base, "__annotations__", {}))
    return {name: found[name] for name in sorted(found) if not name.startswith(("_", "model_"))}


def describe_member(cls, name, value):
    if isinstance(cls, enum.EnumMeta) and name in cls.__members__:
        return f"{name} = {cls[name].value!r}"
    if isinstance(value, classmethod | staticmethod):
        return f"{type(value).__name__} {name}{parameters(value.__func__)}"
    if inspect.iscoroutinefunction(value):
        return f"async {name}{parameters(value)}"
    if inspect.isfunction(value):
        return f"{name}{parameters(value)}"
    if isinstance(value, property | functools.cached_property):
        return f"{name}: property" + (", settable" if getattr(value, "fset", None) else "")
    return name


def describe(name):
    """The lines of the snapshot for one public name."""
    value = getattr(kvoffload, name)
    if inspect.isfunction(value):
        return [f"{name}{parameters(value)}"]
    if not inspect.isclass(value):
        return [name]
    bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
    head = f"class {name}({bases})"
    constructed = value.__init__ is not object.__init__ and not issubclass(value, enum.Enum)
    if constructed and (inspect.isfunction(value.__init__) or dataclasses.is_dataclass(value)):
        head += f" called with {parameters(value)}"
    return [head, *(f"    {describe_member(value, *member)}" for member in members(value).items())]


def snapshot():
    return "".join(f"{line}\n" for name in sorted(kvoffload.__all__) for line in describe(name))


def test_public_names_members_and_parameters_change_only_on_purpose():
    assert snapshot() == SNAPSHOT.read_text(), (
        "the public interface differs from tests/unit/public_names.txt: see docs/compatibility.md, and write the file "
        "anew with `python -m tests.unit.test_public_names` if the change is meant"
    )


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


if __name__ == "__main__":
    SNAPSHOT.write_text(snapshot())
