"""What README, docs and alerts name exists: metrics, commands and their options, keys, reasons, files."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest

import kvoffload
from kvoffload.cli.main import COMMANDS, CommandParser, add_commands
from kvoffload.config import EventsConfig, OffloadConfig
from kvoffload.metrics.catalog import CATALOG, LOAD_REASONS, SERIES, STORE_REASONS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RULES = [ROOT / "dashboards" / "alerts.yml", ROOT / "dashboards" / "metrics_intro.md"]
METRICS = {*SERIES, *(metric.full_name for metric in CATALOG)}
OTHERS_NAMES = {  # words of vLLM and PromQL
    "kv_aware", "kv_connector_extra_config", "kv_load_tiers", "reset_connector", "reset_prefix_cache",
    "reset_running_requests", "cached_tokens", "vllm_kvoffload_loads_total",
    "histogram_quantile",
}  # fmt: skip


def name_of(path):
    return str(path.relative_to(ROOT))


def code_spans(text):
    """Every inline code span, outside of fenced blocks; a line break in it is a space."""
    plain = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", plain)]


def command_lines(text):
    """Every `kvoffload ...`, from spans and from console blocks; variables of the shell stay as they are."""
    blocks = re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in re.split(r"\n|&&", block.replace("\\\n", " "))]
    spans = [span for span in code_spans(text) if "..." not in span]
    return [line.split(" #")[0].strip() for line in (*lines, *spans) if line.strip().startswith("kvoffload ")]


def words_of(tree):
    """Every identifier of a module, and every word of its strings (keys, reasons, metric names)."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name"):
            if isinstance(getattr(node, field, None), str):
                yield getattr(node, field)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 60:
            yield node.value


KNOWN = {
    word
    for folder in ("kvoffload", "docs/examples")
    for path in (ROOT / folder).rglob("*.py")
    for word in words_of(ast.parse(path.read_text()))
} | {module.stem for module in (ROOT / "kvoffload").rglob("*.py")}


def unknown_names(text):
    """Snake-case names in code spans, keyword arguments in them included, that the package does not have."""
    spans = code_spans(text)
    names = {span for span in spans if re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+)+", span)}
    names |= {found for span in spans for found in re.findall(r"\b([a-z]\w*) ?= ?(?!=)", span) if "--" not in span}
    names |= {found for span in spans for found in re.findall(r"\b([a-z]+(?:_[a-z0-9]+)*)\(", span)}
    return {name for name in names if name not in KNOWN | METRICS | OTHERS_NAMES}


def command_error(line):
    """Why the command line as it stands in a page is not accepted; None: it is."""
    parser = argparse.ArgumentParser(prog="kvoffload", exit_on_error=False)
    add_commands(parser, COMMANDS)
    words = shlex.split(line)[1:]
    command = parser
    while words and (subs := [a for a in command._actions if isinstance(a, argparse._SubParsersAction)]):
        if words[0] not in subs[0].choices:
            return f"{words[0]!r} is no command"
        command = subs[0].choices[words.pop(0)]
        if isinstance(command, CommandParser) and command.module_path is not None:
            importlib.import_module(command.module_path).add_arguments(command)
    known = set(command._option_string_actions)
    unknown = [word for word in words if word.startswith("--") and word.split("=")[0] not in known]
    return f"no option {unknown}" if unknown else None


@pytest.mark.parametrize("page", [*PAGES, *RULES], ids=name_of)
def test_every_metric_that_is_named_exists(page):
    named = re.findall(r"\bkvoffload_[a-z0-9_]+", page.read_text())
    assert [name for name in named if name not in METRICS] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_and_option_that_is_named_exists(page):
    wrong = {line: error for line in command_lines(page.read_text()) if (error := command_error(line)) is not None}
    assert wrong == {}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_key_argument_reason_and_method_that_is_named_exists(page):
    assert unknown_names(page.read_text()) == set()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_file_of_the_repository_that_is_named_exists(page):
    folders = "kvoffload|docs|tests|dashboards|schemas"
    named = [span for span in code_spans(page.read_text()) if re.fullmatch(rf"({folders})/[\w./-]+", span)]
    assert [span for span in named if not (ROOT / span).exists()] == []


def test_every_error_that_tells_of_operation_is_public():
    """The page of failures says what a caller may catch; that must not need a search for the module."""
    named = {name for name in code_spans((ROOT / "docs" / "failures.md").read_text()) if name.endswith("Error")}
    assert {"NoSpaceError", "TransferError"} <= named
    assert named - {"CancelledError"} <= set(kvoffload.__all__)


def test_the_page_of_failures_names_every_reason_that_a_result_can_give():
    spans = set(code_spans((ROOT / "docs" / "failures.md").read_text()))
    assert {*LOAD_REASONS, *STORE_REASONS} - {"other"} <= spans


def test_every_key_of_the_configuration_that_runbooks_and_help_name_exists():
    keys = {*OffloadConfig.model_fields, *EventsConfig.model_fields}
    text = (ROOT / "dashboards" / "alerts.yml").read_text() + " ".join(m.help + m.action for m in CATALOG)
    named = set(
        re.findall(r"\b((?:max|min|store|load|pending_wait|lease|drain|cpu_bytes|prefill)_[a-z_]*[a-z]\b)(?!_)", text)
    )
    assert {name for name in named if name not in keys | KNOWN} == set()


@pytest.mark.parametrize(
    ("text", "names"),
    [("`kvoffload_nope_total`", 1), ("`no_such_key`", 1), ("`store(sideways=1)`", 1), ("`copy_failed`", 0)],
)
def test_the_check_of_names_can_fail(text, names):
    assert len(unknown_names(text)) == names


@pytest.mark.parametrize("line", ["kvoffload fly", "kvoffload run --sideways", "kvoffload feed snippet --nope x"])
def test_the_check_of_commands_can_fail(line):
    assert command_error(line) is not None
    assert command_lines(f"`{line}`") == [line]
