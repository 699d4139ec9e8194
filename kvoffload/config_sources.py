"""Where a configuration comes from: a file, then variables of the process; arguments are merged over both."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvoffload.config_errors import ENV_PREFIX, shown, unknown_key
from kvoffload.config_values import switch
from kvoffload.errors import ConfigError

# What Kubernetes injects into every pod for a Service whose name starts with "kvoffload".
_KUBERNETES_LINK = re.compile(
    r".*((_|^)SERVICE_(HOST|PORT)(_\w+)?|(_|^)PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)


def read_file(path: Path) -> dict[str, Any]:
    """Return the keys and values of a TOML or JSON file.

    Raises:
        ConfigError: It cannot be read, or holds no table.
    """
    if path.suffix not in (".toml", ".json"):
        raise ConfigError(f"configuration file {path} must end in .toml or .json; rename it")
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"{path} cannot be read: {why}; give the path of a .toml or .json file") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; correct it there") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a table of keys and values, such as gpu_block_size; got {shown(values)}")
    return values


def read_env(env: Mapping[str, str], keys: Mapping[str, object], events_keys: Mapping[str, object]) -> dict[str, Any]:
    """Return keys and values from `KVOFFLOAD_*` variables; those of other programs and of Kubernetes are passed over.

    Raises:
        ConfigError: A variable names no key, or is no text.
    """
    values: dict[str, Any] = {}
    events: dict[str, Any] = {}
    for name, text in env.items():
        rest = name.removeprefix(ENV_PREFIX)
        if rest == name or _KUBERNETES_LINK.fullmatch(rest):
            continue
        if not isinstance(text, str):
            raise ConfigError(f"{name} must be text, as all variables are; got {text!r}")
        first, *below = rest.lower().split("__")
        known = events_keys if below and first == "events" else keys
        leaf = below[0] if below and first == "events" else first
        if len(below) > (first == "events") or leaf not in known:
            raise ConfigError(f"{name}: {unknown_key('.'.join([first, *below]), known)}")
        value = None if text.strip().lower() in ("none", "null") else text
        if below:
            events[leaf] = value
        else:
            values[first] = value
    if events and ("events" not in values or switch(values["events"])):  # variables have no order: "off" is off
        values["events"] = events
    return values


def merge(values: dict[str, Any], source: Mapping[str, Any]) -> None:
    """Put a later source over an earlier one, tables key by key."""
    for key, value in source.items():
        below = values.get(key)
        if isinstance(value, Mapping) and isinstance(below, dict):
            merge(below, value)
        elif not (key == "events" and isinstance(below, dict) and switch(value)):  # "on" keeps what was said before
            values[key] = dict(value) if isinstance(value, Mapping) else value
