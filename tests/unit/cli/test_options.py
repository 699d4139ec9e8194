"""The tree of commands: each has help, examples and `--json`; every option says what it is, and its default."""

import argparse
import importlib
import re

import pytest

from kvoffload.cli.bench import BENCHES
from kvoffload.cli.feed import FEED_COMMANDS
from kvoffload.cli.main import COMMANDS, CommandParser
from kvoffload.cli.report import readable_bytes

TABLES = {("feed",): FEED_COMMANDS, ("bench",): BENCHES, (): COMMANDS}
GROUPS = {("bench",), ("feed",)}
LEAVES = {
    (*path, name): module
    for path, table in TABLES.items()
    for name, (module, _) in table.items()
    if (*path, name) not in GROUPS
}
WITHOUT_JSON: dict[tuple[str, ...], str] = {}
"""Commands without `--json`, each with its reason."""
SAME_NAME_OTHER_MEANING = {"--model": "plan reads a model's config.json; the feed's commands name a model"}
EXEMPT = (argparse._HelpAction, argparse._VersionAction, argparse._SubParsersAction)


def parser_of(path):
    module = importlib.import_module(LEAVES[path])
    parser = CommandParser(prog=f"kvoffload {' '.join(path)}")
    module.add_arguments(parser)
    return parser, module


def options_of(path):
    return [action for action in parser_of(path)[0]._actions if not isinstance(action, EXEMPT)]


def takes_value(action):
    return action.nargs != 0


@pytest.mark.parametrize("path", sorted(LEAVES), ids=" ".join)
def test_a_command_has_a_summary_a_description_examples_and_json(path):
    parser, module = parser_of(path)
    summary = TABLES[path[:-1]][path[-1]][1]
    assert summary
    assert summary[0].islower(), "one form: no sentence"
    description, _, examples = module.__doc__.partition("Examples:\n")
    assert description.strip().endswith(".")
    lines = examples.splitlines()
    assert lines
    assert all(line.startswith(f"  kvoffload {' '.join(path)}") for line in lines if line)
    assert ("--json" in parser._option_string_actions) != (path in WITHOUT_JSON)


@pytest.mark.parametrize("path", sorted(LEAVES), ids=" ".join)
def test_the_examples_of_a_command_are_understood_by_it(path):
    parser, module = parser_of(path)
    for line in module.__doc__.partition("Examples:\n")[2].splitlines():
        words = re.split(r"  +|\|", line.strip())[0].split()
        if "--help" not in words:
            parser.parse_args(words[1 + len(path) :])


@pytest.mark.parametrize("path", sorted(LEAVES), ids=" ".join)
def test_every_option_says_what_it_is_and_its_default_in_one_form(path):
    for action in options_of(path):
        name = action.option_strings[-1] if action.option_strings else action.dest
        help_text = (action.help or "") % vars(action) if action.help else ""
        assert help_text, f"{name} has no help"
        assert help_text[0].islower() or not help_text[0].isalpha() or help_text.startswith(("Dynamo", "N ")), help_text
        if not takes_value(action):
            assert action.default in {False, None, True}
            continue
        assert action.choices or re.fullmatch(r"[A-Za-z0-9_:=.,|%-]+", action.metavar or ""), f"{name} has no metavar"
        if action.required and action.option_strings:
            assert help_text.endswith("(required)"), help_text
            continue
        told = re.search(r"\(default ([^:].*)\)$", help_text)
        assert told, f"{name}: {help_text!r} does not end in its default"
        if isinstance(action.default, str | int | float) and action.default not in {"next", ""}:
            plain = str(action.default)
            sized = readable_bytes(action.default).replace(".0 ", "") if isinstance(action.default, int) else ""
            assert told[1] in {plain, sized, plain.removesuffix(".0")} or told[1].startswith(plain), help_text


def test_options_of_one_name_take_the_same_kind_of_value_in_every_command():
    kinds = {}
    for path in LEAVES:
        for action in options_of(path):
            for name in action.option_strings:
                shown = (action.metavar or "").removesuffix(",...")
                kinds.setdefault(name, {}).setdefault((takes_value(action), shown), []).append(" ".join(path))
    differing = {name: uses for name, uses in kinds.items() if len(uses) > 1 and name not in SAME_NAME_OTHER_MEANING}
    assert differing == {}


def test_options_that_mean_the_same_are_described_in_the_same_words():
    texts = {}
    for path in LEAVES:
        for action in options_of(path):
            if action.option_strings:
                name = action.option_strings[0]
                texts.setdefault(name, set()).add(re.sub(r" \(default.*| \(required\)", "", action.help % vars(action)))
    for name in ("--uvloop", "--repeat", "--replay", "--timeout", "--instance", "--partial-blocks", "--requests"):
        assert len(texts[name]) == 1, (name, texts[name])
