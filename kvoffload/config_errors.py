"""What a wrong configuration is told: each wrong key, where it was written, its value and what it must be."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from kvoffload.errors import ConfigError

ENV_PREFIX = "KVOFFLOAD_"
_KINDS = {
    "string": "text", "bool": "true or false", "int": "a whole number", "float": "a number",
    "finite": "a finite number", "model": "a table of keys, or true or false", "dict": "a table of keys",
}  # fmt: skip
_BOUNDS = {"greater_than_equal": ("ge", "at least"), "greater_than": ("gt", "above")}


def config_error(model: type[BaseModel], error: ValidationError) -> ConfigError:
    """Return pydantic's findings in our words."""
    problems: list[tuple[str, str]] = []
    wanted: dict[str, list[str]] = {}  # what a value must be; more than one where a key takes several kinds
    values: dict[str, object] = {}
    for detail in error.errors(include_url=False):
        loc = [str(part) for part in detail["loc"]]
        key = ".".join(loc)
        found = _own(model, key, detail)
        if found is not None:
            problems += found
            continue
        field = model.model_fields.get(loc[0]) if loc else None
        if len(loc) > 1 and not loc[1].isdigit():  # one of the kinds that a key takes
            key = loc[0]
        wanted.setdefault(key, []).append(_wanted(detail, field))
        values[key] = detail["input"]
    problems += [
        (key, f"{key} must be {' or '.join(kinds)}; got {shown(values[key])}") for key, kinds in wanted.items()
    ]
    return _told(problems)


def _told(problems: Iterable[tuple[str, str]]) -> ConfigError:
    problems = tuple(problems)
    error = ConfigError("; ".join(text for _, text in problems))
    error.problems = problems
    return error


def _own(model: type[BaseModel], key: str, detail: ErrorDetails) -> list[tuple[str, str]] | None:
    """Return what is wrong with keys, and what our own checks said of values; None: pydantic checked the value."""
    if detail["type"] == "extra_forbidden":
        return [(key, unknown_key(key, model.model_fields))]
    if detail["type"] == "missing":
        purpose = (model.model_fields[key].description or "").split("\n")[0]
        return [(key, f"{key} is missing: set it. {purpose.rstrip('.')}")]
    nested = detail.get("ctx", {}).get("error")
    if isinstance(nested, ConfigError):
        return [
            (f"{key}.{below}" if key and below else key or below, f"{key}.{text}" if key else text)
            for below, text in nested.problems or (("", str(nested)),)
        ]
    if isinstance(nested, ValueError):
        return [(key, f"{key} {nested}; got {shown(detail['input'])}")]
    return None


def _wanted(detail: ErrorDetails, field: FieldInfo | None) -> str:
    """Return what a value must be, from what pydantic calls it."""
    kind, context = detail["type"], detail.get("ctx", {})
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"{words} {context[name]:g}"
    if kind == "string_too_short":
        return "a name that is not empty"
    if kind == "literal_error":
        return str(context["expected"])
    if kind == "tuple_type":
        return "a list, or text with commas" if field is not None and field.metadata else "a list of tables"
    return _KINDS.get(kind.partition("_")[0], detail["msg"])


def unknown_key(key: str, known: Iterable[str]) -> str:
    """Return what to say of a key that nothing knows: the nearest one, or all."""
    names = sorted(known)
    close = difflib.get_close_matches(key.lower(), names, n=1, cutoff=0.6)
    return f"{key} is no known key; " + (f"did you mean {close[0]}?" if close else f"known keys: {', '.join(names)}")


def shown(value: object) -> str:
    """Return a value as code, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True, slots=True)
class Places:
    """Who said what in a configuration of several sources.

    Attributes:
        path: The file, if there is one.
        file: What it says.
        variables: What environment variables say.
        override: Arguments; the last word.
    """

    path: str | os.PathLike[str] | None
    file: Mapping[str, Any]
    variables: Mapping[str, Any]
    override: Mapping[str, Any]

    def tell(self, error: ConfigError) -> ConfigError:
        """Return the error with the place of each wrong key before it."""
        return _told((key, self._place(key or text.partition(" ")[0]) + text) for key, text in error.problems)

    def _place(self, key: str) -> str:
        """Return `"PLACE: "` of a key, the last that named it; nothing for an argument."""
        parts = key.split(".")
        if _names(self.override, parts):
            return ""
        if _names(self.variables, parts):
            return f"{ENV_PREFIX}{'__'.join(parts[: 1 + (parts[0] == 'events')]).upper()}: "
        return f"{self.path}: " if _names(self.file, parts) else ""


def _names(source: object, parts: Sequence[str]) -> bool:
    """Tell whether a source says something about a key, or about all of what it is a part of."""
    if not isinstance(source, Mapping):
        return True
    return bool(parts) and parts[0] in source and _names(source[parts[0]], parts[1:])
